"""Share state compared with a model that stores every offset, under any writes, reloads and repeats."""

from collections.abc import Sequence
from itertools import pairwise
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.groups.share.state.dead_letters import DeadLetterBreaker
from penstock.groups.share.state.share_state import (
    ARCHIVED,
    DEAD_LETTER_STATES,
    UNSET,
    DeleteState,
    DeliveryTotals,
    InitializeState,
    ReadState,
    SharePartitionKey,
    ShareState,
    ShareStateReply,
    StateRange,
    WriteState,
    drop_before,
    merge_into,
    normalize,
    overlay,
    subtract,
)
from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard
from penstock.protocol.errors import ErrorCode

KEY = SharePartitionKey("group", UUID(int=7), 3)

_range = st.tuples(st.integers(0, 40), st.integers(0, 12), st.sampled_from((0, 2, 4)), st.integers(0, 4)).map(
    lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2], drawn[3])
)
_ranges = st.lists(_range, max_size=12)


def by_offset(ranges: Sequence[StateRange]) -> dict[int, tuple[int, int]]:
    """What is known of each offset: (count, state), the larger of them where there are several."""
    known: dict[int, tuple[int, int]] = {}
    for first, last, state, count in ranges:
        for offset in range(first, last + 1):
            known[offset] = max(known.get(offset, (-1, -1)), (count, state))
    return known


def is_normalized(ranges: Sequence[StateRange]) -> bool:
    neighbours = pairwise(ranges)
    return all(a[1] < b[0] and (a[1] + 1 < b[0] or a[2:] != b[2:]) and a[0] <= a[1] for a, b in neighbours)


@given(_ranges, _ranges)
def test_ranges_are_put_together_offset_by_offset(left: list[StateRange], right: list[StateRange]) -> None:
    combined = overlay(normalize(left), normalize(right))
    assert by_offset(combined) == by_offset([*left, *right])
    assert is_normalized(combined)
    merged = list(normalize(left))
    merge_into(merged, normalize(right))
    assert merged == combined


@given(st.lists(_range, min_size=20, max_size=60), _range)
def test_one_range_among_many_finds_its_place(many: list[StateRange], one: StateRange) -> None:
    spread = normalize([(first * 9, last * 9, state, count) for first, last, state, count in many])
    merged = list(spread)
    merge_into(merged, (one, (one[1] + 100, one[1] + 300, 2, 4)))
    assert merged == overlay(spread, (one, (one[1] + 100, one[1] + 300, 2, 4)))


@given(_ranges, st.integers(0, 55), _ranges)
def test_cutting_and_taking_away(ranges: list[StateRange], offset: int, taken: list[StateRange]) -> None:
    ordered = list(normalize(ranges))
    left = subtract(ordered, normalize(taken))
    gone = by_offset(taken)
    assert by_offset(left) == {at: known for at, known in by_offset(ranges).items() if at not in gone}
    drop_before(ordered, offset)
    assert by_offset(ordered) == {at: known for at, known in by_offset(ranges).items() if at >= offset}


class Log:
    """The records of a shard, and the shard that they make."""

    def __init__(self, updates_per_snapshot: int) -> None:
        self._updates_per_snapshot = updates_per_snapshot
        self.batches: list[tuple[tuple[bytes, bytes | None], ...]] = []
        self.stored: list[object] = []
        self.shard = self._fresh()

    def _fresh(self) -> ShareCoordinatorShard:
        return ShareCoordinatorShard(updates_per_snapshot=self._updates_per_snapshot)

    def ask(self, *requests: InitializeState | ReadState | WriteState) -> ShareStateReply:
        work = self.shard.handle(requests, "me", now_ms=len(self.batches))
        self.append(work.records)
        ((token, replies),) = work.replies
        assert token == "me"
        assert isinstance(replies, tuple)
        return replies[-1]  # type: ignore[no-any-return]

    def append(self, records: tuple[tuple[bytes, bytes | None], ...]) -> None:
        for record in records:
            self.shard.replay(*record)
        if records:
            self.batches.append(records)
            self.stored.append(self.shard.stored())

    def loaded(self, batches: int) -> ShareCoordinatorShard:
        shard = self._fresh()
        for records in self.batches[:batches]:
            for record in records:
                shard.replay(*record)
        return shard


