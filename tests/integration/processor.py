"""A process of a processor, such as those of deploy/examples: killed, paused and started again by tests."""

from collections.abc import Sequence
from pathlib import Path

from deploy import places
from deploy.stack.process import Process


class Processor(Process):
    """A processor that reads topics of `kafka` and writes to the service at `url`."""

    def __init__(self, name: str, folder: Path, argv: Sequence[str | Path], url: str, kafka: str) -> None:
        super().__init__(name, folder)
        self._argv = argv
        self._environment = {"FENCEPOST_URL": url, "FENCEPOST_KAFKA": kafka}

    def start(self) -> None:
        self.spawn(self._argv, env={**places.hermetic_environment(), **self._environment}, cwd=places.ROOT)

    def count(self, what: str) -> int:
        """Count the batches that were `written`, `replayed` or `dropped`, over all its lives."""
        return self.log.read_text().count(f"{what} ") if self.log.exists() else 0
