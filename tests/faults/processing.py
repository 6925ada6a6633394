"""Processors of one consumer group, which make an invoice of each order, and a thread that writes orders.

A processor is deploy/examples/process_orders.py: it sends the invoices of a batch together with the group's offset.
`Processing.finish` checks that each order has one invoice, and that the committed offsets are those of the ledger.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException, Producer

from service.contract.wire.ledger import LedgerRecord, decode_ledger
from service.contract.wire.names import ledger_topic
from tests.faults.cluster import Cluster
from tests.faults.wire import Broker
from tests.integration.judge import read_committed
from tests.integration.processor import Processor

PARTITIONS: Final = 3
ORDERS_PER_S: Final = 40.0
# A killed member's partitions move after its session; the broker's least is that of deploy/stack/kafka.py.
SESSION_MS: Final = 2_000
RECORDS_MAX: Final = 100
FINISH_S: Final = 90.0
FLUSH_S: Final = 60.0
POLL_S: Final = 0.1


class Processing:
    """Orders, the processors that read them, and their invoices; `start` once, and `finish` or `close` at the end."""

    def __init__(self, folder: Path, cluster: Cluster, namespace: str, url: str, count: int) -> None:
        self.source, self.result = f"{namespace}.orders", f"{namespace}.invoices"
        self.group = f"{namespace}-billing"
        self.orders = 0  # written so far
        self.longest_s = 0.0  # without a newly committed offset
        self._watching = threading.Thread(target=self._watch, name="offsets", daemon=True)
        self._cluster = cluster
        self._namespace = namespace
        self._fed = Counter[int]()  # acknowledged orders, by partition
        self._stopping = threading.Event()
        self._feeding = threading.Thread(target=self._feed, name="orders", daemon=True)
        options = ["--group", self.group, "--records-max", f"{RECORDS_MAX}", "--session-ms", f"{SESSION_MS}"]
        argv = [sys.executable, "-m", "deploy.examples.process_orders", *options, self.source, self.result]
        self.processors = [
            Processor(f"processor-{number}", folder, argv, url, cluster.bootstrap) for number in range(count)
        ]

    def start(self) -> None:
        for topic in (self.source, self.result):
            self._cluster.create_topic(topic, PARTITIONS)
        self.start_dead()
        self._feeding.start()
        self._watching.start()

    def _watch(self) -> None:
        """Measure the longest time in which no offset was committed, from the first one on."""
        highest, since = 0, 0.0
        while not self._stopping.wait(POLL_S):
            present = sum(self.committed().values())
            if present > highest or not highest:
                self.longest_s = max(self.longest_s, time.monotonic() - since) if highest else 0.0
                highest, since = present, time.monotonic()

    def _feed(self) -> None:
        servers = {"bootstrap.servers": self._cluster.bootstrap, "log_level": 0}
        producer = Producer({**servers, "enable.idempotence": True, "linger.ms": 20, "message.timeout.ms": 120_000})
        begun = time.monotonic()
        while not self._stopping.wait(max(0.0, begun + self.orders / ORDERS_PER_S - time.monotonic())):
            order = json.dumps({"order": self.orders, "cents": 100 + self.orders})
            producer.produce(self.source, order, partition=self.orders % PARTITIONS, on_delivery=self._acknowledged)
            self.orders += 1
            producer.poll(0)
        producer.flush(FLUSH_S)

    def _acknowledged(self, error: object, message: object) -> None:
        if error is None:
            self._fed[message.partition()] += 1  # type: ignore[attr-defined]

    # ------------------------------------------------------------------------------------------------ for rows

    def kill(self) -> None:
        """Kill all processors."""
        for each in self.processors:
            each.kill()

    def start_dead(self) -> None:
        """Start the processors that do not run, as a supervisor would."""
        for each in self.processors:
            if not each.running:
                each.start()

    def count(self, what: str) -> int:
        """Count the batches that were `written`, `replayed` or `dropped`."""
        return sum(each.count(what) for each in self.processors)

    def committed(self) -> Mapping[int, int]:
        """Read the group's committed offsets, by partition; nothing while no coordinator answers."""
        try:
            host, _, port = self._cluster.group_coordinator(self.group).bootstrap.partition(":")
            with Broker(host, int(port)) as broker:
                return broker.committed_offsets(self.group, self.source, PARTITIONS)
        except (KafkaException, OSError, AssertionError, KeyError, StopIteration):  # no leader, or not there yet
            return {}

    def written_now(self) -> Mapping[int, int]:
        """Count the orders of each partition that are written now."""
        return dict(self._fed)

    def has_passed(self, orders: Mapping[int, int]) -> bool:
        """Whether the committed offsets have reached these numbers of orders; starts processors that have ended."""
        self.start_dead()
        committed = self.committed()
        return all(committed.get(partition, 0) >= count for partition, count in orders.items())

    # ------------------------------------------------------------------------------------------------ the end

    def finish(self) -> list[str]:
        """Write no more orders, wait for their invoices, and end the processors; returns what is wrong."""
        self._stopping.set()
        self._feeding.join(FLUSH_S)
        self._watching.join(FLUSH_S)
        fed = self.written_now()
        for each in self.processors:
            if each.running:
                each.resume()
        deadline = time.monotonic() + FINISH_S
        while not self.has_passed(fed) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.kill()
        committed = self.committed()
        wrong = [] if committed == fed else [f"of {fed} orders, {committed} are committed"]
        if sum(fed.values()) < self.orders:
            wrong.append(f"of {self.orders} orders, {sum(fed.values())} were acknowledged")
        return wrong + self._wrong_invoices() + self._wrong_positions(committed)

    def _wrong_invoices(self) -> list[str]:
        records = read_committed(self._cluster.bootstrap, [self.result])
        times = Counter(int(json.loads(record.value or b"")["order"]) for record in records)
        wrong = [f"order {order} has {count} invoices" for order, count in times.items() if count > 1]
        return wrong + [f"order {order} has no invoice" for order in range(self.orders) if order not in times]

    def _wrong_positions(self, committed: Mapping[int, int]) -> list[str]:
        """List where the offsets in the ledger's records differ from the committed ones."""
        found: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
        for raw in read_committed(self._cluster.bootstrap, [ledger_topic(self._namespace)]):
            record = decode_ledger(raw.value)
            if isinstance(record, LedgerRecord) and record.offsets is not None:
                for position in record.offsets.positions:
                    found[position.partition].append(position.offset)
        wrong = [f"the ledger has an offset of {n} twice" for n, those in found.items() if len(set(those)) < len(those)]
        last = {partition: max(those, default=0) for partition, those in found.items()}
        return wrong if last == committed else [*wrong, f"the ledger ends at {last}, the group is at {committed}"]

    def close(self) -> None:
        """End all that runs."""
        self._stopping.set()
        self.kill()
