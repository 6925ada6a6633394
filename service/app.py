"""The composition root: makes all parts of the service from its settings, starts and stops them."""

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
from fastapi import FastAPI

from service import native
from service.claims.redis_connections import check_url
from service.claims.redis_store import RedisKeys
from service.claims.states import SlotState
from service.contract import PREFIX, Rules, SettingsError
from service.core.logs import Incident, configure_logging
from service.core.metrics import Telemetry
from service.core.problems import KafkaAway, KafkaForbids, KafkaLoginFailed, StoreAway, StoreUnanswered
from service.core.settings import Settings
from service.core.supervision import log_loop_errors, supervise
from service.core.task_dump import dump_on_signal
from service.events.loaded_rules import LoadedRules, contradictions, load_rules
from service.events.schemas import Schemas
from service.events.strict_json import check_json, in_thread
from service.http.rates import Rates
from service.http.token_callers import CurrentTokenCallers
from service.kafka.admin import KafkaAdmin
from service.kafka.listing import TopicLister
from service.kafka.security import Security
from service.kafka.topic_admin import TopicAdmin
from service.kafka.topics import READ_TOPICS_MAX, InternalTopics, TopicMetadataCache
from service.kafka.transaction_admin import TransactionAdmin
from service.pipeline.admission import Admission
from service.pipeline.checks import EventChecks
from service.pipeline.clocks import Clocks
from service.pipeline.journal import Journal
from service.pipeline.lease_keeper import LeaseKeeper
from service.pipeline.leases import Leases
from service.pipeline.lso_watch import LsoWatch
from service.pipeline.pool import Pool
from service.pipeline.queue import Queue
from service.pipeline.readiness import Readiness
from service.pipeline.resolver import Resolver
from service.pipeline.writer import Writer
from service.router import Router
from service.rules_reload import RulesReload
from service.slots.former_ids import FormerIds
from service.slots.generation_log import Control
from service.slots.recovery import SlotRecovery
from service.slots.store_recovery import STORE_STATES, CurrentStore

if TYPE_CHECKING:
    from service.events.encoding import Encoder
    from service.pipeline.tracing import Tracing
    from service.registry.client import RegistryClient

log = structlog.get_logger(__name__)

BRING_UP_PAUSE_S: Final = 1.0
GC_THRESHOLDS: Final = (25_000, 40, 50)
JOURNAL_TIMEOUT_S: Final = 3.0
TRACES_TIMEOUT_S: Final = 3.0
# Between two measurements of Redis and Kafka for the metrics.
WATCH_S: Final = 2.0
# Between two reads of the own topics' limits. A lower limit is also noticed when a record is refused.
LIMITS_S: Final = 10.0


