"""The `registry` of a `[[topics]]` table: by which schemas of the Schema Registry keys and values are encoded."""

import re
from dataclasses import dataclass
from typing import Any, Final

from service.contract.faults import Faults, Table

LATEST: Final = "latest"
STRATEGIES: Final = ("topic", "record", "topic-record")
SUBJECT_CHARS_MAX: Final = 500
_SUBJECT: Final = re.compile(rf"(?!\.\.?\Z)[^\x00-\x1f\x7f]{{1,{SUBJECT_CHARS_MAX}}}")
_RECORD: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_VERSION_MOST: Final = 2**31 - 1
_NAMES: Final = ("strategy", "record", "subject", "version", "message")


@dataclass(frozen=True, slots=True)
class SchemaRule:
    """The schema of the keys or the values of a topic.

    Its subject is `subject`, or made by `strategy`: `topic` (TOPIC-key, TOPIC-value), `record` (the name of a record
    type, `record`) or `topic-record` (TOPIC-record). `version` is None for the latest. `message` is the full name of a
    Protobuf message; empty for the first of the schema.
    """

    strategy: str = STRATEGIES[0]
    record: str = ""
    subject: str = ""
    version: int | None = None
    message: str = ""

    def subject_of(self, topic: str, part: str) -> str:
        """Return the subject for a topic; `part` is `key` or `value`."""
        return self.subject or subject_by(self.strategy, topic, part, self.record)


@dataclass(frozen=True, slots=True)
class RegistryRule:
    """The schemas of a topic's keys and values; None for keys or values that are written as they were sent."""

    key: SchemaRule | None = None
    value: SchemaRule | None = None


def subject_by(strategy: str, topic: str, part: str, record: str) -> str:
    """Make a subject as Confluent's strategies TopicName, RecordName and TopicRecordName do."""
    if strategy == "record":
        return record
    return f"{topic}-{part if strategy == 'topic' else record}"


def registry_rule(table: Table) -> RegistryRule | None:
    """Make the rule of a `[[topics]]` table without faults; None if it has none."""
    found = table.get("registry")
    if found is None:
        return None
    return RegistryRule(*(_schema_rule(found[part]) if part in found else None for part in ("key", "value")))


def _schema_rule(table: Table) -> SchemaRule:
    version = table.get("version", LATEST)
    texts = {name: table[name] for name in _NAMES if name in table and name != "version"}
    return SchemaRule(version=None if version == LATEST else version, **texts)


def registry_faults(table: Table) -> Faults:
    """Find the mistakes of the `registry` of a `[[topics]]` table: the name concerned, and the remedy."""
    found = table.get("registry")
    if found is None:
        return
    parts = found if isinstance(found, dict) else {}
    if not parts or not parts.keys() <= {"key", "value"} or not all(isinstance(each, dict) for each in parts.values()):
        yield "registry", 'write key, value or both, as in registry = { value = { version = "latest" } }'
        return
    if "value" in parts and "schema" in table:
        yield "registry", "the values have a schema already: write registry.value or schema"
    for part, each in parts.items():
        for remedy in _schema_faults(each):
            yield "registry", f"{part}: {remedy}"


def _schema_faults(table: Table) -> list[str]:
    wrong = []
    if unknown := sorted(table.keys() - set(_NAMES)):
        wrong.append(f"{', '.join(unknown)}: no such setting; write {', '.join(_NAMES)}")
    strategy = table.get("strategy", STRATEGIES[0])
    if strategy not in STRATEGIES:
        wrong.append(f"strategy: write one of {', '.join(STRATEGIES)}")
    if "subject" in table and ("strategy" in table or "record" in table):
        wrong.append("subject: write it, or strategy and record")
    if not _matches(_SUBJECT, table.get("subject", "-")):
        wrong.append(f"subject: write 1 to {SUBJECT_CHARS_MAX} characters without control characters, not . or ..")
    if ("record" in table) != (strategy in STRATEGIES[1:]) or not _matches(_RECORD, table.get("record", "a")):
        wrong.append('record: the strategies record and topic-record, only, need it: write as in "shop.Order"')
    version = table.get("version", LATEST)
    if version != LATEST and (isinstance(version, bool) or not isinstance(version, int) or not _is_version(version)):
        wrong.append(f'version: write "{LATEST}", or a number from 1')
    if not _matches(_RECORD, table.get("message", "a")):
        wrong.append('message: write the full name of a Protobuf message, as in "shop.Order"')
    return wrong


def _is_version(number: int) -> bool:
    return 1 <= number <= _VERSION_MOST


def _matches(pattern: "re.Pattern[str]", text: Any) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None
