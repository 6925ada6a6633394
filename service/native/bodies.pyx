# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Parses the bodies of requests: strict JSON in, events out; None for a body that is uncommon or has a fault.

`service.events.event` and `service.events.strict_json` read, refuse and explain those. tests/unit/native/test_bodies.py
holds both readers to the same events.
"""

import hashlib

from cpython.unicode cimport PyUnicode_DecodeASCII, PyUnicode_DecodeUTF8

include "strict_json.pxi"

cdef enum:
    TOPIC_CHARS_MAX = 249
    KEY_CHARS_MAX = 255
    DIGITS_MAX = 15  # of an event's integer, which so stays below 2^53
    NAMES_MAX = 1_000  # names in all open objects of an event that is parsed on the event loop
    HEADERS_MAX = 32  # of an event: each name is compared with all earlier ones
    COPIED_MAX = 32 * 1024  # the longest value that is copied, to hash all fields of a fingerprint in one call

    # Fields of an event, as bits.
    TOPIC = 1
    KEY = 2
    VALUE = 4
    HEADERS = 8
    PARTITION = 16
    TIMESTAMP = 32
    IDEMPOTENCY_KEY = 64


cdef struct Fields:
    int seen  # bits
    bint tombstone
    Slice topic
    Slice key
    Slice value
    Slice idempotency_key
    long long partition  # -1: absent, or null
    long long timestamp


cdef inline void _open(Body* body, bytes raw):
    _begin(body, <const unsigned char*> PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw))


cdef inline bint _key(Body* body, Slice* name) noexcept nogil:
    """Parse the name of a member, without escapes, and the colon."""
    return _string(body, name) and not body.escaped and _one(body, c':')


cdef inline bint _is(Slice* name, const char* word, Py_ssize_t size) noexcept nogil:
    return name.size == size and not memcmp(name.start, word, size)


cdef int _field_of(Slice* name) noexcept nogil:
    """Return the bit of an event's field; 0 for rare fields and all other names."""
    if _is(name, b"topic", 5):
        return TOPIC
    if _is(name, b"key", 3):
        return KEY
    if _is(name, b"value", 5):
        return VALUE
    if _is(name, b"idempotency_key", 15):
        return IDEMPOTENCY_KEY
    if _is(name, b"partition", 9):
        return PARTITION
    if _is(name, b"timestamp", 9):
        return TIMESTAMP
    if _is(name, b"headers", 7):
        return HEADERS
    return 0


cdef bint _text(Body* body, Slice* content) noexcept nogil:
    """Parse a string without escapes, or null."""
    if body.at < body.end and body.at[0] == c'n':
        content.start = NULL
        return _word(body, b"null", 4)
    return _string(body, content) and not body.escaped


cdef bint _whole_number(Body* body, long long* number) noexcept nogil:
    """Parse an integer of 0 or more, or null."""
    cdef const unsigned char* start = body.at
    if body.at < body.end and body.at[0] == c'n':
        return _word(body, b"null", 4)
    if not _digits(body) or body.at - start > DIGITS_MAX or (start[0] == c'0' and body.at - start > 1):
        return False
    number[0] = 0
    while start < body.at:
        number[0] = 10 * number[0] + (start[0] - c'0')
        start += 1
    # A fraction or an exponent may follow.
    return body.at == body.end or not (body.at[0] == c'.' or (body.at[0] | 0x20) == c'e')


cdef bint _fields(Body* body, int depth, Fields* fields, list headers) except -1:
    """Parse an event's fields; its headers are appended to `headers` as (name, content)."""
    cdef Slice name
    cdef int field, after
    fields.seen = 0
    fields.tombstone = False
    fields.key.start = fields.value.start = fields.idempotency_key.start = NULL
    fields.partition = fields.timestamp = -1
    if not _one(body, c'{'):
        return False
    while True:
        if not _key(body, &name):
            return False
        field = _field_of(&name)
        if not field or fields.seen & field:
            return False
        fields.seen |= field
        if field == VALUE:
            fields.value.start = body.at
            if not _value(body, depth + 1):
                return False
            fields.value.size = body.at - fields.value.start
            fields.tombstone = _is(&fields.value, b"null", 4)
        elif field == TOPIC:
            if not _string(body, &fields.topic) or body.escaped:
                return False
        elif field == KEY:
            if not _text(body, &fields.key):
                return False
        elif field == IDEMPOTENCY_KEY:
            if not _text(body, &fields.idempotency_key):
                return False
        elif field == PARTITION:
            if not _whole_number(body, &fields.partition):
                return False
        elif field == TIMESTAMP:
            if not _whole_number(body, &fields.timestamp):
                return False
        elif not _headers(body, headers):
            return False
        after = _after(body, c'}')
        if after != MORE:
            return after == DONE


