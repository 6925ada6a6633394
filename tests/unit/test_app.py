"""Tests the parts of one process together, and their start."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from unittest.mock import AsyncMock

import pytest
from structlog.testing import capture_logs

import service.app
from service.app import Service, build_router
from service.claims.keys import ServerIdentity, StoreGeneration
from service.contract import Rules, SettingsError
from service.contract.wire.versions import NewerVersion
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway, KafkaLoginFailed, KafkaRefusesSetting
from service.core.settings import Settings
from service.events.loaded_rules import LoadedRules
from service.events.schemas import Schemas
from service.kafka.idempotent_producer import IdempotentProducer
from tests.unit.fakes import ended, steps, until
from tests.unit.scrape import sample

BACKGROUND = ("sweep", "watch", "bring-up", "lso-watch", "clocks")


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    """Restore Python's garbage collector, which the start sets for the life of a process."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def service_with(give_up: Callable[[SettingsError], None] = lambda _: None) -> Service:
    """Make a service without rules; `give_up` gets the error that ends its start."""
    rules = Rules()
    return Service(Settings(), rules, Schemas(rules), Telemetry(), give_up)


async def test_an_unforeseen_error_of_the_start_is_logged_and_the_start_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service.app, "BRING_UP_PAUSE_S", 0.001)
    given_up: list[SettingsError] = []
    whole = service_with(given_up.append)
    whole.topics.ensure = AsyncMock(side_effect=[KafkaAway("no broker"), TypeError("odd"), None])  # type: ignore[method-assign]
    whole.keys.check = AsyncMock()  # type: ignore[method-assign]
    whole.clocks.measure = AsyncMock()  # type: ignore[method-assign]
    whole.lease_keeper.keep = AsyncMock()  # type: ignore[method-assign]
    try:
        with capture_logs() as logged:
            await whole._bring_up()
        assert [(line["why"], line["exc_info"] is not None) for line in logged] == [("no broker", False), ("odd", True)]
        whole.lease_keeper.keep.assert_awaited_once()
        assert given_up == []
    finally:
        await whole.stop()


@pytest.mark.parametrize("key_ttl_s", [86_400, 86_401])
async def test_a_longer_retention_by_rule_is_remembered_before_a_slot_is_held(
    monkeypatch: pytest.MonkeyPatch, key_ttl_s: int
) -> None:
    monkeypatch.setattr(service.app, "BRING_UP_PAUSE_S", 0.001)
    rules = Rules.parse(f'[[topics]]\npattern = "*"\nkey_ttl_s = {key_ttl_s}\n')
    whole = Service(Settings(key_ttl_s=86_400), rules, Schemas(rules), Telemetry(), lambda _: None)
    whole.topics.ensure = AsyncMock()  # type: ignore[method-assign]
    whole.keys.check = AsyncMock()  # type: ignore[method-assign]
    whole.clocks.measure = AsyncMock()  # type: ignore[method-assign]
    send = AsyncMock(side_effect=[KafkaAway("no broker"), 0])
    monkeypatch.setattr(IdempotentProducer, "send", send)

    async def keep() -> None:
        keys = [call.args[2] for call in send.await_args_list]
        assert keys == ([] if key_ttl_s == 86_400 else [b"retention/86401"] * 2)

    whole.lease_keeper.keep = AsyncMock(side_effect=keep)  # type: ignore[method-assign]
    try:
        await whole._bring_up()
        whole.lease_keeper.keep.assert_awaited_once()
    finally:
        await whole.stop()


