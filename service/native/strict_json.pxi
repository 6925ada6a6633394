# Checks the bytes of one body by RFC 8259, as strictly as service/events/strict_json.py, without the GIL. A fault is
# returned as its kind and offset; the Python code describes it.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc, qsort, realloc
from libc.string cimport memcmp, memcpy

cdef enum:
    DEPTH_MAX = 64  # levels of a body, as in strict_json
    NAMES_COMPARED = 32  # names of an object that are compared with all earlier ones; more names are sorted
    NAMES_OWN = 64  # names that Body itself has memory for

    # The kinds of a byte in a string.
    PLAIN = 0
    QUOTE = 1
    ESCAPE = 2
    CONTROL = 3
    WIDE = 4  # part of a character beyond ASCII

    # The results of `_after`.
    BROKEN = -1
    DONE = 0
    MORE = 1

    # Kinds of faults, with the numbers of service/events/strict_json.py.
    NOT_JSON = 0
    NOT_UTF8 = 1
    TOO_DEEP = 2
    NAMED_TWICE = 3
    LONE_SURROGATE = 4
    NO_MEMORY = 5


cdef unsigned char KIND[256]


cdef void _set_kinds() noexcept:
    cdef int c
    for c in range(256):
        KIND[c] = CONTROL if c < 0x20 else WIDE if c >= 0x80 else PLAIN
    KIND[c'"'] = QUOTE
    KIND[c'\\'] = ESCAPE


_set_kinds()


cdef struct Slice:
    const unsigned char* start  # NULL: absent, or null
    Py_ssize_t size


cdef struct Name:
    Slice text  # without escapes
    uint64_t hash  # set if an object has more than NAMES_COMPARED


cdef struct Body:
    const unsigned char* start
    const unsigned char* at
    const unsigned char* end
    bint escaped  # the last string has an escape
    int fault
    Slice twice  # the duplicate name
    Name* names  # of all open objects, those of the innermost last
    Py_ssize_t names_count
    Py_ssize_t names_room
    Py_ssize_t names_most  # with more, sorting would hold the event loop for too long
    unsigned char* unescaped  # memory for decoded names, as many bytes as the body has
    Py_ssize_t unescaped_size
    Name own[NAMES_OWN]


cdef void _begin(Body* body, const unsigned char* start, Py_ssize_t size) noexcept nogil:
    """Begin to parse `size` bytes from `start` on. Call `_end` afterwards."""
    body.start = body.at = start
    body.end = start + size
    body.escaped = False
    body.fault = NOT_JSON
    body.names = body.own
    body.names_count = 0
    body.names_room = NAMES_OWN
    body.names_most = size
    body.unescaped = NULL
    body.unescaped_size = 0


cdef void _end(Body* body) noexcept nogil:
    """Free the memory of a body."""
    if body.names != body.own:
        free(body.names)
    free(body.unescaped)


cdef inline bint _fail(Body* body, int fault) noexcept nogil:
    body.fault = fault
    return False


cdef inline bint _ended(Body* body) noexcept nogil:
    _blanks(body)
    return body.at == body.end


# Each of these functions moves `at` past what it parses, and returns False if that is not strict JSON.


cdef inline void _blanks(Body* body) noexcept nogil:
    cdef unsigned char c
    while body.at < body.end:
        c = body.at[0]
        if c != c' ' and c != c'\n' and c != c'\r' and c != c'\t':
            break
        body.at += 1


cdef inline bint _one(Body* body, unsigned char c) noexcept nogil:
    """Parse this character, with blanks around it."""
    _blanks(body)
    if body.at == body.end or body.at[0] != c:
        return False
    body.at += 1
    _blanks(body)
    return True


cdef inline int _after(Body* body, unsigned char closing) noexcept nogil:
    """Parse what follows a member or element: a comma (MORE), the closing bracket (DONE), or neither (BROKEN)."""
    _blanks(body)
    if body.at == body.end:
        return BROKEN
    if body.at[0] == closing:
        body.at += 1
        return DONE
    return MORE if _one(body, c',') else BROKEN


cdef int _unit(Body* body) noexcept nogil:
    """Parse the four hexadecimal digits of an escape; -1 for other characters."""
    cdef int i, unit = 0
    cdef unsigned char c
    if body.end - body.at < 4:
        return -1
    for i in range(4):
        c = body.at[i]
        if c'0' <= c <= c'9':
            unit = unit * 16 + c - c'0'
            continue
        c |= 0x20
        if not c'a' <= c <= c'f':
            return -1
        unit = unit * 16 + c - c'a' + 10
    body.at += 4
    return unit


cdef bint _escape(Body* body) noexcept nogil:
    """Parse an escape after its backslash; a surrogate only as the first of a pair, which is parsed whole."""
    cdef int unit
    cdef unsigned char c
    if body.at == body.end:
        return False
    c = body.at[0]
    body.at += 1
    if c != c'u':
        return c == c'"' or c == c'\\' or c == c'/' or c == c'b' or c == c'f' or c == c'n' or c == c'r' or c == c't'
    unit = _unit(body)
    if not 0xD800 <= unit <= 0xDFFF:
        return unit >= 0
    if unit >= 0xDC00 or not _word(body, b"\\u", 2):
        return _fail(body, LONE_SURROGATE)
    unit = _unit(body)
    return 0xDC00 <= unit <= 0xDFFF or _fail(body, LONE_SURROGATE if unit >= 0 else NOT_JSON)


