"""Rebalances during a poll, at moments that no real group can be brought to: the library is scripted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from penstock.client.app import membership as membership_module
from penstock.client.app.membership import Membership
from penstock.client.errors import ClientError


class Script:
    """In place of the library's consumer: each call of `poll` and `consume` does the next step."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.steps: list[Callable[[], Any]] = []
        self.position_of: dict[tuple[str, int], int] = {}
        self.committed_to: dict[tuple[str, int], int] = {}
        self.cannot_seek = False

    def subscribe(self, topics: list[str], **callbacks: Callable[..., None]) -> None:
        self.callbacks = callbacks

    def poll(self, timeout_s: float) -> Any:
        return self.steps.pop(0)() if self.steps else None

    def consume(self, count: int, timeout_s: float) -> list[Any]:
        return self.steps.pop(0)() if self.steps else []

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, 0) for each in partitions]

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        return [
            TopicPartition(
                each.topic, each.partition, self.position_of.get((each.topic, each.partition), -1001)
            )
            for each in partitions
        ]

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition]:
        self.committed_to |= {(each.topic, each.partition): each.offset for each in offsets}
        return offsets

    def seek(self, to: TopicPartition) -> None:
        if self.cannot_seek:
            raise KafkaException(KafkaError(KafkaError._STATE))
        self.position_of[to.topic, to.partition] = -1001

    def incremental_assign(self, partitions: list[TopicPartition]) -> None: ...

    def resume(self, partitions: list[TopicPartition]) -> None: ...

    def close(self) -> None: ...


class Committing:
    """What is handled is committed when partitions go, as at-least-once does."""

    def __init__(self) -> None:
        self.membership: Membership | None = None

    def assigned(self, topic_partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        return {}

    def reading_from(self, positions: Mapping[TopicPartition, int]) -> None: ...

    def revoked(self, topic_partitions: Sequence[TopicPartition]) -> None:
        assert self.membership is not None
        self.membership.commit(self.membership.positions(), wait=True)

    def lost(self, topic_partitions: Sequence[TopicPartition]) -> None: ...


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script({})
    monkeypatch.setattr(membership_module, "Consumer", lambda settings: made)
    return made


@pytest.fixture
def membership(script: Script) -> Membership:
    work = Committing()
    settings = {"partition.assignment.strategy": "cooperative-sticky"}
    work.membership = Membership(settings, ["orders"], start="earliest", work=work)
    script.callbacks["on_assign"](script, [TopicPartition("orders", 0), TopicPartition("orders", 1)])
    return work.membership


def message(partition: int, offset: int) -> Message:
    return Message(topic="orders", partition=partition, offset=offset, value=b"")


def test_a_message_that_was_handed_out_before_a_rebalance_is_not_taken_for_handled(
    script: Script, membership: Membership
) -> None:
    def first() -> Message:
        script.position_of["orders", 0] = 1
        return message(0, 0)

    def rebalance() -> list[Message]:
        script.callbacks["on_revoke"](script, [TopicPartition("orders", 0)])
        return []

    script.steps = [list, first, rebalance]
    assert membership.take(10, 1.0) == []
    assert script.committed_to.get(("orders", 0), 0) == 0
    membership.close()


def test_messages_of_a_partition_that_is_gone_are_not_handled(script: Script, membership: Membership) -> None:
    def handed_out_with_a_rebalance_between() -> list[Message]:
        found = [message(0, 0), message(1, 0)]
        script.callbacks["on_revoke"](script, [TopicPartition("orders", 0)])
        return found

    script.steps = [handed_out_with_a_rebalance_between]
    assert [each.partition() for each in membership.take(10, 1.0)] == [1]
    membership.close()


def test_going_back_keeps_what_was_put_back_of_before(script: Script, membership: Membership) -> None:
    """A retry that is not due is left for later, while another thread puts back one before it that is."""
    script.position_of["orders", 0] = 6
    membership.put_back([message(0, 3), message(1, 8), message(0, 5)])
    membership.rewind({("orders", 0): 4})
    assert membership.positions()["orders", 0] == 3
    assert [(each.partition(), each.offset()) for each in membership.take(10, 1.0)] == [(0, 3), (1, 8)]
    assert membership.positions()["orders", 0] == 4
    membership.close()


def test_nothing_is_committed_of_a_partition_to_which_one_could_not_go_back(
    script: Script, membership: Membership
) -> None:
    script.position_of |= {("orders", 0): 6, ("orders", 1): 9}
    script.cannot_seek = True
    with pytest.raises(ClientError):
        membership.rewind({("orders", 0): 4})
    assert membership.positions() == {("orders", 1): 9}
    membership.close()


def test_what_a_rebalance_puts_back_is_taken_first(script: Script, membership: Membership) -> None:
    """Lanes give back what they have not begun, of all partitions, and more is on its way from the library."""

    def rebalance() -> list[Message]:
        membership.put_back([message(1, 4), message(1, 5)])
        return []

    script.steps = [rebalance]
    assert [each.offset() for each in membership.take(10, 1.0)] == [4, 5]

    def first() -> Message:
        membership.put_back([message(1, 6)])
        return message(1, 8)

    def second() -> list[Message]:
        membership.put_back([message(1, 5)])
        return [message(1, 9)]

    script.steps = [list, first, second]
    assert [each.offset() for each in membership.take(10, 1.0)] == [5, 6, 8, 9]

    def with_more() -> list[Message]:
        membership.put_back([message(1, 7)])
        return [message(1, 10)]

    script.steps = [with_more]
    assert [each.offset() for each in membership.take(10, 1.0)] == [7, 10]
    membership.close()


def test_messages_of_a_revoked_partition_no_longer_count_as_taken(
    script: Script, membership: Membership
) -> None:
    script.steps = [lambda: [message(0, 0), message(1, 0)]]
    assert len(membership.take(10, 1.0)) == 2
    script.callbacks["on_revoke"](script, [TopicPartition("orders", 0)])
    assert [each.partition() for each in membership.taken] == [1]
    membership.close()


def test_what_the_last_poll_before_a_rejoin_returns_is_not_handed_out(
    script: Script, membership: Membership
) -> None:
    script.steps = [lambda: message(0, 0)]
    membership.rejoin()
    assert script.steps == [], "the last poll"
    assert membership.take(10, 0.0) == []
    membership.close()
