"""Takes the rules again: on SIGHUP, and when their file, or a file that they name, has changed.

Rules that cannot be used are refused, with a line for each mistake: the rules before them stay in force.
"""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog

from service.contract import Rules, SettingsError
from service.core.file_stamps import Stamp, stamp_of
from service.core.logs import Incident
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway
from service.core.settings import Settings
from service.events.loaded_rules import LoadedRules, contradictions, files_of, load_rules
from service.kafka.topics import InternalTopics
from service.slots.generation_log import Control

log = structlog.get_logger(__name__)

# Between two looks at the files. A change is read when two looks have found the same, so that a file that is being
# written is not read in between.
LOOK_S: Final = 1.0
# The longest text of a refusal in the log: a file may have thousands of mistakes.
REASON_CHARS_MAX: Final = 4_000


class _Reading(NamedTuple):
    """The files that were read, with their stamp from before that, and what they hold: rules, or why there are none."""

    files: list[str]
    stamp: Stamp
    found: LoadedRules | SettingsError


class RulesReload:
    """Watches the files of the rules, and hands usable ones to `build`.

    `build` makes all that rules decide, in a thread, and returns what replaces it on the event loop.
    """

    def __init__(
        self,
        settings: Settings,
        loaded: LoadedRules,
        topics: InternalTopics,
        control: Control,
        telemetry: Telemetry,
        build: Callable[[LoadedRules], Callable[[], None]],
    ) -> None:
        self._settings = settings
        self._loaded = loaded  # the rules in force
        self._topics = topics
        self._control = control
        self._telemetry = telemetry
        self._build = build
        self._is_asked = asyncio.Event()
        self._files: Sequence[str] = loaded.files
        self._read = loaded.stamp  # of the files, before they were read the last time
        self._seen = self._read  # of the files, at the last look
        self._pending: _Reading | None = None  # rules that wait for Kafka
        self._kafka_away = Incident(log, "the rules wait for Kafka, which must keep the ledger for their retention")
        telemetry.rules.in_force(loaded.sha256, loaded.schemas_sha256, time.time())

    def ask(self) -> None:
        """Have the rules read at the next look, which comes at once."""
        self._is_asked.set()

    async def run(self) -> None:
        """Look at the files, for ever: each LOOK_S, and at each SIGHUP."""
        on_hangup(asyncio.get_running_loop(), self.ask)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._is_asked.wait()
            await self.look()

    async def look(self) -> None:
        """Look at the files once, and read them if they have changed, or if that was asked for."""
        was_asked = self._is_asked.is_set()
        self._is_asked.clear()
        if not self._settings.rules:
            return
        seen = await asyncio.to_thread(stamp_of, self._files)
        is_settled, self._seen = seen == self._seen, seen
        if was_asked or (is_settled and seen != self._read):
            await self._reload()
        elif self._pending is not None and seen == self._read:
            await self._decide(self._pending)

    async def _reload(self) -> None:
        """Read the rules, and take them or say why not."""
        reading = await asyncio.to_thread(self._reading)
        if reading is None:
            self.ask()  # a file was replaced meanwhile
            return
        self._files, self._read, self._seen = reading.files, reading.stamp, reading.stamp
        await self._decide(reading)

    async def _decide(self, reading: _Reading) -> None:
        """Take what was read, or say why not; while Kafka is away it is pending, and the next look decides again."""
        self._pending = reading
        try:
            loaded = await self._usable(reading.found)
        except SettingsError as error:
            self._kafka_away.end()
            self._refuse(str(error))
        except (KafkaAway, TimeoutError) as error:
            self._kafka_away.add(error)
            return
        else:
            self._kafka_away.end()
            await self._take(loaded)
        self._pending = None

    def _reading(self) -> _Reading | None:
        """Read the rules. Returns None if a file changed meanwhile: the rules and a schema may not belong together."""
        path = self._settings.rules
        named = files_of(self._loaded.rules)
        with contextlib.suppress(SettingsError):
            named += files_of(Rules.read(path))
        files = [path, *dict.fromkeys(named)]
        stamp = stamp_of(files)
        found: LoadedRules | SettingsError
        try:
            found = load_rules(path)
        except SettingsError as error:
            found = error
        except OSError as error:  # a file has gone since it was read
            found = SettingsError(f"{path}: {error}")
        return _Reading(files, stamp, found) if stamp_of(files) == stamp else None

    async def _usable(self, found: LoadedRules | SettingsError) -> LoadedRules:
        """Check that rules can be used. Raises SettingsError with a line for each reason against it, KafkaAway."""
        if isinstance(found, SettingsError):
            raise found
        wrong = contradictions(self._settings, found.rules)
        if why := opens_to_all(self._loaded.rules, found.rules):
            wrong.append(f"{self._settings.rules}: {why}")
        if wrong:
            raise SettingsError("\n".join(wrong))
        await self._topics.keep_for(found.rules.longest_ttl_s)
        await self._control.remember_retention(found.rules.longest_ttl_s)
        return found

    def _refuse(self, why: str, bug: Exception | None = None) -> None:
        self._telemetry.rules.read(applied=False)
        log.error("the rules are refused, those before them stay in force", why=why[:REASON_CHARS_MAX], exc_info=bug)

    async def _take(self, loaded: LoadedRules) -> None:
        try:
            replace = await asyncio.to_thread(self._build, loaded)
        except Exception as error:  # a bug, which would come again at each look
            self._refuse(repr(error), error)
            return
        replace()
        before, self._loaded = self._loaded, loaded
        self._telemetry.rules.in_force(loaded.sha256, loaded.schemas_sha256, time.time())
        self._telemetry.rules.read(applied=True)
        kept_s = self._topics.longest_ttl_s
        is_shorter = max(self._settings.key_ttl_s, loaded.rules.longest_ttl_s) < kept_s
        earlier = {"earlier_longest_retention_s": kept_s} if is_shorter else {}
        log.info("the rules are in force", before=before.sha256, sha256=loaded.sha256, **earlier)


def opens_to_all(before: Rules, after: Rules) -> str:
    """Say why rules would let every client write, where those before named who may; "" if they do not.

    A file that is cut, as by a full disk, may be such rules.
    """
    if _names_writers(before) and not _names_writers(after):
        return "no [[callers]], [[issuers]] or [[sources]] are left, so every client could write: restart to have it so"
    return ""


def _names_writers(rules: Rules) -> bool:
    return bool(rules.callers or rules.issuers or rules.sources)


def on_hangup(loop: asyncio.AbstractEventLoop, do: Callable[[], None]) -> None:
    """Call `do` at each SIGHUP. Does nothing outside the main thread, which alone gets signals."""
    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGHUP, do)
