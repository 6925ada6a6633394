"""Does for one pod what a kubelet and the endpoints of a service do: probes, and the shutdown."""

import http.client
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.images.tools import Container


class Kubelet:
    """Runs the probes of a container that serves on `port`, with the numbers of its manifest."""

    def __init__(self, container: Container, port: int) -> None:
        self.container = container
        self.port = port
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Kubelet":
        self.container.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.container.remove()

    def wait_started(self, within_s: float) -> None:
        """Run the startup probe until it succeeds, then keep the other two running.

        TimeoutError if that takes longer than `within_s` (the manifest allows for more).
        """
        deadline = time.monotonic() + within_s
        while not self.probe("startupProbe"):
            assert self.container.runtime is not None
            if self.container.runtime.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"not started\n{self.container.log.read_text()}")
            time.sleep(0.1)
        for name in ("livenessProbe", "readinessProbe"):
            thread = threading.Thread(target=self._keep, args=(name,))
            thread.start()
            self._threads.append(thread)

    def probe(self, name: str) -> bool:
        """Probe once: any status from 200 to 399 in time is a success."""
        spec = self.container.spec[name]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=spec.get("timeoutSeconds", 1))
        try:
            connection.request("GET", spec["httpGet"]["path"])
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _keep(self, name: str) -> None:
        while not self._stop.wait(self.container.spec[name]["periodSeconds"] / 5):  # a test waits for less time
            if not self.probe(name) and not self._stop.is_set():
                self.failures.append(name)

    def end(self, endpoints_changed: Callable[[], None]) -> tuple[int, float]:
        """Delete the pod: no new connections, preStop, SIGTERM, and the grace. Returns exit code and seconds taken.

        A subprocess.TimeoutExpired means that a kubelet would have killed it.
        """
        began = time.monotonic()
        grace_s = self.container.pod["terminationGracePeriodSeconds"]
        endpoints_changed()
        hook: Mapping[str, Any] = self.container.spec["lifecycle"]["preStop"]["sleep"]
        time.sleep(hook["seconds"])
        self._stop.set()
        self.container.signal(signal.SIGTERM)
        code = self.container.wait(grace_s - (time.monotonic() - began))
        return code, time.monotonic() - began
