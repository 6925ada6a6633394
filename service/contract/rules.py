"""The rules of `FENCEPOST_RULES`: guarantees of topics, who may write what, webhooks, and what the audit compares."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from service.contract.cors_rules import CorsRule, cors_faults, cors_rule
from service.contract.faults import (
    Faults,
    Table,
    group_faults,
    line_of,
    name_faults,
    parse_toml,
    quarantine_faults,
    rate_faults,
    shown,
    start_of,
    ttl_faults,
)
from service.contract.issuer_rules import IssuerRule, issuer_faults, issuer_rule
from service.contract.registry_rules import RegistryRule, registry_faults, registry_rule
from service.contract.settings import PREFIX, SettingsError, SharedSettings
from service.contract.sink_rules import SinkRule, sink_faults, sink_rule
from service.contract.source_rules import SourceRule, source_faults, source_rule
from service.contract.wire.names import internal_topics


class Guarantee(Enum):
    """The guarantee of a topic's events. Hashed by identity, which is faster than Enum's own hash."""

    __hash__ = object.__hash__

    EXACTLY_ONCE = "exactly_once"
    IDEMPOTENT = "idempotent"


@dataclass(frozen=True, slots=True)
class TopicRule:
    """One `[[topics]]` table: the guarantee and the schema of the topics whose names match the glob.

    `schema` is the path of a JSON Schema, in the file relative to its folder, or empty. `key_ttl_s` is the retention of
    the keys of events of these topics, in seconds; 0 for FENCEPOST_KEY_TTL_S. `registry` names the schemas of a Schema
    Registry by which their keys and values are encoded. `keyless` says what happens to a produce request (of
    Confluent's API) without an idempotency key: `allow`: the service makes one. `takes_old_keys`: whether events are
    written whose key tells that it was made before the retention, and is unknown. `quarantine` is the topic for events
    that the schema refuses; empty if they are only refused. The rest is for the audit: `derived`: programs write copies
    of other topics' events here, with their headers. `client_duplicates`: whether equal contents under several keys are
    reported. `findings`: the kinds, or severities, of findings that count; all if empty.
    """

    pattern: str
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE
    schema: str = ""
    derived: bool = False
    client_duplicates: bool = True
    key_ttl_s: int = 0
    keyless: str = "allow"
    takes_old_keys: bool = False
    quarantine: str = ""
    registry: RegistryRule | None = None
    findings: tuple[str, ...] = ()


USUAL: Final = TopicRule("*")


@dataclass(frozen=True, slots=True)
class CallerRule:
    """One `[[callers]]` table: a caller, the SHA-256 (hex) of its tokens, and globs of the topics it may write to.

    `name` is the scope of its keys: the same key of two callers is two keys. A caller has several tokens while one is
    replaced by the next; a retry with the new token finds the keys of the old one. `rate` is in events a second,
    `rate_bytes` in bytes of bodies, for all tokens and all processes together, with bursts of one second; None for no
    limit. `certificates` are names of clients' certificates (mutual TLS) by which the caller is known too:
    "subject:…", "dns:…", "uri:…", "email:…". `groups` are globs of the consumer groups whose offsets the caller may
    commit with its events; none by default, because a caller of an earlier release could commit no offsets.
    """

    name: str
    token_sha256: tuple[str, ...] = field(repr=False)
    topics: tuple[str, ...] = ("*",)
    rate: float | None = None
    rate_bytes: float | None = None
    certificates: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a TOML file. The first `[[topics]]` table that matches a topic applies."""

    topics: tuple[TopicRule, ...] = ()
    callers: tuple[CallerRule, ...] = ()
    sources: tuple[SourceRule, ...] = ()
    cors: tuple[CorsRule, ...] = ()
    issuers: tuple[IssuerRule, ...] = ()
    sinks: tuple[SinkRule, ...] = ()

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scopes of keys that the rules tell: the empty one, that of each caller, and that of each source.

        Of the callers whom tokens name, only those are known that an issuer's rule lists without a glob.
        """
        named = (scope for issuer in self.issuers for scope in issuer.known_scopes)
        return ("", *(caller.name for caller in self.callers), *(source.scope for source in self.sources), *named)

    def guarantee(self, topic: str) -> Guarantee:
        """Find the guarantee of a topic's events; exactly_once if no rule matches."""
        return self.rule(topic).guarantee

    def rule(self, topic: str) -> TopicRule:
        """Find the first rule that matches a topic, else USUAL."""
        return next((rule for rule in self.topics if fnmatchcase(topic, rule.pattern)), USUAL)

    @property
    def longest_ttl_s(self) -> int:
        """The longest retention of keys by a rule, in seconds; 0 without any."""
        return max([rule.key_ttl_s for rule in self._owners], default=0)

    @property
    def _owners(self) -> list[TopicRule | SourceRule]:
        """The rules that may have a retention and a quarantine topic of their own."""
        return [*self.topics, *self.sources]

    def longest_ttl_of(self, topic: str, usual_s: int) -> int:
        """Find the longest retention of the keys of events in a topic, in seconds; `usual_s` is that without a rule.

        Sources that write there may have one of their own, and a dead letter has that of what it stands for.
        """
        found = [self.rule(topic).key_ttl_s or usual_s]
        found += [rule.key_ttl_s or usual_s for rule in self.topics if rule.quarantine == topic]
        for source in self.sources:
            if source.quarantine == topic:
                found += [source.key_ttl_s, *(self.rule(name).key_ttl_s or usual_s for name in source.all_topics)]
            elif topic in source.all_topics:
                found.append(source.key_ttl_s)
        return max(found)

    @property
    def quarantine_topics(self) -> frozenset[str]:
        """The topics for what is refused."""
        return frozenset(rule.quarantine for rule in self._owners if rule.quarantine)

    def conflicts(self, settings: SharedSettings) -> list[str]:
        """Find what contradicts the settings, or another rule: a line for each, which says what to set."""
        of = [(f"the topics {rule.pattern!r}", rule) for rule in self.topics]
        owners: list[tuple[str, TopicRule | SourceRule]] = [*of]
        owners += [(f"the source {source.name!r}", source) for source in self.sources]
        least_s = settings.least_key_ttl_s
        wrong = [
            f"{settings.rules}: key_ttl_s = {rule.key_ttl_s} of {owner} is too short for the timeouts: "
            f"write {least_s} or more"
            for owner, rule in owners
            if 0 < rule.key_ttl_s < least_s
        ]
        wrong += [
            f"{settings.rules}: quarantine = {rule.quarantine!r} of {owner}: {why}"
            for owner, rule in owners
            if rule.quarantine and (why := self._why_no_quarantine(rule.quarantine, settings.namespace))
        ]
        wrong += [
            f"{settings.rules}: quarantine = {source.quarantine!r} of the source {source.name!r}: its deliveries go "
            "there: name another topic"
            for source in self.sources
            if source.quarantine in source.all_topics
        ]
        wrong += [
            f"{settings.rules}: quarantine of {owner}: only what a schema refuses goes there: write schema, or registry"
            for owner, rule in of
            if rule.quarantine and not rule.schema and rule.registry is None
        ]
        return wrong

    def _why_no_quarantine(self, topic: str, namespace: str) -> str:
        """Say why a topic cannot take what is refused, and the remedy; "" if it can.

        What is refused must not be refused again, and its answer is replayed from the ledger.
        """
        rule = self.rule(topic)
        if topic in internal_topics(namespace):
            return "it is internal: name another topic"
        if rule.guarantee is not Guarantee.EXACTLY_ONCE:
            return f"it is {rule.guarantee.value} by the rule {rule.pattern!r}: name one that is exactly_once"
        if rule.schema or rule.quarantine or rule.registry is not None:
            return (
                f"the rule {rule.pattern!r} gives it a schema or a quarantine of its own: name a topic without, or "
                "write a [[topics]] table for it before that rule"
            )
        return ""

    @classmethod
    def read(cls, path: str) -> "Rules":
        """Read a file of rules; no rules for an empty path. Raises SettingsError with a line for each mistake."""
        return cls.read_with_content(path)[0]

    @classmethod
    def read_with_content(cls, path: str) -> "tuple[Rules, bytes]":
        """Read a file of rules as `read` does; returns its bytes too, empty for an empty path. Raises SettingsError."""
        if not path:
            return cls(), b""
        try:
            content = Path(path).read_bytes()
            text = content.decode().replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"{PREFIX}RULES={path!r} cannot be read: {error}; set the path of a TOML file, or leave it empty"
            ) from None
        return cls.parse(text, path), content

    @classmethod
    def parse(cls, text: str, path: str = "rules") -> "Rules":
        """Parse rules. Raises SettingsError with a line for each mistake: the file, its line, and what to write."""
        document = parse_toml(text, path)
        wrong = [
            f"{path}:{line_of(text, name)}: {shown(name)}: no such section; write {_SECTIONS}"
            for name in document.keys() - _FAULTS.keys()
        ]
        found: dict[str, list[dict[str, Any]]] = {}
        for section, faults_of in _FAULTS.items():
            tables = document.get(section, [])
            if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
                wrong.append(f"{path}:{line_of(text, section)}: {section}: write [[{section}]], once for each")
                tables = []
            found[section] = tables
            for index, table in enumerate(tables):
                start = start_of(text, section, index)
                for name, remedy in faults_of(table, tables[:index]):
                    wrong.append(f"{path}:{line_of(text, name, start)}: {shown(name)}: {remedy}")
        if wrong:
            raise SettingsError("\n".join(wrong))
        folder = Path(path).parent
        return cls(
            tuple(_topic_rule(table, folder) for table in found["topics"]),
            tuple(map(_caller_rule, found["callers"])),
            tuple(source_rule(table, folder) for table in found["sources"]),
            tuple(map(cors_rule, found["cors"])),
            tuple(issuer_rule(table, folder) for table in found["issuers"]),
            tuple(sink_rule(table, folder) for table in found["sinks"]),
        )


