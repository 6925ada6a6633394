"""Drives a headless Chromium through its pipe (Chrome DevTools Protocol, NUL-separated JSON)."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from deploy.console import StackError
from deploy.install import debian

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ANSWER_S: Final = 60.0


def find() -> str | None:
    """Return the path of the browser, None without a browser."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def ensure() -> str:
    """Find the browser, or install it from Debian's packages if that is possible.

    Raises:
        StackError: there is none and it cannot be installed; the text says what to install.
    """
    if found := find():
        return found
    if debian.installable():
        debian.install("chromium", "a browser")
        if found := find():
            return found
    raise StackError("no Chromium here: please install it (on Debian: apt-get install chromium)")


class Page:
    """One tab. `problems`: console errors, exceptions, and requests that the security policy refused."""

    def __init__(self, pipe: "_Pipe") -> None:
        self._pipe = pipe
        self.problems: list[str] = []
        self.requested: list[str] = []
        target = pipe.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = pipe.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command to the tab, and return its result."""
        answer = self._pipe.call(method, self._session, **parameters)
        self._take_events()
        return answer

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Show a file in a window of this width (CSS pixels), in light or in dark, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + ANSWER_S
        while self.value(f"location.href === {json.dumps(path.as_uri())} && document.readyState") != "complete":
            assert time.monotonic() < deadline, f"{path} was not loaded"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """Return the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def printed(self, path: Path) -> None:
        """Return the printed page as PDF."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    def _take_events(self) -> None:
        for event in self._pipe.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                self.problems.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
        self._pipe.events.clear()


class _Pipe:
    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._write, content) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            got = os.read(self._read, 1 << 20)
            assert got, "Chromium ended"
            self._buffer += got
        one, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message


@contextmanager
def opened(profile: Path) -> Iterator[Page]:
    """Open a tab of a new Chromium, with its files in `profile` and without network."""
    ours_read, theirs_write = os.pipe()
    theirs_read, ours_write = os.pipe()
    # Chromium reads commands from file descriptor 3 and answers on 4.
    high_read, high_write = (fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (theirs_read, theirs_write))

    def move_pipes() -> None:
        os.dup2(high_read, 3)
        os.dup2(high_write, 4)

    command = [ensure(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--hide-scrollbars"]
    command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            command, preexec_fn=move_pipes, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    for fd in (theirs_read, theirs_write, high_read, high_write):
        os.close(fd)
    try:
        yield Page(_Pipe(ours_write, ours_read))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(ours_write)
        os.close(ours_read)
