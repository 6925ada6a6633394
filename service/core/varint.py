"""Variable-length integers, as the wire formats of Kafka (KIP-482) and Protobuf have them."""


def unsigned_varint(number: int) -> bytes:
    """Encode a number from 0 on: 7 bits a byte, the lowest first, and the high bit set in all bytes but the last."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