_SWITCHES: Final = ("takes_old_keys", "derived", "client_duplicates")
_TOPIC_SETTINGS: Final = (
    "pattern",
    "guarantee",
    "schema",
    "registry",
    "key_ttl_s",
    "keyless",
    "quarantine",
    "findings",
)
_KEYLESS: Final = ("allow", "refuse")
_GUARANTEES: Final = tuple(guarantee.value for guarantee in Guarantee)
_CALLER_SETTINGS: Final = ("name", "token_sha256", "certificates", "topics", "groups", "rate", "rate_bytes")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_CERTIFICATE: Final = re.compile(r"(?:subject:[A-Za-z0-9.]+=|dns:|uri:|email:).+", re.DOTALL)


def _topic_rule(table: Table, folder: Path) -> TopicRule:
    schema = str(folder / table["schema"]) if "schema" in table else ""
    guarantee = Guarantee(table.get("guarantee", "exactly_once"))
    derived, client_duplicates = table.get("derived", False), table.get("client_duplicates", True)
    return TopicRule(
        table["pattern"],
        guarantee,
        schema,
        derived,
        client_duplicates,
        table.get("key_ttl_s", 0),
        table.get("keyless", "allow"),
        table.get("takes_old_keys", False),
        table.get("quarantine", ""),
        registry_rule(table),
        tuple(table.get("findings", ())),
    )


