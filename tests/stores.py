"""Highly available stores of real servers: a primary with a replica under sentinels, and a small cluster.

    with SentinelStore(folder, namespace) as store: …     # 2 servers, 3 sentinels
    with ClusterStore(folder, namespace) as store: …      # 3 primaries, of which one has the keys, and its replica

With an Authority, the service, the replica, sentinels and nodes reach each server by TLS; the tests' own calls go to a
port without it. `store.url` is FENCEPOST_REDIS, `store.settings` are the other variables. `primary` and `replica` are
the servers with the keys; `follow_failover` waits for a promotion and exchanges them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import redis
from redis.crc import key_slot

from deploy import places
from deploy.stack import Process, Redis, StackError, free_port
from deploy.stack.redis import BUS_DISTANCE, find_server
from tests.secured import Authority

NAME: Final = "keys"
HASH_SLOTS: Final = 16_384
POLL_S: Final = 0.05
ANSWER_S: Final = 30.0
# A sentinel whose timer was late by two seconds, as on a starved machine, does nothing for 30 s (TILT mode).
PROMOTED_S: Final = 240.0
# How long a server must be silent before the others act.
SILENT_MS: Final = 1_000
FAILOVER_MS: Final = 5_000
# The users of a server: the service has what service/README.md asks for; the others can be shut out.
SERVICE, SENTINEL, REPLICA = "service", "sentinel", "replica"
USERS: Final = {
    SERVICE: "~{}* +eval +evalsha +info +time +@read +@write +@connection",
    SENTINEL: "~* &* +@all",
    REPLICA: "~* &* +@all",
}
SHUT: Final = "shut"  # the password of the default user while a server is cut off
SENTINEL_PASSWORD: Final = "for-sentinels"
DIRECTLY: Final = ["--repl-diskless-sync-delay", "0"]


Directives = Mapping[str, str]
"""Directives of a server's configuration."""


