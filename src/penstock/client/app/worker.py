"""A subscription made into what runs: its handler in the contract's wrapping, a runner, and a box for letters."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from penstock.client.app import effectively, exactly, guarding
from penstock.client.app.contracts import AtLeastOnce, AtMostOnce, Contract, Session
from penstock.client.app.delivery import Delivery
from penstock.client.app.exactly import TransactionFailed
from penstock.client.app.failing import Failing, Letter
from penstock.client.app.figures import Figures
from penstock.client.app.handling import Call, Loop, calling, calling_batch, looping, one_by_one
from penstock.client.app.inline import Failed, Inline, InlineBatches, Runner
from penstock.client.app.lanes import AsyncLanes, ThreadLanes
from penstock.client.app.letterbox import Letterbox
from penstock.client.app.order import KeyOrder, ordered
from penstock.client.app.outages import raise_outage
from penstock.client.app.places import Place
from penstock.client.app.publishing import NotPublished
from penstock.client.app.replies import replying, replying_async
from penstock.client.app.resources import Resources, now_ms
from penstock.client.app.retries import DueRetries
from penstock.client.app.scanning import waiting
from penstock.client.app.settings import ApplicationError, Settings, consumer_settings, producer_settings
from penstock.client.app.subscription import Subscription
from penstock.client.letters import retry_level
from penstock.client.stores import StoreError, StoreUnavailable
from penstock.client.tracing import Spans

__all__ = ["Machine", "assemble"]


class Machine:
    """Everything of one membership."""

    def __init__(
        self,
        *,
        topics: Sequence[str],
        settings: Settings,
        session: Session,
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
        self.is_held = False

    def begun(self, positions: Mapping[Place, int]) -> None:
        """Which keys have failed is read from where their retries are."""
        if self._order is None:
            return
        places = {place: at for place, at in positions.items() if retry_level(place[0]) is not None}
        self._order.forget(list(places))
        for raw in waiting(self.settings, self._group, places):
            self._order.found(raw)

    def forget(self, places: Sequence[Place]) -> None:
        self.retries.forget(places)
        if self._order is not None:
            self._order.forget(places)

    def close(self) -> None:
        self.session.runner.close()


def assemble(
    subscription: Subscription, resources: Resources, figures: Figures, stopping: threading.Event
) -> Machine:
    return _Assembly(subscription, resources, figures, stopping).machine()


class _Assembly:
    def __init__(
        self, subscription: Subscription, resources: Resources, figures: Figures, stopping: threading.Event
    ) -> None:
        self._sub = subscription
        self._resources = resources
        self._figures = figures
        self._spans = Spans(client=resources.name, group=subscription.group)
        self._partitions = resources.letter_topics(subscription)
        self._order = KeyOrder() if subscription.keep_order else None
        self._guard = (
            guarding.Guard(subscription.breaker, figures, stopping) if subscription.breaker else None
        )
        self._letterbox = Letterbox(
            self._failing(),
            self._post,
            figures,
            waits=self._is_concurrent,
            gives_up=not self._may_try_again,
            await_published=resources.await_published,
        )
        self._session = Session(None, self._letterbox, figures)  # type: ignore[arg-type]
        self._contract: Any = None
        self._runner_failed: Failed = self._failed

    @property
    def _may_try_again(self) -> bool:
        return self._sub.delivery is not Delivery.AT_MOST_ONCE

    @property
    def _is_in_transactions(self) -> bool:
        return isinstance(self._contract, exactly.ExactlyOnce)

    @property
    def _is_concurrent(self) -> bool:
        return self._sub.concurrency > 1 or self._sub.shape.is_async

    def machine(self) -> Machine:
        sub = self._sub
        self._contract, wrap = self._contracted()
        self._session.runner = self._runner(wrap)
        retry_topics = [name for name in self._partitions if retry_level(name) is not None]
        return Machine(
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
            # One member has a partition of the topic and the same one of its retries.
            made.pop("group.protocol", None)
            made["partition.assignment.strategy"] = "range"
        return made

    # -- failures --------------------------------------------------------------------------------------

    def _failing(self) -> Failing:
        sub = self._sub
        return Failing(
            group=sub.group,
            handler=sub.name,
            backoff=sub.retry,
            partitions=self._partitions,
            now_ms=now_ms,
            chance=Random(),
        )

    def _post(self, letter: Letter) -> Any:
        if isinstance(self._contract, exactly.ExactlyOnce):
            return exactly.post_in_transaction(self._contract.publish, letter)
        return self._resources.post(letter)

    def _check(self, error: Exception) -> None:
        """Raises what is no fault of the message: it is read again when that has passed."""
        if self._may_try_again:
            # In a transaction it is the contract that finds out whose fault it is.
            is_outage = isinstance(error, NotPublished) and (error.may_be_there or self._is_in_transactions)
            if is_outage or isinstance(error, TransactionFailed):
                raise error
            raise_outage(error)
        if not self._sub.dead_letters:
            raise error

    def _failed(self, raw: Any, error: Exception) -> None:
        self._check(error)
        letter = self._letterbox.failed(raw, error)
        if isinstance(self._contract, effectively.EffectivelyOnce):
            self._contract.failed(raw)
        if self._order is not None and raw.key() is not None:
            self._order.moved(raw, letter)

    def _follow(self, raw: Any, level: int) -> Letter:
        letter = self._failing().follower(raw, level)
        self._letterbox.send(letter)
        self._figures.followed += 1
        return letter

    # -- contracts -------------------------------------------------------------------------------------

    def _contracted(self) -> tuple[Contract, Any]:
        """The contract, and what it wraps around the call of a handler."""
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
        from penstock.client.stores import open_store

        sub = self._sub
        store = self._resources.opened(sub.store or default_store(sub.group), open_store)
        marks = effectively.Marks(store, sub.group, sub.remember_s)
        claims = bool(sub.shape.extras)
        contract = effectively.EffectivelyOnce(self._session, sub.commit_every_s, marks, claims=claims)
        if claims:
            wrap: Any = lambda call: effectively.within_transaction(  # noqa: E731
                call, marks, sub.shape.extras[0], self._figures
            )
        else:
            kind = effectively.marking_async if sub.shape.is_async else effectively.marking
            wrap = partial(_wrapped, kind, marks)
        return contract, wrap

    def _with_ledger(self) -> tuple[Contract, Any]:
        from penstock.client.app import ledgered
        from penstock.client.ledgers import Fenced, open_ledger

        sub = self._sub
        ledger = self._resources.opened(sub.ledger, open_ledger)
        book = ledgered.Book(ledger, sub.group, f"{self._resources.name}-{os.getpid()}")
        marks = (
            effectively.Marks(_marks_of(ledger), f"{sub.group}.retries", sub.remember_s)
            if sub.levels
            else None
        )
        contract = ledgered.Ledgered(self._session, sub.commit_every_s, book, marks)

        def failed(raw: Any, error: Exception) -> None:
            if not isinstance(error, Fenced):
                self._check(error)
            contract.failed(raw, error)

        self._runner_failed = failed
        name = sub.shape.extras[0]
        return contract, lambda call: ledgered.entering(call, book, name, marks, self._figures)

    def _in_transactions(self) -> tuple[Contract, Any]:
        resources, sub = self._resources, self._sub
        settings = producer_settings(resources.bootstrap, resources.name, resources.settings)
        contract = exactly.ExactlyOnce(
            self._session, lambda: exactly.TransactionalPublisher(settings, sub.group)
        )
        kind = exactly.in_transaction_async if sub.shape.is_async else exactly.in_transaction
        return contract, partial(_wrapped, kind, contract)

    # -- runners ---------------------------------------------------------------------------------------

    def _runner(self, wrap: Any) -> Runner:
        sub = self._sub
        if sub.batch is not None:
            return self._batches(sub.batch)
        failed = self._runner_failed
        if not self._is_concurrent:
            return Inline(self._loop(wrap), failed, self._figures)
        kind = AsyncLanes if sub.shape.is_async else ThreadLanes
        return kind(
            self._call(wrap), failed, self._figures, lanes=sub.concurrency, in_flight_max=sub.in_flight_max
        )

    def _loop(self, wrap: Any) -> Loop:
        """With nothing around the handler, there is nothing to be called for each message but the handler."""
        sub = self._sub
        around = (wrap, sub.to, self._guard, self._order)
        if self._spans.is_on or any(each is not None for each in around):
            return one_by_one(self._call(wrap))
        return looping(sub.handler, sub.shape)

    def _call(self, wrap: Any) -> Call:
        sub = self._sub
        call = calling(sub.handler, sub.shape, self._spans, takes_in_hand=self._is_concurrent)
        if sub.to is not None:
            kind = replying_async if sub.shape.is_async else replying
            call = kind(call, sub.to, self._resources)
        if self._guard is not None:
            guard = guarding.guarded_async if sub.shape.is_async else guarding.guarded
            call = guard(call, self._guard)
        if wrap is not None:
            call = wrap(call)
        return ordered(call, self._order, self._follow) if self._order is not None else call

    def _batches(self, count_max: int) -> Runner:
        sub = self._sub
        call, decode = calling_batch(sub.handler, sub.shape, self._spans)
        if isinstance(self._contract, exactly.ExactlyOnce):
            call = exactly.batches_in_transaction(call, self._contract)
        return InlineBatches(
            call,
            decode,
            self._failed,
            self._figures,
            count_max=count_max,
            isolates=sub.delivery is not Delivery.AT_MOST_ONCE,
        )


def _wrapped(kind: Any, with_what: Any, call: Call) -> Call:
    made: Call = kind(call, with_what)
    return made


def _marks_of(ledger: Any) -> Any:
    try:
        return ledger.marks()
    except StoreUnavailable:
        raise
    except StoreError as flaw:
        raise ApplicationError(str(flaw)) from flaw


def default_store(group: str) -> str:
    """Beside what other programs keep for this user; members on other machines need a store that they share."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(home) / "penstock"
    folder.mkdir(parents=True, exist_ok=True)
    safe = "".join(each if each.isalnum() or each in "._-" else "_" for each in group)
    return f"sqlite:///{quote(str(folder / f'{safe}.seen.db'))}"
