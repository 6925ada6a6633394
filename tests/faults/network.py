"""Runs processes of the service in a network of their own, whose connection to the servers can be cut.

    with Network(folder, {"kafka": [kafka.port], "redis": [redis.port]}) as network:
        service = Service(folder, ..., argv_prefix=network.prefix)
        network.admit(service.port)
        network.cut("kafka")         # packets in both directions are dropped silently
        network.mend()
    network.forget("redis")      # the same for present connections only

It consists of a network namespace, a pair of veth interfaces, and iptables in the namespace. Inside, each server's port
of 127.0.0.1 leads over the link to a relay at the other end, so that advertised addresses work. One process keeps the
namespace, which ends with it, also when it is killed. If it is not possible, `lacking` says why and what to install.
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

Direction = Literal["both", "out", "in"]  # out: sent by the processes inside; in: sent to them

_PROGRAMS: Final = {"ip": "iproute2", "iptables": "iptables", "unshare": "util-linux", "nsenter": "util-linux"}
_READY_S: Final = 10.0
_CALL_S: Final = 20.0
_numbers = itertools.count(os.getpid() * 8)  # differ between two runs on one machine


def lacking() -> str:
    """Return why no network can be made here; "" if it can."""
    if why := lacks_root() or next(filter(None, (lacks_program(*each) for each in _PROGRAMS.items())), ""):
        return why
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, timeout=_CALL_S, check=False)
    return f"no network namespaces here (a container needs CAP_SYS_ADMIN): {tried.stderr}" if tried.returncode else ""


class Network(Process):
    """One network namespace with its link. For the local stack it is the process that keeps the namespace."""

    def __init__(self, folder: Path, peers: Mapping[str, Sequence[int]], *, name: str = "network") -> None:
        """Prepare a network.

        Args:
            folder: for the log.
            peers: servers outside, by a name for `cut` and `lose`: their ports on the loopback interface.
            name: the name of the log.
        """
        super().__init__(name, folder.absolute())
        self._peers = {peer: list(ports) for peer, ports in peers.items()}
        number = next(_numbers)
        # Four addresses of 100.64/10, which providers use for their own links, and no private network.
        base = f"100.{64 + (number >> 14) % 64}.{(number >> 6) % 256}."
        self._outside, self._address = (f"{base}{4 * (number % 64) + last}" for last in (1, 2))
        self._link = f"fp{number % 2**32:x}"
        self._relays = ExitStack()

    @property
    def prefix(self) -> list[str]:
        """The command prefix by which a program runs inside."""
        return ["nsenter", "--target", str(self.pid), "--net"]

    def start(self) -> None:
        """Make the namespace and its link.

        Raises:
            StackError: that failed; the text has the error message.
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
        # Packets for 127.0.0.1 may use the link once they are readdressed to its other end.
        self._inside("sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet")
        for port in itertools.chain.from_iterable(self._peers.values()):
            self._relays.enter_context(Relay(port, host=self._outside, port=port))
            self._inside(*_rule("nat", "OUTPUT", f"-d 127.0.0.1 -p tcp --dport {port} -j DNAT --to {self._outside}"))

    def stop(self, timeout_s: float = 0.0) -> None:
        """Kill the process, and so end the network."""
        self.kill()

    def kill(self) -> None:
        """End the network; programs that still run inside lose it."""
        self._relays.close()
        super().kill()

    def admit(self, port: int) -> None:
        """Make a server inside reachable from outside: each side sees the other at 127.0.0.1."""
        self._inside(*_rule("nat", "PREROUTING", f"-p tcp --dport {port} -j DNAT --to 127.0.0.1"))
        self._inside(*_rule("nat", "INPUT", f"-p tcp --dport {port} -j SNAT --to-source 127.0.0.1"))
        self._relays.enter_context(Relay(port, port=port, target_host=self._address))

    def cut(self, *peers: str, direction: Direction = "both") -> None:
        """Drop all packets between the inside and these servers from now on, silently."""
        self._drop(peers, direction, "")

    def lose(self, share: float, *peers: str, direction: Direction = "both") -> None:
        """Drop a share (0 to 1) of the packets between the inside and these servers, at random."""
        self._drop(peers, direction, f"-m statistic --mode random --probability {share}")

    def forget(self, *peers: str) -> None:
        """Drop the packets of the present connections to these servers; new connections work.

        As with a firewall that was restarted, or to which a connection was idle for too long.
        """
        for port in itertools.chain.from_iterable(self._peers[peer] for peer in peers):
            for line in self._inside("ss", "-Htn", "state", "established", f"( dport = :{port} )").splitlines():
                own = line.split()[2].rpartition(":")[2]
                self._inside(*_rule("filter", "OUTPUT", f"-p tcp --sport {own} --dport {port} -j DROP"))
                self._inside(*_rule("filter", "INPUT", f"-p tcp --sport {port} --dport {own} -j DROP"))

    def mend(self) -> None:
        """Let all packets through again."""
        self._inside("iptables", "-F")

    def dropped(self) -> int:
        """Count the packets dropped since the last `mend`."""
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
        """Check whether the process has the namespace."""
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
