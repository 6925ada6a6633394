"""Requests to the produce API with the answers of its peers, recorded from their tests and documentation.

Peers: kafka-rest (Confluent, at 985d0e05) and Karapace (Aiven, at 3bbc1f8d). In an answer, a type stands for any value
of that type: positions, times, and texts for people. `{topic}` is a topic with three partitions, `{cluster}` the
cluster's id.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

ANSWER_V2: Final = "application/vnd.kafka.v2+json"
JSON: Final = "application/json"
_BINARY: Final = "application/vnd.kafka.binary.v2+json"
_JSON_V2: Final = "application/vnd.kafka.json.v2+json"
_AVRO: Final = "application/vnd.kafka.avro.v2+json"
_V3: Final = "/v3/clusters/{cluster}/topics/{topic}/records"
_BATCH: Final = f"{_V3}:batch"

# The origins of answers.
_PRODUCER: Final = "kafka-rest integration/ProducerTest."
_JSON_PRODUCER: Final = "kafka-rest integration/JsonProducerTest."
_NO_SCHEMA: Final = "kafka-rest integration/v3/ProduceActionNoSchemaIntegrationTest."
_V3_PRODUCE: Final = "kafka-rest integration/v3/ProduceActionIntegrationTest."
_V3_GETS: Final = "kafka-rest integration/v3/"
_BATCHES: Final = "kafka-rest integration/v3/ProduceBatchActionIntegrationTest."
_BATCH_UNIT: Final = "kafka-rest resources/v3/ProduceBatchActionTest."
_CLOUD: Final = "Confluent Cloud, documentation of "
_OPENAPI: Final = "kafka-rest api/v3/openapi.yaml: "
_KARAPACE: Final = "Karapace tests/integration/kafka_rest_apis/test_rest.py: "


@dataclass(frozen=True)
class Compared:
    """A request, the answer of a peer and its origin; `differs` has our value for each field that is another.

    `body` is text, or a list of JSON objects one after the other. An answer of v3 is a list of JSON objects.
    """

    name: str
    origin: str
    path: str
    content_type: str
    body: str | Sequence[object]
    status: int
    answer: Any
    differs: Mapping[str, object] = field(default_factory=dict)
    why: str = ""
    method: str = "POST"

    @property
    def content(self) -> str:
        return self.body if isinstance(self.body, str) else "\n".join(map(json.dumps, self.body))


ABSENT: Final = "absent"


def differences(peer: Any, ours: Any, at: str = "") -> Iterator[tuple[str, object]]:
    """Compare an answer with the peer's field by field: the JSON pointer of each difference, and our value."""
    if isinstance(peer, type):
        if not isinstance(ours, peer) or isinstance(ours, bool):
            yield at, ours
    elif isinstance(peer, dict) and isinstance(ours, dict):
        for name in {**peer, **ours}:
            if name not in peer or name not in ours:
                yield f"{at}/{name}", ours.get(name, ABSENT)
            else:
                yield from differences(peer[name], ours[name], f"{at}/{name}")
    elif isinstance(peer, list) and isinstance(ours, list) and len(peer) == len(ours):
        for index, (theirs, own) in enumerate(zip(peer, ours, strict=True)):
            yield from differences(theirs, own, f"{at}/{index}")
    elif peer != ours or type(peer) is not type(ours):
        yield at, ours


def _offsets(*partitions: object) -> dict[str, Any]:
    each = [{"partition": number, "offset": int, "error_code": None, "error": None} for number in partitions]
    return {"offsets": each, "key_schema_id": None, "value_schema_id": None}


def _error(error_code: int) -> dict[str, Any]:
    return {"error_code": error_code, "message": str}


def _written(key: Any = None, value: Any = None, **more: object) -> dict[str, Any]:
    place = {"cluster_id": "{cluster}", "topic_name": "{topic}", "partition_id": int, "offset": int, "timestamp": str}
    sizes = {name: given for name, given in (("key", key), ("value", value)) if given is not None}
    return {"error_code": 200, **place, **sizes, **more}


