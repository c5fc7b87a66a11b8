"""InitializeShareGroupState for state that exists: unchanged without a start offset, else only with a later epoch."""

from collections.abc import Sequence
from uuid import UUID

from penstock.groups.share.state.share_state import (
    ACKNOWLEDGED,
    UNSET,
    InitializeState,
    ReadState,
    SharePartitionKey,
    ShareState,
    ShareStateReply,
    ShareStateRequest,
    WriteState,
)
from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard
from penstock.protocol.errors import ErrorCode

KEY = SharePartitionKey("g", UUID(int=1), 0)


def ask(shard: ShareCoordinatorShard, request: ShareStateRequest) -> ShareStateReply:
    work = shard.handle([request], "token", now_ms=0)
    for key, value in work.records:
        shard.replay(key, value)
    replies = work.replies[0][1]
    assert isinstance(replies, Sequence)
    return replies[0]


def begun() -> ShareCoordinatorShard:
    """From offset 5 on, of which 5 to 9 were handed out."""
    shard = ShareCoordinatorShard()
    assert ask(shard, InitializeState(KEY, 1, 5)).error is ErrorCode.none
    assert ask(shard, WriteState(KEY, 1, 0, 5, 5, [(5, 9, ACKNOWLEDGED, 1)])).error is ErrorCode.none
    return shard


def test_without_a_start_what_is_there_stays() -> None:
    shard = begun()
    before = ask(shard, ReadState(KEY, UNSET))
    for epoch in (0, 1, 7):
        assert ask(shard, InitializeState(KEY, epoch, UNSET)).error is ErrorCode.none
    assert ask(shard, ReadState(KEY, UNSET)) == before


def test_a_start_offset_resets_state_only_with_a_later_epoch() -> None:
    shard = begun()
    assert ask(shard, InitializeState(KEY, 1, 5)).error is ErrorCode.none  # the same once more
    assert ask(shard, InitializeState(KEY, 1, 2)).error is ErrorCode.fenced_state_epoch
    assert ask(shard, InitializeState(KEY, 2, 2)).error is ErrorCode.none
    assert ask(shard, ReadState(KEY, UNSET)).state == ShareState(2, 2)
    assert ask(shard, WriteState(KEY, 1, 0, 6, 0, [])).error is ErrorCode.fenced_state_epoch


def test_a_group_that_must_not_go_back_is_not_moved_onto_what_it_was_handed() -> None:
    shard = begun()
    for start in (0, 5, 9):
        answer = ask(shard, InitializeState(KEY, 2, start, only_forward=True))
        assert answer.error is ErrorCode.policy_violation
    assert ask(shard, InitializeState(KEY, 2, 10, only_forward=True)).error is ErrorCode.none
    assert ask(shard, ReadState(KEY, UNSET)).state == ShareState(2, 10)
