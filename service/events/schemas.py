"""What the values of a topic have to look like: the JSON Schemas that the rules name (2020-12, or as they say)."""

import json
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

# Digits that a double keeps: of no more, it is the number that was written.
EXACT_CHARS: Final = 15
# Of a number that is written out, zeros of its exponent too. To compare it takes the square of them: 10 ms of so many.
DIGITS_MAX: Final = 4_000
# What all the long numbers of a value may take together: as much as one of the longest.
SQUARES_MAX: Final = DIGITS_MAX**2
# Shorter ones are as quick as any: a value may have as many as find room in it.
SHORT_DIGITS: Final = 40
# A longer value is read and compared in a thread: of a shorter one that takes 5 ms at most.
LONG_BYTES: Final = 16 * 1024
# Of a longer value is only told that it is not allowed, where the schema has one of these: jsonschema_rs then explains
# each alternative with everything that it refuses, and a value may have as much of that as it has bytes.
EXPLAINED_BYTES: Final = 2_000
_ALTERNATIVES: Final = ('"anyOf"', '"oneOf"')


class Numbers:
    """Reads the numbers of one value as what they are: JSON has no bounds, and a double is no 1e400 and no 1e-400."""

    def __init__(self) -> None:
        self._squares = 0

    def fraction(self, text: str) -> float | Decimal:
        """A number with a point or an exponent."""
        if len(text) <= EXACT_CHARS and "e" not in text and "E" not in text:
            return float(text)
        try:
            number = Decimal(text)
        except InvalidOperation:  # not even that reaches so far
            raise TooLong from None
        digits = len(number.as_tuple().digits)
        self._count(digits + abs(number.adjusted()) if number else 0)
        return number

    def integer(self, text: str) -> int:
        """A number without."""
        self._count(len(text))
        return int(text)

    def _count(self, digits: int) -> None:
        if digits > SHORT_DIGITS:
            self._squares += digits**2
            if self._squares > SQUARES_MAX:
                raise TooLong


class TooLong(ValueError):
    """its numbers have more digits than can be compared with a schema"""


class _Schema:
    """One schema, and up to which length of a value it tells what is wrong with it."""

    def __init__(self, text: str) -> None:
        schema = json.loads(text, parse_float=Decimal)
        self._validator = jsonschema_rs.validator_for(schema, offline=True)
        self._explained_bytes = EXPLAINED_BYTES if any(word in text for word in _ALTERNATIVES) else LONG_BYTES

    def check(self, event: Event) -> None:
        """Raises Problem (422) for a value that it does not allow."""
        value = _parsed(event)
        if self._validator.is_valid(value):
            return
        if len(event.value or b"") > self._explained_bytes:
            most = self._explained_bytes
            raise _refused(event, "", f"it is not allowed (what of it is told for values of up to {most} bytes)")
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
            raise _refused(event, where, error.message) from None


def _refused(event: Event, where: str, why: str) -> Problem:
    return Problem(SCHEMA_MISMATCH, f"value{where}: {why}: see the schema of {event.topic}")


class Schemas:
    """The schemas of the rules, read once. A reference to another document is not followed: nothing is fetched."""

    def __init__(self, rules: Rules) -> None:
        """Raises SettingsError, with a line for each schema that is none."""
        self._schemas: dict[str, _Schema] = {}
        wrong = []
        for path in dict.fromkeys(rule.schema for rule in rules.topics if rule.schema):
            try:
                self._schemas[path] = _Schema(Path(path).read_text(encoding="utf-8"))
            except (OSError, ValueError, jsonschema_rs.ReferencingError) as error:
                why = str(error).partition("\n")[0]
                wrong.append(f"{PREFIX}RULES: schema {path} cannot be used: {why}; name a file with a JSON Schema")
        if wrong:
            raise SettingsError("\n".join(wrong))
        self._rule = lru_cache(maxsize=TOPICS_MAX)(rules.rule)  # by topic

    def check_now(self, event: Event) -> bool:
        """Raises Problem (422) for a value that its topic's schema does not allow. False: it is long, ask `check`.

        A tombstone has none to look at.
        """
        schema = self._schema_of(event)
        if schema is None:
            return True
        if len(event.value or b"") > LONG_BYTES:
            return False
        schema.check(event)
        return True

    async def check(self, event: Event) -> None:
        """As `check_now`, for a value of any length."""
        schema = self._schema_of(event)
        if schema is not None:
            await in_thread(schema.check, event)

    def _schema_of(self, event: Event) -> _Schema | None:
        if not self._schemas or event.value is None:
            return None
        return self._schemas.get(self._rule(event.topic).schema)


def _parsed(event: Event) -> Any:
    """The value as JSON, as strictly as any: in base64 or in a CloudEvent it may be anything."""
    try:
        check_json(event.value or b"")
        numbers = Numbers()
        return json.loads(event.value or b"", parse_float=numbers.fraction, parse_int=numbers.integer)
    except Problem as problem:
        why = problem.detail.removeprefix("body: ")
    except TooLong as error:
        raise Problem(SCHEMA_MISMATCH, f"value: {error.__doc__}, at most {DIGITS_MAX}: send fewer") from None
    raise Problem(SCHEMA_MISMATCH, f"value: {event.topic} has a schema and takes JSON only: {why}")
