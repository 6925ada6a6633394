"""The real stack for a measurement, and what every result says of the machine and the servers."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.local.places import ROOT
from deploy.local.stack import Kafka, Redis, Service

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Bench:
    """Kafka, Redis, and room for processes of the service."""

    folder: Path
    kafka: Kafka
    redis: Redis

    def service(self, name: str = "service", module: str = "service", **settings: object) -> Service:
        """A process, not started yet."""
        env = {f"FENCEPOST_{setting.upper()}": str(value) for setting, value in settings.items()}
        return Service(self.folder, kafka=self.kafka.bootstrap, redis=self.redis.url, env=env, name=name, module=module)


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="fencepost-bench-") as name:
        folder = Path(name)
        with Kafka(folder / "kafka") as kafka, Redis(folder / "redis") as redis:
            yield Bench(folder, kafka, redis)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def keep(name: str, redis: Redis, figures: dict[str, object]) -> None:
    """Print a result and keep it as the last of its name, with the commit and the servers that it was measured on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    with redis.client() as store:
        server = store.info("server")
    result = {
        "name": name,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "redis": f"{server.get('server_name', 'redis')} {server.get('valkey_version', server['redis_version'])}",
        "figures": figures,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    width = max(map(len, figures))
    for figure, value in figures.items():
        print(f"{figure:<{width}}  {value}")
