"""Checks of the types of JSON fields, which `json` does not make."""


def integer(found: object) -> int:
    """Return an integer as it is. Raises TypeError for anything else, a boolean too."""
    if type(found) is not int:
        raise TypeError(f"{found!r} is no integer")
    return found


def text(found: object) -> str:
    """Return a string as it is. Raises TypeError for anything else."""
    if not isinstance(found, str):
        raise TypeError(f"{found!r} is no string")
    return found
