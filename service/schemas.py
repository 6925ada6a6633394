"""What the values of a topic have to look like: the JSON Schemas that the rules name (2020-12, or as they say)."""

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import jsonschema_rs

from service.errors import SCHEMA_MISMATCH, Problem
from service.event import Event
from service.rules import TopicRule, first_match
from service.shared import PREFIX, SettingsError

_TOPICS_MAX: Final = 1024


class Schemas:
    """The schemas of the rules, read once. A reference to another document is not followed: nothing is fetched."""

    def __init__(self, rules: Iterable[TopicRule]) -> None:
        """Raises SettingsError, with a line for each schema that is none."""
        rules = tuple(rules)
        self._validators: dict[str, jsonschema_rs.Validator] = {}
        wrong = []
        for path in dict.fromkeys(rule.schema for rule in rules if rule.schema):
            try:
                schema = json.loads(Path(path).read_text(encoding="utf-8"))
                self._validators[path] = jsonschema_rs.validator_for(schema, offline=True)
            except (OSError, ValueError, jsonschema_rs.ReferencingError) as error:
                why = str(error).partition("\n")[0]
                wrong.append(f"{PREFIX}RULES: schema {path} cannot be used: {why}; name a file with a JSON Schema")
        if wrong:
            raise SettingsError("\n".join(wrong))

        def path_of(topic: str) -> str:
            rule = first_match(rules, topic)
            return "" if rule is None else rule.schema

        self._path_of = lru_cache(maxsize=_TOPICS_MAX)(path_of)

    def check(self, event: Event) -> None:
        """Raises Problem (422) for a value that its topic's schema does not allow. A tombstone has none to look at."""
        if not self._validators or event.value is None:
            return
        validator = self._validators.get(self._path_of(event.topic))
        if validator is None:
            return
        for error in validator.iter_errors(_parsed(event)):
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
            raise Problem(SCHEMA_MISMATCH, f"value{where}: {error.message}: see the schema of {event.topic}")


def _parsed(event: Event) -> Any:
    """The value as JSON: in base64 or in a CloudEvent it may be anything."""
    try:
        return json.loads(event.value or b"", parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Problem(SCHEMA_MISMATCH, f"value: {event.topic} has a schema and takes JSON only: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
