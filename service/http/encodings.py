"""Content codings of bodies (RFC 9110, section 8.4.1): a body is decoded in pieces, within bounds of size and ratio.

A few bytes may decode to gigabytes. The bounds are checked at each piece, so that a body costs no more than they allow.
"""

import sys
import time
import zlib
from collections.abc import Callable
from typing import Final, Protocol

from service.core.problems import INVALID_ENCODING, TOO_LARGE, UNSUPPORTED_ENCODING, Problem
from service.http.headers import CODINGS, UsedHeaders

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# The most bytes of one decoded piece, and of the input of one step, which takes a fraction of a millisecond. The input
# that a member leaves is copied, so that steps much longer than the members would be slow.
PIECE_BYTES: Final = 32 * 1024
STEP_BYTES: Final = 4 * 1024
# A body may decode to RATIO_FREE_BYTES and RATIO_MAX times its own bytes. JSON of equal events has 20 to 50 times them.
RATIO_MAX: Final = 100
RATIO_FREE_BYTES: Final = 1024 * 1024
# Each member (gzip) or frame (zstd) counts as so many more decoded bytes, because also an empty one takes time.
MEMBER_BYTES: Final = 4 * 1024
# What a stream has used of RATIO_FREE_BYTES is given back at this rate. Otherwise a stream of heartbeats alone, each a
# frame of some bytes, would use them up in an hour and a half.
RATIO_REFILL_BYTES_S: Final = 64 * 1024
# The base-2 logarithms of the largest windows: 8 MiB, which RFC 9659 has a zstd decoder take, and no more. A stream
# holds its window while it waits, so that its limit is that of zstd's usual levels: 2 MiB.
_WINDOW_LOG: Final = 23
STREAM_WINDOW_LOG: Final = 21
_ZSTD_TOO_MUCH: Final = "too much memory"  # in libzstd's text of an error, for a window beyond the bound
_LESS: Final = "compress at a lower level, or in smaller frames"
_GZIP, _ZLIB = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS


