"""An Enum whose members are keys of dicts and sets on the path of each event."""

from enum import Enum


class IdentityEnum(Enum):
    """An Enum hashed by identity: members are equal only to themselves, and Enum's own hash is a function in Python.

    Python 3.11 looks a member up five times as slowly as a name of a module or a function, so what runs once for each
    event binds the members that it uses to names.
    """

    __hash__ = object.__hash__
