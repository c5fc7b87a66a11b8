"""The plain consumer in a share group: acknowledges each message by itself; brokers redeliver it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Self

from penstock.client.app.figures import Figures
from penstock.client.app.librdkafka import ApplicationError, share_settings
from penstock.client.app.message import Message, raw_of, topic_partition_of
from penstock.client.app.plain_consumer import duration_argument_s
from penstock.client.app.resources import Resources
from penstock.client.app.share_group import (
    ACCEPT,
    REJECT,
    RELEASE,
    FailureReport,
    FailureReporter,
    ShareGroup,
    ShareMember,
    apply_share_group_settings,
    error_report,
    parse_delay_ms,
)
from penstock.client.app.subscription import Delivery, Subscription
from penstock.client.app.wait_reporter import CallWaitReporter
from penstock.client.errors import ClientError
from penstock.client.retry import Duration
from penstock.protocol.share_failures import WorkerError

__all__ = ["SharePlainConsumer", "accept_before_handling", "failure_reporter"]

_SETTLE_TIMEOUT_S: Final = 30.0


class SharePlainConsumer:
    """All that was handed out has an answer before more is.

    At most once: what `poll` returns is nobody else's ever, and an answer changes nothing.
    """

    def __init__(self, declared: Subscription, resources: Resources) -> None:
        self._sub = declared
        self.figures = Figures()
        wait = CallWaitReporter(declared, resources)
        try:
            resources.letter_topics(declared)
            self._group = apply_share_group_settings(declared, resources)
        finally:
            wait.end()
        self._accepts_first = declared.delivery is Delivery.AT_MOST_ONCE
        self._resources = resources
        self._joined: ShareMember | None = None
        #: Taken, and not handed out yet.
        self._waiting: deque[Any] = deque()
        self._taken_s = 0.0
        self._handed_out: dict[int, Any] = {}
        self._sent_s = time.monotonic()
        self._is_closed = False

    def _join(self, taken_max: int) -> None:
        """How many it takes at once is said when a member is made: as many as the first poll wants."""
        resources, sub = self._resources, self._sub
        settings = share_settings(
            resources.bootstrap, resources.name, resources.settings, group=sub.group, taken_max=taken_max
        )
        self._joined = ShareMember(
            settings, sub.topics, self.figures, failure_reporter(sub, self._group, resources)
        )

    @property
    def _member(self) -> ShareMember:
        assert self._joined is not None, "nothing was handed out yet"
        return self._joined

    # -- messages ------------------------------------------------------------------------------------

    def poll(self, max: int = 100, timeout: Duration = "1s") -> list[Message]:
        """Raises ClientError."""
        self._check_open()
        if max < 1:
            raise ApplicationError(f"max={max!r} is at least 1")
        if self._joined is None:
            self._join(max)
        deadline_s = time.monotonic() + duration_argument_s("timeout", timeout)
        self._release_overdue()
        while not self._waiting:
            if self._handed_out:
                raise ClientError(
                    f"{len(self._handed_out)} messages have no answer: ack, nack or commit them, then there is more"
                )
            left_s = deadline_s - time.monotonic()
            self._waiting.extend(self._taken(left_s if left_s > 0 else 0.0))
            if left_s <= 0:
                break
        return self._hand_out(min(max, len(self._waiting)))

    def _taken(self, wait_s: float) -> Sequence[Any]:
        taken = self._member.take(wait_s)
        self._taken_s = time.monotonic()
        if not self._accepts_first:
            return taken
        if self._group.is_at_most_once:
            for raw in taken:
                self._member.answer(raw, ACCEPT)
            return taken
        return accept_before_handling(self._member, taken, self.figures)

    def _hand_out(self, count: int) -> list[Message]:
        raws = [self._waiting.popleft() for _ in range(count)]
        if not self._accepts_first:
            self._handed_out.update((id(raw), raw) for raw in raws)
        return [Message(raw) for raw in raws]

    def _release_overdue(self) -> None:
        """Somebody else may have these by now."""
        if not self._accepts_first and time.monotonic() - self._taken_s > self._group.lock_s:
            for raw in self._waiting:
                self._member.answer(raw, RELEASE)
            self.figures.overdue += len(self._waiting)
            self._waiting.clear()

    def unpoll(self, messages: Sequence[Message]) -> None:
        for message in reversed(messages):
            raw = raw_of(message)
            self._handed_out.pop(id(raw), None)
            self._waiting.appendleft(raw)

    # -- answers -------------------------------------------------------------------------------------

    def ack(self, message: Message) -> None:
        """Sent within `commit_every`, by the calls that follow."""
        if self._answer(message, ACCEPT):
            self.figures.handled += 1

    def nack(self, message: Message, delay: Duration | None = None, reason: str = "") -> None:
        """It comes again after `delay`, or after the group's own, which `retry=` sets.

        The last time it becomes a dead letter, with `reason`.
        """
        if self._accepts_first:
            raise ApplicationError("at-most-once tries nothing again: leave nack out")
        if delay is not None and not self._group.takes_failures:
            raise ApplicationError(
                "these brokers cannot delay one message: leave delay= out, or publish the message again for later and "
                "ack it"
            )
        attempt = message.attempt
        is_last = attempt >= self._group.deliveries_max
        told = _report_of_reason(reason) if is_last else None
        if delay is not None and not is_last:
            told = FailureReport(delay_ms=parse_delay_ms(delay))
        if self._answer(message, RELEASE, told):
            if not is_last:
                self.figures.retried += 1
            else:
                self.figures.dead += 1

    def reject(self, message: Message, reason: str = "") -> None:
        """To the dead letters, by the broker, with the reason."""
        if self._accepts_first:
            raise ApplicationError("at-most-once gives nothing back: leave reject out")
        if self._answer(message, REJECT, _report_of_reason(reason)):
            self.figures.dead += 1

    def _answer(self, message: Message, outcome: int, told: FailureReport | None = None) -> bool:
        """Whether it was still to be answered for."""
        self._check_open()
        raw = raw_of(message)
        if self._accepts_first:
            return True
        if self._handed_out.pop(id(raw), None) is None:
            self.figures.late += 1
            return False
        self._member.answer(raw, outcome, told)
        now_s = time.monotonic()
        if now_s - self._sent_s >= self._sub.commit_every_s:
            self._sent_s = now_s
            self._member.send()
        return True

    def commit(self) -> None:
        """Raises CommitRefused where a lock had run out before, CommitLost where nobody knows."""
        self._check_open()
        for raw in self._handed_out.values():
            self._member.answer(raw, ACCEPT)
            self.figures.handled += 1
        self._handed_out.clear()
        for error in (self._joined.settle(_SETTLE_TIMEOUT_S) if self._joined is not None else {}).values():
            raise error

    def seek(
        self, topic: str, partition: int, *, offset: int | None = None, timestamp: datetime | None = None
    ) -> None:
        raise ApplicationError(
            "members of a share group have no positions: `penstock group reset` moves the group"
        )

    # -- the end -------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ApplicationError("the consumer is closed")

    def close(self) -> None:
        """What was answered is sent; what was not is for other members, at once."""
        if not self._is_closed:
            self._is_closed = True
            if self._joined is not None:
                self._joined.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def failure_reporter(sub: Subscription, group: ShareGroup, resources: Resources) -> FailureReporter | None:
    return FailureReporter(resources.cluster, sub.group) if group.takes_failures else None


def _report_of_reason(reason: str) -> FailureReport | None:
    """The error that is being handled, if there is one; else the reason alone."""
    error = sys.exception()
    if error is None:
        return FailureReport(error=WorkerError("", reason, "")) if reason else None
    told = error_report(error)
    assert told.error is not None
    return told._replace(error=told.error._replace(message=reason)) if reason else told


def accept_before_handling(member: ShareMember, taken: Sequence[Any], figures: Figures) -> list[Any]:
    """At most once by our own means: what the broker is known to hand out to nobody else. The rest is given up."""
    for raw in taken:
        member.answer(raw, ACCEPT)
    try:
        flaws = member.settle(_SETTLE_TIMEOUT_S) if taken else {}
    except ClientError:
        figures.add("dropped", len(taken))
        return []
    kept = [raw for raw in taken if topic_partition_of(raw) not in flaws]
    figures.add("dropped", len(taken) - len(kept))
    return kept
