"""Contracts broken on purpose, each as someone might break it by mistake: the judge must complain of every one."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.chaos.contracts.jobs import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    CLAIMED,
    EFFECTIVELY_ONCE,
    EXACTLY_ONCE,
    FREEZE,
    KILL,
    LEDGERED,
)
from tests.chaos.contracts.judge import DOUBLED, LOST, UNCOUNTED
from tests.chaos.contracts.points import HANDLER_WITHIN

from penstock.client.app import contracts, exactly_once, worker
from penstock.client.app.contracts import AtLeastOnce, AtMostOnce
from penstock.client.app.failures import FailurePublisher
from penstock.client.app.membership import CommitRefused, Membership
from penstock.client.ledgers import LedgerTransaction


class Mutation(NamedTuple):
    contract: str
    #: Where a life ends, or stands still, so that what is broken shows.
    point: str
    action: str
    apply: Callable[[], None]
    #: What the judge must complain of.
    shows: str
    fails: bool = False


def commit_after_handling() -> None:
    """At most once."""

    def process(self: Any, batch: Any) -> None:
        session = self._session
        session.runner.run(batch)
        session.failure_publisher.settle()
        session.membership.commit(session.membership.positions(), wait=True)

    AtMostOnce.process = process  # type: ignore[method-assign]


def refused_commit_is_ignored() -> None:
    """At most once: a member that has lost its partitions still handles its batch."""

    def process(self: Any, batch: Any) -> None:
        session = self._session
        with contextlib.suppress(CommitRefused):
            session.membership.commit(session.membership.positions(), wait=True)
        session.runner.run(batch)
        session.failure_publisher.settle()

    AtMostOnce.process = process  # type: ignore[method-assign]


def what_is_in_hand_is_noted_as_handled() -> None:
    """At most once: the next member cannot count what may be lost."""
    commit = Membership.commit

    def noting(self: Any, positions: Any, *, wait: bool, done: Any = None) -> None:
        commit(self, positions, wait=wait, done=positions)

    Membership.commit = noting  # type: ignore[method-assign]


def letters_on_their_way_are_noted_as_there() -> None:
    """At most once."""
    from penstock.client.app import resources

    settings = worker.producer_settings
    settle = FailurePublisher.settle
    FailurePublisher.settle = lambda self: None  # type: ignore[method-assign]
    finish = AtMostOnce.finish

    def finished(self: Any) -> None:
        settle(self._session.failure_publisher)
        finish(self)

    AtMostOnce.finish = finished  # type: ignore[method-assign]
    resources.producer_settings = lambda *args, **named: {  # type: ignore[attr-defined]
        **settings(*args, **named),
        "linger.ms": 2_000,
    }


def commit_before_handling() -> None:
    """At least once."""

    def process(self: Any, batch: Any) -> None:
        session = self._session
        session.membership.commit(session.membership.positions(), wait=True)
        session.runner.run(batch)

    AtLeastOnce.process = process  # type: ignore[method-assign]


def letters_are_not_awaited() -> None:
    """At least once: they may wait in this process while the position is committed."""
    settings = worker.producer_settings

    def commit(self: Any, *, wait: bool) -> None:
        session = self._session
        session.membership.commit(session.membership.positions(session.runner.pending()), wait=True)

    FailurePublisher.settle = lambda self: None  # type: ignore[method-assign]
    AtLeastOnce._commit = commit  # type: ignore[method-assign]
    from penstock.client.app import resources

    resources.producer_settings = lambda *args, **named: {  # type: ignore[attr-defined]
        **settings(*args, **named),
        "linger.ms": 2_000,
    }


def mark_before_the_handler() -> None:
    """Effectively once."""

    def marking(call: Any, marks: Any) -> Any:
        def handle(raw: Any) -> Any:
            marks.add(contracts.message_id_of(raw))
            marks.flush()
            return call(raw)

        return handle

    contracts.mark_after_handling = marking


def claim_in_a_transaction_of_its_own() -> None:
    """Effectively once: the mark is there before the result."""

    def within(call: Any, marks: Any, name: str, figures: Any) -> Any:
        def handle(raw: Any) -> Any:
            with marks.store.transaction() as transaction:
                if not marks.claim(transaction, contracts.message_id_of(raw)):
                    return None
            with marks.store.transaction() as transaction:
                return call(raw, **{name: transaction.connection})

        return handle

    contracts.claim_in_transaction = within


def nothing_is_claimed() -> None:
    """Effectively once: the store is not asked whether a message was handled before."""
    contracts.HandledIds.claim = lambda *_: True  # type: ignore[method-assign, assignment, return-value]


def _committed_apart(*, offsets_first: bool) -> None:
    asked: list[Membership] = []
    metadata = Membership.metadata

    def noted(self: Membership) -> Any:
        asked[:] = [self]
        return metadata(self)

    def commit(self: Any, positions: Any, group: Any) -> None:
        if offsets_first:
            asked[0].commit(positions, wait=True)
        self._producer.flush(30)
        self._producer.commit_transaction(30)
        if not offsets_first:
            asked[0].commit(positions, wait=True)

    Membership.metadata = noted  # type: ignore[method-assign]
    exactly_once.TransactionalPublisher.commit = commit  # type: ignore[method-assign]


def offsets_before_the_transaction() -> None:
    """Exactly once."""
    _committed_apart(offsets_first=True)


def offsets_after_the_transaction() -> None:
    """Exactly once."""
    _committed_apart(offsets_first=False)


def no_generation_in_transactions() -> None:
    """Exactly once: the group cannot check whether offsets come from the owner of the partitions."""

    def metadata(self: Any) -> Any:
        from confluent_kafka import Consumer

        settings = {name: self._settings[name] for name in ("bootstrap.servers", "group.id", "logger")}
        self._stranger = Consumer(settings)
        return self._stranger.consumer_group_metadata()

    Membership.metadata = metadata  # type: ignore[method-assign]


def no_compare_and_set() -> None:
    """Exactly once with a ledger: the last writer moves the position."""

    def advance(self: Any, group: str, place: Any, from_offset: Any, to_offset: int, epoch: int) -> None:
        self.connection.execute(
            "UPDATE penstock_positions SET next_offset = ? WHERE group_id = ? AND topic = ? AND partition = ?",
            (to_offset, group, *place),
        )

    LedgerTransaction.advance = advance  # type: ignore[method-assign]


def position_in_a_transaction_of_its_own() -> None:
    """Exactly once with a ledger."""

    def entering(call: Any, book: Any, name: str, *_: Any) -> Any:
        def handle(raw: Any) -> Any:
            place, offset = (raw.topic(), raw.partition()), raw.offset()
            if book.is_past(place, offset):
                return None
            with book.ledger.transaction() as transaction:
                result = call(raw, **{name: transaction.connection})
            with book.ledger.transaction() as transaction:
                book.advance(transaction, place, offset)
            book.advanced(place, offset)
            return result

        return handle

    exactly_once.handle_in_ledger = entering


_TAKEN = "before the batch"
_COMMIT, _COMMITTED = "before the commit", "after the commit"
_STEP = "before the step in the ledger"
_END, _ENDED = "before the commit of the transaction", "after the commit of the transaction"
MUTATIONS = {
    "commit after handling": Mutation(AT_MOST_ONCE, HANDLER_WITHIN, KILL, commit_after_handling, DOUBLED),
    "refused commit is ignored": Mutation(AT_MOST_ONCE, _TAKEN, FREEZE, refused_commit_is_ignored, DOUBLED),
    "what is in hand is noted as handled": Mutation(
        AT_MOST_ONCE, HANDLER_WITHIN, KILL, what_is_in_hand_is_noted_as_handled, UNCOUNTED
    ),
    "letters on their way are noted as there": Mutation(
        AT_MOST_ONCE, _COMMITTED, KILL, letters_on_their_way_are_noted_as_there, UNCOUNTED, fails=True
    ),
    "commit before handling": Mutation(AT_LEAST_ONCE, HANDLER_WITHIN, KILL, commit_before_handling, LOST),
    "letters are not awaited": Mutation(
        AT_LEAST_ONCE, _COMMITTED, KILL, letters_are_not_awaited, LOST, fails=True
    ),
    "mark before the handler": Mutation(
        EFFECTIVELY_ONCE, HANDLER_WITHIN, KILL, mark_before_the_handler, LOST
    ),
    "claim in a transaction of its own": Mutation(
        CLAIMED, HANDLER_WITHIN, KILL, claim_in_a_transaction_of_its_own, LOST
    ),
    "nothing is claimed": Mutation(CLAIMED, _COMMIT, KILL, nothing_is_claimed, DOUBLED),
    "offsets before the transaction": Mutation(
        EXACTLY_ONCE, _END, KILL, offsets_before_the_transaction, LOST
    ),
    "offsets after the transaction": Mutation(
        EXACTLY_ONCE, _ENDED, KILL, offsets_after_the_transaction, DOUBLED
    ),
    "no generation in transactions": Mutation(
        EXACTLY_ONCE, _TAKEN, FREEZE, no_generation_in_transactions, DOUBLED
    ),
    "no compare and set": Mutation(LEDGERED, _TAKEN, FREEZE, no_compare_and_set, DOUBLED),
    "position in a transaction of its own": Mutation(
        LEDGERED, _STEP, KILL, position_in_a_transaction_of_its_own, DOUBLED
    ),
}
