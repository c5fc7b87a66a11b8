"""The plain consumer, for the user's own loop: poll, ack, nack, commit and seek, under the same contracts as handlers.

`AsyncConsumer` has the same calls for coroutines. It runs all of them in one thread, because a consumer belongs to one
thread.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final, ParamSpec, Protocol, Self, TypeVar

from penstock.client.app.contracts import commit_before_handling, report_unfinished
from penstock.client.app.failures import FailurePolicy, FailurePublisher, Reject, Retry
from penstock.client.app.figures import Figures
from penstock.client.app.librdkafka import ApplicationError, consumer_settings
from penstock.client.app.membership import CommitRefused, Membership
from penstock.client.app.message import Message, RecordId, TopicPartition, raw_of, record_id_of
from penstock.client.app.resources import Resources, now_ms
from penstock.client.app.retry_topics import DueRetries
from penstock.client.app.subscription import Delivery, Subscription
from penstock.client.app.wait_reporter import CallWaitReporter
from penstock.client.deadletters.headers import retry_level
from penstock.client.errors import ClientError
from penstock.client.retry import Duration, DurationError, duration_s

__all__ = (
    "AsyncConsumer",
    "GroupPlainConsumer",
    "PlainConsumer",
    "UnacknowledgedMessages",
    "duration_argument_s",
)


class UnacknowledgedMessages:
    """Messages that the user has not acknowledged, or that wait for redelivery. Commits stop before the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[RecordId, Any] = {}
        self._earlier: dict[RecordId, int] = {}
        self._delayed: list[tuple[float, int, Any]] = []
        self._numbers = count()
        #: How many went to another member unacknowledged since the last `done_all`.
        self._gone = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, raws: Iterable[Any]) -> None:
        with self._lock:
            for raw in raws:
                self._open[record_id_of(raw)] = raw

    def has(self, raw: Any) -> bool:
        """Whether `raw` is unacknowledged. False after its partition was revoked.

        The same message, read again, is another object and does not count.
        """
        with self._lock:
            return self._open.get(record_id_of(raw)) is raw

    def done(self, raw: Any) -> None:
        with self._lock:
            self._open.pop(record_id_of(raw), None)
            self._earlier.pop(record_id_of(raw), None)

    def done_all(self) -> int:
        """Marks all messages that the user has as done. Returns how many had gone to another member before."""
        with self._lock:
            delayed = {record_id_of(raw) for _, _, raw in self._delayed}
            self._open = {key: raw for key, raw in self._open.items() if key in delayed}
            gone, self._gone = self._gone, 0
            return gone

    def delay(self, raw: Any, until_s: float, *, counts: bool = True) -> None:
        """Holds `raw` back until its redelivery. With `counts`, that is another attempt."""
        with self._lock:
            if counts:
                self._earlier[record_id_of(raw)] = self._earlier.get(record_id_of(raw), 0) + 1
            heapq.heappush(self._delayed, (until_s, next(self._numbers), raw))

    def earlier(self, raw: Any) -> int:
        """How often the message was handed out before and came back."""
        return self._earlier.get(record_id_of(raw), 0)

    def take_due(self, now_s: float, count_max: int) -> list[Any]:
        """Removes and returns messages whose delay is over."""
        found: list[Any] = []
        with self._lock:
            while self._delayed and self._delayed[0][0] <= now_s and len(found) < count_max:
                found.append(heapq.heappop(self._delayed)[2])
        return found

    def wait_s(self, now_s: float, most_s: float) -> float:
        """The time until the next delay is over, at most `most_s`."""
        with self._lock:
            return min(most_s, max(self._delayed[0][0] - now_s, 0.0)) if self._delayed else most_s

    def unacknowledged(self) -> list[Any]:
        with self._lock:
            return list(self._open.values())

    def forget(self, topic_partitions: Sequence[TopicPartition]) -> int:
        """Drops the messages of these partitions and returns how many there were."""
        with self._lock:
            before = len(self._open)
            self._open = {key: raw for key, raw in self._open.items() if key[:2] not in topic_partitions}
            self._earlier = {key: times for key, times in self._earlier.items() if key in self._open}
            self._delayed = [each for each in self._delayed if record_id_of(each[2]) in self._open]
            heapq.heapify(self._delayed)
            return before - len(self._open)

    def lose(self, topic_partitions: Sequence[TopicPartition]) -> int:
        """Drops messages that went to another member. Returns how many; `done_all` reports them too."""
        lost = self.forget(topic_partitions)
        with self._lock:
            self._gone += lost
        return lost