def _caller_rule(table: Table) -> CallerRule:
    topics = tuple(table.get("topics", ["*"]))
    certificates = tuple(table.get("certificates", []))
    groups = tuple(table.get("groups", []))
    rates = table.get("rate"), table.get("rate_bytes")
    return CallerRule(table["name"], tuple(_digests(table)), topics, *rates, certificates, groups)


def _digests(table: Table) -> list[Any]:
    """Read the digests of a caller's tokens from its table: a list, or a single one."""
    digests = table.get("token_sha256", [])
    return digests if isinstance(digests, list) else [digests]


def _topic_faults(table: Table, before: Sequence[Table]) -> Faults:
    """Find the mistakes of a `[[topics]]` table: the name concerned, and the remedy."""
    for name in table.keys() - {*_TOPIC_SETTINGS, *_SWITCHES}:
        yield name, f"no such setting; write {', '.join((*_TOPIC_SETTINGS, *_SWITCHES))}"
    pattern = table.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        yield "pattern", 'write the topic\'s name or a glob, as in pattern = "telemetry.*"'
    if table.get("guarantee", "exactly_once") not in _GUARANTEES:
        yield "guarantee", f"write one of {', '.join(_GUARANTEES)}"
    if table.get("keyless", "allow") not in _KEYLESS:
        yield "keyless", f"write one of {', '.join(_KEYLESS)}"
    schema = table.get("schema", "-")
    if not isinstance(schema, str) or not schema:
        yield "schema", 'write the path of a JSON Schema, as in schema = "order.json", or leave it out'
    yield from registry_faults(table)
    yield from ttl_faults(table)
    yield from quarantine_faults(table)
    findings = table.get("findings", ["-"])
    if not isinstance(findings, list) or not findings or not all(isinstance(name, str) and name for name in findings):
        yield "findings", 'write kinds or severities of findings, as in findings = ["error", "stuck"], or leave it out'
    for name in _SWITCHES:
        if not isinstance(table.get(name, False), bool):
            yield name, "write true or false"


