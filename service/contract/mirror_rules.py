"""The settings of a `[[sinks]]` table about a mirror: the same topics in another cluster of Kafka."""

import os
import re
from pathlib import Path
from typing import Any, Final

from service.contract.faults import Faults, Table, is_topic
from service.contract.settings import FILE, PREFIX, SettingsError, SharedSettings

TOPIC_FIELD: Final = "{topic}"
"""Stands for the name of a topic in `mirror_topic`."""

# Every setting of Kafka's client that the service and the audit share, in lower case. A secret only stands in a file.
_VARIABLES: Final = {name for name in SharedSettings.variables() if name.startswith(f"{PREFIX}KAFKA")}
_SECRETS: Final = {name for name in _VARIABLES if name + FILE in _VARIABLES}
OF_CONNECTION: Final = tuple(sorted(name.removeprefix(PREFIX).lower() for name in _VARIABLES - _SECRETS))
"""The settings of a mirror's cluster."""
MIRROR_SETTINGS: Final = ("mirror_topic", *OF_CONNECTION)
SECRETS: Final = tuple(sorted(name.removeprefix(PREFIX).lower() for name in _SECRETS))

_SWITCHES: Final = ("kafka_ssl_check_hostname",)
_VARIABLE: Final = re.compile(rf"{PREFIX}(KAFKA[A-Z_]*)")


def connection_of(table: Table, folder: Path) -> tuple[tuple[str, str], ...]:
    """Return the variables of SharedSettings, with their values, for the cluster of a mirror.

    Files are relative to the folder of the rules.
    """
    return tuple((_variable(name), _text(name, table[name], folder)) for name in OF_CONNECTION if name in table)


def settings_of(connection: tuple[tuple[str, str], ...]) -> SharedSettings:
    """Read the settings of a mirror's cluster, with its secrets. Raises SettingsError, by the names in the rules."""
    try:
        return SharedSettings.from_env(dict(connection))
    except SettingsError as error:
        raise SettingsError(_in_names_of_rules(str(error))) from None


def copy_of(mirror_topic: str, topic: str) -> str:
    """Return the name of a topic's copy in the mirror."""
    return mirror_topic.replace(TOPIC_FIELD, topic)


def mirror_faults(table: Table) -> Faults:
    """Find the mistakes of the settings of a mirror: the name concerned, and the remedy."""
    if not isinstance(table.get("kafka"), str) or not table["kafka"]:
        yield "kafka", 'write the bootstrap servers of the mirror\'s cluster, as in kafka = "kafka-b:9092"'
    copy = table.get("mirror_topic", TOPIC_FIELD)
    if not isinstance(copy, str) or TOPIC_FIELD not in copy or not is_topic(copy_of(copy, "t")):
        yield (
            "mirror_topic",
            f"write the name of a topic's copy with {TOPIC_FIELD} in it, as in "
            f'mirror_topic = "primary.{TOPIC_FIELD}", or leave it out if copies have the same name',
        )
    for secret in SECRETS:
        if secret in table:
            yield secret, f"a secret would come into logs: write {secret}{FILE.lower()}, a file that has it, instead"
    wrong = [name for name in OF_CONNECTION if name in table and not _is_setting(name, table[name])]
    for name in wrong:
        yield name, "write true or false" if name in _SWITCHES else "write a text"
    if not wrong:
        yield from _conflicts(table)


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, bool) if name in _SWITCHES else isinstance(value, str) and bool(value)


def _conflicts(table: Table) -> Faults:
    """Find settings that are wrong, or contradict each other. No file is read: the service has none of these files."""
    given = {name: _text(name, table[name], Path()) for name in OF_CONNECTION if name in table}
    checked: dict[str, str] = {}
    for name, value in given.items():
        if name == "kafka_oauth_token_file":
            checked[_variable(name)] = os.devnull  # a file that can be read
        elif (secret := _variable(name).removesuffix(FILE)) in _SECRETS:
            checked[secret] = "-"
        elif not _is_path(name):
            checked[_variable(name)] = value
    try:
        SharedSettings.from_env(checked)
    except SettingsError as error:
        for line in _in_names_of_rules(str(error)).split("\n"):
            yield next((name for name in re.findall(r"kafka[a-z_]*", line) if name in table), "kafka"), line


def _in_names_of_rules(lines: str) -> str:
    """Replace the variables in messages of SharedSettings by the names in the rules."""

    def name(found: re.Match[str]) -> str:
        is_secret = found[0] in _SECRETS
        return found[1].lower() + (FILE.lower() if is_secret else "")

    return _VARIABLE.sub(name, lines)


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _is_path(name: str) -> bool:
    return name.endswith("file")


def _text(name: str, value: Any, folder: Path) -> str:
    """Return the value of a setting as the environment has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(folder / value) if _is_path(name) else str(value)
