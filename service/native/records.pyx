# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Builds record batches (magic 2, KIP-98) as aiokafka's own builder does, and hashes keys to choose their partition.

tests/unit/native/test_records.py compares the bytes with aiokafka's.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.string cimport memcpy

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    int _PyBytes_Resize(PyObject** content, Py_ssize_t size) except -1

cdef enum:
    HEAD = 61  # bytes of a batch before its records
    AFTER_LENGTH = 12  # offset from which the batch's length counts
    MAGIC_AT = 16
    CRC_AT = 17
    ATTRIBUTES_AT = 21  # offset from which the checksum counts
    TRANSACTIONAL = 0x10
    NO_LEADER_EPOCH = -1
    VARINT_MAX = 10
    ROOM = 16 * 1024  # first buffer of a batch, in bytes


cdef inline unsigned long long _zigzag(long long number) noexcept:
    return (<unsigned long long> number << 1) ^ <unsigned long long> (number >> 63)


cdef inline int _size_of(long long number) noexcept:
    cdef unsigned long long rest = _zigzag(number)
    cdef int size = 1
    while rest > 0x7f:
        rest >>= 7
        size += 1
    return size


cdef inline char* _varint(char* to, long long number) noexcept:
    cdef unsigned long long rest = _zigzag(number)
    while rest > 0x7f:
        to[0] = <char> (0x80 | (rest & 0x7f))
        rest >>= 7
        to += 1
    to[0] = <char> rest
    return to + 1


cdef inline char* _counted(char* to, const char* content, Py_ssize_t size) noexcept:
    to = _varint(to, size)
    memcpy(to, content, size)
    return to + size


cdef inline char* _optional(char* to, bytes content) noexcept:
    if content is None:
        return _varint(to, -1)
    return _counted(to, PyBytes_AS_STRING(content), PyBytes_GET_SIZE(content))


cdef inline void _big_endian(char* to, long long number, int size) noexcept:
    while size:
        size -= 1
        to[size] = <char> number
        number >>= 8


