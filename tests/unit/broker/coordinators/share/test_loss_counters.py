"""The loss counters of an at-most-once group are exact after any kill and on any later leader."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
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
from tests.unit.broker.raw_client import new_node, running, until
from tests.unit.broker.three_nodes import PATIENT, Trio

from penstock.broker.metrics.exposition import collect_metrics
from penstock.broker.node import Node
from penstock.groups.share.state.share_state import DeliveryTotals, SharePartitionKey, WriteState
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch

_LONG_MS = 20_000
_SETTINGS = {"share_coordinator_state_topic_num_partitions": "2", "penstock_flush": "never"}
_AT_MOST_ONCE = {"penstock_share_delivery": "at-most-once"}


class Client:
    """Takes what it gets, accepts the first half of it, and writes down what it knows."""

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.accepted: list[int] = []  # and said so
        self.confirmed: list[int] = []  # and heard that this is stored

    async def work(self, node: Node) -> None:
        """Until the end of the log."""
        member = await Member.join(node)
        end = node.partitions.find("t", 0).log.end_offset
        while not self.delivered or self.delivered[-1] < end - 1:
            reply = await member.fetch(records=4, share_acquire_mode=1, wait_ms=_LONG_MS)
            got = [offset for offset, _ in reply.acquired]
            assert got, reply
            self.delivered += got
            half = got[: (len(got) + 1) // 2]
            self.accepted += half
            assert await member.acknowledge((half[0], half[-1], [ACCEPT])) is ErrorCode.none
            self.confirmed += half
            if len(got) > 1:
                await member.acknowledge((half[-1] + 1, got[-1], [RELEASE]))


class Killer:
    """Ends a node at one of its state writes: before it is made, or before anybody hears of it."""

    def __init__(self, node: Node, at: int, *, arrives: bool) -> None:
        self._write = node.share_state().persister.write
        self._left, self._arrives = at, arrives
        self.now = asyncio.Event()
        node.share_state().persister.write = self.write  # type: ignore[method-assign]

    async def write(self, *key: Any, **said: Any) -> None:
        self._left -= 1
        if self._left >= 0 or self._arrives:
            await self._write(*key, **said)
        if self._left < 0:
            self.now.set()
            await asyncio.Event().wait()


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_node_that_is_killed_at_any_write_knows_what_may_be_lost(
    tmp_path: Path, arrives: bool
) -> None:
    client, produced, point = Client(), 0, 0
    for point in range(6):
        node = new_node(tmp_path, **_SETTINGS)
        await node.start()
        if not point:
            await share_topic(node, **_AT_MOST_ONCE)
        await publish(node, 9)
        produced += 9
        killer = Killer(node, point, arrives=arrives)
        working = asyncio.create_task(client.work(node))
        killed = asyncio.create_task(killer.now.wait())
        await asyncio.wait((working, killed), return_when=asyncio.FIRST_COMPLETED)
        assert not working.done(), "nothing was killed"
        await _cancelled(working)
        await node.stop(clean=False)
    async with running(tmp_path, **_SETTINGS) as node:
        await publish(node, 9)
        await client.work(node)
        totals = (await stored(node)).totals
    produced += 9
    assert len(client.delivered) == len(set(client.delivered)), "twice"
    # Each life ended in the middle of a hand-out (its even writes) or of a confirmation.
    withheld = produced - len(client.delivered)
    assert withheld == (4 * 3 if arrives else 0)
    assert totals.handed_out == produced
    unheard = len(client.accepted) - len(client.confirmed)
    assert unheard > 0
    assert totals.confirmed == len(client.confirmed) + (unheard if arrives else 0)
    assert totals.unconfirmed == produced - totals.confirmed


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


async def test_where_nothing_is_killed_what_is_unconfirmed_is_what_was_not_delivered(tmp_path: Path) -> None:
    async with running(tmp_path, **_SETTINGS) as node:
        await share_topic(node, **_AT_MOST_ONCE)
        await publish(node, 10, batches=3)
        member = await Member.join(node)
        seen = -1
        while seen < 29:
            got = (await member.fetch(wait_ms=_LONG_MS)).acquired
            seen = got[-1][0]
            await member.acknowledge((got[0][0], seen, [ACCEPT]))
        assert (await stored(node)).totals == DeliveryTotals(handed_out=30, confirmed=30)
        families = {family.name: family for family in await collect_metrics(node.metric_sources())}
    totals = dict(families["penstock_share_record_totals"].samples)
    told = {"handed_out": 30, "confirmed": 30, "unconfirmed": 0, "expired": 0}
    assert totals == {(GROUP, "t", "0", event): count for event, count in told.items()}


async def test_holes_are_not_counted_as_handed_out(tmp_path: Path) -> None:
    async with running(tmp_path, **_SETTINGS) as node:
        await share_topic(node, **_AT_MOST_ONCE)
        partition = node.partitions.find("t", 0)
        left = [Record(at, 1000, None, b"v%d" % at) for at in (0, 1, 4, 5, 9)]
        # As compaction leaves a batch.
        batch = encode_batch(left)
        batch[12:16] = bytes(4)  # in leader epoch 0
        partition.log.append_replicated(memoryview(batch), now_ms=node.environment.now_ms())
        await publish(node, 2)
        member = await Member.join(node)
        acquired: list[int] = []
        while len(acquired) < 7:
            acquired += [offset for offset, _ in (await member.fetch(records=3, wait_ms=_LONG_MS)).acquired]
        assert acquired == [0, 1, 4, 5, 9, 10, 11]
        assert (await stored(node)).totals == DeliveryTotals(handed_out=7)


async def test_what_retention_deletes_before_it_is_handed_out_is_counted_apart(tmp_path: Path) -> None:
    async with running(tmp_path, **_SETTINGS) as node:
        await share_topic(node, **_AT_MOST_ONCE)
        await publish(node, 10)
        member = await Member.join(node)
        assert len((await member.fetch(records=4, share_acquire_mode=1, wait_ms=_LONG_MS)).acquired) == 4
        partition = node.partitions.find("t", 0)
        partition.log.delete_records_before(8)
        partition.start_moved()
        assert (await member.fetch(wait_ms=_LONG_MS)).acquired == [(8, 1), (9, 1)]
        assert (await stored(node)).totals == DeliveryTotals(handed_out=6, expired=4)


async def test_totals_go_over_the_wire_and_outlive_leaders(tmp_path: Path) -> None:
    """Each share partition has its coordinator on another node than some leader it will have."""
    trio = Trio(tmp_path, PATIENT)
    await trio.start()
    await trio.create_topic("t")
    await share_topic(await trio.controller(), **_AT_MOST_ONCE)
    await until(lambda: all(_is_at_most_once(node) for node in trio.nodes.values()))
    client = Client()
    for _ in range(3):
        leader = await _led(trio)
        await publish(leader, 6)
        await _patiently(client.work(leader))
        number = leader.node_id
        await trio.kill(number)
        await _led(trio)
        await trio.launch(number)
    leader = await _led(trio)
    topic_id = leader.image.topics["t"].id
    epoch = leader.partitions.find("t", 0).leader_epoch
    for node in trio.nodes.values():  # of which one at least has to ask another one
        state = await node.share_state().persister.read(GROUP, topic_id, 0, epoch)
        assert state.totals == DeliveryTotals(
            handed_out=len(client.delivered), confirmed=len(client.confirmed)
        )
    assert len(client.delivered) == len(set(client.delivered)) == 18
    await trio.stop()


async def _led(trio: Trio) -> Node:
    await until(lambda: trio.leader("t"))
    found = trio.leader("t")
    assert found is not None
    return found


def _is_at_most_once(node: Node) -> bool:
    return node.groups.config(GROUP).is_at_most_once


async def _patiently(work: Coroutine[Any, Any, None]) -> None:
    await asyncio.wait_for(work, 60)


async def test_totals_that_come_late_take_nothing_back(tmp_path: Path) -> None:
    async with running(tmp_path, **_SETTINGS) as node:
        await share_topic(node, **_AT_MOST_ONCE)
        key = SharePartitionKey(GROUP, node.image.topics["t"].id, 0)
        for totals in (DeliveryTotals(5, 2), DeliveryTotals(3, 1)):
            (reply,) = await node.share_state().handle([WriteState(key, 1, 0, 3, 0, [], totals)])
            assert reply.error is ErrorCode.none
        assert (await stored(node)).totals == DeliveryTotals(5, 2)
