"""Runs a subscription: a thread that joins the group, takes messages and calls the handler until it is stopped.

For each membership it assembles the parts: the handler wrapped as its contract needs it, a runner, and the publisher
of failure records. `to=` names a topic for what the handler returns; the reply has the key of the message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final
from urllib.parse import quote

from penstock.client.app import breaker, contracts, exactly_once
from penstock.client.app.contracts import (
    AtLeastOnce,
    AtMostOnce,
    Contract,
    ContractSession,
    raise_if_outage,
    report_unfinished,
)
from penstock.client.app.exactly_once import TransactionFailed, drafts
from penstock.client.app.failures import FailurePolicy, FailurePublisher, FailureRecord
from penstock.client.app.figures import Figures
from penstock.client.app.handler import (
    HandlerCall,
    HandlerLoop,
    loop_over_call,
    make_batch_call,
    make_call,
    make_loop,
)
from penstock.client.app.librdkafka import ApplicationError, Settings, consumer_settings, producer_settings
from penstock.client.app.membership import Membership
from penstock.client.app.message import TopicPartition
from penstock.client.app.overflow import BufferFull
from penstock.client.app.publisher import Draft
from penstock.client.app.resources import Resources, now_ms
from penstock.client.app.retry_topics import DueRetries, KeyOrder, in_key_order, read_waiting_retries
from penstock.client.app.runners import (
    AsyncRunner,
    BatchRunner,
    FailureCallback,
    MessageRunner,
    Runner,
    ThreadRunner,
)
from penstock.client.app.subscription import Delivery, Subscription
from penstock.client.app.wait_reporter import WorkerPhase, WorkerStage
from penstock.client.deadletters.headers import retry_level
from penstock.client.errors import ClientError, NotPublished
from penstock.client.ledgers import LedgerFenced, open_ledger
from penstock.client.payloads import encode
from penstock.client.stores import StoreError, StoreUnavailable, open_store
from penstock.client.tracing import Spans
from penstock.protocol.backoff import ExponentialBackoff

__all__ = ("AssembledSubscription", "SubscriptionWorker", "assemble", "with_reply", "with_reply_async")


_PUBLISH_TIMEOUT_S: Final = 300.0


def with_reply(call: HandlerCall, topic: str, resources: Resources) -> HandlerCall:
    def handle(raw: Any, **handles: Any) -> Any:
        _publish_reply(call(raw, **handles), raw, topic, resources)

    return handle


def with_reply_async(call: HandlerCall, topic: str, resources: Resources) -> HandlerCall:
    async def handle(raw: Any, **handles: Any) -> Any:
        result = await call(raw, **handles)
        if drafts.get() is not None:
            _publish_reply(result, raw, topic, resources)
        else:
            await asyncio.get_running_loop().run_in_executor(
                None, _publish_reply, result, raw, topic, resources
            )

    return handle


def _publish_reply(result: Any, raw: Any, topic: str, resources: Resources) -> None:
    """Publishes the handler's result, unless it is None. Outside of transactions, waits until it is confirmed."""
    if result is None:
        return
    value = encode(result)
    held = drafts.get()
    with resources.spans.publish(topic, [], key=raw.key()) as headers:
        draft = Draft(topic, value, raw.key(), headers)
        if held is not None:
            held.append(draft)
        else:
            sent = resources.publisher().send(draft)
            resources.await_published(sent, _PUBLISH_TIMEOUT_S)


class AssembledSubscription:
    """The parts of a subscription for one membership."""

    def __init__(
        self,
        *,
        topics: Sequence[str],
        settings: Settings,
        session: ContractSession,
        contract: Contract,
        retries: DueRetries,
        order: KeyOrder | None,
        group: str,
    ) -> None:
        self.topics = topics
        self.settings = settings
        self.session = session
        self.contract = contract
        self.retries = retries
        self._order = order
        self._group = group
        self.is_paused = False

    def reading_from(self, positions: Mapping[TopicPartition, int]) -> None:
        """Reads from the retry topics which keys have failed messages."""
        if self._order is None:
            return
        topic_partitions = {
            topic_partition: at
            for topic_partition, at in positions.items()
            if retry_level(topic_partition[0]) is not None
        }
        self._order.forget(list(topic_partitions))
        for raw in read_waiting_retries(self.settings, self._group, topic_partitions):
            self._order.found(raw)

    def forget(self, topic_partitions: Sequence[TopicPartition]) -> None:
        self.retries.forget(topic_partitions)
        if self._order is not None:
            self._order.forget(topic_partitions)

    def close(self) -> None:
        self.session.runner.close()


