"""Tests calls without a reply, with errors, and with half a reply: refused before they ran, or perhaps still to run.

The log and /readyz must name an error without text too.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog

from service.claims import redis_connections
from service.claims import redis_store as module
from service.claims.keys import StoreGeneration
from service.claims.redis_store import ERRORS, RedisKeys
from service.claims.state_codec import pack
from service.claims.states import Delivered, Outcome
from service.core.metrics import Telemetry
from service.core.problems import Fenced, StoreAway, StoreBug, StoreLost, StoreUnanswered
from tests.unit.fakes import until
from tests.unit.scrape import sample


class Mute:
    """A connection that takes what is sent, and never replies."""

    is_connected = True

    async def can_read(self) -> bool:
        return False

    async def send_packed_command(self, command: bytes, check_health: bool) -> None: ...

    async def read_response(self) -> None:
        await asyncio.sleep(60)

    async def disconnect(self, nowait: bool = False) -> None: ...


# A busy machine may reply late, so only the silent connection has a short timeout.
PATIENT_S = 5.0
BRIEF_S = 0.05
UNANSWERED_S = 1.0  # for a call that is not answered, and the next one, which is


def keys_at(port: int, timeout_s: float = PATIENT_S, telemetry: Telemetry | None = None) -> RedisKeys:
    return RedisKeys(
        f"redis://127.0.0.1:{port}/0",
        "test",
        retention_ms=60_000,
        least_left_ms=0,
        lease_ttl_ms=300,
        timeout_s=timeout_s,
        telemetry=telemetry or Telemetry(),
    )


async def test_a_server_that_accepts_and_is_silent_is_store_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts; nobody reads
        keys = keys_at(server.getsockname()[1], BRIEF_S)
        with pytest.raises(StoreAway, match=r"^Redis does not answer: \w+"):
            await keys.who()


async def test_a_server_that_falls_silent_during_a_call_is_store_unanswered() -> None:
    keys: Any = keys_at(1, BRIEF_S)
    await keys._connections.give_back(Mute(), usable=True)
    with pytest.raises(StoreUnanswered, match=r"^Redis did not answer: \w+"):
        await keys.who()


class Server:
    """Answers each script with the next of `answers`: None is silence, b"" ends the connection."""

    def __init__(self) -> None:
        self.answers: deque[bytes | None] = deque()
        self.asked: list[tuple[int, bytes, bytes]] = []  # connection, command, operation
        self.connections = self.open = self.most_open = 0
        self.port = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        number = self.connections
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                count = int((await reader.readuntil(b"\r\n"))[1:])
                words = []
                for _ in range(count):
                    size = int((await reader.readuntil(b"\r\n"))[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                if not words[0].startswith(b"EVAL"):
                    writer.write(b"+OK\r\n")
                    continue
                self.asked.append((number, words[0], words[4]))
                answer = self.answers.popleft()
                if answer == b"":
                    break
                writer.write(answer or b"")
        self.open -= 1
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    fake = Server()
    server = await asyncio.start_server(fake.talk, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    yield fake
    server.close()


def error(text: str) -> bytes:
    return f"-{text}\r\n".encode()


OK = b"*1\r\n$2\r\nOK\r\n"
HALF = b"*2\r\n$2\r\nOK"
SILENT = (None, HALF)  # the rest of the reply never comes
APPLIED = b"*2\r\n$2\r\nOK\r\n:7\r\n"
GENERATION = StoreGeneration(1, "run/repl")
STATE = Delivered(1, b"f" * 8, "orders", 0, 7, 1)


def wrapped(text: str) -> str:
    """Make the error of a command in a script, as Redis 6.2 returns it."""
    return f"ERR Error running script (call to f_3a): @user_script:12: @user_script: 12: {text}"


def counted(telemetry: Telemetry) -> dict[str, float]:
    """Count the failed calls, by their kind."""
    return {
        name: found
        for name in ERRORS.values()
        if (found := sample(telemetry, "fencepost_redis_errors_total", error=name))
    }


@pytest.mark.parametrize(
    ("answer", "kind", "kept"),
    [
        (error("OOM command not allowed when used memory > 'maxmemory'."), StoreAway, True),
        (error("BUSY Redis is busy running a script."), StoreAway, True),
        (error("MASTERDOWN Link with MASTER is down"), StoreAway, True),
        (error("NOREPLICAS Not enough good replicas to write."), StoreAway, True),
        (error("READONLY You can't write against a read only replica."), StoreAway, True),
        (error("MISCONF Redis is configured to save RDB snapshots, but it is unable to persist"), StoreAway, True),
        (error("MISCONF Errors writing to the AOF file: script: 3a, on @user_script:12."), StoreAway, True),
        (error(wrapped("-OOM command not allowed when used memory > 'maxmemory'.")), StoreAway, True),
        (error(wrapped("-MISCONF Redis is configured to save RDB snapshots")), StoreAway, True),
        (error(wrapped("-NOREPLICAS Not enough good replicas to write.")), StoreAway, True),
        (error(wrapped("-READONLY You can't write against a read only replica.")), StoreAway, True),
        (error(wrapped("-MASTERDOWN Link with MASTER is down")), StoreAway, True),
        (error("OOMPH is no refusal"), StoreUnanswered, True),
        (error("LOADING Redis is loading the dataset in memory"), StoreAway, False),
        (error("ERR Error running script: it ran, and then failed"), StoreUnanswered, True),
        (error("WRONGTYPE Operation against a key"), StoreUnanswered, True),
        (None, StoreUnanswered, False),
        (b"", StoreUnanswered, False),
        (HALF, StoreUnanswered, False),
        (error("ERR user_script:12: attempt to index a nil value script: 3a, on @user_script:12."), StoreBug, True),
        (error("ERR Error running script (call to f_3a): @user_script:12: user_script:12: no such"), StoreBug, True),
        (error(wrapped("WRONGTYPE Operation against a key")), StoreBug, True),
        (error("WRONGTYPE Operation against a key script: 3a, on @user_script:12."), StoreBug, True),
        (b"*1\r\n$7\r\nUNKNOWN\r\n", StoreBug, True),
        (b"+OK\r\n", StoreBug, True),
        (b"*0\r\n", StoreBug, True),
        (b"*1\r\n$10\r\nSTORE_LOST\r\n", StoreLost, True),
        (b"*1\r\n$6\r\nFENCED\r\n", Fenced, True),
    ],
    ids=repr,
)
async def test_each_answer_tells_a_call_that_may_have_run_from_a_refused_one(
    server: Server, answer: bytes | None, kind: type[Exception], kept: bool
) -> None:
    """A connection with a pending reply is never used again: that reply would be taken for another call's."""
    telemetry = Telemetry()
    keys = keys_at(server.port, UNANSWERED_S if answer in SILENT else PATIENT_S, telemetry)
    server.answers.extend([answer, APPLIED])
    with pytest.raises(kind):
        await keys.release(GENERATION, 0, 1, [b"i" * 16])
    assert await keys.applied(GENERATION, 0) == 7
    assert server.asked == [(1, b"EVALSHA", b"release"), (1 if kept else 2, b"EVALSHA", b"applied")], "each once"
    assert counted(telemetry) == ({ERRORS[kind]: 1} if kind in ERRORS else {})
    await keys.close()


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


