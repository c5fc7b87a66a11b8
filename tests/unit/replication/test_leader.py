"""The leader's rules: the high watermark and the in-sync set."""

from typing import Any

import pytest

from penstock.replication.leader import IMAGE_WAIT_MS_MAX, JOIN_HOLD_MS_MAX, IsrProposal, LeaderRules

LAG_MS = 10_000


def rules(**changes: Any) -> LeaderRules:
    options: dict[str, Any] = {
        "local_id": 1,
        "leader_epoch": 5,
        "partition_epoch": 20,
        "replicas": (1, 2, 3),
        "isr": (1, 2, 3),
        "epoch_start_offset": 100,
        "high_watermark": 90,
        "local_offset": 100,
        "lag_ms_max": LAG_MS,
        "isr_min": 2,
        "now_ms": 0,
        **changes,
    }
    return LeaderRules(**options)


def fetch(leader: LeaderRules, replica: int, offset: int, now_ms: int = 0, **changes: Any) -> bool:
    options: dict[str, Any] = {"log_end": max(offset, leader.local_offset), "broker_epoch": 7, **changes}
    return leader.fetched(replica, offset=offset, now_ms=now_ms, **options)


def anyone(broker: int, epoch: int) -> bool:
    return True


def propose(leader: LeaderRules, now_ms: int = 0) -> IsrProposal:
    proposal = leader.wanted_isr(now_ms, anyone)
    assert proposal is not None
    leader.proposed_isr(proposal)
    return proposal


# -- the high watermark ------------------------------------------------------------------------------


def test_the_high_watermark_is_what_every_member_in_sync_has() -> None:
    leader = rules()
    assert not leader.local_moved(120)
    assert not fetch(leader, 2, 115)
    assert leader.high_watermark == 90  # 3 has not been heard of
    assert fetch(leader, 3, 110)
    assert leader.high_watermark == 110
    assert fetch(leader, 3, 120)
    assert leader.high_watermark == 115


def test_the_leaders_own_unsynced_records_are_not_committed() -> None:
    leader = rules()
    fetch(leader, 2, 150, log_end=150)
    fetch(leader, 3, 150, log_end=150)
    assert leader.high_watermark == 100
    assert leader.local_moved(150)
    assert leader.high_watermark == 150


def test_the_high_watermark_never_goes_back() -> None:
    leader = rules()
    fetch(leader, 2, 100)
    fetch(leader, 3, 100)
    assert not fetch(leader, 2, 40, broker_epoch=8)
    assert leader.high_watermark == 100
    assert not leader.local_moved(95)
    assert leader.high_watermark == 100


def test_a_follower_outside_the_in_sync_set_neither_holds_back_nor_counts() -> None:
    leader = rules(isr=(1, 2), isr_min=1)
    fetch(leader, 3, 10)
    assert fetch(leader, 2, 100)
    assert leader.high_watermark == 100
    leader = rules(isr=(1, 2))
    leader.local_moved(120)
    fetch(leader, 3, 120)
    assert leader.high_watermark == 90


def test_a_stranger_counts_for_nothing() -> None:
    leader = rules(replicas=(1, 2), isr=(1, 2))
    assert not fetch(leader, 9, 100)
    assert leader.high_watermark == 90


def test_an_earlier_life_of_a_broker_counts_for_nothing() -> None:
    leader = rules(replicas=(1, 2), isr=(1, 2))
    leader.local_moved(120)
    fetch(leader, 2, 105, broker_epoch=8)
    assert not fetch(leader, 2, 120, broker_epoch=7)
    assert leader.high_watermark == 105


def test_below_min_insync_replicas_nothing_more_is_committed() -> None:
    leader = rules(isr=(1,), isr_min=2)
    assert leader.is_below_min
    assert not leader.local_moved(130)
    assert leader.high_watermark == 90
    assert leader.reconfigured(isr_min=1)
    assert leader.high_watermark == 130


def test_min_insync_replicas_beyond_the_replicas_is_all_of_them() -> None:
    leader = rules(replicas=(1,), isr=(1,), isr_min=3)
    assert leader.high_watermark == 100
    assert not leader.is_below_min


def test_a_new_leaders_high_watermark_is_stale_until_it_has_reached_the_epoch_start() -> None:
    leader = rules()
    assert not leader.has_reached_epoch_start
    fetch(leader, 2, 100)
    fetch(leader, 3, 100)
    assert leader.has_reached_epoch_start


def test_members_that_are_no_replicas_hold_the_high_watermark() -> None:
    leader = rules(replicas=(1, 2), isr=(1, 2, 9))
    fetch(leader, 2, 100)
    assert leader.high_watermark == 90


