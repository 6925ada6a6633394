"""The `[[sources]]` tables of the rules: webhooks, by whom they are signed, and what of them becomes a record.

Standard library only. Nothing here reads a secret: the job reads the same rules without having them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from service.contract.faults import (
    NAME,
    NAME_REMEDY,
    TOKEN,
    Faults,
    Table,
    is_topic,
    quarantine_faults,
    rate_faults,
    ttl_faults,
    unknown_faults,
)
from service.contract.wire.headers import RESERVED_HEADERS, TRACE_HEADER

NO_SIGNATURE: Final = "none"
HMAC: Final = "hmac"
SCHEME_HEADERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "standard-webhooks": ("webhook-signature", "webhook-timestamp", "svix-signature", "svix-timestamp"),
        "stripe": ("stripe-signature",),
        "github": ("x-hub-signature-256",),
        "shopify": ("x-shopify-hmac-sha256",),
        "slack": ("x-slack-signature", "x-slack-request-timestamp"),
        HMAC: (),
    }
)
"""The schemes of signatures, and the headers in which each attempt of a delivery has another text."""
TIMESTAMPED: Final = frozenset({"standard-webhooks", "stripe", "slack"})
"""The schemes that sign the time of the attempt."""
ALGORITHMS: Final = ("sha256", "sha512", "sha1")
ENCODINGS: Final = ("hex", "base64")
TOLERANCE_S: Final = 300  # the default of Standard Webhooks, Stripe and Slack
_TOLERANCE_MOST_S: Final = 7 * 86_400

POINTER_STEPS_MAX: Final = 16  # an index, and the names after it, cost one scan of what is left of the body
INDEX_MOST: Final = 99  # a larger number in a pointer is only the name of a member
# Headers that differ between the attempts of one delivery, in any scheme. Slack counts its retries in two of them.
_OF_THE_ATTEMPT: Final = frozenset({"date", "x-slack-retry-num", "x-slack-retry-reason"})
_ALWAYS_KEPT: Final = frozenset({"content-type", TRACE_HEADER})
KEEP_HEADERS_MAX: Final = 50

_PREFIX: Final = re.compile(r"[\x21-\x7e]{0,64}")
_ESCAPES: Final = re.compile(r"~(?![01])")
# A decoder cannot look for these names.
_UNNAMEABLE: Final = re.compile(r'["\\\x00-\x1f]')


class KeyLocation(Enum):
    """Where a delivery has its idempotency key: in a header, in its JSON, or it is the SHA-256 (hex) of its body."""

    HEADER = "header"
    POINTER = "pointer"
    SHA256 = "sha256"


@dataclass(frozen=True, slots=True)
class SignatureRule:
    """How a source signs: the scheme, one or two files with secrets, the tolerance for timestamps in seconds.

    `header` (in lower case), `algorithm`, `encoding` and `prefix` are those of the scheme `hmac`.
    """

    scheme: str
    secret_files: tuple[str, ...]
    tolerance_s: int = TOLERANCE_S
    header: str = ""
    algorithm: str = ALGORITHMS[0]
    encoding: str = ENCODINGS[0]
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class SourceRule:
    """One `[[sources]]` table: a sender of webhooks to `POST /sources/{name}`.

    The idempotency key is at `key_location`; `key_name` is the header (in lower case) or the JSON pointer. A delivery
    goes to `topic`, or if `topic_pointer` is given, to that of `topics` which the value there names, and to `topic` for
    all other values, if it is given too. `keep_headers` are in lower case. `rate` is in events a second, `rate_bytes`
    in bytes of bodies, over all processes; None for no limit. `key_ttl_s` is the retention of its keys, in seconds; 0
    for that of the topic. `quarantine` is the topic for deliveries that cannot be used; without it, they are only
    refused.
    """

    name: str
    key_location: KeyLocation
    key_name: str
    signature: SignatureRule | None
    topic: str = ""
    topic_pointer: str = ""
    topics: Mapping[str, str] = field(default_factory=dict)
    record_key: str = ""
    keep_headers: tuple[str, ...] = ()
    rate: float | None = None
    rate_bytes: float | None = None
    key_ttl_s: int = 0
    quarantine: str = ""

    @property
    def all_topics(self) -> tuple[str, ...]:
        """The topics for which a delivery may be."""
        return (*((self.topic,) if self.topic else ()), *self.topics.values())

    @property
    def scope(self) -> str:
        """The scope of the source's keys, which no caller can have: callers' names have no colon."""
        return f"source:{self.name}"


def pointer_steps(pointer: str) -> tuple[str, ...]:
    """Split a JSON pointer (RFC 6901) to a member or an element into its unescaped steps.

    Raises ValueError with what would be right.
    """
    steps = pointer.split("/")[1:]
    if not pointer.startswith("/") or _ESCAPES.search(pointer):
        raise ValueError('write a JSON pointer (RFC 6901), as in "/data/id"; ~ is written ~0')
    if len(steps) > POINTER_STEPS_MAX:
        raise ValueError(f"write at most {POINTER_STEPS_MAX} steps")
    if _UNNAMEABLE.search(pointer):
        raise ValueError("quotes, backslashes and control characters in a name cannot be looked for")
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)


def source_rule(table: Table, folder: Path) -> SourceRule:
    """Make the rule of a table without faults; files are relative to the folder of the rules."""
    ((location, name),) = table["idempotency_key"].items()
    location = KeyLocation(location)
    return SourceRule(
        name=table["name"],
        key_location=location,
        key_name=name.lower() if location is KeyLocation.HEADER else name,
        signature=_signature_rule(table["signature"], folder),
        topic=table.get("topic", ""),
        topic_pointer=table.get("topic_pointer", ""),
        topics=MappingProxyType(table.get("topics", {})),
        record_key=table.get("record_key", ""),
        keep_headers=tuple(header.lower() for header in table.get("keep_headers", [])),
        rate=table.get("rate"),
        rate_bytes=table.get("rate_bytes"),
        key_ttl_s=table.get("key_ttl_s", 0),
        quarantine=table.get("quarantine", ""),
    )


def _signature_rule(signature: Any, folder: Path) -> SignatureRule | None:
    if signature == NO_SIGNATURE:
        return None
    files = tuple(str(folder / file) for file in signature["secret_files"])
    more = {**signature, "secret_files": files, "header": signature.get("header", "").lower()}
    return SignatureRule(**more)


# ----------------------------------------------------------------------------------------------------- mistakes

_SETTINGS: Final = (
    "name",
    "topic",
    "topic_pointer",
    "topics",
    "record_key",
    "idempotency_key",
    "keep_headers",
    "signature",
    "rate",
    "rate_bytes",
    "key_ttl_s",
    "quarantine",
)


def source_faults(table: Table, before: Sequence[Table]) -> Faults:
    """Find the mistakes of a `[[sources]]` table after those `before` it: the name concerned, and the remedy."""
    yield from unknown_faults(table, _SETTINGS)
    name = table.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None or name in (".", ".."):
        yield "name", f"{NAME_REMEDY}, but not . or .. alone"
    elif any(name == other.get("name") for other in before):
        yield "name", "another source has it: write a different one"
    yield from _topic_faults(table)
    yield from _pointer_faults(table, "record_key")
    yield from _key_faults(table)
    yield from _kept_faults(table)
    yield from _signature_faults(table.get("signature"))
    yield from rate_faults(table)
    yield from ttl_faults(table)
    yield from quarantine_faults(table)


def _topic_faults(table: Table) -> Faults:
    if "topic" in table and not is_topic(table["topic"]):
        yield "topic", "write the name of a topic"
    if "topic_pointer" not in table and "topics" not in table:
        if "topic" not in table:
            yield "topic", "write the name of a topic, or topic_pointer and topics"
        return
    if "topic_pointer" not in table:
        yield "topics", 'write also where the value is that chooses one, as in topic_pointer = "/type"'
    yield from _pointer_faults(table, "topic_pointer")
    topics = table.get("topics")
    if not isinstance(topics, dict) or not topics or not all(map(is_topic, topics.values())):
        yield "topics", 'write a topic for each value, as in topics = { "charge.succeeded" = "payments" }'


def _pointer_faults(table: Table, name: str) -> Faults:
    """Find the mistake of an optional JSON pointer."""
    pointer = table.get(name, "/-")
    try:
        pointer_steps(pointer if isinstance(pointer, str) else "")
    except ValueError as error:
        yield name, str(error)


_KEY_REMEDY: Final = (
    'write where each delivery has its key: { header = "webhook-id" }, { pointer = "/id" } or { sha256 = "body" }'
)


def _key_faults(table: Table) -> Faults:
    key = table.get("idempotency_key")
    if not isinstance(key, dict) or len(key) != 1:
        yield "idempotency_key", _KEY_REMEDY
        return
    ((location, where),) = key.items()
    match location:
        case KeyLocation.HEADER.value if _is_token(where):
            if where.lower() in _varying(table):
                yield "idempotency_key", f"{where}: a retry has another one, and would be written again: {_KEY_REMEDY}"
        case KeyLocation.SHA256.value if where == "body":
            return
        case KeyLocation.POINTER.value:
            yield from (("idempotency_key", f"pointer: {why}") for _, why in _pointer_faults(key, "pointer"))
        case _:
            yield "idempotency_key", _KEY_REMEDY


def _kept_faults(table: Table) -> Faults:
    """Find the mistakes of `keep_headers`. The kept headers are part of the fingerprint, as all of a record's are."""
    kept = table.get("keep_headers", [])
    if not isinstance(kept, list) or not all(map(_is_token, kept)) or len(kept) > KEEP_HEADERS_MAX:
        yield "keep_headers", f'write up to {KEEP_HEADERS_MAX} names, as in keep_headers = ["X-GitHub-Event"]'
        return
    names = [header.lower() for header in kept]
    if len(set(names)) < len(names):
        yield "keep_headers", "write each name once"
    varying = _varying(table)
    for header, name in zip(kept, names, strict=True):
        if name in RESERVED_HEADERS:
            yield "keep_headers", f"{header}: this name is reserved for Fencepost: leave it out"
        elif name in _ALWAYS_KEPT:
            yield "keep_headers", f"{header}: it is kept anyway: leave it out"
        elif name in varying:
            yield (
                "keep_headers",
                f"{header}: a retry has another one, and would be refused as another event: leave it out",
            )


