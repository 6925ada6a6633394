"""Views of topics, as tests read them."""

from pathlib import Path

from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from service.contract import SharedSettings
from service.contract.wire.ids import event_id
from spark.tables import view
from tests.spark.history import History

Rows = dict[str, tuple[int, int, bytes | None, bool]]


class Views:
    """The views of one history in one lake."""

    def __init__(self, spark: SparkSession, history: History, lake: Path) -> None:
        self.spark = spark
        self.shared = SharedSettings(kafka=history.bootstrap, namespace=history.namespace)
        self.lake = lake

    def register(self, topic: str) -> int:
        return view.register(self.spark, self.shared, str(self.lake), topic)

    def path(self, topic: str) -> str:
        return str(self.lake / view.FOLDER / topic)

    def rows(self, topic: str) -> Rows:
        """Return partition, offset, value, and `in_ledger`, by id; each id must occur once."""
        found = self.spark.read.format("delta").load(self.path(topic)).collect()
        by_id: Rows = {}
        for row in found:
            value = None if row["value"] is None else bytes(row["value"])
            by_id[bytes(row["id"]).hex()] = (row["partition"], row["offset"], value, row["in_ledger"])
        assert len(by_id) == len(found)
        return by_id

    def version(self, topic: str) -> int:
        history = DeltaTable.forPath(self.spark, self.path(topic)).history(1)
        version: int = history.collect()[0]["version"]
        return version


def id_of(key: str) -> str:
    return event_id(key).hex()
