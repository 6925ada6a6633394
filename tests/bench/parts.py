"""(g) CPU by part, and a flame graph, of POSTs at 256 connections and of batches of 100 at 16.

py-spy samples the process 200 times a second under load. A sample belongs to its leaf-most frame in the service or in a
library (not in Python's own modules; helpers that all parts share count for their caller). A sample without such a
frame belongs to the event loop: uvloop's callbacks and the system calls of sockets, for HTTP, Kafka and Redis alike.
Redis's part is known by its caller: claim or mark. The shares are those of the samples; the CPU that they divide was
measured in runs without py-spy, from /proc/PID/stat.
"""

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.console import StackError
from tests.bench import flame
from tests.bench.flame import Stack
from tests.bench.rows import NotRealWork, Row
from tests.bench.stage import Stage, Target

SAMPLES_A_SECOND = 200

# The files of each part, by the beginning of their names; the first match counts.
PARTS = {
    "HTTP": (
        "uvicorn/",
        "httptools/",
        "service/http/",
        "starlette/",
        "fastapi/",
    ),
    "JSON and checks": (
        "service/events/",
        "service/http/batch.py",
        "msgspec/",
        "json/",
    ),
    "Kafka": ("aiokafka/", "service/kafka/", "service/pipeline/group"),
    "journal": ("service/pipeline/journal",),
    "metrics": ("service/core/metrics", "service/core/collectors", "prometheus_client/"),
    "queue and path": ("service/",),
}
REDIS = ("service/claims/redis_store", "redis/", "hiredis/")
# Helpers, which count for their caller.
SHARED = ("service/contract/", "service/claims/states", "service/__main__")
LOOP = "event loop"
COLOURS = {
    "HTTP": "#e3a857",
    "JSON and checks": "#b7c68b",
    "claim": "#7fb3d5",
    "mark": "#a9cce3",
    "Redis, other": "#d4e6f1",
    "Kafka": "#e59a8f",
    "journal": "#c9b1d9",
    "metrics": "#d7bde2",
    "queue and path": "#f2d7a2",
    LOOP: "#d0d3d4",
}


def part_of(stack: Stack) -> str:
    """Find the part of a stack, whose leaf is last."""
    for frame in reversed(stack):
        file = frame.rpartition("(")[2]
        if file.startswith(SHARED):
            continue
        if file.startswith(REDIS):
            return _redis_part(stack)
        for part, files in PARTS.items():
            # The loop is run by uvicorn's server, which does not count as work of the server.
            if file.startswith(files) and not file.startswith(("uvicorn/server", "uvicorn/_compat", "uvicorn/main")):
                return part
    return LOOP


def _redis_part(stack: Stack) -> str:
    names = " ".join(frame.partition(" ")[0] for frame in stack)
    return "claim" if "claim" in names else "mark" if "mark" in names or "_pay" in names else "Redis, other"


def module_of(stack: Stack) -> str:
    """Find the file of the leaf-most frame that is not in Python's own modules."""
    files = (frame.rpartition("(")[2].rstrip(")").partition(":")[0] for frame in reversed(stack))
    loop = ("uvicorn/server", "uvicorn/_compat", "uvicorn/main", "service/__main__")
    own = (file for file in files if file.startswith(("service/", *_VENDORS)) and not file.startswith(loop))
    return next(own, LOOP)


_VENDORS = tuple({name for files in PARTS.values() for name in files if name.endswith("/")} | {"redis/", "hiredis/"})


def parse(raw: str) -> Counter[Stack]:
    """Parse py-spy's raw format, `frame;frame;… samples` on each line, without line numbers."""
    stacks: Counter[Stack] = Counter()
    for line in raw.splitlines():
        frames, _, samples = line.rpartition(" ")
        stacks[tuple(frames.split(";"))] += int(samples)
    return stacks


def _spy(pid: int, seconds: int, to: Path) -> subprocess.Popen[bytes]:
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        raise StackError("no py-spy here: it is one of the project's dev dependencies (uv sync --all-groups)")
    command = [program, "record", "--pid", str(pid), "--duration", str(seconds), "--rate", str(SAMPLES_A_SECOND)]
    command += ["--format", "raw", "--nolineno", "--output", str(to)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@dataclass(frozen=True)
class _Load:
    """The load: single POSTs, or batches. Shares are for one event."""

    of: str
    connections: int
    batch: int
    svg: str


LOADS = (_Load("a POST", 256, 0, "parts.svg"), _Load("an event in batches of 100", 16, 100, "parts-batch.svg"))


def sample(target: Target, load: _Load, seconds: int, to: Path) -> Counter[Stack]:
    """Sample the stacks of a process under load.

    Raises:
        NotRealWork: py-spy brought nothing back.
    """
    spy = _spy(target.service.pid, seconds, to)
    target.load(seconds + 1, load.connections, load.batch)
    _, said = spy.communicate(timeout=60)
    if spy.returncode or not to.exists():
        raise NotRealWork(f"py-spy failed: {said.decode(errors='replace').strip()[-300:]}")
    return parse(to.read_text())


def measure(stage: Stage) -> list[Row]:
    stage.results.mkdir(parents=True, exist_ok=True)
    with stage.target() as target:
        target.warm(stage.pick(2, 4), 256)
        rows = [row for load in LOADS for row in _measure(stage, target, load)]
        target.check()
    return rows


def _measure(stage: Stage, target: Target, load: _Load) -> list[Row]:
    cpu_us: list[float] = []
    for _ in range(stage.pick(1, 3)):
        target.load(stage.pick(2, 3), load.connections, load.batch)
        cpu_us.append(target.cpu_us / max(1, load.batch))
    stacks = sample(target, load, stage.pick(2, 8, 12), stage.folder / f"{load.svg}.raw")
    svg = flame.render(stacks, f"CPU of {load.of}", lambda stack: COLOURS[part_of(stack)])
    (stage.results / load.svg).write_text(svg)
    return [Row(f"CPU of {load.of}", "µs", cpu_us), *_shares(stacks, cpu_us, load.of)]


def _shares(stacks: Mapping[Stack, int], cpu_us: list[float], of: str) -> list[Row]:
    total = sum(stacks.values())
    parts: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for stack, samples in stacks.items():
        parts[part_of(stack)] += samples
        modules[module_of(stack)] += samples
    rows = [Row(f"{of}: {part}", "µs", [us * count / total for us in cpu_us]) for part, count in parts.most_common()]
    return rows + [
        Row(f"{of}: in {module}", "µs", [us * count / total for us in cpu_us])
        for module, count in modules.most_common(14)
        if module != LOOP
    ]