def _caller_faults(table: Table, before: Sequence[Table]) -> Faults:
    """Find the mistakes of a `[[callers]]` table after those `before` it: the name concerned, and the remedy."""
    for unknown in table.keys() - set(_CALLER_SETTINGS):
        yield unknown, f"no such setting; write {', '.join(_CALLER_SETTINGS)}"
    taken = "another caller has it: write a different one, or list all tokens of a caller in one table"
    yield from name_faults(table, before, taken)
    if "token_sha256" in table or "certificates" not in table:
        yield from _token_faults(_digests(table), before)
    yield from _certificate_faults(table.get("certificates", ["dns:-"]), before)
    topics = table.get("topics", ["*"])
    if not isinstance(topics, list) or not topics or not all(isinstance(glob, str) and glob for glob in topics):
        yield "topics", 'write names or globs, as in topics = ["orders.*"]'
    yield from group_faults(table)
    yield from rate_faults(table)


def _certificate_faults(names: Any, before: Sequence[Table]) -> Faults:
    """Find the mistakes of the names of a caller's certificates."""
    known = isinstance(names, list) and bool(names)
    if not known or not all(isinstance(name, str) and _CERTIFICATE.fullmatch(name) for name in names):
        yield (
            "certificates",
            "write names of certificates, each with its kind, as in "
            '["uri:spiffe://example.com/shop", "dns:shop.example.com", "email:me@example.com", "subject:CN=shop,O=A"],'
            " the last as `openssl x509 -noout -subject -nameopt RFC2253` prints it",
        )
    elif any(name in other.get("certificates", ()) for name in names for other in before):
        yield "certificates", "another caller has one of them: write a different one"


def _token_faults(digests: Sequence[Any], before: Sequence[Table]) -> Faults:
    """Find the mistakes of the digests of a caller's tokens."""
    if not digests or not all(isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in digests):
        yield "token_sha256", "write 64 hexadecimal digits, as `printf %s TOKEN | sha256sum` prints them, or a list"
    elif any(digest in _digests(other) for digest in digests for other in before):
        yield "token_sha256", "another caller has it: write a different one"


_FAULTS: Final[Mapping[str, Callable[[Table, Sequence[Table]], Faults]]] = {
    "topics": _topic_faults,
    "callers": _caller_faults,
    "sources": source_faults,
    "cors": cors_faults,
    "issuers": issuer_faults,
    "sinks": sink_faults,
}
_SECTIONS: Final = " or ".join(f"[[{section}]]" for section in _FAULTS)
