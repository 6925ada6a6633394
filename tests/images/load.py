"""Clients that write one event after the other over connections that they keep, and note every answer."""

import http.client
import json
import threading
from collections import Counter
from dataclasses import dataclass, field

OK = 201


@dataclass
class Load:
    """This many clients, each with a connection of its own."""

    port: int
    topic: str
    clients: int
    committed: dict[str, int] = field(default_factory=dict)  # offset by key
    unanswered: dict[str, str] = field(default_factory=dict)  # the error, by key
    statuses: Counter[int] = field(default_factory=Counter)
    refused: int = 0  # connections: their events were not written
    _no_new: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(self.clients):
            thread = threading.Thread(target=self._client, args=(number,))
            thread.start()
            self._threads.append(thread)

    def no_new_connections(self) -> None:
        """Stop opening connections, as for a pod that is no endpoint any more; open connections stay."""
        self._no_new.set()

    def join(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)
        assert not any(thread.is_alive() for thread in self._threads)

    def _client(self, number: int) -> None:
        sent = 0
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            try:
                connection.connect()
            except OSError:
                self.refused += 1
                return
            while True:
                key = f"{number}-{sent}"
                sent += 1
                try:
                    closes = self._post(connection, key)
                except (OSError, http.client.HTTPException) as error:
                    self.unanswered[key] = repr(error)
                    closes = True
                if closes:
                    connection.close()
                    break
            if self._no_new.is_set():
                return

    def _post(self, connection: http.client.HTTPConnection, key: str) -> bool:
        """Write one event; returns whether the connection ends."""
        status, body, closes = post(connection, self.topic, key)
        self.statuses[status] += 1
        if status == OK:
            self.committed[key] = body["offset"]
        return closes


def post(connection: http.client.HTTPConnection, topic: str, key: str) -> tuple[int, dict[str, int], bool]:
    """Write one event; returns status, body, and whether the server closes the connection."""
    body = json.dumps({"topic": topic, "value": key})
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    connection.request("POST", "/events", body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read()), response.will_close
