"""Decodes standard base64 (RFC 4648, section 4)."""

import binascii


def decode_base64(text: str | bytes) -> bytes | None:
    """Decode base64 that has its padding; None for any other text."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:  # also for characters beyond ASCII
        return None
