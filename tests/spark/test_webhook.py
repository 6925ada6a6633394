"""The webhook: which findings are sent when, the bodies, and deliveries to a real HTTP server."""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest
import standardwebhooks

from service.contract import SettingsError, SignatureRule
from service.events.signatures import Verifier
from spark.cli.command_line import parse
from spark.report import webhook
from spark.report.model import Document, Finding
from spark.rules import current_findings
from spark.rules.kinds import KINDS
from spark.settings import JSON, SLACK, Webhook, read_webhook
from tests.spark.receiver import Receiver, receiving


def finding(kind: str = "lost", id: str | None = "a" * 32, **more: Any) -> Finding:
    """A finding about an id, or about a partition."""
    made: dict[str, Any] = dict.fromkeys(current_findings.FIELDS)
    made |= {"finding_id": f"{kind}:{id}", "kind": kind, "id": id, "count": 1, "coordinates": [], "silenced": None}
    return cast(Finding, made | more)


COPY = {"topic": "orders", "partition": 3, "offset": 17}
DOCUMENT = cast(
    Document,
    {
        "run": {
            "namespace": "fencepost",
            "number": 7,
            "frozen_at": "2026-12-24T18:00:00.000Z",
            "kafka": "127.0.0.1:9092",
            "lake": "l",
        }
    },
)


def test_a_finding_is_due_once_after_so_many_runs_in_a_row() -> None:
    found, due = [finding()], []
    state: dict[str, int] = {}
    for _ in range(4):
        decision = webhook.decide(found, KINDS, state, after=3)
        due.append(len(decision.due))
        state = decision.sent
    assert due == [0, 0, 1, 0]
    # It was away for a run.
    gone = webhook.decide([], KINDS, state, after=3)
    assert gone.sent == {}
    assert len(webhook.decide(found, KINDS, gone.sent, after=1).due) == 1


def test_a_delivery_that_failed_is_due_in_the_next_run() -> None:
    failed = webhook.decide([finding()], KINDS, {}, after=1).failed
    again = webhook.decide([finding()], KINDS, failed, after=1)
    assert len(again.due) == 1
    assert webhook.decide([finding()], KINDS, again.sent, after=1).due == []


def test_a_resumed_run_sends_the_same_request() -> None:
    once, again = (webhook.decide([finding(), finding(id="b" * 32)], KINDS, {}, after=1).due for _ in range(2))
    assert webhook.key_of(DOCUMENT, once) == webhook.key_of(DOCUMENT, again)
    assert webhook.key_of(DOCUMENT, once) != webhook.key_of(DOCUMENT, once[:1])


def test_silenced_findings_and_other_kinds_are_not_due() -> None:
    silenced = finding(silenced={"until": "2026-12-24T18:00:00.000Z", "reason": "known"})
    assert webhook.decide([silenced, finding("stuck")], ("lost",), {}, after=1) == ([], {}, {})


def test_one_more_copy_is_a_new_finding_and_one_more_record_of_a_partition_is_none() -> None:
    copies = [finding("duplicate", count=count) for count in (2, 3)]
    records = [finding("unkeyed", None, count=count) for count in (2, 3)]
    state = webhook.decide([copies[0], records[0]], KINDS, {}, after=1).sent
    assert webhook.decide([copies[1], records[1]], KINDS, state, after=1).due == [copies[1]]


def test_the_state_is_bounded_and_keeps_what_is_most_severe() -> None:
    many = [finding("client_duplicate", f"{nth:032x}") for nth in range(webhook.TRACKED_MAX)]
    decision = webhook.decide([*many, finding("stuck"), finding("lost")], KINDS, {}, after=1)
    assert len(decision.sent) == webhook.TRACKED_MAX
    assert [one["kind"] for one in decision.due[:3]] == ["lost", "stuck", "client_duplicate"]


def test_the_json_has_the_first_findings_as_in_the_report() -> None:
    due = [finding(coordinates=[COPY] * 9), *(finding("stuck", f"{nth:032x}") for nth in range(30))]
    body = json.loads(webhook.body_of(DOCUMENT, due, "r", JSON))
    assert (body["v"], body["namespace"], body["number"], body["report"]) == (1, "fencepost", 7, "r")
    assert body["kinds"] == {"lost": 1, "stuck": 30}
    assert body["findings"][0] == {**due[0], "coordinates": [COPY] * 5}
    assert (len(body["findings"]), body["findings_left_out"]) == (20, 11)


def test_a_message_of_slack_shows_a_clients_key_as_text() -> None:
    due = [finding(key="<!channel>`&\n" + "x" * 300, cause="ledger", coordinates=[COPY]), finding("stuck", key="k")]
    lines = json.loads(webhook.body_of(DOCUMENT, [*due, *due * 10], "s3a://b/r", SLACK))["text"].splitlines()
    assert lines[0] == "*Fencepost audit of fencepost*, run 7: 11 lost, 11 stuck"
    assert lines[1] == f"• lost/ledger `&lt;!channel&gt; &amp; {'x' * 66}…` orders[3]@17"
    assert lines[2] == "• stuck `k` "
    assert lines[-2:] == ["and 2 more", "s3a://b/r/report.html"]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Receiver, Webhook]]:
    monkeypatch.setattr(webhook, "PAUSES_S", (0.0, 0.0))
    with receiving() as found:
        yield found


