"""Tests the routes beside `POST /events`, without Kafka and Redis: methods, heads, problems, documentation."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urljoin

import httpx
import pytest
from jsonschema import Draft202012Validator

from service.http.application import openapi_document
from service.http.responses import location_of
from tests.unit.http.whole_service import serving

PROBES = ["/livez", "/readyz", "/startupz", "/metrics"]


@pytest.fixture(params=["direct", "asgi"])
async def http(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a whole service without Kafka and Redis."""
    async with (
        serving(request.param) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10.0) as client,
    ):
        yield client


def assert_problem(response: httpx.Response, status: int, code: str) -> None:
    problem = response.json()
    assert (response.status_code, problem["status"], problem["code"]) == (status, status, code)
    assert response.headers["content-type"] == "application/problem+json"
    assert set(problem) == {"type", "title", "status", "detail", "code"}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/events", "POST"),
        ("PUT", "/events", "POST"),
        ("OPTIONS", "/events", "POST"),
        ("PUT", "/events/batch", "GET, HEAD, POST"),  # it is a key too, whose state can be requested
        ("DELETE", "/events/k", "GET, HEAD"),
        ("POST", "/events/", "GET, HEAD"),
        ("POST", "/livez", "GET, HEAD"),
        ("PATCH", "/metrics", "GET, HEAD"),
        ("POST", "/docs", "GET, HEAD"),
    ],
)
async def test_an_unsupported_method_is_answered_405_with_the_allowed_ones(
    http: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    response = await http.request(method, path)
    assert_problem(response, 405, "method-not-allowed")
    assert response.headers["allow"] == allowed
    assert response.json()["detail"] == f"{method}: use {allowed}"


async def said(http: httpx.AsyncClient, request: bytes) -> list[httpx.Response]:
    """Send requests over one connection, which the last one ends; returns all that is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
    writer.write(request)
    answers: list[httpx.Response] = []
    async with asyncio.timeout(5.0):
        while not answers or answers[-1].headers.get("connection") != "close":
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).strip().splitlines()
            headers = dict(line.split(b": ", 1) for line in lines)
            body = await reader.readexactly(int(headers[b"content-length"]))
            answers.append(httpx.Response(int(first.split()[1]), headers=[*headers.items()], content=body))
    writer.close()
    return answers


POSTED = b"POST %b HTTP/1.1\r\n%bcontent-length: 2\r\n\r\n{}"
LAST = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("hosts", [b"", b"host: x\r\nhost: y\r\n", b"Host: x\r\nhOST: x\r\n"])
async def test_a_request_names_its_host_once(http: httpx.AsyncClient, hosts: bytes) -> None:
    """RFC 9112, section 3.2."""
    wrong = [POSTED % (path, hosts) for path in (b"/events", b"/events/batch", b"/livez")]
    wrong += [b"GET %b HTTP/1.1\r\n%b\r\n" % (path, hosts) for path in (b"/livez", b"/events/k", b"/nowhere")]
    *answers, last = await said(http, b"".join(wrong) + LAST)
    assert last.status_code == 200
    assert len(answers) == len(wrong)
    for answer in answers:
        assert_problem(answer, 400, "invalid-http")
        assert answer.json()["detail"].startswith("Host: ")


async def test_http_1_0_names_its_host_at_most_once(http: httpx.AsyncClient) -> None:
    old = b"GET /livez HTTP/1.0\r\n%b\r\n"
    assert [answer.status_code for answer in await said(http, old % b"")] == [200]
    assert [answer.status_code for answer in await said(http, old % b"host: x\r\nhost: x\r\n")] == [400]
    (answer,) = await said(http, b"POST /events HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}")
    assert_problem(answer, 415, "unsupported-media-type")


CODED = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: %b\r\n\r\n2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize("codings", [b"gzip, chunked", b"identity,chunked", b"gzip\r\ntransfer-encoding: chunked"])
async def test_a_body_in_a_form_that_is_not_known_is_refused(http: httpx.AsyncClient, codings: bytes) -> None:
    """RFC 9112, section 6.1: the parser knows where the body ends, and not its coding."""
    paths = (b"/events", b"/events/batch", b"/livez")
    *answers, last = await said(http, b"".join(CODED % (path, codings) for path in paths) + LAST)
    assert last.status_code == 200
    assert len(answers) == len(paths)
    for answer in answers:
        assert_problem(answer, 501, "unsupported-coding")


@pytest.mark.parametrize(
    "line",
    [b"GET /livez", b"POST /livez", b"PUT /events", b"POST /nowhere", b"POST /sources/none", b"POST /consumers/c"],
)
async def test_an_answer_before_the_body_is_asked_for_ends_the_connection(http: httpx.AsyncClient, line: bytes) -> None:
    """Else the next request, perhaps of another client of a proxy, would be taken for the body that was left out."""
    asked = b"%b HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1000\r\n\r\n" % line
    (answer,) = await said(http, asked + LAST)
    assert answer.status_code in (200, 404, 405)


async def test_the_name_of_a_coding_is_the_same_in_any_case(http: httpx.AsyncClient) -> None:
    answer, _ = await said(http, CODED % (b"/events", b"\tCHUNKED ") + LAST)
    assert_problem(answer, 415, "unsupported-media-type")


async def test_head_is_get_without_a_body(http: httpx.AsyncClient) -> None:
    """On one connection: a body that was sent anyway would be taken for the next response."""
    for path in [*PROBES, "/events", "/events/", "/nowhere", "/openapi.json"]:
        head, get = await http.head(path), await http.get(path)
        assert head.content == b""
        assert (head.status_code, head.headers["content-type"]) == (get.status_code, get.headers["content-type"]), path
        assert head.headers.get("allow") == get.headers.get("allow")
        assert get.content


async def test_an_unknown_path_is_answered_404(http: httpx.AsyncClient) -> None:
    for path in ("/nowhere", "/", "/livez/", "/problems/none"):
        assert_problem(await http.get(path), 404, "not-found")
    assert_problem(await http.post("/nowhere"), 404, "not-found")


async def test_a_percent_encoded_path_is_decoded_before_it_is_matched(http: httpx.AsyncClient) -> None:
    """RFC 3986, section 6.2.2.2."""
    for path in ("/events", "/event%73"):
        assert_problem(await http.post(path), 415, "unsupported-media-type")
    assert_problem(await http.get("/events/"), 400, "invalid-key")


@pytest.mark.parametrize("key", [".", ".."])
async def test_a_key_that_a_path_cannot_carry_is_located_by_a_query(http: httpx.AsyncClient, key: str) -> None:
    """Clients remove these segments from a path (RFC 3986, section 5.2.4)."""
    location = location_of(key).decode()
    assert urljoin("http://host/events", location) == f"http://host{location}"
    assert_problem(await http.get(location), 503, "store-incomplete")  # its key is valid: only the store is missing


async def test_the_document_is_served(http: httpx.AsyncClient) -> None:
    assert (await http.get("/openapi.json")).json() == openapi_document()
    assert "url: 'openapi.json'" in (await http.get("/docs")).text


async def test_the_media_types_of_the_probes_answers_are_documented(http: httpx.AsyncClient) -> None:
    paths = openapi_document()["paths"]
    for path in PROBES:
        answer = await http.get(path)
        (media_type,) = paths[path]["get"]["responses"][str(answer.status_code)]["content"]
        assert media_type == answer.headers["content-type"], path


async def test_problems_are_documented_as_they_are(http: httpx.AsyncClient) -> None:
    problem = Draft202012Validator(openapi_document()["components"]["schemas"]["Problem"])
    for answer in (await http.post("/events"), await http.get("/events/"), await http.get("/problems/none")):
        problem.validate(answer.json())
    assert not problem.is_valid({"type": "/problems/internal", "title": "x", "status": 500, "detail": "x"})
