"""Tests how bodies are decoded: in pieces, whatever parts they come in, and never beyond their bounds."""

import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable

import pytest

from service.core.problems import INVALID_ENCODING, TOO_LARGE, UNSUPPORTED_ENCODING, Problem
from service.http import encodings as module
from service.http.encodings import PIECE_BYTES, Decoder, coding_of, decode
from tests.compression import zstd

ENCODERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}
# JSON as events have it, and noise that no coding makes smaller.
TEXT = b"".join(b'{"topic":"orders","value":%d,"idempotency_key":"k%d"}\n' % (n, n * n) for n in range(5_000))
NOISE = random.Random(1).randbytes(200_000)

each_coding = pytest.mark.parametrize("coding", ENCODERS)


def decoded(coding: str, *parts: bytes, most: int | None = None) -> bytes:
    decoder = Decoder(coding, most)
    pieces: list[bytes] = []
    for part in parts:
        decoder.feed(part)
        while (piece := decoder.next()) is not None:
            assert len(piece) <= max(PIECE_BYTES, 0 if coding else len(part))
            pieces.append(piece)
    decoder.end()
    return b"".join(pieces)


def cut(body: bytes, size: int) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


def refused(coding: str, *parts: bytes, most: int | None = None) -> Problem:
    with pytest.raises(Problem) as caught:
        decoded(coding, *parts, most=most)
    return caught.value


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        (None, ""),
        ("", ""),
        ("identity", ""),
        (" Identity ", ""),
        ("gzip", "gzip"),
        ("GZip", "gzip"),
        ("x-gzip", "gzip"),
        ("deflate", "deflate"),
        (" zstd\t", "zstd"),
    ],
)
def test_codings(header: str | None, coding: str) -> None:
    assert coding_of({} if header is None else {b"content-encoding": header}) == coding


@pytest.mark.parametrize("header", ["br", "gzip, gzip", "identity, gzip", "gzip,", "aws-chunked", "x-zstd", "*"])
def test_unknown_codings_and_several_are_refused(header: str) -> None:
    with pytest.raises(Problem) as caught:
        coding_of({b"content-encoding": header})
    assert caught.value.kind is UNSUPPORTED_ENCODING


@each_coding
@pytest.mark.parametrize("body", [b"", b"{}", TEXT, NOISE, b"x" * PIECE_BYTES, b"x" * (PIECE_BYTES + 1)])
def test_a_body_is_decoded_in_whatever_parts_it_comes(coding: str, body: bytes) -> None:
    coded = ENCODERS[coding](body)
    for size in (1_000_000, 1_000, 7):
        assert decoded(coding, *cut(coded, size)) == body
    if len(coded) < 1_000:
        assert decoded(coding, *cut(coded, 1), b"", b"") == body


def test_a_body_without_a_coding_is_as_it_came() -> None:
    assert decoded("", b"ab", b"", b"c") == b"abc"
    assert decoded("") == b""


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_members_follow_each_other(coding: str) -> None:
    """RFC 1952, section 2.2, and RFC 8878, section 3.1: as when files are concatenated."""
    coded = ENCODERS[coding](b"one ") + ENCODERS[coding](b"") + ENCODERS[coding](b"two" * PIECE_BYTES)
    for size in (1_000_000, 10, 1):
        assert decoded(coding, *cut(coded, size)) == b"one " + b"two" * PIECE_BYTES


def test_a_skippable_frame_of_zstd_is_skipped() -> None:
    frame = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    assert decoded("zstd", frame + zstd.compress(b"one") + frame) == b"one"


@each_coding
def test_a_body_that_is_cut_anywhere_is_refused(coding: str) -> None:
    coded = ENCODERS[coding](b'{"topic":"orders","value":1}')
    for end in range(len(coded)):
        problem = refused(coding, coded[:end])
        assert problem.kind is INVALID_ENCODING, end
        assert problem.detail.startswith("Content-Encoding: ")


@each_coding
@pytest.mark.parametrize("garbage", [b"\0", b"\n", b"x", b"garbage behind the data"])
def test_garbage_behind_the_data_is_refused(coding: str, garbage: bytes) -> None:
    coded = ENCODERS[coding](b"{}")
    for parts in ((coded + garbage,), (coded, garbage)):
        assert refused(coding, *parts).kind is INVALID_ENCODING


@each_coding
def test_no_bytes_harm_the_decoder(coding: str) -> None:
    dice, coded = random.Random(2), ENCODERS[coding](TEXT[:2_000])
    problems = []
    for _ in range(500):
        broken = bytearray(coded)
        for _ in range(dice.choice((1, 1, 3))):
            broken[dice.randrange(len(broken))] = dice.randrange(256)
        try:
            decoded(coding, *cut(bytes(broken), 500))
        except Problem as problem:
            problems.append(problem)
    assert {problem.kind for problem in problems} <= {INVALID_ENCODING, TOO_LARGE}
    assert len(problems) > 100


