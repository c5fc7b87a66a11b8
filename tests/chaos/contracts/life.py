"""One life of a member: an application as a user writes it, with points at which it is killed or stands still."""

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.chaos.contracts import journal as diary
from tests.chaos.contracts import points
from tests.chaos.contracts.jobs import (
    AT_MOST_ONCE,
    ATTEMPTS,
    BATCHES,
    CLAIMED,
    CLASSIC,
    EFFECTIVELY_ONCE,
    EXACTLY_ONCE,
    IN_FLIGHT_MAX,
    LEDGERED,
    ORDERED,
    TAKEN_MAX,
    TASKS,
    THREADS,
    TRANSACTION_MS,
    Job,
    fails,
)
from tests.chaos.contracts.journal import Journal
from tests.chaos.contracts.mutations import MUTATIONS
from tests.chaos.workload import CLIENT

from penstock.client.app.application import Penstock
from penstock.client.app.failures import Backoff
from penstock.client.app.message import Message

DELIVERY = {CLAIMED: EFFECTIVELY_ONCE, LEDGERED: EXACTLY_ONCE}
INSERT = "INSERT INTO results (number) VALUES ({})"
STATIC_SESSION_MS = 6_000
CALM_REQUEST_MS = 60_000
POLL_MS = 6_000  # so that a member that was frozen polls aside as soon as it wakes up
WORK_S = 0.001  # for a message: positions are committed while a batch is handled, not after all of them
_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG


class NotThisTime(Exception):
    """What handlers raise where a message is to fail."""


def settings_of(job: Job) -> dict[str, Any]:
    made: dict[str, Any] = {
        **CLIENT,
        "fetch.error.backoff.ms": 50,
        "fetch.wait.max.ms": 50,
        "transaction.timeout.ms": TRANSACTION_MS,
    }
    if job.is_calm and job.contract == AT_MOST_ONCE:
        # A commit that times out may or may not be done, so the application would have to drop the messages.
        made["socket.timeout.ms"] = CALM_REQUEST_MS
    if job.protocol == CLASSIC:
        made["session.timeout.ms"] = STATIC_SESSION_MS if job.instance else job.session_ms
        made["heartbeat.interval.ms"] = 200
    else:
        made["group.protocol"] = job.protocol
    if job.instance:
        made["group.instance.id"] = job.instance
    elif job.mutation is None:
        made["max.poll.interval.ms"] = max(POLL_MS, job.session_ms)
    return made


def options_of(job: Job) -> dict[str, Any]:
    """Of the subscription."""
    made: dict[str, Any] = {
        "delivery": DELIVERY.get(job.contract, job.contract),
        "commit_every": "5ms",
        "taken_max": TAKEN_MAX,
        "in_flight_max": IN_FLIGHT_MAX,
    }
    if job.fails and job.contract != AT_MOST_ONCE:
        made["retry"] = Backoff(base="20ms", cap="40ms", attempts=ATTEMPTS)
    if job.contract in (CLAIMED, EFFECTIVELY_ONCE):
        made["store"] = job.database
    if job.contract == LEDGERED:
        made["ledger"] = job.database
    more = {
        THREADS: {"concurrency": 4},
        TASKS: {"concurrency": 4},
        BATCHES: {"batch": 5},
        ORDERED: {"keep_order": True, "retry": Backoff(base="20ms", cap="40ms", attempts=ATTEMPTS)},
    }
    return {**made, **more.get(job.shape, {})}


class Work:
    """What the handlers do, whatever their shape."""

    def __init__(self, job: Job, app: Penstock, journal: Journal, passages: points.Passages) -> None:
        self._job = job
        self._app = app
        self._journal = journal
        self._passed = passages.passed
        self._left = job.stops_after
        self._insert = INSERT.format("?" if job.database.startswith("sqlite") else "%s")

    def one(self, message: Message, connection: Any = None) -> None:
        number, attempt = int(message.value or b""), message.attempt
        self._passed(points.HANDLER_BEFORE)
        self._journal.note(diary.ENTERED, number, attempt)
        time.sleep(WORK_S)
        if connection is not None:
            connection.execute(self._insert, (number,))
        if self._job.contract == EXACTLY_ONCE:
            self._app.publish(self._job.target, b"%d" % number)
        self._passed(points.HANDLER_WITHIN)
        if self._job.fails and fails(number, attempt):
            self._journal.note(diary.FAILED, number, attempt)
            raise NotThisTime(f"{number}, attempt {attempt}")
        self._journal.note(diary.DONE, number)
        self._passed(points.HANDLER_AFTER)
        self._count_down()

    def many(self, messages: list[Message]) -> None:
        """As a whole: nothing of a list is done before all of it can be."""
        told = [(int(message.value or b""), message.attempt) for message in messages]
        self._passed(points.HANDLER_BEFORE)
        for number, attempt in told:
            self._journal.note(diary.ENTERED, number, attempt)
            time.sleep(WORK_S)
        self._passed(points.HANDLER_WITHIN)
        for number, attempt in told:
            if self._job.fails and fails(number, attempt):
                self._journal.note(diary.FAILED, number, attempt)
                raise NotThisTime(f"{number}, attempt {attempt}")
        for number, _ in told:
            if self._job.contract == EXACTLY_ONCE:
                self._app.publish(self._job.target, b"%d" % number)
            self._journal.note(diary.DONE, number)
        self._passed(points.HANDLER_AFTER)
        self._count_down(len(told))

    def _count_down(self, count: int = 1) -> None:
        if self._left is not None:
            self._left -= count
            if self._left <= 0:
                self._app.stop()


def handler_of(job: Job, work: Work) -> Callable[..., Any]:
    def handle(message: Message) -> None:
        work.one(message)

    def handle_many(messages: list[Message]) -> None:
        work.many(messages)

    def handle_with(message: Message, connection: Any) -> None:
        work.one(message, connection)

    async def handle_soon(message: Message) -> None:
        work.one(message)

    if job.contract in (CLAIMED, LEDGERED):
        return handle_with
    return {BATCHES: handle_many, TASKS: handle_soon}.get(job.shape, handle)


def run(job: Job) -> None:
    journal = Journal(job.journal)
    journal.note(diary.STARTED, os.getpid(), job.trap, job.mutation)
    passages = points.Passages(job.trap, journal)
    if job.mutation is not None:
        MUTATIONS[job.mutation].apply()
    points.Arming(passages, journal).arm()
    app = Penstock(job.servers, name=job.slot, settings=settings_of(job))
    handler = handler_of(job, Work(job, app, journal, passages))
    app.subscribe(job.topic, group=job.group, **options_of(job))(handler)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # before and after: the sender repeats the signal
    try:
        app.run()
        app.close()
    except BaseException as error:
        journal.note(diary.BROKEN, f"{type(error).__name__}: {error}")
        raise
    figures = app.figures()[handler.__qualname__].as_dict()
    journal.note(diary.LEFT, {name: count for name, count in figures.items() if count})


def begin(job: Job) -> None:
    """In a process that was forked for it; never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)
        log = os.open(job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # where does it stand?
        logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(process)d %(message)s")
        run(job)
        code = 0
    except BaseException:
        logging.exception("%s has ended", job.slot)
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
