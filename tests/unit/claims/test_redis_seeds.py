"""Tests how the primary is found by sentinels and cluster nodes, that disagree, are silent, or are none."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from redis.asyncio import ConnectionPool, SSLConnection

from service.claims.rates import Ask, Granted
from service.claims.redis_seeds import (
    OfCluster,
    OfSentinels,
    Question,
    Seeds,
    View,
    WronglyAddressed,
    make_connection,
)
from service.claims.redis_store import RedisKeys
from service.contract import SettingsError
from service.core.metrics import Telemetry
from service.core.problems import StoreAway, StoreLost
from service.core.redis_address import RedisAddress
from tests.unit.claims.test_redis_store_transport import GENERATION

HOST = "127.0.0.1"
BRIEF_S = 0.2
PATIENT_S = 5.0
SLOT = 7


def array(*parts: bytes) -> bytes:
    return b"*%d\r\n%b" % (len(parts), b"".join(parts))


def bulk(text: str) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text.encode()), text.encode())


def number(value: int) -> bytes:
    return b":%d\r\n" % value


class Node:
    """A server that answers each command by its first two words, or by its first; all others with +OK."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.connections = 0
        self.port = 0

    def sentinel(self, primary: "Node", epoch: int) -> None:
        """Have it answer as a sentinel."""
        self.answers["SENTINEL GET-MASTER-ADDR-BY-NAME"] = array(bulk(HOST), bulk(str(primary.port)))
        self.answers["SENTINEL MASTER"] = array(*map(bulk, ("name", "keys", "config-epoch", str(epoch))))

    def node(self, primary: "Node", epoch: int, state: str = "ok", host: str = HOST) -> None:
        """Have it answer as a node of a cluster whose hash slots, but 0, are on one primary."""
        served = array(bulk(host), number(primary.port), bulk("id"))
        other = array(bulk(HOST), number(1), bulk("id"))
        ranges = array(array(number(0), number(0), other), array(number(1), number(16383), served))
        self.answers["CLUSTER SLOTS"] = ranges
        self.answers["CLUSTER INFO"] = bulk(f"cluster_state:{state}\r\ncluster_current_epoch:{epoch}\r\n")

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                words = []
                for _ in range(int((await reader.readuntil(b"\r\n"))[1:])):
                    size = int((await reader.readuntil(b"\r\n"))[1:])
                    words.append((await reader.readexactly(size + 2))[:-2].decode(errors="replace"))
                name = " ".join(words[:2]).upper()
                answer = self.answers.get(name, self.answers.get(words[0].upper(), b"+OK\r\n"))
                if words[0] not in ("CLIENT", "HELLO", "SELECT"):
                    self.asked.append(name if words[0] != "EVALSHA" else words[0])
                writer.write(answer)
        writer.close()


