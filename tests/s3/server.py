"""A server with S3's protocol for the tests: a front with faults, in this process, before a backend."""

import http.client
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from werkzeug.serving import make_server

from tests.s3 import BUCKET

USER: Final = "tester"
PASSWORD: Final = "secret-of-tester"
WAIT_S: Final = 60.0


class Hold:
    """The first `count` PUTs of an object, which the server has received whole and does not yet carry out."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._arrived = 0
        self._changed = threading.Condition()
        self._released = threading.Event()

    def wait(self) -> None:
        """Wait until all of them have arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._arrived >= self._count, WAIT_S), "the request did not come"

    def release(self) -> None:
        self._released.set()

    def arrive(self) -> None:
        """Hold the request of this thread until it is released; later ones pass."""
        with self._changed:
            self._arrived += 1
            is_held = self._arrived <= self._count
            self._changed.notify_all()
        if is_held:
            assert self._released.wait(WAIT_S), "the request was not released"


class Server:
    """An S3 server on a free port, with one bucket.

    `backend`: carries out the requests (`tests.s3.backends`).

    `ignores_conditions`: PUTs succeed whatever their condition, as with servers that do not know it.
    """

    def __init__(self, backend: WSGIApplication) -> None:
        self.ignores_conditions = False
        self._backend = backend
        self._holds: dict[str, Hold] = {}
        self._lost: set[str] = set()
        self._refused: set[str] = set()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3", daemon=True)
        self._thread.start()
        assert self.request("PUT", "") == (200, b"")

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def settings(self) -> dict[str, str]:
        """Return the settings by which Hadoop opens the bucket, without repetitions that wait for long."""
        return {
            "fs.s3a.endpoint": f"http://127.0.0.1:{self.port}",
            "fs.s3a.endpoint.region": "us-east-1",
            "fs.s3a.path.style.access": "true",
            "fs.s3a.access.key": USER,
            "fs.s3a.secret.key": PASSWORD,
            "fs.s3a.attempts.maximum": "2",
            "fs.s3a.retry.limit": "2",
            "fs.s3a.retry.interval": "50ms",
        }

    @contextmanager
    def holding(self, name: str, count: int = 1) -> Iterator[Hold]:
        """Hold the next `count` PUTs of an object, until they are released or the context ends."""
        hold = self._holds[name] = Hold(count)
        try:
            yield hold
        finally:
            self._holds.pop(name, None)
            hold.release()

    def count(self, method: str, name: str) -> int:
        """Count the requests for an object, also those that were refused."""
        return self._requests[method, name]

    @contextmanager
    def refusing(self, name: str) -> Iterator[None]:
        """Answer each PUT of an object with 500, and carry none out."""
        self._refused.add(name)
        try:
            yield
        finally:
            self._refused.remove(name)

    def lose_reply(self, name: str) -> None:
        """Carry out the next PUT of an object, and cut its connection in place of the reply."""
        self._lost.add(name)

    def get(self, name: str) -> bytes | None:
        """Read an object; None if there is none."""
        status, body = self.request("GET", name)
        assert status in (200, 404)
        return body if status == 200 else None

    def request(self, method: str, name: str, body: bytes = b"", *, if_absent: bool = False) -> tuple[int, bytes]:
        """Send a request for the bucket (no name) or an object, and return status and body.

        `if_absent`: on the condition that there is no such object.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        signed = (
            f"AWS4-HMAC-SHA256 Credential={USER}/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        )
        try:
            headers = {"Authorization": signed} | ({"If-None-Match": "*"} if if_absent else {})
            connection.request(method, f"/{BUCKET}/{name}".rstrip("/"), body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        name = environ["PATH_INFO"].removeprefix(f"/{BUCKET}/")
        self._requests[environ["REQUEST_METHOD"], name] += 1
        if environ["REQUEST_METHOD"] != "PUT":
            name = ""
        if name in self._refused:
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return []
        if hold := self._holds.get(name):
            hold.arrive()
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        body = list(self._backend(environ, start_response))
        if name in self._lost:
            self._lost.remove(name)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return body
