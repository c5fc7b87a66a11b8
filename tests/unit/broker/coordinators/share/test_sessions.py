"""Share sessions that end during a long poll, logs that lose their oldest records, and unavailable coordinators."""

import asyncio
from typing import Any

import pytest
from tests.unit.broker.coordinators.share.share_client import (
    ACCEPT,
    GROUP,
    RELEASE,
    Member,
    publish,
    share_topic,
    stored,
)
from tests.unit.broker.raw_client import create_topic, until

from penstock.broker.node import Node
from penstock.protocol.errors import ApiError, ErrorCode

_LONG_MS = 20_000
_FOR_EVER_MS = 3_600_000
_AT_MOST_ONCE = {"penstock_share_delivery": "at-most-once"}


async def _with_new_connection(node: Node, member: Member) -> Member:
    """The same member on a new connection, before the old one is known to be dead."""
    again = await Member.join(node)
    again.name = member.name
    return again


async def _long_poll(node: Node, member: Member, wait_ms: int = _LONG_MS) -> "asyncio.Task[Any]":
    task = asyncio.create_task(member.fetch(wait_ms=wait_ms))
    await until(lambda: any(led._watchers for led in node.share() if led.rules is not None))
    return task


# -- sessions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, _AT_MOST_ONCE])
async def test_a_long_poll_of_before_takes_nothing_from_the_session_that_follows(
    node: Node, settings: dict[str, str]
) -> None:
    """Its connection may be dead, and then no member would get the records."""
    await share_topic(node, **settings)
    member = await Member.join(node)
    before = await _long_poll(node, member)
    again = await _with_new_connection(node, member)
    await again.fetch(records=0)
    await publish(node, 3)
    assert (await before).acquired == []
    assert [offset for offset, _ in (await again.fetch(wait_ms=_LONG_MS)).acquired] == [0, 1, 2]


async def test_a_long_poll_takes_nothing_after_the_goodbye(node: Node) -> None:
    """Or it would hold records for a member that is gone, until their locks run out."""
    await share_topic(node)
    one, two = await Member.join(node), await Member.join(node)
    await two.fetch(records=0)
    before = await _long_poll(node, one)
    await (await _with_new_connection(node, one)).leave()
    await publish(node, 3)
    assert (await before).acquired == []
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == [(0, 1), (1, 1), (2, 1)]


