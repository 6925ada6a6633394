"""Read-only clients of Kafka and Redis, made from the settings."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.cli.redis_view import KeysView
from service.core.metrics import Telemetry
from service.core.settings import Settings
from service.kafka.admin import KafkaAdmin
from service.kafka.security import Security


@asynccontextmanager
async def kafka_admin(settings: Settings) -> AsyncIterator[KafkaAdmin]:
    """Make a client of Kafka, and close it at the end."""
    client = KafkaAdmin(
        settings.kafka,
        client_id=f"fencepost-look-{settings.name}",
        request_timeout_ms=settings.request_timeout_ms,
        telemetry=Telemetry(),
        security=Security(settings),
    )
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def keys_view(settings: Settings) -> AsyncIterator[KeysView]:
    """Make a client of Redis, and close it at the end."""
    keys = KeysView(
        settings.redis,
        settings.namespace,
        retention_ms=settings.key_ttl_s * 1000,
        least_left_ms=0,
        lease_ttl_ms=settings.lease_ttl_ms,
        timeout_s=settings.request_timeout_ms / 1000,
        telemetry=Telemetry(),
        tls=settings.redis_tls,
        sentinel_login=settings.redis_sentinel_login,
    )
    try:
        yield keys
    finally:
        await keys.close()
