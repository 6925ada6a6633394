"""A real HTTP server that takes what runs send to their webhook."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spark.settings import Webhook
from tests.http_server import Handler, HttpServer


class Receiver:
    """Answers with the given statuses in turn, the last of them from then on, and keeps what it was sent."""

    def __init__(self) -> None:
        self.statuses = [200]
        self.pause_s = 0.0
        self.received: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []

    def handler(self) -> type[Handler]:
        receiver = self

        class Answer(Handler):
            def respond(self, body: bytes) -> None:
                known = self.command, self.headers["idempotency-key"], json.loads(body or b"null")
                receiver.received.append(known)
                receiver.headers.append({name.lower(): text for name, text in self.headers.items()})
                time.sleep(receiver.pause_s)
                status = receiver.statuses.pop(0) if len(receiver.statuses) > 1 else receiver.statuses[0]
                self.send_response(status)
                self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

        return Answer


@contextmanager
def receiving() -> Iterator[tuple[Receiver, Webhook]]:
    """Serve in the context, on a path that is a secret."""
    made = Receiver()
    with HttpServer(made.handler()) as server:
        yield made, Webhook(f"{server.url}/secret")
