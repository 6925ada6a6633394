"""Verifies the signatures of webhooks: Standard Webhooks, Stripe, GitHub, Shopify, Slack, and plain HMAC.

Each scheme is an HMAC over the bytes of the body as they came, after what the scheme puts before them. Pure functions
of a request; the secrets are read elsewhere.

Standard Webhooks is implemented by its specification: its library takes only bodies in UTF-8, only one secret, only a
tolerance of five minutes by its own clock, and raises other errors than its own for a malformed header. Tests compare
with it.
"""

import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from service.contract import SignatureRule
from service.core.problems import BAD_SIGNATURE, Problem
from service.events.base64_text import decode_base64

# More signatures in one header than any sender has secrets.
SIGNATURES_MAX: Final = 16
# Seconds since 1970 of the years 1970 to 33658.
_SECONDS: Final = re.compile(rb"[0-9]{1,12}")
_HEX: Final = re.compile(rb"(?:[0-9A-Fa-f]{2})+")
# An id that ends so makes the signed text ambiguous, because full stops separate id, timestamp and body.
_AMBIGUOUS_ID: Final = re.compile(rb".*\.[0-9]+", re.DOTALL)

Headers = Sequence[tuple[bytes, bytes]]


class Malformed(Exception):
    """A header that the check of the signature needs is missing or malformed.

    `header` is its name as people write it; `what` says what is wrong with it.
    """

    def __init__(self, header: str, what: str) -> None:
        super().__init__(f"{header}: {what}")


@dataclass(frozen=True, slots=True)
class Signed:
    """The signatures in the headers of a delivery, and the bytes that they sign together with its body.

    `header` is the name of the header that has the signatures. `before` stands before the body in what is signed.
    `timestamp` is in seconds since 1970, None if the scheme signs none.
    """

    header: str
    signatures: Sequence[bytes]
    before: bytes = b""
    timestamp: int | None = None


def values(headers: Headers, name: str) -> list[bytes]:
    """Return the contents of all headers of a name, which is in lower case."""
    wanted = name.encode()
    return [content for each, content in headers if each == wanted]


def _one(headers: Headers, name: str) -> bytes:
    """Return the content of a header that must come once. Raises Malformed."""
    found = values(headers, name.lower())
    if len(found) != 1:
        raise Malformed(name, "send this header once" if found else "the delivery has no such header")
    return found[0].strip(b" \t")


def _digest_of_hex(text: bytes) -> bytes | None:
    return bytes.fromhex(text.decode()) if _HEX.fullmatch(text) else None


_DECODERS: Final = {
    "hex": (_digest_of_hex, "hexadecimal digits"),
    "base64": (decode_base64, "base64 (RFC 4648, section 4)"),
}


def _prefixed(headers: Headers, header: str, prefix: str, encoding: str) -> bytes:
    """Read the one signature of a header: a prefix and an encoded digest. Raises Malformed."""
    decode, of = _DECODERS[encoding]
    text = _one(headers, header)
    digest = decode(text.removeprefix(prefix.encode())) if text.startswith(prefix.encode()) else None
    if not digest:
        raise Malformed(header, f"it is not {f'{prefix} and ' if prefix else ''}{of}")
    return digest


def _plain(headers: Headers, header: str, prefix: str, encoding: str) -> Signed:
    return Signed(header, [_prefixed(headers, header, prefix, encoding)])


def _slack(headers: Headers) -> Signed:
    """Slack's version v0: `v0:timestamp:body`."""
    header = "X-Slack-Signature"
    signature = _prefixed(headers, header, "v0=", "hex")
    at = _one(headers, "X-Slack-Request-Timestamp")
    return Signed(header, [signature], b"v0:%b:" % at, _seconds("X-Slack-Request-Timestamp", at))


def _stripe(headers: Headers) -> Signed:
    """Stripe's `t=timestamp,v1=signature[,v1=signature …]`, over `timestamp.body`; other versions are passed over."""
    header = "Stripe-Signature"
    parts = [part.strip(b" \t").partition(b"=") for part in _one(headers, header).split(b",")]
    at = [text for name, _, text in parts if name == b"t"]
    if len(at) != 1:
        raise Malformed(header, "it does not have t= once")
    digests = [_digest_of_hex(text) for name, _, text in parts if name == b"v1"]
    return Signed(header, _some(header, digests, "v1= and hexadecimal digits"), b"%b." % at[0], _seconds(header, at[0]))


def _standard_webhooks(headers: Headers) -> Signed:
    """Standard Webhooks' `v1,signature[ v1,signature …]`, over `id.timestamp.body`; other versions are passed over.

    https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
    """
    prefix = standard_webhooks_prefix(headers)
    header = f"{prefix}-signature"
    id, at = _one(headers, f"{prefix}-id"), _one(headers, f"{prefix}-timestamp")
    if not id or _AMBIGUOUS_ID.fullmatch(id):
        raise Malformed(f"{prefix}-id", "it is empty, or ends with a full stop and digits, like a timestamp")
    parts = [part.partition(b",") for part in _one(headers, header).split(b" ") if part]
    digests = [decode_base64(text) for version, _, text in parts if version == b"v1"]
    wanted = "v1, and base64 (RFC 4648, section 4)"
    return Signed(header, _some(header, digests, wanted), b"%b.%b." % (id, at), _seconds(f"{prefix}-timestamp", at))


