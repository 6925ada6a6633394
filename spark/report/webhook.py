"""The webhook: each finding that counts is sent once, after a number of runs in a row that had it.

A finding counts if it is not silenced, and of a kind of `--fail-on`. The summary of the last finished run has the
state: by a hash of each such finding the number of runs that had it, or SENT. A finding about an id is a new one when
its number of records changes; one about a partition is not, since its number grows with each record.

If a delivery fails, the next run sends its findings again. A run that is killed after it has sent, and before it is
finished, sends again when it is resumed: with the same `Idempotency-Key`, by which a receiver knows the request.

With a secret each request is signed as Standard Webhooks says, with that key as its `webhook-id`
(https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md).
"""

import base64
import hmac
import json
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from http.client import HTTPException
from typing import Any, Final, NamedTuple

from spark.report.model import Document, Finding
from spark.rules.kinds import KINDS, SEVERITIES
from spark.settings import SLACK, Webhook

VERSION: Final = 1
SENT: Final = 0
"""The state of a finding that was sent."""

TRACKED_MAX: Final = 10_000
"""Findings in the state, those of the highest severity first: some 300 KB in the summary of a run."""
LISTED_MAX: Final = 20
COPIES_MAX: Final = 5
"""Findings in a request, and coordinates of each; the report has all of them."""
NAME_CHARS: Final = 80

TIMEOUT_S: Final = 10.0
"""For a connection, and for each read of a response."""
DEADLINE_S: Final = 45.0
"""For all attempts together: a run must not wait for a receiver that sends a byte now and then."""
PAUSES_S: Final = (1.0, 3.0)
"""Between the attempts."""

_TEMPORARY: Final = (408, 425, 429)
_RANKS: Final = {severity: rank for rank, severity in enumerate(SEVERITIES)}


class Decision(NamedTuple):
    """The findings to be sent, and the state after this run, if they were `sent` or not (`failed`)."""

    due: list[Finding]
    sent: dict[str, int]
    failed: dict[str, int]


def decide(findings: Iterable[Finding], kinds: Collection[str], state: Mapping[str, int], after: int) -> Decision:
    """Decide which findings of a report are sent, by the `state` that the last run left."""
    counted = [finding for finding in findings if finding["silenced"] is None and finding["kind"] in kinds]
    tracked = sorted(counted, key=lambda finding: _RANKS[KINDS[finding["kind"]].severity])[:TRACKED_MAX]
    due, sent, failed = [], {}, {}
    for finding in tracked:
        name = state_of(finding)
        runs = state.get(name)
        if runs == SENT:
            sent[name] = failed[name] = SENT
            continue
        sent[name] = failed[name] = (runs or 0) + 1
        if failed[name] >= after:
            due.append(finding)
            sent[name] = SENT
    return Decision(due, sent, failed)


def state_of(finding: Finding) -> str:
    """Return the hash by which a finding is known in the state, 16 hexadecimal digits."""
    count = "" if finding["id"] is None else f"#{finding['count']}"
    return sha256(f"{finding['finding_id']}{count}".encode()).hexdigest()[:16]


def key_of(document: Document, due: Sequence[Finding]) -> str:
    """Return the idempotency key of a request: the same when an interrupted run is resumed."""
    run = document["run"]
    content = "\n".join([run["namespace"], str(run["number"]), run["frozen_at"], *map(state_of, due)])
    return f"fencepost-{sha256(content.encode()).hexdigest()[:32]}"


def body_of(document: Document, due: Sequence[Finding], report: str, shape: str) -> bytes:
    """Encode the body of a request; `report` is the folder of the report."""
    body = _message(document, due, report) if shape == SLACK else _document(document, due, report)
    return json.dumps(body).encode()


def _document(document: Document, due: Sequence[Finding], report: str) -> dict[str, Any]:
    run = document["run"]
    listed = [{**finding, "coordinates": finding["coordinates"][:COPIES_MAX]} for finding in due[:LISTED_MAX]]
    return {
        "v": VERSION,
        "namespace": run["namespace"],
        "number": run["number"],
        "frozen_at": run["frozen_at"],
        "kafka": run["kafka"],
        "lake": run["lake"],
        "report": report,
        "kinds": Counter(finding["kind"] for finding in due),
        "findings": listed,
        "findings_left_out": len(due) - len(listed),
    }


