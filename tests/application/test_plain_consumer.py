"""Plain calls: poll, ack, nack, commit and seek in a loop of the caller."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from tests.application.apps import committed, header, read_all
from tests.waiting import eventually, eventually_async

from penstock.client import (
    ApplicationError,
    Backoff,
    ClientError,
    CommitLost,
    CommitRefused,
    Message,
    NotPublished,
    PayloadError,
    Penstock,
)
from penstock.client.app.failures import FailurePublisher
from penstock.client.app.membership import Membership
from penstock.client.app.plain_consumer import GroupPlainConsumer
from penstock.client.deadletters.headers import dead_letter_topic, retry_topic
from penstock.protocol import dead_letter_headers


@dataclass
class Order:
    id: int


@pytest.fixture
def topic(app: Penstock, unique: Callable[[str], str]) -> str:
    name = unique("orders")
    app.create_topic(name, partitions=1)
    return name


def fill(app: Penstock, topic: str, count: int, first: int = 0) -> None:
    futures = [app.publish_soon(topic, Order(number)) for number in range(first, first + count)]
    for future in futures:
        future.result(30)


def take(consumer: Any, count: int, *, max: int = 100) -> list[Message]:
    """That many, or a failure that shows what came."""
    taken: list[Message] = []

    def all_are_there() -> bool:
        taken.extend(consumer.poll(min(max, count - len(taken)), timeout="200ms"))
        return len(taken) >= count

    eventually(all_are_there, what=f"{count} messages")
    return taken


def numbers(messages: list[Message]) -> list[int]:
    return [message.payload(Order).id for message in messages]


# -- polling ---------------------------------------------------------------------------------------------


def test_a_poll_returns_as_soon_as_there_is_something(app: Penstock, topic: str, group: str) -> None:
    with app.consumer(topic, group=group) as consumer:
        assert consumer.poll(timeout="0s") == []
        later = threading.Timer(0.5, lambda: fill(app, topic, 1))
        later.start()
        # It would wait for a hundred messages, or a minute, if it waited for more than the first.
        found = consumer.poll(100, timeout="60s")
        later.join()
    assert numbers(found) == [0]


def test_messages_are_bytes_until_they_are_decoded(app: Penstock, topic: str, group: str) -> None:
    fill(app, topic, 1)
    app.publish(topic, b"\xff")
    with app.consumer(topic, group=group) as consumer:
        good, bad = take(consumer, 2)
        assert good.value == b'{"id":0}'
        assert (good.payload(Order), good.payload()) == (Order(0), {"id": 0})
        with pytest.raises(PayloadError):
            bad.payload(Order)


def test_no_more_than_asked_for_are_handed_out(app: Penstock, topic: str, group: str) -> None:
    fill(app, topic, 10)
    with app.consumer(topic, group=group) as consumer:
        assert numbers(take(consumer, 3, max=3)) == [0, 1, 2]
        assert numbers(take(consumer, 7)) == [3, 4, 5, 6, 7, 8, 9]


def test_who_never_answers_gets_nothing_more(app: Penstock, topic: str, group: str) -> None:
    fill(app, topic, 10)
    with app.consumer(topic, group=group, in_flight_max=5) as consumer:
        take(consumer, 5, max=5)
        with pytest.raises(ClientError, match="5 messages are not acknowledged"):
            consumer.poll()


# -- answers ---------------------------------------------------------------------------------------------


def test_positions_do_not_pass_a_message_without_an_answer(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    fill(app, topic, 10)
    with app.consumer(topic, group=group, commit_every="0s") as consumer:
        messages = take(consumer, 10)
        for message in messages:
            if message.offset not in (4, 7):
                consumer.ack(message)
        consumer.poll(timeout="100ms")
        eventually(lambda: committed(bootstrap, group, topic) == {0: 4})
        consumer.ack(messages[4])
    assert committed(bootstrap, group, topic) == {0: 7}
    with app.consumer(topic, group=group) as consumer:
        assert numbers(take(consumer, 3)) == [7, 8, 9]


def test_acks_are_committed_when_it_is_closed(app: Penstock, topic: str, group: str, bootstrap: str) -> None:
    fill(app, topic, 5)
    with app.consumer(topic, group=group, commit_every="1h") as consumer:
        for message in take(consumer, 5)[:3]:
            consumer.ack(message)
        assert committed(bootstrap, group, topic) == {0: 0}
    assert committed(bootstrap, group, topic) == {0: 3}


def test_commit_says_that_all_is_done(app: Penstock, topic: str, group: str, bootstrap: str) -> None:
    fill(app, topic, 5)
    with app.consumer(topic, group=group, commit_every="1h") as consumer:
        take(consumer, 5)
        consumer.commit()
        assert committed(bootstrap, group, topic) == {0: 5}


@pytest.mark.parametrize("kind", [CommitLost, CommitRefused])
def test_commit_raises_where_it_was_not_kept(
    app: Penstock, topic: str, group: str, monkeypatch: pytest.MonkeyPatch, kind: type[ClientError]
) -> None:
    fill(app, topic, 1)
    with app.consumer(topic, group=group, commit_every="1h") as consumer:
        take(consumer, 1)

        def refuse(*_: Any, **__: Any) -> None:
            raise kind("not this time")

        with monkeypatch.context() as patched:
            patched.setattr(Membership, "commit", refuse)
            with pytest.raises(kind, match="not this time"):
                consumer.commit()
        consumer.commit()


def test_what_is_nacked_comes_again_after_its_delay_and_its_position_waits(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    fill(app, topic, 4)
    with app.consumer(topic, group=group, commit_every="0s") as consumer:
        first, second, *rest = take(consumer, 4)
        consumer.nack(second, delay="1h")
        consumer.nack(first, delay="300ms", reason="busy")
        for message in rest:
            consumer.ack(message)
        consumer.commit()
        assert committed(bootstrap, group, topic) == {0: 0}
        (again,) = take(consumer, 1)
        assert (numbers([again]), again.attempt, first.attempt) == ([0], 2, 1)
        consumer.ack(again)
        consumer.commit()
        assert committed(bootstrap, group, topic) == {0: 1}


def test_with_retry_a_nack_goes_through_the_retry_topics_to_the_dead_letters(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    fill(app, topic, 3)
    retry = Backoff(base="1h", cap="2h", attempts=2)
    with app.consumer(topic, group=group, retry=retry, commit_every="0s") as consumer:
        first, second, third = take(consumer, 3)
        consumer.nack(first, delay="100ms", reason="busy")
        consumer.reject(second, reason="no such customer")
        consumer.ack(third)
        consumer.commit()
        assert committed(bootstrap, group, topic) == {0: 3}
        (again,) = take(consumer, 1)
        assert (again.topic, again.attempt, numbers([again])) == (retry_topic(topic, 1), 2, [0])
        consumer.nack(again, reason="still busy")
        consumer.commit()
        figures = consumer.figures
        assert (figures.handled, figures.retried, figures.dead) == (1, 1, 2)
    dead = {json.loads(each.value())["id"]: each for each in read_all(bootstrap, dead_letter_topic(topic))}
    assert {header(each, dead_letter_headers.REASON_HEADER) for each in dead.values()} == {
        "rejected",
        "attempts exhausted",
    }
    assert header(dead[0], dead_letter_headers.ERROR_MESSAGE_HEADER) == "still busy"
    assert header(dead[0], dead_letter_headers.DELIVERY_COUNT_HEADER) == "2"
    assert header(dead[1], dead_letter_headers.ERROR_MESSAGE_HEADER) == "no such customer"


def test_a_letter_that_cannot_be_sent_is_no_message_lost(
    app: Penstock, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is told, and gets everything again from what is committed."""
    fill(app, topic, 3)
    retry = Backoff(base="1h", cap="1h", attempts=2)
    with app.consumer(topic, group=group, retry=retry, commit_every="1h") as consumer:
        first, *_ = take(consumer, 3)
        with monkeypatch.context() as patched:
            patched.setattr(FailurePublisher, "settle", _unpublished)
            consumer.nack(first)
            with pytest.raises(NotPublished):
                consumer.commit()
        assert numbers(take(consumer, 3)) == [0, 1, 2]


