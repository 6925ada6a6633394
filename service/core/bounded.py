"""A cache that is bounded by the number and the bytes of its entries: the entry that was unused for longest leaves."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Bounded(Generic[T]):
    """A cache of at most `count_max` entries and `bytes_max` bytes."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._entries: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> T | None:
        """Return an entry, None if there is none."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, entry: T, size: int) -> None:
        """Keep an entry of `size` bytes, in place of an earlier one of its key. One beyond the bound is not kept."""
        self.drop(key)
        if size > self._bytes_max:
            return
        self._entries[key] = entry, size
        self.bytes += size
        while len(self._entries) > self._count_max or self.bytes > self._bytes_max:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed

    def drop(self, key: Hashable) -> None:
        """Forget an entry, if there is one."""
        _, size = self._entries.pop(key, (None, 0))
        self.bytes -= size
