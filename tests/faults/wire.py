"""The part of Kafka's protocol that checker and faults need and no client offers, over one socket to one broker."""

import socket
import struct
from typing import Final, Self

_FETCH: Final = 1
_FETCH_VERSION: Final = 4  # the oldest version that brokers still accept
_INIT_PRODUCER_ID: Final = 22
_INIT_PRODUCER_ID_VERSION: Final = 0
_OFFSET_FETCH: Final = 9
_OFFSET_FETCH_VERSION: Final = 3
_ALTER_CLIENT_QUOTAS: Final = 49
_ALTER_CLIENT_QUOTAS_VERSION: Final = 0
_CLIENT: Final = b"checker"
_FETCH_BYTES: Final = 8 * 1024 * 1024
_ANSWER_S: Final = 10.0
_CONCURRENT_TRANSACTIONS: Final = 51
_COORDINATOR_LOAD_IN_PROGRESS: Final = 14


class Broker:
    """One connection."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), _ANSWER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fetch(self, topic: str, partition: int, offset: int) -> bytes:
        """Fetch record batches from an offset on, read_uncommitted; the last may be cut off."""
        name = topic.encode()
        request = struct.pack(">iiiibi", -1, 0, 1, _FETCH_BYTES, 0, 1)  # a client; read_uncommitted; one topic
        request += struct.pack(f">h{len(name)}sii", len(name), name, 1, partition)
        request += struct.pack(">qi", offset, _FETCH_BYTES)
        answer = self.ask(_FETCH, _FETCH_VERSION, request)
        at = 4 + 4 + 2 + len(name) + 4 + 4  # throttle time, one topic, its name, one partition, its number
        error, _, _, aborted = struct.unpack_from(">hqqi", answer, at)
        assert error == 0, f"{topic}/{partition}: Fetch answered error {error}"
        at += struct.calcsize(">hqqi") + 16 * max(aborted, 0)
        (size,) = struct.unpack_from(">i", answer, at)
        return answer[at + 4 : at + 4 + max(size, 0)]

    def init_producer_id(self, transactional_id: str, timeout_ms: int = 5_000) -> tuple[int, int]:
        """Fence an id's producer; returns the new producer id and epoch. The broker must be its coordinator."""
        name = transactional_id.encode()
        request = struct.pack(f">h{len(name)}si", len(name), name, timeout_ms)
        while True:
            answer = self.ask(_INIT_PRODUCER_ID, _INIT_PRODUCER_ID_VERSION, request)
            _, error, producer_id, epoch = struct.unpack_from(">ihqh", answer)
            if error not in (_CONCURRENT_TRANSACTIONS, _COORDINATOR_LOAD_IN_PROGRESS):
                assert error == 0, f"{transactional_id}: InitProducerId answered error {error}"
                return producer_id, epoch

    def committed_offsets(self, group: str, topic: str, partitions: int) -> dict[int, int]:
        """Fetch a group's offsets in the partitions of a topic; 0 where it has none, nothing if Kafka does not tell.

        The broker must be the group's coordinator.
        """
        of_group, name = group.encode(), topic.encode()
        request = struct.pack(f">h{len(of_group)}s", len(of_group), of_group)
        request += struct.pack(f">ih{len(name)}si", 1, len(name), name, partitions)
        request += struct.pack(f">{partitions}i", *range(partitions))
        answer = self.ask(_OFFSET_FETCH, _OFFSET_FETCH_VERSION, request)
        if struct.unpack_from(">h", answer, len(answer) - 2) != (0,):
            return {}
        at = 4 + 4 + 2 + len(name)  # throttle time, one topic, its name
        (count,) = struct.unpack_from(">i", answer, at)
        at += 4
        found: dict[int, int] = {}
        for _ in range(count):
            number, offset, metadata = struct.unpack_from(">iqh", answer, at)
            at += struct.calcsize(">iqh") + max(metadata, 0) + 2  # the partition's error code
            found[number] = max(0, offset)
        return found

    def limit_producers(self, bytes_per_s: float | None) -> None:
        """Set the quota `producer_byte_rate` of each client id that has none of its own, or remove it (KIP-546)."""
        entity, quota = b"client-id", b"producer_byte_rate"
        request = struct.pack(f">iih{len(entity)}sh", 1, 1, len(entity), entity, -1)  # -1: the default of client ids
        request += struct.pack(f">ih{len(quota)}s", 1, len(quota), quota)
        request += struct.pack(">d??", bytes_per_s or 0.0, bytes_per_s is None, False)  # the last: not only validated
        answer = self.ask(_ALTER_CLIENT_QUOTAS, _ALTER_CLIENT_QUOTAS_VERSION, request)
        _, _, error = struct.unpack_from(">iih", answer)
        assert error == 0, f"AlterClientQuotas answered error {error}"

    def ask(self, api: int, version: int, request: bytes) -> bytes:
        """Send one request and read its response, without their headers."""
        head = struct.pack(f">hhih{len(_CLIENT)}s", api, version, 0, len(_CLIENT), _CLIENT)
        self._socket.sendall(struct.pack(">i", len(head) + len(request)) + head + request)
        return self._read(struct.unpack(">i", self._read(4))[0])[4:]

    def _read(self, count: int) -> bytes:
        read = bytearray()
        while len(read) < count:
            more = self._socket.recv(count - len(read))
            assert more, "the broker closed the connection"
            read += more
        return bytes(read)
