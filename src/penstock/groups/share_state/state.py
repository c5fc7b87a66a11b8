"""The state of one share partition, and what a write to it means before it is made."""

from bisect import bisect_left
from collections.abc import Sequence

from penstock.groups.share_state.ranges import (
    Range,
    around,
    cut_before,
    is_sorted,
    merge_into,
    overlay,
    subtract,
    tidy,
)
from penstock.groups.share_state.records import Snapshot, Update
from penstock.groups.share_state.values import (
    ARCHIVED,
    AVAILABLE,
    UNSET,
    ShareState,
    ShareSummary,
    StateBatch,
    Totals,
)


class PartitionState:
    """Changed by replay only."""

    __slots__ = (
        "batches",
        "create_timestamp_ms",
        "delivery_complete_count",
        "leader_epoch",
        "snapshot_epoch",
        "start_offset",
        "state_epoch",
        "updates",
    )

    def __init__(self, snapshot: Snapshot) -> None:
        self.leader_epoch = self.state_epoch = UNSET
        self.install(snapshot)

    def __repr__(self) -> str:
        return (
            f"<PartitionState from {self.start_offset}, {len(self.batches)} batches, "
            f"epochs {self.state_epoch}/{self.leader_epoch}>"
        )

    def install(self, snapshot: Snapshot) -> None:
        """Epochs never go back, whatever a snapshot says."""
        self.snapshot_epoch = snapshot.snapshot_epoch
        self.state_epoch = max(self.state_epoch, snapshot.state_epoch)
        self.leader_epoch = max(self.leader_epoch, snapshot.leader_epoch)
        self.start_offset = snapshot.start_offset
        self.create_timestamp_ms = snapshot.create_timestamp_ms
        self.delivery_complete_count = snapshot.delivery_complete_count
        self.batches: list[Range] = list(tidy(snapshot.batches))
        cut_before(self.batches, self.start_offset)
        #: How many since the last snapshot.
        self.updates = 0

    def apply(self, update: Update) -> None:
        self.leader_epoch = max(self.leader_epoch, update.leader_epoch)
        if update.start_offset != UNSET:
            self.start_offset = update.start_offset
        self.delivery_complete_count = update.delivery_complete_count
        batches = update.batches
        merge_into(self.batches, batches if is_sorted(batches) else tidy(batches))
        cut_before(self.batches, self.start_offset)
        self.updates += 1

    def snapshot_with(self, update: Update, now_ms: int) -> Snapshot:
        """The same as `apply`, as one record that stands alone."""
        start_offset = self.start_offset if update.start_offset == UNSET else update.start_offset
        batches = list(self.batches)
        merge_into(batches, update.batches)
        cut_before(batches, start_offset)
        return Snapshot(
            self.snapshot_epoch + 1,
            self.state_epoch,
            max(self.leader_epoch, update.leader_epoch),
            start_offset,
            self.create_timestamp_ms,
            now_ms,
            update.delivery_complete_count,
            batches,
        )

    def snapshot(self, now_ms: int) -> Snapshot:
        nothing = Update(self.snapshot_epoch, self.leader_epoch, UNSET, self.delivery_complete_count, ())
        return self.snapshot_with(nothing, now_ms)

    def newly_buried(self, buried: Sequence[Range]) -> list[Range]:
        """Those that a write ends for good. What is final already, or was written before, is taken care of; what is
        known to have been delivered more often than the writer knew of goes on.
        """
        asked = list(tidy(buried))
        cut_before(asked, max(self.start_offset, 0))
        known, fresh = self.batches, []
        for one in asked:
            place = bisect_left(known, (one[1] + 1,)) - 1  # the last that begins before its end
            if place < 0 or known[place][1] < one[0]:
                fresh.append(one)
            elif known[place][0] > one[0] or known[place][1] < one[1]:
                fresh += self._newly_buried_of_several(one)
            elif known[place][2] == AVAILABLE and known[place][3] <= one[3]:
                fresh.append(one)
        return fresh

    def _newly_buried_of_several(self, one: Range) -> list[Range]:
        """Where more than one thing is known of them."""
        low, high = around(self.batches, (one,))
        known = self.batches[low:high]
        fresh = subtract((one,), [each for each in known if each[2] != AVAILABLE])
        held = [each for each in known if each[2] == AVAILABLE]
        return [each for each in overlay(held, fresh) if each[2] > ARCHIVED]

    @property
    def progress(self) -> int | None:
        """Grows by one with every record that becomes final; None while it is not known where they begin."""
        if self.start_offset == UNSET:
            return None
        return self.start_offset + max(self.delivery_complete_count, 0)

    @property
    def handed_out_upto(self) -> int:
        """Nothing from here on was handed to anyone, as far as was written."""
        return max(self.start_offset, self.batches[-1][1] + 1 if self.batches else 0)

    def shown(self, totals: Totals) -> ShareState:
        batches = tuple(StateBatch._make(one) for one in self.batches)
        return ShareState(self.state_epoch, self.start_offset, batches, totals)

    def summary(self) -> ShareSummary:
        return ShareSummary(
            self.state_epoch, self.leader_epoch, self.start_offset, self.delivery_complete_count
        )


def as_archived(batches: Sequence[Range]) -> tuple[list[Range], list[Range]]:
    """The batches as everyone sees them, and apart those that are to be buried."""
    shown: list[Range] = []
    buried: list[Range] = []
    for first, last, state, count in batches:
        if state > ARCHIVED:
            buried.append((first, last, state, count))
            state = ARCHIVED
        shown.append((first, last, state, count))
    return shown, buried