@pytest.mark.parametrize("task", BACKGROUND)
async def test_a_background_task_that_fails_is_logged_and_restarted(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    """Without the sweep no deadline is answered, and without the watch its metrics do not change."""
    whole = service_with()
    works = {name: AsyncMock(side_effect=[*([KeyError("a bug")] * (name == task)), None]) for name in BACKGROUND}
    monkeypatch.setattr(whole.resolver, "sweep", works["sweep"])
    monkeypatch.setattr(whole, "_watch", works["watch"])
    monkeypatch.setattr(whole, "_bring_up", works["bring-up"])
    monkeypatch.setattr(whole.lso_watch, "run", works["lso-watch"])
    monkeypatch.setattr(whole.clocks, "keep", works["clocks"])
    whole.start()
    try:
        with capture_logs() as logged:
            await until(lambda: all(each.done() for each in whole._tasks))
        assert {name: work.await_count for name, work in works.items()} == dict.fromkeys(BACKGROUND, 1) | {task: 2}
        assert [line["task"] for line in logged if line["event"] == "task failed"] == [task]
        assert sample(whole.telemetry, "fencepost_task_failures_total", task=task) == 1
    finally:
        await whole.stop()


async def test_an_app_that_has_run_says_that_another_one_must_be_made() -> None:
    """As the second `with TestClient(app)` of a test: its parts are closed, and all events would get 503."""
    rules = Rules()
    nobody = Settings(kafka="127.0.0.1:1", redis="redis://127.0.0.1:1/0")
    app = build_router(nobody, LoadedRules(rules, Schemas(rules), ()), lambda _: None).app
    async with app.router.lifespan_context(app):
        pass
    before = asyncio.all_tasks()
    with pytest.raises(RuntimeError, match=r"runs once: make another one with create_app\(\)"):
        async with app.router.lifespan_context(app):
            pass
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("part", ["store", "pool"])
async def test_data_that_only_a_newer_release_reads_end_the_process_with_a_line(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Under another ASGI server the process stays, and accepts no request."""
    monkeypatch.setattr(service.app, "WATCH_S", 0.001)
    given_up: list[SettingsError] = []
    whole = service_with(given_up.append)
    who = AsyncMock(side_effect=NewerVersion("keys of version 2"))
    monkeypatch.setattr(whole.keys, "who", who)
    monkeypatch.setattr(whole.keys, "memory", AsyncMock(return_value=(0, 0)))
    monkeypatch.setattr(whole.kafka_admin, "answers", AsyncMock())
    watching = asyncio.create_task(whole._watch())
    try:
        await until(lambda: who.await_count > 2)
        assert (await whole.readiness.check())["redis"] == "keys of version 2"
        assert given_up == []
        (whole.store if part == "store" else whole.pool).newer = NewerVersion("a record of version 3")
        await watching
        assert [str(error) for error in given_up] == ["a record of version 3"]
        found = await whole.readiness.check()
        assert (found["ready"], found["store"]) == (False, "a record of version 3")
        assert found["slots"] == "none is taken yet"
        whole.pool.trouble = "the service has no permission"
        assert (await whole.readiness.check())["slots"] == "the service has no permission"
        assert not whole.admission.is_accepting
    finally:
        await ended(watching)
        await whole.stop()


async def test_probes_of_one_time_share_one_question_to_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would need one more connection."""
    whole = service_with()
    asked = 0

    async def who() -> ServerIdentity:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01)
        return ServerIdentity("run/repl", None)

    monkeypatch.setattr(whole.keys, "who", who)
    monkeypatch.setattr(whole.kafka_admin, "answers", AsyncMock())
    try:
        found = await asyncio.gather(*(whole.readiness.check() for _ in range(300)))
        assert {each["redis"] for each in found} == {"ok"}
        assert asked == 1
        await whole.readiness.check()
        assert asked == 2
    finally:
        await whole.stop()


@pytest.mark.parametrize("recovered", [True, False])
async def test_an_old_reply_of_redis_is_not_compared_with_a_newer_generation(
    monkeypatch: pytest.MonkeyPatch, recovered: bool
) -> None:
    whole = service_with()
    older, newer = StoreGeneration(1, "run/old"), StoreGeneration(2, "run/new")
    reply = asyncio.Event()

    async def who() -> ServerIdentity:
        await reply.wait()
        return ServerIdentity(newer.store, None)  # an empty server: the older generation is lost

    monkeypatch.setattr(whole.keys, "who", who)
    monkeypatch.setattr(whole.kafka_admin, "answers", AsyncMock())
    recovering = AsyncMock(side_effect=asyncio.Event().wait)
    monkeypatch.setattr(whole.control, "newest_generation", recovering)
    whole.store.generation = older
    try:
        early = asyncio.create_task(whole.readiness.check())
        await steps()
        if recovered:  # before the reply is read
            whole.store.generation = newer
        late = asyncio.create_task(whole.readiness.check())  # shares the request of the early probe
        await steps()
        reply.set()
        redis = {(await probe)["redis"] for probe in (early, late)}
        assert whole.store.generation == (newer if recovered else None)
        assert redis == ({"ok"} if recovered else {"another store answers"})
        await steps()
        assert recovering.await_count == (0 if recovered else 1)
    finally:
        await whole.stop()


async def test_a_login_that_kafka_refuses_ends_the_start() -> None:
    given_up: list[SettingsError] = []
    whole = service_with(given_up.append)
    whole.topics.ensure = AsyncMock(side_effect=KafkaLoginFailed("set the password"))  # type: ignore[method-assign]
    try:
        async with asyncio.timeout(5.0):
            await whole._bring_up()
    finally:
        await whole.stop()
    assert [str(error) for error in given_up] == ["set the password"]


def watched(monkeypatch: pytest.MonkeyPatch, give_up: Callable[[SettingsError], None] = lambda _: None) -> Service:
    """Make a service whose Kafka and Redis answer the probes of `_watch`."""
    monkeypatch.setattr(service.app, "WATCH_S", 0.001)
    whole = service_with(give_up)
    monkeypatch.setattr(whole.keys, "who", AsyncMock(return_value=ServerIdentity("run/repl", None)))
    monkeypatch.setattr(whole.keys, "memory", AsyncMock(return_value=(0, 0)))
    monkeypatch.setattr(whole.kafka_admin, "answers", AsyncMock())
    return whole


@pytest.mark.parametrize("part", ["store", "pool"])
async def test_a_setting_that_kafka_refuses_ends_the_start(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    given_up: list[SettingsError] = []
    whole = watched(monkeypatch, given_up.append)
    (whole.store if part == "store" else whole.pool).refused = KafkaRefusesSetting("set a smaller one")
    try:
        async with asyncio.timeout(5.0):
            await whole._watch()
        assert [str(error) for error in given_up] == ["set a smaller one"]
        assert not whole.admission.is_accepting
    finally:
        await whole.stop()


@pytest.mark.parametrize("part", ["store", "pool"])
async def test_a_setting_that_kafka_refuses_later_leaves_a_running_service_unready(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The brokers' setting may have changed, and may change back."""
    given_up: list[SettingsError] = []
    whole = watched(monkeypatch, given_up.append)
    whole.pool.was_ready = True
    (whole.store if part == "store" else whole.pool).refused = KafkaRefusesSetting("set a smaller one")
    memory = AsyncMock(return_value=(0, 0))
    monkeypatch.setattr(whole.keys, "memory", memory)
    watching = asyncio.create_task(whole._watch())
    try:
        await until(lambda: memory.await_count > 2)
        assert given_up == []
        assert not watching.done()
    finally:
        await ended(watching)
        await whole.stop()


async def test_readiness_tells_why_the_start_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.app, "BRING_UP_PAUSE_S", 0.001)
    whole = watched(monkeypatch)
    why = "topic fencepost.ledger was not created: InvalidReplicationFactorError"
    ensure = AsyncMock(side_effect=KafkaAway(why))
    monkeypatch.setattr(whole.topics, "ensure", ensure)
    starting = asyncio.create_task(whole._bring_up())
    try:
        await until(lambda: ensure.await_count > 1)
        found = await whole.readiness.check()
        assert (found["ready"], found["store"]) == (False, f"starting: {why}")
        assert whole.store.state == "starting"
    finally:
        await ended(starting)
        await whole.stop()
