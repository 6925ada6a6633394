"""Checks by its INFO whether a Redis server can keep the guarantee. Field names are those of INFO."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from service.contract import PREFIX

OLDEST_REDIS: Final = (6, 2)
NO_EVICTION: Final = "noeviction"
POLICY_CHANGE: Final = f"set maxmemory-policy {NO_EVICTION}: a server that evicts keys forgets claims"
SECTIONS: Final = ("server", "memory", "replication", "cluster")
"""Sections of INFO with the fields of `demands`."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A requirement: whether it is met, what was found, and what to change if it is not."""

    name: str
    met: bool
    found: str
    change: str


def unmet_demands(info: Mapping[str, str]) -> list[str]:
    """Explain why the service does not start on this server, a line for each demand that is not met."""
    return [
        f"{PREFIX}REDIS names a server that will not do ({demand.found}): {demand.change}"
        for demand in demands(info)
        if not demand.met
    ]


def demands(info: Mapping[str, str]) -> Iterator[Demand]:
    """Check version, eviction policy, role, identity and cluster mode."""
    version = info.get("redis_version", "0")
    yield Demand(
        "version",
        tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_REDIS,
        f"{info.get('server_name', 'redis').title()} {info.get('valkey_version', version)}",
        "use 6.2 or newer",
    )
    policy = info.get("maxmemory_policy", NO_EVICTION)
    yield Demand(
        "policy",
        policy == NO_EVICTION,
        f"maxmemory-policy {policy}",
        POLICY_CHANGE,
    )
    role = info.get("role", "unknown")
    yield Demand(
        "role",
        role == "master",
        f"role {role}",
        "let FENCEPOST_REDIS lead to the primary (after a failover it soon does): nothing can be claimed on a replica",
    )
    unreported = " and ".join(name for name in ("run_id", "master_replid") if not info.get(name))
    yield Demand(
        "identity",
        not unreported,
        f"no {unreported} in INFO" if unreported else "reports its run_id and master_replid",
        "use a server that reports them: without them a restart that lost all keys goes unnoticed",
    )
    clustered = info.get("cluster_enabled", "0") == "1"
    yield Demand(
        "cluster",
        not clustered,
        "cluster mode" if clustered else "no cluster",
        "use a server that is not in cluster mode: the service talks to one, and follows no redirections",
    )
