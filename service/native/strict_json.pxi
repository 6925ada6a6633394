# RFC 8259, as strict as service/events/strict_json.py, over the bytes of one body. What is not plainly JSON is left to that.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.string cimport memcmp

cdef enum:
    DEPTH_MAX = 64  # of the whole body, as strict_json has it
    NAMES_MAX = 32  # of one object: each is held against those before it

    # What a byte is within a string.
    PLAIN = 0
    QUOTE = 1
    ESCAPE = 2
    CONTROL = 3
    WIDE = 4  # of a character beyond ASCII

    # What comes after a member.
    BROKEN = -1
    DONE = 0
    MORE = 1


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


cdef struct Body:
    const unsigned char* at
    const unsigned char* end
    bint escaped  # the string that was read last has an escape
    bint wide  # one that was read since this was cleared has characters beyond ASCII


cdef void _begin(Body* body, bytes raw):
    body.at = <const unsigned char*> PyBytes_AS_STRING(raw)
    body.end = body.at + PyBytes_GET_SIZE(raw)
    body.escaped = body.wide = False


cdef inline bint _ended(Body* body) noexcept:
    _blanks(body)
    return body.at == body.end


cdef bint _is_text(Body* body, bytes raw) except -1:
    """Is all of it UTF-8? Only strings may have anything else than ASCII, so that nothing is to do where none has."""
    if body.wide:
        try:
            PyUnicode_DecodeUTF8(PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw), NULL)
        except UnicodeDecodeError:
            return False
    return True


# Each of these moves `at` past what it reads, and answers False where that is not plainly JSON.


cdef inline void _blanks(Body* body) noexcept:
    cdef unsigned char c
    while body.at < body.end:
        c = body.at[0]
        if c != c' ' and c != c'\n' and c != c'\r' and c != c'\t':
            break
        body.at += 1


cdef inline bint _one(Body* body, unsigned char c) noexcept:
    """This character, with blanks around it."""
    _blanks(body)
    if body.at == body.end or body.at[0] != c:
        return False
    body.at += 1
    _blanks(body)
    return True


cdef inline int _after(Body* body, unsigned char closing) noexcept:
    """What comes after a member: another one (MORE), what closes it all (DONE), or neither (BROKEN)."""
    _blanks(body)
    if body.at == body.end:
        return BROKEN
    if body.at[0] == closing:
        body.at += 1
        return DONE
    return MORE if _one(body, c',') else BROKEN


cdef int _unit(Body* body) noexcept:
    """The four hexadecimal digits of an escape; -1: others."""
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


cdef bint _escape(Body* body) noexcept:
    """What follows a backslash; a surrogate only as the first of a pair, which is read whole."""
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
    return unit < 0xDC00 and _word(body, b"\\u", 2) and 0xDC00 <= _unit(body) <= 0xDFFF


cdef bint _string(Body* body, Slice* content) noexcept:
    """A string; its content as it stands."""
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
            body.wide = True
        else:
            body.escaped = True
            if not _escape(body):
                return False


cdef inline bint _digits(Body* body) noexcept:
    cdef const unsigned char* start = body.at
    while body.at < body.end and c'0' <= body.at[0] <= c'9':
        body.at += 1
    return body.at > start


cdef bint _number(Body* body) noexcept:
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


cdef inline bint _word(Body* body, const char* word, Py_ssize_t size) noexcept:
    if body.end - body.at < size or memcmp(body.at, word, size):
        return False
    body.at += size
    return True


cdef bint _value(Body* body, int depth) noexcept:
    """Any value, at this depth."""
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


cdef bint _array(Body* body, int depth) noexcept:
    cdef int after
    if depth > DEPTH_MAX or not _one(body, c'['):
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


cdef bint _object(Body* body, int depth) noexcept:
    """An object without a name twice; an escape in a name may hide one, so that is not for here."""
    cdef Slice names[NAMES_MAX]
    cdef int count = 0, i, after
    if depth > DEPTH_MAX or not _one(body, c'{'):
        return False
    if body.at < body.end and body.at[0] == c'}':
        body.at += 1
        return True
    while True:
        if count == NAMES_MAX or not _string(body, &names[count]) or body.escaped or not _one(body, c':'):
            return False
        for i in range(count):
            if names[i].size == names[count].size and not memcmp(names[i].start, names[count].start, names[i].size):
                return False
        count += 1
        if not _value(body, depth + 1):
            return False
        after = _after(body, c'}')
        if after != MORE:
            return after == DONE