def _unpublished(_: Any) -> None:
    raise NotPublished("no broker has it")


def test_an_answer_for_a_partition_that_has_gone_counts_for_nothing(
    app: Penstock, bootstrap: str, group: str, unique: Callable[[str], str]
) -> None:
    """A second member takes one of two partitions; what was handed out of it is the second member's."""
    topic = unique("orders")
    app.create_topic(topic, partitions=2)
    for number in range(10):
        app.publish(topic, Order(number), partition=number % 2)
    with app.consumer(topic, group=group, commit_every="0s") as first:
        handed_out = take(first, 10)
        with app.consumer(topic, group=group, commit_every="0s") as second:
            moved: list[Message] = []

            def both_poll() -> bool:
                assert first.poll(timeout="100ms") == []
                moved.extend(second.poll(timeout="100ms"))
                return len(moved) == 5

            eventually(both_poll, what="the second member to get its part")
            (gone,) = {message.partition for message in moved}
            assert numbers(moved) == numbers([each for each in handed_out if each.partition == gone])
            for message in handed_out:
                first.ack(message)
            assert first.figures.late == first.figures.lost_in_hand == 5
            with pytest.raises(CommitRefused, match="5 messages had gone"):
                first.commit()
            first.commit()
            assert committed(bootstrap, group, topic, 2) == {gone: 0, 1 - gone: 5}
            second.commit()
            assert committed(bootstrap, group, topic, 2) == {0: 5, 1: 5}


