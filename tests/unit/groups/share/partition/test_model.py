"""A share partition behaves as the naive model does, under any sequence of events."""

import random
from collections.abc import Callable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.groups.share.partition.naive import Naive

from penstock.groups.share.partition import in_flight_records
from penstock.groups.share.partition.share_partition import SharePartition
from penstock.groups.share.partition.share_partition_state import (
    ACCEPT,
    GAP,
    REJECT,
    RENEW,
    AcknowledgementBatch,
    AcquiredBatch,
    AcquireLimits,
    PendingWrite,
    ReadableRecords,
    RedeliveryBackoff,
    ShareCounters,
    SharePartitionPolicy,
)
from penstock.groups.share.state.share_state import DeliveryTotals
from penstock.protocol.errors import ApiError, ErrorCode

MEMBERS = ("a", "b", "c")
FINAL = (in_flight_records.ACKNOWLEDGED, in_flight_records.ARCHIVED)


class Store:
    """What is stored for each record: more deliveries win, then the higher state."""

    def __init__(self) -> None:
        self.start = 0
        self.records: dict[int, tuple[int, int]] = {}
        self.dead_letters: dict[int, int] = {}
        self.totals = DeliveryTotals()

    def write(self, write: PendingWrite) -> None:
        self.totals = write.totals or self.totals
        self.start = max(self.start, write.start_offset)
        for first, last, state, count in write.batches:
            for offset in range(first, last + 1):
                self._put(offset, state, count)
        self.records = {offset: kept for offset, kept in self.records.items() if offset >= self.start}

    def _put(self, offset: int, state: int, count: int) -> None:
        if state >= in_flight_records.DELIVERY_LIMIT_REACHED:
            assert self.dead_letters.setdefault(offset, state) == state, "two dead letters"
            state = in_flight_records.ARCHIVED
        before = self.records.get(offset, (0, 0))
        if (count, state) >= (before[1], before[0]):
            self.records[offset] = (state, count)

    def batches(self) -> list[tuple[int, int, int, int]]:
        return [(offset, offset, state, count) for offset, (state, count) in sorted(self.records.items())]

    def is_final(self, offset: int) -> bool:
        return offset < self.start or self.records.get(offset, (in_flight_records.AVAILABLE, 0))[0] in FINAL


def some_policy(rng: random.Random) -> SharePartitionPolicy:
    return SharePartitionPolicy(
        lock_ms=100,
        delivery_limit=rng.randint(2, 4),
        locks_max=rng.choice((5, 20)),
        may_renew=rng.random() < 0.8,
        is_at_most_once=rng.random() < 0.4,
        writes_dead_letters=rng.random() < 0.5,
        backoff=rng.choice((None, RedeliveryBackoff(50, 150, 20, True), RedeliveryBackoff(30, 30, 0, False))),
    )


def some_log(rng: random.Random) -> list[tuple[int, int, bool]]:
    """Batches as (first, end, whether they have records to hand out), with holes where compaction took some."""
    log, at = [], 0
    for _ in range(rng.randint(5, 12)):
        size = rng.randint(1, 9)
        kind = rng.choice(("data", "data", "data", "control", "hole"))
        if kind != "hole":
            log.append((at, at + size, kind == "data"))
        at += size
    return log or [(0, 3, True)]


