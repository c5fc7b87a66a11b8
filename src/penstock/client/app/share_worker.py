"""A subscription in a share group at work: members that take messages, and as many handlers that have them in turn.

A member gets more only when all that it has taken is answered for, so one message that takes long holds up the member
that has it, and no other. Brokers that hand out whole batches give one member work for all handlers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from random import Random
from typing import Any, Final

from penstock.client.app.consumption import Consumption
from penstock.client.app.delivery import Delivery
from penstock.client.app.failing import Failing
from penstock.client.app.handling import Call, calling
from penstock.client.app.letterbox import Letterbox
from penstock.client.app.replies import replying, replying_async
from penstock.client.app.resources import Resources, now_ms
from penstock.client.app.settings import ApplicationError, Settings, share_settings
from penstock.client.app.share_failures import FailureReports
from penstock.client.app.share_member import MemberLost, ShareMember
from penstock.client.app.share_plain import accepted_first, reports_of
from penstock.client.app.share_pool import Job, Pool, TaskPool, ThreadPool
from penstock.client.app.share_settings import ShareGroup, agree
from penstock.client.app.share_verdicts import Verdicts, judging, judging_async
from penstock.client.app.subscription import Subscription
from penstock.client.app.waits import Phase, Stage
from penstock.client.errors import ClientError
from penstock.client.retrying import Backoff as Rests
from penstock.client.tracing import Spans

__all__ = ["Sharing"]

_LOG: Final = logging.getLogger("penstock.client")
_TAKE_S: Final = 0.3
_LOOK_S: Final = 0.1
#: Of a lock's time, when it counts as over: the broker began to count before we did.
_LOCK_PART: Final = 0.9
_RESTS: Final = Rests(base_ms=100, cap_ms=5_000)


class Sharing(Consumption):
    _pool: Pool | None = None

    def begun(self) -> Sequence[Any]:
        return self._pool.begun() if self._pool is not None else ()

    def _work(self) -> bool:
        before = self.figures.handled
        self.stage = Stage(Phase.CONNECTING, time.monotonic())
        sub, resources = self.subscription, self._resources
        partitions = resources.letter_topics(sub)
        group = agree(sub, resources)
        letterbox = _letterbox(sub, resources, partitions, self.figures)
        verdicts = Verdicts(
            self.figures,
            group.deliveries_max,
            letterbox,
            tries_again=_retries(sub),
            tells=group.takes_failures,
        )
        pool = _pool(sub, resources, verdicts)
        halt = threading.Event()
        settings = share_settings(
            resources.bootstrap, resources.name, resources.settings, group=sub.group, taken_max=sub.taken_max
        )
        servers = [
            _Server(sub, group, pool, settings, self.figures, halt, reports_of(sub, group, resources))
            for _ in range(sub.concurrency)
        ]
        try:
            for server in servers:
                server.start()
            self.is_ready.set()
            self.stage = Stage(Phase.RUNNING, time.monotonic())
            self._pool = pool
            while not self._stopping.wait(_LOOK_S) and all(server.is_alive() for server in servers):
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


class _Server(threading.Thread):
    """One member: takes, has handled, answers."""

    def __init__(
        self,
        subscription: Subscription,
        group: ShareGroup,
        pool: Pool,
        settings: Settings,
        figures: Any,
        halt: threading.Event,
        reports: FailureReports | None,
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
        self._at_most_once = not _retries(subscription)
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
                    self._round(member)
                    attempt = 0
                except (ApplicationError, MemberLost):
                    raise
                except ClientError as error:
                    _LOG.warning("%s: %s", self._sub.name, error)
                    attempt += 1
                    self._halt.wait(_RESTS.delay_ms(attempt, self._chance) / 1000)
        finally:
            member.close()

    def _is_ending(self) -> bool:
        """Also once a handler has ended the application: what it gave back must not come here again."""
        return self._halt.is_set() or self._pool.error is not None

    def _round(self, member: ShareMember) -> None:
        if not self._pool.await_room(_TAKE_S):
            return
        taken: Sequence[Any] = member.take(_TAKE_S)
        deadline_s = math.inf if self._at_most_once else time.monotonic() + self._group.lock_s * _LOCK_PART
        if self._accepts_first:
            taken = accepted_first(member, taken, self._figures)
        if taken:
            self._have_handled(member, taken, deadline_s)

    def _have_handled(self, member: ShareMember, taken: Sequence[Any], deadline_s: float) -> None:
        reports: SimpleQueue[tuple[Job, int]] = SimpleQueue()
        left = [Job(raw, deadline_s, reports.put) for raw in taken]
        for job in left:
            self._pool.add(job)
        sent_s, is_unsent = time.monotonic(), False
        while left:
            try:
                job, outcome = reports.get(timeout=max(self._sub.commit_every_s, 0.01))
            except Empty:
                if self._is_ending() and not self._at_most_once:
                    # What could begin has begun; the rest has no answer when the member leaves, and is for others.
                    left = [job for job in left if not self._pool.withdraw(job)]
            else:
                left.remove(job)
                if not self._accepts_first:
                    member.answer(job.raw, outcome, job.told)
                    is_unsent = True
            now_s = time.monotonic()
            if is_unsent and now_s - sent_s >= self._sub.commit_every_s:
                member.send()
                sent_s, is_unsent = now_s, False


def _retries(subscription: Subscription) -> bool:
    return subscription.delivery is not Delivery.AT_MOST_ONCE


def _letterbox(sub: Subscription, resources: Resources, partitions: Any, figures: Any) -> Letterbox | None:
    """Brokers write the dead letters of share groups, save where they know nothing of failures."""
    if _retries(sub) or not sub.dead_letters:
        return None
    failing = Failing(
        group=sub.group, handler=sub.name, backoff=None, partitions=partitions, now_ms=now_ms, chance=Random()
    )
    return Letterbox(failing, resources.post, figures, waits=True, await_published=resources.await_published)


def _pool(sub: Subscription, resources: Resources, verdicts: Verdicts) -> Pool:
    call: Call = calling(sub.handler, sub.shape, Spans(client=resources.name, group=sub.group))
    if sub.to is not None:
        call = (replying_async if sub.shape.is_async else replying)(call, sub.to, resources)
    room = {"workers": sub.concurrency, "in_flight_max": sub.in_flight_max}
    if sub.shape.is_async:
        return TaskPool(judging_async(call, verdicts), **room)
    return ThreadPool(judging(call, verdicts), **room)
