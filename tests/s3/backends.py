"""The S3 servers behind `tests.s3.server.Server`: moto in this process, and S3Proxy in a process of its own."""

import http.client
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from deploy import places
from deploy.install import jars, java
from deploy.stack.ports import free_port
from deploy.stack.process import Process
from tests.s3 import LOCK

_START_S: Final = 60.0
_REQUEST_S: Final = 60.0
# Headers of one connection, which are not passed on.
_OF_CONNECTION: Final = {"connection", "expect", "keep-alive", "transfer-encoding"}


class Moto:
    """moto, in this process.

    It carries out one request at a time, so that a conditional PUT is one step, as it is in S3: moto alone checks the
    condition and writes in two steps.
    """

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._one = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with self._one:
            return list(self._moto(environ, start_response))


class S3Proxy(Process):
    """S3Proxy, which carries out requests concurrently, and keeps each object as a file.

    A conditional PUT writes a file and links it to the object's name: link(2) fails if that name exists.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("s3proxy", folder)
        self.port = free_port()

    def start(self) -> None:
        """Start S3Proxy, and wait until it answers. Raises StackError."""
        objects = self.folder / "objects"
        objects.mkdir(parents=True)
        settings = self.folder / "s3proxy.properties"
        settings.write_text(
            f"s3proxy.endpoint=http://127.0.0.1:{self.port}\n"
            "s3proxy.authorization=none\n"
            "jclouds.provider=filesystem\n"
            f"jclouds.filesystem.basedir={objects}\n"
        )
        (program,) = jars.read_lock("s3proxy", LOCK)
        command: list[str | Path] = [java.home() / "bin" / "java", "-Xmx512m", "-XX:TieredStopAtLevel=1"]
        command += ["-jar", program.path, "--properties", settings]
        self.spawn(command, env=places.hermetic_environment())
        self.wait_until(self._answers, _START_S)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_REQUEST_S)
        try:
            body = environ["wsgi.input"].read()
            connection.request(environ["REQUEST_METHOD"], environ["RAW_URI"], body, dict(_headers(environ)))
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        headers = [item for item in response.getheaders() if item[0].lower() not in _OF_CONNECTION]
        if response.getheader("Content-Length") is None:
            headers.append(("Content-Length", str(len(content))))
        start_response(f"{response.status} {response.reason}", headers)
        return [content]

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _headers(environ: WSGIEnvironment) -> Iterator[tuple[str, str]]:
    """Restore the headers of a request."""
    for key, value in environ.items():
        name = key.removeprefix("HTTP_").replace("_", "-").lower()
        is_header = key.startswith("HTTP_") or (key in ("CONTENT_TYPE", "CONTENT_LENGTH") and value)
        if is_header and name not in _OF_CONNECTION:
            yield name, value


@contextmanager
def running(name: str, folder: Path) -> Iterator[WSGIApplication]:
    """Start a server by its name; `folder` gets its files."""
    if name == "s3proxy":
        with S3Proxy(folder) as found:
            yield found
    else:
        yield Moto()
