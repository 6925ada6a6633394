"""Reads what is known of lost and missing events, and makes the entries of a plan (entries.py decides)."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import Row

from service.contract.wire.ids import event_id
from spark.errors import CannotRun
from spark.repair import bodies, copier, entries, evidence
from spark.repair.bodies import Body
from spark.repair.entries import Entry
from spark.repair.invocation import Invocation
from spark.rules import kinds


def lost_events(invocation: Invocation, found: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Decide about the lost events among findings."""
    lost = [finding for finding in found if finding["kind"] == kinds.LOST.name]
    if not lost:
        return []
    ids = [finding["id"] for finding in lost]
    scopes = ("", *invocation.options.scopes)
    renewed = {id: [event_id(entries.new_key(id), scope).hex() for scope in scopes] for id in ids}
    rows = evidence.rows_of_ids(invocation.lake, [*ids, *(one for ones in renewed.values() for one in ones)])
    # Of an unknown age, for which the service refuses each key that it does not remember.
    accepted = {id: min((row["accepted_ms"] for row in rows.get(id, ())), default=0) for id in ids}
    lost_at = {finding["id"]: entries.coordinates_of(finding) for finding in lost}
    claims = evidence.claims(invocation.spark, invocation.shared, accepted, lost_at)
    given = _bodies(invocation.options.bodies, scopes, set(ids))
    done, now_ms = evidence.history(invocation.lake), invocation.now_ms()

    def known_of(id: str) -> entries.LostEvidence:
        record = evidence.record_of(row for one in (id, *renewed[id]) for row in rows.get(one, ()))
        return entries.LostEvidence(accepted[id], record, claims.get(id, entries.NO_CLAIMS))

    run = invocation.audited.run
    return [entries.lost(finding, known_of(finding["id"]), given, done, run, now_ms) for finding in lost]


def _bodies(names: Sequence[str], scopes: Sequence[str], ids: Collection[str]) -> dict[str, list[Body]]:
    """Read the bodies of events with these ids from the files of --bodies, by id."""
    known: dict[str, list[Body]] = {}
    for name in names:
        try:
            with Path(name).open("rb") as lines:
                for id, some in bodies.read(lines, name, scopes, ids).items():
                    known.setdefault(id, []).extend(some)
        except OSError as error:
            raise CannotRun(f"--bodies {name!r} cannot be read: {error}") from None
    return known


def missing_events(invocation: Invocation, found: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Decide about the events that sinks lack among findings."""
    missing = [finding for finding in found if finding["kind"] == kinds.MISSING_IN_SINK.name]
    if not missing:
        return []
    rows = evidence.rows_of_ids(invocation.lake, [finding["id"] for finding in missing])
    known = {id: {_coordinates(row): row for row in some if row["count"]} for id, some in rows.items()}
    records = [entries.records_of(finding, known.get(finding["id"], {}).keys()) for finding in missing]
    # Several ids, if a topic was recreated: the record is that of one of them.
    wanted: dict[entries.Coordinates, set[str]] = {}
    for finding, of_finding in zip(missing, records, strict=True):
        for at in of_finding:
            wanted.setdefault(at, set()).add(finding["id"])
    proven = _proven(invocation, wanted, known)
    done, into = evidence.history(invocation.lake), invocation.options.into
    with invocation.kafka() as admin:
        topics = admin.describe(sorted({into, *(topic for topic, _, _ in wanted)} - {""}))
    topic_ids = {name: topic.topic_id for name, topic in topics.items()}
    return [
        entries.missing(
            finding,
            min((row["accepted_ms"] for row in rows.get(finding["id"], ())), default=0),
            {at: proven.get((finding["id"], at)) for at in of_finding},
            done,
            topic_ids,
            into,
        )
        for finding, of_finding in zip(missing, records, strict=True)
    ]


def _proven(
    invocation: Invocation,
    wanted: Mapping[entries.Coordinates, Collection[str]],
    known: Mapping[str, Mapping[entries.Coordinates, Row]],
) -> dict[tuple[str, entries.Coordinates], bool]:
    """Read the records at the wanted coordinates, and check for each id there whether the record is the one that the
    audit has read. `known` are the rows (evidence.rows_of_ids) by id and coordinates. Absent records are left out."""
    proven: dict[tuple[str, entries.Coordinates], bool] = {}
    for record in copier.records_at(invocation.spark, invocation.shared, list(wanted)):
        for id in wanted[record.coordinates]:
            row = known[id][record.coordinates]
            fingerprint = None if row["fingerprint"] is None else bytes(row["fingerprint"]).hex()
            has_header = bool(row["has_fencepost_header"])
            proven[id, record.coordinates] = copier.is_record_of(record, id, fingerprint, has_header=has_header)
    return proven


def _coordinates(row: Row) -> entries.Coordinates:
    return row["topic"], row["partition"], row["offset"]
