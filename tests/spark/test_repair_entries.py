"""What a plan of `repair` decides, which bytes are proven, and what the answers of the service mean."""

import json
from collections.abc import Callable
from typing import Any, Final
from unittest.mock import MagicMock

import httpx
import pytest

from service.contract.wire.headers import KEY_HEADER, STAMP_HEADER, Stamp
from service.contract.wire.ids import event_id, fingerprint
from spark.errors import CannotRun
from spark.reading.kafka_admin import NO_LEADER_EPOCH, Ends, Topic
from spark.repair import bodies, copier, entries, evidence, layouts, lost_and_missing, send
from spark.repair.copier import Record, is_record_of
from spark.repair.entries import Claimed, Entry, Executed, History, LostEvidence
from spark.settings import RepairOptions
from tests.spark.rows import NOW_MS

ID: Final = event_id("k").hex()
LOST_AT: Final = {"topic": "t", "partition": 0, "offset": 7}
LOST: Final[dict[str, Any]] = {
    "finding_id": f"lost:{ID}",
    "kind": "lost",
    "id": ID,
    "key": None,
    "topic": "t",
    "coordinates": [LOST_AT],
}
VALUE: Final = b'{"a":  1.50}'
FINGERPRINT: Final = fingerprint("t", None, b"r", [("h", b"x")], VALUE).hex()
LINE: Final = b'{"topic":"t","key":"r","headers":{"h":"x"},"value":%b,"idempotency_key":"k"}\n'
CLAIMED: Final = Claimed(frozenset({FINGERPRINT}))


def read(line: bytes = LINE % VALUE, *scopes: str) -> dict[str, list[bodies.Body]]:
    ids = {event_id("k", scope).hex() for scope in ("", *scopes)}
    return bodies.read([b"\n", line], "f", ("", *scopes), ids)


def lost(
    *,
    record: entries.Coordinates | None = None,
    claimed: Claimed = CLAIMED,
    bodies: dict[str, list[bodies.Body]] | None = None,
    history: History | None = None,
    run: int = 5,
) -> Entry:
    known = LostEvidence(NOW_MS, record, claimed)
    of_files = read() if bodies is None else bodies
    return entries.lost(LOST, known, of_files, history or History(), run, NOW_MS + 9)


def test_a_lost_event_is_sent_if_the_ledgers_fingerprint_proves_its_bytes() -> None:
    entry = lost()
    assert (entry.action, entry.key, entry.offset, entry.first_sent_ms) == (entries.SEND, "k", 7, NOW_MS + 9)
    assert entry.is_left  # a plan alone has sent nothing
    assert entry.body is not None
    assert VALUE in entry.body.content
    assert b"idempotency_key" not in entry.body.content
    assert json.loads(entry.body.content) == {"topic": "t", "key": "r", "headers": {"h": "x"}, "value": {"a": 1.5}}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"record": ("t", 1, 9)}, entries.RECORD_EXISTS),
        ({"history": History(written={ID: ("t", 1, 9)})}, entries.REPAIRED),
        ({"claimed": Claimed(frozenset({FINGERPRINT}), is_member=True)}, entries.BATCH_MEMBER),
        ({"bodies": {}}, entries.NO_BYTES),
        ({"claimed": Claimed()}, entries.NO_FINGERPRINT),
        ({"bodies": read(LINE % b'{"a":1.50}')}, entries.OTHER_BYTES),
    ],
)
def test_a_lost_event_is_not_sent_for_a_reason(given: dict[str, Any], reason: str) -> None:
    entry = lost(**given)
    assert (entry.action, entry.reason, entry.body) == (entries.NONE, reason, None)
    assert entry.is_left == (reason not in (entries.RECORD_EXISTS, entries.REPAIRED))


def claim(fp: str | None, offset: int | None = None, **more: Any) -> dict[str, Any]:
    return {"fp": fp, "topic": "t", "partition": 0, "offset": offset, **more}


ENTRY: Final[dict[str, Any]] = {"batch": None, "refused": None}


