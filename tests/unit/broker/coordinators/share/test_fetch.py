"""ShareFetch and ShareAcknowledge on a real node: sessions, long polls, locks and limits."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.broker.coordinators.share.share_client import (
    ACCEPT,
    GROUP,
    REJECT,
    RELEASE,
    RENEW,
    Clock,
    Member,
    got,
    publish,
    set_group,
    share_topic,
    stored,
)
from tests.unit.broker.raw_client import create_topic, delete_topic, running, until

from penstock.broker.metrics.exposition import collect_metrics
from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode

_LONG_MS = 20_000
_LOCK_MS = 30_000
_SETTINGS = {
    "share_coordinator_state_topic_num_partitions": "2",
    "group_share_record_lock_duration_ms": str(_LOCK_MS),
}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path, penstock_flush="never", **_SETTINGS) as node:
        yield node


@pytest.fixture
def clock(node: Node, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(node, monkeypatch)


async def _waiting(node: Node, member: Member, **options: object) -> "asyncio.Task[object]":
    """A long poll that has come to its wait."""
    task = asyncio.create_task(member.fetch(wait_ms=_LONG_MS, **options))
    await until(lambda: any(led._watchers for led in node.share()))
    return task


def _all(count: int, delivery: int = 1) -> list[tuple[int, int]]:
    return [(offset, delivery) for offset in range(count)]


# -- handing out -----------------------------------------------------------------------------------------


async def test_records_are_handed_out_once_and_acknowledged_for_good(node: Node) -> None:
    await share_topic(node)
    await publish(node, 10)
    one, two = await Member.join(node), await Member.join(node)
    reply = await one.fetch(wait_ms=_LONG_MS)
    assert reply.acquired == _all(10)
    assert reply.values == {offset: b"v%d" % offset for offset in range(10)}
    assert (await two.fetch()).acquired == []
    assert await one.acknowledge((0, 9, [ACCEPT])) is ErrorCode.none
    state = await stored(node)
    assert (state.start_offset, state.batches) == (10, ())


async def test_an_outcome_for_each_record(node: Node) -> None:
    await share_topic(node)
    await publish(node, 6)
    member = await Member.join(node)
    await member.fetch(wait_ms=_LONG_MS)
    said = [ACCEPT, RELEASE, REJECT, RELEASE, ACCEPT, ACCEPT]
    again = await member.fetch((0, 5, said), wait_ms=_LONG_MS)
    assert again.acknowledge_error is ErrorCode.none
    if not again.acquired:
        again = await member.fetch(wait_ms=_LONG_MS)
    assert again.acquired == [(1, 2), (3, 2)]


async def test_a_batch_without_acquired_records_stays_out_of_the_answer(node: Node) -> None:
    await share_topic(node)
    await publish(node, 1, batches=5)
    member = await Member.join(node)
    await member.fetch(wait_ms=_LONG_MS)
    await member.acknowledge((0, 4, [ACCEPT, RELEASE, ACCEPT, RELEASE, ACCEPT]))
    again = await member.fetch(wait_ms=_LONG_MS)
    assert (again.acquired, sorted(again.values)) == ([(1, 2), (3, 2)], [1, 3])


async def test_what_came_back_is_topped_up_with_what_is_new(node: Node) -> None:
    """Many clients ask for no more until they have worked off what they got."""
    await share_topic(node)
    await publish(node, 500, batches=6)
    member = await Member.join(node)
    assert len((await member.fetch(records=2000, wait_ms=_LONG_MS)).acquired) == 2000
    await member.acknowledge((0, 0, [RELEASE]), (1, 1999, [ACCEPT]))
    (led,) = node.share()
    led.bytes_per_record = 12.0  # as it has learnt after a while
    again = await member.fetch(records=500, wait_ms=_LONG_MS)
    assert again.acquired[:2] == [(0, 2), (2000, 1)]
    assert len(again.acquired) == 501, "and batches come whole"
    assert sorted(again.values) == [*range(500), *range(2000, 2500)], "what lies between stays out"


async def test_batches_come_whole_unless_the_limit_is_exact(node: Node) -> None:
    await share_topic(node)
    await publish(node, 10, batches=3)
    member = await Member.join(node)
    assert len((await member.fetch(records=12, wait_ms=_LONG_MS)).acquired) == 20
    exact = await member.fetch(records=3, share_acquire_mode=1, wait_ms=_LONG_MS)
    assert exact.acquired == [(20, 1), (21, 1), (22, 1)]
    assert (await member.fetch(records=3, share_acquire_mode=1)).acquired == [(23, 1), (24, 1), (25, 1)]


async def test_ranges_are_about_as_large_as_the_client_likes(node: Node) -> None:
    await share_topic(node)
    await publish(node, 4, batches=5)
    member = await Member.join(node)
    ranges = (await member.fetch(batch_size=6, wait_ms=_LONG_MS)).ranges
    assert ranges == [(0, 7, 1), (8, 15, 1), (16, 19, 1)]


async def test_no_more_locks_than_allowed(node: Node) -> None:
    await share_topic(node, share_partition_max_record_locks="100")
    await publish(node, 60, batches=3)
    member = await Member.join(node)
    assert len((await member.fetch(wait_ms=_LONG_MS)).acquired) == 120
    assert (await member.fetch()).acquired == []
    await member.acknowledge((0, 59, [ACCEPT]))
    assert (await member.fetch(wait_ms=_LONG_MS)).acquired[0] == (120, 1)


async def test_what_lies_before_the_log_is_passed_over(node: Node) -> None:
    await share_topic(node)
    await publish(node, 5, batches=2)
    member = await Member.join(node)
    await member.fetch(records=1, wait_ms=_LONG_MS)
    partition = node.partitions.find("t", 0)
    partition.log.delete_records_before(7)
    reply = await member.fetch(wait_ms=_LONG_MS)
    assert reply.acquired[-1] == (9, 1)
    assert all(offset >= 5 for offset, _ in reply.acquired)


# -- where a group begins --------------------------------------------------------------------------------


@pytest.mark.parametrize(("reset", "first"), [("earliest", 0), ("latest", 5)])
async def test_where_a_new_group_begins_is_settled_at_once(node: Node, reset: str, first: int) -> None:
    await create_topic(node, "t")
    await publish(node, 5)
    await share_topic(node, start=-1, share_auto_offset_reset=reset)
    member = await Member.join(node)
    await member.fetch()
    await until(lambda: [led for led in node.share() if led.rules is not None])
    assert (await stored(node)).start_offset == first


async def test_uninitialized_share_state_is_an_error(node: Node) -> None:
    await create_topic(node, "t")
    await share_topic(node, topic="other")
    member = await Member.join(node)
    assert (await member.fetch(wait_ms=_LONG_MS)).error is ErrorCode.unknown_topic_or_partition


# -- sessions --------------------------------------------------------------------------------------------


async def test_acknowledgements_on_a_new_session_are_refused(node: Node) -> None:
    await share_topic(node)
    await publish(node, 3)
    member = await Member.join(node)
    await member.fetch(wait_ms=_LONG_MS)
    reply = await member.ask((0, 2, [ACCEPT]), epoch=0)
    assert reply.error_code is ErrorCode.invalid_request
    assert await member.acknowledge((0, 2, [ACCEPT]), epoch=0) is ErrorCode.invalid_share_session_epoch
    assert await member.acknowledge((0, 2, [ACCEPT])) is ErrorCode.none


async def test_an_epoch_comes_once(node: Node) -> None:
    await share_topic(node)
    member = await Member.join(node)
    assert (await member.ask(epoch=3)).error_code is ErrorCode.share_session_not_found
    await member.fetch()
    assert (await member.ask(epoch=2)).error_code is ErrorCode.invalid_share_session_epoch
    await member.fetch()
    assert (await member.ask(epoch=1)).error_code is ErrorCode.invalid_share_session_epoch
    assert await member.acknowledge((0, 0, [ACCEPT]), epoch=1) is ErrorCode.invalid_share_session_epoch


async def test_a_goodbye_frees_what_was_held(node: Node) -> None:
    await share_topic(node)
    await publish(node, 3)
    one, two = await Member.join(node), await Member.join(node)
    await two.fetch()
    await one.fetch(wait_ms=_LONG_MS)
    assert (await one.leave()).error_code is ErrorCode.none
    assert (await one.ask(epoch=2)).error_code is ErrorCode.share_session_not_found
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == _all(3, delivery=2)


async def test_acknowledgements_with_a_goodbye_count(node: Node) -> None:
    await share_topic(node)
    await publish(node, 4)
    one, two = await Member.join(node), await Member.join(node)
    await two.fetch()
    await one.fetch(wait_ms=_LONG_MS)
    reply = got(await one.ask((0, 1, [ACCEPT]), epoch=-1))
    assert reply.acknowledge_error is ErrorCode.none
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == [(2, 2), (3, 2)]


async def test_a_lost_connection_frees_what_was_held(node: Node) -> None:
    await share_topic(node)
    await publish(node, 3)
    one, two = await Member.join(node), await Member.join(node)
    await one.fetch(wait_ms=_LONG_MS)
    waiting = await _waiting(node, two)
    await one.vanish()
    reply = await waiting
    assert reply.acquired == _all(3, delivery=2)


async def test_no_more_sessions_than_allowed(tmp_path: Path) -> None:
    async with running(tmp_path, group_share_max_share_sessions="1") as node:
        await share_topic(node)
        one, two = await Member.join(node), await Member.join(node)
        await one.fetch()
        assert (await two.ask()).error_code is ErrorCode.share_session_limit_reached
        await one.leave()
        assert (await two.ask()).error_code is ErrorCode.none


async def test_names_that_cannot_be(node: Node) -> None:
    await share_topic(node)
    member = await Member.join(node)
    member.name = "m" * 37
    assert (await member.ask()).error_code is ErrorCode.invalid_request
    member.name = ""
    assert await member.acknowledge((0, 0, [ACCEPT]), epoch=1) is ErrorCode.invalid_request


async def test_a_group_with_a_long_name_is_refused_and_not_kept(node: Node) -> None:
    await share_topic(node)
    member = await Member.join(node, group="x" * 1025)  # penstock.id.max.bytes is 1024
    assert (await member.ask()).error_code is ErrorCode.invalid_request
    assert await member.acknowledge(epoch=1) is ErrorCode.invalid_request
    assert len(node.share().sessions) == 0


async def test_partitions_in_sessions_are_bounded(node: Node) -> None:
    """A client may name partitions without end, whether they exist or not."""
    await share_topic(node)
    node.share().sessions._partitions_max = 5
    one, two = await Member.join(node), await Member.join(node)
    for partitions in (range(3), range(2, 5), range(5)):
        assert (await one.ask(partitions=partitions)).error_code is ErrorCode.none
    full = ErrorCode.share_session_limit_reached
    assert (await one.ask(partitions=range(5, 6))).error_code is full
    assert (await two.ask(partitions=range(1))).error_code is full
    assert len(node.share().sessions) == 1
    await one.leave()
    assert (await two.ask(partitions=range(1))).error_code is ErrorCode.none


# -- waiting ---------------------------------------------------------------------------------------------


async def test_an_append_ends_the_wait(node: Node) -> None:
    await share_topic(node)
    waiting = await _waiting(node, await Member.join(node))
    await publish(node, 2)
    assert (await waiting).acquired == _all(2)


async def test_a_release_by_another_member_ends_the_wait(node: Node) -> None:
    await share_topic(node)
    await publish(node, 2)
    one, two = await Member.join(node), await Member.join(node)
    await one.fetch(wait_ms=_LONG_MS)
    waiting = await _waiting(node, two)
    await one.acknowledge((0, 1, [ACCEPT, RELEASE]))
    assert (await waiting).acquired == [(1, 2)]


async def test_a_lock_that_runs_out_ends_the_wait(node: Node, clock: Clock) -> None:
    await share_topic(node)
    await publish(node, 2)
    one, two = await Member.join(node), await Member.join(node)
    await one.fetch(wait_ms=_LONG_MS)
    waiting = await _waiting(node, two)
    clock.advance(_LOCK_MS)
    assert (await waiting).acquired == _all(2, delivery=2)
    assert await one.acknowledge((0, 1, [ACCEPT])) is ErrorCode.invalid_record_state


async def test_a_delay_that_is_over_ends_the_wait(node: Node, clock: Clock) -> None:
    delay_ms = 20_000
    await share_topic(
        node,
        penstock_share_backoff="fixed",
        penstock_share_backoff_ms=str(delay_ms),
        penstock_share_backoff_jitter_ms="0",
    )
    await publish(node, 2)
    member = await Member.join(node)
    await member.fetch(wait_ms=_LONG_MS)
    await member.acknowledge((0, 1, [RELEASE]))
    assert (await member.fetch()).acquired == []
    waiting = await _waiting(node, member)
    clock.advance(delay_ms)
    assert (await waiting).acquired == _all(2, delivery=2)


async def test_min_bytes_are_waited_for(node: Node) -> None:
    await share_topic(node)
    await publish(node, 1)
    member = await Member.join(node)
    await member.fetch(records=0)
    waiting = await _waiting(node, member, min_bytes=150)
    await publish(node, 1)
    await publish(node, 1)
    assert len((await waiting).acquired) >= 2


async def test_min_bytes_are_not_waited_for_by_who_cannot_have_more(node: Node) -> None:
    await share_topic(node)
    await publish(node, 100, batches=30)
    member = await Member.join(node)
    fetch = member.fetch(records=10, share_acquire_mode=1, min_bytes=30_000, wait_ms=1000 * _LONG_MS)
    assert len((await asyncio.wait_for(fetch, timeout=_LONG_MS / 1000)).acquired) == 10


async def test_waiting_requests_are_told_that_the_topic_is_gone(node: Node) -> None:
    await share_topic(node)
    waiting = await _waiting(node, await Member.join(node))
    await delete_topic(node, "t")
    reply = await waiting
    assert reply.error in (ErrorCode.unknown_topic_id, ErrorCode.unknown_topic_or_partition)
    assert len(node.share()) == 0


# -- renewing and giving up ------------------------------------------------------------------------------


async def test_a_renewed_lock_lives_on(node: Node, clock: Clock) -> None:
    await share_topic(node)
    await publish(node, 2)
    one, two = await Member.join(node), await Member.join(node)
    await one.fetch(wait_ms=_LONG_MS)
    await set_group(node, share_record_lock_duration_ms=str(2 * _LOCK_MS))
    assert await one.acknowledge((0, 0, [RENEW]), is_renew_ack=True) is ErrorCode.none
    clock.advance(_LOCK_MS)
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == [(1, 2)]
    assert await one.acknowledge((0, 0, [ACCEPT])) is ErrorCode.none


async def test_renewals_in_a_fetch_come_alone(node: Node) -> None:
    await share_topic(node)
    await publish(node, 2)
    member = await Member.join(node)
    await member.fetch(records=1, share_acquire_mode=1, wait_ms=_LONG_MS)
    refused = await member.ask((0, 0, [RENEW]), is_renew_ack=True, epoch=member.epoch)
    assert refused.error_code is ErrorCode.invalid_request
    only = {"min_bytes": 0, "max_bytes": 0, "records": 0}
    reply = await member.fetch((0, 0, [RENEW]), is_renew_ack=True, **only)
    assert (reply.acknowledge_error, reply.acquired) == (ErrorCode.none, [])
    assert await member.acknowledge((0, 0, [RENEW])) is ErrorCode.invalid_request
    assert await member.acknowledge((0, 0, [ACCEPT])) is ErrorCode.none


async def test_a_group_may_forbid_renewals(node: Node) -> None:
    await share_topic(node, share_renew_acknowledge_enable="false")
    await publish(node, 1)
    member = await Member.join(node)
    await member.fetch(wait_ms=_LONG_MS)
    assert await member.acknowledge((0, 0, [RENEW]), is_renew_ack=True) is ErrorCode.invalid_record_state


async def test_after_the_last_delivery_a_record_is_given_up(node: Node) -> None:
    await share_topic(node, share_delivery_count_limit="2", errors_deadletterqueue_topic_name="")
    await publish(node, 2)
    member = await Member.join(node)
    for delivery in (1, 2):
        assert (await member.fetch(wait_ms=_LONG_MS)).acquired == _all(2, delivery=delivery)
        assert await member.acknowledge((0, 1, [RELEASE])) is ErrorCode.none
    assert (await member.fetch()).acquired == []
    assert node.share().counters_of(GROUP).limited == 2
    await publish(node, 1)
    assert (await member.fetch((2, 2, [ACCEPT]))).acknowledge_error is ErrorCode.invalid_request


async def test_acknowledgements_out_of_order_change_nothing(node: Node) -> None:
    await share_topic(node)
    await publish(node, 4)
    member = await Member.join(node)
    await member.fetch(wait_ms=_LONG_MS)
    for said in [
        ((2, 3, [ACCEPT]), (0, 1, [ACCEPT])),
        ((1, 0, [ACCEPT]),),
        ((0, 3, [ACCEPT, ACCEPT]),),
        ((0, 3, []),),
        ((0, 3, [7]),),
        ((0, 9, [ACCEPT]),),
    ]:
        assert await member.acknowledge(*said) is ErrorCode.invalid_request
    other = await Member.join(node)
    await other.fetch()
    assert await other.acknowledge((0, 3, [ACCEPT])) is ErrorCode.invalid_record_state
    assert await member.acknowledge((0, 3, [ACCEPT])) is ErrorCode.none


# -- what is stored --------------------------------------------------------------------------------------


async def test_deliveries_are_counted_across_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path, **_SETTINGS) as node:
        await share_topic(node)
        await publish(node, 4)
        member = await Member.join(node)
        await member.fetch(wait_ms=_LONG_MS)
        await member.acknowledge((0, 3, [RELEASE, ACCEPT, RELEASE, ACCEPT]))
    async with running(tmp_path, **_SETTINGS) as node:
        member = await Member.join(node)
        assert (await member.fetch(wait_ms=_LONG_MS)).acquired == [(0, 2), (2, 2)]


async def test_a_group_with_new_state_starts_again(node: Node) -> None:
    await share_topic(node)
    await publish(node, 4)
    member = await Member.join(node)
    await member.fetch(wait_ms=_LONG_MS)
    topic_id = node.image.topics["t"].id
    await node.share_state().persister.initialize(GROUP, topic_id, 0, state_epoch=2, start_offset=2)
    assert await member.acknowledge((0, 3, [ACCEPT])) is ErrorCode.not_leader_or_follower
    assert (await member.fetch(wait_ms=_LONG_MS)).acquired == [(2, 1), (3, 1)]


async def test_a_group_without_members_is_forgotten(node: Node) -> None:
    await share_topic(node)
    await publish(node, 2)
    member = await Member.join(node)
    await member.fetch(wait_ms=_LONG_MS)
    assert len(node.share()) == 1
    await member.leave()
    await until(lambda: len(node.share()) == 0)


async def test_settings_of_the_group_count_at_once(node: Node) -> None:
    await share_topic(node, share_delivery_count_limit="5")
    await publish(node, 1)
    member = await Member.join(node)
    await member.fetch(wait_ms=_LONG_MS)
    await member.acknowledge((0, 0, [RELEASE]))
    await member.fetch(wait_ms=_LONG_MS)
    await set_group(node, share_delivery_count_limit="2", errors_deadletterqueue_topic_name="")
    await member.acknowledge((0, 0, [RELEASE]))
    assert node.share().counters_of(GROUP).limited == 1


async def test_metrics_tell_what_has_become_of_records(node: Node) -> None:
    await share_topic(node)
    await publish(node, 4)
    member = await Member.join(node)
    await member.fetch(wait_ms=_LONG_MS)
    await member.acknowledge((0, 2, [ACCEPT, RELEASE, REJECT]))
    families = {family.name: dict(family.samples) for family in await collect_metrics(node.metric_sources())}
    events = {labels[1]: value for labels, value in families["penstock_share_records"].items()}
    assert (events["acquired"], events["accepted"], events["released"], events["rejected"]) == (4, 1, 1, 1)
    assert families["penstock_share_locked_records"] == {(GROUP, "t", "0"): 1}
    assert families["penstock_share_start_offset"] == {(GROUP, "t", "0"): 1}
    assert families["penstock_share_sessions"] == {(): 1}
