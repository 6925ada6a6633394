"""Checks by its INFO whether a Redis server can keep the guarantee. Field names are those of INFO."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from redis.exceptions import MovedError, NoPermissionError, ResponseError

from service.contract import PREFIX

OLDEST_REDIS: Final = (6, 2)
NO_EVICTION: Final = "noeviction"
POLICY_CHANGE: Final = f"set maxmemory-policy {NO_EVICTION}: a server that evicts keys forgets claims"
NODE_BASED: Final = (
    f"{POLICY_CHANGE}; ElastiCache Serverless always evicts: use a node-based cluster, which has the policy in its "
    "parameter group"
)
SECTIONS: Final = ("server", "memory", "replication", "cluster")
"""Sections of INFO with the fields of `demands`."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A requirement: whether it is met, what was found, and what to change if it is not."""

    name: str
    met: bool
    found: str
    change: str


def unmet_demands(info: Mapping[str, str], *others: Demand) -> list[str]:
    """Explain why the service does not start on this server, a line for each demand that is not met."""
    return [
        f"{PREFIX}REDIS names a server that will not do ({demand.found}): {demand.change}"
        for demand in (*demands(info), *others)
        if not demand.met
    ]


def demands(info: Mapping[str, str]) -> Iterator[Demand]:
    """Check version, eviction policy, role and identity."""
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
        # ElastiCache calls itself so in INFO; where it is serverless, its policy cannot be set.
        NODE_BASED if info.get("os") == "Amazon ElastiCache" else POLICY_CHANGE,
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


def script_demand(error: ResponseError | None) -> Demand:
    """Judge the error reply to a script on a key of the namespace; None if it ran."""
    change = "use a server with Lua scripts: on Valkey 9.1 and newer load the module that has them (libvalkeylua)"
    match error:
        case None:
            return Demand("script", True, "runs scripts", "")
        case MovedError():
            found = f"another node of its cluster has the keys, {error.host}:{error.port}"
            change = f"set {PREFIX}REDIS=redis+cluster://host:port,host:port with nodes of the cluster"
        case NoPermissionError():
            found = f"no script may run: {error}"
            change = "allow the user the commands EVAL and EVALSHA, those of the README, and the keys of the namespace"
        case _:
            found = f"no script runs: {error}"
    return Demand("script", False, found, change)
