"""An Enum whose members are keys of dicts and sets on the path of each event."""

from enum import Enum


class IdentityEnum(Enum):
    """An Enum hashed by identity: members are equal only to themselves, and Enum's own hash is a function in Python."""

    __hash__ = object.__hash__
