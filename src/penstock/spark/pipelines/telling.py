"""Who tells the board how a run is, in a thread of its own, so that a slow broker never holds up a batch.

The same thread hears what others wish of the run, and whether another runner has taken it over.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError
from penstock.client.retrying import Deadline
from penstock.spark.decisions import MicroBatch
from penstock.spark.pipelines.board import Board
from penstock.spark.pipelines.status import (
    HEARTBEAT_MS,
    Counts,
    Status,
    add_counts,
    measured,
    statuses,
    stop_wish,
    write_status,
)

_LOG: Final = logging.getLogger("penstock.spark")
_PAUSE_S: Final = 0.5
#: The lag costs two questions to brokers.
_LAG_EVERY_MS: Final = 2_000
_LAST_WORDS_S: Final = 15.0


class RunningAlready(ClientError):
    """The same pipeline runs somewhere else."""


def refuse_second(board: Board, mine: Status, *, now_ms: int) -> Status | None:
    """What was last known of the pipeline. Raises RunningAlready while another runner tells of it."""
    found = statuses(board).get(mine.name)
    if found is None or found.seen(now_ms).is_over or _is_dead_here(found, mine):
        return found
    age_s = max(now_ms - found.updated_ms, 0) / 1000
    raise RunningAlready(
        f"{mine.name} runs already on {found.host} (process {found.pid}), which told so {age_s:.0f} s ago"
    )


def _is_dead_here(found: Status, mine: Status) -> bool:
    """Killed on this very machine, so that nobody need wait for it to fall silent."""
    if found.host != mine.host:
        return False
    if found.pid == mine.pid:
        return True
    try:
        os.kill(found.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


class Herald:
    """Between `start` and `finish`. `tell` may be called by any thread, and never waits for brokers."""

    def __init__(
        self,
        cluster: Cluster,
        status: Status,
        *,
        on_stop: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._board = Board(cluster)
        self._cluster = cluster
        self._status = status
        self._on_stop = on_stop
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self._is_overtaken = False
        self._wish: str | None = None
        self._written: Status | None = None
        self._lag_age = Deadline(0)
        self._counted: deque[tuple[MicroBatch, Counts]] = deque()
        self._thread = threading.Thread(target=self._run, name="herald", daemon=True)

    @property
    def status(self) -> Status:
        with self._lock:
            return self._status

    def start(self) -> None:
        """The first word is the caller's: whoever cannot reach the board should know. Raises Unavailable, Refused."""
        self._wish = stop_wish(self._board, self._status.name)
        self._touch()
        self._write()
        self._thread.start()

    def tell(self, **changes: Any) -> None:
        with self._lock:
            self._change(changes)
        self._wake.set()

    def count(self, batch: MicroBatch, counts: Counts) -> None:
        """For a pipeline whose batches do not count themselves."""
        self._counted.append((batch, counts))
        self._wake.set()

    def finish(self, **changes: Any) -> None:
        """The last word, which is waited for."""
        with self._lock:
            self._change(changes)
            self._is_closing = True
        self._wake.set()
        self._thread.join(_LAST_WORDS_S)

    def _change(self, changes: dict[str, Any]) -> None:
        before = self._status
        self._status = replace(before, **changes)
        if self._status.state is not before.state:
            self._status = replace(self._status, since_ms=self._now_ms())

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    # In the thread

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(_PAUSE_S)
            self._wake.clear()
            self._try(self._turn)
        if not self._is_overtaken:
            self._try(self._last_turn)
        self._board.close()
        self._cluster.close()

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ClientError as trouble:
            _LOG.warning("the board does not show how %s is: %s", self._status.name, trouble)

    def _turn(self) -> None:
        self._add_up()
        self._hear()
        if self._is_overtaken:
            return
        if self._lag_age.is_over:
            self._measure()
        told, now_ms = self.status, self._now_ms()
        if self._written is None or _differs(told, self._written) or now_ms - told.updated_ms >= HEARTBEAT_MS:
            self._touch()
            self._write()

    def _last_turn(self) -> None:
        self._add_up()
        self._hear()
        self._measure()
        self._touch()
        self._write()

    def _add_up(self) -> None:
        while self._counted:
            add_counts(self._cluster, self._status.name, *self._counted[0])
            self._counted.popleft()

    def _hear(self) -> None:
        name = self._status.name
        found = statuses(self._board).get(name)
        wish = stop_wish(self._board, name)
        if wish != self._wish:
            self._wish = wish
            self._on_stop("somebody wished it")
        if found is None:
            return
        with self._lock:
            rows = replace(found.rows, skipped=self._status.rows.skipped)
            self._status = replace(self._status, rows=rows)
        is_another = (found.host, found.pid) != (self._status.host, self._status.pid)
        if is_another and not found.state.is_over and self._written is not None:
            self._is_overtaken = True
            self._on_stop(f"another runner on {found.host} (process {found.pid}) has taken it over")

    def _measure(self) -> None:
        self._lag_age = Deadline(_LAG_EVERY_MS)
        found = measured(self._cluster, self.status)
        with self._lock:
            self._status = replace(self._status, lag=found.lag, rows=found.rows)

    def _touch(self) -> None:
        with self._lock:
            self._status = replace(self._status, updated_ms=self._now_ms())

    def _write(self) -> None:
        told = self.status
        write_status(self._board, told)
        self._written = told


def _differs(told: Status, written: Status) -> bool:
    """Whether there is news, other than that somebody is still there and what is kept elsewhere."""
    return replace(told, updated_ms=0, rows=written.rows) != replace(written, updated_ms=0)