def _size(type: str, size: int) -> dict[str, Any]:
    return {"type": type, "size": size}


def _data(type: str, data: object) -> dict[str, object]:
    return {"type": type, "data": data}


def _v2(name: str, origin: str, content_type: str, records: object, **fields: Any) -> Compared:
    fields = {"path": "/topics/{topic}", "status": 200, **fields}
    return Compared(name, origin, content_type=content_type, body=[{"records": records}], **fields)


def _v3(name: str, origin: str, *records: object, **fields: Any) -> Compared:
    fields = {"path": _V3, "status": 200, "content_type": JSON, **fields}
    return Compared(name, origin, body=records, **fields)


def _batch(name: str, origin: str, *entries: object, **fields: Any) -> Compared:
    fields = {"path": _BATCH, "status": 207, "content_type": JSON, "body": [{"entries": entries}], **fields}
    return Compared(name, origin, **fields)


def _entries(successes: Sequence[object] = (), failures: Sequence[object] = ()) -> dict[str, Any]:
    return {"successes": [*successes], "failures": [*failures]}


def _entry(id: object, text: str = "bob") -> dict[str, Any]:
    return {"id": id, "key": _data("STRING", text)}


def _success(id: str, **fields: Any) -> dict[str, Any]:
    written = _written(**fields)
    del written["error_code"]
    return {"id": id, **written}


def _failure(id: str, error_code: int) -> dict[str, Any]:
    return {"id": id, **_error(error_code)}


def _get(name: str, origin: str, path: str, answer: Any, status: int = 200, **fields: Any) -> Compared:
    content_type = JSON if path.startswith("/v3") else ANSWER_V2
    return Compared(name, origin, path, content_type, "", status, answer, method="GET", **fields)


_FOO, _BAR = "Zm9v", "YmFy"
_TOMBSTONE: Final = "a record without key and value says nothing, and a tombstone needs a key"
_STRICT: Final = "kafka-rest reads JSON with Jackson, whose errors are 400 (rest-utils, JsonMappingExceptionMapper)"
_NO_REGISTRY: Final = "no schema registry: kafka-rest has this code (ProduceActionTest.produceNoSchemaRegistryDefined)"

