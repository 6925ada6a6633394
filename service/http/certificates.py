"""The names that a client's certificate has, in the form in which the rules write them."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

Names = frozenset[str]

# Of a connection without a client's certificate.
NONE: Final[Names] = frozenset()
SCOPE_KEY: Final = "fencepost.certificate"
"""Where a scope of ASGI has the Names of its connection's certificate; absent without one."""

# The short names of the attributes of a subject (RFC 4514, section 3), by OpenSSL's long names.
_SHORT: Final = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "streetAddress": "street",
    "userId": "UID",
}
# The kinds of alternative names that may name a caller, by Python's names for them. An address names a machine.
_KINDS: Final = {"DNS": "dns", "URI": "uri", "email": "email"}
# Characters of a value that are escaped (RFC 4514, section 2.4).
_SPECIAL: Final = re.compile(r'[,+"\\<>;]|^[ #]| $')


def names_of(certificate: Any) -> Names:
    """Return the names of a verified certificate, as `SSLSocket.getpeercert` describes it."""
    if not certificate:
        return NONE
    return frozenset(_names(certificate.get("subject", ()), certificate.get("subjectAltName", ())))


def _names(subject: Iterable[Any], alternatives: Iterable[tuple[str, str]]) -> Iterator[str]:
    if text := subject_of(subject):
        yield f"subject:{text}"
    for kind, name in alternatives:
        if kind in _KINDS:
            yield f"{_KINDS[kind]}:{name}"


def subject_of(subject: Iterable[Iterable[tuple[str, str]]]) -> str:
    """Write a subject as RFC 4514 does, the last of its parts first, as `openssl x509 -nameopt RFC2253` prints it."""
    parts = [
        "+".join(f"{_SHORT.get(name, name)}={_SPECIAL.sub(_escaped, value)}" for name, value in part)
        for part in subject
    ]
    return ",".join(reversed(parts))


def _escaped(found: re.Match[str]) -> str:
    return f"\\{found[0]}"
