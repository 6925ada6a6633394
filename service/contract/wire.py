"""The wire contract, version 1: the format of all records and headers that Fencepost writes, and of ids.

Standard library only: the job and the tests read with these functions. The service writes with them too, except for
ledger entries and answers: tests compare the bytes of its faster encoders with those of this module. Test vectors with
the exact bytes are in `tests/vectors/v1`. A change here is a new version of the contract: a program that reads a newer
version than it knows refuses (NewerVersion). A field that older programs may ignore is no change.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from types import MappingProxyType
from typing import Any, Final, NamedTuple

VERSION: Final = 1
LEDGER_VERSIONS: Final = frozenset({VERSION, 2})
"""Versions of a ledger record that are read. Version 2, of some releases, is version 1 with `topic_ids`.

The service writes version 1 with that field: a process of release 0.1.0 skips records of an unknown version, and would
write their events a second time.
"""
KEY_HEADER: Final = "idempotency-key"
STAMP_HEADER: Final = "fencepost"
TRACE_HEADER: Final = "traceparent"
CODE_HEADER: Final = "fencepost-code"
DETAIL_HEADER: Final = "fencepost-detail"
TOPIC_HEADER: Final = "fencepost-topic"
PARTITION_HEADER: Final = "fencepost-partition"
TIMESTAMP_HEADER: Final = "fencepost-timestamp"
CALLER_HEADER: Final = "fencepost-caller"
"""Headers of a dead letter, behind the event's own: why it was refused, what was asked for, and by whom."""
RESERVED_HEADERS: Final = frozenset({KEY_HEADER, STAMP_HEADER})

ID_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 8
ABSENT: Final = b"\xff\xff\xff\xff"
_LENGTH: Final = Struct(">I")
_VERSION: Final = str(VERSION)  # to format a text takes less than to format a number
VERSION_MOST: Final = 9_999
"""Of a later version. A greater number is no version, but garbage."""
STAMP_VERSION: Final = r"([1-9][0-9]{0,3});"
"""The begin of a `fencepost` header of any version: a regular expression for Python, Java and Spark."""
_STAMP_VERSION: Final = re.compile(STAMP_VERSION.encode())

INSTANCE: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# Kafka's rule for topic names, which need no escaping in JSON.
TOPIC_CHARS_MAX: Final = 249
TOPIC: Final = re.compile(rf"[a-zA-Z0-9._-]{{1,{TOPIC_CHARS_MAX}}}")

GENERATION_KEY: Final = b"generation"
_BARRIER: Final = re.compile(rb"barrier/([0-9]{1,4})")
_RETENTION: Final = re.compile(rb"retention/([0-9]{1,9})")

Header = tuple[str, bytes]


class WireError(ValueError):
    """Bytes that do not follow this version of the wire contract; the text says why."""


class NewerVersion(WireError):
    """Data of a version that only a newer release writes. A program that skipped the data would miss evidence."""


def is_newer(version: object, known: Collection[int]) -> bool:
    """Whether a version is one that a newer release may have introduced; no other value is a version."""
    return type(version) is int and max(known) < version <= VERSION_MOST


def newer_version(what: str, version: object, known: Collection[int]) -> NewerVersion:
    """Make the error that names the data, e.g. "a ledger record", its version, and the remedy."""
    return NewerVersion(
        f"{what} of version {version}, which a newer release has written: this one reads version {max(known)} at most; "
        "run the newer release"
    )


def _check_version(version: object, known: Collection[int], what: str) -> None:
    """Raise NewerVersion for a version that only a newer release writes, WireError for another unknown one."""
    if is_newer(version, known):
        raise newer_version(what, version, known)
    if version not in known:
        raise WireError(f"{what} of version {version!r}; this release reads {sorted(known)}")


# ---------------------------------------------------------------------------------------------- names of topics


def ledger_topic(namespace: str) -> str:
    """Name the topic whose partition n belongs to slot n; it has slots_max partitions."""
    return f"{namespace}.ledger"


def requests_topic(namespace: str) -> str:
    """Name the topic of the journal of answers."""
    return f"{namespace}.requests"


def control_topic(namespace: str) -> str:
    """Name the topic of the generations and barriers; one partition, compacted."""
    return f"{namespace}.control"


