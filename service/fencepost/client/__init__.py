"""Sends events to Fencepost, each under one key, however often it must be sent.

    from fencepost import Client, Event, SendError

    with Client("http://127.0.0.1:8000", token=token, spool="orders.spool") as client:
        for result in client.resume():          # events that an earlier run of this program has not settled
            print(result)
        written = client.send(Event("orders", {"total": 12.5}, key="customer-7"))
        results = client.send_many([Event("orders", order) for order in orders])

`AsyncClient` has the same methods for asyncio. Needs httpx only (extra `client`). service/README.md says what is
retried, and what the spool protects from.
"""

from .client import AsyncClient, Client
from .events import (
    Event,
    KeyExpired,
    KeyReused,
    NotAccepted,
    Offsets,
    Refused,
    Result,
    SendError,
    StaleMember,
    Unsettled,
    Written,
    WrittenBatch,
    new_key,
)
from .spool import Spool, SpoolError, SpoolFull, SpoolInUse

__all__ = [
    "AsyncClient",
    "Client",
    "Event",
    "KeyExpired",
    "KeyReused",
    "NotAccepted",
    "Offsets",
    "Refused",
    "Result",
    "SendError",
    "Spool",
    "SpoolError",
    "SpoolFull",
    "SpoolInUse",
    "StaleMember",
    "Unsettled",
    "Written",
    "WrittenBatch",
    "new_key",
]
