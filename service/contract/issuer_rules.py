"""The `[[issuers]]` tables of the rules: whose JSON Web Tokens name callers, and what they may do.

Standard library only. The words are those of JWT (RFC 7519), JWK (RFC 7517) and OpenID Connect.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from service.contract.faults import Faults, Table, group_faults, name_faults, rate_faults, unknown_faults
from service.contract.source_rules import pointer_steps

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519")
"""The signatures that a rule may list. Neither `none` nor an HMAC, whose key would be a public one, is among them."""
LEEWAY_S: Final = 30
LEEWAY_MOST_S: Final = 300
_GLOB: Final = frozenset("*?[")
_ALGORITHM_REMEDY: Final = f"write some of {', '.join(ALGORITHMS)}; HMAC and none are never taken"


@dataclass(frozen=True, slots=True)
class IssuerRule:
    """One `[[issuers]]` table: an issuer of JWTs, where its public keys are, and which of its tokens name a caller.

    A token must have `issuer` as its `iss`, one of `audience` in its `aud`, a signature by one of `algorithms`, and if
    `azp` is given, one of these as its `azp` or `client_id`. `name_claim` is the claim with the caller's name, within
    the issuer; `topics_claim` that with the globs of its topics, if the tokens tell them. Both are the names in a path
    of nested claims. A caller may write to a topic that matches `topics`, and the token's claim if there is one, and
    `subjects`, if it is not None: the first of its globs that matches the name tells the globs of the topics; a name
    that matches none is refused.

    The keys are read from `jwks_url` or `jwks_file`; without both, from the URL that the issuer's OpenID configuration
    names. `jwks_cafile` has the authorities that sign the URLs' certificates, `jwks_token_file` a bearer token for the
    URLs; empty for neither. `rate` is in events a second of each caller, `rate_bytes` in bytes of its bodies.
    `groups` are globs of the consumer groups whose offsets a caller may commit.
    """

    name: str
    issuer: str
    audience: tuple[str, ...]
    jwks_url: str = ""
    jwks_file: str = ""
    jwks_cafile: str = ""
    jwks_token_file: str = ""
    algorithms: tuple[str, ...] = ("RS256",)
    azp: tuple[str, ...] = ()
    name_claim: tuple[str, ...] = ("sub",)
    topics_claim: tuple[str, ...] = ()
    topics: tuple[str, ...] = ("*",)
    subjects: Mapping[str, tuple[str, ...]] | None = field(default=None)
    leeway_s: int = LEEWAY_S
    rate: float | None = None
    rate_bytes: float | None = None
    groups: tuple[str, ...] = ()

    def scope_of(self, name: str) -> str:
        """Return the scope of the keys of a caller.

        No other caller has it: names of static callers and of issuers have no colon, so that the scope of a static
        caller has none, and the first two colons end the name of the issuer.
        """
        return f"issuer:{self.name}:{name}"

    @property
    def configuration_url(self) -> str:
        """Where the issuer has its OpenID configuration (OpenID Connect Discovery 1.0, section 4.1)."""
        return f"{self.issuer.removesuffix('/')}/.well-known/openid-configuration"

    @property
    def known_scopes(self) -> tuple[str, ...]:
        """The scopes of the callers that the rule names without a glob."""
        return tuple(self.scope_of(name) for name in self.subjects or () if not _GLOB & set(name))


def issuer_rule(table: Table, folder: Path) -> IssuerRule:
    """Make the rule of a table without faults; files are relative to the folder of the rules."""
    files = {name: str(folder / table[name]) for name in _FILES if name in table}
    subjects = table.get("subjects")
    return IssuerRule(
        name=table["name"],
        issuer=table["issuer"],
        audience=tuple(_listed(table["audience"])),
        jwks_url=table.get("jwks_url", ""),
        algorithms=tuple(table.get("algorithms", ["RS256"])),
        azp=tuple(_listed(table.get("azp", []))),
        name_claim=claim_path(table.get("name_claim", "sub")),
        topics_claim=claim_path(table["topics_claim"]) if "topics_claim" in table else (),
        topics=tuple(table.get("topics", ["*"])),
        subjects=None
        if subjects is None
        else MappingProxyType({name: tuple(topics) for name, topics in subjects.items()}),
        leeway_s=table.get("leeway_s", LEEWAY_S),
        rate=table.get("rate"),
        rate_bytes=table.get("rate_bytes"),
        groups=tuple(table.get("groups", [])),
        **files,
    )


def claim_path(name: str) -> tuple[str, ...]:
    """Return the names in the path of a claim: a JSON pointer if it begins with a slash, else a claim of its own.

    Raises ValueError with what would be right.
    """
    return pointer_steps(name) if name.startswith("/") else (name,)


def _listed(value: Any) -> list[Any]:
    """Return a list as it is, a single value as a list."""
    return value if isinstance(value, list) else [value]


# ----------------------------------------------------------------------------------------------------- mistakes

_FILES: Final = ("jwks_file", "jwks_cafile", "jwks_token_file")
_SETTINGS: Final = (
    "name",
    "issuer",
    "audience",
    "jwks_url",
    *_FILES,
    "algorithms",
    "azp",
    "name_claim",
    "topics_claim",
    "topics",
    "subjects",
    "groups",
    "leeway_s",
    "rate",
    "rate_bytes",
)
_WORD: Final = re.compile(r"[^\x00-\x1f\x7f]{1,1000}")


def issuer_faults(table: Table, before: Sequence[Table]) -> Faults:
    """Find the mistakes of an `[[issuers]]` table after those `before` it: the name concerned, and the remedy."""
    yield from unknown_faults(table, _SETTINGS)
    yield from name_faults(
        table, before, "another issuer has it, and with it the scopes of its callers: write a different one"
    )
    if not _is_word(table.get("issuer")):
        yield "issuer", 'write what the tokens have as `iss`, as in issuer = "https://id.example.com/realms/shop"'
    elif any(table["issuer"] == other.get("issuer") for other in before):
        yield "issuer", "another table has it: write one table for each issuer"
    if not _are_words(table.get("audience")):
        yield "audience", 'write what the tokens have in `aud`, as in audience = "fencepost", or a list'
    if not _are_words(table.get("azp", "-")):
        yield "azp", "write the clients whose tokens are taken, a name or a list, or leave it out"
    yield from _key_faults(table)
    yield from _token_faults(table)
    yield from _topic_faults(table)
    yield from group_faults(table)
    yield from rate_faults(table)


def _key_faults(table: Table) -> Faults:
    """Find the mistakes about where the keys are."""
    if "jwks_url" in table and "jwks_file" in table:
        yield "jwks_url", "write where the issuer's keys are: jwks_url or jwks_file, one of them"
    if not {"jwks_url", "jwks_file"} & set(table) and not _has_configuration(table.get("issuer")):
        yield "jwks_url", "write where the keys are, or jwks_file: only an issuer https://host/path can name the place"
    if "jwks_url" in table and not is_safe_url(table["jwks_url"]):
        yield "jwks_url", "write https://host/path, or http:// with an address of this machine, without a password"
    for name in _FILES:
        if name in table and not _is_word(table[name]):
            yield name, "write the path of a file, or leave it out"
    for name in ("jwks_cafile", "jwks_token_file"):
        if name in table and "jwks_file" in table and "jwks_url" not in table:
            yield name, "means nothing with jwks_file: leave it out"


def _token_faults(table: Table) -> Faults:
    """Find the mistakes about what a token must have."""
    algorithms = table.get("algorithms", ["RS256"])
    if not isinstance(algorithms, list) or not algorithms or any(name not in ALGORITHMS for name in algorithms):
        yield "algorithms", _ALGORITHM_REMEDY
    for name in ("name_claim", "topics_claim"):
        claim = table.get(name, "sub")
        try:
            if not _is_word(claim):
                raise ValueError(
                    'write the name of a claim, or a JSON pointer, as in "/resource_access/fencepost/roles"'
                )
            claim_path(claim)
        except ValueError as error:
            yield name, str(error)
    leeway_s = table.get("leeway_s", LEEWAY_S)
    if isinstance(leeway_s, bool) or not isinstance(leeway_s, int) or not 0 <= leeway_s <= LEEWAY_MOST_S:
        yield "leeway_s", f"write seconds, from 0 to {LEEWAY_MOST_S}"


def _topic_faults(table: Table) -> Faults:
    """Find the mistakes about the topics of callers."""
    if not _are_globs(table.get("topics", ["*"])):
        yield "topics", 'write names or globs, as in topics = ["orders.*"]'
    subjects = table.get("subjects", {"-": ["*"]})
    if not isinstance(subjects, dict) or not subjects or not all(map(_are_globs, subjects.values())):
        yield (
            "subjects",
            'write the topics of each caller, as in subjects = { "system:serviceaccount:shop:*" = ["orders.*"] }',
        )


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


def _are_words(value: Any) -> bool:
    return bool(_listed(value)) and all(map(_is_word, _listed(value)))


def _are_globs(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_word, value))


def _has_configuration(issuer: Any) -> bool:
    """Whether an OpenID configuration can be below the issuer: it is a URL without a query."""
    return is_safe_url(issuer) and "?" not in issuer


def is_safe_url(url: Any) -> bool:
    """Whether nobody on the way can change what the URL returns: who can, chooses the keys."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return False
    if not host or port == 0 or "@" in parts.netloc or parts.fragment or not url.isprintable() or " " in url:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
