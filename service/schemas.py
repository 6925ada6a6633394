"""What the values of a topic have to look like: the JSON Schemas that the rules name (2020-12, or as they say)."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema_rs

from service.errors import SCHEMA_MISMATCH, Problem
from service.event import Event
from service.settings import TOPICS_MAX
from service.shared import PREFIX, Rules, SettingsError
from service.strict_json import check_json


class Schemas:
    """The schemas of the rules, read once. A reference to another document is not followed: nothing is fetched."""

    def __init__(self, rules: Rules) -> None:
        """Raises SettingsError, with a line for each schema that is none."""
        self._validators: dict[str, jsonschema_rs.Validator] = {}
        wrong = []
        for path in dict.fromkeys(rule.schema for rule in rules.topics if rule.schema):
            try:
                schema = json.loads(Path(path).read_text(encoding="utf-8"))
                self._validators[path] = jsonschema_rs.validator_for(schema, offline=True)
            except (OSError, ValueError, jsonschema_rs.ReferencingError) as error:
                why = str(error).partition("\n")[0]
                wrong.append(f"{PREFIX}RULES: schema {path} cannot be used: {why}; name a file with a JSON Schema")
        if wrong:
            raise SettingsError("\n".join(wrong))
        self._rule = lru_cache(maxsize=TOPICS_MAX)(rules.rule)  # by topic

    def check(self, event: Event) -> None:
        """Raises Problem (422) for a value that its topic's schema does not allow. A tombstone has none to look at."""
        if not self._validators or event.value is None:
            return
        validator = self._validators.get(self._rule(event.topic).schema)
        if validator is None:
            return
        for error in validator.iter_errors(_parsed(event)):
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
            raise Problem(SCHEMA_MISMATCH, f"value{where}: {error.message}: see the schema of {event.topic}")


def _parsed(event: Event) -> Any:
    """The value as JSON, as strictly as any: in base64 or in a CloudEvent it may be anything."""
    try:
        check_json(event.value or b"")
        return json.loads(event.value or b"")
    except Problem as problem:
        why = problem.detail.removeprefix("body: ")
    except ValueError as error:  # a number of thousands of digits
        why = str(error)
    raise Problem(SCHEMA_MISMATCH, f"value: {event.topic} has a schema and takes JSON only: {why}")
