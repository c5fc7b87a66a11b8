"""A classic bug that can be switched on: which lines of the code it replaces, and what it would break."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """`owner` is a class or a module."""

    owner: Any
    name: str
    replacement: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    name: str
    #: What the code does wrong.
    sentence: str
    #: The known trap that it walks into, or the promise that it breaks.
    trap: str
    patches: tuple[Patch, ...]
    #: The faults to hunt it with, where a bug needs a meeting of some that is rare among all; empty: any.
    faults: tuple[str, ...] = ()
    #: The requests that may be late, by API key, if that is among the faults; empty: any.
    apis: tuple[int, ...] = ()
    #: The world that it shows in.
    world: str = "data"

    @contextmanager
    def applied(self) -> Iterator[None]:
        originals = [(patch.owner, patch.name, patch.owner.__dict__[patch.name]) for patch in self.patches]
        try:
            for patch in self.patches:
                setattr(patch.owner, patch.name, patch.replacement)
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


class Traps:
    """The lines that the bugs belong to, in the words of those who fell into them."""

    TRUNCATE = "Truncate to the largest common leader epoch and end offset, never to the high watermark."
    TRUNCATE_FIRST = (
        "Truncate before raising the high watermark; reconcile before the first fetch of an epoch."
    )
    FENCE = "Fence everything by leader epoch. A stale leader acknowledges nothing."
    MAXIMAL_ISR = "The high watermark moves only on members of the maximal ISR in the same epoch."
    EPOCH_START = "A follower enters the ISR only once it has reached the leader epoch's start."
    STALE_HIGH_WATERMARK = (
        "A new leader's high watermark may be stale: answer offset queries once it caught up."
    )
    UNCLEAN_RESTART = "A replica restarted without a clean-shutdown marker may not lead on its word alone."
    CORRUPTION = (
        "Corruption below the high watermark: the replica leaves the ISR and refetches; it never leads."
    )
    DISK_FULL = "Disk full is not a clean shutdown. An fsync error ends the process; it is never retried."
    TWO_BROKERS = "Two live brokers with one id: the second is refused until the first is fenced."
    DURABLE = "Durable before visible: nothing is acknowledged, counted or promised before it is synced."
    LOST_DECISION = "A decision that was lost or cut off is requested again: no request waits for ever."
    QUORUM = "A quorum has one leader per epoch, and what it has committed stays."
    REPEAT = "A repeat inside the window of five batches returns the original offset and success."
    PRODUCER_STATE = "Producer state survives truncation, snapshot, restart and failover."
    GROUP_READ = "Replaying a decision before it is committed must not show it to readers."
    LATE_END = "A delayed EndTxn must not end a later transaction: bump the epoch for every transaction."
    VERIFY = "Check that a partition is in the transaction before the first append (hanging transactions)."
    ONE_SNAPSHOT = "Batches, last stable offset and aborted list come from one snapshot of the log."
    TIMEOUT = "Transaction timeout and fencing are different errors."
    NO_DEFAULT_OFFSET = "Never default an unknown offset to 0."
    ALL_OR_NOTHING = "A transaction is all or nothing, in every partition and in offsets; none hangs."
    TWO_PHASE = "A prepared two-phase transaction waits for its decision, however long that takes."
    STATIC = "A static member that returns replaces its old id in every state and fences the old instance."
    SHARE_LOCK = (
        "Share groups: what a write that fails was about is not lost, and not told before it is stored."
    )
    AT_MOST_ONCE = "At most once: the hand-out is final before the reply leaves."
    LIMIT = "A record of a share group is not given up before its delivery limit."
    PLAN = "A plan is stored before it is carried out, and repeated until it is known to be done."
    NOT_EARLY = "A scheduled record comes when it is due, and not before."
    OWNER = "Hand a partition to its new owner only after the old one has let go or been fenced."
