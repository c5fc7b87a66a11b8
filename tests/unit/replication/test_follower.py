"""What a follower does with each response of its leader."""

import pytest

from penstock.log.leader_epochs import LeaderEpochCache
from penstock.protocol.errors import ErrorCode
from penstock.replication.follower import (
    Append,
    AwaitImage,
    EpochEndOffset,
    FetchPosition,
    FollowerRules,
    RaiseHighWatermark,
    RaiseLogStart,
    ReplicaFetchReply,
    Retry,
    Truncate,
    TruncateFully,
)

RULES = FollowerRules(leader_id=1, leader_epoch=7)


class FakeLog:
    """Epochs as (epoch, start) pairs; everything is durable unless told otherwise."""

    def __init__(
        self, end: int, *epochs: tuple[int, int], start: int = 0, high: int = 0, durable: int | None = None
    ) -> None:
        self.start_offset, self.end_offset, self.high_watermark = start, end, high
        self.durable_offset = end if durable is None else durable
        self.epochs = LeaderEpochCache()
        for epoch, first in epochs:
            self.epochs.assign(epoch, first)

    def epoch_at(self, offset: int) -> int:
        return self.epochs.epoch_at(offset)

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        return self.epochs.end_offset_for(epoch, self.end_offset)


def answer(
    error: ErrorCode = ErrorCode.none,
    high: int = 0,
    start: int = 0,
    diverging: tuple[int, int] | None = None,
    records: bool = False,
) -> ReplicaFetchReply:
    return ReplicaFetchReply(
        error, high, start, None if diverging is None else EpochEndOffset(*diverging), records
    )


def test_it_asks_from_what_is_durable_and_says_what_comes_before() -> None:
    log = FakeLog(120, (3, 0), (5, 100), start=10, durable=100)
    assert RULES.position(log) == FetchPosition(100, 7, 3, 10)
    log.durable_offset = 101
    assert RULES.position(log) == FetchPosition(101, 7, 5, 10)
    assert RULES.position(FakeLog(0)) == FetchPosition(0, 7, -1, 0)


def test_it_appends_then_believes_the_high_watermark_then_the_start() -> None:
    log = FakeLog(100, (3, 0))
    asked = RULES.position(log)
    assert RULES.answered(asked, answer(high=110, start=20, records=True), log) == [
        Append(),
        RaiseHighWatermark(110),
        RaiseLogStart(20),
    ]
    assert RULES.answered(asked, answer(high=100), log) == [RaiseHighWatermark(100)]


def test_histories_that_part_are_truncated_before_anything_is_believed() -> None:
    log = FakeLog(100, (3, 0), (5, 60), high=50)
    parted = answer(high=90, start=20, diverging=(5, 80), records=True)
    assert RULES.answered(RULES.position(log), parted, log) == [Truncate(80)]


@pytest.mark.parametrize(
    ("epochs", "diverging", "cut"),
    [
        (((3, 0), (5, 60)), (5, 80), 80),  # the leader has less of the same epoch
        (((3, 0), (5, 60)), (3, 90), 60),  # the leader has more of an earlier one
        (((3, 0), (5, 60)), (3, 40), 40),
        (((3, 0), (5, 60)), (4, 70), 60),  # an epoch that is unknown here
        (((5, 60),), (2, 30), 30),  # earlier than all that is known here
        (((5, 60),), (2, 80), 60),
    ],
)
def test_the_cut_is_at_the_end_of_the_largest_common_epoch(
    epochs: tuple[tuple[int, int], ...], diverging: tuple[int, int], cut: int
) -> None:
    log = FakeLog(100, *epochs)
    assert RULES.answered(RULES.position(log), answer(diverging=diverging), log) == [Truncate(cut)]


def test_a_cut_below_the_high_watermark_is_made_and_reported() -> None:
    log = FakeLog(100, (3, 0), high=95)
    assert RULES.answered(RULES.position(log), answer(diverging=(3, 80)), log) == [Truncate(80, lost=15)]


