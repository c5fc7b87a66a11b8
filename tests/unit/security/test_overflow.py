"""What happens to batches for which there is no room, and which topics are shed."""

import pytest

from penstock.security.overflow import (
    ClosedSegment,
    Decision,
    DropReason,
    Fill,
    IncomingBatch,
    OverflowPolicy,
    OverflowRules,
    Sampler,
    ShedLevels,
    TrimmableLog,
    Verdict,
    decide,
    trim,
)

BLOCK, REJECT = OverflowPolicy.BLOCK, OverflowPolicy.REJECT
OLDEST, NEWEST = OverflowPolicy.DROP_OLDEST, OverflowPolicy.DROP_NEWEST
LEVELS = ShedLevels(start=0.2, all=0.1)
BATCH = IncomingBatch(bytes=100, records=10)


def decided(rules: OverflowRules, fill: Fill, batch: IncomingBatch = BATCH) -> Decision:
    return decide(rules, fill, batch, LEVELS)


@pytest.mark.parametrize("policy", OverflowPolicy)
def test_a_batch_that_just_fits_is_stored_and_one_byte_or_record_more_is_not(policy: OverflowPolicy) -> None:
    rules = OverflowRules(policy, bytes_max=1000, records_max=50)
    assert decided(rules, Fill(bytes=900, records=40)).verdict is Verdict.ADMIT
    assert decided(rules, Fill(bytes=901, records=40)).reason is DropReason.BYTES
    assert decided(rules, Fill(bytes=900, records=41)).reason is DropReason.RECORDS


@pytest.mark.parametrize(
    ("fill", "reason"),
    [
        (Fill(bytes=1000), DropReason.BYTES),
        (Fill(is_tenant_full=True), DropReason.TENANT),
        (Fill(is_disk_full=True), DropReason.DISK),
    ],
)
@pytest.mark.parametrize(
    ("policy", "verdict"),
    [(BLOCK, Verdict.WAIT), (REJECT, Verdict.REFUSE), (OLDEST, Verdict.TRIM), (NEWEST, Verdict.DROP)],
)
def test_each_policy_has_one_answer_to_every_shortage(
    policy: OverflowPolicy, verdict: Verdict, fill: Fill, reason: DropReason
) -> None:
    assert decided(OverflowRules(policy, bytes_max=1000), fill) == Decision(verdict, reason)


def test_without_bounds_only_the_disk_and_the_tenant_count() -> None:
    full = Fill(bytes=1 << 60, records=1 << 60)
    assert decided(OverflowRules(), full).verdict is Verdict.ADMIT
    assert decided(OverflowRules(), Fill(is_disk_full=True)).verdict is Verdict.WAIT


@pytest.mark.parametrize("policy", [BLOCK, REJECT, OLDEST])
def test_a_batch_larger_than_the_bound_never_waits_for_room(policy: OverflowPolicy) -> None:
    rules = OverflowRules(policy, bytes_max=99)
    assert decided(rules, Fill()).verdict is Verdict.TOO_LARGE


def test_no_transaction_loses_a_part() -> None:
    batch = BATCH._replace(is_transactional=True)
    assert decided(OverflowRules(NEWEST, bytes_max=1000), Fill(bytes=1000), batch).verdict is Verdict.REFUSE
    shed = OverflowRules(shed_priority=0)
    assert decided(shed, Fill(disk_free=0.01), batch).verdict is Verdict.ADMIT


@pytest.mark.parametrize("policy", OverflowPolicy)
def test_records_that_the_cluster_moves_itself_wait_under_every_policy(policy: OverflowPolicy) -> None:
    rules = OverflowRules(policy, bytes_max=1000, shed_priority=0)
    batch = BATCH._replace(is_planned=True)
    assert decided(rules, Fill(bytes=1000, disk_free=0.01), batch).verdict is Verdict.WAIT


