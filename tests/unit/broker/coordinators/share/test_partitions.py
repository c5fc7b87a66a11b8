"""Share partitions when writes fail, leaders are fenced and replies are lost: what members get."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.coordinators.share.share_client import (
    ACCEPT,
    GROUP,
    REJECT,
    RELEASE,
    SETTINGS,
    Member,
    publish,
    set_group,
    share_topic,
    stored,
)
from tests.unit.broker.raw_client import running, until

from penstock.broker.coordinators.share import partitions
from penstock.broker.node import Node
from penstock.groups.share.state.share_state import DeliveryTotals
from penstock.protocol.errors import ApiError, ErrorCode

_LONG_MS = 20_000
_AT_MOST_ONCE = {"penstock_share_delivery": "at-most-once"}


class Gate:
    """Stands between a share partition and its coordinator."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self._write = node.share_state().persister.write
        self.open = asyncio.Event()
        self.open.set()
        self.error: ErrorCode | None = None
        self.arrives = False  # a write that fails has arrived all the same
        self.writes: list[dict[str, Any]] = []
        monkeypatch.setattr(node.share_state().persister, "write", self.write)
        monkeypatch.setattr(partitions, "_WRITE_RETRY_S", 0.01)

    async def write(self, *key: Any, **said: Any) -> None:
        self.writes.append(said)
        await self.open.wait()
        error = self.error  # the test may clear it while this write is on its way
        if error is None or self.arrives:
            await self._write(*key, **said)
        if error is not None:
            raise ApiError(error)


