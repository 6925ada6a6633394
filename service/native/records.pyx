# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Record batches (magic 2, KIP-98) as aiokafka's own builder makes them, and the hash that chooses a key's partition.

tests/unit/test_native_records.py holds each byte to aiokafka's.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef enum:
    HEAD = 61  # bytes of a batch before its records
    AFTER_LENGTH = 12  # where that begins what the batch's length counts
    MAGIC_AT = 16
    CRC_AT = 17
    ATTRIBUTES_AT = 21  # from here on the checksum counts
    TRANSACTIONAL = 0x10
    NO_LEADER_EPOCH = -1
    VARINT_MAX = 10
    ROOM = 16 * 1024  # of a batch, to begin with


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
    """One batch; the arguments are those of aiokafka's DefaultRecordBatchBuilder, and how to compress and to checksum."""

    cdef char* buffer
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
        self.buffer = <char*> malloc(self.room)
        if self.buffer == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.buffer)

    def append(self, long long timestamp, bytes key, bytes value, list headers not None):
        """Append a record; False where there is no room for it. An empty batch takes any."""
        cdef Py_ssize_t length, whole, size
        cdef const char* name
        cdef bytes content
        cdef char* to
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
        to = _varint(self.buffer + self.size, length)
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
        cdef char* grown = <char*> realloc(self.buffer, room)
        if grown == NULL:
            raise MemoryError
        self.buffer, self.room = grown, room
        return 0

    def build(self):
        """The whole batch; compressed only where that makes it smaller."""
        cdef bytes content, packed
        cdef char* to
        cdef Py_ssize_t size
        cdef int codec = 0
        cdef unsigned int crc
        content = None
        if self.codec:
            content = self.compress(PyBytes_FromStringAndSize(self.buffer + HEAD, self.size - HEAD))
            if len(content) < self.size - HEAD:
                codec = self.codec
            else:
                content = None
        size = self.size if content is None else HEAD + len(content)
        packed = PyBytes_FromStringAndSize(NULL, size)
        to = PyBytes_AS_STRING(packed)
        if content is None:
            memcpy(to + HEAD, self.buffer + HEAD, size - HEAD)
        else:
            memcpy(to + HEAD, PyBytes_AS_STRING(content), size - HEAD)
        _big_endian(to, 0, 8)  # the base offset is the broker's
        _big_endian(to + 8, size - AFTER_LENGTH, 4)
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
        crc = self.crc32c(memoryview(packed)[ATTRIBUTES_AT:])
        _big_endian(to + CRC_AT, crc, 4)
        return packed


def murmur2(bytes content not None):
    """The hash by which Java clients choose a partition (org.apache.kafka.common.utils.Utils), as 32 unsigned bits."""
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
