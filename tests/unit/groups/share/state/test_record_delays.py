"""The share coordinator keeps the delays that consumers chose, as long as the record is not delivered again."""

from collections.abc import Sequence
from uuid import UUID

import pytest

from penstock.groups.share.state import share_state_records
from penstock.groups.share.state.share_state import (
    ACKNOWLEDGED,
    AVAILABLE,
    UNSET,
    InitializeState,
    ReadState,
    RecordDelay,
    SharePartitionKey,
    ShareState,
    ShareStateReply,
    ShareStateRequest,
    WriteState,
)
from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard
from penstock.protocol.errors import ErrorCode

KEY = SharePartitionKey("g", UUID(int=1), 0)
Records = list[tuple[bytes, bytes | None]]


class Coordinator:
    def __init__(self) -> None:
        self.shard = ShareCoordinatorShard(updates_per_snapshot=3)
        self.log: Records = []
        self.ask(InitializeState(KEY, 1, 0))

    def ask(self, request: ShareStateRequest) -> ShareStateReply:
        work = self.shard.handle([request], "token", now_ms=0)
        self.append(work.records)
        replies = work.replies[0][1]
        assert isinstance(replies, Sequence)
        reply: ShareStateReply = replies[0]
        return reply

    def append(self, records: Sequence[tuple[bytes, bytes | None]]) -> None:
        self.log += records
        for record in records:
            self.shard.replay(*record)

    def release(self, first: int, last: int, delivery_count: int, *delays: RecordDelay) -> ErrorCode:
        batch = (first, last, AVAILABLE, delivery_count)
        return self.ask(WriteState(KEY, 1, 0, UNSET, 0, [batch], None, delays)).error

    def delays(self) -> tuple[RecordDelay, ...]:
        return _state(self.shard).delays

    def loaded(self, log: Records | None = None) -> ShareCoordinatorShard:
        shard = ShareCoordinatorShard(updates_per_snapshot=3)
        for record in self.log if log is None else log:
            shard.replay(*record)
        return shard


def _state(shard: ShareCoordinatorShard) -> ShareState:
    state = shard.stored()[KEY][0]
    assert state is not None
    return state


FIRST, SECOND = RecordDelay(0, 1, 5_000), RecordDelay(2, 1, 7_000)


def test_delays_are_in_the_state_and_survive_a_restart() -> None:
    coordinator = Coordinator()
    assert coordinator.release(0, 3, 1, SECOND, FIRST) is ErrorCode.none
    assert coordinator.delays() == (FIRST, SECOND)
    assert coordinator.loaded().stored() == coordinator.shard.stored()


def test_a_delay_ends_with_the_next_delivery_or_the_end_of_the_record() -> None:
    coordinator = Coordinator()
    coordinator.release(0, 3, 1, FIRST, SECOND)
    coordinator.release(0, 0, 2)
    assert coordinator.delays() == (SECOND,)
    coordinator.ask(WriteState(KEY, 1, 0, UNSET, 0, [(2, 2, ACKNOWLEDGED, 1)]))
    assert coordinator.delays() == ()
    assert coordinator.loaded().stored() == coordinator.shard.stored()


def test_a_write_that_comes_late_brings_no_old_delay_back() -> None:
    coordinator = Coordinator()
    later = RecordDelay(0, 2, 9_000)
    coordinator.release(0, 0, 2, later)
    coordinator.release(0, 0, 1, FIRST)
    assert coordinator.delays() == (later,)


def test_snapshots_and_checkpoints_keep_delays() -> None:
    coordinator = Coordinator()
    coordinator.release(0, 3, 1, FIRST, SECOND)
    for offset in range(10, 20):
        coordinator.release(offset, offset, 1)
    assert coordinator.delays() == (FIRST, SECOND)
    before = len(coordinator.log)
    names = coordinator.shard.names()
    coordinator.append(coordinator.shard.checkpoint(names, "token", now_ms=0, bytes_max=1 << 20).records)
    assert coordinator.loaded(coordinator.log[before:]).stored() == coordinator.shard.stored()
    assert coordinator.delays() == (FIRST, SECOND)


def test_a_new_state_has_no_delays_of_the_old_one() -> None:
    coordinator = Coordinator()
    coordinator.release(0, 3, 1, FIRST)
    coordinator.ask(InitializeState(KEY, 2, 0))
    coordinator.ask(WriteState(KEY, 2, 0, UNSET, 0, [(0, 3, AVAILABLE, 1)]))
    assert coordinator.delays() == ()


def test_delays_that_are_over_do_not_pile_up() -> None:
    coordinator = Coordinator()
    for delivery in range(1, 1_001):
        offset = delivery // 10
        coordinator.release(offset, offset, delivery, RecordDelay(offset, delivery, 5))
    for offset in range(1_000, 1_300):
        coordinator.ask(WriteState(KEY, 1, 0, offset + 1, 0, [], None, (RecordDelay(offset, 1, 5),)))
    assert len(coordinator.shard._states[next(iter(coordinator.shard.names()))].delays) <= 100


@pytest.mark.parametrize("delay", [(-1, 1, 5), (0, -1, 5), (0, 1 << 15, 5), (0, 1, -5)])
def test_impossible_delays_are_refused(delay: tuple[int, int, int]) -> None:
    assert Coordinator().release(0, 0, 1, RecordDelay(*delay)) is ErrorCode.invalid_request


def test_what_another_leader_would_read_is_in_the_state() -> None:
    coordinator = Coordinator()
    coordinator.release(0, 3, 1, FIRST)
    reply = coordinator.ask(ReadState(KEY, 1))
    assert reply.state is not None
    assert reply.state.delays == (FIRST,)


def test_records_are_packed_and_read_again() -> None:
    for delays in ([], [FIRST], [FIRST, SECOND, RecordDelay(2**63 - 1, 32_767, 2**63 - 1)]):
        assert share_state_records.decode_delays(share_state_records.encode_delays(delays)) == delays