@pytest.fixture
def gate(node: Node, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(node, monkeypatch)


async def _with_records(node: Node, count: int, **configs: str) -> tuple[Member, Member]:
    await share_topic(node, **configs)
    await publish(node, count)
    one, two = await Member.join(node), await Member.join(node)
    await two.fetch(records=0)
    return one, two


# -- writes that wait and fail ---------------------------------------------------------------------------


async def test_nothing_is_answered_or_available_before_it_is_stored(node: Node, gate: Gate) -> None:
    one, two = await _with_records(node, 2)
    await one.fetch(wait_ms=_LONG_MS)
    gate.open.clear()
    said = asyncio.create_task(one.acknowledge((0, 1, [ACCEPT, RELEASE])))
    await until(lambda: gate.writes)
    assert (await two.fetch()).acquired == []
    assert not said.done()
    gate.open.set()
    assert await said is ErrorCode.none
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == [(1, 2)]


async def test_what_comes_during_a_write_goes_with_the_next_one(node: Node, gate: Gate) -> None:
    one, two = await _with_records(node, 3)
    await two.fetch(records=1, share_acquire_mode=1, wait_ms=_LONG_MS)
    await one.fetch(wait_ms=_LONG_MS)
    gate.open.clear()
    first = asyncio.create_task(two.acknowledge((0, 0, [RELEASE])))
    await until(lambda: len(gate.writes) == 1)
    second = asyncio.create_task(one.acknowledge((1, 1, [RELEASE])))
    await until(lambda: node.share().counters_of(GROUP).released == 2)
    gate.open.set()
    assert [await first, await second] == [ErrorCode.none] * 2
    assert [write["batches"] for write in gate.writes] == [[(0, 0, 0, 1)], [(1, 1, 0, 1)]]


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_write_that_fails_shows_nothing_and_loses_nothing(
    node: Node, gate: Gate, arrives: bool
) -> None:
    one, two = await _with_records(node, 3, errors_deadletterqueue_topic_name="")
    await one.fetch(wait_ms=_LONG_MS)
    gate.error, gate.arrives = ErrorCode.coordinator_not_available, arrives
    assert await one.acknowledge((0, 2, [ACCEPT, RELEASE, REJECT])) is ErrorCode.coordinator_not_available
    assert (await two.fetch()).acquired == []
    gate.error = None
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == [(1, 2)]
    await two.acknowledge((1, 1, [ACCEPT]))
    assert (await stored(node)).start_offset == 3


async def test_a_lock_that_expires_while_its_write_fails_is_not_lost(node: Node, gate: Gate) -> None:
    one, two = await _with_records(node, 2, share_record_lock_duration_ms="50")
    gate.error = ErrorCode.coordinator_not_available
    await one.fetch(wait_ms=_LONG_MS)
    await until(lambda: len(gate.writes) >= 3)
    assert (await two.fetch()).acquired == []
    gate.error = None
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == [(0, 2), (1, 2)]


async def test_a_fenced_leader_forgets_what_it_knew(node: Node, gate: Gate) -> None:
    one, two = await _with_records(node, 3)
    await one.fetch(records=2, share_acquire_mode=1, wait_ms=_LONG_MS)
    gate.error = ErrorCode.fenced_leader_epoch
    assert await one.acknowledge((0, 1, [ACCEPT])) is ErrorCode.not_leader_or_follower
    assert len(node.share()) == 0
    gate.error = None
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == [(0, 1), (1, 1), (2, 1)]
    assert await one.acknowledge((0, 1, [ACCEPT])) is ErrorCode.invalid_record_state


async def test_a_hand_out_of_a_leader_that_was_fenced_meanwhile_does_not_leave(
    node: Node, gate: Gate
) -> None:
    one, _ = await _with_records(node, 4)
    await one.fetch(records=2, share_acquire_mode=1, wait_ms=_LONG_MS)
    gate.error = ErrorCode.fenced_state_epoch
    reply = await one.fetch((0, 1, [ACCEPT]), wait_ms=_LONG_MS)
    assert (reply.error, reply.acknowledge_error) == (ErrorCode.not_leader_or_follower,) * 2
    assert (reply.acquired, reply.values) == ([], {})


# -- at most once ----------------------------------------------------------------------------------------


async def test_at_most_once_is_final_before_the_answer_leaves(node: Node, gate: Gate) -> None:
    one, two = await _with_records(node, 3, **_AT_MOST_ONCE)
    gate.open.clear()
    waiting = asyncio.create_task(one.fetch(wait_ms=0))
    await until(lambda: gate.writes)
    assert not waiting.done()
    assert (await two.fetch()).acquired == []
    gate.open.set()
    assert (await waiting).acquired == [(0, 1), (1, 1), (2, 1)]
    assert (await stored(node)).start_offset == 3


@pytest.mark.parametrize("kind", [RELEASE, REJECT])
async def test_at_most_once_never_comes_back(node: Node, kind: int) -> None:
    one, two = await _with_records(node, 3, **_AT_MOST_ONCE)
    await one.fetch(wait_ms=_LONG_MS)
    assert await one.acknowledge((0, 1, [ACCEPT, kind])) is ErrorCode.none
    await one.vanish()
    await until(lambda: len(node.share().sessions) == 1)
    assert (await two.fetch()).acquired == []
    assert (await stored(node)).totals == DeliveryTotals(handed_out=3, confirmed=1)


async def test_at_most_once_a_lock_that_runs_out_only_counts(node: Node) -> None:
    one, two = await _with_records(node, 2, share_record_lock_duration_ms="50", **_AT_MOST_ONCE)
    assert len((await one.fetch(wait_ms=_LONG_MS)).acquired) == 2
    await until(lambda: node.share().counters_of(GROUP).expired == 2)
    assert (await two.fetch()).acquired == []
    assert (await stored(node)).totals == DeliveryTotals(handed_out=2)


async def test_at_most_once_undelivered_records_go_to_the_next_member(node: Node, gate: Gate) -> None:
    """The client has gone before the write was done: nothing has left this node."""
    one, two = await _with_records(node, 2, **_AT_MOST_ONCE)
    gate.open.clear()
    waiting = asyncio.create_task(one.fetch(wait_ms=_LONG_MS))
    await until(lambda: gate.writes)
    waiting.cancel()
    await one.vanish()
    await until(lambda: len(node.share().sessions) == 1)
    gate.open.set()
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == [(0, 1), (1, 1)]
    assert (await stored(node)).totals == DeliveryTotals(handed_out=2)


@pytest.mark.parametrize("arrives", [True, False])
async def test_at_most_once_a_write_that_fails_is_never_handed_out_twice(
    node: Node, gate: Gate, arrives: bool
) -> None:
    one, two = await _with_records(node, 2, **_AT_MOST_ONCE)
    gate.error, gate.arrives = ErrorCode.coordinator_not_available, arrives
    assert (await one.fetch()).acquired == []
    gate.error = None
    first, second = await asyncio.gather(one.fetch(wait_ms=1000), two.fetch(wait_ms=1000))
    assert sorted([*first.acquired, *second.acquired]) == [(0, 1), (1, 1)]


async def test_at_most_once_across_a_restart(tmp_path: Path) -> None:
    seen: list[int] = []
    for _ in range(3):
        async with running(tmp_path, **SETTINGS) as node:
            if "t" not in node.image.topics:
                await share_topic(node, **_AT_MOST_ONCE)
            await publish(node, 2)
            member = await Member.join(node)
            seen += [offset for offset, _ in (await member.fetch(wait_ms=_LONG_MS)).acquired]
    assert seen == sorted(set(seen))
    assert len(seen) == 6


async def test_a_group_that_turns_to_at_most_once_gets_nothing_twice(node: Node) -> None:
    one, two = await _with_records(node, 4)
    await one.fetch(records=3, share_acquire_mode=1, wait_ms=_LONG_MS)
    await one.acknowledge((0, 0, [RELEASE]))
    await set_group(node, GROUP, **_AT_MOST_ONCE)
    await one.acknowledge((1, 1, [RELEASE]))
    await one.vanish()
    await until(lambda: len(node.share().sessions) == 1)
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == [(3, 1)]


# -- leaders ---------------------------------------------------------------------------------------------


async def test_another_leader_epoch_begins_with_what_is_stored(node: Node) -> None:
    """And who led before is fenced, though it does not know yet."""
    one, two = await _with_records(node, 4)
    await one.fetch(records=2, share_acquire_mode=1, wait_ms=_LONG_MS)
    await one.acknowledge((0, 0, [RELEASE]))
    (before,) = node.share()
    partition = node.partitions.find("t", 0)
    state = node.image.topics["t"].partitions[0]
    later = state._replace(leader_epoch=state.leader_epoch + 1)
    partition.lead(later, local_id=node.node_id, lag_ms_max=1000)
    assert (await two.fetch(wait_ms=_LONG_MS)).acquired == [(0, 2), (1, 1), (2, 1), (3, 1)]
    assert before.is_closed
    assert await one.acknowledge((1, 1, [ACCEPT])) is ErrorCode.invalid_record_state
    with pytest.raises(ApiError) as fenced:
        await before._store(4, 0, [])
    assert fenced.value.code is ErrorCode.fenced_leader_epoch


async def test_waiting_fetches_are_sent_to_the_new_leader(node: Node) -> None:
    await share_topic(node)
    member = await Member.join(node)
    waiting = asyncio.create_task(member.ask(wait_ms=_LONG_MS))
    await until(lambda: any(one._watchers for one in node.share() if one.rules is not None))
    partition = node.partitions.find("t", 0)
    state = node.image.topics["t"].partitions[0]
    partition.follow(state._replace(leader=9, leader_epoch=state.leader_epoch + 1), local_id=node.node_id)
    (topic,) = (await waiting).responses
    assert topic.partitions[0].error_code is ErrorCode.not_leader_or_follower
    assert topic.partitions[0].current_leader.leader_id == 9


async def test_a_stopped_node_has_no_timers_left(tmp_path: Path) -> None:
    async with running(tmp_path, **SETTINGS) as node:
        one, _ = await _with_records(node, 2)
        await one.fetch(wait_ms=_LONG_MS)
        (led_here,) = node.share()
        assert led_here._timer is not None
    assert led_here._timer.cancelled()
