"""What one share partition's dead letters add up to."""

from uuid import UUID

from penstock.groups.share_state.burials import PartitionBurials
from penstock.groups.share_state.letters import Letters
from penstock.groups.share_state.records import Plan, Settled, Target
from penstock.groups.share_state.shard import ShareStateShard, Work
from penstock.groups.share_state.values import (
    BURIED_LIMIT,
    Delete,
    Explain,
    Initialize,
    Key,
    Question,
    Write,
)
from penstock.protocol.letters import ERROR_CLASS, ERROR_STACK, MESSAGE
from penstock.protocol.records import decode_records
from penstock.protocol.share_failures import WorkerError, WorkerFailure

GRAVES = Target(UUID(int=9), 0)


def planned(*offsets: tuple[int, int]) -> PartitionBurials:
    burials = PartitionBurials()
    burials.add([(0, 9, BURIED_LIMIT, 5)])
    burials.begin(Plan(7, 0, 0, "graves", GRAVES, offsets, offsets))
    return burials


def test_what_is_lost_was_not_buried() -> None:
    """Given up with its source, or refused for good."""
    burials = planned((0, 3))
    burials.settle(Settled(True, 10, ((0, 9),)))
    assert (burials.pending_count, burials.buried, burials.lost) == (0, 0, 10)


def test_what_was_planned_is_buried_and_the_rest_waits() -> None:
    burials = planned((0, 3))
    burials.settle(Settled(True, 0, (), as_planned=True))
    assert (burials.pending_count, burials.buried, burials.lost) == (6, 4, 0)


ERROR = WorkerError("ValueError", "no such customer", "Traceback ...")


def test_errors_survive_a_restart_until_their_letters_are_written() -> None:
    key = Key("g", UUID(int=1), 0)
    shard = ShareStateShard()

    def decide(work: Work) -> None:
        for record in work.records:
            shard.replay(*record)

    def asked(question: Question) -> None:
        decide(shard.ask([question], "t", now_ms=0))

    asked(Initialize(key, 1, 0))
    asked(Explain(key, (WorkerFailure(3, 2, error=ERROR), WorkerFailure(4, 1, error=ERROR))))
    asked(Write(key, 1, 0, 0, 0, [(3, 3, BURIED_LIMIT, 2)]))
    again = ShareStateShard()
    for record in shard.checkpoint(shard.names(), "t", now_ms=0, bytes_max=1 << 20).records:
        again.replay(*record)
    assert again.stored() == shard.stored()
    view = again.burial(key)
    assert view is not None
    assert view.errors == {3: (2, ERROR), 4: (1, ERROR)}
    decide(shard.settle_burial(key, Settled(True, 0, ((3, 3),)), None, "t"))
    (burials,) = shard._burials.values()
    assert list(burials.errors) == [4]
    asked(Delete(key))
    assert not shard.names()


def test_errors_take_a_bounded_room() -> None:
    burials = PartitionBurials()
    burials.explain([WorkerFailure(offset, 1, error=ERROR) for offset in range(2_000)])
    assert list(burials.errors) == list(range(1_500, 2_000))
    large = WorkerError("E", "m", "x" * 8_000)
    burials.explain([WorkerFailure(offset, 1, error=large) for offset in range(100)])
    assert list(burials.errors) == list(range(84, 100))


def test_a_letter_takes_the_error_of_its_own_delivery() -> None:
    letters = Letters(
        Key("g", UUID(int=1), 0),
        "t",
        now_ms=1,
        copies_record=False,
        bytes_max=1 << 20,
        errors={3: (2, ERROR), 4: (1, ERROR)},
    )
    for offset in (3, 4):
        letters.add_without(offset, (BURIED_LIMIT, 2), "gone")
    first, second = (
        dict(each.headers)
        for each in decode_records(letters.batch(producer_id=1, epoch=0, sequence=0), 1 << 20)
    )
    assert (first[ERROR_CLASS], first[MESSAGE]) == (b"ValueError", b"no such customer")
    assert first[ERROR_STACK] == b"Traceback ..."
    assert ERROR_CLASS not in second
    assert second[MESSAGE] == b"delivered as often as the group allows"
