"""Records of the control topic: generations, barriers, and retentions of keys."""

import json
import re
from dataclasses import dataclass
from typing import Final

from service.contract.wire.versions import VERSION, NewerVersion, WireError, check_version

GENERATION_KEY: Final = b"generation"
_BARRIER: Final = re.compile(rb"barrier/([0-9]{1,4})")
_RETENTION: Final = re.compile(rb"retention/([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation record: from its offset on, `store` ("run_id/master_replid") holds the claims. `at` is in ms."""

    store: str
    instance: str
    at: int

    def encode(self) -> bytes:
        """Encode the record as JSON."""
        return json.dumps(
            {"v": VERSION, "store": self.store, "instance": self.instance, "at": self.at}, separators=(",", ":")
        ).encode()

    @classmethod
    def decode(cls, raw: bytes | None) -> "Generation":
        """Decode a generation record. Raises WireError if it is not one of this version, NewerVersion for a later."""
        try:
            body = json.loads(raw or b"")
            check_version(body["v"], (VERSION,), "a generation record")
            return cls(body["store"], body["instance"], body["at"])
        except NewerVersion:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"no generation record: {(raw or b'')[:200]!r} ({error})") from error


def barrier_key(slot: int | str) -> bytes:
    """Encode the key of a barrier in the control topic; compaction keeps one for each slot."""
    return f"barrier/{slot}".encode()


def slot_of_barrier(key: bytes | None) -> int | None:
    """Decode the slot from a barrier's key; None for another key."""
    found = _BARRIER.fullmatch(key or b"")
    return None if found is None else int(found[1])


def retention_key(ttl_s: int) -> bytes:
    """Encode the key of a retention in the control topic, in seconds; compaction keeps each one that was in force."""
    return f"retention/{ttl_s}".encode()


def ttl_of_retention(key: bytes | None) -> int | None:
    """Decode the seconds from the key of a retention; None for another key."""
    found = _RETENTION.fullmatch(key or b"")
    return None if found is None else int(found[1])


def encode_retention(instance: str, at: int) -> bytes:
    """Encode a retention record: from then on keys may be remembered for as long as its key says. `at` is in ms."""
    return json.dumps({"v": VERSION, "retention": True, "instance": instance, "at": at}, separators=(",", ":")).encode()


def encode_barrier(instance: str, nonce: str, at: int) -> bytes:
    """Encode a barrier. A reader that has read it has read all generation records before it. `at` is in ms."""
    return json.dumps(
        {"v": VERSION, "barrier": True, "instance": instance, "nonce": nonce, "at": at}, separators=(",", ":")
    ).encode()
