"""Decides how many slots a process holds, and which it takes: functions without I/O, for each heartbeat."""

import random
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from service.claims.keys import DEAD, FREE

# Stuck slots that are replaced even if fewer are wanted: several get stuck before Kafka reports missing replicas.
REPLACED_LEAST: Final = 3


class SlotShare(NamedTuple):
    """The bounds of a process: free slots are taken up to `slots`, and up to `most` kept while any is free or dead."""

    slots: int
    most: int


def fair_share(wanted: int, slots_max: int, members: int, stuck: int) -> SlotShare:
    """Divide the slots among `members` processes; each gets at most `wanted`, and others in place of `stuck` ones.

    A slot is stuck if Kafka cannot end its transaction, because a partition takes no markers.
    """
    most = wanted + min(max(wanted, REPLACED_LEAST), stuck)
    return SlotShare(min(most, max(1, slots_max // max(1, members))), most)


class Balance(NamedTuple):
    """Slots to take, in this order, and how many of the held ones are too many."""

    to_take: list[int]
    excess: int


def balance(others: Mapping[int, str], held: int, share: SlotShare, to_recover: Collection[int]) -> Balance:
    """Decide which slots a process with `held` slots takes, and how many it gives up.

    `others`: the slots that it does not hold, as Heartbeat marks them. It takes all dead ones, and the free ones of
    `to_recover`, because their open transactions delay all readers of their partitions; others only up to its share.
    It may then hold more than it wants, and gives up more than its share only if no slot is free or dead.
    """
    dead = [n for n, mark in others.items() if mark == DEAD or (mark == FREE and n in to_recover)]
    free = [n for n, mark in others.items() if mark == FREE and n not in to_recover]
    random.shuffle(dead)  # processes that decide at the same time should not try the same slots
    random.shuffle(free)
    wanted = max(0, share.slots - held - len(dead))
    return Balance(dead + free[:wanted], held - (share.most if free or dead else share.slots))
