"""Tests that the checked-in OpenAPI document matches the code: routes, parameters, bodies, answers, problems."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from service.app import build_router
from service.claims.states import Delivered
from service.contract import Rules
from service.core.problems import KINDS, NOT_WRITTEN, Problem
from service.core.settings import Settings
from service.events.cloudevents import BATCHED, STRUCTURED, VERSION, CloudEvent
from service.events.event import BATCH_EVENTS_MAX, EventBody
from service.events.loaded_rules import LoadedRules
from service.events.offsets import POSITIONS_MAX, OffsetsBody, PositionBody
from service.events.produce import RequestKey
from service.events.produce_v2 import V2_FORMATS, V2Body, V2Header, V2Record
from service.events.produce_v3 import ENTRIES_MAX, V3Batch, V3Entry, V3Header, V3Record, decode_v3, v3_event
from service.events.schemas import Schemas
from service.http.application import openapi_document
from service.http.batch import BatchBody, MemberBody
from service.http.headers import LINES
from service.http.produce_answers import (
    error_of,
    render_error,
    render_offsets,
    render_v2,
    render_v3,
    render_v3_batch,
)
from service.http.responses import (
    PROBLEM_TYPE,
    committed_lines,
    join_results,
    key_lines,
    render_atomic,
    render_line,
    render_metadata,
    render_problem,
    render_results,
)
from service.pipeline.request import Committed, Quarantined, WriteResult

DOCUMENT = openapi_document()
PATHS = DOCUMENT["paths"]
REF = "#/components/schemas/{name}"
SCHEMAS = DOCUMENT["components"]["schemas"]
POSTS = [PATHS[path]["post"] for path in ("/events", "/events/batch")]
# The produce API, whose errors have another form.
PRODUCE = {path: operations for path, operations in PATHS.items() if path.startswith(("/topics", "/v3"))}
DELIVERY = PATHS["/sources/{name}"]["post"]
# Routes of FastAPI itself.
OWN_PATHS = {"/openapi.json"}

KEY = RequestKey("k", "")
THERE = Delivered(1, b"f" * 32, "topic", 2, 3, 4)
QUARANTINED = Quarantined((b"i" * 32, replace(THERE, refused="schema-mismatch value: why")), replayed=True)
COMMITTED = Committed(1, ((b"i" * 32, THERE),), replayed=True)


@pytest.fixture(scope="module")
def app() -> FastAPI:
    loaded = LoadedRules(Rules(), Schemas(Rules()), ())
    return build_router(Settings(instance="test"), loaded, lambda _: None).app


def resolved(part: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference, or return the part itself."""
    while "$ref" in part:
        place: dict[str, Any] = DOCUMENT
        for name in part["$ref"].removeprefix("#/").split("/"):
            place = place[name]
        part = place
    return part


def references(part: object) -> Iterator[str]:
    return (found[1] for found in re.finditer(r'"\$ref": "([^"]+)"', json.dumps(part)))


