"""`python -m tests.application.outbox.child JOB`: the relay as the command runs it, which dies or freezes at a point.

Points are between the steps of a relay, and are passed with rows in hand. What a job calls a mutation takes a promise
away from the relay, to see whether the judge notices.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from penstock.client.outbox.database import OutboxDatabase
from penstock.client.outbox.kafka import Marker, TransactionalSender
from penstock.client.outbox.messages import OutboxError, OutboxRow
from penstock.client.outbox.relay import Relay

SELECTED, PRODUCED, COMMITTING, COMMITTED, DELETING, DELETED = POINTS = (
    "selected",
    "produced",
    "committing",
    "committed",
    "deleting",
    "deleted",
)
NO_MARKER, HIGHEST_ID, NO_LOCK = (
    "reads no marker",
    "goes on after the highest id",
    "takes no lock and fences no other",
)
REFUSED = 3  # the exit code of a relay that has to be told something


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    url: str
    bootstrap: str
    shards: int = 1
    shard: int = 0
    batch_rows: int = 20
    once: bool = False
    point: str = ""
    #: At the how-manyeth time.
    passing: int = 1
    #: SIGKILL, or SIGSTOP to be woken up later.
    signal: str = "SIGKILL"
    mutation: str = ""

    def as_text(self) -> str:
        return json.dumps(asdict(self))


class Points:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._passed = 0

    def reach(self, point: str) -> None:
        if point != self._job.point:
            return
        self._passed += 1
        if self._passed == self._job.passing:
            os.kill(os.getpid(), signal.Signals[self._job.signal])


class ChildRelay(Relay):
    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        super().__init__(
            job.url,
            job.bootstrap,
            shards=job.shards,
            shard=job.shard,
            batch_rows=job.batch_rows,
            poll_s=1.0,
            settings={"transaction.timeout.ms": 10_000},
            say=say,
        )
        self._job = job
        self._points = Points(job)
        self._highest = 0

    def _select(self, database: OutboxDatabase, rows_max: int) -> list[OutboxRow]:
        rows = super()._select(database, rows_max)
        if self._job.mutation == HIGHEST_ID:
            rows = [row for row in rows if row.id > self._highest]
            self._highest = max([self._highest, *(row.id for row in rows)])
        if rows:
            self._points.reach(SELECTED)
        return rows

    def _read_markers(self, name: str, stopping: threading.Event) -> list[Marker]:
        if self._job.mutation == NO_MARKER:
            return []
        markers = super()._read_markers(name, stopping)
        if self._job.mutation == HIGHEST_ID:
            self._highest = max([0, *(number for marker in markers for number in marker.rows)])
        return markers

    def _open_database(self) -> OutboxDatabase:
        database: Any = super()._open_database()
        if self._job.mutation == NO_LOCK:
            database.hold_table = lambda alone: True
            database.release_table = lambda: None
            database.hold_shard = lambda shard: True
            database.check_held = lambda: None
        delete = database.delete

        def deleted(ids: Any) -> int:
            self._points.reach(DELETING)
            count = delete(ids)
            self._points.reach(DELETED)
            return int(count)

        database.delete = deleted
        return database

    def _open_sender(
        self, name: str, shards: int, shard: int, stopping: threading.Event
    ) -> TransactionalSender:
        sender: Any = super()._open_sender(name, shards, shard, stopping)
        if self._job.mutation == NO_LOCK:
            sender.transactional_id += f"-{os.getpid()}"
            sender.open()
        send, commit, in_hand = sender.send, sender.commit, []

        def sent(rows: Any, markers: Any) -> None:
            in_hand[:] = rows
            send(rows, markers)
            if in_hand:
                self._points.reach(PRODUCED)

        def committed() -> None:
            if in_hand:
                self._points.reach(COMMITTING)
            commit()
            if in_hand:
                self._points.reach(COMMITTED)

        sender.send, sender.commit = sent, committed
        return sender


def main() -> int:
    job = Job(**json.loads(sys.argv[1]))
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    faulthandler.register(signal.SIGUSR1)  # where does it stand?

    def say(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    try:
        ChildRelay(job, say).run(stopping, once=job.once)
    except OutboxError as error:
        say(f"ends: {error}")
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