V2: Final = (
    _v2(
        "records with keys",
        f"{_PRODUCER}testProduceToTopicWithKeys",
        _BINARY,
        [{"key": "a2V5", "value": "dmFsdWU="}, {"key": "a2V5", "value": "dmFsdWUy"}],
        answer=_offsets(int, int),
    ),
    _v2(
        "records with partitions",
        f"{_PRODUCER}testProduceToTopicWithPartitions",
        _BINARY,
        [{"value": _FOO, "partition": number} for number in (0, 1, 1, 2)],
        answer=_offsets(0, 1, 1, 2),
    ),
    _v2(
        "tombstones",
        f"{_PRODUCER}testProduceToTopicWithNullValues",
        _BINARY,
        [{"key": "a2V5", "value": None}, {"key": "a2V5"}],
        answer=_offsets(int, int),
    ),
    _v2(
        "records for the path's partition",
        f"{_PRODUCER}testProduceToPartitionOnlyValues",
        _BINARY,
        [{"value": _FOO}, {"value": _BAR}],
        path="/topics/{topic}/partitions/0",
        answer=_offsets(0, 0),
    ),
    _v2(
        "JSON keys and values",
        f"{_JSON_PRODUCER}testProduceToTopicKeyAndValue",
        _JSON_V2,
        [{"key": "key1", "value": {"foo": "bar"}}, {"key": "key2", "value": {"foo": "baz"}}],
        answer=_offsets(int, int),
    ),
    _v2(
        "a JSON value for a partition",
        f"{_KARAPACE}test_publish",
        _JSON_V2,
        [{"value": {"foo": "bar"}}],
        path="/topics/{topic}/partitions/0",
        answer=_offsets(0),
    ),
    Compared(
        "no records",
        "kafka-rest resources/v2/TopicsResourceBinaryProduceTest.testProduceInvalidRequest",
        "/topics/{topic}",
        _BINARY,
        "{}",
        422,
        _error(422),
    ),
    Compared("no body", f"{_PRODUCER}testNullPayload", "/topics/{topic}", _JSON_V2, "", 422, _error(422)),
    _v2("an empty list", f"{_KARAPACE}test_publish_malformed_requests", _JSON_V2, [], status=422, answer=_error(422)),
    _v2(
        "no base64",
        f"{_KARAPACE}test_publish_malformed_requests",
        _BINARY,
        [{"value": "not base64"}],
        status=400,
        answer=_error(400),
    ),
    _v2(
        "no string of base64",
        f"{_KARAPACE}test_publish_malformed_requests",
        _BINARY,
        [{"value": {"a": 1}}],
        status=400,
        answer=_error(400),
    ),
    _v2(
        "no list",
        f"{_KARAPACE}test_publish_malformed_requests",
        _BINARY,
        "should be an array",
        status=400,
        answer=_error(400),
    ),
    _v2(
        "a record that is no object",
        f"{_KARAPACE}test_publish_malformed_requests",
        _BINARY,
        ["object with value"],
        status=400,
        answer=_error(400),
    ),
    _v2(
        "a record with an unknown field",
        f"{_KARAPACE}test_publish_malformed_requests",
        _JSON_V2,
        [{"valur": {"foo": "bar"}}],
        status=422,
        answer=_error(422),
        differs={"status": 400, "/error_code": 400},
        why=_STRICT,
    ),
    _v2(
        "a format that needs a schema",
        f"{_KARAPACE}test_publish_malformed_requests",
        _AVRO,
        [{"value": {"foo": "bar"}}],
        status=422,
        answer=_error(42202),
        differs={"/error_code": 42206},
        why=_NO_REGISTRY,
    ),
    _v2(
        "the type application/json",
        f"{_KARAPACE}test_content_types",
        JSON,
        [{"value": _FOO}],
        answer=_offsets(int),
        differs={"status": 415, "/offsets": ABSENT, "/key_schema_id": ABSENT, "/value_schema_id": ABSENT}
        | {"/error_code": 415, "/message": str},
        why="Karapace takes it for binary; kafka-rest takes the five types with a format only (ProduceToTopicAction)",
    ),
    _v2(
        "an unknown topic",
        f"{_KARAPACE}test_publish_to_nonexisting_topic",
        _JSON_V2,
        [{"value": 1}],
        path="/topics/nowhere",
        status=404,
        answer=_error(40401),
    ),
    _v2(
        "an unknown partition",
        f"{_KARAPACE}test_partitions",
        _JSON_V2,
        [{"value": 1}],
        path="/topics/{topic}/partitions/10",
        status=404,
        answer=_error(40402),
    ),
    _v2(
        "a record that is too large",
        f"{_KARAPACE}test_too_large_record",
        _JSON_V2,
        [{"value": "a" * 1_000_000}],
        status=422,
        answer={
            "key_schema_id": None,
            "value_schema_id": None,
            "offsets": [{"error_code": int, "error": str}],
        },
        differs={"status": 413, "/offsets": ABSENT, "/key_schema_id": ABSENT, "/value_schema_id": ABSENT}
        | {"/error_code": 413, "/message": str},
        why="the status of a request of which nothing is written is that of the error; kafka-rest's code is 413",
    ),
    _get("topics", f"{_KARAPACE}test_list_topics", "/topics", list),
    _get(
        "a topic",
        f"{_KARAPACE}test_topics",
        "/topics/{topic}",
        {
            "name": "{topic}",
            "configs": dict,
            "partitions": [
                {"partition": number, "leader": int, "replicas": [{"broker": int, "leader": True, "in_sync": True}]}
                for number in range(3)
            ],
        },
    ),
    _get(
        "a partition",
        f"{_KARAPACE}test_partitions",
        "/topics/{topic}/partitions/1",
        {"partition": 1, "leader": int, "replicas": [{"broker": int, "leader": True, "in_sync": True}]},
    ),
    _get("an absent topic", f"{_KARAPACE}test_partitions", "/topics/fooo/partitions", _error(40401), 404),
    _get("an absent partition", f"{_KARAPACE}test_partitions", "/topics/{topic}/partitions/10", _error(40402), 404),
)

