"""Encodes JSON by an Avro schema: the JSON encoding of Avro's specification in, its binary encoding out.

fastavro parses the schemas. Values are checked and encoded here in one pass, which tells where a value does not fit,
and lets other threads run: fastavro's writer holds the interpreter's lock for as long as a value takes, which may be a
hundred milliseconds. https://avro.apache.org/docs/1.12.0/specification/
"""

import json
import math
import struct
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

import fastavro
from fastavro.schema import SchemaParseException, UnknownType

_INTS: Final = {"int": (-(2**31), 2**31 - 1), "long": (-(2**63), 2**63 - 1)}
_NAMED: Final = frozenset({"record", "error", "enum", "fixed"})
_FLOAT_MOST: Final = 3.4028234663852886e38
_FLOAT: Final = struct.Struct("<f")
_DOUBLE: Final = struct.Struct("<d")
_PRIMITIVES: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
# In place of a field's default that there is not.
_NONE: Final = object()
# Bytes of defaults for one value: so many, and so many times the bytes of its JSON, which must not become gigabytes. A
# default counts with a field's overhead.
DEFAULTS_BYTES: Final = 4 * 1024
DEFAULTS_RATIO: Final = 8
_DEFAULT_BYTES: Final = 8
_budget: Final = threading.local()  # `left`: bytes of defaults for the value that the thread encodes