class _Member(Protocol):
    """The decoder of one member of a body, as of `zlib` and `zstd`."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Zlib:
    """zlib's decoder, which keeps the input that it has not used, as zstd's does."""

    def __init__(self, wbits: int) -> None:
        self._decoder = zlib.decompressobj(wbits)

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._decoder.decompress(self._decoder.unconsumed_tail + data, max_length)


def _new_zstd(window_log: int) -> _Member:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_log})


# By coding: the decoder of a member with a window of 2**n bytes at most, and whether several may follow each other.
_DECODERS: Final[dict[str, tuple[Callable[[int], _Member], bool]]] = {
    "gzip": (lambda _: _Zlib(_GZIP), True),
    "deflate": (lambda _: _Zlib(_ZLIB), False),  # the zlib format (RFC 1950), not bare deflate
    "zstd": (_new_zstd, True),
}


def coding_of(used: UsedHeaders) -> str:
    """Return the content coding of a request; "" without one. Raises Problem (415) for an unknown one, and several."""
    coding = used.get(b"content-encoding", "").strip().lower()
    if coding in ("", "identity"):
        return ""
    coding = coding.removeprefix("x-") if coding == "x-gzip" else coding
    if coding not in _DECODERS:
        raise Problem(UNSUPPORTED_ENCODING, f"Content-Encoding: send one of {', '.join(CODINGS)}, or none")
    return coding


class Decoder:
    """Decodes one body that comes in parts. Without a coding (""), its pieces are those of the parts.

    A body without a bound (`most`) is a stream, whose windows have STREAM_WINDOW_LOG.
    """

    def __init__(self, coding: str, most: int | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._coding = coding
        self._most = most  # bytes of the decoded body; None for any number
        decoders: tuple[Callable[[int], _Member] | None, bool] = _DECODERS.get(coding, (None, False))
        self._new, self._several = decoders
        zstd_log = STREAM_WINDOW_LOG if most is None else _WINDOW_LOG
        self._window_log = zstd_log if coding == "zstd" else _ZLIB
        self._member = None if self._new is None else self._new(self._window_log)  # None between two members
        self._filled = 0  # bytes that the member has decoded
        self._members = 1
        self._part = memoryview(b"")
        self._at = 0  # the first byte of the part that is not decoded
        self._more = False  # the member's decoder may have more without input
        self._coded = 0  # bytes of the input that were decoded so far
        self._decoded = 0  # bytes that were made of them
        self._now = now  # seconds
        self._refilled_at = now()
        self._refilled = 0.0  # bytes of RATIO_FREE_BYTES that a stream has got back

    @property
    def held(self) -> int:
        """The bytes in memory: what is to be decoded, and the member's window, as far as it has been filled."""
        return len(self._part) + min(1 << self._window_log, self._filled)

    def feed(self, part: bytes) -> None:
        """Take the next part of the body, after `next` has returned None."""
        self._part, self._at = memoryview(part), 0
        if self._most is None and self._new is not None:
            self._refill()

    def next(self) -> bytes | None:
        """Return the next decoded piece, which may be empty; None if it needs the next part of the body.

        Raises Problem: 400 for a body that is not in its coding, 413 for one that exceeds its bounds.
        """
        if self._at == len(self._part) and not self._more:
            self._part, self._at = memoryview(b""), 0
            return None
        if self._new is None:
            start, self._at = self._at, min(self._at + PIECE_BYTES, len(self._part))
            return bytes(self._part[start : self._at])
        member = self._member = self._member or self._new_member()
        piece = self._decompress(member)
        self._decoded += len(piece)
        self._filled += len(piece)
        if member.eof:  # its window is no longer needed
            self._member, self._filled = None, 0
        self._check_size()
        return piece

    def _decompress(self, member: _Member) -> bytes:
        data = b"" if self._more else bytes(self._part[self._at : self._at + STEP_BYTES])
        try:
            piece = member.decompress(data, PIECE_BYTES)
        except (zlib.error, zstd.ZstdError) as error:
            if _ZSTD_TOO_MUCH in str(error):
                raise self._malformed(
                    f"needs a window of more than {1 << (self._window_log - 20)} MiB", _LESS
                ) from None
            raise self._malformed("is not in this coding") from None
        self._more = not member.eof and len(piece) == PIECE_BYTES
        used = len(data) - len(member.unused_data)
        self._at += used
        self._coded += used
        return piece

    def _new_member(self) -> _Member:
        if self._new is None or not self._several:
            raise self._malformed("goes on behind the end of its data")
        self._members += 1
        return self._new(self._window_log)

    def _check_size(self) -> None:
        if self._most is not None and self._decoded > self._most:
            raise Problem(TOO_LARGE, f"body: decoded, at most {self._most} bytes are taken")
        if self._excess > RATIO_FREE_BYTES:
            raise Problem(TOO_LARGE, f"body: it decodes to more than {RATIO_MAX} times its size")

    @property
    def _excess(self) -> float:
        """The bytes used of RATIO_FREE_BYTES; less than 0 if the coded bytes would allow more than came of them."""
        return self._decoded + (self._members - 1) * MEMBER_BYTES - RATIO_MAX * self._coded - self._refilled

    def _refill(self) -> None:
        before, self._refilled_at = self._refilled_at, self._now()
        self._refilled += max(0.0, min(self._excess, RATIO_REFILL_BYTES_S * (self._refilled_at - before)))

    def _malformed(self, why: str, remedy: str = "") -> Problem:
        return Problem(
            INVALID_ENCODING, f"Content-Encoding: the body {why}: {remedy or f'send {self._coding} as a whole'}"
        )

    def end(self) -> None:
        """Note that the body has ended, after `next` has returned None. Raises Problem (400) if data is missing."""
        if self._member is not None:
            raise self._malformed("ends before its data does")


def decode(decoder: Decoder, pieces: list[bytes]) -> bytes:
    """Decode the rest of a body that was fed as a whole, behind the first pieces. Raises Problem (400, 413)."""
    while (piece := decoder.next()) is not None:
        pieces.append(piece)
    decoder.end()
    return b"".join(pieces)