def _message(document: Document, due: Sequence[Finding], report: str) -> dict[str, str]:
    """Return a message of Slack's incoming webhooks, https://docs.slack.dev/messaging/formatting-message-text."""
    run = document["run"]
    counts = ", ".join(f"{count:,} {kind}" for kind, count in Counter(finding["kind"] for finding in due).items())
    lines = [f"*Fencepost audit of {_plain(run['namespace'])}*, run {run['number']}: {counts}"]
    for finding in due[:LISTED_MAX]:
        cause = f"/{finding['cause']}" if finding["cause"] else ""
        name = finding["key"] or finding["id"] or finding["finding_id"]
        copies = finding["coordinates"][:2]
        where = ", ".join(f"{copy['topic']}[{copy['partition']}]@{copy['offset']}" for copy in copies)
        lines.append(f"• {finding['kind']}{_plain(cause)} `{_plain(name)}` {where or _plain(finding['topic'] or '')}")
    if len(due) > LISTED_MAX:
        lines.append(f"and {len(due) - LISTED_MAX:,} more")
    lines.append(_plain(f"{report}/report.html"))
    return {"text": "\n".join(lines)}


def _plain(text: str) -> str:
    """Return a text, at most NAME_CHARS of it, that Slack shows as it is: a client's key may not name a channel."""
    clipped = text if len(text) <= NAME_CHARS else f"{text[: NAME_CHARS - 1]}…"
    shown = "".join(char if char.isprintable() and char != "`" else " " for char in clipped)
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def send(hook: Webhook, body: bytes, key: str, *, deadline_s: float = DEADLINE_S) -> str | None:
    """POST a body; returns None once it is acknowledged with a status 2xx, else why it was not.

    Redirects are not followed. The text does not have the URL, which may be a secret.
    """
    outcome: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: outcome.put(_attempts(hook, body, key)), name="webhook", daemon=True)
    thread.start()
    try:
        return outcome.get(timeout=deadline_s)
    except queue.Empty:
        return f"no answer in {deadline_s:g} s"


def signature_of(keys: Iterable[bytes], id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Return the headers of Standard Webhooks that sign a body: an HMAC-SHA256 by each key over id, time and body.

    A receiver refuses a time (seconds since the epoch) that is five minutes off, so each attempt is signed anew.
    """
    content = b"%b.%d.%b" % (id.encode(), timestamp_s, body)
    digests = (base64.b64encode(hmac.digest(key, content, "sha256")).decode() for key in keys)
    return {
        "webhook-id": id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(f"v1,{digest}" for digest in digests),
    }


def _attempts(hook: Webhook, body: bytes, key: str) -> str | None:
    """Try until a delivery is acknowledged or refused."""
    for pause_s in (*PAUSES_S, None):
        error, is_temporary = _post(hook, body, key)
        if error is None or not is_temporary or pause_s is None:
            break
        time.sleep(pause_s)
    return error


def _post(hook: Webhook, body: bytes, key: str) -> tuple[str | None, bool]:
    """POST once: returns why the delivery failed (None: it did not), and whether it may succeed later."""
    headers = {"Content-Type": "application/json", "User-Agent": "fencepost-audit", "Idempotency-Key": key}
    if hook.keys:
        headers |= signature_of(hook.keys, key, int(time.time()), body)
    # settings.read_webhook has checked the scheme.
    request = urllib.request.Request(hook.url, body, headers, method="POST")  # noqa: S310
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S):
            return None, False
    except urllib.error.HTTPError as error:
        error.close()
        return f"answered {error.code}", error.code >= 500 or error.code in _TEMPORARY
    except urllib.error.URLError as error:
        return _printable(error.reason), True
    except (OSError, HTTPException) as error:
        return _printable(error) or type(error).__name__, True


def _printable(error: object) -> str:
    return re.sub(r"[^ -~]", " ", str(error))[:200]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for a failure: urllib would follow it with a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER: Final = urllib.request.build_opener(_NoRedirect)