cdef bint _headers(Body* body, list headers) except -1:
    """Parse the client's own headers, or null."""
    cdef Slice name, content
    cdef int before, after
    if body.at < body.end and body.at[0] == c'n':
        return _word(body, b"null", 4)
    if not _one(body, c'{'):
        return False
    if body.at < body.end and body.at[0] == c'}':
        body.at += 1
        return True
    while True:
        if not _key(body, &name):
            return False
        if not _string(body, &content) or body.escaped or len(headers) == HEADERS_MAX:
            return False
        text = PyUnicode_DecodeUTF8(<const char*> name.start, name.size, NULL)
        for before in range(len(headers)):
            if (<tuple> headers[before])[0] == text:
                return False
        headers.append((text, PyBytes_FromStringAndSize(<const char*> content.start, content.size)))
        after = _after(body, c'}')
        if after != MORE:
            return after == DONE


cdef bint _is_topic(Slice* topic) noexcept:
    cdef Py_ssize_t i
    cdef unsigned char c
    if not 0 < topic.size <= TOPIC_CHARS_MAX or _is(topic, b".", 1) or _is(topic, b"..", 2):
        return False
    for i in range(topic.size):
        c = topic.start[i]
        if not (c'0' <= c <= c'9' or c'a' <= (c | 0x20) <= c'z' or c == c'.' or c == c'_' or c == c'-'):
            return False
    return True


cdef bint _is_key(Slice* key) noexcept:
    cdef Py_ssize_t i
    if key.start == NULL or not 0 < key.size <= KEY_CHARS_MAX:
        return False
    for i in range(key.size):
        if not 0x20 <= key.start[i] <= 0x7e:
            return False
    return True


cdef inline bytes _bytes_of(Slice* content):
    return PyBytes_FromStringAndSize(<const char*> content.start, content.size)


cdef inline char* _put_length(char* to, unsigned int length) noexcept:
    to[0] = <char> (length >> 24)
    to[1] = <char> (length >> 16)
    to[2] = <char> (length >> 8)
    to[3] = <char> length
    return to + 4


cdef inline char* _put(char* to, const unsigned char* content, Py_ssize_t size) noexcept:
    """Write a field of a fingerprint: its length in 4 bytes, big-endian, and the field; ff ff ff ff if it is absent."""
    if content == NULL:
        return _put_length(to, 0xffffffff)
    to = _put_length(to, <unsigned int> size)
    memcpy(to, content, size)
    return to + size


def fault(bytes raw not None):
    """Find the fault of a body that is not strict JSON: (kind, offset, the duplicate name); None for strict JSON.

    Releases the GIL.
    """
    cdef Body body
    cdef bint strict
    _open(&body, raw)
    with nogil:
        _blanks(&body)
        strict = _value(&body, 1) and _ended(&body)
    try:
        if strict:
            return None
        if body.fault == NO_MEMORY:
            raise MemoryError
        return body.fault, body.at - body.start, _bytes_of(&body.twice) if body.fault == NAMED_TWICE else b""
    finally:
        _end(&body)


def elements(bytes raw not None, bytes name not None, Py_ssize_t most):
    """Find the offsets (start, end) of the elements of an array, or of the values of an object's members.

    The array or object is the value of the first member `name`, or `raw` itself without a name. Stops after `most` + 1
    elements. Returns an empty list if the JSON is broken before their end. Releases the GIL.
    """
    cdef Body body
    cdef Slice wanted
    cdef Py_ssize_t found, i
    cdef Py_ssize_t* places = <Py_ssize_t*> malloc(2 * (most + 1) * sizeof(Py_ssize_t))
    if places == NULL:
        raise MemoryError
    wanted.start, wanted.size = <const unsigned char*> PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name)
    _open(&body, raw)
    with nogil:
        found = _elements(&body, places, most + 1) if not wanted.size or _find(&body, &wanted) else 0
    try:
        if body.fault == NO_MEMORY:
            raise MemoryError
        return [(places[2 * i], places[2 * i + 1]) for i in range(found)]
    finally:
        free(places)
        _end(&body)


