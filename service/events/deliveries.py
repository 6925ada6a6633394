"""Makes events from the deliveries of webhook sources: who signed it, its key, its topic, its record key.

The value of the record is the body, byte for byte, of any content type. Only rules with a JSON pointer need JSON.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from service.contract import PREFIX, KeyLocation, Rules, SettingsError, SourceRule
from service.contract.source_rules import INDEX_MOST, pointer_steps
from service.contract.wire.headers import KEY_HEADER, TRACE_HEADER
from service.contract.wire.ids import Header, event_id
from service.core.problems import INVALID_KEY, MISSING_KEY, UNUSABLE_BODY, Problem
from service.events import dead_letters
from service.events.dead_letters import UNUSABLE, DeadLetter
from service.events.event import Event, check_key, event_of, parse_key, parse_traceparent
from service.events.signatures import Headers, Verifier, standard_webhooks_prefix, values
from service.events.strict_json import check_json

CONTENT_TYPE: Final = "content-type"
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,1}")
_SPACE: Final = b" \t\r\n"

_decode_string: Final = msgspec.json.Decoder(str).decode
_Decoder = msgspec.json.Decoder[Any]


class Pointer:
    """A JSON pointer (RFC 6901) that finds a string, a number or a boolean in JSON that is checked already.

    It only scans what it does not lead to: decoding a body as a whole would make up to half a million objects while
    the interpreter is locked.
    """

    def __init__(self, text: str) -> None:
        """Compile a pointer that `pointer_steps` accepts."""
        self.text = text
        self._parts = [_Part(names) for names in _split(pointer_steps(text))]

    def find(self, body: bytes) -> str | None:
        """Return a string's content, or a number or boolean as it is written; None for null, or where nothing is.

        Raises Problem (422) for an object or an array.
        """
        text = body.strip(_SPACE)
        for part in self._parts:
            found = part.find(text)
            if found is None:
                return None
            text = found
        if text[:1] in (b"{", b"["):
            raise Problem(UNUSABLE_BODY, f"body: {self.text} is no string, number or boolean")
        if text.startswith(b'"'):
            return _decode_string(text)
        return None if text == b"null" else text.decode()


def _split(steps: Sequence[str]) -> list[tuple[str, ...]]:
    """Split the steps of a pointer into runs of names, which one scan finds, and single steps that may be an index."""
    runs: list[tuple[str, ...]] = []
    for step in steps:
        if runs and not _is_index(step) and not _is_index(runs[-1][0]):
            runs[-1] += (step,)
        else:
            runs.append((step,))
    return runs


def _is_index(step: str) -> bool:
    return _INDEX.fullmatch(step) is not None and int(step) <= INDEX_MOST


class _Part:
    """Names of members, each in the one before it, or a single name that is also an index in arrays."""

    def __init__(self, names: Sequence[str]) -> None:
        self._depth = len(names)
        self._member = _member_decoder(names)
        self._element = _element_decoder(int(names[0])) if _is_index(names[0]) else None

    def find(self, text: bytes) -> bytes | None:
        """Return the JSON of the member or element in an object or array; None where there is none."""
        if text.startswith(b"{"):
            decoder, depth = self._member, self._depth
        elif text.startswith(b"[") and self._element is not None:
            decoder, depth = self._element, 1
        else:
            return None
        try:
            found = decoder.decode(text)
        except msgspec.ValidationError:  # something else than an object on the way
            return None
        for _ in range(depth):
            found = found.found
            if found is msgspec.UNSET:
                return None
        return bytes(found).strip(_SPACE)


def _member_decoder(names: Sequence[str]) -> _Decoder:
    kind: Any = msgspec.Raw
    for name in reversed(names):
        kind = msgspec.defstruct("Member", [("found", kind | msgspec.UnsetType, msgspec.UNSET)], rename={"found": name})
    return msgspec.json.Decoder(kind)


def _element_decoder(index: int) -> _Decoder:
    names = [*(f"before_{n}" for n in range(index)), "found"]
    fields = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Element", fields, array_like=True))


class Challenge(msgspec.Struct):
    """A sender's question, instead of a delivery, whether the URL is its subscriber's."""

    text: str


class Delivery(NamedTuple):
    """A delivery of a source: its event, or the dead letter of a body that the source's rule cannot use.

    `sent_ms` is when the attempt was signed, ms since the Unix epoch; None if the signature does not tell it.
    """

    event: Event
    sent_ms: int | None


# The headers that have the signed id of a delivery of Standard Webhooks: the same one, in the set that is signed.
_SIGNED_IDS: Final = frozenset({"webhook-id", "svix-id"})


class Source:
    """One source of the rules, ready to read its deliveries."""

    def __init__(self, rule: SourceRule, verifier: Verifier | None) -> None:
        self.rule = rule
        self._verifier = verifier  # None if the rule says that nothing is signed
        self._key = Pointer(rule.key_name) if rule.key_location is KeyLocation.POINTER else None
        self._topic = Pointer(rule.topic_pointer) if rule.topic_pointer else None
        self._record_key = Pointer(rule.record_key) if rule.record_key else None
        self._needs_json = any((self._key, self._topic, self._record_key))
        scheme = "" if rule.signature is None else rule.signature.scheme
        self._is_slack = scheme == "slack"
        self._has_signed_id = scheme == "standard-webhooks" and rule.key_name in _SIGNED_IDS

    def read(self, headers: Headers, body: bytes, now_s: float) -> Delivery | Challenge:
        """Make the event of a delivery, whose signature is checked before all else. `now_s`: seconds since 1970.

        If the rule names a quarantine topic, the event of a body that cannot be used is a dead letter for that topic,
        whose retention is that of the rule. Raises Problem (400, 401, 413, 422).
        """
        sent_s = None if self._verifier is None else self._verifier.check(headers, body, now_s)
        if self._is_slack and (challenge := _challenge_of(body)) is not None:
            return challenge
        try:
            event = self._event_of(headers, body)
        except Problem as problem:
            if not self.rule.quarantine or problem.kind not in UNUSABLE:
                raise
            event = self._dead_letter(headers, body, problem)
        return Delivery(event, None if sent_s is None else 1000 * sent_s)

    def without_key(self, event: Event) -> Event | None:
        """Return a delivery's event under the key that it had while the rule did not find its key; else None.

        So only if the key is in the body: then it is one delivery. Deliveries with other headers may share a body.
        """
        if not self.rule.quarantine or self._key is None:
            return None
        key = _key_of_body(event.value or b"")
        return replace(event, key=key, id=event_id(key, self.rule.scope))

    def _event_of(self, headers: Headers, body: bytes) -> Event:
        """Make the event of a delivery that is signed as the rule says. Raises Problem (400, 413, 422)."""
        if self._needs_json:
            check_json(body)
        key = self._key_of(headers, body)
        record_key = self._record_key.find(body) if self._record_key else None
        return event_of(
            key,
            event_id(key, self.rule.scope),
            self._topic_of(body),
            None if record_key is None else record_key.encode(),
            body,
            self._kept(headers),
            traceparent=parse_traceparent(_joined(headers, TRACE_HEADER)),
        )

    def _dead_letter(self, headers: Headers, body: bytes, problem: Problem) -> DeadLetter:
        """Make the dead letter of a body from which no event can be made. Raises Problem (413).

        Its key is that of the delivery. A delivery without a key has the SHA-256 of its body for one, so that a
        repetition finds the same answer.
        """
        try:
            if self._key is not None:
                check_json(body)
            key = self._key_of(headers, body)
        except Problem:
            key = _key_of_body(body)
        rule = self.rule
        of_body = event_of(
            key,
            event_id(key, rule.scope),
            rule.quarantine,
            None,
            body,
            self._kept(headers),
            traceparent=parse_traceparent(_joined(headers, TRACE_HEADER)),
        )
        return dead_letters.of_body(of_body, problem, rule.scope, rule.key_ttl_s)

    def _key_of(self, headers: Headers, body: bytes) -> str:
        """Find the idempotency key. Raises Problem (400) that names the header or the pointer."""
        if self.rule.key_location is KeyLocation.SHA256:
            return _key_of_body(body)
        if self._key is not None:
            key = self._key.find(body)
            if not key:
                raise Problem(MISSING_KEY, f"body: {self._key.text} has the idempotency key, and nothing is there")
            return check_key(key, f"body: {self._key.text}")
        name = f"{standard_webhooks_prefix(headers)}-id" if self._has_signed_id else self.rule.key_name
        found = values(headers, name)
        if len(found) > 1:
            raise Problem(INVALID_KEY, f"{name}: send it once")
        text = found[0].decode("latin-1").strip(" \t") if found else ""
        if not text:
            raise Problem(MISSING_KEY, f"{name}: this header has the idempotency key, and the delivery lacks it")
        return parse_key(text) if name == KEY_HEADER else check_key(text, name)

    def _topic_of(self, body: bytes) -> str:
        """Choose the topic. Raises Problem (422)."""
        if self._topic is None:
            return self.rule.topic
        value = self._topic.find(body)
        topic = self.rule.topic if value is None else self.rule.topics.get(value, self.rule.topic)
        if not topic:
            what = "nothing is there" if value is None else f"the rules name no topic for {value!r}"
            raise Problem(UNUSABLE_BODY, f"body: {self._topic.text} chooses the topic, and {what}")
        return topic

    def _kept(self, headers: Headers) -> list[Header]:
        """Return the headers of the record: the content type, and those that the rule keeps."""
        names = (CONTENT_TYPE, *self.rule.keep_headers)
        contents = ((name, values(headers, name)) for name in names)
        return [(name, b", ".join(found)) for name, found in contents if found]


def _key_of_body(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


_TYPE: Final = Pointer("/type")
_CHALLENGE: Final = Pointer("/challenge")


def _challenge_of(body: bytes) -> Challenge | None:
    """Read the challenge by which Slack verifies a URL before it sends events there; None for other bodies.

    https://docs.slack.dev/reference/events/url_verification
    """
    if b"url_verification" not in body:
        return None
    try:
        check_json(body)
        text = _CHALLENGE.find(body) if _TYPE.find(body) == "url_verification" else None
    except Problem:  # a form that mentions it
        return None
    return None if text is None else Challenge(text)


def _joined(headers: Headers, name: str) -> str | None:
    """Join the lines of a header to a list (RFC 9110, section 5.2)."""
    found = values(headers, name)
    return b", ".join(found).decode("latin-1") if found else None


def read_sources(rules: Rules) -> tuple[Source, ...]:
    """Make the sources of the rules, and read their secrets. Raises SettingsError with a line for each mistake."""
    sources, wrong = [], []
    for rule in rules.sources:
        try:
            sources.append(Source(rule, _verifier_of(rule)))
        except SettingsError as error:
            wrong.append(str(error))
    if wrong:
        raise SettingsError("\n".join(wrong))
    return tuple(sources)


def _verifier_of(rule: SourceRule) -> Verifier | None:
    if rule.signature is None:
        return None
    secrets = [_secret(rule.name, file) for file in rule.signature.secret_files]
    try:
        return Verifier(rule.signature, secrets)
    except ValueError as error:
        files: Sequence[str] = rule.signature.secret_files
        raise SettingsError(f"{PREFIX}RULES: source {rule.name}: {' or '.join(files)}: {error}") from None


def _secret(source: str, file: str) -> str:
    """Read a secret, without a final line break. Raises SettingsError."""
    try:
        secret = Path(file).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8"
        raise SettingsError(
            f"{PREFIX}RULES: source {source}: {file} cannot be read ({why}): name a file that has the secret"
        ) from None
    if not secret.strip():
        raise SettingsError(f"{PREFIX}RULES: source {source}: {file} is empty: put the secret into it")
    return secret