def test_a_checksum_is_checked() -> None:
    for coding, coded in (("gzip", gzip.compress(TEXT)), ("deflate", zlib.compress(TEXT))):
        broken = coded[:-5] + bytes([coded[-5] ^ 1]) + coded[-4:]
        assert refused(coding, broken).kind is INVALID_ENCODING
    summed = bytearray(zstd.compress(TEXT, options={zstd.CompressionParameter.checksum_flag: 1}))
    assert decoded("zstd", bytes(summed)) == TEXT
    summed[-1] ^= 1
    assert refused("zstd", bytes(summed)).kind is INVALID_ENCODING


def test_bare_deflate_is_refused() -> None:
    """RFC 9110, section 8.4.1.2: the coding is the zlib format."""
    bare = zlib.compressobj(wbits=-15)
    assert refused("deflate", bare.compress(b"{}") + bare.flush()).kind is INVALID_ENCODING


@each_coding
def test_a_bomb_costs_no_more_than_the_bounds(coding: str) -> None:
    bomb = ENCODERS[coding](bytes(300_000_000))
    tracemalloc.start()
    try:
        decoder = Decoder(coding, 2_000_000)
        decoder.feed(bomb)
        with pytest.raises(Problem, match=r"at most 2000000|100 times") as caught:
            decode(decoder, [])
        assert caught.value.kind is TOO_LARGE
        assert tracemalloc.get_traced_memory()[1] < len(bomb) + 2_500_000
    finally:
        tracemalloc.stop()


@each_coding
def test_a_stream_may_decode_to_a_hundred_times_its_bytes(coding: str) -> None:
    bomb = ENCODERS[coding](bytes(500_000_000))
    decoder, length = Decoder(coding), 0
    with pytest.raises(Problem, match="100 times") as caught:  # noqa: PT012
        for part in cut(bomb, 1_000):
            decoder.feed(part)
            while (piece := decoder.next()) is not None:
                length += len(piece)
    assert caught.value.kind is TOO_LARGE
    assert length < module.RATIO_FREE_BYTES + 100 * len(bomb) + PIECE_BYTES
    # What compresses as events do is taken, also at any length.
    many = b"".join(b'{"topic":"orders","value":%d,"idempotency_key":"k%d"}\n' % (n, n) for n in range(60_000))
    assert decoded(coding, *cut(ENCODERS[coding](many), 10_000)) == many


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_empty_members_count_too(coding: str) -> None:
    """Each takes microseconds, and few bytes."""
    assert refused(coding, ENCODERS[coding](b"") * 300_000).kind is TOO_LARGE
    assert decoded(coding, ENCODERS[coding](b"") * 200) == b""


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_heartbeats_of_a_stream_never_use_up_its_bounds(coding: str) -> None:
    """Each is a member of its own, and an idle stream has nothing else for days."""

    def beat(times: int, pause_s: float) -> None:
        now = 0.0
        stream = Decoder(coding, now=lambda: now)
        for _ in range(times):
            now += pause_s
            stream.feed(ENCODERS[coding](b"\n"))
            assert b"".join(iter(stream.next, None)) == b"\n"

    beat(5_000, 15.0)
    with pytest.raises(Problem, match="decodes to more than"):
        beat(5_000, 0.0)


def test_a_stream_gets_back_no_more_than_it_has_used() -> None:
    """However long it was idle, a bomb in it costs no more than at its beginning."""
    now = 0.0
    stream = Decoder("zstd", now=lambda: now)
    now = 1e6
    stream.feed(ENCODERS["zstd"](bytes(module.RATIO_FREE_BYTES + 1_000_000)))
    with pytest.raises(Problem, match="decodes to more than"):
        list(iter(stream.next, None))


def test_a_window_of_zstd_beyond_what_decoders_must_take_is_refused() -> None:
    """RFC 9659: 8 MiB. A stream keeps its window while it waits, and may have 2 MiB."""
    for most, window_log, taken in ((10**6, 23, True), (10**6, 24, False), (None, 21, True), (None, 22, False)):
        options = {int(zstd.CompressionParameter.window_log): window_log}
        compressor = zstd.ZstdCompressor(options=options)
        coded = compressor.compress(NOISE) + compressor.compress(NOISE) + compressor.flush()
        if taken:
            assert decoded("zstd", coded, most=most) == NOISE * 2
        else:
            problem = refused("zstd", coded, most=most)
            assert problem.kind is INVALID_ENCODING
            assert f"of more than {8 if most else 2} MiB: compress at a lower level" in problem.detail


def test_the_memory_of_a_decoder_is_counted() -> None:
    decoder = Decoder("zstd")
    assert decoder.held == 0
    coder = zstd.ZstdCompressor()
    coded = coder.compress(NOISE, zstd.ZstdCompressor.FLUSH_BLOCK)
    decoder.feed(coded)
    assert decoder.held == len(coded)
    while decoder.next() is not None:
        pass
    assert decoder.held == len(NOISE)
    for _ in range(20):
        decoder.feed(coder.compress(NOISE, zstd.ZstdCompressor.FLUSH_BLOCK))
        while decoder.next() is not None:
            pass
    assert decoder.held == 2 * 1024 * 1024
    decoder.feed(coder.flush())
    while decoder.next() is not None:
        pass
    assert decoder.held == 0  # between two frames
