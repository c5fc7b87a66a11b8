"""What has to be stored: one write at a time, and the next one takes all that has come meanwhile.

A write that fails may have arrived all the same. So nothing is taken back: what it said stays as good as decided, is
shown to nobody, and is written again until it is known to be there.
"""

from typing import Final

from penstock.groups.share_partition.core import Core
from penstock.groups.share_partition.messages import Write
from penstock.groups.share_partition.states import (
    DELAYED,
    DONE_ONCE_WRITTEN,
    FINAL_ONCE_WRITTEN,
    LAUNCH,
    NOT_STORED,
    RUN,
    RUNS,
    SETTLE,
    STORED,
    STORED_STATES,
)
from penstock.groups.share_partition.vectors import number
from penstock.groups.share_partition.window import merged

_STATE_BITS: Final = 3
_STATE_MASK: Final = (1 << _STATE_BITS) - 1
#: More than that does not fit beside the state. NOT_STORED is taken by no count: its low bits are no state.
_COUNT_MAX: Final = 255 >> _STATE_BITS


def take_write(core: Core) -> Write | None:
    """None where there is nothing to write."""
    assert core.launched is None, "one write at a time"
    window = core.window
    if not core.queued and not core.owes_totals:
        return None
    done = DONE_ONCE_WRITTEN.match(window.states)
    assert done is not None
    core.launched, core.queued = merged(core.queued), []
    batches: list[tuple[int, int, int, int]] = []
    for first, end in core.launched:
        low, high = window.clip(first, end)
        window.states[low:high] = window.states[low:high].translate(LAUNCH)
        _add_batches(core, max(low, done.end()), high, batches)
    open_part = window.states[done.end() :]
    complete = len(open_part) - len(open_part.translate(None, FINAL_ONCE_WRITTEN))
    core.owes_totals = False
    totals = None if core.totals == core.stored_totals else core.totals
    core.launched_totals = core.totals
    return Write(window.start + done.end(), complete, batches, totals)


def _add_batches(core: Core, low: int, high: int, batches: list[tuple[int, int, int, int]]) -> None:
    """Runs of the same state and count; what lies before the new start is said by the start alone."""
    if high <= low:
        return
    window = core.window
    stored, counts = window.states[low:high].translate(STORED), window.counts[low:high]
    base = window.start + low
    if max(counts) > _COUNT_MAX:
        _add_batches_of_many_deliveries(base, stored, counts, batches)
        return
    # State and count in one byte, so that one search finds where either changes.
    row = ((number(counts) << _STATE_BITS) | number(stored)).to_bytes(high - low, "little")
    at = base
    for run, _ in RUNS.findall(row):
        after = at + len(run)
        if (code := run[0]) != NOT_STORED:
            batches.append((at, after - 1, STORED_STATES[code & _STATE_MASK], code >> _STATE_BITS))
        at = after


def _add_batches_of_many_deliveries(
    base: int, stored: bytearray, counts: bytearray, batches: list[tuple[int, int, int, int]]
) -> None:
    for same_count in RUN.finditer(counts):
        for run in RUN.finditer(stored, *same_count.span()):
            state = stored[run.start()]
            if state != NOT_STORED:
                first, last = base + run.start(), base + run.end() - 1
                batches.append((first, last, STORED_STATES[state], counts[run.start()]))


def written(core: Core) -> None:
    """The write that was taken last is stored: now it may be seen."""
    window = core.window
    assert core.launched is not None, "nothing was under way"
    for first, end in core.launched:
        low, high = window.clip(first, end)
        settled = window.states[low:high].translate(SETTLE)
        window.states[low:high] = settled
        if DELAYED in settled:
            due_ms = min(
                time for time, state in zip(window.times[low:high], settled, strict=True) if state == DELAYED
            )
            core.set_timer(due_ms, first, end)
    core.launched = None
    core.stored_totals = core.launched_totals
    core.drop_done()


def write_failed(core: Core) -> None:
    """To be written again, with all that comes meanwhile."""
    assert core.launched is not None, "nothing was under way"
    core.queued = [*core.launched, *core.queued]
    core.owes_totals = core.totals != core.stored_totals
    core.launched = None