# -- joining -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "high_watermark", "epoch_start", "joins"),
    [
        (100, 100, 100, True),
        (105, 100, 100, True),
        (99, 100, 90, False),  # lacks something committed
        (99, 90, 100, False),  # something of an earlier leader may be committed beyond the high watermark
        (-1, 0, 0, False),
    ],
)
def test_who_may_join(offset: int, high_watermark: int, epoch_start: int, joins: bool) -> None:
    leader = rules(
        isr=(1, 2), high_watermark=high_watermark, epoch_start_offset=epoch_start, local_offset=110
    )
    if offset >= 0:
        fetch(leader, 3, offset)
    proposal = leader.wanted_isr(0, anyone)
    assert (proposal is not None) is joins
    assert leader.can_join(3) is joins
    if proposal is not None:
        assert proposal == IsrProposal(((1, -1), (2, -1), (3, 7)), 5, 20)


def test_only_who_is_eligible_in_its_present_life_may_join() -> None:
    leader = rules(isr=(1, 2))
    fetch(leader, 3, 100, broker_epoch=7)
    assert leader.wanted_isr(0, lambda broker, epoch: (broker, epoch) == (3, 8)) is None
    assert leader.wanted_isr(0, lambda broker, epoch: (broker, epoch) == (3, 7)) is not None


def test_a_proposed_member_counts_before_the_controller_has_answered() -> None:
    leader = rules(isr=(1, 2))
    fetch(leader, 2, 100)
    fetch(leader, 3, 100)
    propose(leader)
    assert leader.maximal_isr == {1, 2, 3}
    leader.local_moved(120)
    assert not fetch(leader, 2, 120)
    assert leader.high_watermark == 100
    assert fetch(leader, 3, 110)
    assert leader.high_watermark == 110


def test_a_member_that_is_to_leave_counts_until_the_controller_has_agreed() -> None:
    leader = rules(replicas=(1, 2), isr=(1, 2), isr_min=1)
    fetch(leader, 2, 100)
    leader.local_moved(120)
    propose(leader, LAG_MS + 1)
    assert leader.proposed == {1}
    assert leader.high_watermark == 100
    assert leader.isr_committed((1,), 21)
    assert leader.high_watermark == 120


def test_one_who_keeps_up_under_a_steady_load_gets_in() -> None:
    """It is always a fetch behind, so the high watermark waits for it, for a bounded time."""
    leader = rules(replicas=(1, 2), isr=(1,), isr_min=1)
    fetch(leader, 2, 100, now_ms=1, log_end=120)
    leader.local_moved(120)
    assert leader.high_watermark == 120
    fetch(leader, 2, 120, now_ms=2, log_end=140)
    leader.local_moved(140)
    assert leader.high_watermark == 120
    assert leader.can_join(2)
    leader.local_moved(160)
    assert leader.high_watermark == 120
    assert leader.expired(JOIN_HOLD_MS_MAX + 2)
    assert leader.high_watermark == 160
    assert not leader.can_join(2)


# -- leaving -----------------------------------------------------------------------------------------


def test_who_has_not_caught_up_for_too_long_leaves() -> None:
    leader = rules(local_offset=100)
    fetch(leader, 2, 100, now_ms=50)
    fetch(leader, 3, 100, now_ms=50)
    leader.local_moved(200)
    fetch(leader, 2, 200, now_ms=9000)
    fetch(leader, 3, 150, now_ms=9000)
    assert leader.wanted_isr(LAG_MS + 50, anyone) is None
    assert leader.wanted_isr(LAG_MS + 51, anyone) == IsrProposal(((1, -1), (2, 7)), 5, 20)


def test_who_always_reaches_the_end_as_it_was_a_fetch_ago_stays() -> None:
    leader = rules(replicas=(1, 2), isr=(1, 2))
    end = 100
    for now_ms in range(0, 5 * LAG_MS, 500):
        fetch(leader, 2, end, now_ms=now_ms, log_end=end + 10)
        end += 10
        leader.local_moved(end)
        assert leader.wanted_isr(now_ms, anyone) is None


def test_no_replica_leaves_the_in_sync_set_of_an_idle_partition() -> None:
    leader = rules()
    fetch(leader, 2, 100)
    fetch(leader, 3, 100)
    assert leader.wanted_isr(100 * LAG_MS, anyone) is None


def test_a_new_leader_gives_its_members_time_to_be_heard() -> None:
    leader = rules(now_ms=1000)
    assert leader.wanted_isr(1000 + LAG_MS, anyone) is None
    assert leader.wanted_isr(1001 + LAG_MS, anyone) == IsrProposal(((1, -1),), 5, 20)


# -- what becomes of a proposal ----------------------------------------------------------------------


