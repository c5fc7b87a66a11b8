"""The plain calls, for a loop of one's own: poll, ack, nack, commit, seek, under a contract as handlers have it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from random import Random
from typing import Any, Final, Protocol, Self

from penstock.client.app.committing import CommitRefused
from penstock.client.app.contracts import committed_first, note_unfinished
from penstock.client.app.delivery import Delivery
from penstock.client.app.failing import Failing, Reject, Retry
from penstock.client.app.figures import Figures
from penstock.client.app.in_hand import InHand
from penstock.client.app.letterbox import Letterbox
from penstock.client.app.membership import Membership
from penstock.client.app.message import Message, raw_of
from penstock.client.app.places import Place
from penstock.client.app.resources import Resources, now_ms
from penstock.client.app.retries import DueRetries
from penstock.client.app.settings import ApplicationError, consumer_settings
from penstock.client.app.subscription import Subscription
from penstock.client.app.waits import PlainWait
from penstock.client.durations import Duration, DurationError, seconds
from penstock.client.errors import ClientError
from penstock.client.letters import retry_level

__all__ = ["PlainConsumer", "Polling", "length_s"]

_LOG: Final = logging.getLogger("penstock.client")
_TAKE_S: Final = 0.5
_ASSIGNED_S: Final = 30.0


class PlainConsumer(Protocol):
    """What `Penstock.consumer` gives, for groups of either kind. One thread uses it."""

    figures: Figures

    def poll(self, max: int = 100, timeout: Duration = "1s") -> list[Message]:
        """Up to `max` messages as soon as there are any; none where there are none in that time."""

    def ack(self, message: Message) -> None:
        """It is done."""

    def nack(self, message: Message, delay: Duration | None = None, reason: str = "") -> None:
        """It is to come again."""

    def reject(self, message: Message, reason: str = "") -> None:
        """It need not be tried again: to the dead letters."""

    def commit(self) -> None:
        """All that was handed out is done, and kept when this returns. Raises ClientError where it is not."""

    def seek(
        self, topic: str, partition: int, *, offset: int | None = None, timestamp: datetime | None = None
    ) -> None:
        """Read on from there: an offset, or the first message that is not older than a moment."""

    def unpoll(self, messages: Sequence[Message]) -> None:
        """Nobody has seen them: they are to be handed out by the next poll."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class _Again(Message):
    """Handed out before, and given back."""

    __slots__ = ("_earlier",)

    def __init__(self, raw: Any, earlier: int) -> None:
        super().__init__(raw)
        self._earlier = earlier

    @property
    def attempt(self) -> int:
        return super().attempt + self._earlier


