"""Encodes JSON by an Avro schema: the JSON encoding of Avro's specification in, its binary encoding out.

fastavro parses schemas and writes binary data, from Python's values. This module makes those of JSON's, as the
specification says, and tells where a value does not fit. https://avro.apache.org/docs/1.12.0/specification/
"""

import json
import math
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from io import BytesIO
from typing import Any, Final

import fastavro
from fastavro.schema import SchemaParseException, UnknownType

_INTS: Final = {"int": (-(2**31), 2**31 - 1), "long": (-(2**63), 2**63 - 1)}
_NAMED: Final = frozenset({"record", "error", "enum", "fixed"})
_FLOAT_MOST: Final = 3.4028234663852886e38
_PRIMITIVES: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
# In place of a field's default that there is not.
_NONE: Final = object()
# Bytes of defaults for one value: so many, and so many times the bytes of its JSON, which must not become gigabytes. A
# default counts with its JSON and a field's overhead.
DEFAULTS_BYTES: Final = 4 * 1024
DEFAULTS_RATIO: Final = 8
_DEFAULT_BYTES: Final = 8
_budget: Final = threading.local()  # `left`: bytes of defaults for the value that the thread converts

Convert = Callable[[Any], Any]
"""Makes what fastavro writes of a value of JSON. Raises Misfit."""


class Misfit(ValueError):
    """A value does not fit its schema. `path` leads to the place, its last step first."""

    def __init__(self, why: str, *path: str | int) -> None:
        super().__init__(why)
        self.path: list[str | int] = list(path)

    def __str__(self) -> str:
        return str(self.args[0])