Encode = Callable[[Any, bytearray], None]
"""Appends the binary encoding of a value of JSON. Raises Misfit."""


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
        names: dict[str, Any] = {}
        try:
            # In a record behind the imports, the schema finds their named types.
            before = [{"type": "array", "items": json.loads(each)} for each in dict.fromkeys(imports)]
            fields = [{"name": f"f{n}", "type": each} for n, each in enumerate([*before, json.loads(text)])]
            parsed: Any = fastavro.parse_schema(
                {"type": "record", "name": "fencepost_wrapper", "fields": fields}, named_schemas=names
            )
            schema = parsed["fields"][-1]["type"]
            self._encode = _Encoders(names).of(schema)
        except (SchemaParseException, UnknownType, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no Avro schema: {str(error) or type(error).__name__}") from None
        kind = schema.get("type") if isinstance(schema, dict) else schema
        self.takes_text = kind == "string"
        # The name by which Confluent's RecordNameStrategy calls the schema.
        self.name = _name_of(schema)

    def encode(self, value: Any, size: int) -> bytes:
        """Encode a value of JSON, whose text has `size` bytes. Raises Misfit."""
        _budget.left = DEFAULTS_BYTES + DEFAULTS_RATIO * size
        out = bytearray()
        self._encode(value, out)
        return bytes(out)


def _name_of(schema: Any) -> str:
    if isinstance(schema, dict):
        return str(schema.get("name") or schema["type"])
    return schema if isinstance(schema, str) else "union"


class _Encoders:
    """Makes the encoders of a schema; named types may refer to themselves."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._made: dict[str, list[Encode]] = {}  # by name; empty while the encoder is being made

    def of(self, schema: Any) -> Encode:
        """Make the encoder of a parsed schema."""
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

    def _named(self, schema: Any) -> Encode:
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
        return lambda value, out: made[0](value, out)  # a type that contains itself

    def _record(self, schema: Any) -> Encode:
        name = schema["name"]
        encoders = {each["name"]: self.of(each["type"]) for each in schema["fields"]}
        default_of = self._defaults(schema)

        def record(value: Any, out: bytearray) -> None:
            if not isinstance(value, dict):
                raise Misfit(f"an object is wanted, for {name}")
            for field, encode in encoders.items():
                if field not in value:
                    out += default_of(field)
                    continue
                try:
                    encode(value[field], out)
                except Misfit as misfit:
                    misfit.path.append(field)
                    raise
            unknown = next((field for field in value if field not in encoders), None)
            if unknown is not None:  # the empty name is unknown too
                raise Misfit(f"{name} has no such field", unknown)

        return record

    def _defaults(self, schema: Any) -> Callable[[str], bytes]:
        """Make the function that returns a field's encoded default, and counts it."""
        fields = {each["name"]: each for each in schema["fields"]}
        known: dict[str, bytes] = {}  # encoded when they are first needed

        def default_of(field: str) -> bytes:
            if field not in known:
                kind, default = fields[field]["type"], fields[field].get("default", _NONE)
                if default is _NONE:
                    raise Misfit("it is missing", field)
                known[field] = self._default(field, kind, default)
            encoded = known[field]
            _budget.left -= len(encoded) + _DEFAULT_BYTES
            if _budget.left < 0:
                raise Misfit("the defaults of fields that are left out make it much larger: send more of the fields")
            return encoded

        return default_of

    def _default(self, field: str, kind: Any, default: Any) -> bytes:
        """Encode a field's default. Raises Misfit, also where a record's default needs that record's default again."""
        made = bytearray()
        if isinstance(kind, list):  # the default of a union is of its first branch, without that one's name
            made.append(0)
            kind = kind[0]
        try:
            self.of(kind)(default, made)
        except Misfit as misfit:  # the fields within the default are not in the value
            misfit.path = [field]
            raise
        except RecursionError:
            raise Misfit("its default contains itself without end: send the field", field) from None
        except UnicodeEncodeError:  # a schema's text is not checked for lone surrogates, as values are
            raise Misfit("its default is no text in UTF-8: send the field", field) from None
        return bytes(made)

    def _union(self, schema: list[Any]) -> Encode:
        branches = {_branch_name(each): (index, self.of(each)) for index, each in enumerate(schema)}
        others = [branch for name, branch in branches.items() if name != "null"]
        names, null = ", ".join(branches), branches.get("null")

        def union(value: Any, out: bytearray) -> None:
            if value is None and null is not None:
                _put_long(null[0], out)
                return
            if isinstance(value, dict) and len(value) == 1:
                ((name, content),) = value.items()
                if name in branches and name != "null":
                    index, encode = branches[name]
                    _put_long(index, out)
                    try:
                        encode(content, out)
                    except Misfit as misfit:
                        misfit.path.append(name)
                        raise
                    return
            if len(others) != 1:
                raise Misfit(f'send {{"TYPE": value}} with one of the types {names}')
            # An optional value may stand without its type.
            index, encode = others[0]
            _put_long(index, out)
            encode(value, out)

        return union


def _branch_name(schema: Any) -> str:
    """Return the name by which JSON tells a branch of a union."""
    if isinstance(schema, str):
        return schema
    return str(schema["name"] if schema["type"] in _NAMED else schema["type"])


def _primitive(kind: str) -> Encode:
    match kind:
        case "null":
            return _null
        case "boolean":
            return _boolean
        case "int" | "long":
            return _integer(kind, *_INTS[kind])
        case "float":
            return _float
        case "double":
            return _double
        case "bytes":
            return _bytes
    return _string


def _put_long(number: int, out: bytearray) -> None:
    """Append an int or a long: zigzag, in 7 bits a byte."""
    number = (number << 1) ^ (number >> 63)
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _null(value: Any, out: bytearray) -> None:
    if value is not None:
        raise Misfit("null is wanted")


def _boolean(value: Any, out: bytearray) -> None:
    if not isinstance(value, bool):
        raise Misfit("true or false is wanted")
    out.append(value)


def _integer(kind: str, least: int, most: int) -> Encode:
    def integer(value: Any, out: bytearray) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise Misfit(f"an integer is wanted ({kind})")
        if not least <= value <= most:
            raise Misfit(f"the number is beyond the type {kind}")
        _put_long(value, out)

    return integer


def _number(value: Any, kind: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise Misfit("a number is wanted")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if abs(number) > most:
        raise Misfit(f"the number is beyond the type {kind}")
    return number


def _double(value: Any, out: bytearray) -> None:
    out += _DOUBLE.pack(_number(value, "double", 1.7976931348623157e308))


def _float(value: Any, out: bytearray) -> None:
    out += _FLOAT.pack(_number(value, "float", _FLOAT_MOST))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Misfit("a string is wanted")
    return value


def _string(value: Any, out: bytearray) -> None:
    content = _text(value).encode()
    _put_long(len(content), out)
    out += content


def _latin(value: Any) -> bytes:
    try:
        return _text(value).encode("latin-1")
    except UnicodeEncodeError:
        raise Misfit("bytes are wanted, as a string of characters up to U+00FF, one for each byte") from None


def _bytes(value: Any, out: bytearray) -> None:
    content = _latin(value)
    _put_long(len(content), out)
    out += content


def _fixed(size: int) -> Encode:
    def fixed(value: Any, out: bytearray) -> None:
        content = _latin(value)
        if len(content) != size:
            raise Misfit(f"{size} bytes are wanted, and these are {len(content)}")
        out += content

    return fixed


def _enum(symbols: list[str]) -> Encode:
    indexes = {symbol: index for index, symbol in enumerate(symbols)}

    def enum(value: Any, out: bytearray) -> None:
        if not isinstance(value, str) or value not in indexes:
            raise Misfit(f"one of {', '.join(symbols[:20])} is wanted")
        _put_long(indexes[value], out)

    return enum


def _array(encode: Encode) -> Encode:
    def array(value: Any, out: bytearray) -> None:
        if not isinstance(value, list):
            raise Misfit("an array is wanted")
        if value:
            _put_long(len(value), out)
        index = 0
        try:
            for index, item in enumerate(value):  # noqa: B007 - used where an item does not fit
                encode(item, out)
        except Misfit as misfit:
            misfit.path.append(index)
            raise
        out.append(0)

    return array


def _map(encode: Encode) -> Encode:
    def mapping(value: Any, out: bytearray) -> None:
        if not isinstance(value, dict):
            raise Misfit("an object is wanted")
        if value:
            _put_long(len(value), out)
        for name, content in value.items():
            _string(name, out)
            try:
                encode(content, out)
            except Misfit as misfit:
                misfit.path.append(name)
                raise
        out.append(0)

    return mapping
