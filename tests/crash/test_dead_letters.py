"""Dead letters of a replicated cluster whose nodes are killed at every step: each is written once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from tests.unit.broker.coordinators.share import dead_letter_harness
from tests.unit.broker.coordinators.share.dead_letter_harness import DEAD, GROUP, TOPIC, CrashPoints, header
from tests.unit.broker.raw_client import until
from tests.unit.broker.three_nodes import Trio

from penstock.broker.coordinators.share import dead_letters
from penstock.broker.node import Node
from penstock.groups.share.state.share_state import SharePartitionKey
from penstock.protocol.record_batch import Record

REJECTED = 33
STATE = "__share_group_state"


class Funeral:
    """A cluster, and how far its source has been given up."""

    def __init__(self, trio: Trio, key: SharePartitionKey) -> None:
        self.trio = trio
        self.key = key
        self.next_offset = 0

    async def give_up(self, count: int) -> None:
        """So many records more are rejected; every second one, as its neighbours are processed."""
        batches = []
        for place in range(2 * count):
            offset = self.next_offset + place
            batches.append((offset, offset, REJECTED if place % 2 else 2, 1))
        self.next_offset += 2 * count
        await dead_letter_harness.write(self.trio.any, self.key, *batches)

    @property
    def coordinator(self) -> Node | None:
        return self.trio.leader(STATE, self.trio.any.share_state().shard_of_key(self.key))

    async def all_dead_letters_written(self) -> None:
        for _ in range(3_000):
            # Its leader may be about to change.
            await until(lambda: self.coordinator)
            node = self.coordinator
            if node is not None and await self._is_done(node):
                return
            await asyncio.sleep(0.02)
        raise AssertionError("some dead letters are never written")

    async def _is_done(self, node: Node) -> bool:
        try:
            return await asyncio.wait_for(dead_letter_harness.pending(node), 5) == 0
        except Exception:
            return False

    async def check(self) -> None:
        expected = dict.fromkeys(range(1, self.next_offset, 2), 1)
        # A new leader does not know at once what the last one had committed.
        await until(lambda: len(self._dead_letters()) >= len(expected))
        records = self._dead_letters()
        offsets = Counter(int(header(record, "__dlq.errors.offset") or "-1") for record in records)
        assert offsets == expected
        assert all(record.value == b"value %d" % _offset_of(record) for record in records)
        assert {header(record, "penstock.dlq.reason") for record in records} == {"rejected"}

    def _dead_letters(self) -> list[Record]:
        node = self.trio.leader(DEAD)
        return [] if node is None else dead_letter_harness.dead_letters_in(node)

    async def revive(self, number: int) -> None:
        await self.trio.launch(number)
        await until(lambda: set(self._in_sync()) == {3})

    def _in_sync(self) -> list[int]:
        topics = self.trio.any.image.topics
        named = [topics[name] for name in (TOPIC, DEAD, STATE) if name in topics]
        return [len(partition.isr) for topic in named for partition in topic.partitions.values()]


def _offset_of(record: Record) -> int:
    return int(header(record, "__dlq.errors.offset") or "-1")


@pytest.fixture
async def funeral(tmp_path: Path) -> Funeral:
    trio = Trio(tmp_path)
    await trio.start()
    await trio.create_topic(TOPIC)
    leader = trio.leader(TOPIC)
    assert leader is not None
    await dead_letter_harness.append(leader, TOPIC, 400)
    topic_id = leader.image.topics[TOPIC].id
    await leader.share_state().persister.initialize(GROUP, topic_id, 0, state_epoch=0, start_offset=0)
    return Funeral(trio, SharePartitionKey(GROUP, topic_id, 0))


@pytest.fixture(autouse=True)
def no_waiting_for_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that wrote dead letters before is gone when the next records reach their limit."""
    monkeypatch.setattr(dead_letters, "_LINGER_S", 0)


async def test_the_coordinator_is_killed_at_every_step(
    funeral: Funeral, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio = funeral.trio
    for chosen in range(30):
        points = CrashPoints(chosen)
        with monkeypatch.context() as patch:
            points.install(patch)
            await funeral.give_up(3)
            done = asyncio.ensure_future(funeral.all_dead_letters_written())
            await points.reached_or(done)
            if not points.is_reached:
                break
            victim = funeral.coordinator
            assert victim is not None
            await trio.kill(victim.node_id)
            await done
        await funeral.check()
        await funeral.revive(victim.node_id)
    await funeral.check()
    assert points.passed.count("after append") == 1
    assert chosen == len(points.passed) >= 10
    await trio.stop()


@pytest.mark.parametrize("topic", [TOPIC, pytest.param(DEAD, marks=pytest.mark.slow)])
async def test_leaders_are_killed_at_every_step_while_the_coordinator_goes_on(
    funeral: Funeral, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio = funeral.trio
    await funeral.give_up(1)
    await funeral.all_dead_letters_written()
    killed: list[int] = []

    async def kill_leader() -> None:
        victim = trio.leader(topic)
        if victim is not None:
            killed.append(victim.node_id)
            await trio.kill(victim.node_id)

    for chosen in range(30):
        points = CrashPoints(chosen, kill_leader)
        with monkeypatch.context() as patch:
            points.install(patch)
            await funeral.give_up(3)
            await funeral.all_dead_letters_written()
        await funeral.check()
        if not points.is_reached:
            break
        while killed:
            await funeral.revive(killed.pop())
    assert chosen >= 10
    await trio.stop()
