"""What OpenAPI tells of the POSTs, which are answered below FastAPI and so are not seen by it."""

from typing import Any, Final

import msgspec

from service.core.problems import KINDS, Kind
from service.events import cloudevents
from service.events.event import BATCH_EVENTS_MAX, EventBody
from service.http.batch import LINES, MemberBody
from service.http.responses import PROBLEM_TYPE

# A caller is asked for where the rules name any: by its bearer token (RFC 6750), or not at all.
SECURITY: Final[list[dict[str, list[str]]]] = [{}, {"bearer": []}]
_BEARER: Final = {"type": "http", "scheme": "bearer", "description": "The token of a caller that the rules name"}

_REF: Final = "#/components/schemas/{name}"
_PLACE: Final = {
    "id": {"type": "string"},
    "topic": {"type": "string"},
    **{name: {"type": "integer"} for name in ("partition", "offset", "timestamp")},
}
_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}
# By their names, what headers of answers say.
_HEADERS: Final = {
    "Location": "Where the state of the key is told",
    "Idempotency-Key": "The key",
    "Idempotency-Key-Expires": "Until when it is remembered (IMF-fixdate)",
    "Idempotent-Replayed": "true where it was committed before, else absent",
    "Preference-Applied": "What of Prefer was done, if something was",
    "Retry-After": "After how many seconds to send it again",
}
_COMMITTED: Final = ("Location", "Idempotency-Key", "Idempotency-Key-Expires", "Idempotent-Replayed")
_PROBLEM: Final[dict[str, Any]] = {
    "type": "object",
    "description": "RFC 9457; `code` is what programs compare",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "status": {"type": "integer"},
        **{name: {"type": "string"} for name in ("type", "title", "detail", "code")},
    },
}
PROBLEM_CONTENT: Final[dict[str, Any]] = {PROBLEM_TYPE.decode(): {"schema": {"$ref": _REF.format(name="Problem")}}}

_MODES: Final = (
    "A body of `application/json` is one event in Fencepost's own form.\n\n"
    "CloudEvents 1.0 come in each mode of their HTTP binding. The content type tells a structured one "
    f"(`{cloudevents.STRUCTURED}`) and a batch (`{cloudevents.BATCHED}`). Of any other content type it is a binary one "
    "where there is a `ce-specversion`: the body is its data, the Content-Type its `datacontenttype`, and each other "
    "attribute, extensions too, a header `ce-` and its name, percent-encoded.\n\n"
    "No Content-Encoding is taken."
)
_CE_HEADERS: Final = {
    "specversion": f"{cloudevents.VERSION}; with this header the request is a binary-mode CloudEvent",
    "id": "Required of one",
    "source": "Required of one: a URI reference",
    "type": "Required of one; the topic, where ce-topic is not sent",
    "topic": "The topic",
    "partitionkey": "The record key",
}


def with_posts(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document with `POST /events` and `POST /events/batch` in it, and with the way to name a caller."""
    (event, member, cloud), components = msgspec.json.schema_components(
        [EventBody, MemberBody, cloudevents.CloudEvent], ref_template=_REF
    )
    told = document.setdefault("components", {})
    told.setdefault("schemas", {}).update(components, Problem=_PROBLEM)
    told["securitySchemes"] = {"bearer": _BEARER}
    paths = document["paths"]
    paths.setdefault("/events", {})["post"] = _post_event(event, cloud)
    paths.setdefault("/events/batch", {})["post"] = _post_batch(member)
    return document


def _post_event(event: dict[str, Any], cloud: dict[str, Any]) -> dict[str, Any]:
    key = "1 to 255 printable ASCII characters, bare or quoted; the same for each retry. CloudEvents do without: "
    prefer = "wait=N: up to N seconds for another's write of this key; respond-async: 202 once the key is claimed"
    accepted = {"id": {"type": "string"}, "state": {"const": "in_progress"}}
    return {
        "summary": "Write one event, or a batch of CloudEvents, exactly once",
        "description": _MODES,
        "security": SECURITY,
        "parameters": [
            {**_KEY, "description": f"{key}their source and id are the key"},
            {"name": "Prefer", "in": "header", "description": prefer, "schema": {"type": "string"}},
            *(
                {"name": f"ce-{name}", "in": "header", "description": told, "schema": {"type": "string"}}
                for name, told in _CE_HEADERS.items()
            ),
        ],
        "requestBody": {  # not required: a binary-mode CloudEvent may have no data
            "description": "One event; or one CloudEvent; or several; or (`*/*`) the data of a binary-mode CloudEvent",
            "content": {
                "application/json": {"schema": event},
                cloudevents.STRUCTURED: {"schema": cloud},
                cloudevents.BATCHED: {"schema": {**_list_of(cloud), "minItems": 0}},
                "*/*": {"schema": {"type": "string", "format": "binary"}},
            },
        },
        "responses": {
            "201": {
                **_json("Committed; with Idempotent-Replayed: true where it was before", _object(_PLACE)),
                "headers": _headers(*_COMMITTED, "Preference-Applied"),
            },
            "202": {
                **_json("The key is claimed; its Location tells the outcome", _object(accepted)),
                "headers": _headers("Location", "Idempotency-Key", "Preference-Applied"),
            },
            "207": _json("A result for each of several CloudEvents, in order", _results()),
            **_problems(),
        },
    }


def _post_batch(member: dict[str, Any]) -> dict[str, Any]:
    whole = _object({"id": {"type": "string"}, "results": {"type": "array", "items": _object(_PLACE)}})
    batch = {
        "type": "object",
        "required": ["events"],
        "properties": {"events": _list_of(member), "atomic": {"type": "boolean", "default": False}},
        "additionalProperties": False,
    }
    return {
        "summary": "Write many events, each for itself, or (atomic) all of them or none",
        "description": "No Content-Encoding is taken.",
        "security": SECURITY,
        "parameters": [
            {**_KEY, "description": "Of an atomic batch, as a whole; else each event has an idempotency_key"}
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": batch}, LINES: {"schema": member}},
        },
        "responses": {
            "201": {**_json("An atomic batch is committed", whole), "headers": _headers(*_COMMITTED)},
            "207": {
                "description": "A result for each event, in order; of lines, a line each as it comes to be known",
                "content": {"application/json": {"schema": _results()}, LINES: {"schema": _result()}},
            },
            **_problems(),
        },
    }


def _results() -> dict[str, Any]:
    return _object({"results": {"type": "array", "items": _result()}})


def _result() -> dict[str, Any]:
    told = _object({"status": {"const": 201}, **_PLACE, "replayed": {"type": "boolean"}})
    problem = {"$ref": _REF.format(name="Problem")}
    return {"oneOf": [told, _object({"status": {"type": "integer"}, "problem": problem})]}


def _problems() -> dict[str, Any]:
    kinds: dict[int, list[Kind]] = {}
    for kind in KINDS.values():
        kinds.setdefault(kind.status, []).append(kind)
    told: dict[str, Any] = {}
    for status, same in sorted(kinds.items()):
        told[str(status)] = {"description": ", ".join(kind.code for kind in same), "content": PROBLEM_CONTENT}
        if any(kind.retry_after_s is not None for kind in same):
            told[str(status)]["headers"] = _headers("Retry-After")
    return told


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"description": _HEADERS[name], "schema": {"type": "string"}} for name in names}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": BATCH_EVENTS_MAX}