cdef bint _find(Body* body, Slice* wanted) noexcept nogil:
    """Parse an object up to the value of the member `wanted`."""
    cdef Slice name
    if not _one(body, c'{'):
        return False
    while True:
        if not _string(body, &name) or (body.escaped and not _unescape(body, &name)) or not _one(body, c':'):
            return False
        if _same(&name, wanted):
            return True
        if not _value(body, 1) or _after(body, c'}') != MORE:
            return False


cdef Py_ssize_t _elements(Body* body, Py_ssize_t* places, Py_ssize_t most) noexcept nogil:
    """Write the offsets of up to `most` elements to `places`; returns their number."""
    cdef Slice ignored
    cdef Py_ssize_t found = 0
    cdef int after = MORE
    cdef unsigned char closing = c']'
    if not _one(body, c'['):
        closing = c'}'
        if not _one(body, c'{'):
            return 0
    while found < most and after == MORE:
        if closing == c'}' and not (_string(body, &ignored) and _one(body, c':')):
            return 0
        places[2 * found] = body.at - body.start
        if not _value(body, 1):
            return 0
        places[2 * found + 1] = body.at - body.start
        found += 1
        after = _after(body, closing)
    return 0 if after == BROKEN else found


cdef class EventReader:
    """Makes events from bodies by `make`, whose arguments are the fields of service.events.event.Event, in order."""

    cdef object make, sha256
    cdef object fingerprint  # wire.fingerprint, for events with headers
    cdef Py_ssize_t event_bytes_max, entry_bytes, batch_events_max
    cdef frozenset reserved
    cdef str trace_header
    cdef str topic  # of the last event, because most events have the same
    cdef bytes topic_bytes

    def __init__(
        self,
        make,
        fingerprint,
        frozenset reserved,
        str trace_header,
        Py_ssize_t event_bytes_max,
        Py_ssize_t entry_bytes,
        Py_ssize_t batch_events_max,
    ):
        self.make, self.fingerprint, self.sha256 = make, fingerprint, hashlib.sha256
        self.reserved, self.trace_header = reserved, trace_header
        self.event_bytes_max, self.entry_bytes = event_bytes_max, entry_bytes
        self.batch_events_max = batch_events_max
        self.topic, self.topic_bytes = "", b""

    def event(self, bytes raw not None, str key not None, str scope not None, traceparent):
        """Make the event of a body, with a checked key; None if the body is uncommon."""
        cdef Fields fields
        cdef list headers = []
        if not _whole(raw, &fields, headers) or fields.seen & IDEMPOTENCY_KEY:
            return None
        return self._event(&fields, headers, key, scope, traceparent)

    def member(self, bytes raw not None, str scope not None, traceparent):
        """Make the event of a body that contains its key; None if the body is uncommon."""
        cdef Fields fields
        cdef list headers = []
        if not _whole(raw, &fields, headers) or not _is_key(&fields.idempotency_key):
            return None
        return self._event(&fields, headers, _key_of(&fields), scope, traceparent)

    def batch(self, bytes raw not None, str scope not None, traceparent):
        """Make a reader of a batch that is not atomic, which parses it in steps."""
        return Batch(self, raw, scope, traceparent)

    cdef object _event(self, Fields* fields, list headers, str key, str scope, traceparent):
        cdef Py_ssize_t size, packed_size
        cdef bytes packed, topic_bytes, number = None
        cdef bint large
        cdef char* to
        if not fields.seen & TOPIC or not fields.seen & VALUE or not _is_topic(&fields.topic):
            return None
        if fields.tombstone and fields.key.start == NULL:
            return None
        if fields.partition > 0x7fffffff:
            return None
        if fields.tombstone:
            fields.value.start = NULL
        size = (0 if fields.value.start == NULL else fields.value.size) + (
            0 if fields.key.start == NULL else fields.key.size
        )
        for name, content in headers:
            if (<str> name).lower() in self.reserved:
                return None
            size += len((<str> name).encode()) + len(<bytes> content)
            if name == self.trace_header:
                traceparent = None  # the event has the client's own header instead
        if size > self.event_bytes_max:
            return None
        if fields.topic.size != PyBytes_GET_SIZE(self.topic_bytes) or memcmp(
            fields.topic.start, PyBytes_AS_STRING(self.topic_bytes), fields.topic.size
        ):
            topic_bytes = _bytes_of(&fields.topic)
            # The bytes last: if memory runs out in between, they must not belong to another name.
            self.topic = topic_bytes.decode()
            self.topic_bytes = topic_bytes
        record_key = None if fields.key.start == NULL else _bytes_of(&fields.key)
        value = None if fields.value.start == NULL else _bytes_of(&fields.value)
        partition = None if fields.partition < 0 else fields.partition
        timestamp = None if fields.timestamp < 0 else fields.timestamp
        if headers:
            fp = self.fingerprint(self.topic, partition, record_key, headers, value)
        else:
            if fields.partition >= 0:
                number = b"%d" % fields.partition
            large = size > COPIED_MAX
            packed_size = 16 + fields.topic.size + size + (0 if number is None else len(number))
            if large:
                packed_size -= 0 if value is None else fields.value.size
            packed = PyBytes_FromStringAndSize(NULL, packed_size)
            to = _put(PyBytes_AS_STRING(packed), fields.topic.start, fields.topic.size)
            if number is None:
                to = _put(to, NULL, 0)
            else:
                to = _put(to, <const unsigned char*> PyBytes_AS_STRING(number), len(number))
            to = _put(to, fields.key.start, fields.key.size)
            if large and value is not None:
                _put_length(to, fields.value.size)
                digest = self.sha256(packed)
                digest.update(value)
            else:
                _put(to, fields.value.start, fields.value.size)
                digest = self.sha256(packed)
            fp = (<bytes> digest.digest())[:8]
        id = (<bytes> self.sha256(f"{scope}\0{key}".encode()).digest())[:16]
        return self.make(
            key,
            id,
            self.topic,
            record_key,
            value,
            headers,
            partition,
            timestamp,
            traceparent,
            fp,
            size,
            self.entry_bytes + fields.topic.size,
        )


