"""Hooks of schemathesis, which loads this module by the variable SCHEMATHESIS_HOOKS in its own process.

They put values that exist into the document, sign the deliveries of webhooks, leave out the token of some requests, and
note the status of each answer.
"""

import itertools
import json
from pathlib import Path
from typing import Any, Final

import schemathesis

from tests.edge.world import TOKEN, World, signature_of

_WORLD: Final = World.decode()
_NUMBERS: Final = itertools.count(1)
# One of so many requests has another token: 401.
_UNAUTHORIZED_EACH: Final = 50


@schemathesis.hook
def before_load_schema(_: Any, raw_schema: dict[str, Any]) -> None:
    """Narrow the document."""
    _WORLD.narrow(raw_schema)


@schemathesis.serializer("application/x-ndjson")
def as_line(_: schemathesis.SerializationContext, value: Any) -> bytes:
    """Send a value as a line."""
    return json.dumps(value).encode() + b"\n"


@schemathesis.deserializer("application/x-ndjson")
def of_lines(_: schemathesis.DeserializationContext, response: schemathesis.Response) -> Any:
    """Read the results of a stream, one on each line."""
    return [json.loads(line) for line in response.content.splitlines()]


@schemathesis.hook
def before_call(_: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Add the token or, to a delivery, its signature and its key.

    Of the requests without a fault on purpose two in three obey the rules that no schema can say, and have a key of
    their own; the others may repeat keys.
    """
    number = next(_NUMBERS)
    case.headers["Authorization"] = f"Bearer {TOKEN if number % _UNAUTHORIZED_EACH else 'of nobody'}"
    is_positive = case.meta is not None and case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE
    if is_positive and number % 3:
        _obey_rules(case, number)
    if case.path.startswith("/sources/"):
        case.headers["X-GitHub-Delivery"] = f"delivery-{number}"
        body = case.body if isinstance(case.body, bytes) else b""
        case.headers.update(signature_of(str(case.path_parameters.get("name")), body))


def _obey_rules(case: Any, number: int) -> None:
    """Make a request one that is written, to a topic that exists.

    The headers of a binary-mode CloudEvent would make one of every request to /events. The document cannot narrow them:
    an event in structured mode is written whatever they say. A batch has no key, unless it is atomic: its events have.
    """
    body = case.body if isinstance(case.body, dict) else {}
    case.headers["Idempotency-Key"] = f"edge-{number}"
    for name in [name for name in case.headers if name.lower().startswith("ce-")]:
        del case.headers[name]
    if case.path == "/events" and case.media_type == "*/*":
        of_event = {"specversion": "1.0", "id": f"{number}", "source": "edge", "type": "edge", "topic": _WORLD.topic}
        case.headers.update({f"ce-{name}": value for name, value in of_event.items()})
    is_of_own_keys = case.path == "/events/batch" and not body.get("atomic")
    if is_of_own_keys or case.media_type == "application/cloudevents-batch+json":
        del case.headers["Idempotency-Key"]
        case.headers.pop("Repeatability-Request-ID", None)
    if "topic" in case.path_parameters:
        case.path_parameters["topic"] = _WORLD.topic
    value = {"type": "STRING", "data": "a"} if case.path.startswith("/v3") else "AAAA"
    for event in body.get("events") or body.get("records") or body.get("entries") or [body]:
        if isinstance(event, dict) and "specversion" not in event:
            _obey_rules_of_events(event, value, number)
            if "events" in body:
                event["idempotency_key"] = None if body.get("atomic") else f"edge-{next(_NUMBERS)}"
            if "entries" in body:
                event["id"] = f"entry-{next(_NUMBERS)}"


def _obey_rules_of_events(event: dict[str, Any], value: object, number: int) -> None:
    """Let an event have a value, and not two; it is no tombstone, which needs a key."""
    if "topic" in event:
        event["topic"] = _WORLD.topic
    if event.get("value_base64") is None or number % 2:
        event.pop("value_base64", None)
        if event.get("value") is None:
            event["value"] = value
    else:
        event.pop("value", None)


@schemathesis.hook
def after_call(_: Any, case: Any, response: Any) -> None:
    """Note the status."""
    with Path(_WORLD.answers).open("a") as answers:
        answers.write(f"{case.operation.label}\t{response.status_code}\n")
