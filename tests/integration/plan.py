"""The plan of a test for `faulty`: faults at points of a write, and rules of the protocol to leave out."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

PLAN_ENV: Final = "FENCEPOST_TEST_FAULT"
MODULE: Final = "tests.integration.faulty"


@dataclass(frozen=True)
class Fault:
    """A fault at a point.

    `do`: `kill` (SIGKILL itself), `stop` (SIGSTOP itself), `hold` (the task waits for `Plan.let_go`), or the name of an
    exception to raise. It happens from the `first` visit of the point on, `times` times.
    """

    at: str
    do: str
    first: int = 1
    times: int = 1


@dataclass(frozen=True)
class Plan:
    """Faults and mutants for one process, which notes in `folder` the faults that have happened."""

    folder: Path
    faults: tuple[Fault, ...] = ()
    mutants: tuple[str, ...] = ()
    only_slots: tuple[int, ...] | None = None  # no other slot is taken, so that it is certain which process holds which

    def encode(self) -> str:
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @classmethod
    def decode(cls, text: str) -> "Plan":
        raw = json.loads(text)
        slots = raw["only_slots"]
        return cls(
            Path(raw["folder"]),
            tuple(Fault(**fault) for fault in raw["faults"]),
            tuple(raw["mutants"]),
            None if slots is None else tuple(slots),
        )

    def happened(self, at: str) -> bool:
        """Check whether the fault at this point has happened."""
        return (self.folder / f"{at}.happened").exists()

    def tell(self, at: str) -> None:
        (self.folder / f"{at}.happened").touch()

    def let_go(self, at: str) -> None:
        """End the `hold` at this point."""
        (self.folder / f"{at}.go").touch()

    def may_go(self, at: str) -> bool:
        return (self.folder / f"{at}.go").exists()


def stopped(pid: int) -> bool:
    """Check whether the process is stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def until(holds: Callable[[], bool], timeout_s: float = 20.0, what: str = "") -> None:
    """Wait until a condition holds; AssertionError if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not come about within {timeout_s} s: {what or holds}"
        time.sleep(0.02)
