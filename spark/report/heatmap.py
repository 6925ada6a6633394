"""Where the records lie and where the trouble is: hours and partitions, cut down to what a page can show."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from spark.rules.balance import HOUR_FORMAT, Cells
from spark.tables.hours import FORMAT

COLUMNS_MAX: Final = 96
ROWS_MAX: Final = 32
# Beyond it the map has a row a topic: what the driver holds must not grow with a cluster.
PARTITIONS_MAX: Final = 500

NO_PARTITION: Final = -1


def cells(rows: DataFrame, *, partitions: bool) -> DataFrame:
    """state.ROW → `hour string, topic, partition, records`: copies by the hour of their acceptance.

    Without `partitions` everything counts for partition -1.
    """
    where = F.col("partition") if partitions else F.lit(NO_PARTITION)
    copies = rows.where("count > 0").select("accepted_hour", "topic", where.alias("partition"), "count")
    summed = copies.groupBy(F.col("accepted_hour").alias("hour"), "topic", "partition")
    return summed.agg(F.sum("count").alias("records")).withColumn("hour", hour_text(F.col("hour")))


def hour_text(hour: Column) -> Column:
    """An hour as the balance names it: text, since a timestamp that is collected is in the machine's own zone."""
    return F.date_format(hour, FORMAT)


def drawn(
    records: Cells, troubles: Iterable[Mapping[str, Any]], topics: Iterable[str], first: str, last: str
) -> dict[str, Any]:
    """The map of report.json: from the first hour of the window (from `first` on) with anything in it to the last.

    `records` as the balance carries them, `troubles` as rows of standing.troubles. What is dated later than the hour
    `last`, in which the run froze the ends, counts in that one: a single wild clock would stretch the map over years.
    """
    audited = set(topics)
    there: dict[tuple[str, int], dict[str, int]] = {}
    amiss: dict[tuple[str, int], dict[str, int]] = {}
    for hour, by_topic in records.items():
        for topic, by_partition in by_topic.items():
            for partition, count in by_partition.items():
                if topic in audited and hour >= first:
                    held = there.setdefault((topic, int(partition)), {})
                    held[min(hour, last)] = held.get(min(hour, last), 0) + count
    for row in troubles:
        hour = min(row["hour"], last)
        if hour >= first and row["topic"] in audited:
            place = (row["topic"], NO_PARTITION if row["partition"] is None else row["partition"])
            found = amiss.setdefault(place, {})
            found[hour] = found.get(hour, 0) + row["records"]
    hours = sorted({hour for rows in (*there.values(), *amiss.values()) for hour in rows})
    if not hours:
        return {"from": None, "hours_a_column": 1, "columns": 0, "rows": [], "partitions_folded": 0}
    start, end = (datetime.strptime(hour, HOUR_FORMAT).replace(tzinfo=UTC) for hour in (hours[0], hours[-1]))
    span = int((end - start) / timedelta(hours=1)) + 1
    step = -(-span // COLUMNS_MAX)
    columns = -(-span // step)
    nth = {hour: n for n, hour in ((_hours_between(start, hour) // step, hour) for hour in hours)}

    def line(counts: Iterable[Mapping[str, int]]) -> list[int]:
        made = [0] * columns
        for each in counts:
            for hour, count in each.items():
                made[nth[hour]] += count
        return made

    places = sorted({*there, *amiss})
    shown, folded = places, []
    if len(places) > ROWS_MAX:
        # The busiest stay, and before them those with trouble.
        worst = sorted(places, key=lambda place: (-_total(amiss, place), -_total(there, place), place))
        shown, folded = sorted(worst[: ROWS_MAX - 1]), worst[ROWS_MAX - 1 :]
    groups = [(topic, partition, [(topic, partition)]) for topic, partition in shown]
    rows = [
        {
            "topic": topic,
            "partition": None if partition == NO_PARTITION else partition,
            "records": line(there.get(place, {}) for place in members),
            "troubled": line(amiss.get(place, {}) for place in members),
        }
        for topic, partition, members in [*groups, *([(None, None, folded)] if folded else [])]
    ]
    return {
        "from": start.isoformat().replace("+00:00", "Z"),
        "hours_a_column": step,
        "columns": columns,
        "rows": rows,
        "partitions_folded": len(folded),
    }


def timeline(
    troubles: Iterable[Mapping[str, Any]], kinds: Iterable[str], first: str, last: str
) -> list[dict[str, Any]]:
    """Rows of standing.troubles → records by hour, kind and cause, for these kinds; hours as on the map (`drawn`)."""
    wanted = set(kinds)
    summed: dict[tuple[str, str, str], int] = {}
    for row in troubles:
        if row["kind"] in wanted and row["hour"] >= first:
            name = (min(row["hour"], last), row["kind"], row["cause"] or "")
            summed[name] = summed.get(name, 0) + row["records"]
    return [
        {"hour": _iso(hour), "kind": kind, "cause": cause or None, "records": count}
        for (hour, kind, cause), count in sorted(summed.items())
    ]


def _total(counts: Mapping[tuple[str, int], Mapping[str, int]], place: tuple[str, int]) -> int:
    return sum(counts.get(place, {}).values())


def _hours_between(start: datetime, hour: str) -> int:
    return int((datetime.strptime(hour, HOUR_FORMAT).replace(tzinfo=UTC) - start) / timedelta(hours=1))


def _iso(hour: str) -> str:
    return hour.replace(" ", "T") + "Z"