class World:
    """A share partition, the naive one beside it, what is stored, and what the members believe."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.policy, self.log = some_policy(self.rng), some_log(self.rng)
        self.now_ms, self.store, self.counters = 1000, Store(), ShareCounters()
        self.locks: dict[int, tuple[str, int]] = {}
        self.deliveries: dict[int, int] = {}
        self.cause: set[int] = set()  # offsets of which a member has said that it is done with them
        self.not_before: dict[int, int] = {}
        self.deaths = 0
        self.shrinks = self.rng.random() < 0.3  # compaction and retention are at work
        self.log_start = 0
        self.has_turned = False  # from at least to at most once
        #: At most once: what members have accepted, what of it the write under way says, and what is stored.
        self.accepted: set[int] = set()
        self.on_the_way: set[int] = set()
        self.confirmed: set[int] = set()
        self.load()

    def load(self) -> None:
        start, batches = self.store.start, self.store.batches()
        totals, now_ms = self.store.totals, self.now_ms
        self.real = SharePartition(
            start, batches, self.policy, self.counters, totals, now_ms=now_ms, chance=0.5
        )
        self.accepted, self.on_the_way = set(self.confirmed), set(self.confirmed)
        self.naive = Naive.load(start, self.store.records, self.policy, self.now_ms, 0.5)
        self.locks, self.not_before, self.write = {}, {}, None
        self.tell_log_start()
        if self.policy.backoff is not None:
            # A stored delay starts again; one that was not stored never started.
            for offset, (state, count) in self.store.records.items():
                if state == in_flight_records.AVAILABLE and count:
                    self.not_before[offset] = self.now_ms + self.policy.backoff.delay_ms(count, 0)

    def step(self) -> None:
        steps: list[tuple[int, Callable[[], None]]] = [
            (6, self.acquire),
            (6, self.acknowledge),
            (1, self.release),
            (2, self.tick),
            (4, self.begin_write if self.write is None else self.end_write),
            (1, self.leader_dies),
        ]
        if self.shrinks:
            steps += [(1, self.compact), (1, self.delete)]
        if not self.policy.is_at_most_once:
            steps.append((0 if self.rng.random() < 0.9 else 1, self.turn_to_at_most_once))
        (chosen,) = self.rng.choices([step for _, step in steps], [weight for weight, _ in steps])
        chosen()
        self.check_same()

    # -- handing out ---------------------------------------------------------------------------------

    def found(self, batches_max: int) -> ReadableRecords | None:
        self.tell_log_start()
        offset = self.real.next_offset
        batches = [] if offset is None else [batch for batch in self.log if batch[1] > offset][:batches_max]
        if offset is None or not batches or offset < self.log_start:
            return None
        spans: list[tuple[int, int]] = []
        for first, end, has_records in batches:
            if has_records and spans and spans[-1][1] == first:
                spans[-1] = (spans[-1][0], end)
            elif has_records:
                spans.append((first, end))
        return ReadableRecords(offset, batches[-1][1], spans, [end for _, end, _ in batches])

    def acquire(self) -> None:
        rng = self.rng
        limits = AcquireLimits(rng.randint(1, 12), rng.randint(1, 6), rng.random() < 0.5)
        self.acquire_for(rng.choice(MEMBERS), limits, rng.randint(1, 6))

    def acquire_for(self, member: str, limits: AcquireLimits, batches_max: int) -> list[int]:
        found = self.found(batches_max)
        if found is None:
            return []
        got = self.real.acquire(member, found, limits, now_ms=self.now_ms)
        expected = self.naive.acquire(member, found, limits, self.policy, self.now_ms)
        handed = flat(got)
        assert handed == expected
        for offset, count in handed:
            self.check_handed(member, offset, count)
        if self.policy.is_at_most_once and not handed:
            self.real.reserve(found, limits)
            self.naive.acquire(member, found, limits, self.policy, self.now_ms, reserve=True)
        return [offset for offset, _ in handed]

    def check_handed(self, member: str, offset: int, count: int) -> None:
        assert any(first <= offset < end and has for first, end, has in self.log), "there is no such record"
        assert offset not in self.cause, "handed out although somebody was done with it"
        holder = self.locks.get(offset)
        assert holder is None or holder[1] <= self.now_ms, "two members hold one record"
        self.deliveries[offset] = self.deliveries.get(offset, 0) + 1
        assert count <= min(self.policy.delivery_limit, self.deliveries[offset])
        if self.policy.is_at_most_once:
            assert self.deliveries[offset] == 1, "handed out twice"
        assert self.not_before.pop(offset, 0) <= self.now_ms, "handed out before its time"
        self.locks[offset] = (member, self.now_ms + self.policy.lock_ms)

    # -- what members say ----------------------------------------------------------------------------

    def acknowledge(self) -> None:
        rng, member = self.rng, self.rng.choice(MEMBERS)
        mine = sorted(offset for offset, (holder, _) in self.locks.items() if holder == member)
        if rng.random() < 0.2 or not mine:
            mine = list(range(self.log[-1][1] + 3))
        offsets = sorted(rng.sample(mine, min(len(mine), rng.randint(1, 8))))
        self.say(member, self.some_batches(offsets, rng.random() < 0.5), rng.random())

    def some_batches(self, offsets: list[int], one_type: bool) -> list[AcknowledgementBatch]:
        batches: list[AcknowledgementBatch] = []
        for offset in offsets:
            kind = bytes((self.rng.randint(0, 4),))
            if batches and batches[-1].last_offset == offset - 1:
                before = batches.pop()
                types = before.types if one_type else before.types + kind
                batches.append(AcknowledgementBatch(before.first_offset, offset, types))
            else:
                batches.append(AcknowledgementBatch(offset, offset, kind))
        return batches

    def say(self, member: str, batches: list[AcknowledgementBatch], chance: float) -> None:
        errors: list[ErrorCode | None] = []
        calls = (
            lambda: self.real.acknowledge(member, batches, now_ms=self.now_ms, chance=chance),
            lambda: self.naive.acknowledge(member, batches, self.policy, self.now_ms, chance),
        )
        for call in calls:
            try:
                call()
                errors.append(None)
            except ApiError as error:
                errors.append(error.code)
        assert errors[0] == errors[1]
        if errors[0] is None:
            self.note_said(batches)

    def note_said(self, batches: list[AcknowledgementBatch]) -> None:
        for first, last, types in batches:
            for offset in range(first, last + 1):
                kind = types[0] if len(types) == 1 else types[offset - first]
                if offset not in self.locks:
                    continue
                if kind == RENEW:
                    self.locks[offset] = (self.locks[offset][0], self.now_ms + self.policy.lock_ms)
                    continue
                if kind == ACCEPT and self.policy.is_at_most_once:
                    self.accepted.add(offset)
                record = self.naive.records.get(offset)
                if kind in (ACCEPT, GAP, REJECT):
                    self.cause.add(offset)
                elif record is not None and record.target == in_flight_records.DELAYED:
                    assert self.policy.backoff is not None
                    self.not_before[offset] = self.now_ms + self.policy.backoff.delay_ms(record.count, 0)
                del self.locks[offset]

    def release(self) -> None:
        member, chance, with_delay = self.rng.choice(MEMBERS), self.rng.random(), self.rng.random() < 0.5
        self.real.release(member, now_ms=self.now_ms, chance=chance, with_delay=with_delay)
        policy = self.policy if with_delay else self.policy._replace(backoff=None)
        self.naive.release(member, policy, self.now_ms, chance)
        self.locks = {offset: lock for offset, lock in self.locks.items() if lock[0] != member}

    def tick(self) -> None:
        self.pass_time(self.rng.choice((1, 30, 60, 101)), self.rng.random())

    def pass_time(self, passes_ms: int, chance: float) -> None:
        self.now_ms += passes_ms
        self.real.tick(now_ms=self.now_ms, chance=chance)
        self.naive.tick(self.policy, self.now_ms, chance)
        self.locks = {offset: lock for offset, lock in self.locks.items() if lock[1] > self.now_ms}

    def turn_to_at_most_once(self) -> None:
        self.has_turned = True
        self.real.policy = self.policy = self.policy._replace(is_at_most_once=True)

    # -- what the log does ---------------------------------------------------------------------------

    def compact(self) -> None:
        """A batch has lost its records, and may be gone itself; one is never the last."""
        place = self.rng.randrange(len(self.log))
        first, end, _ = self.log[place]
        if place + 1 < len(self.log) and self.rng.random() < 0.5:
            del self.log[place]
        else:
            self.log[place] = (first, end, False)

    def delete(self) -> None:
        self.log_start = max(self.log_start, self.rng.choice(self.log[:4])[0])
        self.log = [
            (max(first, self.log_start), end, has) for first, end, has in self.log if end > self.log_start
        ]
        self.tell_log_start()

    def tell_log_start(self) -> None:
        if self.real.start_offset < self.log_start:
            self.real.log_start_moved(self.log_start)
            self.naive.log_start_moved(self.log_start)

    # -- what is stored ------------------------------------------------------------------------------

    def begin_write(self) -> None:
        self.write = self.real.take_write()
        if self.write is None:
            assert all(record.target is None for record in self.naive.records.values())
            return
        self.on_the_way = set(self.accepted)
        self.naive.launch()
        batches = self.write.batches
        assert all(one[1] < other[0] for one, other in pairwise(batches))

    def end_write(self) -> None:
        fails, arrives = self.rng.random() < 0.3, self.rng.random() < 0.5
        if fails:
            self.fail_write(arrives=arrives)
        else:
            self.finish_write()

    def arrive(self) -> None:
        assert self.write is not None
        self.store.write(self.write)
        self.confirmed = set(self.on_the_way)
        if self.is_at_most_once_from_the_start:
            there = [o for first, end, has_records in self.log if has_records for o in range(first, end)]
            final = sum(map(self.store.is_final, there))
            assert self.store.totals == DeliveryTotals(final, len(self.confirmed), 0), (
                "not what is stored beside it"
            )

    @property
    def is_at_most_once_from_the_start(self) -> bool:
        return self.policy.is_at_most_once and not self.has_turned and not self.shrinks

    def finish_write(self) -> None:
        self.arrive()
        self.write = None
        self.real.written()
        self.naive.settle()
        self.check_stored()

    def fail_write(self, *, arrives: bool) -> None:
        assert self.write is not None
        if arrives:
            self.arrive()
        self.write = None
        self.real.write_failed()

    def leader_dies(self) -> None:
        if self.write is not None and self.rng.random() < 0.5:
            self.arrive()
        self.deaths += 1
        # Acknowledgements that are not stored are forgotten; their sender has no reply either.
        self.cause = {offset for offset in self.cause if self.store.is_final(offset)}
        # As in Apache Kafka, a delivery is known when it is answered, unless it was final before it left.
        known = {offset: count for offset, (_, count) in self.store.records.items()}
        self.deliveries = {
            offset: count if self.store.is_final(offset) else known.get(offset, 0)
            for offset, count in self.deliveries.items()
        }
        self.load()

    # -- what must be true ---------------------------------------------------------------------------

    def check_stored(self) -> None:
        """Visible state is stored: a reload would show the same for every record that is not acquired."""
        for offset, record in self.naive.records.items():
            if record.target is not None:
                continue
            state, count = self.store.records.get(offset, (in_flight_records.AVAILABLE, 0))
            if record.state in (in_flight_records.AVAILABLE, in_flight_records.DELAYED):
                assert (state, count) == (in_flight_records.AVAILABLE, record.count)
            elif record.state in (
                in_flight_records.ACKNOWLEDGED,
                in_flight_records.RESERVED,
                in_flight_records.ACQUIRED_FINAL,
            ):
                assert self.store.is_final(offset)

    def check_same(self) -> None:
        window, records = self.real._core.window, self.naive.records
        assert (window.start, window.end) == (self.naive.start, self.naive.end)
        seen = {}
        for place, code in enumerate(window.states):
            target = code & ~(in_flight_records.QUEUED | in_flight_records.WRITING)
            seen[window.start + place] = f"waiting for {target}" if code & in_flight_records.QUEUED else code
        assert seen == {offset: record.seen for offset, record in records.items()}
        timers = self.real._core.timers
        for offset, record in records.items():
            place = offset - window.start
            assert window.counts[place] == record.count
            if record.target is None and record.state in (
                in_flight_records.ACQUIRED,
                in_flight_records.ACQUIRED_FINAL,
                in_flight_records.DELAYED,
            ):
                assert window.times[place] == record.time_ms
                assert any(at <= record.time_ms and first <= offset < end for at, first, end in timers)

    def work_off(self) -> None:
        """Whatever has happened, all that is left can be worked off."""
        self.real.policy = self.policy = self.policy._replace(locks_max=1000)
        for _ in range(200):
            if self.write is not None:
                self.finish_write()
            self.pass_time(1000, 0.0)
            for offset in self.acquire_for("a", AcquireLimits(100), 100):
                self.say("a", [AcknowledgementBatch(offset, offset, bytes((ACCEPT,)))], 0)
            self.begin_write()
            if self.write is None and not self.locks and self.real.start_offset >= self.log[-1][1]:
                return
        raise AssertionError(f"something never comes: {self.real!r}")

    def check_nothing_lost(self) -> None:
        there = {o for first, end, has_records in self.log if has_records for o in range(first, end)}
        totals = self.store.totals
        if not self.policy.is_at_most_once:
            for offset in there:
                often = self.deliveries.get(offset, 0) >= self.policy.delivery_limit
                assert offset in self.cause or often, f"{offset} was lost"
            return
        never_delivered = there - {offset for offset, count in self.deliveries.items() if count}
        assert len(never_delivered) <= totals.unconfirmed, "lost and not counted"
        assert self.deaths or not never_delivered, "lost without a crash"
        if self.is_at_most_once_from_the_start:
            assert totals.handed_out == len(there)


def flat(acquired: list[AcquiredBatch]) -> list[tuple[int, int]]:
    return [(offset, count) for first, last, count in acquired for offset in range(first, last + 1)]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_a_share_partition_keeps_its_promises(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.step()
    world.work_off()
    world.check_nothing_lost()
