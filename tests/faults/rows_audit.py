"""Rows that check the report of the reconciliation job."""

from tests.faults.matrix import row
from tests.faults.rows_service import dies, doomed
from tests.faults.world import World
from tests.integration.auditing import Audit
from tests.integration.plan import Fault


@row("the reconciliation job killed with -9 while it writes, and run again", audit=True)
def spark_killed_while_it_writes(world: World) -> None:
    world.wait_acked(50)
    job = Audit(world.cluster.bootstrap, world.namespace, world.folder, world.topics)
    world.exits.callback(job.kill)
    job.start()
    world.until(lambda: any(job.lake.rglob("*.parquet")), 120, "the job writes")
    job.kill()
    written = sorted({path.relative_to(job.lake).parts[0] for path in job.lake.rglob("*.parquet")})
    world.notes.append(f"killed after its first files of {', '.join(written)}")


@row(
    "a process killed with -9 after it wrote to an `idempotent` topic, before its mark",
    services=0,
    load=False,
    audit=True,
    expect="each event once on the other topic; copies on this one, each named by the job",
)
def idempotent_killed(world: World) -> None:
    world.repeatable = [world.topics[0]]
    world.rules = world.folder / "rules.toml"
    world.rules.write_text(f'[[topics]]\npattern = "{world.topics[0]}"\nguarantee = "idempotent"\n')
    world.start_services(1)
    world.start_load(atomic=False)  # atomic batches are refused there
    for _ in range(3):
        dies(world, doomed(world, Fault("plain.done", "kill", first=10)))