def joining() -> tuple[LeaderRules, IsrProposal]:
    leader = rules(isr=(1, 2))
    fetch(leader, 2, 100)
    fetch(leader, 3, 100)
    return leader, propose(leader)


def test_one_change_at_a_time() -> None:
    leader, _ = joining()
    assert leader.wanted_isr(2 * LAG_MS, anyone) is None


def test_a_change_of_unknown_outcome_is_asked_for_again_and_counts() -> None:
    leader, proposal = joining()
    leader.isr_refused(final=False)
    assert leader.proposed == {1, 2, 3}
    assert leader.wanted_isr(1, anyone) == proposal


def test_a_change_that_is_asked_for_again_names_the_present_lives_of_its_members() -> None:
    leader, proposal = joining()
    leader.isr_refused(final=False)
    fetch(leader, 3, 50, broker_epoch=9)
    assert leader.wanted_isr(1, anyone) == proposal  # the new life lacks something
    fetch(leader, 3, 100, broker_epoch=9)
    assert leader.wanted_isr(1, anyone) == IsrProposal(((1, -1), (2, 7), (3, 9)), 5, 20)


def test_a_final_refusal_waits_for_the_image() -> None:
    leader, _ = joining()
    leader.isr_refused(final=True)
    assert leader.proposed == {1, 2, 3}
    assert leader.wanted_isr(1, anyone) is None
    leader.isr_committed((1, 2), 21)
    assert leader.proposed is None
    assert propose(leader).partition_epoch == 21


def test_an_image_that_never_comes_is_not_waited_for_for_ever() -> None:
    leader, proposal = joining()
    leader.isr_refused(final=True)
    fetch(leader, 3, 100, broker_epoch=7)
    assert leader.wanted_isr(IMAGE_WAIT_MS_MAX - 1, anyone) is None
    again = leader.wanted_isr(IMAGE_WAIT_MS_MAX, anyone)
    assert again is not None
    assert again.members == proposal.members, "the record may still come, so its members count"
    leader.proposed_isr(again)
    leader.isr_refused(final=True)
    assert leader.wanted_isr(2 * IMAGE_WAIT_MS_MAX - 1, anyone) is None
    leader.isr_committed((1, 2, 3), 21)
    assert leader.proposed is None


def test_a_declined_change_is_dropped() -> None:
    leader, _ = joining()
    leader.isr_declined()
    assert leader.proposed is None
    assert leader.wanted_isr(1, anyone) is not None


@pytest.mark.parametrize(
    ("epochs", "is_dropped"),
    [({1: 4, 2: 7, 3: 7}, False), ({1: 4, 2: 9, 3: 7}, False), ({1: 4, 2: 7, 3: 8}, True)],
)
def test_a_change_that_may_arrive_but_not_be_made_is_dropped_at_once(
    epochs: dict[int, int], is_dropped: bool
) -> None:
    leader, proposal = joining()
    leader.isr_refused(final=False)
    leader.proposed_isr(proposal)
    leader.isr_declined(epochs.get)
    assert (leader.proposed is None) is is_dropped, "who died while it joined is not waited for"


def test_a_change_that_may_still_arrive_is_not_dropped() -> None:
    leader, proposal = joining()
    leader.isr_refused(final=False)
    assert leader.wanted_isr(500, anyone) == proposal
    leader.proposed_isr(proposal)
    leader.isr_declined()
    assert leader.proposed == {1, 2, 3}
    assert leader.wanted_isr(LAG_MS, anyone) == proposal
    leader.proposed_isr(proposal)
    leader.isr_declined()
    assert leader.proposed is None


def test_old_news_of_the_in_sync_set_is_ignored() -> None:
    leader, _ = joining()
    assert not leader.isr_committed((1,), 20)
    assert leader.isr == {1, 2}
    assert leader.proposed == {1, 2, 3}
    leader.isr_committed((1, 2, 3), 21)
    assert not leader.isr_committed((1, 2), 20)
    assert leader.isr == {1, 2, 3}


def test_new_replicas_can_join_and_old_ones_are_forgotten() -> None:
    leader = rules(isr=(1, 2))
    leader.reconfigured(replicas=(1, 2, 4))
    assert not fetch(leader, 3, 100)
    fetch(leader, 4, 100)
    assert propose(leader).members == {1, 2, 4}


def test_lags_tell_who_is_how_far_behind() -> None:
    leader = rules()
    fetch(leader, 2, 100, now_ms=10)
    leader.local_moved(130)
    fetch(leader, 2, 120, now_ms=20)
    told = {lag.replica: lag[1:] for lag in leader.lags(1000)}
    assert told == {2: (10, 990, True), 3: (-1, 1000, True)}
