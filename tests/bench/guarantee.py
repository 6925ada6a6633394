"""(e) `exactly_once` against `idempotent`: one process whose rules have a topic of each; and each guarantee alone.

`idempotent` has no transaction and no ledger; its claims, marks and answers are the same.
"""

from tests.bench import checks
from tests.bench.client import OneClient
from tests.bench.rows import Goal, NotRealWork, Row, quantile, ratios
from tests.bench.single import one_by_one
from tests.bench.stage import Stage

CONNECTIONS = 256


def measure(stage: Stage) -> list[Row]:
    seconds, rounds, count = stage.pick(1, 2, 4), stage.pick(1, 5, 9), stage.pick(100, 600)
    rules = stage.folder / "guarantee.toml"
    rules.write_text(
        '[[topics]]\npattern = "guarantee-idempotent"\nguarantee = "idempotent"\n\n[[topics]]\npattern = "*"\n'
    )
    topic = "guarantee-idempotent"
    once: list[float] = []
    plain: list[float] = []
    alone_once: list[list[float]] = []
    alone_plain: list[list[float]] = []
    written = cut = 0
    stage.kafka.create_topic(topic, partitions=3)
    with stage.target(rules=str(rules)) as target, OneClient(target.service.port) as client:
        target.warm(stage.pick(2, 4), CONNECTIONS)
        for _ in range(rounds):
            once.append(target.load(seconds, CONNECTIONS).rate)
            loaded = target.press(seconds, CONNECTIONS, topic=topic)
            if loaded.refused or loaded.broken:
                raise NotRealWork(f"{loaded.refused} idempotent events were refused, {loaded.broken} broke off")
            plain.append(loaded.rate)
            written, cut = written + loaded.answered, cut + CONNECTIONS
            alone_once.append(one_by_one(target, client, count))
            alone_plain.append(one_by_one(target, client, count, topic))
            target.answered, written = target.answered + count, written + count
        target.check()
        found = len(checks.keys_of(stage.kafka.bootstrap, [topic]))
        if not written <= found <= written + cut:
            raise NotRealWork(f"{written} idempotent events were answered (and {cut} cut off), the topic has {found}")
    return [
        Row("exactly_once over idempotent", "x", ratios(once, plain), Goal(least=0.6)),
        Row("exactly_once", "/s", once),
        Row("idempotent", "/s", plain),
        Row("idempotent, one client, p50", "ms", [quantile(each, 0.5) for each in alone_plain], Goal(most=1.3)),
        Row("idempotent, one client, p99", "ms", [quantile(each, 0.99) for each in alone_plain]),
        Row("exactly_once, one client, p50", "ms", [quantile(each, 0.5) for each in alone_once]),
    ]