def findings_topic(namespace: str) -> str:
    """Name the topic of the audit's findings, keyed by finding; compacted."""
    return f"{namespace}.findings"


def internal_topics(namespace: str) -> tuple[str, ...]:
    """Name all of a namespace's own topics."""
    return tuple(name(namespace) for name in (ledger_topic, requests_topic, control_topic, findings_topic))


def is_kafka_topic(topic: str) -> bool:
    """Check whether a topic is one of Kafka's own, such as __consumer_offsets."""
    return topic.startswith("__")


def transactional_id(namespace: str, slot: int) -> str:
    """Name the `transactional.id` of a slot, which outlives each process (KIP-98)."""
    return f"{namespace}.slot.{slot}"


# ------------------------------------------------------------------------------------------ ids and fingerprints


def event_id(key: str, scope: str = "") -> bytes:
    """Make the 16-byte id of an idempotency key (ASCII, unquoted) in its scope: a caller's name, or `source:NAME`."""
    return hashlib.sha256(f"{scope}\0{key}".encode()).digest()[:ID_BYTES]


def member_id(key: str, index: int | str, scope: str = "") -> bytes:
    """Make the 16-byte id of a member of the request with this key: by its index (from 0), or by a name of its own.

    A colon before a name keeps the name "0" apart from the index 0: a key may be that of both kinds of requests.
    """
    own = index if isinstance(index, int) else f":{index}"
    return hashlib.sha256(f"{scope}\0{key}\0{own}".encode()).digest()[:ID_BYTES]


def fingerprint(
    topic: str, partition: int | None, key: bytes | None, headers: Sequence[Header], value: bytes | None
) -> bytes:
    """Make the 8-byte fingerprint that distinguishes a retry from another request under the same key.

    Hashes the request's topic, partition (decimal ASCII; absent if not given), record key, the client's headers sorted
    by (name, value) as name then value, and value; each field as a 4-byte big-endian length and its bytes, an absent
    field as ffffffff.
    """
    packed = _field(topic.encode()) + (ABSENT if partition is None else _field(b"%d" % partition)) + _field(key)
    if headers:
        for name, content in sorted([(name.encode(), content) for name, content in headers]):
            packed += _field(name) + _field(content)
    return hashlib.sha256(packed + _field(value)).digest()[:FINGERPRINT_BYTES]


def _field(content: bytes | None) -> bytes:
    return ABSENT if content is None else _LENGTH.pack(len(content)) + content


def batch_fingerprint(members: Iterable[bytes]) -> bytes:
    """Make the 8-byte fingerprint of an atomic batch from its members' fingerprints in order.

    It can be computed from the ledger, which has only the members' fingerprints. If the batch commits offsets of a
    group, their fingerprint (`offsets_fingerprint`) is the last one.
    """
    return hashlib.sha256(b"".join(members)).digest()[:FINGERPRINT_BYTES]


def offsets_fingerprint(group: str, positions: Iterable[tuple[str, int, int, str]]) -> bytes:
    """Make the 8-byte fingerprint of a group's offsets; positions are (topic, partition, offset, metadata).

    Hashes the group, then each position in the order of topics and partitions; each field as in `fingerprint`. The
    member and its generation are left out: they may change between two attempts of one request.
    """
    packed = _field(group.encode())
    for topic, partition, offset, metadata in sorted(positions):
        packed += _field(topic.encode()) + _field(b"%d" % partition) + _field(b"%d" % offset)
        packed += _field(metadata.encode())
    return hashlib.sha256(packed).digest()[:FINGERPRINT_BYTES]


# ------------------------------------------------------------------------------------------------- record header


