"""The rules with all that is read for them: schemas, and the secrets of sources."""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from service.contract import PREFIX, Rules, SettingsError
from service.core.file_stamps import Stamp, stamp_of
from service.core.settings import Settings
from service.events.deliveries import Source, read_sources
from service.events.schemas import Schemas


class LoadedRules(NamedTuple):
    """The rules of one reading of their file. `sha256` is that of the file, `schemas_sha256` of the schemas it names.

    Both are hexadecimal, and empty where no file is read. `files` are that file and those it names;
    `stamp` is theirs from before they were read.
    """

    rules: Rules
    schemas: Schemas
    sources: tuple[Source, ...]
    sha256: str = ""
    schemas_sha256: str = ""
    files: tuple[str, ...] = ()
    stamp: Stamp = ()


def load_rules(path: str) -> LoadedRules:
    """Read the rules, their schemas, and the secrets of their sources. Raises SettingsError, a line for each mistake.

    An empty path has no rules.
    """
    own = (path,) if path else ()
    stamp = stamp_of(own)
    rules, content = Rules.read_with_content(path)
    named = files_of(rules)
    stamp += stamp_of(named)
    wrong: list[str] = []
    schemas = Schemas(Rules())
    sources: tuple[Source, ...] = ()
    try:
        schemas = Schemas(rules)
    except SettingsError as error:
        wrong.append(str(error))
    try:
        sources = read_sources(rules)
    except SettingsError as error:
        wrong.append(str(error))
    wrong += _issuer_faults(rules)
    if wrong:
        raise SettingsError("\n".join(wrong))
    sha256 = hashlib.sha256(content).hexdigest() if path else ""
    return LoadedRules(rules, schemas, sources, sha256, _sha256(_schema_files(rules)), (*own, *named), stamp)


def _issuer_faults(rules: Rules) -> list[str]:
    """Find the files of issuers that cannot be used: a line for each. Without issuers no library is imported."""
    if not rules.issuers:
        return []
    from service.identity.tokens import file_faults

    return [*file_faults(rules)]


def contradictions(settings: Settings, rules: Rules) -> list[str]:
    """Find what of the rules contradicts the settings: a line for each, which says what to set."""
    wrong = rules.conflicts(settings)
    if not settings.registry and (named := [rule.pattern for rule in rules.topics if rule.registry is not None]):
        wrong.append(
            f"{settings.rules}: the topics {named[0]!r} have schemas of a registry, and {PREFIX}REGISTRY is not "
            "set: set the registry's URL"
        )
    if not settings.http_tls_client_cafile and (by := [rule.name for rule in rules.callers if rule.certificates]):
        wrong.append(
            f"{settings.rules}: the caller {by[0]!r} has certificates, and {PREFIX}HTTP_TLS_CLIENT_CAFILE is not set, "
            "so no client is asked for one: set it"
        )
    return wrong


def files_of(rules: Rules) -> list[str]:
    """List the files that the rules name: schemas, and secrets of sources."""
    signatures = [source.signature for source in rules.sources if source.signature is not None]
    return [*_schema_files(rules), *(file for signature in signatures for file in signature.secret_files)]


def _schema_files(rules: Rules) -> list[str]:
    return [*dict.fromkeys(rule.schema for rule in rules.topics if rule.schema)]


def _sha256(files: Collection[str]) -> str:
    """Return the digest of the files' bytes, one after the other."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()
