"""Where a life may end: before and after every call that a contract depends on, and within the handler.

Only the processes of campaigns look like this: classes of the application layer are patched after the fork.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from typing import Any

from tests.chaos.contracts import journal as diary
from tests.chaos.contracts.jobs import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    CLAIMED,
    EFFECTIVELY_ONCE,
    EXACTLY_ONCE,
    FREEZE,
    KILL,
    LEDGERED,
    Trap,
)
from tests.chaos.contracts.journal import Journal

from penstock.client.app import exactly_once, worker
from penstock.client.app.contracts import HandledIds
from penstock.client.app.exactly_once import LedgerPositions
from penstock.client.app.failures import FailurePublisher
from penstock.client.app.membership import Membership
from penstock.client.databases.postgres import PostgresDatabase
from penstock.client.databases.sqlite import SqliteDatabase

BEFORE, AFTER = "before", "after"
HANDLER_BEFORE, HANDLER_WITHIN, HANDLER_AFTER = (
    "before the handler",
    "within the handler",
    "after the handler",
)
AT_REST = "at rest"
STOPS_WITHIN_S = 0.05
PATIENT = 1_000_000  # passages: it is not meant to end by itself
HANDLER = {HANDLER_BEFORE: 3, HANDLER_WITHIN: 5, HANDLER_AFTER: 3}


def around(name: str, weight: int) -> dict[str, int]:
    return {f"{BEFORE} {name}": weight, f"{AFTER} {name}": weight}


#: Of every contract: how often each point is chosen.
COMMON = {
    **HANDLER,
    **around("the batch", 3),
    **around("an assignment", 1),
    **around("the letter", 3),
    **around("the settling of letters", 2),
}
COMMIT = around("the commit", 6)
BY_CONTRACT = {
    AT_MOST_ONCE: {**COMMON, **COMMIT},
    AT_LEAST_ONCE: {**COMMON, **COMMIT},
    EFFECTIVELY_ONCE: {**COMMON, **COMMIT, **around("the marks", 5)},
    CLAIMED: {**COMMON, **COMMIT, **around("the claim", 4), **around("the database commit", 6)},
    EXACTLY_ONCE: {
        **COMMON,
        **around("the beginning of the transaction", 2),
        **around("sending in the transaction", 3),
        **around("the offsets of the transaction", 5),
        **around("the commit of the transaction", 6),
        **around("giving the transaction up", 1),
    },
    LEDGERED: {
        **COMMON,
        **COMMIT,
        **around("taking positions", 1),
        **around("the step in the ledger", 4),
        **around("the database commit", 6),
    },
}
#: While it ends as an operator ends it.
WHILE_LEAVING = {**around("the end", 2), **around("leaving the group", 2), **around("a revocation", 2)}
#: Few passages are made of these in one life.
RARE = (
    *around("an assignment", 1),
    *around("taking positions", 1),
    *WHILE_LEAVING,
    *around("giving the transaction up", 1),
)


class Passages:
    """Counts those of one point, and does then what was told."""

    def __init__(self, trap: Trap | None, journal: Journal) -> None:
        self._trap = trap
        self._left = trap.passage if trap is not None else 0
        self._journal = journal
        self._lock = threading.Lock()

    def passed(self, point: str) -> None:
        trap = self._trap
        if trap is None or point != trap.point:
            return
        with self._lock:
            self._left -= 1
            if self._left != 0:
                return
        self._spring(point, trap.action)

    def rest(self) -> None:
        """Nothing is left to do, and the point was not passed so often: this will do, too."""
        if self._trap is not None and self._trap.passage < PATIENT and self._left > 0:
            self._spring(AT_REST, KILL)

    def _spring(self, point: str, action: str) -> None:
        self._journal.note(diary.TRAPPED, point, action)
        os.kill(os.getpid(), signal.SIGSTOP if action == FREEZE else signal.SIGKILL)
        time.sleep(STOPS_WITHIN_S)  # another thread may be the first to hear of it


class _Between:
    """An object of the client library, with points around some of its methods."""

    def __init__(self, inner: Any, methods: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]):
        self._inner = inner
        for name, wrap in methods.items():
            setattr(self, name, wrap(getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Arming:
    def __init__(self, passages: Passages, journal: Journal) -> None:
        self._passages = passages
        self._passed = passages.passed
        self._journal = journal

    def arm(self) -> None:
        self._arm_membership()
        self._arm_contract()
        self._arm_letters()
        self._arm_transactions()
        self._arm_databases()

    def _around(
        self, name: str, *, given: Callable[..., Any] = lambda *_, **__: True
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """`given` says whether there is anything to do."""

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(method)
            def wrapped(*args: Any, **named: Any) -> Any:
                if not given(*args, **named):
                    return method(*args, **named)
                self._passed(f"{BEFORE} {name}")
                result = method(*args, **named)
                self._passed(f"{AFTER} {name}")
                return result

            return wrapped

        return wrap

    def _patch(self, owner: Any, method: str, wrap: Callable[[Any], Any]) -> None:
        setattr(owner, method, wrap(getattr(owner, method)))

    # -- the group -----------------------------------------------------------------------------------

    def _arm_membership(self) -> None:
        self._patch(Membership, "_join", self._with_consumer)
        self._patch(Membership, "_on_assign", self._around("an assignment"))
        self._patch(Membership, "_on_revoke", self._around("a revocation"))
        self._patch(Membership, "close", self._around("leaving the group"))
        self._patch(Membership, "_on_commit", self._with_answers)
        self._patch(Membership, "_starts", self._with_question)
        self._patch(Membership, "take", self._with_idleness)

    def _with_consumer(self, join: Any) -> Any:
        points = {"commit": lambda commit: self._around("the commit")(self._noting(commit))}
        return lambda membership: _Between(join(membership), points)

    def _noting(self, commit: Any) -> Any:
        def noted(*, offsets: Any, asynchronous: bool) -> Any:
            answers = commit(offsets=offsets, asynchronous=asynchronous)
            if not asynchronous:
                self._note_commits(answers or ())
            return answers

        return noted

    def _note_commits(self, answers: Any) -> None:
        rows = [[each.topic, each.partition, each.offset] for each in answers if each.error is None]
        self._journal.note(diary.COMMITTED, rows)

    def _with_answers(self, on_commit: Any) -> Any:
        def heard(membership: Any, error: Any, partitions: Any) -> None:
            if error is None:
                self._note_commits(partitions)
            on_commit(membership, error, partitions)

        return heard

    def _with_question(self, starts: Any) -> Any:
        def asked(membership: Any, consumer: Any, partitions: Any) -> Any:
            asked_s = time.monotonic()
            told = starts(membership, consumer, partitions)
            self._journal.note(diary.BEGUN, asked_s, [[*place, at] for place, at in told.items()])
            return told

        return asked

    def _with_idleness(self, take: Any) -> Any:
        def taken(membership: Any, *args: Any) -> Any:
            batch = take(membership, *args)
            if not batch:
                self._journal.note(diary.IDLE, len(membership.topic_partitions), len(membership._paused))
                if membership.topic_partitions and not membership._paused:
                    self._passages.rest()
            return batch

        return taken

    # -- the contract --------------------------------------------------------------------------------

    def _arm_contract(self) -> None:
        assemble = worker.assemble

        def armed(*args: Any) -> Any:
            machine = assemble(*args)
            points = {"process": self._processing(machine), "finish": self._around("the end")}
            machine.contract = _Between(machine.contract, points)
            return machine

        worker.assemble = armed
        note_unfinished = worker.report_unfinished

        def noted(figures: Any, place: Any, first: int, end: int) -> None:
            note_unfinished(figures, place, first, end)
            self._journal.note(diary.UNFINISHED, *place, first, end)

        worker.report_unfinished = noted

    def _processing(self, machine: Any) -> Any:
        def wrap(process: Any) -> Any:
            def processed(batch: Any) -> None:
                rows = [[raw.topic(), raw.partition(), raw.offset(), int(raw.value())] for raw in batch]
                self._journal.note(diary.TAKEN, rows)
                figures = machine.session.figures
                before = figures.dropped
                process(batch)
                if figures.dropped > before:
                    self._journal.note(diary.DROPPED, [row[-1] for row in rows])

            return self._around("the batch")(processed)

        return wrap

    def _arm_letters(self) -> None:
        self._patch(FailurePublisher, "send", self._around("the letter"))
        waiting = self._around("the settling of letters", given=lambda box: box._unconfirmed)
        self._patch(FailurePublisher, "settle", waiting)
        self._patch(FailurePublisher, "_not_published", self._with_losses)

    def _with_losses(self, not_published: Any) -> Any:
        def lost(box: Any, letter: Any, error: Any) -> None:
            not_published(box, letter, error)
            self._journal.note(diary.DROPPED, [int(letter.value)])

        return lost

    def _arm_transactions(self) -> None:
        publisher = exactly_once.TransactionalPublisher
        self._patch(publisher, "begin", self._around("the beginning of the transaction"))
        self._patch(publisher, "send", self._around("sending in the transaction"))
        made = publisher.__init__
        points = {
            "send_offsets_to_transaction": self._around("the offsets of the transaction"),
            "commit_transaction": self._around("the commit of the transaction"),
            "abort_transaction": self._around("giving the transaction up"),
        }

        def make(self: Any, *args: Any) -> None:
            made(self, *args)
            self._producer = _Between(self._producer, points)

        publisher.__init__ = make  # type: ignore[method-assign]

    def _arm_databases(self) -> None:
        self._patch(HandledIds, "flush", self._with_marks)
        self._patch(HandledIds, "claim", self._around("the claim"))
        self._patch(LedgerPositions, "take", self._around("taking positions"))
        self._patch(LedgerPositions, "advance", self._around("the step in the ledger"))
        self._patch(SqliteDatabase, "_commit", self._around("the database commit"))
        self._patch(PostgresDatabase, "transaction", self._with_end)

    def _with_marks(self, keep: Any) -> Any:
        armed = self._around("the marks", given=lambda marks: marks._handled)(keep)

        def kept(marks: Any) -> None:
            handled = list(marks._handled)
            armed(marks)
            if handled:
                self._journal.note(diary.MARKED, handled)

        return kept

    def _with_end(self, transaction: Any) -> Any:
        @contextmanager
        def ended(database: Any) -> Any:
            with transaction(database) as connection:
                yield connection
                self._passed(f"{BEFORE} the database commit")
            self._passed(f"{AFTER} the database commit")

        return ended
