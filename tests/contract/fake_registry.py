"""A Schema Registry in this process: the part of Confluent's API that the service uses, over HTTP on a free port."""

import base64
import json
import re
import threading
import time
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.http_server import Handler, HttpServer

Answer = tuple[int, Any]


class FakeRegistry(HttpServer):
    """A registry, whose failures a test can plan.

    `status`: what it answers to everything, if not 0. `answers`: bodies by path. `delay_s`: how long each answer takes.
    `closes`: whether it closes connections in place of answers. `requests`: those that it got, as "METHOD /path".
    """

    def __init__(self, user: str = "", password: str = "") -> None:
        self.status = 0
        self.answers: dict[str, bytes] = {}
        self.delay_s = 0.0
        self.closes = False
        self.requests: list[str] = []
        self._credentials = base64.b64encode(f"{user}:{password}".encode()).decode() if user else ""
        self._schemas: list[dict[str, Any]] = []  # the id is the index, from 1
        self._subjects: dict[str, list[int]] = {}  # ids by version, from 1
        self._lock = threading.Lock()
        registry = self

        class RegistryHandler(Handler):
            protocol_version = "HTTP/1.1"

            def respond(self, body: bytes) -> None:
                if registry.closes:
                    registry.requests.append(f"{self.command} {self.path}")
                    self.close_connection = True
                    return
                authorization = self.headers.get("authorization", "")
                status, answer = registry.answer(
                    self.command, self.path, json.loads(body) if body else None, authorization
                )
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.answer(status, content, "application/vnd.schemaregistry.v1+json")

        super().__init__(RegistryHandler)

    def forget(self, subject: str) -> None:
        """Delete a subject."""
        with self._lock:
            del self._subjects[subject]

    def answer(self, method: str, target: str, body: Any, authorization: str) -> Answer:
        """Answer a request as a registry does, or as the test has planned."""
        with self._lock:
            self.requests.append(f"{method} {target}")
        time.sleep(self.delay_s)
        if target in self.answers:
            return 200, self.answers[target]
        if self.status:
            return self.status, {"error_code": self.status, "message": "planned"}
        if self._credentials and authorization != f"Basic {self._credentials}":
            return 401, {"error_code": 401, "message": "Unauthorized"}
        path = [unquote(part) for part in urlsplit(target).path.split("/")[1:]]
        with self._lock:
            match method, path:
                case "GET", ["schemas", "types"]:
                    return 200, ["JSON", "PROTOBUF", "AVRO"]
                case "GET", ["schemas", "ids", id]:
                    return self._by_id(int(id))
                case "GET", ["subjects", subject, "versions", version]:
                    return self._version(subject, version)
                case "POST", ["subjects", subject]:
                    return self._look_up(subject, _normal(body))
                case "POST", ["subjects", subject, "versions"]:
                    return self._register(subject, _normal(body))
        return 404, b"no such path"

    def _by_id(self, id: int) -> Answer:
        if not 0 < id <= len(self._schemas):
            return 404, {"error_code": 40403, "message": f"Schema {id} not found"}
        return 200, self._schemas[id - 1]

    def _version(self, subject: str, version: str) -> Answer:
        ids = self._subjects.get(subject)
        if ids is None:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        number = len(ids) if version == "latest" else int(version)
        if not 0 < number <= len(ids):
            return 404, {"error_code": 40402, "message": f"Version {version} not found."}
        return 200, {"subject": subject, "id": ids[number - 1], "version": number, **self._schemas[ids[number - 1] - 1]}

    def _look_up(self, subject: str, schema: dict[str, Any]) -> Answer:
        ids = self._subjects.get(subject)
        if ids is None:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        for version, id in enumerate(ids, start=1):
            if self._schemas[id - 1] == schema:
                return 200, {"subject": subject, "id": id, "version": version, **schema}
        return 404, {"error_code": 40403, "message": "Schema not found"}

    def _register(self, subject: str, schema: dict[str, Any]) -> Answer:
        if not _is_readable(schema):
            return 422, {"error_code": 42201, "message": "Invalid schema"}
        if schema not in self._schemas:
            self._schemas.append(schema)
        id = self._schemas.index(schema) + 1
        versions = self._subjects.setdefault(subject, [])
        if id not in versions:
            versions.append(id)
        return 200, {"id": id}


def _normal(body: Any) -> dict[str, Any]:
    """Drop what is the default, as the registry does."""
    schema = {"schema": body["schema"]}
    if body.get("schemaType", "AVRO") != "AVRO":
        schema["schemaType"] = body["schemaType"]
    if body.get("references"):
        schema["references"] = body["references"]
    return schema


def _is_readable(schema: dict[str, Any]) -> bool:
    if schema.get("schemaType") == "PROTOBUF":
        return re.search(r"\bmessage\b", schema["schema"]) is not None
    try:
        json.loads(schema["schema"])
    except ValueError:
        return False
    return True
