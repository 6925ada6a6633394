"""What `show` prints of an id without records."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from service.contract import SharedSettings
from service.contract.wire.ids import event_id
from spark.queries import show
from spark.rules.findings import HOUR, IDS
from spark.tables import schemas
from spark.tables.lake import Lake
from tests.spark.rows import NOW_MS, answer, copy, entry, reduced
from tests.spark.times import HOUR_MS


def test_a_finding_about_a_content_is_shown_of_each_id_with_a_record_in_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored under the id of the first record."""
    monkeypatch.setattr(show, "read_records", lambda *_: [])
    lake = Lake(spark, str(tmp_path))
    keys = {key: event_id(key) for key in ("first", "again", "apart")}
    evidence = [one for nth, id in enumerate(keys.values()) for one in (copy(nth, id=id), entry(nth, id=id))]
    lake.append_once("deliveries", reduced(spark, evidence), 1)
    coordinates = [{"topic": "t", "partition": 0, "offset": offset} for offset in (0, 1)]
    found = {"kind": "client_duplicate", "cause": "new_key", "scope": IDS, "run": 1, "last_ms": NOW_MS, "count": 2}
    found |= {"id": keys["first"], "fingerprint": b"f" * 8, "coordinates": coordinates}
    lake.append_once("findings", spark.createDataFrame([found], schemas.of("findings")), 1)

    def shown(key: str) -> list[str]:
        lines = show.show(spark, SharedSettings(), str(tmp_path), key)
        return [line for line in lines if line.startswith("finding ")]

    assert shown("first") == shown("again") == ["finding    client_duplicate/new_key, 2 records"]
    assert shown("apart") == []


def test_what_another_program_has_written_neither_makes_a_line_nor_controls_the_terminal(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = "\x1b[2J\nfinding    none\r\u2028"
    escaped = r"\x1b[2J\nfinding    none\r\u2028"
    header = {"key": forged, "value": f"{forged}é".encode()}
    record = {"topic": "t", "partition": 0, "offset": 0, "timestamp_ms": NOW_MS, "is_its_record": True}
    record |= {"key": f"{forged}\xff".encode("latin-1", "ignore"), "value": forged.encode(), "headers": [header]}
    monkeypatch.setattr(show, "read_records", lambda *_: [Row(**record)])
    lake = Lake(spark, str(tmp_path))
    key = f"k{forged}"
    lake.append_once("deliveries", reduced(spark, [copy(0, writer=(0, 1, 2, forged), key=key, id=event_id(key))]), 1)
    lines = list(show.show(spark, SharedSettings(), str(tmp_path), key))
    assert [line for line in lines if not line.isprintable()] == []
    assert f"  header   {escaped}: {escaped}é" in lines
    assert f"  value    {escaped}" in lines
    assert any(line.startswith("record     t[0]@0") and line.endswith(f", {escaped}") for line in lines)


@pytest.mark.parametrize(("of_hour_run", "shown"), [(1, ["504"]), (2, ["202", "504"])])
def test_only_findings_that_no_pass_over_ids_has_revoked_are_shown(
    spark: SparkSession, tmp_path: Path, of_hour_run: int, shown: list[str]
) -> None:
    """The rule is that of the report: a verdict of one hour stands if it is newer than the last pass."""
    id = event_id("k")
    lake = Lake(spark, str(tmp_path))
    evidence = [answer(504, at=NOW_MS - 3 * HOUR_MS, id=id), answer(202, id=id)]
    lake.append_once("deliveries", reduced(spark, evidence), 1)
    found: dict[str, Any] = {"kind": "stuck", "id": id, "count": 0, "last_ms": NOW_MS, "coordinates": []}
    rows = [
        {**found, "scope": HOUR, "cause": "202", "run": of_hour_run},
        {**found, "scope": IDS, "cause": "504", "run": 1},
        {**found, "scope": IDS, "kind": None, "run": 1},
    ]
    lake.append_once("findings", spark.createDataFrame(rows, schemas.of("findings")), 1)
    lines = list(show.show(spark, SharedSettings(), str(tmp_path), "k"))
    causes = sorted(line.split("/")[1].split(",")[0] for line in lines if line.startswith("finding "))
    assert causes == shown