cdef bint _wide(Body* body) noexcept nogil:
    """Parse the rest of a character after its first byte (RFC 3629, section 4)."""
    cdef unsigned char first = (body.at - 1)[0], least = 0x80, most = 0xbf
    cdef int i, more
    if 0xc2 <= first <= 0xdf:
        more = 1
    elif 0xe0 <= first <= 0xef:
        more = 2
        if first == 0xe0:
            least = 0xa0
        elif first == 0xed:  # the other second bytes encode surrogates
            most = 0x9f
    elif 0xf0 <= first <= 0xf4:
        more = 3
        if first == 0xf0:
            least = 0x90
        elif first == 0xf4:
            most = 0x8f
    else:
        return False
    if body.end - body.at < more or not least <= body.at[0] <= most:
        return False
    for i in range(1, more):
        if not 0x80 <= body.at[i] <= 0xbf:
            return False
    body.at += more
    return True


cdef bint _string(Body* body, Slice* content) noexcept nogil:
    """Parse a string; `content` is the text between the quotes, with its escapes."""
    cdef const unsigned char* at
    cdef unsigned char kind
    if body.at == body.end or body.at[0] != c'"':
        return False
    body.at += 1
    content.start = body.at
    body.escaped = False
    while True:
        at = body.at
        while at < body.end and KIND[at[0]] == PLAIN:
            at += 1
        if at == body.end:
            return False
        kind = KIND[at[0]]
        body.at = at + 1
        if kind == QUOTE:
            content.size = at - content.start
            return True
        if kind == CONTROL:
            return False
        if kind == WIDE:
            if not _wide(body):
                return _fail(body, NOT_UTF8)
        else:
            body.escaped = True
            if not _escape(body):
                return False


cdef inline bint _digits(Body* body) noexcept nogil:
    cdef const unsigned char* start = body.at
    while body.at < body.end and c'0' <= body.at[0] <= c'9':
        body.at += 1
    return body.at > start


cdef bint _number(Body* body) noexcept nogil:
    cdef const unsigned char* start
    if body.at[0] == c'-':
        body.at += 1
    start = body.at
    if not _digits(body) or (start[0] == c'0' and body.at - start > 1):
        return False
    if body.at < body.end and body.at[0] == c'.':
        body.at += 1
        if not _digits(body):
            return False
    if body.at < body.end and (body.at[0] | 0x20) == c'e':
        body.at += 1
        if body.at < body.end and (body.at[0] == c'+' or body.at[0] == c'-'):
            body.at += 1
        return _digits(body)
    return True


cdef inline bint _word(Body* body, const char* word, Py_ssize_t size) noexcept nogil:
    if body.end - body.at < size or memcmp(body.at, word, size):
        return False
    body.at += size
    return True


cdef bint _value(Body* body, int depth) noexcept nogil:
    """Parse any value, at this depth."""
    cdef Slice ignored
    cdef unsigned char c
    if body.at == body.end:
        return False
    c = body.at[0]
    if c == c'"':
        return _string(body, &ignored)
    if c == c'{':
        return _object(body, depth)
    if c == c'[':
        return _array(body, depth)
    if c == c't':
        return _word(body, b"true", 4)
    if c == c'f':
        return _word(body, b"false", 5)
    if c == c'n':
        return _word(body, b"null", 4)
    return _number(body)


cdef bint _array(Body* body, int depth) noexcept nogil:
    cdef int after
    if depth > DEPTH_MAX:
        return _fail(body, TOO_DEEP)
    if not _one(body, c'['):
        return False
    if body.at < body.end and body.at[0] == c']':
        body.at += 1
        return True
    while True:
        if not _value(body, depth + 1):
            return False
        after = _after(body, c']')
        if after != MORE:
            return after == DONE


cdef bint _object(Body* body, int depth) noexcept nogil:
    """Parse an object without duplicate names."""
    cdef Py_ssize_t first = body.names_count, unescaped_size = body.unescaped_size
    cdef int after
    if depth > DEPTH_MAX:
        return _fail(body, TOO_DEEP)
    if not _one(body, c'{'):
        return False
    if body.at < body.end and body.at[0] == c'}':
        body.at += 1
        return True
    while True:
        if not _name(body, first) or not _one(body, c':') or not _value(body, depth + 1):
            return False
        after = _after(body, c'}')
        if after == BROKEN:
            return False
        if after == DONE:
            break
    if body.names_count - first > NAMES_COMPARED and not _differ(body, first):
        return False
    body.names_count = first
    body.unescaped_size = unescaped_size
    return True