@pytest.mark.parametrize(
    ("rows", "proven"),
    [
        ([claim("a", 7, **ENTRY), claim("b", status=422)], {"a"}),
        ([claim("a", 7, status=201), claim("b", status=503), claim("c", status=400)], {"a"}),
        # A dead letter, whose ledger entry has the fingerprint of what was refused.
        ([claim("b", 3, batch=None, refused="invalid-event x")], set()),
        # Another claim of the id, at other coordinates; 202 and 504 name what was asked for.
        ([claim("a", 7, **ENTRY), claim("b", 9, **ENTRY), claim("c", status=504)], {"a"}),
        ([claim("b", 9, **ENTRY), claim("c", status=504)], {"b"}),
        ([claim("b", status=504), claim("c", status=202), claim("d", status=409)], {"b", "c"}),
        ([claim(None, 7, status=201), claim("a", 9, **ENTRY)], {"a"}),
    ],
)
def test_only_accepted_events_prove_a_fingerprint(rows: list[dict[str, Any]], proven: set[str]) -> None:
    assert entries.claimed(rows, [("t", 0, 7)]) == Claimed(frozenset(proven))
    member = claim("x", 7, batch="b", refused=None)
    assert entries.claimed([*rows, member], []).is_member


def test_an_earlier_plan_tells_when_the_new_key_may_first_have_been_sent_and_what_is_in_doubt() -> None:
    def row(plan: int, outcome: str | None, **more: Any) -> dict[str, Any]:
        made = lost(**more)
        return {**made.row(plan), "outcome": outcome, "first_sent_ms": 10 * plan}

    executed = {2: Executed(5), 3: Executed(5)}
    history = History.of([row(1, None), row(2, None), row(3, entries.REPLAYED)], executed)
    assert (history.first_sent_ms, history.unsettled_run, history.written) == ({ID: 20}, {ID: 5}, {})
    entry = lost(history=history)
    assert (entry.first_sent_ms, entry.doubtful) == (20, True)
    assert not lost(history=history, run=6).doubtful


def test_bytes_may_be_in_base64_or_a_tombstone_and_belong_to_a_caller() -> None:
    line = b'{"topic":"t","value_base64":"AAE=","partition":3,"idempotency_key":"k"}'
    (body,) = read(line, "shop")[event_id("k", "shop").hex()]
    assert (body.scope, body.fingerprint) == ("shop", fingerprint("t", 3, None, [], b"\0\1").hex())
    (body,) = read(b'{"topic":"t","key":"r","value":null,"idempotency_key":"k"}')[ID]
    assert body.fingerprint == fingerprint("t", None, b"r", [], None).hex()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "--bodies f:2: "),
        (b'{"topic":"t","value":1,"idempotency_key":"k","x":1}', "unknown field `x`"),
        (b'{"topic":"t","idempotency_key":"k"}', "--bodies f:2: write exactly one of value and value_base64"),
        (b'{"topic":"t","value_base64":"?","idempotency_key":"k"}', "value_base64: "),
        (b" " * bodies.LINE_BYTES_MAX + b"{}", "a line has at most"),
    ],
)
def test_a_wrong_line_is_named(line: bytes, why: str) -> None:
    with pytest.raises(CannotRun) as caught:
        read(line)
    assert why in str(caught.value)


AT: Final = ("t", 0, 7)
TOPIC_IDS: Final = {"t": "T", "into": "I", "other": "O"}


def missing(
    records: dict[Any, bool | None],
    history: History | None = None,
    *,
    sink: str = "w",
    topic_ids: dict[str, str] = TOPIC_IDS,
    target: str = "into",
) -> Entry:
    finding = {**LOST, "finding_id": f"missing_in_sink:{sink}:{ID}", "sink": sink}
    return entries.missing(finding, 1, records, history or History(), topic_ids, target)