def answers_to(operation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {status: resolved(answer) for status, answer in operation["responses"].items()}


def check(schema: str, body: bytes | str) -> None:
    """Check that the body matches a schema of the document, and has its members and no others."""
    parsed = json.loads(body)
    Draft202012Validator({**SCHEMAS[schema], "components": DOCUMENT["components"]}).validate(parsed)
    alternatives = SCHEMAS[schema].get("oneOf", [SCHEMAS[schema]])
    assert parsed.keys() in [alternative["properties"].keys() for alternative in alternatives]


def test_the_document_has_the_routes_of_the_app_and_no_others(app: FastAPI) -> None:
    routes: dict[str, set[str]] = {}
    for route in app.routes:
        path = getattr(route, "path_format", "")
        if path not in OWN_PATHS and getattr(route, "include_in_schema", True):
            routes.setdefault(path, set()).update(getattr(route, "methods", set()) - {"HEAD"})
    assert {path: {method.upper() for method in operations} for path, operations in PATHS.items()} == routes


def test_the_document_has_the_parameters_of_each_get(app: FastAPI) -> None:
    """But Authorization, which OpenAPI has as a security scheme and ignores as a parameter."""
    for path, operations in FastAPI.openapi(FastAPI(routes=app.routes))["paths"].items():
        for method, made in operations.items():
            wanted = [(given["name"], given["in"], given["required"]) for given in made.get("parameters", [])]
            wanted = [given for given in wanted if given[0] != "authorization"]
            parameters = PATHS[path][method].get("parameters", [])
            assert [(given["name"], given["in"], given["required"]) for given in parameters] == wanted, path
            assert (
                PATHS[path][method]["responses"]["200"]["content"].keys() == made["responses"]["200"]["content"].keys()
            )


def test_each_reference_has_a_component_and_each_component_is_used() -> None:
    used = set(references(DOCUMENT))
    there = {
        f"#/components/{kind}/{name}"
        for kind, named in DOCUMENT["components"].items()
        if kind != "securitySchemes"
        for name in named
    }
    assert used == there
    ids = [operation["operationId"] for operations in PATHS.values() for operation in operations.values()]
    assert len(set(ids)) == len(ids)


def test_the_documented_bodies_are_the_structs_that_are_decoded() -> None:
    _, components = msgspec.json.schema_components([EventBody, MemberBody, CloudEvent], ref_template=REF)
    assert {name: SCHEMAS[name] for name in components} == components
    event, batch = (operation["requestBody"]["content"] for operation in POSTS)
    assert event.keys() == {"application/json", STRUCTURED, BATCHED, "*/*"}
    assert batch.keys() == {"application/json", LINES}
    cloudevents = event[BATCHED]["schema"]
    assert (cloudevents["minItems"], cloudevents["maxItems"]) == (0, BATCH_EVENTS_MAX)
    events = SCHEMAS["Batch"]["properties"]["events"]
    assert events["maxItems"] == BATCH_EVENTS_MAX
    positions = SCHEMAS["Offsets"]["properties"]["positions"]
    assert (positions["minItems"], positions["maxItems"]) == (1, POSITIONS_MAX)
    for name, body in (("Batch", BatchBody), ("Offsets", OffsetsBody), ("Position", PositionBody)):
        assert set(SCHEMAS[name]["properties"]) == set(body.__struct_fields__)
    assert resolved(event["application/json"]["schema"]) == SCHEMAS["EventBody"]
    assert resolved(event[STRUCTURED]["schema"]) == resolved(cloudevents["items"]) == SCHEMAS["CloudEvent"]
    assert resolved(batch[LINES]["schema"]) == resolved(events["items"]) == SCHEMAS["MemberBody"]


def test_each_attribute_of_a_cloudevent_that_is_read_is_documented_as_a_header() -> None:
    parameters = {given["name"]: given for given in POSTS[0]["parameters"]}
    looked_at = set(CloudEvent.__struct_fields__) - {"data", "data_base64", "time"}
    assert {name.removeprefix("ce-") for name in parameters if name.startswith("ce-")} == looked_at
    assert parameters["ce-specversion"]["description"].startswith(f"{VERSION};")
    assert not any(given.get("required") for given in parameters.values())


def test_each_problem_is_an_answer_to_a_post() -> None:
    codes: dict[str, list[str]] = {}
    for kind in KINDS.values():
        codes.setdefault(str(kind.status), []).append(kind.code)
    again = {str(kind.status) for kind in KINDS.values() if kind.retry_after_s is not None}
    for operation in (*POSTS, DELIVERY):
        problems = {status: answer for status, answer in answers_to(operation).items() if status >= "400"}
        assert {status: answer["description"].split(", ") for status, answer in problems.items()} == codes
        assert {status for status, answer in problems.items() if "headers" in answer} == again
        assert all(answers_to(operation)[status]["headers"].keys() == {"Retry-After"} for status in again)


def test_every_problem_is_documented_with_the_same_schema() -> None:
    for path, operations in PATHS.items():
        for operation in operations.values():
            for status, answer in answers_to(operation).items():
                if status >= "400" and path not in PRODUCE and answer["content"].keys() != {"application/json"}:
                    assert answer["content"] == {
                        PROBLEM_TYPE.decode(): {"schema": {"$ref": REF.format(name="Problem")}}
                    }
    check("Problem", render_problem(Problem(NOT_WRITTEN, "why"))[2])
    check("Problem", render_problem(QUARANTINED)[2])


def test_each_answer_validates_against_its_documented_schema() -> None:
    results: list[WriteResult] = [COMMITTED, Problem(NOT_WRITTEN, "why"), QUARANTINED]
    check("Metadata", render_metadata(COMMITTED.deliveries[0]))
    check("AtomicBatch", render_atomic(b"w" * 32, COMMITTED))
    check("Results", join_results([render_results(results)]))
    for result in results:
        check("ResultLine", render_line(result, "k"))
    check("ResultLine", render_line(Problem(NOT_WRITTEN, "why")))
    each, of_events = (answers_to(operation) for operation in reversed(POSTS))
    assert each["207"]["content"][LINES] == {"schema": {"$ref": REF.format(name="ResultLine")}}
    for answer in (each["207"], of_events["207"]):
        assert answer["content"]["application/json"] == {"schema": {"$ref": REF.format(name="Results")}}


def test_the_headers_of_answers_are_documented() -> None:
    lines = committed_lines("k", COMMITTED, 1).decode().splitlines()
    sent = {line.partition(":")[0] for line in lines} - {"content-type"}
    for operation in POSTS:
        assert {name.lower() for name in operation["responses"]["201"]["headers"]} >= sent
    of_key = {line.partition(":")[0] for line in key_lines("k", COMMITTED, 1).decode().splitlines()}
    assert {name.lower() for name in DELIVERY["responses"]["201"]["headers"]} == of_key
    accepted = POSTS[0]["responses"]["202"]["headers"]
    assert accepted.keys() == {"Location", "Idempotency-Key", "Preference-Applied"}


def test_each_operation_that_needs_a_caller_has_the_bearer_security_scheme() -> None:
    """As a security scheme: OpenAPI ignores parameters named Authorization."""
    scheme = DOCUMENT["components"]["securitySchemes"]["bearer"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    secured = {
        f"{method} {path}"
        for path, operations in PATHS.items()
        for method, operation in operations.items()
        if operation.get("security") == [{}, {"bearer": []}]
    }
    of_produce = {f"{method} {path}" for path, operations in PRODUCE.items() for method in operations}
    assert secured == {"post /events", "post /events/batch", "get /events/{key}", *of_produce}


def test_the_produce_api_is_documented_as_it_is_parsed_and_answered() -> None:
    v2, v3 = (SCHEMAS[name]["properties"].keys() for name in ("V2Body", "V3Record"))
    assert (list(v2), list(v3)) == ([*V2Body.__struct_fields__], [*V3Record.__struct_fields__])
    assert SCHEMAS["V2Record"]["properties"].keys() == set(V2Record.__struct_fields__)
    assert SCHEMAS["V2Header"]["properties"].keys() == set(V2Header.__struct_fields__)
    assert SCHEMAS["V3Header"]["properties"].keys() == set(V3Header.__struct_fields__)
    entries = SCHEMAS["V3Batch"]["properties"]
    assert (list(entries), entries["entries"]["maxItems"]) == ([*V3Batch.__struct_fields__], ENTRIES_MAX)
    assert list(SCHEMAS["V3Entry"]["properties"]) == [*V3Entry.__struct_fields__]
    formats = {media_type for media_type, format in V2_FORMATS.items() if not format.needs_schema}
    for path, operations in PRODUCE.items():
        for operation in (operations[method] for method in operations if method == "post"):
            taken = operation["requestBody"]["content"]
            assert taken.keys() == (formats if path.startswith("/topics") else {"application/json"})
    problem = Problem(NOT_WRITTEN, "why")
    check("V2Offsets", render_v2([render_offsets([COMMITTED, problem])]))
    check("ProduceError", render_error(error_of(problem)))
    fields = decode_v3(b'{"key":{"type":"STRING","data":"a"},"value":{"type":"JSON","data":1}}')
    record = v3_event(fields, 0, "topic", KEY, None)
    answer, error, _ = render_v3("c", [(record, COMMITTED), (record, problem)]).split(b"\r\n")
    check("V3Answer", answer)
    check("ProduceError", error)
    batch = json.loads(render_v3_batch("c", ["a", "b"], [record, record], [COMMITTED, problem]))
    check("V3BatchAnswer", json.dumps(batch))
    check("V3Success", json.dumps(batch["successes"][0]))
    check("V3Failure", json.dumps(batch["failures"][0]))
