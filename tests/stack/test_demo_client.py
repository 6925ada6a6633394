"""Tests the demo's client: one key for all attempts of an event; a final refusal is a mistake."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deploy.demo import client as subject
from deploy.demo.client import Client, Place
from deploy.demo.flights import Flight, flights

EVENT = Flight(key="2013-01-01/UA1545/EWR", record_key="UA1545", value='{"flight":1545}')
BODY = b'{"id":"00","topic":"flights","partition":2,"offset":7,"timestamp":0}'


def _answer(status: int, body: bytes = b"{}", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


CREATED = _answer(201, BODY)
REPLAYED = _answer(201, BODY, Idempotent_Replayed="true")
BROKEN_OFF = b"HTTP/1.1 201 X\r\nContent-Length: 100\r\n\r\nhalf"


class Server:
    """Answers with the next bytes of a script; empty ones close the connection. Keeps the keys of the requests."""

    def __init__(self, script: list[bytes]) -> None:
        self._script = iter(script)
        self.keys: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
                await reader.readexactly(int(headers["Content-Length"]))
                self.keys.append(headers["Idempotency-Key"])
                answer = next(self._script)
                writer.write(answer)
                if answer in (b"", BROKEN_OFF):
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture(autouse=True)
def _no_pauses_and_no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_BACKOFF_S", (0.0, 0.0))
    monkeypatch.setattr(subject, "AGAIN", 0.0)


async def _send(script: list[bytes]) -> tuple[Server, Client]:
    server = Server(script)
    async with server.listen() as url:
        client = Client([url], "flights")
        await client.send([EVENT])
    return server, client


async def test_the_demo_client_retries_with_the_same_key_until_the_outcome_is_known() -> None:
    script = [b"", BROKEN_OFF, _answer(409, Retry_After="1"), _answer(503, Retry_After="1"), _answer(504), CREATED]
    server, client = await _send(script)
    assert server.keys == [EVENT.key] * len(script)
    assert client.tally.answers == {EVENT.key: Place(2, 7)}
    assert client.tally.errors == {"no answer": 2, "409": 1, "503": 1, "504": 1}
    assert client.tally.mistakes == []


async def test_a_refusal_is_final_and_a_mistake() -> None:
    server, client = await _send([_answer(422)])
    assert len(server.keys) == 1
    assert client.tally.answers == {}
    assert client.tally.mistakes == [f"{EVENT.key} was refused: 422 b'{{}}'"]


async def test_the_demo_client_gives_up_on_an_event_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_GIVE_UP_S", 0.0)
    _, client = await _send([_answer(503)])
    assert client.tally.mistakes == [f"{EVENT.key} had no answer after 0 s: 503"]


@pytest.mark.parametrize(
    ("second", "mistakes"),
    [(REPLAYED, 0), (CREATED, 1), (_answer(201, BODY.replace(b"7", b"8"), Idempotent_Replayed="true"), 1)],
    ids=["the same", "not said to be a replay", "another offset"],
)
async def test_an_event_sent_again_must_get_the_same_answer(
    second: bytes, mistakes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "AGAIN", 1.0)
    server, client = await _send([CREATED, second])
    assert server.keys == [EVENT.key] * 2
    assert len(client.tally.mistakes) == mistakes


async def test_the_demo_client_reports_when_a_share_of_its_events_is_settled() -> None:
    server = Server([CREATED] * 10)
    async with server.listen() as url:
        client = Client([url], "flights")
        waiting = asyncio.create_task(client.settled(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        await client.send([EVENT])
        await asyncio.wait_for(waiting, 5)


def test_the_flights_are_real_and_have_a_key_each() -> None:
    first, *others = flights(0, 1000)
    assert first.key == "2013-01-01/UA1545/EWR"
    assert '"dep_delay":2,' in first.value
    assert len({each.key for each in others}) == 999
