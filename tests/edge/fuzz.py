"""Runs schemathesis over the OpenAPI document of a running service, and reads what it found."""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.places import ROOT
from tests.edge.world import WORLD_ENV, World


@dataclass(frozen=True)
class Plan:
    """How many requests are made: random ones of each operation, in which phases, and from which seed.

    `response_s` is the longest time of an answer.
    """

    examples: int
    seed: int
    phases: Sequence[str] = ("examples", "coverage", "fuzzing", "stateful")
    response_s: float = 5.0


@dataclass(frozen=True)
class Found:
    """What schemathesis printed, whether all checks passed, and the statuses of the answers by operation."""

    passed: bool
    output: str
    statuses: Mapping[str, Counter[int]]

    @property
    def total(self) -> Counter[int]:
        """The number of answers by status."""
        return sum(self.statuses.values(), Counter[int]())


def run(url: str, world: World, folder: Path, plan: Plan) -> Found:
    """Send the requests of a plan to a service, and check each answer against the document."""
    config = folder / "schemathesis.toml"
    config.write_text(_config(plan))
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "tests.edge.hooks",
        "PYTHONPATH": str(ROOT),
        WORLD_ENV: world.encode(),
    }
    program = Path(sys.executable).with_name("schemathesis")
    command = [str(program), "--config-file", str(config), "--no-color", "run", f"{url}/openapi.json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return Found(done.returncode == 0, done.stdout + done.stderr, _statuses(Path(world.answers)))


def _config(plan: Plan) -> str:
    enabled = "\n".join(f"{phase}.enabled = true" for phase in plan.phases)
    return f"""
seed = {plan.seed}
continue-on-failure = true
request-timeout = 30.0
suppress-health-check = ["all"]  # a busy machine would fail them

[generation]
max-examples = {plan.examples}
database = "none"

[phases]
enabled = false
{enabled}

[checks]
max_response_time = {plan.response_s}
positive_data_acceptance.enabled = false
negative_data_rejection.expected-statuses = ["4xx"]

# Each event of a batch has a result of its own.
[[operations]]
include-path = "/events"
checks.negative_data_rejection.expected-statuses = ["4xx", 207]

[[operations]]
include-path = "/events/batch"
checks.negative_data_rejection.expected-statuses = ["4xx", 207]
# `batch` is a key too, whose state can be requested.
checks.allow_header_conformance.enabled = false
checks.unsupported_method.enabled = false

# Any text is a key.
[[operations]]
include-path = "/events/{{key}}"
checks.negative_data_rejection.enabled = false

# Each record has an answer of its own, and a cluster may be any word.
[[operations]]
include-path = "/v3/clusters/{{cluster}}/topics/{{topic}}/records"
checks.negative_data_rejection.expected-statuses = ["4xx", 200]

[[operations]]
include-path = "/v3/clusters/{{cluster}}/topics/{{topic}}/records:batch"
checks.negative_data_rejection.expected-statuses = ["4xx", 207]

# Every other part of Confluent's API is answered 404, by whatever method.
[[operations]]
include-path-regex = "^/(topics|v3)"
checks.unsupported_method.enabled = false
"""


def _statuses(answers: Path) -> dict[str, Counter[int]]:
    """Count the answers by operation and status."""
    statuses: dict[str, Counter[int]] = defaultdict(Counter)
    for line in answers.read_text().splitlines() if answers.exists() else ():
        label, _, status = line.rpartition("\t")
        statuses[label][int(status)] += 1
    return dict(sorted(statuses.items()))


def table(statuses: Mapping[str, Counter[int]]) -> str:
    """Render the counts, a line for each operation, and one for all."""
    rows = {**statuses, "all": sum(statuses.values(), Counter[int]())}
    width = max(map(len, rows))
    return "\n".join(
        f"{label:<{width}}  " + ", ".join(f"{status}: {counts[status]:,}" for status in sorted(counts))
        for label, counts in rows.items()
    )