class AvroSchema:
    """One Avro schema with the named types that it refers to."""

    def __init__(self, text: str, imports: list[str]) -> None:
        """Parse a schema; `imports` are the texts of the schemas that it refers to, in an order that they can be read.

        Raises ValueError.
        """
        # fastavro knows the named types of a record only. So the schema is the last field of one, behind an array of
        # each import, which is always empty: one byte 0.
        before = {f"import_{n}": each for n, each in enumerate(dict.fromkeys(imports))}
        names: dict[str, Any] = {}
        try:
            fields = [
                {"name": name, "type": {"type": "array", "items": json.loads(each)}} for name, each in before.items()
            ]
            fields.append({"name": "value", "type": json.loads(text)})
            wrapper = {"type": "record", "name": "fencepost_wrapper", "fields": fields}
            parsed: Any = fastavro.parse_schema(wrapper, named_schemas=names)
            self._before: dict[str, Any] = {name: [] for name in before}
            self._schema, schema = parsed, parsed["fields"][-1]["type"]
            self._convert = _Converters(names).of(schema)
        except (SchemaParseException, UnknownType, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no Avro schema: {str(error) or type(error).__name__}") from None
        kind = schema.get("type") if isinstance(schema, dict) else schema
        self.takes_text = kind == "string"
        # The name by which Confluent's RecordNameStrategy calls the schema.
        self.name = _name_of(schema)

    def encode(self, value: Any, size: int) -> bytes:
        """Encode a value of JSON, whose text has `size` bytes. Raises Misfit."""
        _budget.left = DEFAULTS_BYTES + DEFAULTS_RATIO * size
        buffer = BytesIO()
        fastavro.schemaless_writer(buffer, self._schema, {**self._before, "value": self._convert(value)})
        return buffer.getvalue()[len(self._before) :]


def _name_of(schema: Any) -> str:
    if isinstance(schema, dict):
        return str(schema.get("name") or schema["type"])
    return schema if isinstance(schema, str) else "union"


class _Converters:
    """Makes the converters of a schema; named types may refer to themselves."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._made: dict[str, list[Convert]] = {}  # by name; empty while the converter is being made

    def of(self, schema: Any) -> Convert:
        """Make the converter of a parsed schema."""
        if isinstance(schema, list):
            return self._union(schema)
        if isinstance(schema, str):
            return _primitive(schema) if schema in _PRIMITIVES else self._named(self._names[schema])
        kind = schema["type"]
        if isinstance(kind, dict | list):
            return self.of(kind)
        if kind in _NAMED:
            return self._named(schema)
        if kind == "array":
            return _array(self.of(schema["items"]))
        if kind == "map":
            return _map(self.of(schema["values"]))
        return self.of(kind)

    def _named(self, schema: Any) -> Convert:
        name = schema["name"]
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = []
            match schema["type"]:
                case "enum":
                    made.append(_enum(schema["symbols"]))
                case "fixed":
                    made.append(_fixed(schema["size"]))
                case _:
                    made.append(self._record(schema))
        if made:
            return made[0]
        return lambda value: made[0](value)  # a type that contains itself

    def _record(self, schema: Any) -> Convert:
        name = schema["name"]
        converts = {each["name"]: self.of(each["type"]) for each in schema["fields"]}
        default_of = self._defaults(schema)

        def record(value: Any) -> dict[str, Any]:
            if not isinstance(value, dict):
                raise Misfit(f"an object is wanted, for {name}")
            made: dict[str, Any] = {}
            for field, convert in converts.items():
                if field not in value:
                    made[field] = default_of(field)
                    continue
                try:
                    made[field] = convert(value[field])
                except Misfit as misfit:
                    misfit.path.append(field)
                    raise
            if unknown := next((field for field in value if field not in converts), None):
                raise Misfit(f"{name} has no such field", unknown)
            return made

        return record

    def _defaults(self, schema: Any) -> Convert:
        """Make the function that returns a field's default, and counts it."""
        fields = {each["name"]: each for each in schema["fields"]}
        known: dict[str, tuple[Any, int]] = {}  # converted when they are first needed, with their cost

        def default_of(field: str) -> Any:
            if field not in known:
                kind, default = fields[field]["type"], fields[field].get("default", _NONE)
                if default is _NONE:
                    raise Misfit("it is missing", field)
                # The default of a union is of its first branch, and stands without that one's name.
                made = _tagged(kind[0], self.of(kind[0])(default)) if isinstance(kind, list) else self.of(kind)(default)
                known[field] = made, _DEFAULT_BYTES + len(json.dumps(default))
            made, cost = known[field]
            _budget.left -= cost
            if _budget.left < 0:
                raise Misfit("the defaults of fields that are left out make it much larger: send more of the fields")
            return made

        return default_of

    def _union(self, schema: list[Any]) -> Convert:
        branches = {_branch_name(each): (each, self.of(each)) for each in schema}
        others = [branch for name, branch in branches.items() if name != "null"]
        names = ", ".join(branches)

        def union(value: Any) -> Any:
            if value is None and "null" in branches:
                return None
            if isinstance(value, dict) and len(value) == 1:
                ((name, content),) = value.items()
                if name in branches and name != "null":
                    branch, convert = branches[name]
                    try:
                        return _tagged(branch, convert(content))
                    except Misfit as misfit:
                        misfit.path.append(name)
                        raise
            if len(others) != 1:
                raise Misfit(f'send {{"TYPE": value}} with one of the types {names}')
            # An optional value may stand without its type.
            branch, convert = others[0]
            return _tagged(branch, convert(value))

        return union


def _branch_name(schema: Any) -> str:
    """Return the name by which JSON, and fastavro, tell a branch of a union."""
    if isinstance(schema, str):
        return schema
    return str(schema["name"] if schema["type"] in _NAMED else schema["type"])


def _tagged(branch: Any, value: Any) -> Any:
    """Name the branch of a union for fastavro, which would else look for the first branch that fits."""
    return None if value is None else (_branch_name(branch), value)


def _primitive(kind: str) -> Convert:
    match kind:
        case "null":
            return _null
        case "boolean":
            return _boolean
        case "int" | "long":
            return _integer(kind, *_INTS[kind])
        case "float" | "double":
            return _float if kind == "float" else _double
        case "bytes":
            return _bytes
    return _string


def _null(value: Any) -> None:
    if value is not None:
        raise Misfit("null is wanted")


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Misfit("true or false is wanted")
    return value


def _integer(kind: str, least: int, most: int) -> Convert:
    def integer(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Misfit(f"an integer is wanted ({kind})")
        if not least <= value <= most:
            raise Misfit(f"the number is beyond the type {kind}")
        return value

    return integer


def _double(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise Misfit("a number is wanted")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise Misfit("the number is beyond the type double")
    return number


def _float(value: Any) -> float:
    number = _double(value)
    if abs(number) > _FLOAT_MOST:
        raise Misfit("the number is beyond the type float")
    return number


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Misfit("a string is wanted")
    return value


def _bytes(value: Any) -> bytes:
    try:
        return _string(value).encode("latin-1")
    except UnicodeEncodeError:
        raise Misfit("bytes are wanted, as a string of characters up to U+00FF, one for each byte") from None


def _fixed(size: int) -> Convert:
    def fixed(value: Any) -> bytes:
        content = _bytes(value)
        if len(content) != size:
            raise Misfit(f"{size} bytes are wanted, and these are {len(content)}")
        return content

    return fixed


def _enum(symbols: list[str]) -> Convert:
    known = frozenset(symbols)

    def enum(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise Misfit(f"one of {', '.join(symbols[:20])} is wanted")
        return value

    return enum


def _array(convert: Convert) -> Convert:
    def array(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise Misfit("an array is wanted")
        made: list[Any] = []
        try:
            made.extend(map(convert, value))
        except Misfit as misfit:
            misfit.path.append(len(made))
            raise
        return made

    return array


def _map(convert: Convert) -> Convert:
    def mapping(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Misfit("an object is wanted")
        made: dict[str, Any] = {}
        for name, content in value.items():
            try:
                made[name] = convert(content)
            except Misfit as misfit:
                misfit.path.append(name)
                raise
        return made

    return mapping
