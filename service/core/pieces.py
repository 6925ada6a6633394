"""Joins bytes that arrive in pieces."""


def joined(begun: bytes | bytearray, piece: bytes) -> bytes | bytearray:
    """Return what has begun with a piece behind it; `begun` must not be used any more.

    The first piece is kept as it is, because most texts come in one. Others are joined at once: an object for each
    piece would take 40 bytes beside its own, and a client may send pieces of two bytes.
    """
    if not begun:
        return piece
    if not isinstance(begun, bytearray):
        begun = bytearray(begun)
    begun += piece
    return begun