class Service:
    """All the parts of one process, from `start` to `stop`."""

    def __init__(
        self,
        settings: Settings,
        rules: Rules,
        schemas: Schemas,
        telemetry: Telemetry,
        give_up: Callable[[SettingsError], None],
    ) -> None:
        self.settings = settings
        self.telemetry = telemetry
        self.registry, encoder = _registry_of(settings, rules, telemetry)
        self.tracing = _tracing_of(settings)
        self._give_up = give_up
        self._own_topics_trouble = Incident(log, "own topics changed: events may be lost or written twice")
        self.kafka_admin = _kafka_admin_of(settings, telemetry)
        self.keys = _keys_of(settings, telemetry)
        topic_admin, transactions = TopicAdmin(self.kafka_admin), TransactionAdmin(self.kafka_admin)
        self.topics = InternalTopics(topic_admin, settings, rules.longest_ttl_s)
        self.topic_metadata = TopicMetadataCache(topic_admin)
        # The topics of positions: they are not written to, so the LSO watch does not ask for them.
        self.read_topics = TopicMetadataCache(topic_admin, READ_TOPICS_MAX)
        self.topic_lister = TopicLister(topic_admin.list_topics, topic_admin.describe)
        self.control = Control(self.kafka_admin, self.topics.control, settings.name, settings.key_ttl_s)
        self.store = CurrentStore(
            self.kafka_admin, transactions, self.keys, self.control, self.topics, settings, self.telemetry
        )
        self.queue = Queue(settings)
        self.journal = Journal(self.kafka_admin, self.topics.requests, settings.name, self.telemetry)
        self.clocks = Clocks(self.kafka_admin, self.keys, self.topics.requests, settings.name)
        self._make_pipeline(rules, schemas, encoder, transactions)
        self.rates = Rates(self.keys, lambda: self.lease_keeper.members)
        self.tokens = CurrentTokenCallers(rules, telemetry, self.rates)
        self.lso_watch = self._lso_watch_of(topic_admin, transactions)
        self.readiness = Readiness(self.kafka_admin, self.keys, self.store, self.pool, self.admission, self.clocks)
        self._show_states()
        self._tasks: list[asyncio.Task[None]] = []

    def _make_pipeline(
        self, rules: Rules, schemas: Schemas, encoder: "Encoder | None", transactions: TransactionAdmin
    ) -> None:
        """Make the parts on the way of an event: admission, writer, and the pool of slots that the writer serves."""
        checks = EventChecks(
            self.settings,
            rules,
            schemas,
            self.store,
            self.topics,
            self.topic_metadata,
            self.read_topics,
            self.clocks.kafka.now_ms,
            encoder,
        )
        self.resolver = Resolver(self.settings, self.queue, self.journal, self.telemetry, self.tracing)
        self.admission = Admission(self.settings, rules, checks, self.store, self.queue, self.resolver, self.tracing)
        heartbeat_now = asyncio.Event()
        self.writer = Writer(
            self.settings,
            self.keys,
            self.store,
            self.queue,
            self.topic_metadata,
            self.resolver,
            heartbeat_now,
            self.telemetry,
            self.tracing,
            self.clocks.kafka.now_ms,
        )
        recovery = SlotRecovery(
            self.kafka_admin, transactions, self.keys, self.control, self.topics, self.settings, self.telemetry
        )
        leases = Leases(self.keys, self.store, self.settings)
        self.pool = Pool(leases, self.store, recovery, self.writer, self.queue, self.telemetry)
        self.lease_keeper = LeaseKeeper(self.settings, leases, self.store, self.pool, heartbeat_now)

    def _lso_watch_of(self, topic_admin: TopicAdmin, transactions: TransactionAdmin) -> LsoWatch:
        """Make the watch that has slots recovered whose transactions hang."""
        ledger = self.topics.ledger
        former_ids = FormerIds(self.kafka_admin, topic_admin, transactions, ledger, self.settings)
        return LsoWatch(
            self.settings, transactions, self.lease_keeper, former_ids, ledger, self.topic_metadata, self.telemetry
        )

    def _show_states(self) -> None:
        """Have each scrape read the parts' present states."""
        show = self.telemetry
        show.queued.set_function(lambda: self.queue.events)
        show.queued_bytes.set_function(lambda: self.queue.bytes)
        show.journal_waiting.set_function(lambda: self.journal.waiting)
        show.in_doubt.set_function(lambda: self.pool.in_doubt)
        show.in_doubt_oldest.set_function(lambda: self.pool.in_doubt_s)
        show.slot_down.set_function(lambda: self.pool.down_s)
        for whose, clock in self.clocks.by_name.items():
            show.clock_ahead.labels(whose).set_function(clock.ahead_s)
        show.store.generation.set_function(lambda: self.store.generation_number)
        for slot_state in SlotState:
            show.slots.labels(slot_state.value).set_function(partial(self.pool.count, slot_state))
        for state in STORE_STATES:
            show.store.state.labels(state).set_function(partial(self._is_store, state))

    def _is_store(self, state: str) -> bool:
        return self.store.state == state

    def start(self) -> None:
        """Start the background tasks. The service stays unready while Kafka or Redis is away.

        Raises RuntimeError at a second start: what `stop` has drained and closed does not open again.
        """
        if self._tasks:
            raise RuntimeError("this app has run before, and runs once: make another one with create_app()")
        dump_on_signal(asyncio.get_running_loop())
        if not native.COMPILED:
            log.warning("the inner loops are not compiled: they run in Python, with more CPU", remedy=native.REMEDY)
        telemetry = self.telemetry
        log_loop_errors(asyncio.get_running_loop(), telemetry)
        self.journal.start()
        self.tokens.start()
        self._tasks += [
            supervise("bring-up", self._bring_up, telemetry),
            supervise("sweep", self.resolver.sweep, telemetry),
            supervise("watch", self._watch, telemetry),
            supervise("lso-watch", self.lso_watch.run, telemetry),
            supervise("clocks", self.clocks.keep, telemetry),
        ]

    async def _bring_up(self) -> None:
        """Create the topics, check Redis and measure the clocks, again until all succeed; then hold slots, for ever."""
        await in_thread(check_json, b"null")  # start its thread before the first long body needs it
        trouble = Incident(log, "not up yet")
        while True:
            try:
                await self.topics.ensure()
                self._keep_to_limits()
                await self.control.remember_retention(self.topics.longest_ttl_s)
                await self.keys.check()
                await self.clocks.measure()  # before anything is written
                break
            except (SettingsError, KafkaLoginFailed) as error:
                self._give_up(SettingsError(str(error)))
                return
            except (KafkaAway, StoreAway, StoreUnanswered, TimeoutError) as error:
                trouble.add(error)
                self.store.note_failed_start(error)
            except Exception as error:  # a bug, or an unexpected response: logged, and tried again
                trouble.add(error, bug=True)
                self.store.note_failed_start(error)
            await asyncio.sleep(BRING_UP_PAUSE_S)
        # All objects so far live as long as the process: exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        # An event makes some hundred objects and no cycle: Python's threshold of 700 would collect several times a
        # group. A collection of 25,000 objects holds the loop for up to 15 ms.
        gc.set_threshold(*GC_THRESHOLDS)
        await self.lease_keeper.keep()

    async def _watch(self) -> None:
        """Measure Redis and Kafka for the metrics, because a scrape must not wait for them.

        Ends the process where Kafka or Redis has what only a newer release can read, and at its start where Kafka
        refuses a setting.
        """
        looked_at = time.monotonic()
        while (why := self.readiness.fatal) is None:
            if self.topics.limits and time.monotonic() >= looked_at + LIMITS_S:
                looked_at = time.monotonic()
                with contextlib.suppress(KafkaAway, KafkaForbids):
                    self._note_faults(await self.topics.check_again())
                    self._keep_to_limits()
            self.telemetry.ready.set(bool((await self.readiness.check())["ready"]))
            with contextlib.suppress(StoreAway, StoreUnanswered):
                used, limit = await self.keys.memory()
                self.telemetry.redis_memory.set(used)
                self.telemetry.redis_memory_limit.set(limit)
            await asyncio.sleep(WATCH_S)
        self.telemetry.ready.set(False)
        self._give_up(SettingsError(str(why)))
        # Another ASGI server than that of `python -m service` goes on, and the process writes nothing: it has no slots.
        await self.admission.drain()
        await self.lease_keeper.stop()

    def _note_faults(self, faults: Sequence[str]) -> None:
        """Show and log what was changed of the own topics since the start, which such a change would have stopped."""
        self.telemetry.kafka.own_topic_faults.set(len(faults))
        if faults:
            self._own_topics_trouble.add(SettingsError("\n".join(faults)))
        elif failures := self._own_topics_trouble.end():
            log.info("the own topics are as they must be again", **failures)

    def _keep_to_limits(self) -> None:
        """Apply the limits of the own topics to groups and to the journal, and show them."""
        self.queue.limit_ledger_bytes(self.topics.ledger_bytes_max)
        if (record_bytes_max := self.topics.limits.get(self.topics.requests)) is not None:
            self.journal.resize(record_bytes_max)
        for name, most in self.topics.limits.items():
            self.telemetry.kafka.own_message_bytes.labels(name).set(most)

    async def stop(self) -> None:
        """Finish what was accepted, give the leases back, write the journal, close everything."""
        await self.admission.drain()
        await self.lease_keeper.stop()
        await self.writer.wait_for_marks()
        await self.journal.close(JOURNAL_TIMEOUT_S)
        if self.tracing is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TRACES_TIMEOUT_S):
                    await asyncio.to_thread(self.tracing.close)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.rates.close()
        await self.clocks.close()
        await self.store.close()
        await self.control.close()
        await self.keys.close()
        self.topic_metadata.close()
        self.read_topics.close()
        self.topic_lister.close()
        if self.registry is not None:
            await self.registry.close()
        await self.tokens.close()
        await self.kafka_admin.close()


