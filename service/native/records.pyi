from collections.abc import Callable

class BatchBuilder:
    def __init__(
        self,
        codec: int,
        transactional: bool,
        producer_id: int,
        epoch: int,
        sequence: int,
        most: int,
        compress: Callable[[bytes], bytes] | None,
        crc32c: Callable[[memoryview], int],
    ) -> None: ...
    def append(
        self, timestamp: int, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]]
    ) -> bool: ...
    def build(self) -> bytes: ...

def murmur2(content: bytes) -> int: ...