Start = Callable[[int], Awaitable[list[Node]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    servers: list[asyncio.Server] = []

    async def start(count: int) -> list[Node]:
        nodes = [Node() for _ in range(count)]
        for node in nodes:
            server = await asyncio.start_server(node.talk, HOST, 0)
            servers.append(server)
            node.port = server.sockets[0].getsockname()[1]
        return nodes

    yield start
    for server in servers:
        server.close()


@contextlib.asynccontextmanager
async def seeds_of(
    nodes: Sequence[Node | int], question: Question, timeout_s: float = PATIENT_S
) -> AsyncIterator[Seeds]:
    addresses = [(HOST, node if isinstance(node, int) else node.port) for node in nodes]
    seeds = Seeds(ConnectionPool.from_url("redis://localhost"), addresses, question, timeout_s, None)
    yield seeds
    await seeds.close()


async def test_the_newest_configuration_counts_and_not_the_first_answer(start: Start) -> None:
    """A sentinel that was cut off from the others names the old primary, for ever."""
    old, new, *sentinels = await start(5)
    for sentinel, primary, epoch in zip(sentinels, (old, new, old), (3, 4, 2), strict=True):
        sentinel.sentinel(primary, epoch)
    async with seeds_of(sentinels, OfSentinels("keys")) as seeds:
        views, errors = await seeds.all_views()
        assert sorted(view.rank for view in views) == [(0, 2), (0, 3), (0, 4)]
        assert not errors
        sentinels[0].sentinel(new, 4)
        sentinels[2].sentinel(new, 4)
        assert await seeds.newest() == View((HOST, new.port), (0, 4))
    assert sentinels[0].asked[:2] == ["SENTINEL GET-MASTER-ADDR-BY-NAME", "SENTINEL MASTER"]
    assert [sentinel.connections for sentinel in sentinels] == [1, 1, 1], "kept over both calls"


async def test_a_node_without_a_majority_is_believed_only_alone(start: Start) -> None:
    """It may have the highest epoch that it ever tried."""
    old, new, one, other = await start(4)
    one.node(old, 9, "fail")
    other.node(new, 8)
    async with seeds_of([one, other], OfCluster(SLOT)) as seeds:
        assert (await seeds.newest()).primary == (HOST, new.port)
    async with seeds_of([one], OfCluster(SLOT)) as seeds:
        assert (await seeds.newest()).primary == (HOST, old.port)


async def test_a_silent_seed_does_not_hold_up_a_majority(start: Start) -> None:
    primary, *sentinels = await start(4)
    for sentinel in sentinels[:2]:
        sentinel.sentinel(primary, 1)
    sentinels[2].answers["SENTINEL GET-MASTER-ADDR-BY-NAME"] = b""
    async with seeds_of(sentinels, OfSentinels("keys")) as seeds, asyncio.timeout(BRIEF_S * 5):
        assert (await seeds.newest()).primary == (HOST, primary.port)
    async with seeds_of([sentinels[0], sentinels[2]], OfSentinels("keys")) as seeds, asyncio.timeout(BRIEF_S * 10):
        assert (await seeds.newest()).primary == (HOST, primary.port), "without a majority, after a moment"


async def test_seeds_of_which_none_answers_are_all_named() -> None:
    async with seeds_of([1, 2], OfSentinels("keys"), BRIEF_S) as seeds:
        with pytest.raises(StoreAway) as caught:
            await seeds.newest()
    assert "127.0.0.1:1 does not answer" in str(caught.value)
    assert "127.0.0.1:2 does not answer" in str(caught.value)
    assert not isinstance(caught.value, WronglyAddressed)


@pytest.mark.parametrize(
    ("question", "answer", "what"),
    [
        (OfSentinels("keys"), b"-ERR No such master with that name\r\n", "monitors no primary 'keys'"),
        (OfSentinels("keys"), b"-ERR unknown command 'SENTINEL', with args\r\n", "is no sentinel"),
        (OfSentinels("keys"), b"-NOAUTH Authentication required.\r\n", "set FENCEPOST_REDIS_SENTINEL_USERNAME and"),
        (OfSentinels("keys"), b"-NOPERM this user has no permissions\r\n", "set FENCEPOST_REDIS_SENTINEL_USERNAME and"),
        (OfCluster(SLOT), b"-ERR This instance has cluster support disabled\r\n", "is no node of a cluster"),
        (OfCluster(SLOT), b"-ERR unknown command 'CLUSTER'\r\n", "is no node of a cluster"),
        (OfCluster(SLOT), b"-NOPERM no permissions\r\n", "set the user and password in FENCEPOST_REDIS"),
    ],
)
async def test_an_answer_that_shows_a_wrong_setting_says_what_to_set(
    start: Start, question: Question, answer: bytes, what: str
) -> None:
    (node,) = await start(1)
    node.answers |= {"SENTINEL": answer, "CLUSTER": answer}
    async with seeds_of([node], question) as seeds:
        with pytest.raises(WronglyAddressed, match=what):
            await seeds.newest()


async def test_a_hash_slot_that_nobody_serves_is_store_away(start: Start) -> None:
    (node,) = await start(1)
    node.answers |= {"CLUSTER SLOTS": array(), "CLUSTER INFO": bulk("cluster_state:fail\r\n")}
    async with seeds_of([node], OfCluster(SLOT)) as seeds:
        with pytest.raises(StoreAway, match=f"serves hash slot {SLOT}"):
            await seeds.newest()


async def test_a_node_that_does_not_know_its_own_host_has_the_one_that_was_asked(start: Start) -> None:
    (node,) = await start(1)
    node.node(node, 1, host="")
    async with seeds_of([node], OfCluster(SLOT)) as seeds:
        assert (await seeds.newest()).primary == (HOST, node.port)


async def test_the_servers_of_the_shard_are_asked_once_the_listed_nodes_are_gone(start: Start) -> None:
    primary, listed = await start(2)
    listed.node(primary, 1)
    primary.node(primary, 1)
    async with seeds_of([listed], OfCluster(SLOT)) as seeds:
        await seeds.newest()
        listed.answers["CLUSTER SLOTS"] = b"-ERR gone\r\n"
        assert (await seeds.newest()).primary == (HOST, primary.port)


def test_a_connection_to_a_seed_or_a_named_primary_trusts_only_the_set_authorities() -> None:
    context = ssl.create_default_context()
    pool = ConnectionPool.from_url(RedisAddress.parse("rediss+sentinel://s:1/keys").url)
    connection = make_connection(pool, ("elsewhere", 7), context)
    assert isinstance(connection, SSLConnection)
    assert (connection.host, connection.port, connection.ssl_context.get()) == ("elsewhere", 7, context)


# --------------------------------------------------------------------------------------------- the keys' connections

LOST = array(bulk("STORE_LOST"))


@contextlib.asynccontextmanager
async def keys_at(url: str, timeout_s: float = PATIENT_S) -> AsyncIterator[RedisKeys]:
    keys = RedisKeys(
        url,
        "test",
        retention_ms=60_000,
        least_left_ms=0,
        lease_ttl_ms=300,
        timeout_s=timeout_s,
        telemetry=Telemetry(),
    )
    yield keys
    await keys.close()


def who(store: str) -> bytes:
    return array(bulk("OK"), bulk(store), bulk(""), bulk("noeviction"))


async def test_calls_move_to_the_primary_that_the_sentinels_name_without_a_fault_of_the_old_one(start: Start) -> None:
    """The old primary answers on: it is cut off from the sentinels only."""
    old, new, sentinel = await start(3)
    old.answers["EVALSHA"], new.answers["EVALSHA"] = who("old/r"), who("new/r")
    sentinel.sentinel(old, 1)
    async with keys_at(f"redis+sentinel://{HOST}:{sentinel.port}/keys/0") as keys:
        assert (await keys.who()).store == "old/r"
        old.answers["EVALSHA"] = array(bulk("OK"), number(7))
        in_flight = asyncio.create_task(keys.applied(GENERATION, 0))
        assert await in_flight == 7
        sentinel.sentinel(new, 2)
        assert (await keys.who()).store == "new/r"
        new.answers["EVALSHA"] = LOST
        with pytest.raises(StoreLost):
            await keys.applied(GENERATION, 0)
    assert old.connections == 1


async def test_a_known_primary_is_used_on_while_no_sentinel_answers(start: Start) -> None:
    primary, sentinel = await start(2)
    primary.answers["EVALSHA"] = who("one/r")
    sentinel.sentinel(primary, 1)
    async with keys_at(f"redis+sentinel://{HOST}:{sentinel.port}/keys/0") as keys:
        assert (await keys.who()).store == "one/r"
        sentinel.answers["SENTINEL MASTER"] = b"-ERR down\r\n"
        await keys.resolve_again()
        assert (await keys.who()).store == "one/r"


async def test_a_primary_that_refuses_connections_is_looked_for_again(start: Start) -> None:
    new, sentinel = await start(2)
    gone = Node()
    gone.port = 1
    new.answers["EVALSHA"] = who("new/r")
    sentinel.sentinel(gone, 1)
    async with keys_at(f"redis+sentinel://{HOST}:{sentinel.port}/keys/0") as keys:
        with pytest.raises(StoreAway, match="does not answer"):
            await keys.clock_ms()
        sentinel.sentinel(new, 2)
        new.answers["TIME"] = array(bulk("1"), bulk("2000"))
        assert await keys.clock_ms() == 1002


async def test_many_connections_at_once_ask_the_sentinels_once(start: Start) -> None:
    primary, sentinel = await start(2)
    primary.answers["TIME"] = array(bulk("1"), bulk("0"))
    sentinel.sentinel(primary, 1)
    async with keys_at(f"redis+sentinel://{HOST}:{sentinel.port}/keys/0") as keys:
        await asyncio.gather(*(keys.clock_ms() for _ in range(20)))
    assert sentinel.asked == ["SENTINEL GET-MASTER-ADDR-BY-NAME", "SENTINEL MASTER"]


async def test_a_script_that_has_moved_runs_on_the_node_that_has_the_keys(start: Start) -> None:
    old, new, seed = await start(3)
    seed.node(old, 1)
    old.answers["EVALSHA"] = b"-MOVED 7 127.0.0.1:%d\r\n" % new.port
    new.answers["EVAL"] = LOST
    async with keys_at(f"redis+cluster://{HOST}:{seed.port}") as keys:
        with pytest.raises(StoreLost):
            await keys.applied(GENERATION, 0)
        new.answers["EVALSHA"] = LOST
        with pytest.raises(StoreLost):
            await keys.applied(GENERATION, 0)
    assert old.asked == ["EVALSHA"], "once: the next call goes to the other node at once"
    assert new.asked[0].startswith("EVAL "), "nobody has sent the script there yet"


async def test_the_buckets_of_rates_move_with_the_keys(start: Start) -> None:
    old, new, seed = await start(3)
    seed.node(old, 1)
    old.answers["EVALSHA"] = b"-MOVED 7 127.0.0.1:%d\r\n" % new.port
    new.answers["EVAL"] = array(bulk("3"), bulk("4.5"))
    async with keys_at(f"redis+cluster://{HOST}:{seed.port}") as keys:
        assert await keys.take_tokens([Ask(b"i" * 16, 1.0, 9.0, 0.0, 3)]) == [Granted(3, 4.5)]


async def test_a_script_that_moves_again_is_not_followed_for_ever(start: Start) -> None:
    one, other, seed = await start(3)
    seed.node(one, 1)
    one.answers["EVALSHA"] = b"-MOVED 7 127.0.0.1:%d\r\n" % other.port
    other.answers["EVAL"] = b"-MOVED 7 127.0.0.1:%d\r\n" % one.port
    async with keys_at(f"redis+cluster://{HOST}:{seed.port}") as keys:
        with pytest.raises(StoreAway, match="the keys are on"):
            await keys.applied(GENERATION, 0)


@pytest.mark.parametrize(
    "answer",
    [
        "ASK 7 127.0.0.1:1",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "CLUSTERDOWN The cluster is down",
        "ERR Script attempted to execute a write command while the cluster is down and readonly",
        "ERR Error running script (call to f_3a): @user_script:12: @user_script: 12: "
        "Script attempted to access a non local key in a cluster node",
    ],
)
async def test_a_cluster_that_cannot_run_a_script_now_is_store_away(start: Start, answer: str) -> None:
    """ASK too: its node has a part of the keys only."""
    primary, asked = await start(2)
    primary.node(primary, 1)
    primary.answers["EVALSHA"] = f"-{answer}\r\n".replace(":1\r", f":{asked.port}\r").encode()
    async with keys_at(f"redis+cluster://{HOST}:{primary.port}") as keys:
        with pytest.raises(StoreAway):
            await keys.applied(GENERATION, 0)
    assert asked.connections == 0


async def test_one_server_of_a_cluster_says_what_to_set_where_the_keys_are_elsewhere(start: Start) -> None:
    (node,) = await start(1)
    node.answers["EVALSHA"] = b"-MOVED 7 10.0.0.9:7000\r\n"
    fields = {"redis_version": "7.2.4", "role": "master", "run_id": "r", "master_replid": "m", "cluster_enabled": "1"}
    node.answers["INFO"] = bulk("\r\n".join(f"{name}:{text}" for name, text in fields.items()))
    async with keys_at(f"redis://{HOST}:{node.port}/0") as keys:
        with pytest.raises(SettingsError) as caught:
            await keys.check()
        assert str(caught.value) == (
            "FENCEPOST_REDIS names a server that will not do "
            "(another node of its cluster has the keys, 10.0.0.9:7000): "
            "set FENCEPOST_REDIS=redis+cluster://host:port,host:port with nodes of the cluster"
        )
        node.answers["EVALSHA"] = who("r/m")
        await keys.check()


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ("ERR unknown command 'EVALSHA', with args beginning with: ", "use a server with Lua scripts"),
        ("NOSCRIPT No matching script.", "use a server with Lua scripts"),
        ("NOPERM User service has no permissions to run the 'evalsha' command", "allow the user"),
    ],
)
async def test_a_server_without_scripts_is_refused_by_name(start: Start, answer: str, what: str) -> None:
    (node,) = await start(1)
    node.answers["EVALSHA"] = f"-{answer}\r\n".encode()
    node.answers["EVAL"] = b"-ERR Could not find scripting engine 'lua'\r\n"
    fields = {"redis_version": "7.2.4", "role": "master", "run_id": "r", "master_replid": "m"}
    node.answers["INFO"] = bulk("\r\n".join(f"{name}:{text}" for name, text in fields.items()))
    async with keys_at(f"redis://{HOST}:{node.port}/0") as keys:
        with pytest.raises(SettingsError, match=what):
            await keys.check()


async def test_a_replica_that_a_sentinel_names_amid_a_failover_does_not_stop_the_start(start: Start) -> None:
    replica, sentinel = await start(2)
    sentinel.sentinel(replica, 1)
    replica.answers["INFO"] = bulk("redis_version:7.2.4\r\nrole:slave\r\nrun_id:r\r\nmaster_replid:m\r\n")
    async with keys_at(f"redis+sentinel://{HOST}:{sentinel.port}/keys/0") as keys:
        with pytest.raises(StoreAway, match="has the role slave"):
            await keys.check()


async def test_a_name_that_no_sentinel_knows_stops_the_start(start: Start) -> None:
    (sentinel,) = await start(1)
    sentinel.answers["SENTINEL"] = b"-ERR No such master with that name\r\n"
    async with keys_at(f"redis+sentinel://{HOST}:{sentinel.port}/keys/0") as keys:
        with pytest.raises(SettingsError, match="monitors no primary 'keys'"):
            await keys.check()
