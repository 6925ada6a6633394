"""The names that a client's certificate has, in the form in which the rules write them, and its expiry."""

import math
import re
import ssl
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from service.core.problems import UNAUTHORIZED, Problem


class Names(frozenset[str]):
    """The names of a certificate, and when it expires: seconds since the Unix epoch.

    TLS looks at the expiry in a full handshake only: a connection, and each session that is resumed, may outlive it.
    """

    expires_s = math.inf

    def check_validity(self) -> None:
        """Raise Problem (401) if the certificate has expired."""
        if time.time() >= self.expires_s:
            raise Problem(UNAUTHORIZED, "certificate: it has expired: open a connection with a new one")


# Of a connection without a client's certificate.
NO_CERTIFICATE: Final = Names()
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
    """Return the names and the expiry of a verified certificate, as `SSLSocket.getpeercert` describes it."""
    if not certificate:
        return NO_CERTIFICATE
    names = Names(_names(certificate.get("subject", ()), certificate.get("subjectAltName", ())))
    if "notAfter" in certificate:
        names.expires_s = ssl.cert_time_to_seconds(certificate["notAfter"])
    return names


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
