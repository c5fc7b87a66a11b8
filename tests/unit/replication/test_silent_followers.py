"""A follower that was silent rejoins the in-sync set only with a new fetch."""

from penstock.replication.leader import LeaderRules

LAG_MS = 1_000


def test_one_that_left_because_it_fell_silent_must_be_heard_again_to_come_back() -> None:
    leader = LeaderRules(
        local_id=1,
        leader_epoch=0,
        partition_epoch=0,
        replicas=(1, 2),
        isr=(1, 2),
        epoch_start_offset=0,
        high_watermark=0,
        local_offset=0,
        lag_ms_max=LAG_MS,
        isr_min=2,
        now_ms=0,
    )
    leader.fetched(2, offset=0, log_end=0, broker_epoch=7, now_ms=0)
    leader.local_moved(10)
    shrink = leader.wanted_isr(LAG_MS + 1, lambda broker, epoch: True)
    assert shrink is not None
    assert shrink.members == {1}
    leader.proposed_isr(shrink)
    leader.isr_committed((1,), 1)
    # Nothing was committed meanwhile, so it lacks nothing; but it may be dead.
    assert leader.wanted_isr(LAG_MS + 2, lambda broker, epoch: True) is None
    assert not leader.can_join(2)
    leader.fetched(2, offset=0, log_end=10, broker_epoch=7, now_ms=LAG_MS + 3)
    grown = leader.wanted_isr(LAG_MS + 4, lambda broker, epoch: True)
    assert grown is not None
    assert grown.members == {1, 2}
