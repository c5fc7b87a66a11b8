"""Runs a subscription in a share group: members that fetch messages, and a pool of handlers that handle them.

The outcome of a message is accept, release (any member may try it again) or reject. A member fetches more only when it
has acknowledged all messages, so a slow message delays only the member that has it. If brokers deliver whole batches,
one member has work for all handlers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from queue import Empty, SimpleQueue
from random import Random
from typing import Any, Final, Protocol

from penstock.client.app.failures import FailurePolicy, FailurePublisher, Reject, Retry
from penstock.client.app.figures import Figures
from penstock.client.app.handler import HandlerCall, UnreadableMessage, make_call
from penstock.client.app.librdkafka import ApplicationError, Settings, share_settings
from penstock.client.app.resources import Resources, now_ms
from penstock.client.app.share_consumer import accept_before_handling, failure_reporter
from penstock.client.app.share_group import (
    ACCEPT,
    REJECT,
    RELEASE,
    FailureReport,
    FailureReporter,
    MemberLost,
    ShareGroup,
    ShareMember,
    apply_share_group_settings,
    error_report,
    parse_delay_ms,
)
from penstock.client.app.subscription import Delivery, Subscription
from penstock.client.app.wait_reporter import WorkerPhase, WorkerStage
from penstock.client.app.worker import SubscriptionWorker, with_reply, with_reply_async
from penstock.client.errors import ClientError
from penstock.client.tracing import Spans
from penstock.protocol.backoff import ExponentialBackoff

__all__ = (
    "HandlerJob",
    "HandlerPool",
    "OutcomeRules",
    "ShareWorker",
    "TaskHandlerPool",
    "ThreadHandlerPool",
    "job_runner",
    "job_runner_async",
)


_CLOSE_TIMEOUT_S: Final = 30.0


class HandlerJob:
    """A message with the end of its lock, and the callback for its outcome."""

    __slots__ = ("deadline_s", "failure_report", "is_started", "is_withdrawn", "raw", "report")

    def __init__(self, raw: Any, deadline_s: float, report: Callable[[tuple[HandlerJob, int]], None]) -> None:
        self.raw = raw
        self.deadline_s = deadline_s
        self.report = report
        self.is_started = False
        self.is_withdrawn = False
        #: The failure report for the broker, if the message failed.
        self.failure_report: FailureReport | None = None


class HandlerPool(Protocol):
    error: BaseException | None

    def add(self, job: HandlerJob) -> None: ...

    def in_progress(self) -> list[Any]:
        """Returns the messages that handlers work on now."""

    def withdraw(self, job: HandlerJob) -> bool:
        """Removes a job that no handler has started. Returns False if one has."""

    def await_room(self, timeout_s: float) -> bool:
        """Waits until the pool has room. Returns whether it has."""

    def close(self) -> None: ...


class _HandlerPool:
    def __init__(self, in_flight_max: int) -> None:
        self._in_flight_max = in_flight_max
        self._unfinished = 0
        self._started: set[HandlerJob] = set()
        #: The exception with which a handler ended the application.
        self.error: BaseException | None = None
        self._changed = threading.Condition()

    def add(self, job: HandlerJob) -> None:
        with self._changed:
            self._unfinished += 1
        self._put(job)

    def in_progress(self) -> list[Any]:
        with self._changed:
            return [job.raw for job in self._started]

    def _put(self, job: HandlerJob | None) -> None:
        raise NotImplementedError

    def withdraw(self, job: HandlerJob) -> bool:
        with self._changed:
            if job.is_started:
                return False
            job.is_withdrawn = True
            self._finish()
            return True

    def _start(self, job: HandlerJob) -> bool:
        with self._changed:
            job.is_started = not job.is_withdrawn
            if job.is_started:
                self._started.add(job)
            return job.is_started

    def _give_up(self, job: HandlerJob, error: BaseException) -> None:
        """Releases the message, because the application ends."""
        self.error = self.error or error
        self._end(job, RELEASE)

    def _end(self, job: HandlerJob, outcome: int) -> None:
        with self._changed:
            self._started.discard(job)
            self._finish()
        job.report((job, outcome))

    def _finish(self) -> None:
        self._unfinished -= 1
        self._changed.notify_all()

    def await_room(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished < self._in_flight_max, timeout_s)


class ThreadHandlerPool(_HandlerPool):
    def __init__(self, run_job: Callable[[HandlerJob], int], *, workers: int, in_flight_max: int) -> None:
        super().__init__(in_flight_max)
        self._run_job = run_job
        self._queue: SimpleQueue[HandlerJob | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"penstock-worker-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def _put(self, job: HandlerJob | None) -> None:
        self._queue.put(job)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._start(job):
                try:
                    outcome = self._run_job(job)
                except BaseException as error:
                    self._give_up(job, error)
                else:
                    self._end(job, outcome)

    def close(self) -> None:
        for _ in self._threads:
            self._put(None)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)


class TaskHandlerPool(_HandlerPool):
    """Runs handlers in tasks, on an event loop in a thread of its own."""

    def __init__(
        self, run_job: Callable[[HandlerJob], Awaitable[int]], *, workers: int, in_flight_max: int
    ) -> None:
        super().__init__(in_flight_max)
        self._run_job = run_job
        self._workers = workers
        self._loop = asyncio.new_event_loop()
        self._queue: asyncio.Queue[HandlerJob | None] = asyncio.Queue()
        self._thread = threading.Thread(target=self._serve, name="penstock-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._all())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _all(self) -> None:
        await asyncio.gather(*(self._work() for _ in range(self._workers)))

    async def _work(self) -> None:
        while (job := await self._queue.get()) is not None:
            if self._start(job):
                try:
                    outcome = await self._run_job(job)
                except BaseException as error:
                    self._give_up(job, error)
                else:
                    self._end(job, outcome)

    def _put(self, job: HandlerJob | None) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, job)

    def close(self) -> None:
        for _ in range(self._workers):
            self._put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)


_LOG: Final = logging.getLogger("penstock.client")


class OutcomeRules:
    """Decides the outcome of a message. Handler threads share it.

    Without `retries`, a failed message goes to the `failure_publisher`, if there is one. `takes_failure_reports` says
    whether brokers accept delays and errors of single messages.
    """

    def __init__(
        self,
        figures: Figures,
        deliveries_max: int,
        failure_publisher: FailurePublisher | None,
        *,
        retries: bool,
        takes_failure_reports: bool,
    ) -> None:
        self._figures = figures
        self._deliveries_max = deliveries_max
        self._failure_publisher = failure_publisher
        self._retries = retries
        self._takes_failure_reports = takes_failure_reports

    def is_overdue(self, job: HandlerJob) -> bool:
        """Whether the lock of the message is about to expire: then another member may get it."""
        if time.monotonic() < job.deadline_s:
            return False
        if not self._figures.overdue:
            _LOG.warning(
                "messages are released untried: handlers need longer for the messages of one fetch than their lock "
                "lasts; lower taken_max= or raise lock="
            )
        self._figures.add("overdue")
        return True

    def done(self) -> int:
        self._figures.add("handled")
        return ACCEPT

    def failed(self, raw: Any, error: Exception) -> int:
        if not self._retries:
            return self._dead_letter(raw, error)
        record_text = f"{raw.topic()}[{raw.partition()}]@{raw.offset()}"
        count = raw.delivery_count() or 1
        is_last = self._is_last(raw, error)
        words = "becomes a dead letter" if is_last else "is retried"
        _LOG.warning("%s %s, delivery %d: %s: %s", record_text, words, count, type(error).__name__, error)
        if isinstance(error, Retry) and error.delay is not None and not self._takes_failure_reports:
            _LOG.warning(
                "%s is redelivered after the group's delay: these brokers do not support delay= for one message",
                record_text,
            )
        self._figures.add("dead" if is_last else "retried")
        return REJECT if isinstance(error, (Reject, UnreadableMessage)) else RELEASE

    def failure_report(self, raw: Any, error: Exception) -> FailureReport | None:
        """Returns the report for the broker: the delay of this message, or the error of a dead letter."""
        if not self._retries or not self._takes_failure_reports:
            return None
        if self._is_last(raw, error):
            return error_report(error)
        if isinstance(error, Retry) and error.delay is not None:
            try:
                return FailureReport(delay_ms=parse_delay_ms(error.delay))
            except ClientError as flaw:
                _LOG.warning("the message is redelivered after the group's delay: %s", flaw)
        return None

    def _is_last(self, raw: Any, error: Exception) -> bool:
        return (
            isinstance(error, (Reject, UnreadableMessage))
            or (raw.delivery_count() or 1) >= self._deliveries_max
        )

    def _dead_letter(self, raw: Any, error: Exception) -> int:
        if self._failure_publisher is None:
            _LOG.warning("%s[%d]@%d failed: %s", raw.topic(), raw.partition(), raw.offset(), error)
            self._figures.add("dropped")
            return RELEASE
        try:
            self._failure_publisher.failed(raw, error)
        except ClientError as flaw:
            _LOG.error("a dead letter is lost: %s", flaw)
            self._figures.add("dropped")
        return ACCEPT


def job_runner(call: HandlerCall, rules: OutcomeRules) -> Callable[[HandlerJob], int]:
    def run_job(job: HandlerJob) -> int:
        if rules.is_overdue(job):
            return RELEASE
        try:
            call(job.raw)
        except Exception as error:
            job.failure_report = rules.failure_report(job.raw, error)
            return rules.failed(job.raw, error)
        return rules.done()

    return run_job


def job_runner_async(call: HandlerCall, rules: OutcomeRules) -> Callable[[HandlerJob], Awaitable[int]]:
    async def run_job(job: HandlerJob) -> int:
        if rules.is_overdue(job):
            return RELEASE
        try:
            await call(job.raw)
        except Exception as error:
            job.failure_report = rules.failure_report(job.raw, error)
            # Publishing a dead letter may take time: do it in another thread, so that other tasks continue.
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, rules.failed, job.raw, error)
        return rules.done()

    return run_job


_POLL_S: Final = 0.3
_STOP_CHECK_S: Final = 0.1
#: The part of a lock's duration that the member uses: the lock started before the message arrived.
_LOCK_SHARE: Final = 0.9
_MEMBER_BACKOFF: Final = ExponentialBackoff(base_ms=100, cap_ms=5_000)


class ShareWorker(SubscriptionWorker):
    _pool: HandlerPool | None = None

    def in_progress(self) -> Sequence[Any]:
        return self._pool.in_progress() if self._pool is not None else ()

    def _work(self) -> bool:
        before = self.figures.handled
        self.stage = WorkerStage(WorkerPhase.CONNECTING, time.monotonic())
        sub, resources = self.subscription, self._resources
        partitions = resources.ensure_failure_topics(sub)
        group = apply_share_group_settings(sub, resources)
        failure_publisher = _failure_publisher(sub, resources, partitions, self.figures)
        rules = OutcomeRules(
            self.figures,
            group.deliveries_max,
            failure_publisher,
            retries=_retries_failures(sub),
            takes_failure_reports=group.takes_failure_reports,
        )
        pool = _make_pool(sub, resources, rules)
        halt = threading.Event()
        settings = share_settings(
            resources.bootstrap, resources.name, resources.settings, group=sub.group, taken_max=sub.taken_max
        )
        servers = [
            _MemberThread(
                sub, group, pool, settings, self.figures, halt, failure_reporter(sub, group, resources)
            )
            for _ in range(sub.concurrency)
        ]
        try:
            for server in servers:
                server.start()
            self.is_ready.set()
            self.stage = WorkerStage(WorkerPhase.RUNNING, time.monotonic())
            self._pool = pool
            while not self._stopping.wait(_STOP_CHECK_S) and all(server.is_alive() for server in servers):
                if pool.error is not None:
                    break
        finally:
            halt.set()
            for server in servers:
                server.join()
            pool.close()
            self._pool = None
        if pool.error is not None:
            raise pool.error
        for server in servers:
            if server.error is not None:
                raise server.error
        return self.figures.handled > before


class _MemberThread(threading.Thread):
    """One group member: fetches messages, has them handled, and acknowledges them."""

    def __init__(
        self,
        subscription: Subscription,
        group: ShareGroup,
        pool: HandlerPool,
        settings: Settings,
        figures: Any,
        halt: threading.Event,
        reports: FailureReporter | None,
    ) -> None:
        super().__init__(name=f"penstock-{subscription.group}-member", daemon=True)
        self._sub = subscription
        self._group = group
        self._pool = pool
        self._settings = settings
        self._figures = figures
        self._halt = halt
        self._reports = reports
        self._chance = Random()
        self._at_most_once = not _retries_failures(subscription)
        self._accepts_first = self._at_most_once and not group.is_at_most_once
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._serve(ShareMember(self._settings, self._sub.topics, self._figures, self._reports))
        except Exception as error:
            self.error = error

    def _serve(self, member: ShareMember) -> None:
        attempt = 0
        try:
            while not self._is_ending():
                try:
                    self._poll_once(member)
                    attempt = 0
                except (ApplicationError, MemberLost):
                    raise
                except ClientError as error:
                    _LOG.warning("%s: %s", self._sub.name, error)
                    attempt += 1
                    self._halt.wait(_MEMBER_BACKOFF.delay_ms(attempt, self._chance) / 1000)
        finally:
            member.close()

    def _is_ending(self) -> bool:
        """Also true when a handler has ended the application, so that a released message does not come back here."""
        return self._halt.is_set() or self._pool.error is not None

    def _poll_once(self, member: ShareMember) -> None:
        if not self._pool.await_room(_POLL_S):
            return
        taken: Sequence[Any] = member.take(_POLL_S)
        deadline_s = math.inf if self._at_most_once else time.monotonic() + self._group.lock_s * _LOCK_SHARE
        if self._accepts_first:
            taken = accept_before_handling(member, taken, self._figures)
        if taken:
            self._handle(member, taken, deadline_s)

    def _handle(self, member: ShareMember, taken: Sequence[Any], deadline_s: float) -> None:
        reports: SimpleQueue[tuple[HandlerJob, int]] = SimpleQueue()
        left = [HandlerJob(raw, deadline_s, reports.put) for raw in taken]
        for job in left:
            self._pool.add(job)
        sent_s, is_unsent = time.monotonic(), False
        while left:
            try:
                job, outcome = reports.get(timeout=max(self._sub.commit_every_s, 0.01))
            except Empty:
                if self._is_ending() and not self._at_most_once:
                    # Jobs that no handler has started stay unacknowledged; other members get them when this one leaves.
                    left = [job for job in left if not self._pool.withdraw(job)]
            else:
                left.remove(job)
                if not self._accepts_first:
                    member.acknowledge(job.raw, outcome, job.failure_report)
                    is_unsent = True
            now_s = time.monotonic()
            if is_unsent and now_s - sent_s >= self._sub.commit_every_s:
                member.send()
                sent_s, is_unsent = now_s, False


def _retries_failures(subscription: Subscription) -> bool:
    return subscription.delivery is not Delivery.AT_MOST_ONCE


def _failure_publisher(
    sub: Subscription, resources: Resources, partitions: Any, figures: Any
) -> FailurePublisher | None:
    """Returns a publisher only for at-most-once; otherwise brokers write the dead letters of share groups."""
    if _retries_failures(sub) or not sub.dead_letters:
        return None
    failing = FailurePolicy(
        group=sub.group, handler=sub.name, backoff=None, partitions=partitions, now_ms=now_ms, chance=Random()
    )
    return FailurePublisher(
        failing, resources.publish_failure, figures, waits=True, await_published=resources.await_published
    )


def _make_pool(sub: Subscription, resources: Resources, rules: OutcomeRules) -> HandlerPool:
    call: HandlerCall = make_call(sub.handler, sub.shape, Spans(client=resources.name, group=sub.group))
    if sub.to is not None:
        call = (with_reply_async if sub.shape.is_async else with_reply)(call, sub.to, resources)
    room = {"workers": sub.concurrency, "in_flight_max": sub.in_flight_max}
    if sub.shape.is_async:
        return TaskHandlerPool(job_runner_async(call, rules), **room)
    return ThreadHandlerPool(job_runner(call, rules), **room)
