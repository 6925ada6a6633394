"""The local stack as a library for the demo, `up` and the tests. Every part is a real process.

with Kafka(folder / "kafka") as kafka, Redis(folder / "redis") as redis:
    with Service(folder, kafka=kafka.bootstrap, redis=redis.url) as service:
        ...
"""

from deploy.console import StackError
from deploy.stack.kafka import Kafka, Listener
from deploy.stack.ports import free_port, port_or_free
from deploy.stack.process import Process
from deploy.stack.redis import Redis
from deploy.stack.service import Service

__all__ = ["Kafka", "Listener", "Process", "Redis", "Service", "StackError", "free_port", "port_or_free"]