cdef class BatchBuilder:
    """Builds one batch. Takes the arguments of aiokafka's DefaultRecordBatchBuilder, a compressor and a checksum."""

    cdef bytes content  # the written part, in `room` bytes; not shared before it is complete
    cdef Py_ssize_t size, room, most
    cdef int codec, count
    cdef bint transactional
    cdef long long producer_id, first_timestamp, max_timestamp
    cdef int epoch, sequence
    cdef object compress, crc32c

    def __cinit__(
        self, int codec, bint transactional, long long producer_id, int epoch, int sequence, Py_ssize_t most, compress,
        crc32c
    ):
        self.codec, self.transactional, self.producer_id = codec, transactional, producer_id
        self.epoch, self.sequence, self.most = epoch, sequence, most
        self.compress, self.crc32c = compress, crc32c
        self.count = 0
        self.first_timestamp = self.max_timestamp = 0
        self.room, self.size = ROOM, HEAD
        self.content = PyBytes_FromStringAndSize(NULL, self.room)

    def append(self, long long timestamp, bytes key, bytes value, list headers not None):
        """Append a record; False if the batch is full. An empty batch takes any record."""
        cdef Py_ssize_t length, whole, size
        cdef const char* name
        cdef bytes content
        cdef char* to
        if self.content is None:
            raise ValueError("it is built already")
        if not self.count:
            self.first_timestamp = self.max_timestamp = timestamp
        length = 1 + _size_of(timestamp - self.first_timestamp) + _size_of(self.count) + _size_of(len(headers))
        length += 1 if key is None else _size_of(len(key)) + len(key)
        length += 1 if value is None else _size_of(len(value)) + len(value)
        for text, content in headers:
            PyUnicode_AsUTF8AndSize(text, &size)
            length += _size_of(size) + size + _size_of(len(content)) + len(content)
        whole = _size_of(length) + length
        if self.count and self.size + whole > self.most:
            return False
        if self.size + whole > self.room:
            self._grow(self.size + whole)
        if timestamp > self.max_timestamp:
            self.max_timestamp = timestamp
        to = _varint(PyBytes_AS_STRING(self.content) + self.size, length)
        to[0] = 0  # a record has no attributes
        to = _varint(to + 1, timestamp - self.first_timestamp)
        to = _varint(to, self.count)
        to = _optional(to, key)
        to = _optional(to, value)
        to = _varint(to, len(headers))
        for text, content in headers:
            name = PyUnicode_AsUTF8AndSize(text, &size)
            to = _counted(to, name, size)
            to = _optional(to, content)
        self.size += whole
        self.count += 1
        return True

    cdef int _grow(self, Py_ssize_t least) except -1:
        cdef Py_ssize_t room = max(2 * self.room, least)
        cdef bytes grown = PyBytes_FromStringAndSize(NULL, room)
        memcpy(PyBytes_AS_STRING(grown), PyBytes_AS_STRING(self.content), self.size)
        self.content, self.room = grown, room
        return 0

    def build(self):
        """Complete and return the batch, once; compressed only if that makes it smaller."""
        cdef bytes packed, whole
        cdef PyObject* shrunk
        cdef char* to
        cdef int codec = 0
        if self.content is None:
            raise ValueError("it is built already")
        if self.codec:
            packed = self.compress(PyBytes_FromStringAndSize(PyBytes_AS_STRING(self.content) + HEAD, self.size - HEAD))
            if len(packed) < self.size - HEAD:
                codec = self.codec
                self.size = HEAD + len(packed)
                self.content = PyBytes_FromStringAndSize(NULL, self.size)
                memcpy(PyBytes_AS_STRING(self.content) + HEAD, PyBytes_AS_STRING(packed), len(packed))
        # A batch may have a megabyte: the buffer is shortened instead of copied. This is the only reference to it.
        shrunk = <PyObject*> self.content
        Py_INCREF(self.content)
        self.content = None
        _PyBytes_Resize(&shrunk, self.size)
        whole = <bytes> shrunk
        Py_DECREF(whole)
        to = PyBytes_AS_STRING(whole)
        _big_endian(to, 0, 8)  # the broker sets the base offset
        _big_endian(to + 8, self.size - AFTER_LENGTH, 4)
        _big_endian(to + 12, NO_LEADER_EPOCH, 4)
        to[MAGIC_AT] = 2
        _big_endian(to + ATTRIBUTES_AT, codec | (TRANSACTIONAL if self.transactional else 0), 2)
        _big_endian(to + 23, self.count - 1 if self.count else 0, 4)
        _big_endian(to + 27, self.first_timestamp, 8)
        _big_endian(to + 35, self.max_timestamp, 8)
        _big_endian(to + 43, self.producer_id, 8)
        _big_endian(to + 51, self.epoch, 2)
        _big_endian(to + 53, self.sequence, 4)
        _big_endian(to + 57, self.count, 4)
        _big_endian(to + CRC_AT, self.crc32c(memoryview(whole)[ATTRIBUTES_AT:]), 4)
        return whole


def murmur2(bytes content not None):
    """Hash a key as Java clients do to choose a partition (org.apache.kafka.common.utils.Utils); 32 bits, unsigned."""
    cdef const unsigned char* at = <const unsigned char*> PyBytes_AS_STRING(content)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(content), i
    cdef unsigned int m = 0x5bd1e995, k
    cdef unsigned int h = <unsigned int> 0x9747b28c ^ <unsigned int> size
    for i in range(size // 4):
        k = at[4 * i] | (at[4 * i + 1] << 8) | (at[4 * i + 2] << 16) | (<unsigned int> at[4 * i + 3] << 24)
        k *= m
        k ^= k >> 24
        k *= m
        h *= m
        h ^= k
    i = size & ~3
    if size & 3 == 3:
        h ^= <unsigned int> at[i + 2] << 16
    if size & 3 >= 2:
        h ^= <unsigned int> at[i + 1] << 8
    if size & 3:
        h ^= at[i]
        h *= m
    h ^= h >> 13
    h *= m
    h ^= h >> 15
    return h
