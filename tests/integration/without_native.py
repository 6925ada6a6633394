"""`python -m tests.integration.without_native`: runs the service as if it had been installed without a compiler."""

import runpy
import sys

if __name__ == "__main__":
    sys.modules["service.native.bodies"] = None  # type: ignore[assignment] # an import of it fails
    runpy.run_module("service", run_name="__main__", alter_sys=True)
