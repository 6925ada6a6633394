"""Tests the output of the command line: names are printed as they are, and the reader may stop early."""

import json
import os
import subprocess
import sys

import pytest

from deploy.places import ROOT
from service.claims.keys import Found
from service.cli import show
from service.cli.look import KeyView, SlotRow, SlotsView, in_record
from service.cli.redis_view import SlotView
from service.contract.wire.ledger import LedgerRecord
from service.contract.wire.ledger_entries import CommittedOffset, LedgerOffsets
from service.core.settings import Settings


def test_a_key_is_printed_unchanged_in_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    show.document({"key": "a:smile:[b]"})
    assert json.loads(capsys.readouterr().out) == {"key": "a:smile:[b]"}


def test_an_owner_is_shown_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    view = SlotView(slot=0, holder="zone:a:8000", lease_ms=3000, taken=True, freed=7, applied=7)
    show.slots(SlotsView("run/repl", 1, [SlotRow(view, None, 8)]))
    assert "zone:a:8000" in capsys.readouterr().out


@pytest.mark.parametrize("count", [2, 12])
def test_the_offsets_that_a_batch_has_committed_are_shown(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch without events has no other entry in the ledger."""
    positions = [CommittedOffset("orders", n, 10 * n) for n in range(count)]
    offsets = LedgerOffsets(b"i" * 16, b"f" * 8, 1_700_000_000_123, "billing", "m-1", 7, positions)
    record = LedgerRecord(3, 12, 5, "me", [], offsets=offsets).encode()
    entries, found = in_record(3, 40, record, b"i" * 16)
    assert entries == []
    assert in_record(3, 40, record, b"o" * 16) == ([], [])
    view = KeyView(b"i" * 16, Found(None), "", entries, found)
    assert view.known
    (document,) = view.document()["offsets"]
    assert (document["group"], document["generation"], len(document["positions"])) == ("billing", 7, count)
    show.key(view, Settings())
    text = " ".join(capsys.readouterr().out.split())
    assert "slot 3, offset 40: group billing at orders[0] 0, orders[1] 10" in text
    assert ("2 more (--json)" in text) is (count > 10)
    assert "no entry" not in text.partition("offsets")[2]


def test_a_time_beyond_the_calendar_is_shown_in_milliseconds() -> None:
    """The ledger entry of a writer that counts in microseconds is shown too."""
    assert show.when(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
    assert show.when(253_402_300_799_000) == "9999-12-31T23:59:59.000Z"
    assert show.when(253_402_300_800_000) == "253402300800000 ms"
    assert show.when(-1) == "-1 ms"


def test_a_closed_output_pipe_does_not_change_the_exit_status() -> None:
    """`fencepost doctor | grep -q …` with pipefail: a status of 1 would mean that the doctor has found an error."""
    reads, writes = os.pipe()
    os.close(reads)
    code = "import sys; from service.cli import show; show.document({}); show.findings([]); sys.exit(0)"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=writes, stderr=subprocess.PIPE, check=False, timeout=60
        )
    finally:
        os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, b"")
