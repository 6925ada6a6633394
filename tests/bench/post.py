"""(a) POST /events against an empty FastAPI handler whose pydantic body has the same shape.

wrk loads two processes in turn, with the same requests of 250 bytes and a new key in each. The empty handler only
answers; the service also checks, claims, writes in a transaction with a ledger record, marks, journals and counts. CPU
is that of the process, of the broker and of Redis, from /proc/PID/stat. Two rows tell how warm the broker is: its CPU
before the rounds, and the part of its JIT compiler in the rounds. A broker that compiles needs up to twice the CPU.
"""

from tests.bench.rows import Goal, Row, ratios
from tests.bench.stage import Stage, Target, cpu_s
from tests.bench.wrk import Loaded

GOALS = {256: Goal(least=2.0), 64: Goal(least=1.3)}


class _Side:
    """The runs of one side; CPU in µs for a POST."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.runs: list[Loaded] = []
        self.cpu_us: list[float] = []
        self.kafka_us: list[float] = []
        self.redis_us: list[float] = []
        self.compiler_percent: list[float] = []

    @property
    def total_us(self) -> list[float]:
        return [sum(each) for each in zip(self.cpu_us, self.kafka_us, self.redis_us, strict=True)]

    def run(self, seconds: float, connections: int) -> None:
        self.runs.append(self.target.load(seconds, connections))
        self.cpu_us.append(self.target.cpu_us)
        self.kafka_us.append(self.target.kafka_us)
        self.redis_us.append(self.target.redis_us)
        self.compiler_percent.append(100 * self.target.compiler_share)


def measure(stage: Stage) -> list[Row]:
    seconds, rounds = stage.pick(1, 3, 5), stage.pick(1, 5, 9)
    rows: list[Row] = []
    with stage.target() as service, stage.empty() as empty:
        stage.warm_up(service, 4, 256)
        empty.warm(stage.pick(1, 4), 256)
        rows.append(Row("the broker's CPU before the rounds", "s", [cpu_s(stage.kafka.pid)]))
        for connections, goal in GOALS.items():
            ours, theirs = _Side(service), _Side(empty)
            before = service.groups()
            for number in range(rounds):
                for side in (ours, theirs)[:: 1 if number % 2 else -1]:
                    side.run(seconds, connections)
            events, transactions = (after - then for after, then in zip(service.groups(), before, strict=True))
            rows += _rows(ours, theirs, connections, goal, events / transactions)
        service.check()
    return rows


def _rows(ours: _Side, theirs: _Side, connections: int, goal: Goal, group: float) -> list[Row]:
    at = f"{connections} connections"
    rates = [[run.rate for run in side.runs] for side in (ours, theirs)]
    return [
        Row(f"POST /events over an empty handler, {at}", "x", ratios(*rates), goal),
        Row(f"exactly-once POSTs, {at}", "/s", rates[0]),
        Row(f"empty handler's, {at}", "/s", rates[1]),
        Row(f"p50, {at}", "ms", [run.p50_ms for run in ours.runs]),
        Row(f"p99, {at}", "ms", [run.p99_ms for run in ours.runs], Goal(most=50.0) if connections == 256 else None),
        Row(f"empty handler's p99, {at}", "ms", [run.p99_ms for run in theirs.runs]),
        Row(f"CPU a POST, {at}", "µs", ours.cpu_us),
        Row(f"empty handler's CPU a POST, {at}", "µs", theirs.cpu_us),
        Row(f"Redis's CPU a POST, {at}", "µs", ours.redis_us),
        Row(f"CPU of the service, the broker and Redis a POST, {at}", "µs", ours.total_us),
        Row(f"POSTs a transaction, {at}", "", [group]),
        Row(f"the broker's CPU a transaction, {at}", "ms", [group * each / 1000 for each in ours.kafka_us]),
        Row(f"the JIT compiler's part of the broker's CPU, {at}", "%", ours.compiler_percent),
        Row(f"CPU of an empty POST over one of ours, {at}", "x", ratios(theirs.cpu_us, ours.cpu_us)),
    ]