cdef class Batch:
    """Reads a batch that is not atomic, whose events contain their keys."""

    cdef EventReader reader
    cdef bytes raw
    cdef str scope
    cdef object traceparent
    cdef Body body
    cdef bint not_atomic  # `"atomic": false` was read
    cdef readonly list events
    cdef readonly bint whole

    def __cinit__(self, EventReader reader not None, bytes raw not None, str scope not None, traceparent):
        self.reader, self.raw, self.scope, self.traceparent = reader, raw, scope, traceparent
        _open(&self.body, raw)
        self.body.names_most = NAMES_MAX

    def __dealloc__(self):
        _end(&self.body)

    def read(self, Py_ssize_t most):
        """Parse events of about this many bytes, and append them to `events`; False if anything is uncommon."""
        cdef Body* body = &self.body
        cdef const unsigned char* until = body.at + most
        cdef int after = MORE
        if self.events is None and not self._begins():
            return False
        while after == MORE and body.at < until:
            if not self._reads_one():
                return False
            after = _after(body, c']')
        if after == MORE:
            return True
        self.whole = after == DONE and self._ends()
        return self.whole

    cdef bint _begins(self) except -1:
        cdef Body* body = &self.body
        cdef Slice name
        if not _one(body, c'{') or not _key(body, &name):
            return False
        if self._says(&name) and (_after(body, c'}') != MORE or not _key(body, &name)):
            return False
        if not _is(&name, b"events", 6) or not _one(body, c'['):
            return False
        self.events = []
        return True

    cdef bint _reads_one(self) except -1:
        cdef Fields fields
        cdef list headers = []
        if len(self.events) == self.reader.batch_events_max or not _fields(&self.body, 3, &fields, headers):
            return False
        if not _is_key(&fields.idempotency_key):
            return False
        event = self.reader._event(&fields, headers, _key_of(&fields), self.scope, self.traceparent)
        if event is None:
            return False
        self.events.append(event)
        return True

    cdef bint _ends(self) noexcept:
        cdef Body* body = &self.body
        cdef Slice name
        cdef int after = _after(body, c'}')
        if after == MORE and _key(body, &name) and self._says(&name):
            after = _after(body, c'}')
        return after == DONE and _ended(body)

    cdef bint _says(self, Slice* name) noexcept:
        """Parse `"atomic": false`; False for anything else, and for a second time."""
        if self.not_atomic or not _is(name, b"atomic", 6) or not _word(&self.body, b"false", 5):
            return False
        self.not_atomic = True
        return True


cdef str _key_of(Fields* fields):
    return PyUnicode_DecodeASCII(<const char*> fields.idempotency_key.start, fields.idempotency_key.size, NULL)


cdef bint _whole(bytes raw, Fields* fields, list headers) except -1:
    """Parse the fields of an event that is the whole body."""
    cdef Body body
    _open(&body, raw)
    body.names_most = NAMES_MAX
    try:
        return _fields(&body, 1, fields, headers) and _ended(&body)
    finally:
        _end(&body)