class Tls:
    """What servers need to speak TLS, with one certificate for this machine's address."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._certificate = authority.issue("redis", "IP:127.0.0.1")

    def directives(self, port: int) -> Directives:
        """Have a server listen at a port with TLS, and reach other servers by it."""
        return {
            "tls-port": str(port),
            "tls-replication": "yes",
            "tls-auth-clients": "no",
            "tls-cert-file": str(self._certificate.certfile),
            "tls-key-file": str(self._certificate.keyfile),
            "tls-ca-cert-file": str(self._authority.cafile),
        }


class StoreServer(Redis):
    """A server that others reach at `reached_at`: its port, or another one by TLS."""

    def __init__(self, folder: Path, name: str, tls: Tls | None, args: Sequence[str]) -> None:
        super().__init__(folder, name=name, args=args)
        self.reached_at = self.port
        if tls is not None:
            self.reached_at = free_port(BUS_DISTANCE if "--cluster-enabled" in args else 0)
            for directive, value in tls.directives(self.reached_at).items():
                self.args += [f"--{directive}", value]


class Sentinel(Process):
    """One sentinel; it keeps its state in its configuration file over restarts."""

    def __init__(self, folder: Path, name: str, primary: StoreServer, quorum: int, tls: Tls | None) -> None:
        super().__init__(name, folder.absolute())
        self.port = self.reached_at = free_port()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.folder / "sentinel.conf"
        directives: Directives = {}
        if tls is not None:
            self.reached_at = free_port()
            directives = tls.directives(self.reached_at)
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self.folder}",
            f"requirepass {SENTINEL_PASSWORD}",
            f"sentinel sentinel-pass {SENTINEL_PASSWORD}",
            *(f"{directive} {value}" for directive, value in directives.items()),
            f"sentinel monitor {NAME} 127.0.0.1 {primary.reached_at} {quorum}",
            f"sentinel down-after-milliseconds {NAME} {SILENT_MS}",
            f"sentinel failover-timeout {NAME} {FAILOVER_MS}",
            f"sentinel auth-user {NAME} {SENTINEL}",
            f"sentinel auth-pass {NAME} {SENTINEL}",
        ]
        self._file.write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        self.spawn([find_server(), self._file, "--sentinel"], env=places.hermetic_environment())
        self.wait_until(lambda: bool(self.state()), ANSWER_S)

    def state(self) -> Mapping[str, str]:
        """Read what it knows of the primary; empty if it does not answer."""
        try:
            words = [word.decode() for word in call(self.port, "SENTINEL", "MASTER", NAME, password=SENTINEL_PASSWORD)]
        except redis.RedisError:
            return {}
        return dict(zip(words[::2], words[1::2], strict=True))


class Store(ABC):
    """A store of several processes, which end with it."""

    def __init__(self, folder: Path, namespace: str, authority: Authority | None = None) -> None:
        """`authority` signs the servers' certificate; without one there is no TLS."""
        self.folder = folder
        self.namespace = namespace
        self.tls = None if authority is None else Tls(authority)
        self.scheme = "redis" if authority is None else "rediss"
        self.prefix = f"{{{namespace}:0}}"
        self.exits = ExitStack()
        self.primary: StoreServer
        self.replica: StoreServer

    def __enter__(self) -> Self:
        try:
            self._bring_up()
        except BaseException:
            self.exits.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.exits.close()

    @property
    @abstractmethod
    def url(self) -> str:
        """FENCEPOST_REDIS."""

    @property
    def settings(self) -> Mapping[str, str]:
        """Further variables of the service."""
        return {}

    @abstractmethod
    def _bring_up(self) -> None: ...

    @abstractmethod
    def promoted(self) -> bool:
        """Whether the replica is the primary in the view of those who tell it the clients."""

    @abstractmethod
    def heal(self) -> None:
        """Start what is dead, and wait until the primary has its replica again."""

    def follow_failover(self) -> float:
        """Wait until the replica is the primary, and exchange both; returns how long that took, in seconds."""
        begun = time.monotonic()
        until(self.promoted, "the replica is promoted", PROMOTED_S)
        self.primary, self.replica = self.replica, self.primary
        return time.monotonic() - begun

    def wait_replicated(self) -> None:
        """Wait until the replica has all that was written to the primary before this call."""
        written = int(info(self.primary, "replication")["master_repl_offset"])

        def has_it() -> bool:
            replica: Mapping[str, Any] = info(self.primary, "replication").get("slave0", {})
            return replica.get("state") == "online" and int(replica["offset"]) >= written

        until(has_it, "the replica has what was written")

    def _server(self, number: int, args: Sequence[str]) -> StoreServer:
        name = f"redis-{number}"
        server = StoreServer(self.folder / name, name, self.tls, [*DIRECTLY, *args])
        self.exits.callback(server.kill)
        server.start()
        return server


