"""The bare Spark read that the audit is compared with: read data, ledger and journal, and count by id.

`python -m tests.bench.bare_read KAFKA NAMESPACE RECORDS` does so once in a cold process, with the session of the audit,
in a JVM that reads and checks all its classes; with a fourth argument, `small`, in a JVM as that of a small run.
"""

import sys
import time

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from service.contract import SharedSettings
from service.contract.wire.headers import STAMP_HEADER
from service.contract.wire.ids import ID_BYTES
from service.contract.wire.names import ledger_topic, requests_topic
from spark.engine.session import JAVA_OPTIONS, SMALL_RUN_JAVA_OPTIONS, open_session
from spark.reading import source
from spark.reading.kafka_admin import KafkaAdmin, TopicPartition
from tests.bench.records import Records
from tests.bench.rows import NotRealWork


def seconds(spark: SparkSession, shared: SharedSettings, records: Records, *, decoded: bool = True) -> float:
    """Read the records, extract the ids, and count the records, entries and answers of each; return the seconds.

    If not `decoded`, only the ids of the data are counted, and the bytes of ledger and journal.

    Raises:
        NotRealWork: these are not all records.
    """
    broker = KafkaAdmin(spark, shared)
    started = time.monotonic()

    def read(topic: str, *, headers: bool = False) -> DataFrame:
        ends = broker.ends([(topic, partition) for partition in range(records.partitions)])
        spans: dict[TopicPartition, source.Span] = {place: (0, one.last_stable) for place, one in ends.items()}
        return source.read(spark, shared, spans, headers=headers)

    stamp = F.filter("headers", lambda header: header["key"] == STAMP_HEADER)[0]["value"]
    ids = read(records.topic, headers=True).select(stamp.substr(3, 2 * ID_BYTES).cast("string").alias("id"))
    claims = {"entries": ledger_topic(records.namespace), "answers": requests_topic(records.namespace)}
    for part, topic in claims.items():
        if decoded:
            body = F.from_json(F.col("value").cast("string"), f"{part} array<struct<id: string>>")
            ids = ids.unionByName(read(topic).select(F.explode(body[part]["id"]).alias("id")))
        else:
            read(topic).agg(F.sum(F.octet_length("value"))).collect()
    counted = ids.groupBy("id").count()
    (sums,) = counted.agg(F.count("*").alias("ids"), F.sum("count").alias("records")).collect()
    took_s = time.monotonic() - started
    broker.close()
    whole = records.count + records.copies
    if decoded:
        whole += 2 * records.count + records.replays
    if (sums["ids"], sums["records"]) != (records.count, whole):
        raise NotRealWork(f"the bare read saw {sums}")
    return took_s


def main() -> int:
    kafka, namespace, count, *small = sys.argv[1:]
    if small:
        spark = open_session(java_options=SMALL_RUN_JAVA_OPTIONS)
    else:
        spark = open_session(java_options=JAVA_OPTIONS, sharing=lambda environ: "")
    # The time of the records is not read.
    seconds(spark, SharedSettings(kafka=kafka, namespace=namespace), Records(namespace, int(count), 0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