def standard_webhooks_prefix(headers: Headers) -> str:
    """Return how the names of a delivery's headers begin: `webhook`, or `svix` if it has none of those.

    Svix, from which the standard comes, signs alike under names of its own. A delivery with headers of both is verified
    by the standard's: a header of the other set is not signed then.
    """
    names = {name for name, _ in headers}
    is_standard = any(name in names for name in (b"webhook-id", b"webhook-timestamp", b"webhook-signature"))
    return "webhook" if is_standard or b"svix-signature" not in names else "svix"


def _some(header: str, digests: Sequence[bytes | None], wanted: str) -> list[bytes]:
    """Return the digests that could be decoded, of several; there must be one, and not too many. Raises Malformed."""
    if len(digests) > SIGNATURES_MAX:
        raise Malformed(header, f"it has {len(digests)} signatures; at most {SIGNATURES_MAX} are looked at")
    known = [digest for digest in digests if digest]
    if not known:
        raise Malformed(header, f"it does not have {wanted}")
    return known


def _seconds(header: str, text: bytes) -> int:
    if _SECONDS.fullmatch(text) is None:
        raise Malformed(header, "the timestamp is not in seconds since 1970")
    return int(text)


def _key_of_standard_webhooks(secret: str) -> bytes:
    """Decode a secret of Standard Webhooks: base64, usually after `whsec_`. Raises ValueError with what is right."""
    text = secret.removeprefix("whsec_")
    key = decode_base64(f"{text}{'=' * (-len(text) % 4)}".encode())  # some senders leave the padding out
    if not key:
        raise ValueError("write whsec_ and base64, as Standard Webhooks' secrets are")
    return key


_SCHEMES: Final[Mapping[str, Callable[[Headers], Signed]]] = MappingProxyType(
    {
        "standard-webhooks": _standard_webhooks,
        "stripe": _stripe,
        "github": partial(_plain, header="X-Hub-Signature-256", prefix="sha256=", encoding="hex"),
        "shopify": partial(_plain, header="X-Shopify-Hmac-SHA256", prefix="", encoding="base64"),
        "slack": _slack,
    }
)


class Verifier:
    """Verifies the deliveries of one source."""

    def __init__(self, rule: SignatureRule, secrets: Sequence[str]) -> None:
        """Take the texts of the secrets. Raises ValueError with what would be right; the text shows no secret."""
        self._scheme = rule.scheme
        of_text = _key_of_standard_webhooks if rule.scheme == "standard-webhooks" else str.encode
        self._keys = [of_text(secret) for secret in secrets]
        self._algorithm = rule.algorithm
        self._tolerance_s = rule.tolerance_s
        self._read = _SCHEMES.get(rule.scheme) or partial(
            _plain, header=rule.header, prefix=rule.prefix, encoding=rule.encoding
        )

    def check(self, headers: Headers, body: bytes, now_s: float) -> int | None:
        """Check the signature of a delivery at `now_s`, in seconds since 1970.

        Returns the signed timestamp, in seconds since 1970; None for a scheme without one. Raises Problem (401) that
        names the header, the scheme, and whether the timestamp is within the tolerance.
        """
        try:
            signed = self._read(headers)
        except Malformed as error:
            raise Problem(BAD_SIGNATURE, f"{error} (scheme {self._scheme})") from None
        fits = self._fits(signed, body)
        time, is_timely = self._time(signed.timestamp, now_s)
        if fits and is_timely:
            return signed.timestamp
        what = "the signature fits" if fits else "no signature fits the body and the secret"
        raise Problem(BAD_SIGNATURE, f"{signed.header}: {what} (scheme {self._scheme}{time})")

    def _fits(self, signed: Signed, body: bytes) -> bool:
        """Compare each signature with that by each secret, in a time that does not depend on which of them fits."""
        fits = False
        for key in self._keys:
            made = hmac.new(key, signed.before, self._algorithm)
            made.update(body)
            digest = made.digest()
            for signature in signed.signatures:
                fits |= hmac.compare_digest(digest, signature)
        return fits

    def _time(self, timestamp: int | None, now_s: float) -> tuple[str, bool]:
        """Describe the timestamp, and tell whether it is within the tolerance."""
        if timestamp is None:
            return "", True
        age_s = int(now_s) - timestamp
        is_timely = abs(age_s) <= self._tolerance_s
        when = f"{age_s} s old" if age_s >= 0 else f"{-age_s} s ahead"
        return f"; its timestamp is {when}, {'within' if is_timely else 'beyond'} {self._tolerance_s} s", is_timely