UNREADABLE = b"Z" + bytes(60)


@pytest.mark.parametrize("state", [UNREADABLE, b"D", b"Claimed", pack(STATE) + b"\xff", b"B" + bytes(90)], ids=repr)
async def test_a_state_that_no_script_writes_is_a_store_bug(server: Server, state: bytes) -> None:
    telemetry = Telemetry()
    keys = keys_at(server.port, telemetry=telemetry)
    server.answers.extend([b"*2\r\n" + bulk(b"OK") + bulk(state)] * 2)
    with structlog.testing.capture_logs() as lines:
        with pytest.raises(StoreBug, match=f"the state of a key is b'{state[:1].decode()}"):
            await keys.find(GENERATION, b"i" * 16)
        with pytest.raises(StoreBug):
            await keys.find_all(GENERATION, [b"i" * 16])
    assert counted(telemetry) == {"bug": 2}
    (line,) = lines
    assert (line["event"], isinstance(line["exc_info"], StoreBug)) == ("bug in what Redis says", True)
    await keys.close()


@pytest.mark.parametrize("prefix", [b"", b"X", b"0", b"1", b"7"])
async def test_a_claim_that_meets_an_unknown_state_is_unreadable_and_the_others_of_its_call_stand(
    server: Server, prefix: bytes
) -> None:
    keys = keys_at(server.port)
    answers = [b"N" + bytes(8), prefix + UNREADABLE, pack(STATE)]
    server.answers.append(b"*5\r\n" + bulk(b"OK") + b":1\r\n" + b"".join(map(bulk, answers)))
    asked = [(bytes([n]) * 16, STATE.fp) for n in range(3)]
    with structlog.testing.capture_logs() as lines:
        claims = await keys.claim(GENERATION, 0, 1, asked)
    assert [claim.outcome for claim in claims] == [Outcome.NEW, Outcome.UNREADABLE, Outcome.DELIVERED]
    assert [line["event"] for line in lines] == ["bug in what Redis says"]
    await keys.close()
    await keys.close()


async def test_a_script_that_is_not_there_is_sent_whole(server: Server) -> None:
    """After a restart or a failover: the script has not run."""
    telemetry = Telemetry()
    keys = keys_at(server.port, telemetry=telemetry)
    server.answers.extend([error("NOSCRIPT No matching script. Please use EVAL."), OK])
    await keys.release(GENERATION, 0, 1, [b"i" * 16])
    assert server.asked == [(1, b"EVALSHA", b"release"), (1, b"EVAL", b"release")]
    assert counted(telemetry) == {}
    await keys.close()


