"""The sums by hour that a run carries over from the last run."""

from datetime import UTC, datetime
from typing import Any

from spark.rules.balance import Balance
from spark.rules.findings import SUMS

FIRST, SECOND, THIRD = (f"2026-11-01 0{hour}:00:00" for hour in (1, 2, 3))


def _row(hour: str, **counts: int) -> dict[str, Any]:
    """A row of findings.sums."""
    at = datetime.fromisoformat(hour).replace(tzinfo=UTC)
    return {**dict.fromkeys(SUMS, 0), **counts, "accepted_hour": at, "topic": "t"}


def test_an_adjustment_is_dropped_when_any_of_its_hours_is_counted_again() -> None:
    balance = Balance()
    once = {"accepted": 1, "delivered_once": 1}
    by_hour = [_row(FIRST, **once), _row(SECOND, **once)]
    balance.replace([], [*by_hour, _row(THIRD, **once)])
    balance.adjust(by_hour, [_row(SECOND, accepted=1, duplicated=1)])
    line = balance.close(FIRST).line
    assert (line["accepted"], line["delivered_once"], line["duplicated"]) == (2, 1, 1)
    # A run without the pass over ids keeps the adjustment until it counts one of the adjusted hours again.
    later = Balance.of(balance.document())
    later.replace([THIRD], [_row(THIRD, accepted=2, delivered_once=2)])
    assert later.adjustment == balance.adjustment
    later.replace([SECOND], [_row(SECOND, accepted=1, duplicated=1)])
    line = later.close(FIRST).line
    assert (line["accepted"], line["delivered_once"], line["duplicated"]) == (4, 3, 1)


def test_an_hour_with_open_verdicts_stays_in_the_balance() -> None:
    balance = Balance()
    balance.replace([FIRST, SECOND], [_row(FIRST, accepted=1, pending=1, open=1), _row(SECOND, accepted=1, lost=1)])
    assert balance.open_hours() == {FIRST}
    balance.close(THIRD)
    assert balance.hours.keys() == {FIRST}


def test_an_hour_that_left_the_window_with_open_verdicts_is_late_for_a_window_after_their_decision() -> None:
    def ms(hour: str) -> int:
        return int(datetime.fromisoformat(hour).replace(tzinfo=UTC).timestamp() * 1000)

    balance = Balance()
    balance.replace([FIRST, SECOND], [_row(FIRST, open=1), _row(SECOND, open=1)])
    balance.note_late_hours(ms(FIRST), 100)
    assert balance.late_hours == {}
    for frozen_ms in (ms(THIRD), ms(THIRD) + 1):
        balance = Balance.of(balance.document())
        balance.note_late_hours(ms(SECOND), frozen_ms)
        assert balance.late_hours == {FIRST: frozen_ms}
    # The verdicts are decided by this run.
    balance.replace([FIRST, SECOND], [_row(FIRST, lost=1)])
    for since_ms, is_late in ((ms(THIRD) + 1, True), (ms(THIRD) + 2, False)):
        balance.note_late_hours(since_ms, ms(THIRD) + 9)
        assert balance.late_hours == ({FIRST: ms(THIRD) + 1} if is_late else {})
    # Hours whose records a run reads after they have left the window.
    balance.note_read_late([SECOND], ms(THIRD))
    assert balance.late_hours == {SECOND: ms(THIRD)}
    assert (balance.decided_late(ms(THIRD)), balance.decided_late(ms(THIRD) + 1)) == ({SECOND}, set())
    balance.replace([SECOND], [_row(SECOND, open=1)])
    assert balance.decided_late(ms(THIRD)) == set()