_RELATED: Final = {"related": str}
_METADATA: Final = {"self": str, "resource_name": str}
_COLLECTION: Final = {"self": str, "next": None}
_CLUSTER: Final = {
    "kind": "KafkaCluster",
    "metadata": {"self": str, "resource_name": "crn:///kafka={cluster}"},
    "cluster_id": "{cluster}",
    "controller": _RELATED,
    "acls": _RELATED,
    "brokers": _RELATED,
    "broker_configs": _RELATED,
    "consumer_groups": _RELATED,
    "topics": _RELATED,
    "partition_reassignments": _RELATED,
}
_TOPIC: Final = {
    "kind": "KafkaTopic",
    "metadata": {"self": str, "resource_name": "crn:///kafka={cluster}/topic={topic}"},
    "cluster_id": "{cluster}",
    "topic_name": "{topic}",
    "is_internal": False,
    "replication_factor": 1,
    "partitions_count": 3,
    "partitions": _RELATED,
    "configs": _RELATED,
    "partition_reassignments": _RELATED,
    "authorized_operations": [],
}
_PARTITION: Final = {
    "kind": "KafkaPartition",
    "metadata": _METADATA,
    "cluster_id": "{cluster}",
    "topic_name": "{topic}",
    "partition_id": int,
    "leader": _RELATED,
    "replicas": _RELATED,
    "reassignment": _RELATED,
}

