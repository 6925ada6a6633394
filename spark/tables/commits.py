"""The numbers of the commits to the tables of a lake, by which a process that has lost the lake can make none.

Each commit of a run has a number (`number`): Delta's `txnVersion`, which the table stores with the commit. Delta skips
a commit whose number is not greater than the stored one, and fails one if another commit with a number has come first.
So a process that was suspended, and lost its lease, cannot commit late: the process that took the run over, or a later
run, has stored a greater number (`Lake.take_over`, `Lake.fence`). Other commits have no number, since they change no
row: compaction, the upgrade of the lake, the list of views.
"""

import json
from typing import Final, NamedTuple

WRITER: Final = "fencepost"
"""Delta's `txnAppId` of the commits of runs."""

_COMMIT_BITS: Final = 12
_TAKEOVER_BITS: Final = 20


def number(run: int, takeovers: int, commit: int) -> int:
    """Return the number of a commit to a table: the `commit`-th (from 0) of a process on a run that was taken over so
    many times. The number is greater than those of earlier runs, and of other processes that were at work on the
    run."""
    return (run << _TAKEOVER_BITS + _COMMIT_BITS) + (takeovers << _COMMIT_BITS) + commit


def run_in(number: int) -> int:
    """Return the run of a commit with this number."""
    return number >> _TAKEOVER_BITS + _COMMIT_BITS


def takeovers_in(number: int | None, run: int) -> int:
    """Return how many times a run was taken over, by the number of the last commit; 0 if that is another run's."""
    if number is None or run_in(number) != run:
        return 0
    return number >> _COMMIT_BITS & (1 << _TAKEOVER_BITS) - 1


class Commit(NamedTuple):
    """A commit to a table: the id that Delta has given it, and the `token` of the Lake object that made it, if any."""

    id: str
    token: str | None


def of(actions: str) -> Commit | None:
    """Parse a file of a table's log (Delta's protocol: a line of JSON for each action); None without a `txnId`."""
    for line in actions.splitlines():
        if (made := json.loads(line).get("commitInfo")) is not None and "txnId" in made:
            return Commit(made["txnId"], made.get("userMetadata"))
    return None