def _kafka_admin_of(settings: Settings, telemetry: Telemetry) -> KafkaAdmin:
    return KafkaAdmin(
        settings.kafka,
        client_id=f"fencepost-{settings.name}",
        request_timeout_ms=settings.request_timeout_ms,
        telemetry=telemetry,
        security=Security(settings),
        compression=settings.compression,
        transactions=settings.kafka_transactions,
    )


def _keys_of(settings: Settings, telemetry: Telemetry) -> RedisKeys:
    return RedisKeys(
        settings.redis,
        settings.namespace,
        retention_ms=settings.key_ttl_s * 1000,
        least_left_ms=2 * settings.timeouts_ms,
        lease_ttl_ms=settings.lease_ttl_ms,
        timeout_s=min(settings.request_timeout_ms, settings.lease_ttl_ms) / 1000,
        telemetry=telemetry,
        tls=settings.redis_tls,
        sentinel_login=settings.redis_sentinel_login,
    )


def _registry_of(
    settings: Settings, rules: Rules, telemetry: Telemetry
) -> "tuple[RegistryClient | None, Encoder | None]":
    """Make the client of the Schema Registry if the settings name one; else its libraries are not imported."""
    if not settings.registry:
        return None, None
    from service.events.encoding import Encoder
    from service.registry.client import RegistryClient

    client = RegistryClient(settings, telemetry)
    return client, Encoder(client, settings, rules, telemetry)


