"""What groups have lost to drop-oldest, as their coordinator samples it from its own and from other leaders."""

from types import SimpleNamespace
from typing import Any

from penstock.broker.metrics.group_drops import GroupDrops
from penstock.protocol.topic_drops import PartitionDrops, encode_drops, parse_drops_request

HEADER_BYTES, CORRELATION = 10, b"\x00" * 4


class World:
    """Partition 0 of topic t is led here, partition 1 by node 2. One group has committed offsets in both."""

    def __init__(self) -> None:
        self.led = SimpleNamespace(dropped_before=-1)
        self.remote = -1
        self.committed = {0: 0, 1: 0}
        self.is_remote_silent = False
        states = {
            0: SimpleNamespace(has_leader=True, leader=1),
            1: SimpleNamespace(has_leader=True, leader=2),
        }
        image = SimpleNamespace(topics={"t": SimpleNamespace(partitions=states)})
        shard = SimpleNamespace(groups={"g": None}, offsets=SimpleNamespace(of_group=self._offsets))
        world: Any = self
        self.drops = GroupDrops(
            world,
            1,
            SimpleNamespace(image=image),  # type: ignore[arg-type]
            partitions=lambda: SimpleNamespace(led=lambda _, index: None if index else self.led),  # type: ignore[arg-type, return-value]
            groups=lambda: SimpleNamespace(loaded_shards=lambda: [shard]),  # type: ignore[arg-type, return-value]
            peers=lambda: world,
        )

    def _offsets(self, _: str) -> list[Any]:
        return [("t", index, SimpleNamespace(offset=offset)) for index, offset in self.committed.items()]

    async def raw(self, node: int, frame: bytes, **_: Any) -> memoryview:
        assert node == 2
        if self.is_remote_silent:
            raise TimeoutError
        assert parse_drops_request(memoryview(frame), HEADER_BYTES) == ["t"]
        rows = [PartitionDrops("t", 1, self.remote, ())] if self.remote >= 0 else []
        return memoryview(CORRELATION + encode_drops(rows))

    async def lost(self) -> int:
        await self.drops.sample({"t"})
        return self.drops.dropped["g", "t"]


async def test_only_what_was_not_committed_is_lost_and_counted_once() -> None:
    world = World()
    world.committed = {0: 10, 1: 5}
    assert await world.lost() == 0
    world.led.dropped_before, world.remote = 30, 5
    assert await world.lost() == 20
    assert await world.lost() == 20
    world.led.dropped_before, world.remote, world.committed = 40, 9, {0: 35, 1: 9}
    assert await world.lost() == 25


async def test_a_new_leader_that_has_dropped_nothing_changes_nothing() -> None:
    world = World()
    await world.lost()
    world.led.dropped_before = 30
    assert await world.lost() == 30
    world.led.dropped_before = -1
    assert await world.lost() == 30
    world.led.dropped_before = 50
    assert await world.lost() == 50


async def test_a_silent_leader_is_counted_when_it_answers() -> None:
    world = World()
    await world.lost()
    world.is_remote_silent, world.remote = True, 7
    assert await world.lost() == 0
    world.is_remote_silent = False
    assert await world.lost() == 7


async def test_what_was_dropped_before_this_process_is_not_counted_again() -> None:
    world = World()
    world.remote = 100
    assert await world.lost() == 0
    world.remote = 104
    assert await world.lost() == 4