def until(holds: Callable[[], bool], what: str, timeout_s: float = ANSWER_S) -> None:
    """Wait for a condition; a server that does not answer does not meet it. Raises StackError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if holds():
                return
        except redis.RedisError:
            pass
        if time.monotonic() > deadline:
            raise StackError(f"it did not come about within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)


def call(port: int, *command: str | int | bytes, password: str | None = None) -> Any:
    """Send one command; returns its reply of RESP2 as it is."""
    url = f"redis://127.0.0.1:{port}"
    with redis.Redis.from_url(url, password=password, protocol=2, socket_timeout=60, retry=None) as client:
        client.response_callbacks.clear()
        return client.execute_command(*command)


def ask(server: Redis, *command: str | int | bytes) -> Any:
    """As `call`."""
    return call(server.port, *command)


def ask_amid_move(server: Redis, *command: str | int | bytes) -> Any:
    """Send one command behind ASKING, as a client that follows ASK does."""
    url = f"redis://127.0.0.1:{server.port}"
    with redis.Redis.from_url(url, protocol=2, retry=None, single_connection_client=True) as client:
        client.execute_command("ASKING")
        return client.execute_command(*command)


def info(server: Redis, section: str) -> Mapping[str, Any]:
    with server.client() as client:
        found: Mapping[str, Any] = client.info(section)
        return found


def is_followed(primary: StoreServer, replica: StoreServer) -> bool:
    found = info(replica, "replication")
    return (found.get("master_link_status"), found.get("master_port")) == ("up", primary.reached_at)


class SentinelStore(Store):
    """A primary and its replica, under three sentinels with a quorum of two."""

    def _bring_up(self) -> None:
        self._cut_off: StoreServer | None = None
        self.primary, self.replica = (self._server(number, self._replica_login()) for number in range(2))
        self._admit(self.primary)
        self._follow()
        self.sentinels = [
            Sentinel(self.folder / f"sentinel-{n}", f"sentinel-{n}", self.primary, 2, self.tls) for n in range(3)
        ]
        for sentinel in self.sentinels:
            self.exits.callback(sentinel.kill)
            sentinel.start()
        until(self._is_watched, "each sentinel knows the others and the replica")

    @property
    def url(self) -> str:
        return self.url_by([sentinel.reached_at for sentinel in self.sentinels])

    def url_by(self, ports: Sequence[int]) -> str:
        """Make the address with these ports for the sentinels."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return f"{self.scheme}+sentinel://{SERVICE}:{SERVICE}@{hosts}/{NAME}/0"

    @property
    def settings(self) -> Mapping[str, str]:
        return {"FENCEPOST_REDIS_SENTINEL_PASSWORD": SENTINEL_PASSWORD}

    def promoted(self) -> bool:
        ports = [sentinel.state().get("port") for sentinel in self.sentinels if sentinel.running]
        role = info(self.replica, "replication")["role"]
        return role == "master" and ports.count(str(self.replica.reached_at)) >= 2

    def cut_off(self) -> None:
        """Cut the primary off from sentinels and replica: it lets neither in, and serves its clients on."""
        # First the default user: a sentinel that connects before that is one, and stays one.
        ask(self.primary, "ACL", "SETUSER", "default", "resetpass", f">{SHUT}")
        for user in (SENTINEL, REPLICA):
            call(self.primary.port, "ACL", "SETUSER", user, "off", password=SHUT)
            call(self.primary.port, "CLIENT", "KILL", "USER", user, password=SHUT)
        self._cut_off = self.primary

    def thinks_it_is_primary(self) -> bool:
        """Whether the server that is cut off takes itself for the primary."""
        assert self._cut_off is not None
        return bool(call(self._cut_off.port, "ROLE", password=SHUT)[0] == b"master")

    def heal(self) -> None:
        if self._cut_off is not None:
            call(self._cut_off.port, "ACL", "SETUSER", "default", "nopass", password=SHUT)
            self._cut_off = None
        for server in (self.primary, self.replica):
            if server.running:
                server.resume()
            else:
                server.start()
        for sentinel in self.sentinels:
            if not sentinel.running:
                sentinel.start()
        self._admit(self.primary)
        self._follow()
        until(self._is_watched, "the sentinels see the primary and its replica")

    def _follow(self) -> None:
        """Let the replica follow the primary, as sentinels do in the end, ten seconds later."""
        self._admit(self.replica)
        if info(self.replica, "replication").get("master_port") != self.primary.reached_at:
            ask(self.replica, "REPLICAOF", "127.0.0.1", self.primary.reached_at)
        until(lambda: is_followed(self.primary, self.replica), "the replica follows")

    def _admit(self, server: Redis) -> None:
        for user, may in USERS.items():
            ask(server, "ACL", "SETUSER", user, "on", f">{user}", *may.format(self.prefix).split())

    def _is_watched(self) -> bool:
        states = [sentinel.state() for sentinel in self.sentinels]
        return all(
            (state.get("port"), state.get("flags")) == (str(self.primary.reached_at), "master")
            and state["num-other-sentinels"] == "2"
            and state["num-slaves"] != "0"
            for state in states
        )

    @staticmethod
    def _replica_login() -> list[str]:
        return ["--masteruser", REPLICA, "--masterauth", REPLICA]