class Stamp(NamedTuple):
    """The `fencepost` header of an event: its claim, and its producer. `accepted_at` is in ms since the Unix epoch.

    `fingerprint` is that of the claim; where a schema of a registry encoded key and value, that of the encoded record.
    """

    id: bytes
    fingerprint: bytes
    accepted_at: int
    slot: int
    producer_id: int
    epoch: int
    instance: str

    def encode(self) -> bytes:
        """Encode the header: ASCII, `;`-separated, the version first."""
        writer = stamp_writer(self.slot, self.producer_id, self.epoch, self.instance)
        return encode_stamp(self.id, self.fingerprint, stamp_end(self.accepted_at, writer))

    @classmethod
    def decode(cls, raw: bytes) -> "Stamp":
        """Decode a header. Raises WireError if it is not one of this version, NewerVersion for one of a later."""
        found = _STAMP_VERSION.match(raw)
        if found is not None and is_newer(int(found[1]), (VERSION,)):
            raise newer_version(f"a {STAMP_HEADER} header", int(found[1]), (VERSION,))
        try:
            version, id_hex, fp_hex, at, slot, pid, epoch, instance = raw.decode("ascii").split(";")
            stamp = cls(
                bytes.fromhex(id_hex), bytes.fromhex(fp_hex), int(at), int(slot), int(pid), int(epoch), instance
            )
        except ValueError as error:
            raise WireError(f"no {STAMP_HEADER} header of version {VERSION}: {raw[:200]!r}") from error
        if version != str(VERSION) or len(stamp.id) != ID_BYTES or len(stamp.fingerprint) != FINGERPRINT_BYTES:
            raise WireError(f"no {STAMP_HEADER} header of version {VERSION}: {raw[:200]!r}")
        return stamp


def stamp_writer(slot: int, producer_id: int, epoch: int, instance: str) -> str:
    """Encode the part of the header that is the same for all records of a transaction."""
    return f"{slot};{producer_id};{epoch};{instance}"


def stamp_end(accepted_at: int, writer: str) -> str:
    """Encode the part of the header that is the same for all records of a transaction with this `accepted_at`."""
    return f"{accepted_at};{writer}"


def encode_stamp(id: bytes, fingerprint: bytes, end: str) -> bytes:
    """Encode a `fencepost` header, without making a Stamp; `end` comes from `stamp_end`."""
    return f"{_VERSION};{id.hex()};{fingerprint.hex()};{end}".encode()


# -------------------------------------------------------------------------------------------------------- ledger


class Entry(NamedTuple):
    """The coordinates of one event of a ledger record. `at` is accepted_at, `ts` the record's timestamp, both in ms.

    A member of an atomic batch has the batch's id in `batch`, and its index in `i`. `ttl` is the retention of the key
    by a rule, in seconds; 0, and left out of the JSON, for the service's own. Earlier releases wrote none. `refused` is
    left out but for a dead letter, an event that was refused and is in a quarantine topic: its problem's code, a space,
    and its detail. `topic` is the quarantine topic then, `fp` the fingerprint of what was asked for.
    """

    id: bytes
    fp: bytes
    at: int
    topic: str
    partition: int
    offset: int
    ts: int
    batch: bytes | None = None
    i: int | None = None
    ttl: int = 0
    refused: str = ""

    def encode(self) -> str:
        """Encode the entry as JSON text."""
        return encode_entry(*self)


def encode_entry(
    id: bytes,
    fp: bytes,
    at: int,
    topic: str,
    partition: int,
    offset: int,
    ts: int,
    batch: bytes | None = None,
    i: int | None = None,
    ttl: int = 0,
    refused: str = "",
) -> str:
    """Encode an entry as JSON text, without making an Entry; topic names need no escaping (see TOPIC)."""
    member = "" if batch is None else f',"batch":"{batch.hex()}","i":{i}'
    kept = f',"ttl":{ttl}' if ttl else ""
    why = f',"refused":{json.dumps(refused, ensure_ascii=False)}' if refused else ""
    return (
        f'{{"id":"{id.hex()}","fp":"{fp.hex()}","at":{at},"topic":"{topic}",'
        f'"partition":{partition},"offset":{offset},"ts":{ts}{member}{kept}{why}}}'
    )


@dataclass(frozen=True, slots=True)
class Begin:
    """The begin record, which a process commits when it takes a slot. Its offset is the term; `at` is in ms."""

    slot: int
    producer_id: int
    epoch: int
    instance: str
    generation: int
    at: int

    def encode(self) -> bytes:
        """Encode the record as JSON."""
        return (
            f'{{"v":{VERSION},"begin":true,"slot":{self.slot},"pid":{self.producer_id},"epoch":{self.epoch},'
            f'"instance":"{self.instance}","generation":{self.generation},"at":{self.at}}}'
        ).encode()