def assemble(
    subscription: Subscription, resources: Resources, figures: Figures, stopping: threading.Event
) -> AssembledSubscription:
    return _Assembly(subscription, resources, figures, stopping).build()


class _Assembly:
    def __init__(
        self, subscription: Subscription, resources: Resources, figures: Figures, stopping: threading.Event
    ) -> None:
        self._sub = subscription
        self._resources = resources
        self._figures = figures
        self._spans = Spans(client=resources.name, group=subscription.group)
        self._partitions = resources.ensure_failure_topics(subscription)
        self._order = KeyOrder() if subscription.keep_order else None
        self._guard = (
            breaker.BreakerGuard(subscription.breaker, figures, stopping) if subscription.breaker else None
        )
        self._failure_publisher = FailurePublisher(
            self._failure_policy(),
            self._publish_failure,
            figures,
            waits=self._is_concurrent,
            gives_up=not self._may_retry,
            await_published=resources.await_published,
        )
        self._session = ContractSession(None, self._failure_publisher, figures)  # type: ignore[arg-type]
        self._contract: Any = None
        self._runner_failed: FailureCallback = self._failed

    @property
    def _may_retry(self) -> bool:
        return self._sub.delivery is not Delivery.AT_MOST_ONCE

    @property
    def _is_concurrent(self) -> bool:
        return self._sub.concurrency > 1 or self._sub.shape.is_async

    def build(self) -> AssembledSubscription:
        sub = self._sub
        self._contract, wrap = self._make_contract()
        self._session.runner = self._runner(wrap)
        retry_topics = [name for name in self._partitions if retry_level(name) is not None]
        return AssembledSubscription(
            topics=[*sub.topics, *retry_topics],
            settings=self._settings(),
            session=self._session,
            contract=self._contract,
            retries=DueRetries(retry_topics, sub.group, self._figures, now_ms),
            order=self._order,
            group=sub.group,
        )

    def _settings(self) -> Settings:
        made = consumer_settings(
            self._resources.bootstrap, self._resources.name, self._resources.settings, group=self._sub.group
        )
        if self._sub.keep_order:
            # With range, a member gets the same partitions of the topic and of its retry topics.
            made.pop("group.protocol", None)
            made["partition.assignment.strategy"] = "range"
        return made

    # -- failures --------------------------------------------------------------------------------------

    def _failure_policy(self) -> FailurePolicy:
        sub = self._sub
        return FailurePolicy(
            group=sub.group,
            handler=sub.name,
            backoff=sub.retry,
            partitions=self._partitions,
            now_ms=now_ms,
            chance=Random(),
        )

    def _publish_failure(self, record: FailureRecord) -> Any:
        if isinstance(self._contract, exactly_once.ExactlyOnce):
            return exactly_once.send_in_transaction(self._contract.publish, record)
        return self._resources.publish_failure(record)

    def _check(self, error: Exception) -> None:
        """Raises the error if the message did not cause it: the message is then read again later."""
        if self._may_retry:
            # In a transaction the contract finds out which message caused the error.
            is_in_transaction = isinstance(self._contract, exactly_once.ExactlyOnce)
            is_outage = isinstance(error, BufferFull) or (
                isinstance(error, NotPublished) and (error.may_be_there or is_in_transaction)
            )
            if is_outage or isinstance(error, TransactionFailed):
                raise error
            raise_if_outage(error)
        if not self._sub.dead_letters:
            raise error

    def _failed(self, raw: Any, error: Exception) -> None:
        self._check(error)
        record = self._failure_publisher.failed(raw, error)
        if isinstance(self._contract, contracts.EffectivelyOnce):
            self._contract.failed(raw)
        if self._order is not None and raw.key() is not None:
            self._order.moved(raw, record)

    def _follow(self, raw: Any, level: int) -> FailureRecord:
        record = self._failure_policy().following_record(raw, level)
        self._failure_publisher.send(record)
        self._figures.followed += 1
        return record

    # -- contracts -------------------------------------------------------------------------------------

    def _make_contract(self) -> tuple[Contract, Any]:
        """Returns the contract, and the function that wraps the handler's call for it."""
        sub, session = self._sub, self._session
        match sub.delivery:
            case Delivery.AT_LEAST_ONCE:
                return AtLeastOnce(session, sub.commit_every_s), None
            case Delivery.AT_MOST_ONCE:
                return AtMostOnce(session, sub.commit_every_s, sub.batch or 1), None
            case Delivery.EFFECTIVELY_ONCE:
                return self._effectively_once()
            case Delivery.EXACTLY_ONCE if sub.ledger is not None:
                return self._with_ledger()
            case Delivery.EXACTLY_ONCE:
                return self._in_transactions()

    def _effectively_once(self) -> tuple[Contract, Any]:
        sub = self._sub
        store = self._resources.opened(sub.store or default_store_url(sub.group), open_store)
        marks = contracts.HandledIds(store, sub.group, sub.remember_s)
        claims = bool(sub.shape.extras)
        contract = contracts.EffectivelyOnce(self._session, sub.commit_every_s, marks, claims=claims)
        if claims:
            wrap: Any = lambda call: contracts.claim_in_transaction(  # noqa: E731
                call, marks, sub.shape.extras[0], self._figures
            )
        else:
            kind = (
                contracts.mark_after_handling_async if sub.shape.is_async else contracts.mark_after_handling
            )
            wrap = partial(_wrapped, kind, marks)
        return contract, wrap

    def _with_ledger(self) -> tuple[Contract, Any]:
        sub = self._sub
        ledger = self._resources.opened(sub.ledger, open_ledger)
        positions = exactly_once.LedgerPositions(ledger, sub.group, f"{self._resources.name}-{os.getpid()}")
        marks = (
            contracts.HandledIds(_ledger_store(ledger), f"{sub.group}.retries", sub.remember_s)
            if sub.levels
            else None
        )
        contract = exactly_once.ExactlyOnceWithLedger(self._session, sub.commit_every_s, positions, marks)

        def failed(raw: Any, error: Exception) -> None:
            if not isinstance(error, LedgerFenced):
                self._check(error)
            contract.failed(raw, error)

        self._runner_failed = failed
        name = sub.shape.extras[0]
        return contract, lambda call: exactly_once.handle_in_ledger(
            call, positions, name, marks, self._figures
        )

    def _in_transactions(self) -> tuple[Contract, Any]:
        resources, sub = self._resources, self._sub
        settings = producer_settings(resources.bootstrap, resources.name, resources.settings)
        contract = exactly_once.ExactlyOnce(
            self._session, lambda: exactly_once.TransactionalPublisher(settings, sub.group)
        )
        kind = (
            exactly_once.handle_in_transaction_async
            if sub.shape.is_async
            else exactly_once.handle_in_transaction
        )
        return contract, partial(_wrapped, kind, contract)

    # -- runners ---------------------------------------------------------------------------------------

    def _runner(self, wrap: Any) -> Runner:
        sub = self._sub
        if sub.batch is not None:
            return self._batches(sub.batch)
        failed = self._runner_failed
        if not self._is_concurrent:
            return MessageRunner(self._loop(wrap), failed, self._figures)
        kind = AsyncRunner if sub.shape.is_async else ThreadRunner
        return kind(
            self._call(wrap), failed, self._figures, workers=sub.concurrency, in_flight_max=sub.in_flight_max
        )

    def _loop(self, wrap: Any) -> HandlerLoop:
        """Returns a loop that calls the handler directly if nothing wraps it, because that is faster."""
        sub = self._sub
        around = (wrap, sub.to, self._guard, self._order)
        if self._spans.is_on or any(each is not None for each in around):
            return loop_over_call(self._call(wrap))
        return make_loop(sub.handler, sub.shape)

    def _call(self, wrap: Any) -> HandlerCall:
        sub = self._sub
        call = make_call(sub.handler, sub.shape, self._spans, sets_current_message=self._is_concurrent)
        if sub.to is not None:
            kind = with_reply_async if sub.shape.is_async else with_reply
            call = kind(call, sub.to, self._resources)
        if self._guard is not None:
            guard = breaker.with_breaker_async if sub.shape.is_async else breaker.with_breaker
            call = guard(call, self._guard)
        if wrap is not None:
            call = wrap(call)
        return in_key_order(call, self._order, self._follow) if self._order is not None else call

    def _batches(self, count_max: int) -> Runner:
        sub = self._sub
        call, decode = make_batch_call(sub.handler, sub.shape, self._spans)
        if isinstance(self._contract, exactly_once.ExactlyOnce):
            call = exactly_once.handle_batch_in_transaction(call, self._contract)
        return BatchRunner(
            call,
            decode,
            self._failed,
            self._figures,
            count_max=count_max,
            isolates=sub.delivery is not Delivery.AT_MOST_ONCE,
        )


