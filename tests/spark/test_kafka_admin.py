"""The first records of logs, by a consumer that is a fake: no Spark, no Kafka."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from service.contract import SharedSettings
from spark.engine.jvm import Py4JJavaError
from spark.errors import CannotRun
from spark.reading import kafka_admin
from spark.reading.kafka_admin import CALL_MS, POLL_MS, KafkaAdmin


class JavaPartition(NamedTuple):
    of_topic: str
    number: int

    def topic(self) -> str:
        return self.of_topic

    def partition(self) -> int:
        return self.number


class JavaList(list[Any]):
    def add(self, item: Any) -> None:
        self.append(item)


class Batch(dict[JavaPartition, Any]):
    """The records of one poll: timestamps by partition."""

    def partitions(self) -> Iterable[JavaPartition]:
        return list(self)

    def records(self, handle: JavaPartition) -> Any:
        records = Mock()
        records.get.return_value.timestamp.return_value = self[handle]
        return records


@dataclass
class FakeConsumer:
    """Each poll returns one record, after `delay` empty polls; `markers` has the logs that end with a marker."""

    timestamps: dict[str, int]
    ends: dict[str, int]
    markers: frozenset[str] = frozenset()
    delay: int = 0
    clock_s: float = 0.0
    paused: set[JavaPartition] = field(default_factory=set)
    positions: dict[JavaPartition, int] = field(default_factory=dict)

    def assign(self, handles: Iterable[JavaPartition]) -> None:
        self.positions = dict.fromkeys(handles, 0)

    def endOffsets(self, handles: Iterable[JavaPartition], timeout: Any) -> dict[JavaPartition, int]:  # noqa: N802
        return {handle: self.ends[handle.topic()] for handle in handles}

    def seek(self, handle: JavaPartition, offset: int) -> None:
        self.positions[handle] = offset

    def position(self, handle: JavaPartition, timeout: Any) -> int:
        return self.positions[handle]

    def pause(self, handles: Iterable[JavaPartition]) -> None:
        self.paused |= set(handles)

    def close(self, timeout: Any) -> None:
        pass

    def poll(self, timeout: Any) -> Batch:
        if self.delay:
            self.delay -= 1
        else:
            for handle in self.positions.keys() - self.paused:
                if handle.topic() in self.timestamps:
                    return Batch({handle: self.timestamps[handle.topic()]})
                if handle.topic() in self.markers:
                    self.positions[handle] = self.ends[handle.topic()]
        self.clock_s += POLL_MS / 1000
        return Batch()


def _timestamps(monkeypatch: pytest.MonkeyPatch, consumer: FakeConsumer) -> dict[kafka_admin.TopicPartition, int]:
    """Read the first records at offset 5 of the consumer's logs."""
    packages = Mock()
    packages.java.util.ArrayList = JavaList
    packages.org.apache.kafka.common.TopicPartition = JavaPartition
    packages.org.apache.kafka.clients.consumer.KafkaConsumer.return_value = consumer
    monkeypatch.setattr(kafka_admin, "jvm", lambda spark: packages)
    monkeypatch.setattr("time.monotonic", lambda: consumer.clock_s)
    return KafkaAdmin(Mock(), SharedSettings()).timestamps_at({(name, 0): 5 for name in consumer.ends})


def test_a_first_record_is_waited_for_as_long_as_kafka_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many partitions of one broker need many polls, and a busy broker may leave some polls empty."""
    names = [f"t-{n}" for n in range(100)]
    slow = FakeConsumer(
        {name: n for n, name in enumerate(names)}, dict.fromkeys(names, 9), delay=CALL_MS // POLL_MS - 1
    )
    assert _timestamps(monkeypatch, slow) == {(name, 0): n for n, name in enumerate(names)}


def test_a_log_that_has_no_such_record_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"has": 9, "empty": 5, "marker": 6}
    assert _timestamps(monkeypatch, FakeConsumer({"has": 7}, ends, frozenset({"marker"}))) == {("has", 0): 7}


def test_a_log_without_an_answer_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CannotRun, match=r"did not answer: no record of silent\[0\] within 30 s; check that the brokers"
    ):
        _timestamps(monkeypatch, FakeConsumer({"has": 7}, {"has": 9, "silent": 9}))


class Failure(Py4JJavaError):  # type: ignore[misc]
    """An exception of Java with this text and no cause."""

    def __init__(self, text: str) -> None:
        self.java_exception = Mock()
        self.java_exception.getCause.return_value = None
        self.java_exception.toString.return_value = text


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("java.util.concurrent.TimeoutException", "did not answer: java.util.concurrent.TimeoutException; check that"),
        ("org.apache.kafka.common.errors.TimeoutException: no node", "did not answer: "),
        ("org.apache.kafka.common.errors.DisconnectException: cancelled", "did not answer: "),
        ("org.apache.kafka.common.errors.SaslAuthenticationException: failed", "did not answer: "),
        ("sun.security.validator.ValidatorException: PKIX path building failed", "did not answer: "),
        (
            "org.apache.kafka.common.errors.TopicAuthorizationException: Not authorized to access topics: [orders]",
            "refused a request: org.apache.kafka.common.errors.TopicAuthorizationException: Not authorized to access "
            "topics: [orders]; check the rights of its user, or start the run again if a log has changed meanwhile",
        ),
        ("org.apache.kafka.clients.consumer.OffsetOutOfRangeException: {orders-0=0}", "refused a request: "),
    ],
)
def test_a_request_that_is_refused_is_not_reported_as_one_without_an_answer(
    cause: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers are up: what helps is a right, or another run."""
    packages = Mock()
    listed = packages.org.apache.kafka.clients.admin.AdminClient.create.return_value.listTopics.return_value
    listed.names.return_value.get.side_effect = Failure(cause)
    monkeypatch.setattr(kafka_admin, "jvm", lambda spark: packages)
    with pytest.raises(CannotRun) as failed:
        KafkaAdmin(Mock(), SharedSettings(kafka="k:1")).names()
    assert f"Kafka at FENCEPOST_KAFKA='k:1' {said}" in str(failed.value)