def _varying(table: Table) -> frozenset[str]:
    """Name the headers of a source that differ between attempts, as far as its signature's table is right."""
    signature = table.get("signature")
    if not isinstance(signature, dict) or not isinstance(signature.get("scheme"), str):
        return _OF_THE_ATTEMPT
    return _OF_THE_ATTEMPT.union(SCHEME_HEADERS.get(signature["scheme"], ()))


def _signature_faults(signature: Any) -> Faults:
    """Find the mistakes of `signature`, each with the name of its own setting before the remedy."""
    if signature == NO_SIGNATURE:
        return
    if not isinstance(signature, dict):
        yield (
            "signature",
            'write { scheme = "stripe", secret_files = ["stripe.secret"] }, or "none" to take what anybody sends',
        )
        return
    for name, remedy in _scheme_faults(signature):
        yield "signature", f"{name}: {remedy}"


def _scheme_faults(signature: Table) -> Iterator[tuple[str, str]]:
    scheme = signature.get("scheme")
    if scheme not in tuple(SCHEME_HEADERS):
        yield "scheme", f"write one of {', '.join(SCHEME_HEADERS)}"
        return
    allowed = {"scheme", "secret_files"}
    if scheme in TIMESTAMPED:
        allowed.add("tolerance_s")
    if scheme == HMAC:
        allowed |= {"header", "algorithm", "encoding", "prefix"}
        yield from _hmac_faults(signature)
    for unknown in sorted(signature.keys() - allowed):
        yield unknown, f"{scheme} has no such setting; it has {', '.join(sorted(allowed))}"
    files = signature.get("secret_files")
    if not isinstance(files, list) or len(files) not in (1, 2) or not all(isinstance(f, str) and f for f in files):
        yield "secret_files", "write one file with the secret, or two while one secret replaces the other"
    tolerance = signature.get("tolerance_s", TOLERANCE_S)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int) or not 1 <= tolerance <= _TOLERANCE_MOST_S:
        yield "tolerance_s", f"write seconds, from 1 to {_TOLERANCE_MOST_S}"


def _hmac_faults(signature: Table) -> Iterator[tuple[str, str]]:
    if not _is_token(signature.get("header")):
        yield "header", "write the name of the header that has the signature"
    for name, choices in (("algorithm", ALGORITHMS), ("encoding", ENCODINGS)):
        if signature.get(name, choices[0]) not in choices:
            yield name, f"write one of {', '.join(choices)}"
    prefix = signature.get("prefix", "")
    if not isinstance(prefix, str) or _PREFIX.fullmatch(prefix) is None:
        yield "prefix", 'write what stands before the signature in its header, as in "sha256="'


def _is_token(name: Any) -> bool:
    return isinstance(name, str) and TOKEN.fullmatch(name) is not None
