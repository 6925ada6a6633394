"""Tests that the rules are read again when their files change or at a SIGHUP, and that bad ones change nothing."""

import asyncio
import hashlib
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from service import rules_reload
from service.contract import Rules, SettingsError
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway
from service.core.settings import Settings
from service.events import loaded_rules
from service.events.loaded_rules import LoadedRules, load_rules
from service.events.schemas import Schemas
from service.kafka.topics import InternalTopics
from service.rules_reload import RulesReload
from service.slots.generation_log import Control
from tests.unit.fakes import until
from tests.unit.scrape import sample

SHOP = f'[[callers]]\nname = "shop"\ntoken_sha256 = "{hashlib.sha256(b"token").hexdigest()}"\n'


class Topics:
    """Internal topics that keep their records for a week."""

    longest_ttl_s = 86_400
    fault: Exception | None = None

    async def keep_for(self, longest_ttl_s: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.longest_ttl_s = max(self.longest_ttl_s, longest_ttl_s)


class Retentions:
    """The retentions that control has."""

    def __init__(self) -> None:
        self.remembered: list[int] = []
        self.fault: Exception | None = None

    async def remember_retention(self, ttl_s: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.remembered.append(ttl_s)


class WatchedRules:
    """A file of rules that is watched, and the rules that were taken from it."""

    def __init__(self, path: Path, text: str = SHOP) -> None:
        self.path = path
        path.write_text(text)
        self.telemetry = Telemetry()
        self.topics = Topics()
        self.taken: list[LoadedRules] = []
        settings = Settings(rules=str(path))
        self.control = Retentions()
        parts = cast(InternalTopics, self.topics), cast(Control, self.control)

        def build(loaded: LoadedRules) -> Callable[[], None]:
            return partial(self.taken.append, loaded)

        self.reload = RulesReload(settings, load_rules(str(path)), *parts, self.telemetry, build)
        self.logged: list[Any] = []

    async def look(self, times: int = 2) -> None:
        with capture_logs() as logged:
            for _ in range(times):
                await self.reload.look()
        self.logged += logged

    def counted(self, outcome: str) -> float:
        return sample(self.telemetry, "fencepost_rules_reloads_total", outcome=outcome)

    @property
    def callers(self) -> list[list[str]]:
        return [[caller.name for caller in loaded.rules.callers] for loaded in self.taken]


@pytest.fixture
def watched(tmp_path: Path) -> WatchedRules:
    return WatchedRules(tmp_path / "rules.toml")


def in_force(telemetry: Telemetry, text: str, schemas: str = "") -> float:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return sample(telemetry, "fencepost_rules_info", sha256=digest, schemas=schemas)


async def test_a_changed_file_is_taken_once_it_has_settled(watched: WatchedRules) -> None:
    await watched.look(3)
    assert (watched.taken, in_force(watched.telemetry, SHOP)) == ([], 1)
    changed = SHOP.replace("shop", "till")
    watched.path.write_text(changed)
    await watched.look(1)
    assert watched.taken == [], "a file that is being written is not read"
    await watched.look(3)
    assert watched.callers == [["till"]]
    assert (in_force(watched.telemetry, changed), watched.counted("applied"), watched.counted("refused")) == (1, 1, 0)
    assert [line["sha256"] for line in watched.logged] == [hashlib.sha256(changed.encode()).hexdigest()]
    assert sample(watched.telemetry, "fencepost_rules_last_reload_success_timestamp_seconds") > 1_700_000_000


@pytest.mark.parametrize("replaced", ["rules.toml", "schema"])
async def test_a_file_that_is_replaced_while_the_service_starts_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: str
) -> None:
    """And the digest until then is that of the rules that were read."""
    rules = SHOP + '[[topics]]\npattern = "orders"\nschema = "schema"\n'
    (tmp_path / "schema").write_text("{}")

    def read_and_replace(rules: Rules) -> Schemas:
        schemas = Schemas(rules)
        with (tmp_path / replaced).open("a") as file:
            file.write("\n")
        monkeypatch.undo()
        return schemas

    monkeypatch.setattr(
        loaded_rules, "Schemas", lambda rules: read_and_replace(rules) if rules.topics else Schemas(rules)
    )
    watched = WatchedRules(tmp_path / "rules.toml", rules)
    assert sum(in_force(watched.telemetry, rules, hashlib.sha256(text).hexdigest()) for text in (b"{}", b"{}\n")) == 1
    await watched.look()
    assert len(watched.taken) == 1
    assert watched.taken[0].sha256 == hashlib.sha256(watched.path.read_bytes()).hexdigest()


async def test_a_file_that_is_still_being_written_is_not_read(watched: WatchedRules) -> None:
    for size in range(1, 5):
        watched.path.write_text(SHOP + "#" * size)
        await watched.look(1)
    assert watched.taken == []
    await watched.look(1)
    assert len(watched.taken) == 1


async def test_a_bad_file_keeps_the_rules_and_says_why_by_line_once(watched: WatchedRules) -> None:
    watched.path.write_text(SHOP + "rte = 5\n\n[[topics]]\npattern = 3\n")
    await watched.look(6)
    assert (watched.taken, in_force(watched.telemetry, SHOP)) == ([], 1)
    (line,) = watched.logged
    assert line["log_level"] == "error"
    assert f"{watched.path}:4: rte: no such setting" in line["why"]
    assert f"{watched.path}:7: pattern:" in line["why"]
    assert (watched.counted("refused"), sample(watched.telemetry, "fencepost_rules_last_reload_successful")) == (1, 0)
    watched.path.write_text(SHOP + "rate = 5\n")
    await watched.look()
    assert watched.callers == [["shop"]]
    assert sample(watched.telemetry, "fencepost_rules_last_reload_successful") == 1


async def test_a_bug_in_what_is_made_of_the_rules_refuses_them_until_they_change(watched: WatchedRules) -> None:
    """Tried again at each look, it would never be counted as refused: nobody would know that old rules are in force."""
    taken = watched.taken
    watched.taken = cast(Any, None)  # `build` fails
    watched.path.write_text(SHOP.replace("shop", "till"))
    await watched.look(4)
    assert watched.counted("refused") == 1
    assert sample(watched.telemetry, "fencepost_rules_last_reload_successful") == 0
    assert "AttributeError" in watched.logged[-1]["why"]
    watched.taken = taken
    watched.path.write_text(SHOP.replace("shop", "desk"))
    await watched.look()
    assert watched.callers == [["desk"]]


async def test_the_link_of_a_mounted_config_map_may_be_replaced(tmp_path: Path) -> None:
    """As kubelet does: a new folder, a new link beside the old one, and a rename over it. Schemas come along."""

    def publish(version: str, limit: int) -> None:
        folder = tmp_path / f"..{version}"
        folder.mkdir()
        (folder / "rules.toml").write_text(SHOP + '[[topics]]\npattern = "orders"\nschema = "order.json"\n')
        (folder / "order.json").write_text(f'{{"maximum": {limit}}}')
        (tmp_path / "..data_tmp").symlink_to(folder.name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    publish("1", 10)
    for name in ("rules.toml", "order.json"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    path = tmp_path / "rules.toml"
    watched = WatchedRules(path, path.read_text())
    publish("2", 20)
    await watched.look()
    assert len(watched.taken) == 1
    assert in_force(watched.telemetry, path.read_text(), hashlib.sha256(b'{"maximum": 20}').hexdigest()) == 1


@pytest.mark.parametrize("named", ["schema", "secret"])
async def test_a_change_of_a_file_that_the_rules_name_is_taken(tmp_path: Path, named: str) -> None:
    (tmp_path / "schema").write_text("{}")
    (tmp_path / "secret").write_text("our secret")
    text = (
        SHOP + '[[topics]]\npattern = "orders"\nschema = "schema"\n[[sources]]\nname = "github"\ntopic = "orders"\n'
        'signature = { scheme = "github", secret_files = ["secret"] }\nidempotency_key = { header = "id" }\n'
    )
    watched = WatchedRules(tmp_path / "rules.toml", text)
    (tmp_path / named).write_text('{"type": "string"}')
    await watched.look()
    assert len(watched.taken) == 1
    (tmp_path / named).unlink()
    await watched.look()
    assert (len(watched.taken), watched.counted("refused")) == (1, 1)
    assert named in watched.logged[-1]["why"]
    (tmp_path / named).write_text("{}")
    await watched.look()
    assert len(watched.taken) == 2


async def test_a_schema_that_is_written_after_the_rules_that_name_it_is_found(watched: WatchedRules) -> None:
    watched.path.write_text(SHOP + '[[topics]]\npattern = "orders"\nschema = "late.json"\n')
    await watched.look()
    assert (watched.taken, watched.counted("refused")) == ([], 1)
    (watched.path.parent / "late.json").write_text("{}")
    await watched.look()
    assert len(watched.taken) == 1


@pytest.mark.parametrize("text", ["", '[[topics]]\npattern = "orders"\n'])
async def test_rules_without_any_caller_do_not_open_the_service_to_all(watched: WatchedRules, text: str) -> None:
    """A file that was cut may be valid."""
    watched.path.write_text(text)
    await watched.look()
    assert watched.taken == []
    assert "every client could write: restart to have it so" in watched.logged[0]["why"]


async def test_rules_that_contradict_the_settings_or_the_topics_are_refused(watched: WatchedRules) -> None:
    watched.path.write_text(SHOP + '[[topics]]\npattern = "orders"\nkey_ttl_s = 5\n')
    await watched.look()
    assert "key_ttl_s = 5 of the topics 'orders' is too short" in watched.logged[0]["why"]
    watched.topics.fault = SettingsError("topic fencepost.ledger has retention.ms=1: set retention.ms=2 on it")
    watched.path.write_text(SHOP + '[[topics]]\npattern = "orders"\nkey_ttl_s = 1000000\n')
    await watched.look()
    assert "set retention.ms=2 on it" in watched.logged[1]["why"]
    assert (watched.taken, watched.counted("refused")) == ([], 2)


@pytest.mark.parametrize("asked", [False, True])
async def test_while_kafka_is_away_the_rules_wait(
    watched: WatchedRules, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """They are read once, and the log says it once; also if a hangup asked for them, and no file has changed."""
    readings: list[str] = []

    def read(path: str) -> LoadedRules:
        readings.append(path)
        return load_rules(path)

    monkeypatch.setattr(rules_reload, "load_rules", read)
    watched.topics.fault = KafkaAway("no broker")
    if asked:
        watched.reload.ask()
    else:
        watched.path.write_text(SHOP + "rate = 5\n")
    await watched.look(4)
    assert (watched.taken, watched.counted("refused"), watched.counted("applied")) == ([], 0, 0)
    assert [line["why"] for line in watched.logged] == ["no broker"]
    watched.topics.fault = None
    await watched.look(3)
    assert (len(watched.taken), len(readings)) == (1, 1)


async def test_rules_that_wait_for_kafka_give_way_to_a_later_file(watched: WatchedRules) -> None:
    watched.topics.fault = KafkaAway("no broker")
    watched.path.write_text(SHOP + "rate = 5\n")
    await watched.look(3)
    watched.path.write_text(SHOP.replace("shop", "till"))
    watched.topics.fault = None
    await watched.look(3)
    assert watched.callers == [["till"]]


async def test_a_longer_retention_is_remembered_before_its_rules_hold(watched: WatchedRules) -> None:
    watched.control.fault = KafkaAway("no broker")
    watched.path.write_text(SHOP + '[[topics]]\npattern = "orders"\nkey_ttl_s = 500000\n')
    await watched.look(3)
    assert (watched.taken, watched.control.remembered) == ([], [])
    watched.control.fault = None
    await watched.look()
    assert (len(watched.taken), watched.control.remembered) == (1, [500_000])


async def test_an_earlier_longer_retention_is_logged(watched: WatchedRules) -> None:
    for ttl_s, expected in ((500_000, {}), (400_000, {"earlier_longest_retention_s": 500_000})):
        watched.path.write_text(SHOP + f'[[topics]]\npattern = "orders"\nkey_ttl_s = {ttl_s}\n')
        await watched.look()
        assert {name: watched.logged[-1][name] for name in watched.logged[-1] if name.startswith("earlier")} == expected
    assert len(watched.taken) == 2


async def test_a_hangup_has_the_rules_read_at_once(watched: WatchedRules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_reload, "LOOK_S", 60)
    running = asyncio.create_task(watched.reload.run())
    try:
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: len(watched.taken) > 0)
        watched.path.write_text("[[callers]")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: watched.counted("refused") > 0)
    finally:
        running.cancel()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    assert watched.callers == [["shop"]]


async def test_without_a_file_of_rules_a_hangup_does_nothing() -> None:
    parts = cast(InternalTopics, Topics()), cast(Control, Retentions())
    taken: list[LoadedRules] = []
    reload = RulesReload(Settings(), load_rules(""), *parts, Telemetry(), lambda loaded: partial(taken.append, loaded))
    reload.ask()
    await reload.look()
    assert taken == []