def test_uncommitted_records_are_not_deleted_and_so_the_producer_waits() -> None:
    rules = OverflowRules(OLDEST, bytes_max=1000)
    assert decided(rules, Fill(bytes=1000, uncommitted_bytes=900)).verdict is Verdict.TRIM
    assert decided(rules, Fill(bytes=1000, uncommitted_bytes=901)).verdict is Verdict.WAIT


# -- drop-oldest -----------------------------------------------------------------------------------------


def log(sizes: list[int], *, active: int = 0, high_watermark: int = 1 << 40) -> TrimmableLog:
    """Segments of ten records each."""
    closed = [ClosedSegment(size, 10 * (number + 1)) for number, size in enumerate(sizes)]
    end = 10 * (len(sizes) + 1)
    return TrimmableLog(0, end, min(high_watermark, end), sum(sizes) + active, closed)


def test_whole_segments_are_deleted_until_the_bytes_fit() -> None:
    cut = trim(
        OverflowRules(OLDEST, bytes_max=250),
        log([100, 100, 100], active=50),
        owed_bytes=0,
        owed_for=DropReason.DISK,
    )
    assert cut.start_offset == 10
    assert cut.dropped == {DropReason.BYTES: 10}


def test_records_are_deleted_to_the_very_one() -> None:
    cut = trim(OverflowRules(OLDEST, records_max=7), log([100]), owed_bytes=0, owed_for=DropReason.DISK)
    assert cut.dropped == {DropReason.RECORDS: 13}


def test_nothing_uncommitted_and_nothing_twice_is_deleted() -> None:
    rules = OverflowRules(OLDEST, bytes_max=100, records_max=15)
    cut = trim(
        rules, log([100, 100, 100], active=50, high_watermark=22), owed_bytes=0, owed_for=DropReason.DISK
    )
    assert cut.dropped == {DropReason.BYTES: 20, DropReason.RECORDS: 2}
    assert cut.start_offset == 22


def test_owed_bytes_are_paid_with_whole_segments_and_the_rest_is_owed_on() -> None:
    cut = trim(OverflowRules(OLDEST), log([100, 100, 100]), owed_bytes=250, owed_for=DropReason.TENANT)
    assert (cut.dropped, cut.paid_bytes) == ({DropReason.TENANT: 20}, 200)


# -- shedding --------------------------------------------------------------------------------------------


def test_the_least_valuable_topics_are_shed_first_and_all_at_the_end() -> None:
    def shed(free: float) -> list[int]:
        return [
            priority
            for priority in range(10)
            if decided(OverflowRules(shed_priority=priority), Fill(disk_free=free)).verdict is Verdict.SHED
        ]

    assert shed(0.2) == []
    assert shed(0.199) == [0]
    assert shed(0.1501) == [0, 1, 2, 3, 4]
    assert shed(0.1) == list(range(10))
    assert decided(OverflowRules(), Fill(disk_free=0.0)).verdict is Verdict.ADMIT


def test_the_scarcer_of_tenant_and_disk_is_the_reason() -> None:
    rules = OverflowRules(shed_priority=0)
    assert decided(rules, Fill(tenant_free=0.11, disk_free=0.12)).reason is DropReason.TENANT
    assert decided(rules, Fill(tenant_free=0.12, disk_free=0.11)).reason is DropReason.DISK


def test_one_threshold_for_all_priorities_is_possible() -> None:
    levels = ShedLevels(start=0.1, all=0.1)
    assert (levels.level(0.1), levels.level(0.0999)) == (0.0, 10.0)


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (0.1, 100), (0.25, 250), (1.0, 1000)])
def test_a_sample_keeps_its_share(share: float, kept: int) -> None:
    sampler = Sampler(share)
    assert sum(sampler.keeps(1) for _ in range(1000)) == kept


def test_a_sample_keeps_its_share_of_records_whatever_the_batches_hold() -> None:
    sampler = Sampler(0.3)
    sizes = [1 + number * 7919 % 50 for number in range(2000)]
    kept = sum(size for size in sizes if sampler.keeps(size))
    assert abs(kept - 0.3 * sum(sizes)) <= 50