V3: Final = (
    _v3(
        "the documented example",
        f"{_OPENAPI}binary_and_json, produce_record_success",
        {
            "partition_id": 1,
            "headers": [
                {"name": "Header-1", "value": "SGVhZGVyLTE="},
                {"name": "Header-2", "value": "SGVhZGVyLTI="},
            ],
            "key": _data("BINARY", "Zm9vYmFy"),
            "value": _data("JSON", {"foo": "bar"}),
            "timestamp": "2021-02-05T19:14:42Z",
        },
        answer=[
            _written(
                _size("BINARY", 6), {"type": "JSON", "size": int}, partition_id=1, timestamp="2021-02-05T19:14:42Z"
            )
        ],
    ),
    _v3(
        "BINARY",
        f"{_NO_SCHEMA}produceBinary",
        {"key": _data("BINARY", _FOO), "value": _data("BINARY", _BAR)},
        answer=[_written(_size("BINARY", 3), _size("BINARY", 3))],
    ),
    _v3(
        "STRING",
        f"{_NO_SCHEMA}produceString",
        {"key": _data("STRING", "foo"), "value": _data("STRING", "bar")},
        answer=[_written(_size("STRING", 3), _size("STRING", 3))],
    ),
    _v3(
        "an empty STRING",
        f"{_NO_SCHEMA}produceStringWithEmptyData",
        {"key": _data("STRING", ""), "value": _data("STRING", "")},
        answer=[_written(_size("STRING", 0), _size("STRING", 0))],
    ),
    _v3(
        "JSON",
        f"{_NO_SCHEMA}produceJson",
        {"key": _data("JSON", "foo"), "value": _data("JSON", "bar")},
        answer=[_written(_size("JSON", 5), _size("JSON", 5))],
    ),
    _v3(
        "null data",
        f"{_NO_SCHEMA}produceBinaryWithNullData",
        {"key": _data("BINARY", None), "value": _data("BINARY", None)},
        answer=[_written(_size("BINARY", -1), _size("BINARY", -1))],
        differs={"/0/error_code": 400, "/0/message": str}
        | {f"/0/{name}": ABSENT for name in _written(1, 1) if name != "error_code"},
        why=_TOMBSTONE,
    ),
    _v3(
        "a partition",
        f"{_NO_SCHEMA}produceBinaryWithPartitionId",
        {"partition_id": 1, "value": _data("BINARY", _BAR)},
        answer=[_written(None, _size("BINARY", 3), partition_id=1)],
    ),
    _v3(
        "a timestamp",
        f"{_NO_SCHEMA}produceBinaryWithTimestamp",
        {"timestamp": "1970-01-01T00:00:01Z", "value": _data("BINARY", _BAR)},
        answer=[_written(None, _size("BINARY", 3), timestamp="1970-01-01T00:00:01Z")],
    ),
    _v3(
        "headers with one name twice",
        f"{_NO_SCHEMA}produceBinaryWithHeaders",
        {
            "headers": [
                {"name": "header-1", "value": "dmFsdWUtMQ=="},
                {"name": "header-1", "value": "dmFsdWUtMg=="},
                {"name": "header-2", "value": "dmFsdWUtMw=="},
            ],
            "value": _data("BINARY", _BAR),
        },
        answer=[_written(None, _size("BINARY", 3))],
    ),
    _v3(
        "a key only",
        f"{_NO_SCHEMA}produceBinaryKeyOnly",
        {"key": _data("BINARY", _FOO)},
        answer=[_written(_size("BINARY", 3))],
    ),
    _v3(
        "a value only",
        f"{_NO_SCHEMA}produceBinaryValueOnly",
        {"value": _data("BINARY", _BAR)},
        answer=[_written(None, _size("BINARY", 3))],
    ),
    _v3(
        "nothing",
        f"{_V3_PRODUCE}produceNothing",
        {},
        answer=[_written()],
        differs={"/0/error_code": 400, "/0/message": str}
        | {f"/0/{name}": ABSENT for name in _written() if name != "error_code"},
        why=_TOMBSTONE,
    ),
    _v3(
        "several records",
        f"{_V3_PRODUCE}produceJsonBatch",
        *({"value": _data("JSON", f"value-{n}")} for n in range(3)),
        answer=[_written(None, _size("JSON", 9))] * 3,
    ),
    _v3(
        "several records that are malformed",
        f"{_V3_PRODUCE}produceBinaryBatchWithInvalidData_throwsMultipleBadRequests",
        *({"key": _data("BINARY", n), "value": _data("BINARY", n)} for n in range(3)),
        answer=[_error(400)] * 3,
    ),
    _v3(
        "no base64",
        f"{_NO_SCHEMA}produceBinaryWithInvalidData_throwsBadRequest",
        {"key": _data("BINARY", 1), "value": _data("BINARY", "fooba")},
        answer=[_error(400)],
    ),
    _v3(
        "an unknown field",
        f"{_NO_SCHEMA}produceWithInvalidData_throwsBadRequest",
        {"records": {"subject": "foobar"}},
        answer=[_error(400)],
    ),
    _v3(
        "a subject without a schema",
        f"{_V3_PRODUCE}produceBinaryWithSchemaSubject_returnsBadRequest",
        {"value": {**_data("BINARY", _FOO), "subject": "foobar"}},
        answer=[_error(400)],
        differs={"/0/error_code": 422},
        why=_NO_REGISTRY,
    ),
    _v3(
        "a schema",
        "kafka-rest resources/v3/ProduceActionTest.produceNoSchemaRegistryDefined",
        {"value": {"schema_id": 1, "data": "foobar"}},
        answer=[_error(422)],
    ),
    _v3(
        "a negative partition",
        "kafka-rest resources/v3/ProduceActionTest.produceNegativePartitionId",
        {"partition_id": -1, "value": _data("STRING", "a")},
        answer=[_error(40402)],
    ),
    _v3(
        "an unknown topic",
        "rest-utils KafkaExceptionMapper: a topic that is not present in metadata",
        {"value": _data("STRING", "a")},
        path="/v3/clusters/{cluster}/topics/nowhere/records",
        answer=[_error(40401)],
    ),
    _v3("an empty body", f"{_OPENAPI}produce_record_empty_request_body", status=422, answer=_error(422)),
    _v3(
        "another media type",
        f"{_OPENAPI}UnsupportedMediaTypeErrorResponse",
        {"value": _data("STRING", "a")},
        content_type="text/plain",
        status=415,
        answer=_error(415),
    ),
    _v3(
        "a charset",
        f"{_NO_SCHEMA}produceStringCharsetIso88591",
        {"value": _data("STRING", "a")},
        content_type="application/json; charset=ISO-8859-1",
        answer=[_written(None, _size("STRING", 1))],
    ),
    _get(
        "clusters",
        f"{_V3_GETS}ClustersResourceIntegrationTest.listClusters_returnsArrayWithOwnCluster",
        "/v3/clusters",
        {"kind": "KafkaClusterList", "metadata": _COLLECTION, "data": [_CLUSTER]},
    ),
    _get(
        "the cluster",
        f"{_V3_GETS}ClustersResourceIntegrationTest.getCluster_ownCluster_returnsOwnCluster",
        "/v3/clusters/{cluster}",
        _CLUSTER,
    ),
    _get(
        "another cluster",
        f"{_V3_GETS}ClustersResourceIntegrationTest.getCluster_differentCluster_returnsNotFound",
        "/v3/clusters/foobar",
        _error(404),
        404,
    ),
    _get(
        "topics",
        f"{_V3_GETS}TopicsResourceIntegrationTest.listTopics_existingCluster_returnsTopics",
        "/v3/clusters/{cluster}/topics",
        {"kind": "KafkaTopicList", "metadata": _COLLECTION, "data": list},
    ),
    _get(
        "a topic",
        f"{_V3_GETS}TopicsResourceIntegrationTest.getTopic_existingClusterExistingTopic_returnsTopic",
        "/v3/clusters/{cluster}/topics/{topic}",
        _TOPIC,
    ),
    _get(
        "an absent topic",
        f"{_OPENAPI}unknown_topic_or_partition",
        "/v3/clusters/{cluster}/topics/nowhere",
        _error(40403),
        404,
    ),
    _get(
        "partitions",
        f"{_V3_GETS}PartitionsResourceIntegrationTest.listPartitions_existingTopic_returnPartitions",
        "/v3/clusters/{cluster}/topics/{topic}/partitions",
        {"kind": "KafkaPartitionList", "metadata": _COLLECTION, "data": [_PARTITION] * 3},
    ),
)


