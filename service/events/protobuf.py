"""Encodes JSON by a Protobuf schema: the JSON mapping of Protobuf in, its binary encoding out, by Google's library.

https://protobuf.dev/programming-guides/json/
"""

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final

from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import DecodeError, EncodeError

from service.core.varint import unsigned_varint
from service.events.avro import Misfit

# Where json_format tells a place: `… at Order.lines[2].price`, behind the names of the fields on the way.
_PLACE: Final = re.compile(r" at \"?\w+(?P<path>(?:\.\w+|\[\d+\])+)\"?\.*$")
_ON_THE_WAY: Final = re.compile(r"Failed to parse (\w+) field: ")
_STEP: Final = re.compile(r"[^.\[\]]+")
# Types with JSON forms of their own, which only the library checks.
_WELL_KNOWN: Final = "google.protobuf."


class ProtobufSchema:
    """One message of a compiled Protobuf schema."""

    takes_text = False

    def __init__(self, descriptors: bytes, message: str = "") -> None:
        """Read a serialized FileDescriptorSet; `message` is a full name, else the first of its last file is taken.

        Raises ValueError.
        """
        pool = descriptor_pool.DescriptorPool()
        try:
            files = FileDescriptorSet.FromString(descriptors).file
            for each in files:
                pool.Add(each)
            file = pool.FindFileByName(files[-1].name)
        except (DecodeError, TypeError, KeyError, IndexError) as error:
            raise ValueError(str(error)) from None
        if not message:
            if not files[-1].message_type:
                raise ValueError("it has no message")
            first = files[-1].message_type[0].name
            message = f"{file.package}.{first}" if file.package else first
        try:
            found = pool.FindMessageTypeByName(message)
        except KeyError:
            raise ValueError(f"it has no message {message}") from None
        if found.file.name != file.name:
            raise ValueError(f"the message {message} is of one of its references: name one of its own")
        self.name = found.full_name
        self.indexes = _encoded_indexes(_indexes_of(found))
        self._pool = pool
        self._class = message_factory.GetMessageClass(found)

    def encode(self, value: Any) -> bytes:
        """Encode a value of JSON; the message's indexes are not part of it. Raises Misfit."""
        message = self._class()
        try:
            _check(value, message.DESCRIPTOR)
            json_format.ParseDict(_plain(value), message, descriptor_pool=self._pool)
            encoded: bytes = message.SerializeToString(deterministic=True)
        except json_format.ParseError as error:
            raise _misfit_of(str(error)) from None
        except Misfit:
            raise
        except OverflowError:  # an integer of more digits than a double holds
            raise Misfit("a number is beyond the type of its field") from None
        except RecursionError:
            raise Misfit("it nests too deeply") from None
        except (EncodeError, ValueError, TypeError, AttributeError) as error:  # a required field of proto2, for one
            raise Misfit(str(error) or type(error).__name__) from None
        return encoded


def _plain(value: Any) -> Any:
    """Replace the exact numbers of a value, which json_format does not know, by doubles."""
    if isinstance(value, dict):
        return {name: _plain(content) for name, content in value.items()}
    if isinstance(value, list):
        return [_plain(content) for content in value]
    return float(value) if isinstance(value, Decimal) else value


def _check(value: Any, message: Descriptor) -> None:
    """Check the names and the shapes of a value's objects: json_format takes an empty list for an object.

    Raises Misfit.
    """
    if message.full_name.startswith(_WELL_KNOWN):
        return
    if not isinstance(value, dict):
        raise Misfit(f"an object is wanted, for {message.full_name}")
    fields = {name: field for field in message.fields for name in (field.name, field.json_name)}
    for name, content in value.items():
        if name.startswith("["):  # an extension
            continue
        if name not in fields:
            raise Misfit(f"{message.full_name} has no such field", name)
        try:
            _check_field(content, fields[name])
        except Misfit as misfit:
            misfit.path.append(name)
            raise


def _check_field(content: Any, field: FieldDescriptor) -> None:
    message = field.message_type
    if message is None or content is None:
        return
    if not field.is_repeated:
        _check(content, message)
        return
    each: Iterable[tuple[str | int, Any]]
    if message.GetOptions().map_entry:
        if not isinstance(content, dict):
            raise Misfit("an object is wanted, for a map")
        each, of_each = content.items(), message.fields_by_name["value"].message_type
    else:
        if not isinstance(content, list):
            raise Misfit("an array is wanted")
        each, of_each = enumerate(content), message
    for key, item in each:
        if of_each is not None:
            try:
                _check(item, of_each)
            except Misfit as misfit:
                misfit.path.append(key)
                raise


def _misfit_of(text: str) -> Misfit:
    """Make the error of json_format's text, with the path as far as the text has it."""
    place = _PLACE.search(text)
    names: list[str] = _STEP.findall(place["path"]) if place else _ON_THE_WAY.findall(text)
    why = _ON_THE_WAY.sub("", _PLACE.sub("", text)).rstrip(".")
    return Misfit(why, *reversed([int(step) if step.isdecimal() else step for step in names]))


def _indexes_of(message: Descriptor) -> list[int]:
    """Return the message's index in its file, or in the message that contains it, behind the indexes of that."""
    outer = message.containing_type
    if outer is not None:
        return [*_indexes_of(outer), [each.name for each in outer.nested_types].index(message.name)]
    return [list(message.file.message_types_by_name).index(message.name)]


def _encoded_indexes(indexes: list[int]) -> bytes:
    """Encode message indexes as Confluent's wire format does: count and indexes, zigzag; [0] is one byte 0."""
    if indexes == [0]:
        return b"\x00"
    return b"".join(unsigned_varint(number * 2) for number in (len(indexes), *indexes))  # zigzag of a number from 0
