"""The order of keys is kept through retries, failures and crashes, in a model with lists as retry topics."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.client.app.raw_message import RawMessage

from penstock.client.app.failures import FailureRecord
from penstock.client.app.retry_topics import KeyOrder, in_key_order
from penstock.client.deadletters.headers import (
    Failure,
    Origin,
    failure_headers,
    read_origin,
    retry_level,
    retry_topic,
)

TOPIC, ATTEMPTS = "orders", 4


class Raw(RawMessage):
    def __init__(self, topic: str, offset: int, number: int, headers: Sequence[Any] = ()) -> None:
        super().__init__(offset, topic=topic, key=b"k", headers=headers)
        self.number = number
        self.told = self.headers()

    @property
    def origin(self) -> Origin:
        return read_origin(self.told, topic=self.topic(), partition=0, offset=self.offset(), timestamp_ms=0)


class World:
    """One partition, one key. `fails[n]` is how often message n fails; a crash forgets what was not committed."""

    def __init__(self, fails: list[int]) -> None:
        self._fails = list(fails)
        self.topics: dict[str, list[Raw]] = {TOPIC: [Raw(TOPIC, n, n) for n in range(len(fails))]}
        for level in range(1, ATTEMPTS):
            self.topics[retry_topic(TOPIC, level)] = []
        self.at = dict.fromkeys(self.topics, 0)
        self.committed = dict(self.at)
        self.done: list[int] = []
        self.begin()

    def begin(self) -> None:
        """As another member, which knows what is waiting from the retry topics."""
        self.at = dict(self.committed)
        self._order = KeyOrder()
        for topic, at in self.at.items():
            for raw in self.topics[topic][at:] if retry_level(topic) else ():
                self._order.found(raw)
        self._handle = in_key_order(self._call, self._order, self._follow)

    def step(self, topic: str) -> None:
        raw = self.topics[topic][self.at[topic]]
        self.at[topic] += 1
        try:
            self._handle(raw)
        except ValueError:
            self._order.moved(raw, self._failed(raw))

    def ready(self) -> list[str]:
        return [topic for topic, at in self.at.items() if at < len(self.topics[topic])]

    def _call(self, raw: Raw) -> None:
        if self._fails[raw.number]:
            self._fails[raw.number] -= 1
            raise ValueError
        self.done.append(raw.number)

    def _failed(self, raw: Raw) -> FailureRecord:
        attempts = raw.origin.attempts + 1
        is_dead = attempts >= ATTEMPTS
        return self._send(raw, None if is_dead else attempts, attempts)

    def _follow(self, raw: Raw, level: int) -> FailureRecord:
        return self._send(raw, level, raw.origin.attempts)

    def _send(self, raw: Raw, level: int | None, attempts: int) -> FailureRecord:
        told = failure_headers(
            raw.told, raw.origin, Failure(error_class="", message=""), group="g", attempts=attempts
        )
        topic = retry_topic(TOPIC, level) if level else "dead"
        if level:
            self.topics[topic].append(Raw(topic, len(self.topics[topic]), raw.number, told))
        else:
            self.done.append(raw.number)  # those behind it go on
        return FailureRecord(topic, 0, b"k", b"", told, 0, level is None)


@given(st.data())
def test_messages_of_a_key_are_done_in_their_order_whatever_fails_and_crashes(data: st.DataObject) -> None:
    world = World(data.draw(st.lists(st.integers(0, ATTEMPTS), min_size=2, max_size=7)))
    for _ in range(400):
        ready = world.ready()
        if not ready:
            break
        world.step(data.draw(st.sampled_from(ready)))
        happens = data.draw(st.sampled_from(("nothing", "nothing", "commit", "crash")))
        if happens == "commit":
            world.committed = dict(world.at)
        elif happens == "crash":
            world.begin()
    firsts = list(dict.fromkeys(world.done))
    assert firsts == sorted(firsts)


def test_a_follower_that_fails_is_not_overtaken_by_those_behind_it() -> None:
    world = World([1, 1, 0])
    for _ in range(3):
        world.step(TOPIC)
    first = retry_topic(TOPIC, 1)
    while world.ready():
        world.step(first if first in world.ready() else world.ready()[0])
    assert world.done == [0, 1, 2]


def test_messages_behind_a_waiting_one_do_not_circulate() -> None:
    """Each failure of the first sends those behind it on once."""
    world = World([3, 1, 1, 0])
    steps = 0
    while world.ready():
        world.step(world.ready()[-1])
        steps += 1
    assert world.done == [0, 1, 2, 3]
    assert steps < 40