async def test_share_partitions_without_sessions_are_unloaded(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes later begins with what is stored then: an administrator may have moved it."""
    await share_topic(node)
    await publish(node, 3)
    read, may_read = node.share_state().persister.read, asyncio.Event()

    async def read_late(*key: Any) -> Any:
        await may_read.wait()
        return await read(*key)

    monkeypatch.setattr(node.share_state().persister, "read", read_late)
    one = await Member.join(node)
    asking = asyncio.create_task(one.fetch(wait_ms=_LONG_MS))
    await until(lambda: len(node.share()))
    asking.cancel()
    await one.vanish()
    await until(lambda: not len(node.share().sessions))
    (loading,) = node.share()
    may_read.set()
    await until(lambda: loading.rules is not None)
    assert len(node.share()) == 0


# -- the log ---------------------------------------------------------------------------------------------


async def test_a_log_that_loses_records_during_a_write_is_read_on_afterwards(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await share_topic(node)
    await publish(node, 1, batches=4)
    one, two = await Member.join(node), await Member.join(node)
    await one.fetch(wait_ms=_LONG_MS)
    await one.acknowledge((1, 3, [RELEASE]))
    write, may_write, begun = node.share_state().persister.write, asyncio.Event(), asyncio.Event()

    async def write_late(*key: Any, **said: Any) -> None:
        begun.set()
        await may_write.wait()
        await write(*key, **said)

    monkeypatch.setattr(node.share_state().persister, "write", write_late)
    said = asyncio.create_task(one.acknowledge((0, 0, [ACCEPT])))
    await begun.wait()
    partition = node.partitions.find("t", 0)
    partition.log.delete_records_before(2)
    partition.start_moved()
    reply = await two.fetch()
    assert (reply.error, reply.acquired) == (ErrorCode.none, [])
    may_write.set()
    assert await said is ErrorCode.none
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == [(2, 2), (3, 2)]


# -- the coordinator -------------------------------------------------------------------------------------


async def test_a_state_that_cannot_be_read_yet_is_nothing_to_have(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients know the errors of a fetch, and this is none of them."""
    await share_topic(node)
    await publish(node, 2)

    async def nobody_there(*key: Any) -> Any:
        raise ApiError(ErrorCode.coordinator_not_available)

    member = await Member.join(node)
    with monkeypatch.context() as patched:
        patched.setattr(node.share_state().persister, "read", nobody_there)
        reply = await member.fetch(wait_ms=10)
        assert (reply.error, reply.acquired) == (ErrorCode.none, [])
    assert (await member.fetch(wait_ms=_LONG_MS)).acquired == [(0, 1), (1, 1)]


# -- at most once ----------------------------------------------------------------------------------------


async def test_at_most_once_no_more_is_made_final_than_was_asked_for(node: Node) -> None:
    """For any number of partitions: records that are final and not delivered are lost with the leader."""
    await create_topic(node, "t", partitions=3)
    await share_topic(node, **_AT_MOST_ONCE)
    topic_id = node.image.topics["t"].id
    for index in (1, 2):
        await node.share_state().persister.initialize(GROUP, topic_id, index, state_epoch=1, start_offset=0)
    for index in (0, 1, 2):
        await publish(node, 4, index=index)
    member = await Member.join(node)
    await member.ask(partitions=(0, 1, 2), records=0)
    await until(lambda: sum(led.rules is not None for led in node.share()) == 3)
    reply = await member.ask(partitions=(0, 1, 2), records=2, share_acquire_mode=1, wait_ms=_LONG_MS)
    parts = [part for topic in reply.responses for part in topic.partitions]
    assert sum(one.last_offset - one.first_offset + 1 for part in parts for one in part.acquired_records) == 2
    states = [await stored(node, index=index) for index in (0, 1, 2)]
    assert sum(state.totals.handed_out for state in states) == 2


async def test_at_most_once_what_is_given_back_makes_room(node: Node) -> None:
    """Nothing is written for it, and a fetch that waits for room is still answered."""
    await share_topic(node, share_partition_max_record_locks="100", **_AT_MOST_ONCE)
    await publish(node, 100)
    await publish(node, 5)
    one, two = await Member.join(node), await Member.join(node)
    assert len((await one.fetch(records=100, wait_ms=_LONG_MS)).acquired) == 100
    waiting = await _long_poll(node, two, wait_ms=_FOR_EVER_MS)
    await one.acknowledge((0, 99, [RELEASE]))
    reply = await asyncio.wait_for(waiting, timeout=_LONG_MS / 1000)
    assert [offset for offset, _ in reply.acquired] == [100, 101, 102, 103, 104]


# -- records of which members die ------------------------------------------------------------------------


async def test_who_dies_of_a_record_takes_no_others_with_it(node: Node) -> None:
    await share_topic(node, share_delivery_count_limit="3", errors_deadletterqueue_topic_name="")
    await publish(node, 4)
    done: set[int] = set()
    for _ in range(20):
        member = await Member.join(node)
        got = [offset for offset, _ in (await member.fetch(wait_ms=_LONG_MS)).acquired]
        if 1 in got:
            await member.vanish()  # before it has said anything of the others
            await until(lambda: not len(node.share().sessions))
            continue
        for offset in got:
            await member.acknowledge((offset, offset, [ACCEPT]))
        done |= set(got)
        await member.vanish()
        await until(lambda: not len(node.share().sessions))
        if len(done) == 3:
            break
    assert done == {0, 2, 3}
    assert node.share().counters_of(GROUP).limited == 1
