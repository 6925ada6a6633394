"""A network of its own for processes of the service: the servers are where they always are, and the wire can be cut.

    with Network(folder, {"kafka": [kafka.port], "redis": [redis.port]}) as network:
        service = Service(folder, ..., argv_prefix=network.prefix)
        network.admit(service.port)
        network.cut("kafka")         # what is sent in either direction vanishes: no error, just silence
        network.mend()
    network.forget("redis")      # the same for the connections that there are, while new ones can be made

A network namespace, a pair of veth interfaces, and iptables in the namespace alone. Inside, each server's port of
127.0.0.1 leads over the wire to a relay at the other end, so that addresses which servers tell their clients stay true.
The namespace lives by one process, and is gone with it, also when that is killed. Where it is not possible, `lacking`
says why and what to install.
"""

import itertools
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal

from deploy import places
from deploy.console import StackError
from deploy.stack.process import Process
from tests.faults.relay import Relay
from tests.faults.tools import lacks_program, lacks_root

Direction = Literal["both", "out", "in"]  # out: what the inside sends; in: what it is sent

_PROGRAMS: Final = {"ip": "iproute2", "iptables": "iptables", "unshare": "util-linux", "nsenter": "util-linux"}
_READY_S: Final = 10.0
_CALL_S: Final = 20.0
_numbers = itertools.count(os.getpid() * 8)  # of two runs on one machine, different ones


def lacking() -> str:
    """Why there can be no such network here; empty where there can."""
    if why := lacks_root() or next(filter(None, (lacks_program(*each) for each in _PROGRAMS.items())), ""):
        return why
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, timeout=_CALL_S, check=False)
    return f"no network namespaces here (a container needs CAP_SYS_ADMIN): {tried.stderr}" if tried.returncode else ""


class Network(Process):
    """One namespace with its wire. It is a process to the local stack: the one that keeps the namespace."""

    def __init__(self, folder: Path, peers: Mapping[str, Sequence[int]], *, name: str = "network") -> None:
        """Prepare one.

        Args:
            folder: where its log goes.
            peers: servers outside, by a name for `cut` and `lose`: their ports on the loopback interface.
            name: the name of its log.
        """
        super().__init__(name, folder.absolute())
        self._peers = {peer: list(ports) for peer, ports in peers.items()}
        number = next(_numbers)
        # Four addresses of 100.64/10, which is for links inside of a provider, and no private network's.
        base = f"100.{64 + (number >> 14) % 64}.{(number >> 6) % 256}."
        self._outside, self._address = (f"{base}{4 * (number % 64) + last}" for last in (1, 2))
        self._link = f"fp{number % 2**32:x}"
        self._relays = ExitStack()

    @property
    def prefix(self) -> list[str]:
        """What to put in front of a command, so that it runs inside."""
        return ["nsenter", "--target", str(self.pid), "--net"]

    def start(self) -> None:
        """Make the namespace and its wire.

        Raises:
            StackError: that failed; the text has what was said.
        """
        self.spawn(["unshare", "--net", "sleep", "infinity"], env=places.hermetic_environment())
        self.wait_until(self._is_apart, _READY_S)
        here, there = f"{self._link}a", f"{self._link}b"
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", str(self.pid))
        _run("ip", "address", "add", f"{self._outside}/30", "dev", here)
        _run("ip", "link", "set", here, "up")
        for command in (
            f"ip address add {self._address}/30 dev {there}",
            f"ip link set {there} up",
            "ip link set lo up",
            f"iptables -t nat -A POSTROUTING -o {there} -j SNAT --to-source {self._address}",
        ):
            self._inside(*command.split())
        # What is for 127.0.0.1 may come and go by the wire, once it is for the other end.
        self._inside("sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet")
        for port in itertools.chain.from_iterable(self._peers.values()):
            self._relays.enter_context(Relay(port, host=self._outside, port=port))
            self._inside(*_rule("nat", "OUTPUT", f"-d 127.0.0.1 -p tcp --dport {port} -j DNAT --to {self._outside}"))

    def stop(self, timeout_s: float = 0.0) -> None:
        """End it at once."""
        self.kill()

    def kill(self) -> None:
        """End it: what still runs inside has no network any more."""
        self._relays.close()
        super().kill()

    def admit(self, port: int) -> None:
        """Let the outside reach a server that listens inside: each knows the other at 127.0.0.1."""
        self._inside(*_rule("nat", "PREROUTING", f"-p tcp --dport {port} -j DNAT --to 127.0.0.1"))
        self._inside(*_rule("nat", "INPUT", f"-p tcp --dport {port} -j SNAT --to-source 127.0.0.1"))
        self._relays.enter_context(Relay(port, port=port, target_host=self._address))

    def cut(self, *peers: str, direction: Direction = "both") -> None:
        """From now on no packet comes through between the inside and these servers; nobody is told."""
        self._drop(peers, direction, "")

    def lose(self, share: float, *peers: str, direction: Direction = "both") -> None:
        """Lose a share (0 to 1) of the packets between the inside and these servers, at random."""
        self._drop(peers, direction, f"-m statistic --mode random --probability {share}")

    def forget(self, *peers: str) -> None:
        """No packet of the present connections to these servers comes through any more; new ones can be made.

        So does a firewall that was restarted, or to which a connection was idle for too long.
        """
        for port in itertools.chain.from_iterable(self._peers[peer] for peer in peers):
            for line in self._inside("ss", "-Htn", "state", "established", f"( dport = :{port} )").splitlines():
                own = line.split()[2].rpartition(":")[2]
                self._inside(*_rule("filter", "OUTPUT", f"-p tcp --sport {own} --dport {port} -j DROP"))
                self._inside(*_rule("filter", "INPUT", f"-p tcp --sport {port} --dport {own} -j DROP"))

    def mend(self) -> None:
        """All packets come through again."""
        self._inside("iptables", "-F")

    def dropped(self) -> int:
        """How many packets were dropped since the last `mend`."""
        shown = self._inside("iptables", "-L", "-v", "-x", "-n")
        return sum(int(line.split()[0]) for line in shown.splitlines() if " DROP " in line)

    def _drop(self, peers: Iterable[str], direction: Direction, match: str) -> None:
        for peer in peers:
            for port in self._peers[peer]:
                if direction in ("both", "out"):
                    self._inside(*_rule("filter", "OUTPUT", f"-p tcp --dport {port} {match} -j DROP"))
                if direction in ("both", "in"):
                    self._inside(*_rule("filter", "INPUT", f"-p tcp --sport {port} {match} -j DROP"))

    def _is_apart(self) -> bool:
        """Whether the process has the namespace already."""
        mine, its = (Path(f"/proc/{pid}/ns/net").readlink() for pid in ("self", self.pid))
        return mine != its

    def _inside(self, *command: str) -> str:
        return _run(*self.prefix, *command)


def _rule(table: str, chain: str, rule: str) -> list[str]:
    return ["iptables", "-t", table, "-A", chain, *rule.split()]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S, check=False)
    if done.returncode:
        raise StackError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