class Model:
    """Every offset by itself."""

    def __init__(self) -> None:
        self.start = 0
        self.known: dict[int, tuple[int, int]] = {}
        self.pending: dict[int, tuple[int, int]] = {}
        self.totals = DeliveryTotals()

    def write(self, start: int, batches: Sequence[StateRange], totals: DeliveryTotals | None) -> None:
        self.totals = DeliveryTotals(*map(max, self.totals, totals or self.totals))
        for offset, (count, state) in by_offset(batches).items():
            if offset < self.start:
                continue
            before = self.known.get(offset, (0, 0))
            if state in DEAD_LETTER_STATES and before[1] == 0 and count >= before[0]:
                self.pending[offset] = (count, state)
            if state in DEAD_LETTER_STATES:
                state = ARCHIVED
            self.known[offset] = max(before if offset in self.known else (-1, -1), (count, state))
        self.start = max(self.start, start)
        self.known = {offset: known for offset, known in self.known.items() if offset >= self.start}


_written = st.lists(
    st.tuples(
        st.integers(0, 40), st.integers(0, 6), st.sampled_from((0, 2, 4, 32, 33, 34)), st.integers(1, 5)
    ).map(lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2], drawn[3])),
    max_size=8,
).filter(lambda ranges: _apart(ranges))


def _apart(ranges: Sequence[StateRange]) -> bool:
    """Within one write an offset has one fate."""
    seen = [offset for first, last, _, _ in ranges for offset in range(first, last + 1)]
    return len(seen) == len(set(seen))


_totals = st.none() | st.builds(DeliveryTotals, *[st.integers(0, 9)] * 3)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(UNSET, 30), _written, _totals), max_size=14), st.integers(1, 4))
def test_the_shard_equals_the_model_and_so_does_what_is_loaded_from_any_prefix(
    writes: list[tuple[int, list[StateRange], DeliveryTotals | None]], updates_per_snapshot: int
) -> None:
    log, model = Log(updates_per_snapshot), Model()
    log.ask(InitializeState(KEY, 1, 0))
    for start, batches, totals in writes:
        write = WriteState(KEY, 1, 5, start, 0, batches, totals)
        assert log.ask(write) == ShareStateReply()
        model.write(start, batches, totals)
        check(log.shard, model)
        # Writing it again, as after a lost reply, changes nothing.
        assert log.ask(write) == ShareStateReply()
        check(log.shard, model)
    for prefix in range(1, len(log.batches) + 1):
        assert log.loaded(prefix).stored() == log.stored[prefix - 1]


def check(shard: ShareCoordinatorShard, model: Model) -> None:
    state, _, dead_letters = shard.stored()[KEY]
    assert state is not None
    assert state.start_offset == model.start
    assert is_normalized(state.batches)
    assert by_offset(state.batches) == model.known
    assert state.totals == model.totals
    assert by_offset(() if dead_letters is None else dead_letters.pending) == model.pending


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_older_leaders_and_other_states_are_fenced(
    leader: int, other_leader: int, epoch: int, other_epoch: int
) -> None:
    log = Log(500)
    log.ask(InitializeState(KEY, epoch, 0))
    assert log.ask(ReadState(KEY, leader)).error is ErrorCode.none
    before = log.shard.stored()
    answer = log.ask(WriteState(KEY, other_epoch, other_leader, 5, 0, [(5, 6, 2, 1)]))
    if other_leader < leader:
        assert answer.error is ErrorCode.fenced_leader_epoch
    elif other_epoch != epoch:
        assert answer.error is ErrorCode.fenced_state_epoch
    else:
        assert answer.error is ErrorCode.none
    # A fenced writer changes nothing, and a loaded shard fences the same writers.
    if answer.error is not ErrorCode.none:
        assert log.shard.stored() == before
        loaded = log.loaded(len(log.batches))
        again = loaded.handle([WriteState(KEY, other_epoch, other_leader, 5, 0, [])], "me", now_ms=0)
        assert again.replies == (("me", (answer,)),)
    assert (log.ask(ReadState(KEY, other_leader)).error is ErrorCode.none) == (other_leader >= leader)


