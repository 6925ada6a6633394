"""Each part of the stack does what its class says, on the real programs."""

from pathlib import Path

import pytest

from deploy.stack import Kafka, Redis, StackError
from tests import class_data
from tests.conftest import MakeTopic


def test_kafka_answers_and_makes_topics(kafka: Kafka, make_topic: MakeTopic) -> None:
    name = make_topic(partitions=3, config={"retention.ms": "1000"})
    assert name in kafka.topics()
    with pytest.raises(StackError, match="already exists"):
        kafka.create_topic(name)


def test_a_broker_takes_its_classes_from_where_they_were_recorded(kafka: Kafka) -> None:
    kept = class_data.archive()
    if not kept.exists():
        pytest.skip("python -m tests.class_data was not run here; ./tests/run does")
    assert str(kept.resolve()) in Path(f"/proc/{kafka.pid}/maps").read_text()


def test_redis_keeps_nothing_over_a_restart_but_tells_a_new_run_id(own_redis: Redis) -> None:
    with own_redis.client() as client:
        client.set("a", "1")
        before = client.info()["run_id"]
    own_redis.kill()
    own_redis.start()
    with own_redis.client() as client:
        assert client.get("a") is None
        assert client.info()["run_id"] != before


def test_redis_with_a_log_keeps_what_it_had(tmp_path: Path) -> None:
    with Redis(tmp_path, args=["--appendonly", "yes", "--appendfsync", "always"]) as server:
        with server.client() as client:
            client.set("a", "1")
        server.kill()
        server.start()
        with server.client() as client:
            assert client.get("a") == b"1"
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