# -- at most once ----------------------------------------------------------------------------------------


def test_at_most_once_commits_before_it_hands_out(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    fill(app, topic, 10)
    with app.consumer(topic, group=group, delivery="at-most-once") as consumer:
        messages = take(consumer, 4, max=4)
        assert committed(bootstrap, group, topic) == {0: 4}
        consumer.ack(messages[0])
        with pytest.raises(ApplicationError, match="retries nothing"):
            consumer.nack(messages[1])
    with app.consumer(topic, group=group, delivery="at-most-once") as consumer:
        assert numbers(take(consumer, 6)) == [4, 5, 6, 7, 8, 9]


def test_at_most_once_notes_how_far_messages_are_handled(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    """The messages of the last poll may be in hand until the next one, also when their partition is revoked."""

    def noted() -> tuple[int, str]:
        reader = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
        (told,) = reader.committed([TopicPartition(topic, 0)], timeout=60)
        reader.close()
        return told.offset, told.metadata

    fill(app, topic, 6)
    with app.consumer(topic, group=group, delivery="at-most-once") as consumer:
        first, *_ = take(consumer, 3, max=3)
        assert noted() == (3, "penstock at-most-once done=0")
        consumer.ack(first)
        assert isinstance(consumer, GroupPlainConsumer)
        consumer.leaving([(topic, 0)])
        assert noted() == (3, "penstock at-most-once done=0")
        take(consumer, 3, max=3)
        assert noted() == (6, "penstock at-most-once done=3")
        consumer.commit()
        assert noted() == (6, "penstock at-most-once done=6")


def test_at_most_once_drops_what_may_have_been_committed(
    app: Penstock, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit was stored, but its reply was lost: the member drops what it has read and rejoins."""
    fill(app, topic, 3)
    commit = Membership.commit
    fates: list[type[ClientError] | None] = [None, CommitLost]

    def unsure(self: Membership, positions: Any, *, wait: bool, **more: Any) -> None:
        commit(self, positions, wait=wait, **more)
        fate = fates.pop(0) if fates else None
        if fate is not None:
            raise fate("no answer")

    monkeypatch.setattr(Membership, "commit", unsure)
    with app.consumer(topic, group=group, delivery="at-most-once") as consumer:
        assert numbers(take(consumer, 1, max=1)) == [0]
        assert numbers(take(consumer, 1, max=1)) == [2]
        assert (consumer.figures.dropped, consumer.figures.restarts) == (1, 1)


def test_at_most_once_leaves_to_others_what_was_not_committed(
    app: Penstock, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(app, topic, 3)
    commit = Membership.commit
    refusals = [CommitRefused("unknown member")]

    def refused(self: Membership, positions: Any, *, wait: bool, **more: Any) -> None:
        if refusals:
            raise refusals.pop()
        commit(self, positions, wait=wait, **more)

    monkeypatch.setattr(Membership, "commit", refused)
    with app.consumer(topic, group=group, delivery="at-most-once") as consumer:
        assert numbers(take(consumer, 3)) == [0, 1, 2]
        assert (consumer.figures.dropped, consumer.figures.restarts) == (0, 1)


# -- going elsewhere -------------------------------------------------------------------------------------


def test_seek_goes_to_an_offset_and_the_position_follows(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    fill(app, topic, 10)
    with app.consumer(topic, group=group, commit_every="1h") as consumer:
        consumer.seek(topic, 0, offset=6)
        assert numbers(take(consumer, 4)) == [6, 7, 8, 9]
        consumer.commit()
        consumer.seek(topic, 0, offset=2)
        consumer.commit()
        assert committed(bootstrap, group, topic) == {0: 2}
        old, *_ = take(consumer, 8)
        consumer.seek(topic, 0, offset=2)
        consumer.ack(old)
        assert consumer.figures.late == 1
        assert numbers(take(consumer, 8)) == [2, 3, 4, 5, 6, 7, 8, 9]


def test_seek_goes_to_a_moment(app: Penstock, topic: str, group: str) -> None:
    noon = datetime.now(UTC) - timedelta(hours=1)
    for number in range(5):
        app.publish(topic, Order(number), timestamp=noon + timedelta(minutes=number))
    with app.consumer(topic, group=group) as consumer:
        consumer.seek(topic, 0, timestamp=noon + timedelta(minutes=2, seconds=30))
        assert numbers(take(consumer, 2)) == [3, 4]
        consumer.seek(topic, 0, timestamp=noon + timedelta(days=1))
        fill(app, topic, 1, first=5)
        assert numbers(take(consumer, 1)) == [5]


def test_impossible_seeks_are_refused(app: Penstock, topic: str, group: str) -> None:
    fill(app, topic, 3)
    with app.consumer(topic, group=group, delivery="at-most-once") as consumer:
        take(consumer, 3)
        for how, sentence in (
            ({}, "either offset= or timestamp="),
            ({"offset": 4}, "from 0 to 3, not 4"),
            ({"offset": 1}, "cannot seek back"),
        ):
            with pytest.raises(ApplicationError, match=sentence):
                consumer.seek(topic, 0, **how)  # type: ignore[arg-type]
        with pytest.raises(ApplicationError, match="does not belong to this member"):
            consumer.seek(topic, 5, offset=0)
    with pytest.raises(ApplicationError, match="closed"):
        consumer.poll()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"delivery": "exactly-once"}, "use subscribe"),
        ({"delivery": "at-most-once", "retry": Backoff()}, "retries nothing"),
        ({"lock": "30s"}, "share=True"),
        ({"start": "middle"}, "must be earliest or latest"),
    ],
)
def test_a_consumer_that_cannot_work_is_refused(app: Penstock, how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        app.consumer("orders", group="g", **how)


def test_a_missing_topic_is_told(app: Penstock) -> None:
    with pytest.raises(ApplicationError, match="there is no topic missing"):
        app.consumer("missing", group="g")


def test_a_position_that_is_gone_is_an_error_and_not_a_guess(
    app: Penstock, topic: str, group: str, bootstrap: str
) -> None:
    from confluent_kafka import Consumer, TopicPartition

    member = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    member.commit(offsets=[TopicPartition(topic, 0, 1_000)], asynchronous=False)
    member.close()
    with app.consumer(topic, group=group) as consumer, pytest.raises(ApplicationError, match="group reset"):
        eventually(lambda: consumer.poll())


# -- coroutines ------------------------------------------------------------------------------------------


async def test_coroutines_have_the_same_calls(app: Penstock, topic: str, group: str, bootstrap: str) -> None:
    await asyncio.to_thread(fill, app, topic, 5)
    async with app.aconsumer(topic, group=group) as consumer:
        taken: list[Message] = []

        async def all_are_there() -> bool:
            taken.extend(await consumer.poll(timeout="200ms"))
            return len(taken) == 5

        await eventually_async(all_are_there)
        await consumer.nack(taken[0], delay="50ms")
        for message in taken[1:]:
            await consumer.ack(message)
        (again,) = await consumer.poll(timeout="20s")
        assert again.attempt == 2
        await consumer.ack(again)
        await consumer.commit()
        assert committed(bootstrap, group, topic) == {0: 5}
        await consumer.seek(topic, 0, offset=4)
        assert numbers(await consumer.poll(timeout="20s")) == [4]


async def test_what_a_cancelled_poll_had_got_comes_with_the_next(
    app: Penstock, topic: str, group: str
) -> None:
    async with app.aconsumer(topic, group=group) as consumer:
        await consumer.poll(timeout="0s")
        waiting = asyncio.create_task(consumer.poll(timeout="5s"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(fill, app, topic, 2)
        assert numbers(await consumer.poll(timeout="20s"))[:1] == [0]