def test_a_parting_that_cuts_nothing_is_no_reason_to_ask_in_circles() -> None:
    log = FakeLog(100, (3, 0))
    (action,) = RULES.answered(RULES.position(log), answer(diverging=(3, 200)), log)
    assert isinstance(action, Retry)


@pytest.mark.parametrize(
    "asked",
    [
        FetchPosition(100, 6, 3, 0),
        FetchPosition(99, 7, 3, 0),
        FetchPosition(101, 7, 3, 0),
        FetchPosition(100, 7, 2, 0),  # the log was cut and has grown again since
    ],
)
def test_an_answer_to_another_question_is_ignored(asked: FetchPosition) -> None:
    log = FakeLog(100, (3, 0))
    for each in (
        answer(records=True, high=9),
        answer(diverging=(3, 50)),
        answer(ErrorCode.offset_out_of_range),
    ):
        assert RULES.answered(asked, each, log) == []


def test_an_answer_to_what_is_durable_is_ignored_when_the_log_has_more() -> None:
    log = FakeLog(100, (3, 0), durable=90)
    assert RULES.answered(RULES.position(log), answer(records=True), log) == []


@pytest.mark.parametrize(
    ("log", "leaders_start", "action"),
    [
        (FakeLog(100, (3, 0)), 150, TruncateFully(150)),
        (FakeLog(100, (3, 0), high=100), 150, TruncateFully(150)),
        (FakeLog(100, start=100), 40, TruncateFully(40)),  # nothing here, and the leader ends before
        (FakeLog(100, start=100, high=100), 40, TruncateFully(40, lost=60)),
        (FakeLog(100, (3, 0)), 50, None),
        (FakeLog(100, (3, 0)), 100, None),
        (FakeLog(100, (3, 0)), -1, None),
        # An epoch that is newer than the leader's is damage.
        (FakeLog(100, (3, 0), (4_194_304, 60)), 50, Truncate(60)),
        (FakeLog(100, (3, 0), (4_194_304, 60), high=90), 0, Truncate(60, lost=30)),
        (FakeLog(100, (4_194_304, 0)), 0, Truncate(0)),
    ],
)
def test_out_of_range(log: FakeLog, leaders_start: int, action: Truncate | TruncateFully | None) -> None:
    out = answer(ErrorCode.offset_out_of_range, start=leaders_start)
    (got,) = RULES.answered(RULES.position(log), out, log)
    assert got == action if action is not None else isinstance(got, Retry)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ErrorCode.fenced_leader_epoch, AwaitImage),
        (ErrorCode.unknown_leader_epoch, AwaitImage),
        (ErrorCode.not_leader_or_follower, AwaitImage),
        (ErrorCode.unknown_topic_id, AwaitImage),
        (ErrorCode.kafka_storage_error, Retry),
        (ErrorCode.unknown_server_error, Retry),
    ],
)
def test_errors_change_nothing(error: ErrorCode, kind: type) -> None:
    log = FakeLog(100, (3, 0))
    refused = answer(error, high=500, start=500, diverging=(3, 5), records=True)
    (action,) = RULES.answered(RULES.position(log), refused, log)
    assert isinstance(action, kind)


def test_the_high_watermark_is_bounded_by_what_is_durable_here_and_never_goes_back() -> None:
    log = FakeLog(100, (3, 0), high=50, durable=80)
    assert RULES.bounded_high_watermark(70, log) == 70
    assert RULES.bounded_high_watermark(90, log) == 80
    assert RULES.bounded_high_watermark(40, log) == 50


def test_the_start_moves_over_committed_records_only_and_never_back() -> None:
    log = FakeLog(100, (3, 0), start=10, high=50)
    assert RULES.bounded_start(30, log) == 30
    assert RULES.bounded_start(70, log) == 50
    assert RULES.bounded_start(5, log) == 10
