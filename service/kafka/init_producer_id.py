"""Errors of InitProducerId that last until somebody changes a permission or a setting, with what to change."""

import asyncio
import contextlib
from typing import Final

from aiokafka import errors
from aiokafka.protocol.admin import DescribeConfigsRequest

from service.contract import PREFIX
from service.core.problems import KafkaRefusesSetting
from service.kafka.client import Client
from service.kafka.metadata import BROKER_RESOURCE

TRANSACTION_TIMEOUT_MAX: Final = "transaction.max.timeout.ms"
# For reading the brokers' setting that refuses one of ours. The refusal is reported also without it.
MAXIMUM_TIMEOUT_S: Final = 1.0


def remedy(error: Exception, transactional_id: str) -> str:
    """Say what an operator has to change for a producer id that Kafka refuses for good; "" for any other error."""
    if isinstance(error, errors.TransactionalIdAuthorizationFailed):
        return f"the service has no permission to Describe and Write transactional id {transactional_id}"
    return ""


async def timeout_refused(client: Client, node: int, transaction_timeout_ms: int) -> KafkaRefusesSetting:
    """Make the error for a transaction timeout that a broker refuses; the text has its maximum if that may be read."""
    most = ""
    request = DescribeConfigsRequest([(BROKER_RESOURCE, str(node), [TRANSACTION_TIMEOUT_MAX])])
    with contextlib.suppress(errors.KafkaError, OSError):  # TimeoutError is an OSError
        async with asyncio.timeout(MAXIMUM_TIMEOUT_S):
            response = await client.send(node, request)
            settings = {entry[0]: entry[1] for resource in response.resources for entry in resource[4]}
            most = settings.get(TRANSACTION_TIMEOUT_MAX) or ""
    return KafkaRefusesSetting(
        f"{PREFIX}TRANSACTION_TIMEOUT_MS={transaction_timeout_ms} is more than the brokers' {TRANSACTION_TIMEOUT_MAX}"
        + (f", {most}: set {most} or less, or raise theirs" if most else ": set a smaller one, or raise theirs")
    )