class Polling:
    """In a consumer group. A position that is committed never passes a message without an answer.

    At most once: what `poll` returns is committed, and an answer changes nothing.
    """

    def __init__(self, declared: Subscription, resources: Resources) -> None:
        self._sub = declared
        self.figures = Figures()
        self._hand = InHand()
        self._trouble: ClientError | None = None
        self._committed_s = time.monotonic()
        self._is_closed = False
        self._commits_first = declared.delivery is Delivery.AT_MOST_ONCE
        #: At most once: what the last poll returned. The next poll, commit or close tells that it is handled.
        self._open: Sequence[Any] = ()
        self._wait = PlainWait(declared, resources)
        try:
            self._join(resources)
        except BaseException:
            self._wait.end()
            raise

    def _join(self, resources: Resources) -> None:
        declared = self._sub
        partitions = resources.letter_topics(declared)
        topics = [name for name in partitions if retry_level(name) is not None]
        self._retries = DueRetries(topics, declared.group, self.figures, now_ms)
        self._letterbox = _letterbox(declared, resources, partitions, self.figures)
        self._settings = consumer_settings(
            resources.bootstrap, resources.name, resources.settings, group=declared.group
        )
        self._membership = Membership(
            self._settings,
            [*declared.topics, *topics],
            start=declared.start,
            work=_Callbacks(self),
            contract=declared.delivery,
            unfinished=partial(note_unfinished, self.figures),
        )
        # From here on it waits only while the user asks for messages.
        self._wait.note_running()

    # -- messages ------------------------------------------------------------------------------------

    def poll(self, max: int = 100, timeout: Duration = "1s") -> list[Message]:
        """Raises ClientError; whoever polls again goes on from what is committed."""
        self._check_open()
        if max < 1:
            raise ApplicationError(f"max={max!r} is at least 1")
        if len(self._hand) >= self._sub.in_flight_max:
            raise ClientError(f"{len(self._hand)} messages have no answer: ack, nack or commit them")
        deadline_s = time.monotonic() + length_s("timeout", timeout)
        self._open = ()
        while True:
            self._note_stage()
            self._tick()
            left_s = deadline_s - time.monotonic()
            found = self._hand.rested(time.monotonic(), max) or self._taken_or_begun_anew(max, left_s)
            if found or left_s <= 0:
                return [self._message(raw) for raw in found]

    def note_assigned(self) -> None:
        """At once: the user may be busy for long with the first messages."""
        self._wait.note_running()

    def _note_stage(self) -> None:
        if self._membership.is_assigned:
            self.note_assigned()
        else:
            self._wait.note_joining(self._settings, self._membership.member_id)

    def _taken_or_begun_anew(self, count_max: int, left_s: float) -> Sequence[Any]:
        try:
            return self._taken(count_max, left_s)
        except ClientError:
            self._start_over()
            raise

    def _taken(self, count_max: int, left_s: float) -> Sequence[Any]:
        membership = self._membership
        self._retries.resume(membership)
        wait_s = self._retries.wait_s(min(_TAKE_S, max(left_s, 0.0)))
        wait_s = self._hand.wait_s(time.monotonic(), wait_s)
        with membership.held():
            taken = membership.take(count_max, wait_s)
            ready = self._retries.ready(taken, membership) if taken else taken
            membership.put_back(ready[count_max:])
            ready = ready[:count_max]
            if not self._commits_first:
                self._hand.add(ready)
            elif ready:
                self._letterbox.settle()
                if not committed_first(membership, self.figures, len(ready), ready):
                    return []
                self._open = ready
        return ready

    def _message(self, raw: Any) -> Message:
        earlier = self._hand.earlier(raw)
        return _Again(raw, earlier) if earlier else Message(raw)

    def _start_over(self) -> None:
        """As a new member, from what is committed: what was not kept is not known by half."""
        self.figures.restarts += 1
        with self._membership.held():
            self.left(sorted(self._membership.places))
            self._membership.rejoin()
            self._trouble = None

    def unpoll(self, messages: Sequence[Message]) -> None:
        raws = [raw_of(message) for message in messages]
        if self._commits_first:
            self.figures.dropped += len(raws)
            return
        now_s = time.monotonic()
        for raw in raws:
            if self._hand.has(raw):
                self._hand.rest(raw, now_s, counts=False)

    # -- answers -------------------------------------------------------------------------------------

    def ack(self, message: Message) -> None:
        """Committed within `commit_every`, by the calls that follow."""
        raw = raw_of(message)
        if self._is_here(raw):
            self._hand.done(raw)
            self.figures.handled += 1
        self._tick()

    def nack(self, message: Message, delay: Duration | None = None, reason: str = "") -> None:
        """With `retry` it goes to the retry topics; without, this consumer has it again after the delay."""
        if self._commits_first:
            raise ApplicationError("at-most-once tries nothing again: leave nack out")
        delay_s = None if delay is None else length_s("delay", delay)
        raw = raw_of(message)
        if not self._is_here(raw):
            return
        if self._sub.retry is not None:
            self._letterbox.failed(raw, Retry(reason, delay=delay_s))
            self._hand.done(raw)
        else:
            self.figures.retried += 1
            self._hand.rest(raw, time.monotonic() + (delay_s or 0.0))
        self._tick()

    def reject(self, message: Message, reason: str = "") -> None:
        """Needs `dead_letters=True` or `retry`."""
        if not self._sub.dead_letters:
            raise ApplicationError("there is no dead-letter topic: say dead_letters=True")
        raw = raw_of(message)
        if self._commits_first or self._is_here(raw):
            self._letterbox.failed(raw, Reject(reason))
            self._hand.done(raw)
        self._tick()

    def _is_here(self, raw: Any) -> bool:
        if self._commits_first or self._hand.has(raw):
            return True
        self.figures.late += 1
        return False

    def commit(self) -> None:
        """What was nacked and waits here is not done. Raises CommitRefused, CommitLost, NotPublished."""
        self._check_open()
        with self._membership.held():
            self._open = ()
            gone = self._hand.done_all()
            try:
                self._commit(wait=True)
            finally:
                self._raise_trouble()
        if gone:
            self.figures.late += gone
            raise CommitRefused(f"{gone} messages had gone to another member before, which handles them too")

    def seek(
        self, topic: str, partition: int, *, offset: int | None = None, timestamp: datetime | None = None
    ) -> None:
        """Answers to what was handed out of that partition before count no more. Raises ClientError."""
        self._check_open()
        if (offset is None) is (timestamp is None):
            raise ApplicationError("seek takes either offset= or timestamp=")
        place = topic, partition
        self._await_assigned(place)
        membership = self._membership
        if timestamp is not None:
            offset = membership.offset_at(place, round(timestamp.timestamp() * 1000))
        assert offset is not None
        low, high = membership.bounds(place)
        if not low <= offset <= high:
            raise ApplicationError(f"{topic}[{partition}] has offsets from {low} to {high}, not {offset}")
        with membership.held():
            reached = membership.positions().get(place, low)
            if self._commits_first and offset < reached:
                raise ApplicationError(
                    f"at-most-once does not go back, and {topic}[{partition}] is at {reached}"
                )
            self._hand.forget([place])
            membership.seek(place, offset)

    def _await_assigned(self, place: Place) -> None:
        """A member has partitions only once it has polled."""
        membership, deadline_s = self._membership, time.monotonic() + _ASSIGNED_S
        while not membership.places and time.monotonic() < deadline_s:
            with membership.held():
                membership.put_back(membership.take(1, 0.1))
        if place not in membership.places:
            raise ApplicationError(f"{place[0]}[{place[1]}] does not belong to this member")

    # -- positions -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Raises ClientError where a letter could not be sent: its message must not be committed."""
        now_s = time.monotonic()
        if not self._commits_first and now_s - self._committed_s >= self._sub.commit_every_s:
            self._committed_s = now_s
            with self._membership.held():
                self._commit_if_possible(wait=False)
        self._raise_trouble()

    def _raise_trouble(self) -> None:
        if self._trouble is not None:
            trouble = self._trouble
            self._start_over()
            raise trouble

    def _commit(self, *, wait: bool) -> None:
        if self._trouble is not None:
            raise self._trouble
        if self._commits_first:
            self._letterbox.settle()
            if wait:
                reached = self._membership.positions()
                done = self._membership.positions(self._open)
                self._membership.commit(reached, wait=True, done=done)
            return
        positions = self._membership.positions(self._hand.unanswered())
        try:
            self._letterbox.settle()
        except ClientError as error:
            self._trouble = error
            raise
        self._membership.commit(positions, wait=wait)

    def _commit_if_possible(self, *, wait: bool) -> None:
        try:
            self._commit(wait=wait)
        except ClientError as error:
            _LOG.warning("%s; what was answered since the last commit may come again", error)

    def leaving(self, places: Sequence[Place]) -> None:
        """Partitions that go to somebody else after this."""
        self._commit_if_possible(wait=True)
        self.left(places)

    def left(self, places: Sequence[Place]) -> None:
        """Partitions that are somebody else's now."""
        self._retries.forget(places)
        lost = self._hand.lose(places)
        if lost and not self._is_closed:
            self.figures.lost_in_hand += lost
            _LOG.warning("%d messages had no answer when their partition went to another member", lost)

    # -- the end -------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ApplicationError("the consumer is closed")

    def close(self) -> None:
        """What was acked is committed; what was not comes again, here or elsewhere."""
        if not self._is_closed:
            self._is_closed = True
            self._open = ()
            self._wait.end()
            with self._membership.held():
                self._commit_if_possible(wait=True)
            self._membership.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Callbacks:
    """Of rebalances."""

    def __init__(self, polling: Polling) -> None:
        self._polling = polling

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        self._polling.note_assigned()
        return {}

    def begun(self, positions: Mapping[Place, int]) -> None:
        pass

    def revoked(self, places: Sequence[Place]) -> None:
        self._polling.leaving(places)

    def lost(self, places: Sequence[Place]) -> None:
        self._polling.left(places)


def _letterbox(
    declared: Subscription, resources: Resources, partitions: Mapping[str, int], figures: Figures
) -> Letterbox:
    failing = Failing(
        group=declared.group,
        handler=declared.name,
        backoff=declared.retry,
        partitions=partitions,
        now_ms=now_ms,
        chance=Random(),
    )
    return Letterbox(failing, resources.post, figures, waits=False, await_published=resources.await_published)


def length_s(name: str, value: Duration) -> float:
    """Raises ApplicationError."""
    try:
        return seconds(value)
    except DurationError as flaw:
        raise ApplicationError(f"{name}: {flaw}") from None
