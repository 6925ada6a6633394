"""Checks values against the JSON Schemas that the rules name (2020-12, or the version that a schema names)."""

import json
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import jsonschema_rs

from service.contract import PREFIX, Rules, SettingsError
from service.core.problems import SCHEMA_MISMATCH, Problem
from service.core.settings import TOPICS_MAX
from service.events.event import Event
from service.events.strict_json import check_json, in_thread

# Characters of a number that a double represents exactly.
EXACT_CHARS: Final = 15
# Digits of one number, zeros of its exponent included. A comparison takes time by their square, 10 ms for so many.
DIGITS_MAX: Final = 4_000
# The sum of the squared digits of a value's long numbers: that of one number of the greatest length.
SQUARES_MAX: Final = DIGITS_MAX**2
# Numbers of fewer digits are not counted.
SHORT_DIGITS: Final = 40
# A longer value is checked in a thread; a shorter one takes 5 ms at most.
LONG_VALUE_BYTES: Final = 16 * 1024
# A violation by a longer value is not explained if the schema has alternatives: jsonschema_rs would list all violations
# of each alternative, which may be as many as the value has bytes.
EXPLAINED_BYTES: Final = 2_000
_TOO_LONG: Final = (
    f"value: its numbers have more digits than can be compared with a schema, at most {DIGITS_MAX}: send fewer"
)
_ALTERNATIVES: Final = ('"anyOf"', '"oneOf"')


class Numbers:
    """Reads the numbers of one value exactly: numbers in JSON have no bounds, while a double has no 1e400."""

    def __init__(self) -> None:
        self._squares = 0

    def fraction(self, text: str) -> float | Decimal:
        """Read a number with a point or an exponent."""
        if len(text) <= EXACT_CHARS and "e" not in text and "E" not in text:
            return float(text)
        try:
            number = Decimal(text)
        except InvalidOperation:  # beyond the exponents of Decimal
            raise TooLong from None
        digits = len(number.as_tuple().digits)
        self._count(digits + abs(number.adjusted()) if number else 0)
        return number

    def integer(self, text: str) -> int:
        """Read an integer."""
        self._count(len(text))
        return int(text)

    def _count(self, digits: int) -> None:
        if digits > SHORT_DIGITS:
            self._squares += digits**2
            if self._squares > SQUARES_MAX:
                raise TooLong


class TooLong(ValueError):
    """The numbers of a value have too many digits: see SQUARES_MAX."""


class JsonValidator:
    """One JSON Schema, and the length of a value up to which a violation is explained."""

    def __init__(self, text: str, imports: Sequence[tuple[str, Any]] = (), *, trusted: bool = True) -> None:
        """`imports` are schemas by their URIs. Raises ValueError, ReferencingError.

        The patterns of a schema that is not `trusted` are matched in linear time, and may have no look-around.
        """
        schema = parse_schema(text)
        registry = jsonschema_rs.Registry(imports) if imports else None
        patterns = None if trusted else jsonschema_rs.RegexOptions()
        self._validator = jsonschema_rs.validator_for(schema, offline=True, registry=registry, pattern_options=patterns)
        self._explained_bytes = EXPLAINED_BYTES if any(word in text for word in _ALTERNATIVES) else LONG_VALUE_BYTES

    def violation(self, value: Any, size: int) -> tuple[Sequence[str | int], str] | None:
        """Find what a value of `size` bytes violates: the path to it, and why; None if the value is valid."""
        if self._validator.is_valid(value):
            return None
        if size > self._explained_bytes:
            return (), f"it is not allowed (details only for values of up to {self._explained_bytes} bytes)"
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            return error.instance_path, error.message
        return None


def parse_schema(text: str) -> Any:
    """Parse the text of a JSON Schema. Raises ValueError."""
    return json.loads(text, parse_float=Decimal)


def path_of(parts: Iterable[str | int]) -> str:
    """Format a path in a value, as in `.lines[2]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


class Schemas:
    """The schemas of the rules, read once. References to other documents are not followed."""

    def __init__(self, rules: Rules) -> None:
        """Read the schemas. Raises SettingsError with a line for each that cannot be used."""
        self._schemas: dict[str, JsonValidator] = {}
        wrong = []
        for path in dict.fromkeys(rule.schema for rule in rules.topics if rule.schema):
            try:
                self._schemas[path] = JsonValidator(Path(path).read_text(encoding="utf-8"))
            except (OSError, ValueError, jsonschema_rs.ReferencingError) as error:
                why = str(error).partition("\n")[0]
                wrong.append(f"{PREFIX}RULES: schema {path} cannot be used: {why}; name a file with a JSON Schema")
        if wrong:
            raise SettingsError("\n".join(wrong))
        self._rule = lru_cache(maxsize=TOPICS_MAX)(rules.rule)  # by topic

    def has_one_for(self, topic: str) -> bool:
        """Whether the values of a topic's events must match a schema."""
        return bool(self._schemas) and self._rule(topic).schema in self._schemas

    def check_now(self, event: Event) -> bool:
        """Check an event's value against its topic's schema. Raises Problem (422).

        False for a long value, which only `check` checks. A tombstone passes.
        """
        schema = self._schema_of(event)
        if schema is None:
            return True
        if len(event.value or b"") > LONG_VALUE_BYTES:
            return False
        _check(schema, event)
        return True

    async def check(self, event: Event) -> None:
        """Check a value of any length, in a thread. Raises Problem (422)."""
        schema = self._schema_of(event)
        if schema is not None:
            await in_thread(_check, schema, event)

    def _schema_of(self, event: Event) -> JsonValidator | None:
        if not self._schemas or event.value is None:
            return None
        return self._schemas.get(self._rule(event.topic).schema)


def _check(schema: JsonValidator, event: Event) -> None:
    """Check an event's value. Raises Problem (422)."""
    value = event.value or b""
    try:
        found = schema.violation(parse_value(value), len(value))
    except ValueError as error:
        raise Problem(SCHEMA_MISMATCH, f"value: {event.topic} has a schema and takes JSON only: {error}") from None
    if found is not None:
        path, why = found
        raise Problem(SCHEMA_MISMATCH, f"value{path_of(path)}: {why}: see the schema of {event.topic}")


def parse_value(value: bytes) -> Any:
    """Parse a value as strict JSON. It may be anything if it came in base64 or in a CloudEvent.

    Raises ValueError if it is not JSON, and Problem (422) if its numbers are too long.
    """
    try:
        check_json(value)
        numbers = Numbers()
        return json.loads(value, parse_float=numbers.fraction, parse_int=numbers.integer)
    except Problem as problem:
        raise ValueError(problem.detail.removeprefix("body: ")) from None
    except TooLong:
        raise Problem(SCHEMA_MISMATCH, _TOO_LONG) from None