class CommittedOffset(NamedTuple):
    """The offset of a group in a partition, committed by a transaction."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class LedgerOffsets:
    """The offsets of a consumer group that an atomic batch has committed in the transaction of a ledger record.

    `batch` is the batch's id, `fp` its fingerprint, `at` and `ttl` are as in Entry. `partition` of `__consumer_offsets`
    has them, where the transaction begins at `offset`; both are None if the service may not see that topic.
    """

    batch: bytes
    fp: bytes
    at: int
    group: str
    member: str
    generation: int
    positions: Sequence[CommittedOffset]
    partition: int | None = None
    offset: int | None = None
    ttl: int = 0

    def encode(self) -> str:
        """Encode them as JSON text."""
        coordinates = {} if self.partition is None else {"partition": self.partition, "offset": self.offset}
        fields = {
            "batch": self.batch.hex(),
            "fp": self.fp.hex(),
            "at": self.at,
            **({"ttl": self.ttl} if self.ttl else {}),
            "group": self.group,
            "member": self.member,
            "generation": self.generation,
            **coordinates,
            "positions": [position._asdict() for position in self.positions],
        }
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """The events of one transaction; without entries, the record through which a store recovery reads a partition.

    `offsets`: those that the transaction has committed too; it then holds one atomic batch, perhaps without events.

    `topic_ids`: the known ids (KIP-516) of the entries' topics, by name. A topic that was deleted and created again has
    another id. Earlier releases wrote no ids.
    """

    slot: int
    producer_id: int
    epoch: int
    instance: str
    entries: Sequence[Entry]
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    offsets: LedgerOffsets | None = None

    def encode(self) -> bytes:
        """Encode the record as JSON."""
        head = self.slot, self.producer_id, self.epoch, self.instance
        offsets = "" if self.offsets is None else self.offsets.encode()
        return encode_ledger(*head, map(Entry.encode, self.entries), self.topic_ids, offsets)


def encode_ledger(
    slot: int,
    producer_id: int,
    epoch: int,
    instance: str,
    entries: Iterable[str],
    topic_ids: Mapping[str, str] = MappingProxyType({}),
    offsets: str = "",
) -> bytes:
    """Encode a ledger record from entries, and a group's offsets, that are JSON text already.

    `topic_ids` has the known ids of the entries' topics, by name. It and `offsets` are left out if they are empty.
    """
    topics = ",".join([f'"{name}":"{topic_id}"' for name, topic_id in topic_ids.items()])
    known = f'"topic_ids":{{{topics}}},' if topics else ""
    committed = f',"offsets":{offsets}' if offsets else ""
    return (
        f'{{"v":{VERSION},"slot":{slot},"pid":{producer_id},"epoch":{epoch},"instance":"{instance}",'
        f'{known}"entries":[{",".join(entries)}]{committed}}}'
    ).encode()


def decode_ledger(raw: bytes | None) -> Begin | LedgerRecord:
    """Decode a record of the ledger topic. Raises WireError if it is not one of LEDGER_VERSIONS, or NewerVersion."""
    try:
        body = json.loads(raw or b"")
        _check_version(body["v"], LEDGER_VERSIONS, "a ledger record")
        head = (_int(body["slot"]), _int(body["pid"]), _int(body["epoch"]), _str(body["instance"]))
        if body.get("begin"):
            return Begin(*head, generation=_int(body["generation"]), at=_int(body["at"]))
        topic_ids = {name: _str(topic_id) for name, topic_id in body.get("topic_ids", {}).items()}
        entries = [_entry(entry) for entry in body["entries"]]
        return LedgerRecord(*head, entries, topic_ids, _offsets(body["offsets"]) if "offsets" in body else None)
    except NewerVersion:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"no ledger record: {(raw or b'')[:200]!r} ({error})") from error


def _entry(body: dict[str, Any]) -> Entry:
    batch, i = body.get("batch"), body.get("i")
    return Entry(
        bytes.fromhex(body["id"]),
        bytes.fromhex(body["fp"]),
        _int(body["at"]),
        _str(body["topic"]),
        _int(body["partition"]),
        _int(body["offset"]),
        _int(body["ts"]),
        None if batch is None else bytes.fromhex(batch),
        None if i is None else _int(i),
        _int(body.get("ttl", 0)),
        _str(body.get("refused", "")),
    )


def _offsets(body: dict[str, Any]) -> LedgerOffsets:
    partition, offset = body.get("partition"), body.get("offset")
    return LedgerOffsets(
        bytes.fromhex(body["batch"]),
        bytes.fromhex(body["fp"]),
        _int(body["at"]),
        _str(body["group"]),
        _str(body["member"]),
        _int(body["generation"]),
        [
            CommittedOffset(_str(each["topic"]), _int(each["partition"]), _int(each["offset"]))
            for each in body["positions"]
        ],
        None if partition is None else _int(partition),
        None if offset is None else _int(offset),
        _int(body.get("ttl", 0)),
    )


def _int(found: object) -> int:
    if type(found) is not int:
        raise TypeError(f"{found!r} is no integer")
    return found


def _str(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{found!r} is no string")
    return found


# ------------------------------------------------------------------------------------------------------- journal


def encode_answer(
    id: bytes,
    fp: bytes,
    at: int,
    status: int,
    code: str | None,
    replayed: bool,
    latency_ms: float,
    topic: str,
    partition: int | None,
    offset: int | None,
) -> str:
    """Encode an answer for the journal as JSON text; partition and offset are None unless the event is in Kafka.

    `at` is the event's accepted_at, if it has one, else the time of the answer, in ms.
    """
    where = f'"partition":{"null" if partition is None else partition},"offset":{"null" if offset is None else offset}'
    return (
        f'{{"id":"{id.hex()}","fp":"{fp.hex()}","at":{at},"status":{status},'
        f'"code":{"null" if code is None else json.dumps(code)},"replayed":{"true" if replayed else "false"},'
        f'"latency_ms":{latency_ms:.3f},"topic":"{topic}",{where}}}'
    )


def encode_answers(instance: str, answers: Iterable[str]) -> bytes:
    """Encode a record of the journal: the answers of one flush."""
    return f'{{"v":{VERSION},"instance":"{instance}","answers":[{",".join(answers)}]}}'.encode()


# ------------------------------------------------------------------------------------------------------- control


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation record: from its offset on, `store` ("run_id/master_replid") holds the claims. `at` is in ms."""

    store: str
    instance: str
    at: int

    def encode(self) -> bytes:
        """Encode the record as JSON."""
        return json.dumps(
            {"v": VERSION, "store": self.store, "instance": self.instance, "at": self.at}, separators=(",", ":")
        ).encode()

    @classmethod
    def decode(cls, raw: bytes | None) -> "Generation":
        """Decode a generation record. Raises WireError if it is not one of this version, NewerVersion for a later."""
        try:
            body = json.loads(raw or b"")
            _check_version(body["v"], (VERSION,), "a generation record")
            return cls(body["store"], body["instance"], body["at"])
        except NewerVersion:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"no generation record: {(raw or b'')[:200]!r} ({error})") from error


