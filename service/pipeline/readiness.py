"""Says whether the process can write now, and if not, what is missing: for /readyz, /startupz and the metrics."""

import asyncio
from typing import Final

from service.claims.keys import Keys, ServerIdentity
from service.claims.redis_requirements import POLICY_CHANGE
from service.contract.wire.versions import NewerVersion
from service.core.problems import KafkaAway, StoreAway, StoreUnanswered
from service.core.shared_task import shared
from service.core.supervision import Cancelled
from service.kafka.admin import KafkaAdmin
from service.pipeline.admission import Admission
from service.pipeline.clocks import Clocks
from service.pipeline.pool import Pool
from service.slots.store_recovery import CurrentStore

# For Kafka and for Redis, less than the timeout of a probe: the probe must get its answer although one of them is
# silent.
READINESS_TIMEOUT_S: Final = 2.5


class Readiness:
    """Checks Redis and Kafka for each probe, and looks at the parts of the process."""

    def __init__(
        self,
        admin: KafkaAdmin,
        keys: Keys,
        store: CurrentStore,
        pool: Pool,
        admission: Admission,
        clocks: Clocks,
    ) -> None:
        self._admin = admin
        self._keys = keys
        self._store = store
        self._pool = pool
        self._admission = admission
        self._clocks = clocks
        self._redis_check: asyncio.Task[str] | None = None  # in flight, shared by concurrent probes
        self.was_ready = False  # at any time since the start

    @property
    def newer(self) -> NewerVersion | None:
        """A record or key that only a newer release can read, so that this process must not write; None without one."""
        return self._store.newer or self._pool.newer

    @property
    def fatal(self) -> Exception | None:
        """Why this process must end: data of a newer release, or at its start a refused setting; None for neither.

        A service that was ready stays: the brokers' setting has changed, and may change back.
        """
        return self.newer or (None if self._pool.was_ready else self._store.refused or self._pool.refused)

    async def check(self) -> dict[str, object]:
        """Check the readiness: a slot is ready, Redis answers and holds the generation, Kafka answers.

        Returns the document of /readyz, in which `ready` is true if all of that is.
        """
        redis, kafka = await asyncio.gather(self._redis_answers(), self._kafka_answers())
        generation, slots = self._store.generation, self._pool.ready
        ready = slots > 0 and generation is not None and redis == kafka == "ok" and self._admission.is_accepting
        self.was_ready = self.was_ready or ready
        return {
            "ready": ready,
            "slots_ready": slots,
            "slots": "ok" if slots else self._pool.trouble or "none is taken yet",
            "redis": redis,
            "kafka": kafka,
            "store": self._store.status if self.newer is None else str(self.newer),
            "generation": None if generation is None else generation.number,
            # This machine's clock, relative to theirs.
            "clock_ahead_s": {whose: clock.ahead_s() for whose, clock in self._clocks.by_name.items()},
        }

    async def _redis_answers(self) -> str:
        """Return `ok`, or what is wrong with Redis. A probe shares the check that an earlier one has in flight."""
        if self._redis_check is None or self._redis_check.done():
            self._redis_check = asyncio.create_task(self._check_redis())
        try:
            async with asyncio.timeout(READINESS_TIMEOUT_S):
                return await shared(self._redis_check)
        except (StoreAway, StoreUnanswered, NewerVersion, Cancelled) as error:
            return str(error)
        except TimeoutError:
            return f"Redis does not answer within {READINESS_TIMEOUT_S} s"

    async def _check_redis(self) -> str:
        """Return `ok`, or what is wrong with the server that answers. Raises StoreAway, StoreUnanswered, NewerVersion.

        The reply may be old when it comes, so it is compared with the generation of the time of the request.
        """
        generation = self._store.generation
        identity = await self._keys.who()
        if identity.evicts:
            return f"maxmemory-policy is {identity.evicts}: {POLICY_CHANGE}"
        if generation is None or generation != self._store.generation:
            return "ok"  # the store's status says what holds now
        if identity == ServerIdentity(generation.store, generation):
            return "ok"
        self._store.lost(generation)  # recover now, before a claim or a heartbeat finds it
        return "another store answers"

    async def _kafka_answers(self) -> str:
        """Return `ok`, or what is wrong with Kafka."""
        try:
            await self._admin.answers(READINESS_TIMEOUT_S)
        except KafkaAway as error:
            return str(error)
        return "ok"
