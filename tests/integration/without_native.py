"""`python -m tests.integration.without_native`: the service as it is where it was installed without a compiler."""

import runpy
import sys

if __name__ == "__main__":
    sys.modules["service.native.bodies"] = None  # type: ignore[assignment] # an import of it fails
    runpy.run_module("service", run_name="__main__", alter_sys=True)
