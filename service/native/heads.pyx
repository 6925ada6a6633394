# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Parses a POST that comes in one piece; returns None for an uncommon head, which httptools parses.

The accepted heads are a narrow part of RFC 9112 that every proxy reads in the same way; tests/unit/native/test_heads.py
compares both readers.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeASCII
from libc.string cimport memchr, memcmp

cdef enum:
    LINES_MAX = 256  # as request_reader's bound on head lines
    NAME_MAX = 32  # no header that the service uses has a longer name
    LENGTH_DIGITS_MAX = 7

cdef unsigned char LOWER[256]  # of the characters of a header's name (a token, RFC 9110 section 5.6.2); 0 for others


cdef void _set_lower() noexcept:
    cdef int c
    cdef unsigned char other
    for c in range(256):
        LOWER[c] = 0
    for c in range(c'0', c'9' + 1):
        LOWER[c] = <unsigned char> c
    for c in range(c'a', c'z' + 1):
        LOWER[c] = <unsigned char> c
        LOWER[c - 32] = <unsigned char> c
    for other in b"!#$%&'*+-.^_`|~":
        LOWER[other] = other


_set_lower()

cdef tuple WANTED = (
    b"host", b"content-type", b"content-encoding", b"idempotency-key", b"traceparent", b"prefer", b"authorization",
    b"repeatability-request-id", b"repeatability-first-sent",
)
# A head with one of these, or with a header of CloudEvents, is left to httptools.
cdef tuple OTHERS = (
    b"transfer-encoding", b"expect", b"upgrade", b"http2-settings", b"proxy-connection", b"trailer", b"te",
    b"keep-alive",
)


cdef object _known(const unsigned char* name, Py_ssize_t size, tuple names):
    cdef bytes one
    for one in names:
        if PyBytes_GET_SIZE(one) == size and not memcmp(PyBytes_AS_STRING(one), name, size):
            return one
    return None


cdef bint _is(const unsigned char* name, Py_ssize_t size, const char* word, Py_ssize_t word_size) noexcept:
    return size == word_size and not memcmp(name, word, size)


cdef bint _keeps_alive(const unsigned char* content, Py_ssize_t size) noexcept:
    cdef const char* word = b"keep-alive"
    cdef Py_ssize_t i
    if size != 10:
        return False
    for i in range(size):
        if LOWER[content[i]] != <unsigned char> word[i]:
            return False
    return True


def read_post(bytes data not None):
    """Parse a whole `POST … HTTP/1.1`: (target, the used headers by lower-case name, body), or None."""
    cdef const unsigned char* at = <const unsigned char*> PyBytes_AS_STRING(data)
    cdef const unsigned char* end = at + PyBytes_GET_SIZE(data)
    cdef const unsigned char* start
    cdef const unsigned char* stop
    cdef unsigned char name[NAME_MAX]
    cdef Py_ssize_t size, i, lines = 0
    cdef long length = -1
    if end - at < 16 or memcmp(at, b"POST /", 6):
        return None
    start = at + 5
    at = start
    while at < end and 0x21 <= at[0] <= 0x7e:
        at += 1
    if end - at < 11 or memcmp(at, b" HTTP/1.1\r\n", 11):
        return None
    target = PyBytes_FromStringAndSize(<const char*> start, at - start)
    at += 11
    found = {}
    while True:
        if end - at < 2:
            return None
        if at[0] == c'\r':
            if at[1] != c'\n':
                return None
            at += 2
            break
        lines += 1
        if lines > LINES_MAX:
            return None
        start = at
        while at < end and LOWER[at[0]]:
            if at - start < NAME_MAX:
                name[at - start] = LOWER[at[0]]
            at += 1
        size = at - start
        if not size or at == end or at[0] != c':':
            return None
        at += 1
        while at < end and at[0] == c' ':
            at += 1
        stop = <const unsigned char*> memchr(at, c'\r', end - at)
        if stop == NULL or stop == at or end - stop < 2 or stop[1] != c'\n' or (stop - 1)[0] == c' ':
            return None
        start = at
        while at < stop:
            if not 0x20 <= at[0] <= 0x7e:
                return None
            at += 1
        at = stop + 2
        if size > NAME_MAX:
            continue
        if _is(name, size, b"content-length", 14):
            if length >= 0 or stop - start > LENGTH_DIGITS_MAX:
                return None
            length = 0
            for i in range(stop - start):
                if not c'0' <= start[i] <= c'9':
                    return None
                length = 10 * length + (start[i] - c'0')
            continue
        if _is(name, size, b"connection", 10):
            if not _keeps_alive(start, stop - start):
                return None
            continue
        wanted = _known(name, size, WANTED)
        if wanted is not None:
            if wanted in found:
                return None
            found[wanted] = PyUnicode_DecodeASCII(<const char*> start, stop - start, NULL)
        elif (size > 3 and not memcmp(name, b"ce-", 3)) or _known(name, size, OTHERS) is not None:
            return None
    if length != end - at:
        return None
    return target, found, PyBytes_FromStringAndSize(<const char*> at, length)
