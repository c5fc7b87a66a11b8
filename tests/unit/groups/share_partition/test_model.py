"""The window of bytes does what an object for each record would do, whatever happens, and keeps the promises."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.groups.share_partition.naive import Naive

from penstock.groups.share_partition import states
from penstock.groups.share_partition.messages import (
    ACCEPT,
    GAP,
    REJECT,
    Acknowledgement,
    Appetite,
    Counters,
    Found,
)
from penstock.groups.share_partition.partition import SharePartition
from penstock.groups.share_partition.policy import Backoff, Policy
from penstock.protocol.errors import ApiError

MEMBERS = ("a", "b", "c")
LOG_END = 60
POLICIES = st.builds(
    Policy,
    lock_ms=st.just(100),
    delivery_limit=st.integers(2, 4),
    locks_max=st.sampled_from((5, 20)),
    may_renew=st.booleans(),
    is_at_most_once=st.booleans(),
    buries=st.booleans(),
    backoff=st.none() | st.just(Backoff(50, 150, 20, True)) | st.just(Backoff(30, 30, 0, False)),
)


class Store:
    """What is stored for each record: more deliveries win, then the higher state."""

    def __init__(self) -> None:
        self.start = 0
        self.records: dict[int, tuple[int, int]] = {}
        self.buried: dict[int, int] = {}

    def write(self, write) -> None:
        self.start = max(self.start, write.start_offset)
        for first, last, state, count in write.batches:
            for offset in range(first, last + 1):
                if state >= states.LIMIT:
                    assert self.buried.setdefault(offset, state) == state, "buried for two reasons"
                    state = states.ARCHIVED
                old = self.records.get(offset, (0, 0))
                if (count, state) >= (old[1], old[0]):
                    self.records[offset] = (state, count)
        self.records = {offset: kept for offset, kept in self.records.items() if offset >= self.start}

    def batches(self) -> list[tuple[int, int, int, int]]:
        return [(offset, offset, state, count) for offset, (state, count) in sorted(self.records.items())]


class SharePartitionMachine(RuleBasedStateMachine):
    @initialize(
        policy=POLICIES, batch_sizes=st.lists(st.integers(1, 9), min_size=5, max_size=12), data=st.data()
    )
    def begin(self, policy: Policy, batch_sizes: list[int], data: st.DataObject) -> None:
        self.policy, self.now_ms, self.store, self.counters = policy, 1000, Store(), Counters()
        #: The log: (first, end, whether it has records to hand out), and holes where compaction took batches.
        self.log: list[tuple[int, int, bool]] = []
        at = 0
        for size in batch_sizes:
            kind = data.draw(st.sampled_from(("data", "data", "data", "control", "hole")))
            if kind != "hole":
                self.log.append((at, at + size, kind == "data"))
            at += size
        self.log_end = self.log[-1][1] if self.log else 0
        self.locks: dict[int, tuple[str, int]] = {}  # as the members see it
        self.deliveries: dict[int, int] = {}
        self.fate: dict[int, str] = {}
        self.released_at: dict[int, int] = {}
        self.deaths = 0
        self.load()

    def load(self) -> None:
        start, batches = self.store.start, self.store.batches()
        self.real = SharePartition(start, batches, self.policy, self.counters, now_ms=self.now_ms, chance=0.5)
        self.naive = Naive.load(start, self.store.records, self.policy, self.now_ms, 0.5)
        self.locks.clear()
        self.write = None

    def found_from(self, offset: int, bytes_max: int) -> Found | None:
        batches = [batch for batch in self.log if batch[1] > offset][:bytes_max]
        if not batches:
            return None
        spans: list[tuple[int, int]] = []
        for first, end, has_records in batches:
            if has_records and spans and spans[-1][1] == first:
                spans[-1] = (spans[-1][0], end)
            elif has_records:
                spans.append((first, end))
        return Found(offset, batches[-1][1], spans, [end for _, end, _ in batches])

    @rule(
        member=st.sampled_from(MEMBERS),
        records=st.integers(1, 12),
        batch_records=st.integers(1, 6),
        exact=st.booleans(),
        batches=st.integers(1, 6),
    )
    def acquire(self, member: str, records: int, batch_records: int, exact: bool, batches: int) -> None:
        offset = self.real.next_offset
        if offset is None or (found := self.found_from(offset, batches)) is None:
            return
        appetite = Appetite(records, batch_records, exact)
        got = self.real.acquire(member, found, appetite, now_ms=self.now_ms)
        expected = self.naive.acquire(member, found, appetite, self.policy, self.now_ms)
        flat = [(o, count) for first, last, count in got for o in range(first, last + 1)]
        assert flat == expected
        for handed, count in flat:
            self.check_handed(member, handed, count)
        if self.policy.is_at_most_once and not flat:
            reserved = self.real.reserve(found, appetite)
            self.naive.acquire(member, found, appetite, self.policy, self.now_ms, reserve=True)
            assert not reserved or any(record.target is not None for record in self.naive.records.values())

    def check_handed(self, member: str, offset: int, count: int) -> None:
        assert any(first <= offset < end and has for first, end, has in self.log), (
            "handed out what is not there"
        )
        assert offset not in self.fate, "handed out although it was done with"
        holder = self.locks.get(offset)
        assert holder is None or holder[1] <= self.now_ms, "two members hold one record"
        assert count <= self.policy.delivery_limit
        self.deliveries[offset] = self.deliveries.get(offset, 0) + 1
        assert count <= self.deliveries[offset]
        if self.policy.is_at_most_once:
            assert self.deliveries[offset] == 1, "handed out twice"
        assert self.released_at.pop(offset, 0) <= self.now_ms, "handed out before its time"
        self.locks[offset] = (member, self.now_ms + self.policy.lock_ms)

    @rule(
        member=st.sampled_from(MEMBERS),
        data=st.data(),
        chance=st.floats(0, 1),
        own=st.booleans(),
        one_type=st.booleans(),
    )
    def acknowledge(self, member: str, data: st.DataObject, chance: float, own: bool, one_type: bool) -> None:
        batches = self.draw_acknowledgements(member, data, own, one_type)
        if not batches:
            return
        errors = []
        for call in (self.real.acknowledge, None):
            try:
                if call is None:
                    self.naive.acknowledge(member, batches, self.policy, self.now_ms, chance)
                else:
                    call(member, batches, now_ms=self.now_ms, chance=chance)
                errors.append(None)
            except ApiError as error:
                errors.append(error.code)
        assert errors[0] == errors[1]
        if errors[0] is None:
            self.note_said(batches, chance)

    def draw_acknowledgements(
        self, member: str, data: st.DataObject, own: bool, one_type: bool
    ) -> list[Acknowledgement]:
        mine = sorted(o for o, (holder, _) in self.locks.items() if holder == member)
        if own and not mine:
            return []
        offsets = sorted(
            data.draw(
                st.sets(st.sampled_from(mine) if own else st.integers(0, LOG_END), min_size=1, max_size=8)
            )
        )
        batches: list[Acknowledgement] = []
        kinds = st.integers(0, 4)
        for offset in offsets:
            if batches and batches[-1].last_offset == offset - 1:
                before = batches.pop()
                kind = before.types[:1] if one_type else bytes((data.draw(kinds),))
                batches.append(Acknowledgement(before.first_offset, offset, before.types + kind))
            else:
                batches.append(Acknowledgement(offset, offset, bytes((data.draw(kinds),))))
        return [b._replace(types=b.types[:1]) if one_type else b for b in batches]

    def note_said(self, batches: list[Acknowledgement], chance: float) -> None:
        for first, last, types in batches:
            for offset in range(first, last + 1):
                kind = types[0] if len(types) == 1 else types[offset - first]
                if offset not in self.locks:
                    continue
                if kind == 4:
                    self.locks[offset] = (self.locks[offset][0], self.now_ms + self.policy.lock_ms)
                    continue
                record = self.naive.records.get(offset)
                if kind in (ACCEPT, GAP, REJECT):
                    self.fate[offset] = "said"
                elif record is not None and record.target == states.DELAYED:
                    assert self.policy.backoff is not None
                    self.released_at[offset] = self.now_ms + self.policy.backoff.delay_ms(record.count, 0)
                del self.locks[offset]

    @rule(member=st.sampled_from(MEMBERS), chance=st.floats(0, 1), with_delay=st.booleans())
    def release(self, member: str, chance: float, with_delay: bool) -> None:
        self.real.release(member, now_ms=self.now_ms, chance=chance, with_delay=with_delay)
        policy = self.policy if with_delay else self.policy._replace(backoff=None)
        self.naive.release(member, policy, self.now_ms, chance)
        self.locks = {o: lock for o, lock in self.locks.items() if lock[0] != member}

    @rule(passes_ms=st.sampled_from((1, 30, 101)), chance=st.floats(0, 1))
    def tick(self, passes_ms: int, chance: float) -> None:
        self.now_ms += passes_ms
        self.real.tick(now_ms=self.now_ms, chance=chance)
        self.naive.tick(self.policy, self.now_ms, chance)
        self.locks = {o: lock for o, lock in self.locks.items() if lock[1] > self.now_ms}

    @precondition(lambda self: self.write is None)
    @rule()
    def take_write(self) -> None:
        self.write = self.real.take_write()
        if self.write is None:
            assert all(record.target is None for record in self.naive.records.values())
            return
        self.naive.launch()
        assert list(self.write.batches) == sorted(self.write.batches)

    @precondition(lambda self: self.write is not None)
    @rule()
    def written(self) -> None:
        self.store.write(self.write)
        self.write = None
        self.real.written()
        self.naive.settle()
        self.check_stored()

    @precondition(lambda self: self.write is not None)
    @rule(landed=st.booleans())
    def write_fails(self, landed: bool) -> None:
        if landed:
            self.store.write(self.write)
        self.write = None
        self.real.write_failed()

    @rule(landed=st.booleans())
    def leader_dies(self, landed: bool) -> None:
        if self.write is not None and landed:
            self.store.write(self.write)
        self.real.given_up()
        self.deaths += 1
        # What was said and is not stored is forgotten, as whoever said it has no answer either.
        self.fate = {offset: "stored" for offset in self.fate if self.is_final(offset)}
        self.released_at = {}
        self.load()
        if self.policy.backoff is not None:
            # A delay that was stored begins anew; one that was not stored never began.
            for offset, (state, count) in self.store.records.items():
                if state == states.AVAILABLE and count:
                    self.released_at[offset] = self.now_ms + self.policy.backoff.delay_ms(count, 0)

    def is_final(self, offset: int) -> bool:
        stored = self.store.records.get(offset, (states.AVAILABLE, 0))
        return offset < self.store.start or stored[0] in (states.ACKNOWLEDGED, states.ARCHIVED)

    def check_stored(self) -> None:
        """What can be seen is stored: a reload would show the same of every record that nobody holds."""
        for offset, record in self.naive.records.items():
            if record.target is not None or record.state in (states.ACQUIRED, states.HANDED):
                continue
            state, count = self.store.records.get(offset, (states.AVAILABLE, 0))
            if record.state in (states.AVAILABLE, states.DELAYED):
                assert (state, count) == (states.AVAILABLE, record.count)
            elif record.state in (states.ACKNOWLEDGED, states.PAID):
                assert self.is_final(offset)

    @invariant()
    def same_as_the_naive_one(self) -> None:
        if not hasattr(self, "real"):
            return
        window = self.real._core.window
        assert (window.start, window.end) == (self.naive.start, self.naive.end)
        seen = {}
        for place, code in enumerate(window.states):
            target = code & ~(states.QUEUED | states.LAUNCHED) if code & states.QUEUED else None
            seen[window.start + place] = code if target is None else f"waiting for {target}"
        assert seen == {offset: record.seen for offset, record in self.naive.records.items()}
        for offset, record in self.naive.records.items():
            place = offset - window.start
            assert window.counts[place] == record.count
            if record.target is None and record.state in (states.ACQUIRED, states.HANDED, states.DELAYED):
                assert window.times[place] == record.time_ms
                assert any(t <= record.time_ms and f <= offset < e for t, f, e in self.real._core.timers)

    def teardown(self) -> None:
        """Nothing is lost: every record of the log can still be worked off."""
        if not hasattr(self, "real"):
            return
        self.policy = self.policy._replace(locks_max=1000)
        self.real.policy = self.policy
        for _ in range(200):
            if self.write is not None:
                self.written()
            self.tick(1000, 0.0)
            self.acquire("a", 100, 100, False, 100)
            held = sorted(o for o, (holder, _) in self.locks.items() if holder == "a")
            for offset in held:
                batch = [Acknowledgement(offset, offset, b"\x01")]
                self.real.acknowledge("a", batch, now_ms=self.now_ms, chance=0)
                self.naive.acknowledge("a", batch, self.policy, self.now_ms, 0)
                self.note_said(batch, 0)
            self.take_write()
            if self.write is None and not held and self.real.start_offset >= self.log_end:
                break
        assert self.real.start_offset >= self.log_end, "something never came"
        there = [o for first, end, has_records in self.log if has_records for o in range(first, end)]
        if self.policy.is_at_most_once:
            counters = self.counters
            assert counters.handed_out == counters.confirmed + counters.unconfirmed
            assert counters.handed_out == len(self.deliveries)
            assert len(there) <= counters.handed_out + counters.withheld, "lost and not counted"
            assert self.deaths or counters.handed_out == len(there), "lost although nobody died"
            return
        for offset in there:
            done = offset in self.fate or self.deliveries.get(offset, 0) >= self.policy.delivery_limit
            assert done, f"{offset} was lost"


TestSharePartition = SharePartitionMachine.TestCase
TestSharePartition.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
