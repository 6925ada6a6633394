"""Checks the Redis server: pure functions of its INFO, with its field names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from service.claims.redis_requirements import Demand, demands
from service.claims.redis_seeds import View
from service.cli.finding import Finding, Level, judged
from service.core.problems import StoreAway
from service.core.settings import Settings

# Memory of a key and its state, with Redis's overhead (measured by tests/bench sizes).
KEY_BYTES: Final = 200
# From so many keys on, the server's own numbers are used instead.
KEYS_TO_MEASURE: Final = 10_000
# The share of the memory for keys; the rest is for page copies while saving, and buffers of replicas and clients.
MEMORY_SHARE: Final = 0.7


def server(info: Mapping[str, str]) -> Iterator[Finding]:
    """Check the demands of the service at its start, and persistence."""
    yield from map(demanded, demands(info))
    failing = [name for name in ("rdb_last_bgsave_status", "aof_last_write_status") if info.get(name, "ok") != "ok"]
    saves = "append-only file" if info.get("aof_enabled") == "1" else "snapshots, where `save` says so"
    yield judged(
        "redis.saving",
        not failing,
        f"{' and '.join(failing)} is not ok" if failing else f"{saves}; the ledger has it all anyway",
        "look at its log and its disk, or turn saving off: it refuses writes while saving fails",
    )


def demanded(demand: Demand) -> Finding:
    """Turn a demand of the service at its start into a finding."""
    return judged(f"redis.{demand.name}", demand.met, demand.found, demand.change)


def seeds(views: Sequence[View], errors: Sequence[StoreAway], kind: str) -> Iterator[Finding]:
    """Check that sentinels or cluster nodes answer, and agree on the primary. `kind`: which, empty for one server."""
    if not kind:
        return
    asked = len(views) + len(errors)
    majority = len(views) > asked // 2
    yield judged(
        "redis.sentinels" if kind == "sentinel" else "redis.nodes",
        not errors,
        "; ".join([f"{len(views)} of {asked} answer", *map(str, errors)]),
        "start the others, or correct FENCEPOST_REDIS and the network to them: it lists the addresses that are asked",
        Level.WARNING if majority else Level.ERROR,
    )
    primaries = sorted({f"{host}:{port}" for host, port in (view.primary for view in views)})
    if primaries:
        yield judged(
            "redis.agreement",
            len(primaries) == 1,
            f"primary {' or '.join(primaries)}",
            "end the partition between them: the service follows the newest configuration",
            Level.WARNING,
        )


def replicas(info: Mapping[str, str], kind: str) -> Iterator[Finding]:
    """Check that a server with sentinels or in a cluster has a replica, and that a cluster is addressed as one."""
    if not kind and info.get("cluster_enabled", "0") == "1":
        yield judged(
            "redis.cluster",
            False,
            "cluster mode, addressed as one server",
            "set FENCEPOST_REDIS=redis+cluster://host:port,host:port: else the service does not follow its keys",
            Level.WARNING,
        )
    if kind:
        count = int(info.get("connected_slaves", 0))
        yield judged(
            "redis.replicas",
            count > 0,
            f"{count} connected",
            "add one: without a replica nothing can take the place of the primary",
            Level.WARNING,
        )


def allocator(info: Mapping[str, str]) -> Iterator[Finding]:
    """Check the memory allocator (mem_allocator), which depends on how Redis was built."""
    name = info.get("mem_allocator", "")
    yield judged(
        "redis.allocator",
        name != "libc",
        f"mem_allocator {name or 'unknown'}",
        "run one that is built with jemalloc, as packages and images for Linux are: with millions of keys the C "
        "library's own halves the speed of a store recovery",
        Level.WARNING,
    )


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate in events a second, and its origin."""

    events_s: float
    source: str


def memory(info: Mapping[str, str], settings: Settings, rate: Rate | None) -> Iterator[Finding]:
    """Check the memory limit against the need of the keys of one retention."""
    limit = int(info.get("maxmemory", 0))
    yield judged(
        "redis.maxmemory",
        limit > 0,
        f"maxmemory {size(limit)}" if limit else "no maxmemory",
        "set maxmemory below what the machine has: without it the kernel ends the server instead of a write",
        Level.WARNING,
    )
    if rate is None:
        return
    each = bytes_a_key(info)
    keys = rate.events_s * settings.key_ttl_s
    room = limit or int(info.get("total_system_memory", 0))
    needed = keys * each
    text = (
        f"{rate.events_s:g} events/s ({rate.source}) for {settings.key_ttl_s / 3600:g} h: {keys:,.0f} keys of about "
        f"{each:.0f} bytes, {size(needed)} of {size(room)}"
    )
    change = (
        f"give it {size(needed / MEMORY_SHARE)} or more, or set a smaller FENCEPOST_KEY_TTL_S: a full server claims "
        "nothing, which is 503"
    )
    otherwise = Level.ERROR if needed > room else Level.WARNING
    yield judged("redis.memory", needed <= room * MEMORY_SHARE, text, change, otherwise)


def bytes_a_key(info: Mapping[str, str]) -> float:
    """Estimate the bytes of memory of one key."""
    keys = sum(int(text.partition("keys=")[2].partition(",")[0]) for name, text in info.items() if _database(name))
    if keys < KEYS_TO_MEASURE:
        return KEY_BYTES
    return max(0, int(info.get("used_memory", 0)) - int(info.get("used_memory_startup", 0))) / keys


def _database(name: str) -> bool:
    return name.startswith("db") and name[2:].isdecimal()


def size(number: float) -> str:
    """Format a number of bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