_LOG: Final = logging.getLogger("penstock.client")
_TAKE_S: Final = 0.5
_ASSIGNED_S: Final = 30.0


class PlainConsumer(Protocol):
    """The consumer that `Penstock.consumer` returns, for consumer groups and share groups. Use it from one thread.

    Use it in a `with` block, or call `close` at the end.
    """

    figures: Figures

    def poll(self, max: int = 100, timeout: Duration = "1s") -> list[Message]:
        """Returns up to `max` messages as soon as there are any, or an empty list after `timeout`."""

    def ack(self, message: Message) -> None:
        """Acknowledges a message: it is done."""

    def nack(self, message: Message, delay: Duration | None = None, reason: str = "") -> None:
        """Returns a message to be delivered again, after `delay` if given."""

    def reject(self, message: Message, reason: str = "") -> None:
        """Sends a message to the dead-letter topic without a retry."""

    def commit(self) -> None:
        """Acknowledges all messages that `poll` returned, and waits until the commit succeeds. Raises ClientError."""

    def seek(
        self, topic: str, partition: int, *, offset: int | None = None, timestamp: datetime | None = None
    ) -> None:
        """Continues to read at `offset`, or at the first message that is not older than `timestamp`."""

    def unpoll(self, messages: Sequence[Message]) -> None:
        """Returns messages that the user has not seen: the next poll hands them out."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class _RedeliveredMessage(Message):
    """A message that was handed out before and came back: `attempt` counts that too."""

    __slots__ = ("_earlier",)

    def __init__(self, raw: Any, earlier: int) -> None:
        super().__init__(raw)
        self._earlier = earlier

    @property
    def attempt(self) -> int:
        return super().attempt + self._earlier


class ClosableConsumer:
    """What both plain consumers do: they close once, and refuse calls after that."""

    _is_closed = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise ApplicationError("the consumer is closed")

    def close(self) -> None:
        """Leaves the group. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._leave()

    def _leave(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GroupPlainConsumer(ClosableConsumer):
    """The plain consumer in a consumer group. It never commits past an unacknowledged message.

    With at-most-once, the messages that `poll` returns are committed already, and acknowledging them changes nothing.
    """

    def __init__(self, declared: Subscription, resources: Resources) -> None:
        self._sub = declared
        self.figures = Figures()
        self._unacknowledged = UnacknowledgedMessages()
        self._publish_error: ClientError | None = None
        self._committed_s = time.monotonic()
        self._commits_first = declared.delivery is Delivery.AT_MOST_ONCE
        #: At-most-once: the messages of the last poll. They count as handled at the next poll, commit or close.
        self._open: Sequence[Any] = ()
        self._wait = CallWaitReporter(declared, resources)
        try:
            self._join(resources)
        except BaseException:
            self._wait.end()
            raise

    def _join(self, resources: Resources) -> None:
        declared = self._sub
        partitions = resources.ensure_failure_topics(declared)
        topics = [name for name in partitions if retry_level(name) is not None]
        self._retries = DueRetries(topics, declared.group, self.figures, now_ms)
        self._failure_publisher = _failure_publisher(declared, resources, partitions, self.figures)
        self._settings = consumer_settings(
            resources.bootstrap, resources.name, resources.settings, group=declared.group
        )
        self._membership = Membership(
            self._settings,
            [*declared.topics, *topics],
            start=declared.start,
            work=_ConsumerRebalanceListener(self),
            contract=declared.delivery,
            unfinished=partial(report_unfinished, self.figures),
        )
        # From here on the consumer waits only while the user polls.
        self._wait.note_running()

    # -- messages ------------------------------------------------------------------------------------

    def poll(self, max: int = 100, timeout: Duration = "1s") -> list[Message]:
        """Raises ClientError; after that, the next poll continues from the committed offsets."""
        self._check_open()
        if max < 1:
            raise ApplicationError(f"max={max!r} must be at least 1")
        if len(self._unacknowledged) >= self._sub.in_flight_max:
            raise ClientError(
                f"{len(self._unacknowledged)} messages are not acknowledged: ack, nack or commit them"
            )
        deadline_s = time.monotonic() + duration_argument_s("timeout", timeout)
        self._open = ()
        while True:
            self._note_stage()
            self._tick()
            left_s = deadline_s - time.monotonic()
            found = self._unacknowledged.take_due(time.monotonic(), max) or self._take_or_start_over(
                max, left_s
            )
            if found or left_s <= 0:
                return [self._message(raw) for raw in found]

    def note_assigned(self) -> None:
        """Called by the assignment itself, because the user may be busy for long with the first messages."""
        self._wait.note_running()

    def _note_stage(self) -> None:
        if self._membership.is_assigned:
            self.note_assigned()
        else:
            self._wait.note_joining(self._settings, self._membership.member_id)

    def _take_or_start_over(self, count_max: int, left_s: float) -> Sequence[Any]:
        try:
            with self._wait.blocking():
                return self._taken(count_max, left_s)
        except ClientError:
            self._start_over()
            raise

    def _taken(self, count_max: int, left_s: float) -> Sequence[Any]:
        membership = self._membership
        self._retries.resume(membership)
        wait_s = self._retries.wait_s(min(_TAKE_S, max(left_s, 0.0)))
        wait_s = self._unacknowledged.wait_s(time.monotonic(), wait_s)
        with membership.held():
            taken = membership.take(count_max, wait_s)
            ready = self._retries.ready(taken, membership) if taken else taken
            membership.put_back(ready[count_max:])
            ready = ready[:count_max]
            if not self._commits_first:
                self._unacknowledged.add(ready)
            elif ready:
                self._failure_publisher.settle()
                if not commit_before_handling(membership, self.figures, len(ready), ready):
                    return []
                self._open = ready
        return ready

    def _message(self, raw: Any) -> Message:
        earlier = self._unacknowledged.earlier(raw)
        return _RedeliveredMessage(raw, earlier) if earlier else Message(raw)

    def _start_over(self) -> None:
        """Joins as a new member and starts from the committed offsets, so that no partial state remains."""
        self.figures.restarts += 1
        with self._membership.held():
            self.left(sorted(self._membership.topic_partitions))
            self._membership.rejoin()
            self._publish_error = None

    def unpoll(self, messages: Sequence[Message]) -> None:
        raws = [raw_of(message) for message in messages]
        if self._commits_first:
            self.figures.dropped += len(raws)
            return
        now_s = time.monotonic()
        for raw in raws:
            if self._unacknowledged.has(raw):
                self._unacknowledged.delay(raw, now_s, counts=False)

    # -- acknowledgements -------------------------------------------------------------------------------------

    def ack(self, message: Message) -> None:
        """Marks the message as done; later calls commit it within `commit_every`."""
        raw = raw_of(message)
        if self._is_here(raw):
            self._unacknowledged.done(raw)
            self.figures.handled += 1
        self._tick()

    def nack(self, message: Message, delay: Duration | None = None, reason: str = "") -> None:
        """With `retry`, publishes the message to a retry topic; without, this consumer gets it again after `delay`."""
        if self._commits_first:
            raise ApplicationError("at-most-once retries nothing: do not call nack")
        delay_s = None if delay is None else duration_argument_s("delay", delay)
        raw = raw_of(message)
        if not self._is_here(raw):
            return
        if self._sub.retry is not None:
            self._failure_publisher.failed(raw, Retry(reason, delay=delay_s))
            self._unacknowledged.done(raw)
        else:
            self.figures.retried += 1
            self._unacknowledged.delay(raw, time.monotonic() + (delay_s or 0.0))
        self._tick()

    def reject(self, message: Message, reason: str = "") -> None:
        """Publishes the message to the dead-letter topic. Needs `dead_letters=True` or `retry`."""
        if not self._sub.dead_letters:
            raise ApplicationError("there is no dead-letter topic: pass dead_letters=True")
        raw = raw_of(message)
        if self._commits_first or self._is_here(raw):
            self._failure_publisher.failed(raw, Reject(reason))
            self._unacknowledged.done(raw)
        self._tick()

    def _is_here(self, raw: Any) -> bool:
        if self._commits_first or self._unacknowledged.has(raw):
            return True
        self.figures.late += 1
        return False

    def commit(self) -> None:
        """Acknowledges and commits all messages that the user has, except nacked ones that wait for their delay.

        Raises CommitRefused, CommitLost, NotPublished.
        """
        self._check_open()
        with self._membership.held():
            self._open = ()
            gone = self._unacknowledged.done_all()
            try:
                with self._wait.blocking():
                    self._commit(wait=True)
            finally:
                self._raise_publish_error()
        if gone:
            self.figures.late += gone
            raise CommitRefused(f"{gone} messages had gone to another member before, which handles them too")

    def seek(
        self, topic: str, partition: int, *, offset: int | None = None, timestamp: datetime | None = None
    ) -> None:
        """Ignores later acknowledgements of messages of that partition. Raises ClientError."""
        self._check_open()
        if (offset is None) is (timestamp is None):
            raise ApplicationError("seek takes either offset= or timestamp=")
        topic_partition = topic, partition
        self._await_assigned(topic_partition)
        membership = self._membership
        if timestamp is not None:
            offset = membership.offset_at(topic_partition, round(timestamp.timestamp() * 1000))
        assert offset is not None
        low, high = membership.bounds(topic_partition)
        if not low <= offset <= high:
            raise ApplicationError(f"{topic}[{partition}] has offsets from {low} to {high}, not {offset}")
        with membership.held():
            reached = membership.positions().get(topic_partition, low)
            if self._commits_first and offset < reached:
                raise ApplicationError(
                    f"at-most-once cannot seek back, and {topic}[{partition}] is at {reached}"
                )
            self._unacknowledged.forget([topic_partition])
            membership.seek(topic_partition, offset)

    def _await_assigned(self, topic_partition: TopicPartition) -> None:
        """Polls until the member has partitions, because it gets them only in a poll. Raises ApplicationError."""
        membership, deadline_s = self._membership, time.monotonic() + _ASSIGNED_S
        while not membership.topic_partitions and time.monotonic() < deadline_s:
            with membership.held():
                membership.put_back(membership.take(1, 0.1))
        if topic_partition not in membership.topic_partitions:
            raise ApplicationError(
                f"{topic_partition[0]}[{topic_partition[1]}] does not belong to this member"
            )

    # -- positions -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Commits if `commit_every` has passed.

        Raises ClientError if a failure record was not published: its message must not be committed.
        """
        now_s = time.monotonic()
        if not self._commits_first and now_s - self._committed_s >= self._sub.commit_every_s:
            self._committed_s = now_s
            with self._membership.held():
                self._commit_if_possible(wait=False)
        self._raise_publish_error()

    def _raise_publish_error(self) -> None:
        if self._publish_error is not None:
            publish_error = self._publish_error
            self._start_over()
            raise publish_error

    def _commit(self, *, wait: bool) -> None:
        if self._publish_error is not None:
            raise self._publish_error
        if self._commits_first:
            self._failure_publisher.settle()
            if wait:
                reached = self._membership.positions()
                done = self._membership.positions(self._open)
                self._membership.commit(reached, wait=True, done=done)
            return
        positions = self._membership.positions(self._unacknowledged.unacknowledged())
        try:
            self._failure_publisher.settle()
        except ClientError as error:
            self._publish_error = error
            raise
        self._membership.commit(positions, wait=wait)

    def _commit_if_possible(self, *, wait: bool) -> None:
        try:
            self._commit(wait=wait)
        except ClientError as error:
            _LOG.warning("%s; messages acknowledged since the last commit may be redelivered", error)

    def leaving(self, topic_partitions: Sequence[TopicPartition]) -> None:
        """Commits before these partitions go to another member."""
        self._commit_if_possible(wait=True)
        self.left(topic_partitions)

    def left(self, topic_partitions: Sequence[TopicPartition]) -> None:
        """Drops the messages of partitions that belong to another member now."""
        self._retries.forget(topic_partitions)
        lost = self._unacknowledged.lose(topic_partitions)
        if lost and not self._is_closed:
            self.figures.lost_in_hand += lost
            _LOG.warning(
                "%d messages were not acknowledged when their partition went to another member", lost
            )

    # -- the end -------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Commits acknowledged messages first; other messages are redelivered to any member."""
        self._open = ()
        self._wait.end()
        with self._membership.held():
            self._commit_if_possible(wait=True)
        self._membership.close()


class _ConsumerRebalanceListener:
    """Passes rebalances on to the consumer."""

    def __init__(self, consumer: GroupPlainConsumer) -> None:
        self._plain_consumer = consumer

    def assigned(self, topic_partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        self._plain_consumer.note_assigned()
        return {}

    def reading_from(self, positions: Mapping[TopicPartition, int]) -> None:
        pass

    def revoked(self, topic_partitions: Sequence[TopicPartition]) -> None:
        self._plain_consumer.leaving(topic_partitions)

    def lost(self, topic_partitions: Sequence[TopicPartition]) -> None:
        self._plain_consumer.left(topic_partitions)


def _failure_publisher(
    declared: Subscription, resources: Resources, partitions: Mapping[str, int], figures: Figures
) -> FailurePublisher:
    failing = FailurePolicy(
        group=declared.group,
        handler=declared.name,
        backoff=declared.retry,
        partitions=partitions,
        now_ms=now_ms,
        chance=Random(),
    )
    return FailurePublisher(
        failing, resources.publish_failure, figures, waits=False, await_published=resources.await_published
    )


def duration_argument_s(name: str, value: Duration) -> float:
    """Raises ApplicationError."""
    try:
        return duration_s(value)
    except DurationError as flaw:
        raise ApplicationError(f"{name}: {flaw}") from None


P = ParamSpec("P")
T = TypeVar("T")


class AsyncConsumer:
    """The consumer that `Penstock.aconsumer` returns: the calls of `PlainConsumer` as coroutines.

    Use it in `async with`, which joins the group. If a `poll` is cancelled, the next one returns its messages.
    """

    def __init__(self, make: Callable[[], PlainConsumer]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-consumer")
        self._consumer: PlainConsumer | None = None

    @property
    def figures(self) -> Figures:
        return self._opened().figures

    async def poll(self, max: int = 100, timeout: Duration = "1s") -> list[Message]:  # noqa: ASYNC109
        future = self._thread.submit(self._opened().poll, max, timeout)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back)
            raise

    def _give_back(self, future: Future[list[Message]]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._opened().unpoll(future.result())

    async def ack(self, message: Message) -> None:
        await self._call(self._opened().ack, message)

    async def nack(self, message: Message, delay: Duration | None = None, reason: str = "") -> None:
        await self._call(self._opened().nack, message, delay, reason)

    async def reject(self, message: Message, reason: str = "") -> None:
        await self._call(self._opened().reject, message, reason)

    async def commit(self) -> None:
        await self._call(self._opened().commit)

    async def seek(
        self, topic: str, partition: int, *, offset: int | None = None, timestamp: datetime | None = None
    ) -> None:
        await self._call(self._opened().seek, topic, partition, offset=offset, timestamp=timestamp)

    async def close(self) -> None:
        if self._consumer is not None:
            await self._call(self._consumer.close)
        self._thread.shutdown(wait=False)

    async def _call(self, function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Finishes the call even if the awaiting task is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(function, *args, **named)))

    def _opened(self) -> PlainConsumer:
        if self._consumer is None:
            raise ApplicationError("use the consumer in `async with`, which joins the group")
        return self._consumer

    async def __aenter__(self) -> Self:
        future = self._thread.submit(self._make)
        try:
            self._consumer = await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(_close_unused)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _close_unused(future: Future[PlainConsumer]) -> None:
    """Closes a consumer whose `async with` was cancelled before it opened."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()
