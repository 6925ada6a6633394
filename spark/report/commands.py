"""What to type to see the records that a finding is about."""

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any, Final

RECORDS_MAX: Final = 5


def show(run: Mapping[str, Any], id: str) -> str:
    """The job's own command: all that the lake knows of an id, and its records."""
    return f"python -m spark show {id} --lake {quote(run['lake'])}"


def kcat(run: Mapping[str, Any], finding: Mapping[str, Any]) -> list[str]:
    """A kcat (1.7) command for each of a finding's first records: prints it as JSON, with its headers."""
    return [
        f"kcat -C -q -J -e -b {quote(run['kafka'])} -t {quote(topic)} -p {partition} -o {offset} -c {count}"
        for topic, partition, offset, count in _spans(finding)
    ]


def console_consumer(run: Mapping[str, Any], finding: Mapping[str, Any]) -> str | None:
    """The same for a finding's first record with the tool of Kafka's own distribution (4.2 or newer)."""
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
    """Topic, partition, first offset and number of records: a finding's copies, or the first of a partition's."""
    copies = finding["coordinates"] or []
    if copies:
        return [(one["topic"], one["partition"], one["offset"], 1) for one in copies[:RECORDS_MAX]]
    if finding["kind"] == "unkeyed" and finding["first_offset"] is not None:
        return [(finding["topic"], finding["partition"], finding["first_offset"], min(finding["count"], RECORDS_MAX))]
    return []