def barrier_key(slot: int | str) -> bytes:
    """Encode the key of a barrier in the control topic; compaction keeps one for each slot."""
    return f"barrier/{slot}".encode()


def slot_of_barrier(key: bytes | None) -> int | None:
    """Decode the slot from a barrier's key; None for another key."""
    found = _BARRIER.fullmatch(key or b"")
    return None if found is None else int(found[1])


def retention_key(ttl_s: int) -> bytes:
    """Encode the key of a retention in the control topic, in seconds; compaction keeps each one that was in force."""
    return f"retention/{ttl_s}".encode()


def ttl_of_retention(key: bytes | None) -> int | None:
    """Decode the seconds from the key of a retention; None for another key."""
    found = _RETENTION.fullmatch(key or b"")
    return None if found is None else int(found[1])


def encode_retention(instance: str, at: int) -> bytes:
    """Encode a retention record: from then on keys may be remembered for as long as its key says. `at` is in ms."""
    return json.dumps({"v": VERSION, "retention": True, "instance": instance, "at": at}, separators=(",", ":")).encode()


def encode_barrier(instance: str, nonce: str, at: int) -> bytes:
    """Encode a barrier. A reader that has read it has read all generation records before it. `at` is in ms."""
    return json.dumps(
        {"v": VERSION, "barrier": True, "instance": instance, "nonce": nonce, "at": at}, separators=(",", ":")
    ).encode()
