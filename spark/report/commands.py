"""Commands that print the records of a finding."""

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any, Final

from spark.rules.kinds import UNKEYED

RECORDS_MAX: Final = 5


def show(run: Mapping[str, Any], id: str) -> str:
    """Return the command of the job that prints all data about an id, and its records."""
    return f"python -m spark show {id} --lake {quote(run['lake'])}"


def kcat(run: Mapping[str, Any], finding: Mapping[str, Any]) -> list[str]:
    """Return a kcat (1.7) command for each of a finding's first records, which prints the record as JSON."""
    return [
        f"kcat -C -q -J -e -b {quote(run['kafka'])} -t {quote(topic)} -p {partition} -o {offset} -c {count}"
        for topic, partition, offset, count in _spans(finding)
    ]


def console_consumer(run: Mapping[str, Any], finding: Mapping[str, Any]) -> str | None:
    """Return the command of Kafka's console consumer (4.2 or newer) for a finding's first record, None without one."""
    for topic, partition, offset, count in _spans(finding):
        shown = " ".join(
            f"--formatter-property print.{name}=true" for name in ("key", "headers", "timestamp", "partition", "offset")
        )
        return (
            f"kafka-console-consumer.sh --bootstrap-server {quote(run['kafka'])} --topic {quote(topic)} "
            f"--partition {partition} --offset {offset} --max-messages {count} --isolation-level read_committed {shown}"
        )
    return None


def _spans(finding: Mapping[str, Any]) -> Sequence[tuple[str, int, int, int]]:
    """Return topic, partition, first offset and number of records: of each copy, or of a partition's first records."""
    copies = finding["coordinates"] or []
    if copies:
        return [(copy["topic"], copy["partition"], copy["offset"], 1) for copy in copies[:RECORDS_MAX]]
    if finding["kind"] == UNKEYED.name and finding["first_offset"] is not None:
        return [(finding["topic"], finding["partition"], finding["first_offset"], min(finding["count"], RECORDS_MAX))]
    return []