def test_a_missing_events_record_is_copied_once_into_each_target_if_it_is_the_event() -> None:
    assert missing({AT: True}).action == entries.COPY
    assert missing({AT: None}).reason == entries.GONE
    assert missing({}).reason == entries.GONE
    assert missing({AT: False}).reason == entries.OTHER_RECORD
    copied = {**missing({AT: True}).row(4), "outcome": entries.COPIED, "written_topic": "into"}
    done = History.of([copied], {4: Executed(5, TOPIC_IDS)})
    assert missing({AT: True}, done).reason == entries.REPAIRED
    assert missing({AT: True}, done, target="other").action == entries.COPY
    # Another sink lacks the same event.
    assert missing({AT: True}, done, sink="v").reason == entries.REPAIRED
    # The target was recreated, or the source was, whose record is another one.
    assert missing({AT: True}, done, topic_ids={**TOPIC_IDS, "into": "I2"}).action == entries.COPY
    assert missing({AT: True}, done, topic_ids={**TOPIC_IDS, "t": "T2"}).action == entries.COPY
    # Retention has deleted the record since.
    assert missing({}, done).reason == entries.REPAIRED


def test_a_missing_events_second_record_is_copied_if_the_first_is_gone() -> None:
    entry = missing({AT: None, ("t", 0, 90): True})
    assert (entry.action, entry.offset) == (entries.COPY, 90)
    elsewhere, again = ("u", 0, 3), ("t", 0, 90)
    assert entries.records_of(LOST, {elsewhere, again, AT}) == [AT, again]
    assert entries.records_of(LOST, {elsewhere, again}) == [again]


