"""Evidence and rows of the state for tests of single steps, with what does not matter left at a default."""

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from spark import decode, state

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
TTL_MS = 86_400_000


def copy(
    offset: int, *, at: int = NOW_MS, life: tuple[int, int, int, str] | None = (0, 10, 0, "a:1"), **more: Any
) -> Any:
    """A delivered record as evidence; `life` is slot, producer id, epoch and instance, None for no header of ours."""
    slot, pid, epoch, instance = life or (None, None, None, None)
    return {
        "kind": decode.EVENT,
        "id": b"i" * 16,
        "role": decode.COPY,
        "at": at,
        "ts": at + 5,
        "fp": b"f" * 8,
        "topic": "t",
        "partition": 0,
        "offset": offset,
        "slot": slot,
        "pid": pid,
        "epoch": epoch,
        "instance": instance,
        "stamped": life is not None,
        "keyed": True,
        "key": "k",
        **more,
    }


def entry(offset: int, *, at: int = NOW_MS, life: tuple[int, int, int, str] = (0, 10, 0, "a:1"), **more: Any) -> Any:
    """A ledger entry as evidence."""
    whole = copy(offset, at=at, life=life, role=decode.ENTRY, **more)
    return {name: value for name, value in whole.items() if name not in ("stamped", "keyed", "key")}


def answer(status: int, offset: int | None = None, *, at: int = NOW_MS, **more: Any) -> Any:
    """An answer as evidence; a 201 names its place."""
    role = decode.ANSWER if offset is None else decode.ANSWER_201
    told = {"kind": decode.EVENT, "id": b"i" * 16, "role": role, "at": at, "ts": at + 20, "fp": b"f" * 8, "topic": "t"}
    place = {} if offset is None else {"partition": 0, "offset": offset}
    return {**told, **place, "status": status, "replayed": False, **more}


def ids(named: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Evidence of several ids: each list under the id that its name makes."""
    return [{**one, "id": name.encode().ljust(16)[:16]} for name, evidence in named.items() for one in evidence]


def evidence(spark: SparkSession, rows: Sequence[Any]) -> DataFrame:
    return spark.createDataFrame(list(rows), decode.EVIDENCE)


def states(spark: SparkSession, named: Mapping[str, Sequence[Any]]) -> DataFrame:
    """Rows of the state of several ids."""
    return state.reduce(evidence(spark, ids(named)), 1)


def name_of(id: bytes) -> str:
    return bytes(id).decode().strip()