def _wrapped(kind: Any, with_what: Any, call: HandlerCall) -> HandlerCall:
    made: HandlerCall = kind(call, with_what)
    return made


def _ledger_store(ledger: Any) -> Any:
    try:
        return ledger.marks()
    except StoreUnavailable:
        raise
    except StoreError as flaw:
        raise ApplicationError(str(flaw)) from flaw


def default_store_url(group: str) -> str:
    """Returns the URL of a file in the user's state directory. Members on other machines need a shared store."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(home) / "penstock"
    folder.mkdir(parents=True, exist_ok=True)
    safe = "".join(each if each.isalnum() or each in "._-" else "_" for each in group)
    return f"sqlite:///{quote(str(folder / f'{safe}.seen.db'))}"


_LOG: Final = logging.getLogger("penstock.client")
_TAKE_S: Final = 0.2
_PAUSED_POLL_S: Final = 0.02
_ROOM_WAIT_S: Final = 0.1
_RESTART_BACKOFF: Final = ExponentialBackoff(base_ms=200, cap_ms=10_000)
#: When to report which messages delay the end of the application, and how often to repeat it.
_REPORT_AFTER_S, _REPORT_EVERY_S = 0.5, 5.0
#: How long a member without messages in progress waits for its group to confirm that it has left.
_LEAVE_TIMEOUT_S: Final = 10.0
_STOP_CHECK_S: Final = 0.2
_NAMED_MAX: Final = 3


class SubscriptionWorker:
    """Restarts after errors that may go away. Other errors end it; `error` is then the reason."""

    def __init__(self, subscription: Subscription, resources: Resources) -> None:
        self.subscription = subscription
        self._resources = resources
        self._stopping = threading.Event()
        self._assembled: AssembledSubscription | None = None
        self._chance = Random()
        self.figures = resources.figures_of(subscription)
        self.error: BaseException | None = None
        self.is_ready = threading.Event()
        self.stage = WorkerStage(WorkerPhase.CONNECTING, time.monotonic())
        self._polled_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"penstock-{subscription.group}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Starts no further messages; `join` waits for the messages in progress."""
        self._stopping.set()
        assembled = self._assembled
        if assembled is not None and assembled.session.membership is not None:
            # In another thread, because it waits for a lock that the member may hold while brokers do not answer.
            threading.Thread(target=assembled.contract.stop, name="penstock-stopping", daemon=True).start()

    def join(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end(self) -> None:
        """After `stop`: waits for messages in progress and reports them. Does not wait for unreachable brokers."""
        began_s = time.monotonic()
        report_s = began_s + _REPORT_AFTER_S
        while not self.join(_STOP_CHECK_S):
            now_s = time.monotonic()
            in_progress = self.in_progress()
            if not in_progress:
                reason = self._resources.unreachable()
                if reason is None and now_s - began_s > _LEAVE_TIMEOUT_S:
                    reason = f"no reply for {_LEAVE_TIMEOUT_S:g} s"
                if reason is not None:
                    _LOG.warning(
                        "%s ends without a reply from its brokers (%s); uncommitted messages are redelivered",
                        self.subscription.name,
                        reason,
                    )
                    return
            if now_s >= report_s:
                report_s = now_s + _REPORT_EVERY_S
                self._report_unfinished(in_progress)

    def _report_unfinished(self, in_progress: Sequence[Any]) -> None:
        if not in_progress:
            _LOG.warning(
                "%s is stopping: it commits its offsets and leaves its group", self.subscription.name
            )
            return
        named = ", ".join(
            f"{raw.topic()}[{raw.partition()}]@{raw.offset()}" for raw in in_progress[:_NAMED_MAX]
        )
        more = f" and {len(in_progress) - _NAMED_MAX} more" if len(in_progress) > _NAMED_MAX else ""
        _LOG.warning("%s is stopping: it finishes %s%s", self.subscription.name, named, more)

    def in_progress(self) -> Sequence[Any]:
        """Returns the messages that handlers work on now."""
        assembled = self._assembled
        return assembled.session.runner.in_progress() if assembled is not None else ()

    @property
    def blocked_since_s(self) -> float | None:
        """Since when the member waits, for example for a commit; None while handlers work."""
        return None if self.in_progress() else self._polled_s

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        attempt = 0
        while not self._stopping.is_set():
            try:
                attempt = 0 if self._work() else attempt + 1
            except ApplicationError as error:
                self.error = error
                _LOG.error("%s: %s", self.subscription.name, error)
                return
            except ClientError as error:
                attempt += 1
                self.figures.restarts += 1
                _LOG.warning("%s restarts: %s", self.subscription.name, error)
            except Exception as error:
                self.error = error
                _LOG.exception("%s has failed", self.subscription.name)
                return
            except BaseException as error:
                self.error = error
                _LOG.error("%s raised %r, which ends the application", self.subscription.name, error)
                return
            self.stage = WorkerStage(WorkerPhase.BACKING_OFF, time.monotonic())
            self._stopping.wait(_RESTART_BACKOFF.delay_ms(attempt, self._chance) / 1000)

    def _work(self) -> bool:
        """Runs one membership, from joining to leaving. Returns whether a message was handled."""
        before = self.figures.handled
        self.stage = WorkerStage(WorkerPhase.CONNECTING, time.monotonic())
        assembled = assemble(self.subscription, self._resources, self.figures, self._stopping)
        membership = Membership(
            assembled.settings,
            assembled.topics,
            start=self.subscription.start,
            work=_WorkerRebalanceListener(assembled, self._note_assigned),
            contract=self.subscription.delivery,
            unfinished=partial(report_unfinished, self.figures),
        )
        assembled.session.membership = membership
        self._assembled = assembled
        try:
            self.is_ready.set()
            while not self._stopping.is_set():
                if self.stage.phase is not WorkerPhase.RUNNING:
                    self._note_stage(assembled, membership)
                self._polled_s = time.monotonic()
                self._poll_once(assembled, membership)
            assembled.contract.finish()
        finally:
            self._assembled = None
            membership.close()
            assembled.close()
        return self.figures.handled > before

    def _note_assigned(self) -> None:
        """Called by the assignment itself, because the first message may keep its handler busy for long."""
        self.stage = WorkerStage(WorkerPhase.RUNNING, time.monotonic())

    def _note_stage(self, assembled: AssembledSubscription, membership: Membership) -> None:
        if membership.is_assigned:
            self._note_assigned()
            return
        is_new = self.stage.phase is WorkerPhase.CONNECTING
        since_s = time.monotonic() if is_new else self.stage.since_s
        self.stage = WorkerStage(WorkerPhase.JOINING, since_s, assembled.settings, membership.member_id)

    def _poll_once(self, assembled: AssembledSubscription, membership: Membership) -> None:
        room = self._room(assembled)
        if self._is_paused(assembled, membership, room):
            # Keep polling, because the group removes a member that does not poll.
            membership.put_back(membership.take(1, _PAUSED_POLL_S))
            assembled.contract.tick()
            return
        assembled.retries.resume(membership)
        batch = membership.take(min(self.subscription.taken_max, room), assembled.retries.wait_s(_TAKE_S))
        ready = assembled.retries.ready(batch, membership) if batch else batch
        if ready:
            assembled.contract.process(ready)
        else:
            assembled.contract.tick()

    def _room(self, assembled: AssembledSubscription) -> int:
        """Waits a moment for room, because pausing a partition discards fetched messages."""
        runner = assembled.session.runner
        room = runner.room
        return room if room > 0 or assembled.is_paused else runner.await_room(_ROOM_WAIT_S)

    def _is_paused(self, assembled: AssembledSubscription, membership: Membership, room: int) -> bool:
        """Pauses partitions while the runner is full, and resumes them when it is half empty."""
        if room <= 0 or (assembled.is_paused and 2 * room < self.subscription.in_flight_max):
            membership.pause(membership.topic_partitions)
            assembled.is_paused = True
        elif assembled.is_paused:
            membership.resume(membership.topic_partitions - assembled.retries.held)
            assembled.is_paused = False
        return assembled.is_paused


class _WorkerRebalanceListener:
    """Passes rebalances on to the contract and to the parts that keep state by partition."""

    def __init__(self, assembled: AssembledSubscription, note_assigned: Callable[[], None]) -> None:
        self._assembled = assembled
        self._note_assigned = note_assigned

    def assigned(self, topic_partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        self._note_assigned()
        return self._assembled.contract.assigned(topic_partitions)

    def reading_from(self, positions: Mapping[TopicPartition, int]) -> None:
        self._assembled.reading_from(positions)

    def revoked(self, topic_partitions: Sequence[TopicPartition]) -> None:
        try:
            self._assembled.contract.revoked(topic_partitions)
        finally:
            self._assembled.forget(topic_partitions)

    def lost(self, topic_partitions: Sequence[TopicPartition]) -> None:
        try:
            self._assembled.contract.lost(topic_partitions)
        finally:
            self._assembled.forget(topic_partitions)
