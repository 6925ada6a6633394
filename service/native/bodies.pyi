from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

E = TypeVar("E")

def is_json(raw: bytes) -> bool: ...
def has_more(raw: bytes, name: bytes, most: int) -> bool: ...

class EventReader(Generic[E]):
    def __init__(
        self,
        make: Callable[..., E],
        fingerprint: Callable[[str, int | None, bytes | None, Sequence[tuple[str, bytes]], bytes | None], bytes],
        reserved: frozenset[str],
        trace_header: str,
        event_bytes_max: int,
        entry_bytes: int,
        batch_events_max: int,
    ) -> None: ...
    def event(self, raw: bytes, key: str, scope: str, traceparent: bytes | None) -> E | None: ...
    def member(self, raw: bytes, scope: str, traceparent: bytes | None) -> E | None: ...
    def batch(self, raw: bytes, scope: str, traceparent: bytes | None) -> list[E] | None: ...