# ------------------------------------------------------------------------------------------- with a schema registry

_MALFORMED_BATCH: Final = {"status": 422, "answer": _error(42208)}

BATCH: Final = (
    _batch(
        "entries with keys",
        f"{_BATCHES}produceJsonBatch",
        *(
            {"id": f"{n}", "partition_id": 0, "key": _data("JSON", f"key-{n}"), "value": _data("JSON", f"value-{n}")}
            for n in range(10)
        ),
        answer=_entries(
            [_success(f"{n}", key=_size("JSON", 7), value=_size("JSON", 9), partition_id=0) for n in range(10)]
        ),
    ),
    _batch(
        "a timestamp",
        f"{_BATCHES}produceStringWithTimestamp",
        {"id": "1", "timestamp": "1970-01-01T00:00:01Z", "key": _data("STRING", "foo")},
        answer=_entries([_success("1", key=_size("STRING", 3), timestamp="1970-01-01T00:00:01Z")]),
    ),
    _batch(
        "nothing",
        f"{_BATCHES}produceNothing",
        {"id": "1"},
        answer=_entries([_success("1")]),
        differs={"/successes": [], "/failures": list},
        why=_TOMBSTONE,
    ),
    _batch(
        "entries that are malformed",
        f"{_BATCHES}produceBinaryBatchWithInvalidData_throwsMultipleBadRequests",
        *({"id": f"{n}", "key": _data("BINARY", n), "value": _data("BINARY", n)} for n in range(10)),
        answer=_entries(failures=[_failure(f"{n}", 400) for n in range(10)]),
    ),
    _batch(
        "an entry that is malformed",
        f"{_BATCH_UNIT}testProduceBatchPartialFailure",
        _entry("0"),
        {"id": "1", "key": _data("BINARY", "fooba")},
        answer=_entries([_success("0", key=_size("STRING", 3))], [_failure("1", 400)]),
    ),
    _batch(
        "ids of all characters",
        f"{_BATCH_UNIT}testProduceBatchNonnumericIds",
        _entry("entry-1"),
        _entry("0-9_a-z_A-Z"),
        answer=_entries([_success(id, key=_size("STRING", 3)) for id in ("entry-1", "0-9_a-z_A-Z")]),
    ),
    _batch(
        "a negative partition",
        f"{_BATCH_UNIT}testProduceNegativePartitionId",
        {"id": "1", "partition_id": -1, "key": {**_data("AVRO", "bob"), "schema": "bob"}},
        answer=_entries(failures=[_failure("1", 40402)]),
    ),
    _batch(
        "a format that needs a schema",
        f"{_BATCH_UNIT}testProduceNoSchemaRegistryDefined",
        {"id": "1", "key": {**_data("AVRO", "bob"), "schema": "bob"}},
        answer=_entries(failures=[_failure("1", 422)]),
    ),
    _batch("no entries", f"{_BATCH_UNIT}testProduceBatchEmptyRequest", **_MALFORMED_BATCH),
    _batch("no body", f"{_BATCH_UNIT}testProduceBatchNullRequest", body="", **_MALFORMED_BATCH),
    _batch(
        "too many entries",
        f"{_BATCH_UNIT}testProduceBatchOversizeRequest",
        *(_entry(f"{n}") for n in range(11)),
        **_MALFORMED_BATCH,
    ),
    _batch(
        "an id twice", f"{_BATCH_UNIT}testProduceBatchWithDuplicateId", _entry("0"), _entry("0"), **_MALFORMED_BATCH
    ),
    _batch("an id of null", f"{_BATCH_UNIT}testProduceBatchNullIdFailure", _entry(None), **_MALFORMED_BATCH),
    _batch("a number as id", f"{_BATCH_UNIT}testProduceBatchIntegerIdFailure", _entry(0), **_MALFORMED_BATCH),
    _batch("an empty id", f"{_BATCH_UNIT}testProduceBatchEmptyStringIdFailure", _entry(""), **_MALFORMED_BATCH),
    _batch("a long id", f"{_BATCH_UNIT}testProduceBatchLongStringIdFailure", _entry("0" * 81), **_MALFORMED_BATCH),
    _batch("an odd id", f"{_BATCH_UNIT}testProduceBatchInvalidStringIdFailure", _entry("€#£"), **_MALFORMED_BATCH),
    _v3(
        "a record by the path of Confluent Cloud",
        f"{_CLOUD}produceRecord",
        {"value": _data("JSON", "bar")},
        path=f"/kafka{_V3}",
        answer=[_written(None, _size("JSON", 5))],
    ),
)

