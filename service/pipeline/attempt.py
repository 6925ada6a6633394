"""The attempt to write a group through a slot: its claimed and written requests, and the claims to release."""

from collections.abc import Sequence

import msgspec

from service.pipeline.decisions import ClaimToRelease
from service.pipeline.group import ClaimedRequest, CommittedRequest, Group
from service.slots.slot import LedgerPosition, Slot


class Attempt(msgspec.Struct):
    """The attempt to write a group in a term of a slot. `Writer._serve_next` makes one for each group."""

    slot: Slot
    group: Group
    claimed: Sequence[ClaimedRequest] = ()  # to write, or written: their claims stand
    not_sent: Sequence[ClaimToRelease] = ()  # claims of requests that are not written now
    delivered: Sequence[CommittedRequest] = ()  # written, and not marked yet
    position: LedgerPosition | None = None  # of the ledger record; None before the write
    not_delivered: Sequence[ClaimToRelease] = ()  # claims of requests that the write refused or left open

    @property
    def to_release(self) -> list[ClaimToRelease]:
        return [*self.not_sent, *self.not_delivered]

    @property
    def wrote_nothing_and_retries(self) -> bool:
        """Whether nothing was written and requests are sent again: after a pause, as a try may use up a producer id."""
        return not self.delivered and any(not each.request.finished for each in self.not_delivered)
