"""An HTTP server on a free port of the loopback interface, in a thread, for a fake of another service."""

import threading
from abc import abstractmethod
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Handler(BaseHTTPRequestHandler):
    """A handler of GET and POST, with the whole body, that prints nothing."""

    @abstractmethod
    def respond(self, body: bytes) -> None:
        """Answer the request of `command` and `path`."""

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def _respond(self) -> None:
        self.respond(self.rfile.read(int(self.headers.get("content-length") or 0)))

    def answer(self, status: int, content: bytes, content_type: str = "application/json") -> None:
        """Send a whole response."""
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class HttpServer:
    """Serves requests by a handler, in a `with` block."""

    def __init__(self, handler: type[Handler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