cdef bint _name(Body* body, Py_ssize_t first) noexcept nogil:
    """Parse a member's name, and add it to the names of its object, which begin at `first`."""
    cdef Py_ssize_t i
    cdef Slice name
    if not _string(body, &name) or (body.escaped and not _unescape(body, &name)):
        return False
    if body.names_count - first < NAMES_COMPARED:
        for i in range(first, body.names_count):
            if _same(&body.names[i].text, &name):
                body.twice = name
                return _fail(body, NAMED_TWICE)
    if body.names_count == body.names_most:
        return False
    if body.names_count == body.names_room and not _make_room(body):
        return _fail(body, NO_MEMORY)
    body.names[body.names_count].text = name
    body.names_count += 1
    return True


cdef inline bint _same(Slice* a, Slice* b) noexcept nogil:
    return a.size == b.size and not memcmp(a.start, b.start, a.size)


cdef bint _make_room(Body* body) noexcept nogil:
    """Double the memory for names."""
    cdef size_t size = 2 * body.names_room * sizeof(Name)
    cdef Name* names
    if body.names == body.own:
        names = <Name*> malloc(size)
        if names != NULL:
            memcpy(names, body.own, sizeof(body.own))
    else:
        names = <Name*> realloc(body.names, size)
    if names == NULL:
        return False
    body.names = names
    body.names_room *= 2
    return True


cdef bint _unescape(Body* body, Slice* name) noexcept nogil:
    """Decode the escapes of a checked name to UTF-8, which is never longer."""
    cdef Body reader
    cdef unsigned char* to
    cdef unsigned char c
    if body.unescaped == NULL:
        body.unescaped = <unsigned char*> malloc(body.end - body.start)
        if body.unescaped == NULL:
            return _fail(body, NO_MEMORY)
    _begin(&reader, name.start, name.size)
    to = name.start = body.unescaped + body.unescaped_size
    while reader.at < reader.end:
        c = reader.at[0]
        reader.at += 1
        if c == c'\\':
            c = reader.at[0]
            reader.at += 1
            if c == c'u':
                to = _put_character(to, _code_point(&reader))
                continue
            if c == c'b':
                c = 0x08
            elif c == c'f':
                c = 0x0c
            elif c == c'n':
                c = 0x0a
            elif c == c'r':
                c = 0x0d
            elif c == c't':
                c = 0x09
        to[0] = c
        to += 1
    name.size = to - name.start
    body.unescaped_size += name.size
    return True


cdef inline int _code_point(Body* body) noexcept nogil:
    """Decode one escape, or a pair of surrogates."""
    cdef int unit = _unit(body)
    if not 0xd800 <= unit <= 0xdbff:
        return unit
    body.at += 2
    return 0x10000 + ((unit - 0xd800) << 10) + _unit(body) - 0xdc00


cdef inline unsigned char* _put_character(unsigned char* to, int c) noexcept nogil:
    if c < 0x80:
        to[0] = c
        return to + 1
    if c < 0x800:
        to[0] = 0xc0 | c >> 6
        to[1] = 0x80 | c & 0x3f
        return to + 2
    if c < 0x10000:
        to[0] = 0xe0 | c >> 12
        to[1] = 0x80 | c >> 6 & 0x3f
        to[2] = 0x80 | c & 0x3f
        return to + 3
    to[0] = 0xf0 | c >> 18
    to[1] = 0x80 | c >> 12 & 0x3f
    to[2] = 0x80 | c >> 6 & 0x3f
    to[3] = 0x80 | c & 0x3f
    return to + 4


cdef bint _differ(Body* body, Py_ssize_t first) noexcept nogil:
    """Check that no name from `first` on occurs twice. Sorts, so that names with chosen hashes cost no more time."""
    cdef Py_ssize_t i
    for i in range(first, body.names_count):
        body.names[i].hash = _hash(&body.names[i].text)
    qsort(&body.names[first], body.names_count - first, sizeof(Name), _compare)
    for i in range(first + 1, body.names_count):
        if not _compare(&body.names[i - 1], &body.names[i]):
            body.twice = body.names[i].text
            return _fail(body, NAMED_TWICE)
    return True


cdef inline uint64_t _hash(Slice* text) noexcept nogil:
    """Hash a name, eight bytes at a time; collisions only cost time."""
    cdef uint64_t hash = text.size, word
    cdef const unsigned char* at = text.start
    cdef Py_ssize_t left = text.size
    while left > 0:
        word = 0
        memcpy(&word, at, 8 if left >= 8 else left)
        hash = (hash ^ word) * <uint64_t> 0x9e3779b97f4a7c15ULL
        hash ^= hash >> 32
        at += 8
        left -= 8
    return hash


cdef int _compare(const void* one, const void* other) noexcept nogil:
    cdef const Name* a = <const Name*> one
    cdef const Name* b = <const Name*> other
    if a.hash != b.hash:
        return -1 if a.hash < b.hash else 1
    if a.text.size != b.text.size:
        return -1 if a.text.size < b.text.size else 1
    return memcmp(a.text.start, b.text.start, a.text.size)
