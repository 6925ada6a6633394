"""What a fuzzed service has: topics, rules with a caller and sources, and the document's values that exist there."""

import copy
import hashlib
import hmac
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any, Final, Self

from deploy.stack import Kafka

# The variable that tells the hooks of schemathesis, which run in its process, about the world.
WORLD_ENV: Final = "FENCEPOST_EDGE_WORLD"
PARTITIONS: Final = 3
TOKEN: Final = "edge"
SECRET: Final = "s3cret"
# An idempotency key that was written; names of keys, topics and sources that do not exist, and the end of the name of a
# topic that the caller may not write to.
KNOWN: Final = "known"
ABSENT: Final = "absent"
LONG_AGO: Final = "Thu, 01 Jan 2026 00:00:00 GMT"  # before the retention of any key
FORBIDDEN: Final = "forbidden"
# By source: whether it is signed.
SOURCES: Final = {"open": False, "github": True, "pointer": False, "seldom": False}

_KEY: Final = {"type": "string", "pattern": "^[!-~]{1,255}$"}
_BASE64: Final = {"type": "string", "pattern": "^(?:[A-Za-z0-9+/]{4}){0,8}$"}
_UNPADDED: Final = {"type": "string", "pattern": "^[A-Za-z0-9+/]*$"}
_PARTITION: Final = {"type": "integer", "minimum": 0, "maximum": PARTITIONS - 1}
_MS: Final = {"type": "integer", "minimum": 0}
_NULL: Final = {"type": "null"}
_TEXT: Final = {"type": "string"}
_JSON: Final = {"type": ["object", "array", "string", "number", "boolean"]}
# What a key or value may be, by a word in the media type of a v2 request.
_V2: Final = {".json.": _JSON, ".binary.": _BASE64, ".text.": _TEXT}


@dataclass(frozen=True)
class World:
    """`topic` and `cluster` exist; each answer appends a line to the file `answers`."""

    topic: str
    cluster: str
    answers: str

    def encode(self) -> str:
        """Return the world as the value of WORLD_ENV."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls) -> Self:
        """Read the world from the environment."""
        return cls(**json.loads(os.environ[WORLD_ENV]))

    @property
    def topics(self) -> list[str]:
        return [self.topic, ABSENT, f"{self.topic}-{FORBIDDEN}"]

    def narrow(self, document: dict[str, Any]) -> None:
        """Put values that exist, or that are well-formed by the document's words, into the schemas of requests.

        Answers stay as they are documented. Without this nearly all requests would be refused for their topic.
        """
        schemas = document["components"]["schemas"]
        topic = {"enum": self.topics}
        of_event = {
            "topic": topic,
            "value_base64": {"anyOf": [_BASE64, _NULL]},
            "partition": {"anyOf": [_PARTITION, _NULL]},
            "timestamp": {"anyOf": [_MS, _NULL]},
            "headers": {"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, _NULL]},
        }
        schemas["EventBody"]["properties"] |= of_event
        schemas["MemberBody"]["properties"] |= {**of_event, "idempotency_key": {"anyOf": [_KEY, _NULL]}}
        schemas["CloudEvent"]["properties"] |= {
            **dict.fromkeys(("id", "source"), _KEY),
            **dict.fromkeys(("topic", "type"), topic),
            "specversion": {"enum": ["1.0"]},
            "data_base64": {"anyOf": [_BASE64, _NULL]},
        }
        schemas["CloudEvent"]["additionalProperties"] = False
        partition, header = {"anyOf": [_PARTITION, _NULL]}, {"anyOf": [_UNPADDED, _NULL]}
        schemas["V2Header"]["properties"] |= {"value": header}
        schemas["V3Header"]["properties"] |= {"value": header}
        for record in ("V3Record", "V3Entry"):
            schemas[record]["properties"] |= {"partition_id": partition, "timestamp": {"anyOf": [_MS, _NULL]}}
        schemas["V2Record"]["properties"] |= {"partition": partition, "timestamp": {"anyOf": [_MS, _NULL]}}
        _split_v2(document)
        _narrow_parameters(
            document,
            {
                ("path", "topic"): topic,
                ("path", "cluster"): {"enum": [self.cluster, ABSENT]},
                ("path", "partition"): _PARTITION,
                ("path", "name"): {"enum": [*SOURCES, ABSENT]},
                ("path", "key"): {"enum": [KNOWN, ABSENT]},
                ("path", "code"): {"enum": ["not-written", ABSENT]},
                ("header", "Idempotency-Key"): _KEY,
                ("header", "Repeatability-Request-ID"): _KEY,
                ("header", "Repeatability-First-Sent"): {"enum": [formatdate(usegmt=True), LONG_AGO]},
            },
        )
        # Each line has the schema of a result.
        lines = document["paths"]["/events/batch"]["post"]["responses"]["207"]["content"]["application/x-ndjson"]
        lines["schema"] = {"type": "array", "minItems": 1, "items": lines["schema"]}


def _split_v2(document: dict[str, Any]) -> None:
    """Give each media type of v2 requests a schema of its own: what a value may be depends on it."""
    for operations in document["paths"].values():
        for kind, content in operations.get("post", {}).get("requestBody", {}).get("content", {}).items():
            for word, value in _V2.items():
                if kind.startswith("application/vnd.kafka.") and word in kind:
                    record = copy.deepcopy(document["components"]["schemas"]["V2Record"])
                    record["properties"] |= {"key": {"anyOf": [value, _NULL]}, "value": value}
                    body = copy.deepcopy(document["components"]["schemas"]["V2Body"])
                    body["properties"]["records"]["items"] = record
                    content["schema"] = body


def _narrow_parameters(document: dict[str, Any], schemas: Mapping[tuple[str, str], dict[str, Any]]) -> None:
    for parameter in _parameters(document):
        schema = schemas.get((parameter["in"], parameter["name"]))
        if schema is not None:
            parameter["schema"] = schema


def _parameters(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for operations in document["paths"].values():
        for operation in operations.values():
            yield from operation.get("parameters", ())


def signature_of(source: str, body: bytes) -> dict[str, str]:
    """Return the headers by which a source is signed; none for a source without a signature."""
    if not SOURCES.get(source):
        return {}
    return {"X-Hub-Signature-256": f"sha256={hmac.digest(SECRET.encode(), body, 'sha256').hex()}"}


def write_rules(folder: Path, topic: str) -> Path:
    """Write the rules: a caller for the topic and for topics that do not exist, and the sources."""
    (folder / "secret").write_text(SECRET)
    path = folder / "rules.toml"
    path.write_text(
        f"""
[[callers]]
name = "edge"
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
topics = ["{topic}", "{ABSENT}"]

[[sources]]
name = "open"
topic = "{topic}"
idempotency_key = {{ sha256 = "body" }}
signature = "none"

[[sources]]
name = "github"
topic = "{topic}"
idempotency_key = {{ header = "X-GitHub-Delivery" }}
signature = {{ scheme = "github", secret_files = ["secret"] }}

[[sources]]
name = "pointer"
topic = "{topic}"
idempotency_key = {{ pointer = "/id" }}
signature = "none"

[[sources]]
name = "seldom"
topic = "{topic}"
idempotency_key = {{ sha256 = "body" }}
signature = "none"
rate = 0.2
"""
    )
    return path


def make_topics(kafka: Kafka, topic: str) -> None:
    """Create the topic, and the one that the caller may not write to; records may have any time, and stay."""
    for name in (topic, f"{topic}-{FORBIDDEN}"):
        kafka.create_topic(name, partitions=PARTITIONS, config={"retention.ms": "-1"})
