"""Ranges of dead letters of one share partition."""

from uuid import UUID

from penstock.groups.share.state.dead_letters import DeadLetterBatch
from penstock.groups.share.state.share_state import (
    DEAD_LETTER_LIMIT,
    DeleteState,
    InitializeState,
    SharePartitionKey,
    ShareStateRequest,
    StoreWorkerErrors,
    WriteState,
)
from penstock.groups.share.state.share_state_records import DeadLetterPlan, DeadLetterTarget, SettledPlan
from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard, ShareStateResult
from penstock.groups.share.state.stored_share_state import StoredDeadLetters
from penstock.protocol.dead_letter_headers import ERROR_CLASS_HEADER, ERROR_MESSAGE_HEADER, ERROR_STACK_HEADER
from penstock.protocol.record_batch import decode_records
from penstock.protocol.share_failures import WorkerError, WorkerFailure

GRAVES = DeadLetterTarget(UUID(int=9), 0)


def planned(*offsets: tuple[int, int]) -> StoredDeadLetters:
    dead_letters = StoredDeadLetters()
    dead_letters.add([(0, 9, DEAD_LETTER_LIMIT, 5)])
    dead_letters.begin(DeadLetterPlan(7, 0, 0, "graves", GRAVES, offsets, offsets))
    return dead_letters


def test_lost_records_are_not_counted_as_written() -> None:
    """Given up with its source, or refused for good."""
    dead_letters = planned((0, 3))
    dead_letters.settle(SettledPlan(True, 10, ((0, 9),)))
    assert (dead_letters.pending_count, dead_letters.written, dead_letters.lost) == (0, 0, 10)


def test_a_settled_plan_counts_as_written_and_the_rest_waits() -> None:
    dead_letters = planned((0, 3))
    dead_letters.settle(SettledPlan(True, 0, (), as_planned=True))
    assert (dead_letters.pending_count, dead_letters.written, dead_letters.lost) == (6, 4, 0)


ERROR = WorkerError("ValueError", "no such customer", "Traceback ...")


def test_errors_survive_a_restart_until_their_letters_are_written() -> None:
    key = SharePartitionKey("g", UUID(int=1), 0)
    shard = ShareCoordinatorShard()

    def decide(work: ShareStateResult) -> None:
        for record in work.records:
            shard.replay(*record)

    def asked(request: ShareStateRequest) -> None:
        decide(shard.handle([request], "t", now_ms=0))

    asked(InitializeState(key, 1, 0))
    asked(StoreWorkerErrors(key, (WorkerFailure(3, 2, error=ERROR), WorkerFailure(4, 1, error=ERROR))))
    asked(WriteState(key, 1, 0, 0, 0, [(3, 3, DEAD_LETTER_LIMIT, 2)]))
    again = ShareCoordinatorShard()
    for record in shard.checkpoint(shard.names(), "t", now_ms=0, bytes_max=1 << 20).records:
        again.replay(*record)
    assert again.stored() == shard.stored()
    view = again.pending_dead_letters(key)
    assert view is not None
    assert view.errors == {3: (2, ERROR), 4: (1, ERROR)}
    decide(shard.settle_dead_letters(key, SettledPlan(True, 0, ((3, 3),)), None, "t"))
    (dead_letters,) = shard._dead_letters.values()
    assert list(dead_letters.errors) == [4]
    asked(DeleteState(key))
    assert not shard.names()


def test_errors_take_a_bounded_room() -> None:
    dead_letters = StoredDeadLetters()
    dead_letters.add_errors([WorkerFailure(offset, 1, error=ERROR) for offset in range(2_000)])
    assert list(dead_letters.errors) == list(range(1_500, 2_000))
    large = WorkerError("E", "m", "x" * 8_000)
    dead_letters.add_errors([WorkerFailure(offset, 1, error=large) for offset in range(100)])
    assert list(dead_letters.errors) == list(range(84, 100))


def test_a_letter_takes_the_error_of_its_own_delivery() -> None:
    letters = DeadLetterBatch(
        SharePartitionKey("g", UUID(int=1), 0),
        "t",
        now_ms=1,
        copies_record=False,
        bytes_max=1 << 20,
        errors={3: (2, ERROR), 4: (1, ERROR)},
    )
    for offset in (3, 4):
        letters.add_without(offset, (DEAD_LETTER_LIMIT, 2), "gone")
    first, second = (
        dict(each.headers)
        for each in decode_records(letters.batch(producer_id=1, epoch=0, sequence=0), 1 << 20)
    )
    assert (first[ERROR_CLASS_HEADER], first[ERROR_MESSAGE_HEADER]) == (b"ValueError", b"no such customer")
    assert first[ERROR_STACK_HEADER] == b"Traceback ..."
    assert ERROR_CLASS_HEADER not in second
    assert second[ERROR_MESSAGE_HEADER] == b"delivered as often as the group allows"
