"""A whole consumer group that starts or restarts at once causes a few assignments, not one for each member."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from tests.unit.groups.consumer.world import SESSION_MS, FakeTopics, NewClient, World, is_settled

from penstock.groups.consumer.consumer_group_records import ConsumerGroupRecordType
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.protocol.stored_records import key_type

SIZE = 40
INTERVAL_MS = 1_000
SEEDS = range(2)


class Herd:
    """Consumers in virtual time that beat when they were told to."""

    def __init__(self, seed: int) -> None:
        topics = FakeTopics()
        topics.set("t", SIZE)
        self.random = random.Random(seed)
        self.world = World(GroupCoordinatorConfig(consumer_session_timeout_ms=SESSION_MS), topics)
        self.world.assignment_interval_ms = INTERVAL_MS
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0

    def start(self, *, within_ms: int, static: bool = False) -> None:
        for number in range(SIZE):
            client = NewClient(self.world, f"c{number}", ("t",), f"i{number}" if static else None)
            self._after(self.random.randrange(within_ms), lambda client=client: self._beat(client))

    def stop(self, how: Callable[[NewClient], None]) -> None:
        for client in [client for client in self.world.clients if isinstance(client, NewClient)]:
            how(client)
        self.world.clients.clear()

    def run(self, for_ms: int) -> None:
        end_ms = self.world.now_ms + for_ms
        while self._events and self._events[0][0] <= end_ms:
            at_ms, _, do = heapq.heappop(self._events)
            self.world.advance(at_ms - self.world.now_ms)
            do()
        self.world.advance(end_ms - self.world.now_ms)

    def targets(self) -> int:
        """How many were worked out so far."""
        return sum(
            key_type(key) == ConsumerGroupRecordType.TARGET_ASSIGNMENT_METADATA for key, _ in self.world.log
        )

    def _beat(self, client: NewClient) -> None:
        if not client.is_alive:
            return
        client.beat()
        client.adopt()
        assert client.next_beat_in_ms > 0
        self._after(client.next_beat_in_ms, lambda: self._beat(client))

    def _after(self, delay_ms: int, do: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.world.now_ms + delay_ms, self._order, do))


def running(seed: int, *, static: bool = False) -> Herd:
    herd = Herd(seed)
    herd.start(within_ms=2_000, static=static)
    herd.run(8_000)
    assert is_settled(herd.world)
    return herd


@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_that_starts(seed: int) -> None:
    assert running(seed).targets() <= 4


@pytest.mark.parametrize("seed", SEEDS)
def test_a_group_that_crashes_and_restarts(seed: int) -> None:
    """The old members are missed when their sessions end, one after the other: within the time of a heartbeat."""
    herd = running(seed)
    before = herd.targets()
    herd.stop(NewClient.crash)
    herd.start(within_ms=2_000)
    herd.run(20_000)
    assert is_settled(herd.world)
    assert herd.targets() - before <= 8


@pytest.mark.parametrize("seed", SEEDS)
def test_static_members_restart_without_any_target(seed: int) -> None:
    herd = running(seed, static=True)
    before = herd.targets()
    herd.stop(lambda client: client.leave(away=True))
    herd.start(within_ms=2_000, static=True)
    herd.run(8_000)
    assert is_settled(herd.world)
    assert herd.targets() == before
