# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""What is written of each event, as text: `service.contract.wire` and `service.http.responses` say the same in Python, byte for byte.

`there` is where it is (service.claims.states.Delivered). tests/unit/native/test_texts.py holds the two to each other.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memcpy

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef enum:
    NUMBER_MAX = 20  # characters of a number of 64 bits
    # Most that is written of one event beside ids, topic and latency: six numbers, and the words around them.
    WORDS_MAX = 240

cdef const char* HEX = b"0123456789abcdef"


cdef inline char* _put(char* to, const char* text, Py_ssize_t size) noexcept:
    memcpy(to, text, size)
    return to + size


cdef inline char* _hex(char* to, bytes content) noexcept:
    cdef const unsigned char* at = <const unsigned char*> PyBytes_AS_STRING(content)
    cdef Py_ssize_t i
    for i in range(PyBytes_GET_SIZE(content)):
        to[2 * i] = HEX[at[i] >> 4]
        to[2 * i + 1] = HEX[at[i] & 15]
    return to + 2 * PyBytes_GET_SIZE(content)


cdef inline char* _number(char* to, long long number) noexcept:
    cdef char digits[NUMBER_MAX]
    cdef int n = 0
    cdef unsigned long long rest
    if number < 0:
        to[0] = c'-'
        to += 1
        rest = 0 - <unsigned long long> number
    else:
        rest = <unsigned long long> number
    while True:
        digits[n] = <char> (c'0' + rest % 10)
        n += 1
        rest //= 10
        if not rest:
            break
    while n:
        n -= 1
        to[0] = digits[n]
        to += 1
    return to


cdef inline bytes _room(Py_ssize_t size):
    return PyBytes_FromStringAndSize(NULL, size)


cdef bytes _cut(bytes content, const char* end):
    return content[: end - PyBytes_AS_STRING(content)]


cdef inline char* _asked(char* to, bytes id, bytes fp, long long at) noexcept:
    """`{"id":…,"fp":…,"at":…`"""
    to = _put(to, b'{"id":"', 7)
    to = _hex(to, id)
    to = _put(to, b'","fp":"', 8)
    to = _hex(to, fp)
    to = _put(to, b'","at":', 7)
    return _number(to, at)


cdef char* _where(char* to, const char* topic, Py_ssize_t size, there) except NULL:
    """`,"topic":…,"partition":…,"offset":…`"""
    to = _put(to, b',"topic":"', 10)
    to = _put(to, topic, size)
    to = _put(to, b'","partition":', 14)
    to = _number(to, there.partition)
    to = _put(to, b',"offset":', 10)
    return _number(to, there.offset)


cdef char* _place(char* to, bytes id, const char* topic, Py_ssize_t size, there) except NULL:
    """`"id":…,"topic":…,"partition":…,"offset":…,"timestamp":…`"""
    to = _put(to, b'"id":"', 6)
    to = _hex(to, id)
    to = _put(to, b'"', 1)
    to = _where(to, topic, size, there)
    to = _put(to, b',"timestamp":', 13)
    return _number(to, there.ts)


def stamp(bytes id not None, bytes fp not None, long long accepted_at, str writer not None):
    """As wire.encode_stamp."""
    cdef Py_ssize_t size
    cdef const char* rest = PyUnicode_AsUTF8AndSize(writer, &size)
    cdef bytes content = _room(WORDS_MAX + 2 * (PyBytes_GET_SIZE(id) + PyBytes_GET_SIZE(fp)) + size)
    cdef char* to = _put(PyBytes_AS_STRING(content), b"1;", 2)
    to = _hex(to, id)
    to = _put(to, b";", 1)
    to = _hex(to, fp)
    to = _put(to, b";", 1)
    to = _number(to, accepted_at)
    to = _put(to, b";", 1)
    to = _put(to, rest, size)
    return _cut(content, to)


def place(bytes id not None, there):
    """As rendering.render_place."""
    cdef Py_ssize_t size
    cdef const char* topic = PyUnicode_AsUTF8AndSize(there.topic, &size)
    cdef bytes content = _room(WORDS_MAX + size + 2 * len(id))
    cdef char* to = _put(PyBytes_AS_STRING(content), b"{", 1)
    to = _place(to, id, topic, size, there)
    to = _put(to, b"}", 1)
    return _cut(content, to)


def results(places, bint replayed):
    """As rendering.render_result of each, a list of text: `places` holds (id, there)."""
    cdef list told = []
    cdef bytes id, content = b""
    cdef char* start
    cdef char* to
    cdef const char* topic
    cdef Py_ssize_t most, size
    for id, there in places:
        topic = PyUnicode_AsUTF8AndSize(there.topic, &size)
        most = WORDS_MAX + size + 2 * len(id)
        if len(content) < most:
            content = _room(most)
        start = PyBytes_AS_STRING(content)
        to = _put(start, b'{"status":201,', 14)
        to = _place(to, id, topic, size, there)
        to = _put(to, b',"replayed":true}', 17) if replayed else _put(to, b',"replayed":false}', 18)
        told.append(PyUnicode_DecodeUTF8(start, to - start, NULL))
    return told


def entries(places, bytes batch):
    """As wire.encode_entry of each of an atomic `batch` (its id), or of none: a list of text."""
    cdef list told = []
    cdef bytes id, fp, content = b""
    cdef char* start
    cdef char* to
    cdef const char* topic
    cdef Py_ssize_t most, size
    cdef long long i = 0
    for id, there in places:
        fp = there.fp
        topic = PyUnicode_AsUTF8AndSize(there.topic, &size)
        most = WORDS_MAX + size + 2 * (len(id) + len(fp) + (0 if batch is None else len(batch)))
        if len(content) < most:
            content = _room(most)
        start = PyBytes_AS_STRING(content)
        to = _asked(start, id, fp, there.at)
        to = _where(to, topic, size, there)
        to = _put(to, b',"ts":', 6)
        to = _number(to, there.ts)
        if batch is not None:
            to = _put(to, b',"batch":"', 10)
            to = _hex(to, batch)
            to = _put(to, b'","i":', 6)
            to = _number(to, i)
            i += 1
        to = _put(to, b"}", 1)
        told.append(PyUnicode_DecodeUTF8(start, to - start, NULL))
    return told


def answers(places, long long at, bint replayed, str latency_ms not None):
    """As wire.encode_answer of each that was answered 201: a list of text."""
    cdef list told = []
    cdef bytes id, fp, content = b""
    cdef char* start
    cdef char* to
    cdef const char* topic
    cdef const char* latency
    cdef Py_ssize_t most, size, latency_size
    latency = PyUnicode_AsUTF8AndSize(latency_ms, &latency_size)
    for id, there in places:
        fp = there.fp
        topic = PyUnicode_AsUTF8AndSize(there.topic, &size)
        most = WORDS_MAX + size + latency_size + 2 * (len(id) + len(fp))
        if len(content) < most:
            content = _room(most)
        start = PyBytes_AS_STRING(content)
        to = _asked(start, id, fp, at)
        to = _put(to, b',"status":201,"code":null,"replayed":', 37)
        to = _put(to, b"true", 4) if replayed else _put(to, b"false", 5)
        to = _put(to, b',"latency_ms":', 14)
        to = _put(to, latency, latency_size)
        to = _where(to, topic, size, there)
        to = _put(to, b"}", 1)
        told.append(PyUnicode_DecodeUTF8(start, to - start, NULL))
    return told
