"""The local stack as a library: every part a real process, for the demo, `up` and the tests.

with Kafka(folder / "kafka") as kafka, Redis(folder / "redis") as redis:
    with Service(folder, kafka=kafka.bootstrap, redis=redis.url) as service:
        ...
"""

from deploy.local.console import StackError
from deploy.local.kafka import Kafka, Listener
from deploy.local.ports import free_port, port_or_free
from deploy.local.process import Process
from deploy.local.redis import Redis
from deploy.local.service import Service

__all__ = ["Kafka", "Listener", "Process", "Redis", "Service", "StackError", "free_port", "port_or_free"]