async def test_a_cancelled_call_closes_its_connection(server: Server) -> None:
    keys = keys_at(server.port)
    server.answers.extend([None, APPLIED])
    call = asyncio.create_task(keys.applied(GENERATION, 0))
    async with asyncio.timeout(1.0):
        while not server.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    call.cancel()
    await asyncio.wait([call])
    assert await keys.applied(GENERATION, 0) == 7
    assert [number for number, *_ in server.asked] == [1, 2]
    await keys.close()


async def test_a_connection_that_has_ended_is_not_asked(server: Server) -> None:
    """After a restart of the server: the call would be in doubt, and end a term."""
    keys = keys_at(server.port)
    server.answers.extend([APPLIED, APPLIED, APPLIED])
    assert await keys.applied(GENERATION, 0) == 7
    idle = await keys._connections.take()
    assert idle._writer is not None
    idle._writer.close()
    await keys._connections.give_back(idle, usable=True)
    await asyncio.sleep(0.01)
    assert await keys.applied(GENERATION, 0) == 7
    await keys.resolve_again()
    assert repr(keys._connections) == "<Connections 0 idle, 0 in use>"
    assert await keys.applied(GENERATION, 0) == 7
    assert [number for number, *_ in server.asked] == [1, 2, 3]
    await keys.close()


async def test_a_burst_of_look_ups_opens_few_connections_and_leaves_none_open(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_at(server.port)
    server.answers.extend([OK] * 300)
    await asyncio.gather(*(keys.find(GENERATION, b"i" * 16) for _ in range(300)))
    assert server.most_open <= module.FINDS_AT_ONCE
    monkeypatch.setattr(redis_connections, "IDLE_S", 0.02)
    await asyncio.sleep(0.05)
    server.answers.extend([APPLIED, APPLIED])
    assert await keys.applied(GENERATION, 0) == 7
    await until(lambda: server.open == 1)
    assert await keys.applied(GENERATION, 0) == 7
    assert len({number for number, *_ in list(server.asked)[-2:]}) == 1, "it is kept as long as it is used"
    await keys.close()


async def test_waiting_look_ups_do_not_keep_other_calls_from_the_store(server: Server) -> None:
    keys = keys_at(server.port)
    server.answers.extend([None] * module.FINDS_AT_ONCE)
    finds = [asyncio.create_task(keys.find(GENERATION, b"i" * 16)) for _ in range(300)]
    await until(lambda: not server.answers)
    server.answers.append(APPLIED)
    assert await keys.applied(GENERATION, 0) == 7
    for find in finds:
        find.cancel()
    await asyncio.wait(finds)
    assert repr(keys._connections) == "<Connections 1 idle, 0 in use>"
    await keys.close()


async def test_a_look_up_without_a_reply_is_no_queue_of_look_ups() -> None:
    telemetry = Telemetry()
    keys: Any = keys_at(1, BRIEF_S, telemetry)
    await keys._connections.give_back(Mute(), usable=True)
    with pytest.raises(StoreUnanswered, match=r"^Redis did not answer: \w+"):
        await keys.find(GENERATION, b"i" * 16)
    assert sample(telemetry, "fencepost_redis_errors_total", error=ERRORS[StoreUnanswered]) == 1
    await keys.close()


async def test_a_look_up_behind_too_many_is_store_away(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_at(server.port)
    server.answers.extend([None] * module.FINDS_AT_ONCE)
    finds = [asyncio.create_task(keys.find(GENERATION, b"i" * 16)) for _ in range(module.FINDS_AT_ONCE)]
    await until(lambda: not server.answers)
    monkeypatch.setattr(keys, "_timeout_s", BRIEF_S)
    with pytest.raises(StoreAway, match="look-ups wait"):
        await keys.find(GENERATION, b"i" * 16)
    for find in finds:
        find.cancel()
    await asyncio.wait(finds)
    await keys.close()


async def test_a_call_without_a_free_connection_is_store_away(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_connections, "CONNECTIONS_MAX", 1)
    keys = keys_at(server.port)
    connection = await keys._connections.take()
    keys._connections._timeout_s = BRIEF_S
    with pytest.raises(StoreAway, match="all 1 connections were in use"):
        await keys.applied(GENERATION, 0)
    await keys._connections.give_back(connection, usable=True)
    server.answers.append(APPLIED)
    assert await keys.applied(GENERATION, 0) == 7
    await keys.close()


@pytest.mark.parametrize("held", [b"garbage", b"-5 run/repl", "\u0665 run/repl".encode(), b"\xff\xfe"])
async def test_a_generation_that_no_release_has_written_names_the_keys_to_delete(server: Server, held: bytes) -> None:
    keys = keys_at(server.port)
    parts = (b"OK", b"run/repl", held, b"noeviction")
    server.answers.append(b"*4\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts))
    with pytest.raises(StoreBug, match=r"^\{test:0\}g is '.*', which no release has written: stop all processes and"):
        await keys.who()
    await keys.close()
