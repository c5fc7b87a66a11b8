"""Commands for golden scripts of share partitions: one partition, a log of batches, and a clock."""

import shlex
from collections.abc import Callable, Iterator

from penstock.groups.share.partition import in_flight_records
from penstock.groups.share.partition.acknowledgement import check_acknowledgements
from penstock.groups.share.partition.share_partition import SharePartition
from penstock.groups.share.partition.share_partition_state import (
    AcknowledgementBatch,
    AcquireLimits,
    PendingWrite,
    ReadableRecords,
    RedeliveryBackoff,
    ShareCounters,
    SharePartitionPolicy,
)
from penstock.groups.share.state.share_state import DeliveryTotals, RecordDelay
from penstock.protocol.errors import ApiError

_KINDS = {"gap": 0, "accept": 1, "release": 2, "reject": 3, "renew": 4}
_NAMES = {
    0: "available",
    1: "acquired",
    2: "acknowledged",
    3: "handed out",
    4: "archived",
    5: "delayed",
    6: "paid",
}
_STORED = {
    **_NAMES,
    32: "dead-lettered (limit)",
    33: "dead-lettered (rejected)",
    34: "dead-lettered (lock expired)",
}


class Script:
    """Offsets are written `first-last`; a batch of the log that holds no records to hand out is in brackets."""

    def __init__(self) -> None:
        self.policy = SharePartitionPolicy(lock_ms=1000, delivery_limit=3, locks_max=100)
        self.counters = ShareCounters()
        self.totals = DeliveryTotals()  # as they are stored
        self.delays: dict[int, RecordDelay] = {}  # likewise
        self.now_ms = 0
        self.log: list[tuple[int, int, bool]] = []
        self.partition: SharePartition | None = None
        self.write: PendingWrite | None = None

    def run(self, line: str) -> Iterator[str]:
        name, *words = shlex.split(line, comments=True)
        command: Callable[..., Iterator[str]] = getattr(self, f"do_{name}")
        try:
            yield from command(*words)
        except ApiError as error:
            yield f"{error.code.name}: {error.message}"

    @property
    def rules(self) -> SharePartition:
        assert self.partition is not None
        return self.partition

    def do_policy(self, *words: str) -> Iterator[str]:
        """at-most-once, dead-letters, delay=MS, limit=N, locks=N, no-renewals"""
        for word in words:
            name, _, value = word.partition("=")
            change = {
                "at-most-once": lambda: {"is_at_most_once": True},
                "dead-letters": lambda: {"writes_dead_letters": True},
                "delay": lambda value=value: {
                    "backoff": RedeliveryBackoff(int(value), int(value) * 8, 0, True)
                },
                "limit": lambda value=value: {"delivery_limit": int(value)},
                "locks": lambda value=value: {"locks_max": int(value)},
                "no-renewals": lambda: {"may_renew": False},
            }[name]()
            self.policy = self.policy._replace(**change)
        if self.partition is not None:
            self.partition.policy = self.policy
        yield from ()

    def do_log(self, *words: str) -> Iterator[str]:
        for word in words:
            first, last = (int(number) for number in word.strip("[]").split("-"))
            self.log.append((first, last + 1, not word.startswith("[")))
        yield from ()

    def do_load(self, start: str, *words: str) -> Iterator[str]:
        """START FIRST-LAST:STATE:COUNT ..."""
        batches = []
        for word in words:
            offsets, state, count = word.split(":")
            first, last = offsets.split("-")
            code = next(code for code, name in _NAMES.items() if name == state)
            batches.append((int(first), int(last), code, int(count)))
        self.partition = SharePartition(
            int(start),
            batches,
            self.policy,
            self.counters,
            self.totals,
            tuple(self.delays.values()),
            now_ms=self.now_ms,
            chance=0,
        )
        yield from self.do_show()

    def _found(self) -> ReadableRecords | None:
        offset = self.rules.next_offset
        batches = [] if offset is None else [batch for batch in self.log if batch[1] > offset]
        if offset is None or not batches:
            return None
        spans: list[tuple[int, int]] = []
        for first, end, has_records in batches:
            if has_records:
                spans.append((first, end))
        return ReadableRecords(offset, batches[-1][1], spans, [end for _, end, _ in batches])

    def do_fetch(self, member: str, records: str = "100", mode: str = "") -> Iterator[str]:
        found = self._found()
        if found is None:
            yield "nothing"
            return
        limits = AcquireLimits(int(records), exact=mode == "exact")
        acquired = self.rules.acquire(member, found, limits, now_ms=self.now_ms)
        if not acquired and self.policy.is_at_most_once and self.rules.reserve(found, limits):
            yield "to be written first"
        elif not acquired:
            yield "nothing"
        for first, last, count in acquired:
            yield f"{first}-{last}, delivery {count}"

    def do_say(self, member: str, *words: str) -> Iterator[str]:
        """MEMBER FIRST-LAST:KIND[,KIND...] ..."""
        batches = []
        for word in words:
            offsets, kinds = word.split(":")
            first, last = offsets.split("-")
            types = bytes(_KINDS[kind] for kind in kinds.split(","))
            batches.append(AcknowledgementBatch(int(first), int(last), types))
        check_acknowledgements(batches, may_renew=True)
        is_written = self.rules.acknowledge(member, batches, now_ms=self.now_ms, chance=0)
        yield "waits for a write" if is_written else "done"

    def do_ask(self, offset: str, delivery_count: str, delay_ms: str) -> Iterator[str]:
        """OFFSET DELIVERY MS: how long the record is to rest if it is released."""
        is_held = self.rules.request_delay(int(offset), int(delivery_count), int(delay_ms))
        yield "noted" if is_held else "not acquired by this delivery"

    def do_idle(self) -> Iterator[str]:
        yield "idle" if self.rules.is_idle else "busy"

    def do_gone(self, member: str) -> Iterator[str]:
        is_written = self.rules.release(member, now_ms=self.now_ms, chance=0, with_delay=False)
        yield "waits for a write" if is_written else "done"

    def do_after(self, passes_ms: str) -> Iterator[str]:
        self.now_ms += int(passes_ms)
        self.rules.tick(now_ms=self.now_ms, chance=0)
        yield from self.do_show()

    def do_write(self) -> Iterator[str]:
        self.write = self.rules.take_write()
        if self.write is None:
            yield "nothing to write"
            return
        yield f"start {self.write.start_offset}, {self.write.delivery_complete_count} complete behind it"
        for first, last, state, count in self.write.batches:
            yield f"{first}-{last} {_STORED[state]}, delivery {count}"
        if self.write.totals is not None:
            yield _shown(self.write.totals)
        for offset, count, due_ms in self.write.delays:
            yield f"{offset} from delivery {count} not before {due_ms}"

    def do_written(self) -> Iterator[str]:
        assert self.write is not None
        self.totals = self.write.totals or self.totals
        self.delays |= {delay.offset: delay for delay in self.write.delays}
        self.rules.written()
        yield from self.do_show()

    def do_failed(self) -> Iterator[str]:
        self.rules.write_failed()
        yield from self.do_show()

    def do_deleted(self, before: str) -> Iterator[str]:
        self.rules.log_start_moved(int(before))
        yield from self.do_show()

    def do_totals(self) -> Iterator[str]:
        yield _shown(self.rules.totals)

    def do_counters(self, *names: str) -> Iterator[str]:
        yield ", ".join(f"{name} {getattr(self.counters, name)}" for name in names)

    def do_show(self) -> Iterator[str]:
        window = self.rules._core.window
        yield f"start {window.start}, end {window.end}"
        for run in in_flight_records.RUN.finditer(window.states):
            code = window.states[run.start()]
            target = code & ~(in_flight_records.QUEUED | in_flight_records.WRITING)
            name = f"waits to be {_STORED[target]}" if code & in_flight_records.QUEUED else _NAMES[code]
            yield f"{window.start + run.start()}-{window.start + run.end() - 1} {name}"


def _shown(totals: DeliveryTotals) -> str:
    return f"handed out {totals.handed_out}, confirmed {totals.confirmed}, expired {totals.expired}"
