"""The plain consumer in a share group: acknowledges each message by itself; brokers redeliver it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from penstock.client.app.figures import Figures
from penstock.client.app.librdkafka import ApplicationError, share_settings
from penstock.client.app.message import Message, raw_of, topic_partition_of
from penstock.client.app.plain_consumer import ClosableConsumer, duration_argument_s
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


class SharePlainConsumer(ClosableConsumer):
    """The plain consumer in a share group. It returns more messages only when all earlier ones are acknowledged.

    With at-most-once, no other member gets the messages that `poll` returns, and acknowledging them changes nothing.
    """

    def __init__(self, declared: Subscription, resources: Resources) -> None:
        self._sub = declared
        self.figures = Figures()
        wait = CallWaitReporter(declared, resources)
        try:
            resources.ensure_failure_topics(declared)
            self._group = apply_share_group_settings(declared, resources)
        finally:
            wait.end()
        self._accepts_first = declared.delivery is Delivery.AT_MOST_ONCE
        self._resources = resources
        self._joined: ShareMember | None = None
        #: Fetched, and not returned by `poll` yet.
        self._waiting: deque[Any] = deque()
        self._taken_s = 0.0
        self._handed_out: dict[int, Any] = {}
        self._sent_s = time.monotonic()

    def _join(self, taken_max: int) -> None:
        """Joins with the `max` of the first poll, because a member's fetch size is fixed when it is created."""
        resources, sub = self._resources, self._sub
        settings = share_settings(
            resources.bootstrap, resources.name, resources.settings, group=sub.group, taken_max=taken_max
        )
        self._joined = ShareMember(
            settings, sub.topics, self.figures, failure_reporter(sub, self._group, resources)
        )

    @property
    def _member(self) -> ShareMember:
        assert self._joined is not None, "poll was not called yet"
        return self._joined

    # -- messages ------------------------------------------------------------------------------------

    def poll(self, max: int = 100, timeout: Duration = "1s") -> list[Message]:
        """Raises ClientError."""
        self._check_open()
        if max < 1:
            raise ApplicationError(f"max={max!r} must be at least 1")
        if self._joined is None:
            self._join(max)
        deadline_s = time.monotonic() + duration_argument_s("timeout", timeout)
        self._release_overdue()
        while not self._waiting:
            if self._handed_out:
                raise ClientError(
                    f"{len(self._handed_out)} messages are not acknowledged: ack, nack or commit them before you poll "
                    "again"
                )
            left_s = deadline_s - time.monotonic()
            self._waiting.extend(self._taken(left_s if left_s > 0 else 0.0))
            if left_s <= 0:
                break
        raws = [self._waiting.popleft() for _ in range(min(max, len(self._waiting)))]
        if not self._accepts_first:
            self._handed_out.update((id(raw), raw) for raw in raws)
        return [Message(raw) for raw in raws]

    def _taken(self, wait_s: float) -> Sequence[Any]:
        taken = self._member.take(wait_s)
        self._taken_s = time.monotonic()
        if not self._accepts_first:
            return taken
        if self._group.is_at_most_once:
            for raw in taken:
                self._member.acknowledge(raw, ACCEPT)
            return taken
        return accept_before_handling(self._member, taken, self.figures)

    def _release_overdue(self) -> None:
        """Releases messages whose lock has expired: another member may have them."""
        if not self._accepts_first and time.monotonic() - self._taken_s > self._group.lock_s:
            for raw in self._waiting:
                self._member.acknowledge(raw, RELEASE)
            self.figures.overdue += len(self._waiting)
            self._waiting.clear()

    def unpoll(self, messages: Sequence[Message]) -> None:
        for message in reversed(messages):
            raw = raw_of(message)
            self._handed_out.pop(id(raw), None)
            self._waiting.appendleft(raw)

    # -- acknowledgements -------------------------------------------------------------------------------------

    def ack(self, message: Message) -> None:
        """Accepts the message; later calls send this within `commit_every`."""
        if self._acknowledge(message, ACCEPT):
            self.figures.handled += 1

    def nack(self, message: Message, delay: Duration | None = None, reason: str = "") -> None:
        """Releases the message: it is redelivered after `delay`, or after the group's delay, which `retry=` sets.

        After the last attempt it becomes a dead letter with `reason`.
        """
        if self._accepts_first:
            raise ApplicationError("at-most-once retries nothing: do not call nack")
        if delay is not None and not self._group.takes_failure_reports:
            raise ApplicationError(
                "these brokers cannot delay one message: remove delay=, or ack the message and publish it again later"
            )
        attempt = message.attempt
        is_last = attempt >= self._group.deliveries_max
        report = _report_of_reason(reason) if is_last else None
        if delay is not None and not is_last:
            report = FailureReport(delay_ms=parse_delay_ms(delay))
        if self._acknowledge(message, RELEASE, report):
            if not is_last:
                self.figures.retried += 1
            else:
                self.figures.dead += 1

    def reject(self, message: Message, reason: str = "") -> None:
        """Rejects the message: the broker writes it to the dead-letter topic, with the reason."""
        if self._accepts_first:
            raise ApplicationError("with at-most-once the message is accepted already: do not call reject")
        if self._acknowledge(message, REJECT, _report_of_reason(reason)):
            self.figures.dead += 1

    def _acknowledge(self, message: Message, outcome: int, report: FailureReport | None = None) -> bool:
        """Returns False if the message was acknowledged before."""
        self._check_open()
        raw = raw_of(message)
        if self._accepts_first:
            return True
        if self._handed_out.pop(id(raw), None) is None:
            self.figures.late += 1
            return False
        self._member.acknowledge(raw, outcome, report)
        now_s = time.monotonic()
        if now_s - self._sent_s >= self._sub.commit_every_s:
            self._sent_s = now_s
            self._member.send()
        return True

    def commit(self) -> None:
        """Raises CommitRefused if a lock had expired before, CommitLost if the outcome is unknown."""
        self._check_open()
        for raw in self._handed_out.values():
            self._member.acknowledge(raw, ACCEPT)
            self.figures.handled += 1
        self._handed_out.clear()
        for error in (self._joined.settle(_SETTLE_TIMEOUT_S) if self._joined is not None else {}).values():
            raise error

    def seek(
        self, topic: str, partition: int, *, offset: int | None = None, timestamp: datetime | None = None
    ) -> None:
        raise ApplicationError(
            "members of a share group have no positions: use `penstock group reset` to move the group"
        )

    # -- the end -------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Sends acknowledgements first. Other members get unacknowledged messages at once."""
        if self._joined is not None:
            self._joined.close()


def failure_reporter(sub: Subscription, group: ShareGroup, resources: Resources) -> FailureReporter | None:
    return FailureReporter(resources.cluster, sub.group) if group.takes_failure_reports else None


def _report_of_reason(reason: str) -> FailureReport | None:
    """Returns a report with the exception that is being handled, if there is one, and the reason."""
    error = sys.exception()
    if error is None:
        return FailureReport(error=WorkerError("", reason, "")) if reason else None
    report = error_report(error)
    assert report.error is not None
    return report._replace(error=report.error._replace(message=reason)) if reason else report


def accept_before_handling(member: ShareMember, taken: Sequence[Any], figures: Figures) -> list[Any]:
    """At-most-once on brokers without it: returns the messages that are known to be accepted, and drops the others."""
    for raw in taken:
        member.acknowledge(raw, ACCEPT)
    try:
        flaws = member.settle(_SETTLE_TIMEOUT_S) if taken else {}
    except ClientError:
        figures.add("dropped", len(taken))
        return []
    kept = [raw for raw in taken if topic_partition_of(raw) not in flaws]
    figures.add("dropped", len(taken) - len(kept))
    return kept