def test_a_record_is_proven_also_if_a_claim_on_its_offset_counts_in_another_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The acceptance was not plausible when the record was read, and is when a replayed answer with the same is."""
    at = {"topic": "t", "partition": 0, "offset": 7, "accepted_ms": NOW_MS}
    own = {"count": 1, "has_fencepost_header": False, "fingerprint": bytes.fromhex(FINGERPRINT)}
    claim = {"count": 0, "has_fencepost_header": None, "fingerprint": None}
    rows = {ID: [{**at, **own}, {**at, **claim}]}
    monkeypatch.setattr(evidence, "rows_of_ids", lambda lake, ids: rows)
    monkeypatch.setattr(evidence, "history", lambda lake: History())
    record = Record("t", 0, 7, 1, b"r", VALUE, ((KEY_HEADER, b"k"), ("h", b"x")))
    monkeypatch.setattr(copier, "records_at", lambda spark, shared, wanted: [record])
    described = {name: Topic(name, id, 1) for name, id in TOPIC_IDS.items()}
    finding = {**LOST, "finding_id": f"missing_in_sink:w:{ID}", "kind": "missing_in_sink", "sink": "w"}
    invocation = MagicMock(options=RepairOptions(lake="l", into="into"))
    invocation.kafka.return_value.__enter__.return_value.describe.return_value = described
    (entry,) = lost_and_missing.missing_events(invocation, [finding])
    assert (entry.action, entry.reason, entry.offset) == (entries.COPY, None, 7)


def test_a_record_is_recognised_by_its_header_or_its_content() -> None:
    stamp = Stamp(bytes.fromhex(ID), bytes.fromhex(FINGERPRINT), 1, 2, 3, 4, "i").encode()
    own = ((KEY_HEADER, b"k"), ("h", b"x"))
    bare = Record("t", 0, 7, 1, b"r", VALUE, own)
    stamped = Record("t", 0, 7, 1, b"r", VALUE, (*own, (STAMP_HEADER, stamp)))
    assert is_record_of(stamped, ID, FINGERPRINT, has_header=True)
    assert is_record_of(bare, ID, FINGERPRINT, has_header=False)
    assert not is_record_of(bare, ID, FINGERPRINT, has_header=True)
    assert not is_record_of(stamped, ID, FINGERPRINT, has_header=False)
    assert not is_record_of(stamped, ID, "00" * 8, has_header=True)
    assert not is_record_of(bare, ID, "00" * 8, has_header=False)


def copy(nth: int, cause: str | None, id: str = "i") -> dict[str, Any]:
    return {
        "finding_id": f"duplicate:{id}",
        "id": id,
        "key": None,
        "topic": "t",
        "partition": 0,
        "offset": nth,
        "cause": cause,
        "nth": nth,
    }


@pytest.mark.parametrize(
    ("copies", "dropped"),
    [
        ([copy(0, None), copy(1, "rewrite"), copy(2, "rewrite")], [1, 2]),
        ([copy(2, "rewrite"), copy(1, None), copy(0, "foreign_writer")], [0, 2]),
        # The first copy is in another topic: this topic keeps one.
        ([copy(1, "rewrite"), copy(2, "rewrite")], [2]),
        ([copy(5, "rewrite", "only")], []),
        # Retention has deleted the first copy, and no run has read the last one.
        ([copy(-3, None), copy(3, "rewrite")], []),
        ([copy(-3, None), copy(3, "rewrite"), copy(4, "rewrite")], [4]),
        ([copy(3, "rewrite"), copy(10, None)], []),
    ],
)
def test_one_copy_of_each_id_is_kept(copies: list[dict[str, Any]], dropped: list[int]) -> None:
    assert sorted(entry.offset or 0 for entry in entries.surplus(copies, {0: (0, 10)})) == dropped


@pytest.mark.parametrize(
    ("dropped", "spans"),
    [
        ([], [(2, 9)]),
        ([2, 3, 8], [(4, 8)]),
        ([5, 1, 9, 30], [(2, 5), (6, 9)]),
        (range(2, 9), []),
    ],
)
def test_spans_leave_out_the_dropped_offsets(dropped: Any, spans: list[tuple[int, int]]) -> None:
    assert entries.spans_without(2, 9, dropped) == spans


READ: Final = (layouts.ReadUntil("t", 0, 50, 3), layouts.ReadUntil("t", 1, 50, 3), layouts.ReadUntil("t", 2, 0, 3))


def ends(*epochs: int, start: int = 0, end: int = 60) -> dict[tuple[str, int], Ends]:
    return {("t", number): Ends(start, end, end, epoch) for number, epoch in enumerate(epochs)}


def test_a_source_is_truncated_by_the_answer_for_the_epoch_of_the_read_or_by_its_end() -> None:
    # A log without records has nothing to lose; without epochs the end decides.
    assert layouts.suspects(READ, ends(3, 4, 4)) == {("t", 1): (50, 3)}
    assert layouts.suspects(READ, ends(3, NO_LEADER_EPOCH, 4)) == {}
    assert layouts.truncated(READ, ends(3, 4, 4), {}) == ""
    assert layouts.truncated(READ, ends(3, 4, 4), {("t", 1): 40}) == "t[1] was truncated from offset 40 on"
    assert layouts.truncated(READ, ends(3, 3, 3, end=49), {}) == "t[0] was truncated from offset 49 on"


def test_a_source_has_lost_records_if_its_log_starts_behind_the_first_of_them() -> None:
    parts = {0: copier.Part(0, (("t", ()),), exact=False), 1: copier.Part(0, (("t", ((5, 9), (20, 50))),), exact=False)}
    assert layouts.deleted(parts, ends(3, 3, start=5)) == ""
    assert layouts.deleted(parts, ends(3, 3, start=6)) == "t[1]: retention has deleted the records below offset 6"
    assert layouts.deleted(parts, {}) == ""  # the layout of an earlier version does not say how far it has read


def test_a_layout_is_read_as_it_was_stored() -> None:
    layout = layouts.Layout({"t": "T"}, {1: copier.Part(4, (("t", ((5, 9),)),), exact=True)}, READ)
    assert layouts.decoded(layouts.encoded(layout)) == layout


def problem(status: int, code: str) -> httpx.Response:
    return httpx.Response(status, json={"code": code, "detail": "why", "type": f"/problems/{code}"})


def written(key: str = "k", offset: int = 7, *, replayed: bool = False, scope: str = "") -> httpx.Response:
    content = {"id": event_id(key, scope).hex(), "topic": "t", "partition": 0, "offset": offset, "timestamp": 1}
    return httpx.Response(201, json=content, headers={"Idempotent-Replayed": "true"} if replayed else {})


NEW: Final = entries.new_key(ID)


def sent(
    *answers: httpx.Response | httpx.RequestError, new_keys: bool = False, **changes: Any
) -> tuple[Entry, list[httpx.Request]]:
    """Send the entry to a service that gives these answers."""
    left, asked = list(answers), []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        found = left.pop(0)
        if isinstance(found, httpx.RequestError):
            raise found
        return found

    with send.opened(send.Target("http://service"), httpx.MockTransport(answer)) as client:
        done = send.send(client, lost(**changes), new_keys=new_keys, now_ms=lambda: NOW_MS)
    assert not left
    return done, asked


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (written(offset=90), entries.WRITTEN),
        (written(replayed=True), entries.REPLAYED),
        # The remembered write is a later one: an earlier attempt, or the event's sender, has written it.
        (written(offset=90, replayed=True), entries.WRITTEN),
        (written(scope="other"), entries.OTHER_CALLER),
        (problem(412, "key-expired"), entries.EXPIRED),
        (problem(422, "fingerprint-mismatch"), entries.REFUSED),
        (problem(404, "unknown-topic"), entries.REFUSED),
    ],
)
def test_an_answer_says_what_became_of_the_event(answer: httpx.Response, outcome: str) -> None:
    done, (request,) = sent(answer)
    assert (done.outcome, done.sent_key, done.ended_ms) == (outcome, "k", NOW_MS)
    assert done.is_left == (outcome != entries.WRITTEN)
    # By this time the service finds that a key of any form may have been forgotten.
    assert request.headers["Repeatability-First-Sent"] == "Tue, 14 Nov 2023 22:13:20 GMT"
    assert request.headers["Idempotency-Key"] == '"k"'


@pytest.mark.parametrize("first", [written(replayed=True), problem(412, "key-expired")])
def test_a_new_key_follows_only_where_the_own_key_cannot_write(first: httpx.Response) -> None:
    done, (_, second) = sent(first, written(NEW, 90), new_keys=True)
    assert (done.outcome, done.sent_key, done.written_offset) == (entries.WRITTEN, NEW, 90)
    assert second.headers["Idempotency-Key"] == f'"{NEW}"'


def test_a_new_key_is_refused_while_an_earlier_attempt_may_have_written_the_event() -> None:
    doubtful = History(unsettled_run={ID: 5})
    done, asked = sent(problem(412, "key-expired"), new_keys=True, history=doubtful)
    assert (done.outcome, len(asked)) == (entries.EXPIRED, 1)
    # What is remembered at the lost coordinates was not written since.
    done, asked = sent(written(replayed=True), written(NEW, 90), new_keys=True, history=doubtful)
    assert (done.outcome, len(asked)) == (entries.WRITTEN, 2)


def test_a_request_without_an_answer_is_repeated_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("spark.repair.send.time.sleep", pauses.append)
    busy = problem(503, "not-written")
    busy.headers["Retry-After"] = "2"
    done, asked = sent(httpx.ConnectError("away"), busy, problem(409, "in-progress"), written(offset=90))
    assert (done.outcome, pauses) == (entries.WRITTEN, [0.1, 2.2, 0.4])
    assert len({request.headers["Repeatability-First-Sent"] for request in asked}) == 1
    busy.headers["Retry-After"] = "100"
    assert sent(busy)[0].outcome == entries.UNSETTLED


@pytest.mark.parametrize(
    "answer", [problem(401, "invalid-token"), problem(404, "not-found"), httpx.Response(302), httpx.Response(200)]
)
def test_an_answer_that_no_event_can_change_ends_the_command(answer: httpx.Response) -> None:
    with pytest.raises(CannotRun, match="correct --url or --token-file"):
        sent(answer)


def test_a_token_comes_from_a_file(tmp_path: Any) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["Authorization"])
        return written(offset=90)

    respond: Callable[[httpx.Request], httpx.Response] = answer
    with send.opened(send.Target("http://service", str(file)), httpx.MockTransport(respond)) as client:
        send.send(client, lost(), new_keys=False, now_ms=lambda: NOW_MS)
    assert seen == ["Bearer secret"]
    with (
        pytest.raises(CannotRun, match="--token-file"),
        send.opened(send.Target("http://service", str(tmp_path / "absent"))),
    ):
        pass