@given(st.lists(_written, max_size=6), st.integers(0, 6))
def test_a_checkpoint_says_all_that_was_said_before(writes: list[list[StateRange]], later: int) -> None:
    log = Log(3)
    other = KEY._replace(partition=9)
    log.ask(InitializeState(KEY, 1, 0), InitializeState(other, 1, 0))
    for place, batches in enumerate(writes):
        log.ask(
            WriteState(
                KEY if place % 2 else other, 1, 5, UNSET, 0, batches, DeliveryTotals(place, place // 2)
            )
        )
    begun = len(log.batches)
    for name in log.shard.names():
        log.append(log.shard.checkpoint([name], "me", now_ms=9, bytes_max=1).records)
        if later:
            log.ask(WriteState(KEY, 1, 5, UNSET, 0, [(later, later, 33, 5)]))
    shard = ShareCoordinatorShard(updates_per_snapshot=3)
    for records in log.batches[begun:]:
        for record in records:
            shard.replay(*record)
    assert shard.stored() == log.shard.stored()


def test_totals_outlive_a_new_start_and_go_with_the_share_partition() -> None:
    log = Log(500)
    log.ask(InitializeState(KEY, 1, 0))
    log.ask(WriteState(KEY, 1, 5, 3, 0, [], DeliveryTotals(3, 1)))
    log.ask(InitializeState(KEY, 2, 9))
    state = log.ask(ReadState(KEY, 5)).state
    assert state is not None
    assert (state.start_offset, state.totals, log.shard.totals()) == (
        9,
        DeliveryTotals(3, 1),
        {KEY: DeliveryTotals(3, 1)},
    )
    log.append(log.shard.handle([DeleteState(KEY)], "me", now_ms=0).records)
    assert (log.shard.keys(), log.shard.totals(), log.loaded(len(log.batches)).keys()) == ((), {}, ())
    log.ask(InitializeState(KEY, 1, 0))
    assert log.ask(ReadState(KEY, 5)).state == ShareState(1, 0)


def test_totals_that_cannot_be_are_refused() -> None:
    log = Log(500)
    log.ask(InitializeState(KEY, 1, 0))
    assert log.ask(WriteState(KEY, 1, 5, 3, 0, [], DeliveryTotals(-1, 0))).error is ErrorCode.invalid_request


def test_a_checkpoint_is_said_in_pieces() -> None:
    log = Log(500)
    keys = [KEY._replace(partition=index) for index in range(5)]
    log.ask(*(InitializeState(key, 1, 0) for key in keys))
    names, said = log.shard.names(), 0
    pieces = []
    while said < len(names):
        work = log.shard.checkpoint(names[said:], "me", now_ms=9, bytes_max=200)
        ((_, count),) = work.replies
        assert isinstance(count, int)
        assert len(work.records) == count > 0
        pieces.append(count)
        said += count
    assert (sum(pieces), max(pieces)) == (5, 2)


def test_a_write_that_comes_late_does_not_take_back_how_much_is_done() -> None:
    log = Log(500)
    log.ask(InitializeState(KEY, 1, 0))
    log.ask(WriteState(KEY, 1, 5, 3, 2, [(5, 6, 2, 1)]))
    log.ask(WriteState(KEY, 1, 5, 3, 4, [(7, 8, 2, 1)]))
    log.ask(WriteState(KEY, 1, 5, 3, 2, [(5, 6, 2, 1)]))
    summary = log.shard.stored()[KEY][1]
    assert summary is not None
    assert summary.delivery_complete_count == 4


def test_where_a_group_begins_is_no_traffic() -> None:
    log = Log(500)
    log.ask(InitializeState(KEY, 1, UNSET))
    log.ask(WriteState(KEY, 1, 5, 1_000_000, 0, []))
    assert log.shard.take_finished() == ()
    log.ask(WriteState(KEY, 1, 5, 1_000_003, 2, [(1_000_005, 1_000_006, 2, 1)]))
    assert log.shard.take_finished() == ((0, {KEY.group: 5}),)


def test_traffic_is_of_when_it_was() -> None:
    """A group that went well all day has no more dead letters to spare than one that has just begun."""
    log, breaker = Log(500), DeadLetterBreaker(share_max=0.1)
    log.ask(InitializeState(KEY, 1, 0))
    for start, now_ms in ((1_000, 2_500), (2_000, 2_900), (2_300, 3_000), (3_000, 120_000)):
        log.append(log.shard.handle([WriteState(KEY, 1, 5, start, 0, [])], "me", now_ms=now_ms).records)
    finished = log.shard.take_finished()
    assert finished == (
        (2_000, {KEY.group: 2_000}),
        (3_000, {KEY.group: 300}),
        (120_000, {KEY.group: 700}),
    )
    for at_ms, counts in finished:
        breaker.finished(counts[KEY.group], at_ms)
    assert breaker.take(1_000, 120_500) == 70