@pytest.mark.parametrize(
    ("statuses", "error", "number"),
    [
        ([200], None, 1),
        ([500, 429, 204], None, 3),
        ([503], "answered 503", 3),
        ([404], "answered 404", 1),
        # Not followed: the receiver would get a GET.
        ([302], "answered 302", 1),
    ],
)
def test_a_delivery_is_repeated_while_that_may_help(
    receiver: tuple[Receiver, Webhook], statuses: list[int], error: str | None, number: int
) -> None:
    made, hook = receiver
    made.statuses = statuses
    assert webhook.send(hook, b'{"a": 1}', "key-1") == error
    assert made.received == [("POST", "key-1", {"a": 1})] * number


SECRETS: Final = tuple(f"whsec_{base64.b64encode(bytes([nth]) * 32).decode()}" for nth in (1, 2))


def test_a_request_is_signed_by_each_secret_as_standard_webhooks_does(
    receiver: tuple[Receiver, Webhook], tmp_path: Path
) -> None:
    made, hook = receiver
    file = tmp_path / "secret"
    file.write_text("\n".join(SECRETS) + "\n")
    signed = read_webhook(options("--webhook", hook.url, "--webhook-secret", str(file)))
    assert signed is not None
    assert SECRETS[0][6:] not in repr(signed)
    made.statuses = [503, 200]
    body = '{"key": "Z\u00fcrich"}'.encode()
    assert webhook.send(signed, body, "fencepost-1") is None
    assert len(made.headers) == 2
    for headers in made.headers:
        assert (headers["webhook-id"], headers["idempotency-key"]) == ("fencepost-1",) * 2
        raw = [(name.encode(), text.encode()) for name, text in headers.items()]
        for secret in SECRETS:
            assert standardwebhooks.Webhook(secret).verify(body, headers) == json.loads(body)
            verifier = Verifier(SignatureRule("standard-webhooks", ("file",)), [secret])
            assert verifier.check(raw, body, time.time()) == int(headers["webhook-timestamp"])
    # Nothing signs what has no secret.
    assert webhook.send(hook, body, "fencepost-2") is None
    assert not [name for name in made.headers[-1] if name.startswith("webhook-")]


@pytest.mark.parametrize(
    "content",
    [
        *("", "whsec_", "whsec_!!!!", "\xff"),
        f"whsec_{base64.b64encode(b'k' * 23).decode()}",
        "\n".join([*SECRETS, SECRETS[0]]),
    ],
)
def test_a_wrong_secret_is_refused_and_not_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content.encode("latin-1"))
    given = options("--webhook", "https://a/b", "--webhook-secret", str(file))
    with pytest.raises(SettingsError, match=r"--webhook-secret .*: write a secret into the file, whsec_") as raised:
        read_webhook(given)
    assert SECRETS[0][6:] not in str(raised.value)
    file.unlink()
    with pytest.raises(SettingsError, match=r"--webhook-secret .*No such file.*; give a file with the secret in it"):
        read_webhook(given)


def test_a_receiver_that_does_not_answer_holds_a_run_for_a_bounded_time(receiver: tuple[Receiver, Webhook]) -> None:
    made, hook = receiver
    made.pause_s = 1.0
    started = time.monotonic()
    assert webhook.send(hook, b"{}", "key-1", deadline_s=0.1) == "no answer in 0.1 s"
    assert time.monotonic() - started < 0.9


def test_a_receiver_that_is_away_is_named_without_the_url(receiver: tuple[Receiver, Webhook]) -> None:
    assert webhook.send(Webhook("http://127.0.0.1:1/secret"), b"{}", "key-1") == "[Errno 111] Connection refused"


def options(*given: str) -> Any:
    return parse(["--lake", "l", "--report", "r", *given])


def test_the_url_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("https://hooks.example.com/T0/secret\n")
    given = options("--webhook", f"@{file}", "--webhook-format", "slack", "--webhook-after", "3")
    hook = read_webhook(given)
    assert hook == Webhook("https://hooks.example.com/T0/secret", SLACK, 3)
    assert "hooks.example" not in repr(hook) + repr(given)
    assert read_webhook(options()) is None


@pytest.mark.parametrize(
    "url",
    ["ftp://a/secret", "https:///secret", "https://secret@a/", "https://a:x/secret", f"https://a/secret{'x' * 2000}"],
)
def test_a_wrong_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SettingsError, match="--webhook: that is no URL of http or https") as raised:
        read_webhook(options("--webhook", url))
    assert "secret" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--webhook @.*none: .*; give a file with the URL in it"):
        read_webhook(options("--webhook", f"@{tmp_path}/none"))