class ClusterStore(Store):
    """Three primaries: the first serves the keys of the namespace, and all else but one hash slot of each other one."""

    def _bring_up(self) -> None:
        self.hash_slot = key_slot(self.prefix.encode())
        self.nodes = [self._server(number, self._cluster()) for number in range(4)]
        self.primary, self.second, self.third, self.replica = self.nodes
        spare = [slot for slot in (0, 1, 2) if slot != self.hash_slot][:2]
        slots = [[slot for slot in range(HASH_SLOTS) if slot not in spare], *([slot] for slot in spare)]
        for node, served in zip(self.nodes, slots, strict=False):
            ask(node, "CLUSTER", "ADDSLOTS", *served)
        for epoch, node in enumerate(self.nodes, 1):
            ask(node, "CLUSTER", "SET-CONFIG-EPOCH", epoch)
            ask(node, "CLUSTER", "MEET", "127.0.0.1", self.primary.reached_at)
        until(self._is_ready, "each node knows the others")
        ask(self.replica, "CLUSTER", "REPLICATE", self.id_of(self.primary))
        until(self._is_followed, "the replica follows")

    @property
    def url(self) -> str:
        """The address by two of the nodes, neither of which has the keys."""
        return f"{self.scheme}+cluster://127.0.0.1:{self.second.reached_at},127.0.0.1:{self.third.reached_at}"

    def promoted(self) -> bool:
        """Whether a node apart from the shard says so."""
        ranges = ask(self.second, "CLUSTER", "SLOTS")
        serving = [nodes[0][1] for first, last, *nodes in ranges if first <= self.hash_slot <= last]
        return serving == [self.replica.port]

    def id_of(self, node: Redis) -> str:
        found: bytes = ask(node, "CLUSTER", "MYID")
        return found.decode()

    def heal(self) -> None:
        for node in self.nodes:
            if node.running:
                node.resume()
            else:
                node.start()
        until(self._is_followed, "the replica follows")
        until(self._is_ready, "the cluster is whole")

    # ------------------------------------------------------------------------------------------- moving a hash slot

    def begin_move(self) -> None:
        """Begin to move the hash slot of the keys to the second node; from now on scripts get ASK."""
        ask(self.second, "CLUSTER", "SETSLOT", self.hash_slot, "IMPORTING", self.id_of(self.primary))
        ask(self.primary, "CLUSTER", "SETSLOT", self.hash_slot, "MIGRATING", self.id_of(self.second))

    def move_keys(self, most: int = 1_000) -> int:
        """Move some keys, as `redis-cli --cluster reshard` does; returns how many."""
        keys = ask(self.primary, "CLUSTER", "GETKEYSINSLOT", self.hash_slot, most)
        if keys:
            ask(self.primary, "MIGRATE", "127.0.0.1", self.second.port, "", 0, 5_000, "KEYS", *keys)
        return len(keys)

    def end_move(self) -> None:
        """Give the hash slot to the second node, which is the primary of the keys from now on, without a replica."""
        for node in (self.second, self.primary, self.third):
            ask(node, "CLUSTER", "SETSLOT", self.hash_slot, "NODE", self.id_of(self.second))
        self.primary, self.second = self.second, self.primary

    def _is_ready(self) -> bool:
        found = [ask(node, "CLUSTER", "INFO").decode() for node in self.nodes]
        return all("cluster_state:ok" in text and "cluster_known_nodes:4" in text for text in found)

    def _is_followed(self) -> bool:
        """Whether the replica follows the primary; after a move it follows the earlier one."""
        return is_followed(self.primary, self.replica) or is_followed(self.second, self.replica)

    def _cluster(self) -> list[str]:
        return [
            *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
            *(("--tls-cluster", "yes") if self.tls is not None else ()),
            *("--cluster-node-timeout", str(SILENT_MS), "--cluster-replica-validity-factor", "0"),
        ]