def _tracing_of(settings: Settings) -> "Tracing | None":
    """Make the tracing if the settings switch it on; else OpenTelemetry is not imported."""
    if settings.tracing == "off":
        return None
    from service.pipeline.tracing import Tracing

    return Tracing(settings.name)


def create_app() -> FastAPI:
    """Make the app from the environment, for any ASGI server: `uvicorn --factory service.app:create_app`.

    `python -m service` serves the same app with bounds on connections that an ASGI server may lack. A permanent fault
    of Kafka or Redis is logged, and shown at /readyz.

    Raises:
        SettingsError: a line for each mistake in the settings or the rules.
    """
    settings, loaded = read_configuration()
    configure_logging(settings.log_format, settings.log_keys)
    router = build_router(
        replace(settings, management_port=0, management_host=""),  # the server has one address
        loaded,
        lambda error: log.error("the service cannot become ready: correct this, and restart", error=error),
    )
    return router.app


def read_configuration() -> tuple[Settings, LoadedRules]:
    """Read the settings, and the rules with their schemas and the secrets of their sources.

    Raises SettingsError with a line for each mistake.
    """
    if not __debug__:
        raise SettingsError("python -O is not supported: aiokafka checks its states with assert; start without it")
    wrong: list[str] = []
    try:
        settings = Settings.from_env()
        check_url(settings.redis)
    except SettingsError as error:
        wrong.append(str(error))
    try:
        loaded = load_rules(os.environ.get(f"{PREFIX}RULES", ""))
    except SettingsError as error:
        wrong.append(str(error))
    if not wrong:
        wrong += contradictions(settings, loaded.rules)
    if wrong:
        raise SettingsError("\n".join(wrong))
    return settings, loaded


def build_router(settings: Settings, loaded: LoadedRules, give_up: Callable[[SettingsError], None]) -> Router:
    """Make the service with its ASGI app, and with what a transport below ASGI calls."""
    service = Service(settings, loaded.rules, loaded.schemas, Telemetry(), give_up)

    @contextlib.asynccontextmanager
    async def running(build: Callable[[LoadedRules], Callable[[], None]]) -> AsyncIterator[None]:
        service.start()
        reload = RulesReload(settings, loaded, service.topics, service.control, service.telemetry, build)
        watching = supervise("rules", reload.run, service.telemetry)
        try:
            yield
        finally:
            watching.cancel()
            await service.stop()

    return Router(service, loaded, running)