_AVRO_PRODUCER: Final = "kafka-rest integration/AvroProducerTest."
_INT_KEY: Final = '{"name":"int","type": "int"}'
_FIELD: Final = '{"type": "record", "name":"test","fields":[{  "name":"field",   "type": "int"}]}'
# The peer's test sends it without `$schema`: Apicurio Registry takes that for Avro.
_STRING_SCHEMA: Final = '{"$schema": "http://json-schema.org/draft-07/schema#", "type": "string"}'
_MISFIT: Final = "a value that does not fit its schema is 422 here, as one that the rules' schema refuses"


def _raw(format: str, data: object, **fields: object) -> dict[str, object]:
    return {"type": format, "schema": _STRING_SCHEMA, "data": data, **fields}


def _encoded(format: str, size: int, subject: str) -> dict[str, Any]:
    return {"type": format, "size": size, "subject": subject, "schema_id": int, "schema_version": 1}


def _with_ids(offsets: dict[str, Any], **ids: object) -> dict[str, Any]:
    return {**offsets, **ids}


WITH_REGISTRY: Final = (
    Compared(
        "v2: Avro with keys",
        f"{_AVRO_PRODUCER}testProduceToTopicWithPartitionsAndKeys",
        "/topics/{topic}",
        _AVRO,
        [
            {
                "key_schema": _INT_KEY,
                "value_schema": _FIELD,
                "records": [{"key": n, "value": {"field": n}, "partition": n - 1} for n in (1, 2, 3)],
            }
        ],
        200,
        _with_ids(_offsets(0, 1, 2), key_schema_id=int, value_schema_id=int),
    ),
    Compared(
        "v2: Avro without keys",
        f"{_AVRO_PRODUCER}testProduceToPartitionOnlyValues",
        "/topics/{topic}/partitions/0",
        _AVRO,
        [{"value_schema": _FIELD, "records": [{"value": {"field": n}} for n in (1, 2, 3, 4)]}],
        200,
        _with_ids(_offsets(0, 0, 0, 0), value_schema_id=int),
    ),
    Compared(
        "v2: keys without their schema",
        "kafka-rest Errors.keySchemaMissingException",
        "/topics/{topic}",
        _AVRO,
        [{"value_schema": _FIELD, "records": [{"key": 1, "value": {"field": 1}}]}],
        422,
        _error(42201),
    ),
    Compared(
        "v2: values without their schema",
        "kafka-rest Errors.valueSchemaMissingException",
        "/topics/{topic}",
        _AVRO,
        [{"records": [{"value": {"field": 1}}]}],
        422,
        _error(42202),
    ),
    _v3(
        "JSON Schema, raw, of a subject",
        f"{_V3_PRODUCE}produceJsonschemaWithRawSchemaAndSubject",
        {
            "key": _raw("JSONSCHEMA", "foo", subject="my-key-subject"),
            "value": _raw("JSONSCHEMA", "bar", subject="my-value-subject"),
        },
        answer=[
            _written(
                key=_encoded("JSONSCHEMA", 10, "my-key-subject"), value=_encoded("JSONSCHEMA", 10, "my-value-subject")
            )
        ],
    ),
    _v3(
        "Avro, the latest, by a strategy",
        f"{_V3_PRODUCE}produceAvroWithLatestSchemaAndSubjectStrategy",
        {"value": {"subject_name_strategy": "TOPIC_NAME", "data": {"field": 1}}},
        answer=[_written(value=_encoded("AVRO", 6, "{topic}-value"))],
    ),
    _v3(
        "JSON Schema, invalid data",
        f"{_V3_PRODUCE}produceJsonschemaWithRawSchemaAndInvalidData_throwsBadRequest",
        {"key": _raw("JSONSCHEMA", 1), "value": _raw("JSONSCHEMA", 2)},
        answer=[_error(400)],
        differs={"/0/error_code": 422},
        why=_MISFIT,
    ),
    _v3(
        "a subject for bytes",
        f"{_V3_PRODUCE}produceBinaryWithSchemaSubject_returnsBadRequest",
        {"value": {**_data("BINARY", _FOO), "subject": "foobar"}},
        answer=[_error(400)],
    ),
    _v3(
        "a schema that is not there",
        "kafka-rest controllers/SchemaManagerImpl.getSchemaFromSchemaId (Errors.messageSerializationException)",
        {"value": {"schema_id": 1_000_000, "data": "foobar"}},
        answer=[_error(422)],
    ),
)
