"""Runs one pipeline or job in this process until it ends, is stopped, or fails for good.

A query that fails is started again after a rest that grows with every failure in a row. Who stops a pipeline waits
until the batch that is under way is done.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from penstock.client.cluster import Cluster
from penstock.client.retrying import Backoff, Deadline
from penstock.client.settings import ConnectionSettings
from penstock.spark.pipelines import watching
from penstock.spark.pipelines.backlog import Backlog
from penstock.spark.pipelines.board import Board
from penstock.spark.pipelines.declaration import Pipeline
from penstock.spark.pipelines.jobs import Job, JobContext, description
from penstock.spark.pipelines.places import checkpoint_of, log_of, refuse_moved
from penstock.spark.pipelines.settings import RunSettings
from penstock.spark.pipelines.status import Extent, Generation, State, Status, Trouble, generation_of
from penstock.spark.pipelines.telling import Herald, refuse_second
from penstock.spark.session import LOCAL, forget_dead, is_remote, session

RESTARTS: Final = Backoff(base_ms=1_000, cap_ms=60_000)
_LOOK_S: Final = 0.25
#: Who waits for the gap between two batches must not miss it.
_GAP_LOOK_S: Final = 0.01
STOP_MS_MAX: Final = 60_000
#: So long after its last batch a query counts as at work.
_IDLE_AFTER_MS: Final = 2_000
#: The board is for those who watch, and waits for no broker as long as the data does.
_BOARD_PATIENCE_MS: Final = 10_000

Start = Callable[[Any, Pipeline, RunSettings], Sequence[Any]]
Listener = Callable[[Status], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What whoever runs a pipeline decides."""

    bootstrap: str
    checkpoints: str
    connection: Mapping[str, str] = field(default_factory=dict, repr=False)
    master: str = LOCAL
    #: Settings of Spark.
    conf: Mapping[str, str] = field(default_factory=dict)
    #: Read what is there now, and end.
    once: bool = False
    #: How often in a row a query that fails is started again; None: always.
    restarts: int | None = None
    take_over: bool = False

    def cluster(self, *, patience_ms: int | None = None) -> Cluster:
        """Raises ClientError."""
        settings = {"client.id": "penstock-pipeline", **self.connection, "bootstrap.servers": self.bootstrap}
        parsed = ConnectionSettings.parse(settings)
        return Cluster(parsed if patience_ms is None else replace(parsed, retry_deadline_ms=patience_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    state: State
    trouble: Trouble | None = None


class Stopping:
    """Somebody wants it to end, and why."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""

    @property
    def is_wanted(self) -> bool:
        return self._event.is_set()

    def want(self, reason: str) -> None:
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)


class StopNow(BaseException):
    """A second signal: not even the batch is waited for."""


def _assembled(spark: Any, pipeline: Pipeline, run: RunSettings) -> Sequence[Any]:
    from penstock.spark.pipelines.assembly import start

    return start(spark, pipeline, run)


class Runner:
    """Of one pipeline or job, once: in the main thread, or in any other with a session that is given."""

    def __init__(
        self,
        runnable: Pipeline | Job,
        launch: Launch,
        *,
        listener: Listener,
        note: Callable[[str], None],
        start: Start = _assembled,
        chance: random.Random | None = None,
        spark: Any = None,
    ) -> None:
        """A session that is given is the caller's, who may run several pipelines in it, and is not ended here."""
        self._runnable = runnable
        self._launch = launch
        self._listener = listener
        self._note = note
        self._start = start
        self._chance = chance or random.Random()
        self._stopping = Stopping()
        self._failures = 0
        self._restarts = 0
        self._spark: Any = spark
        self._is_own_session = spark is None
        self._backlog: Backlog | None = None

    def run(self) -> Outcome:
        """Raises ClientError for what keeps it from even beginning."""
        with self._launch.cluster(patience_ms=_BOARD_PATIENCE_MS) as cluster:
            self._begin(Board(cluster))
        with _signals(self._stopping):
            self._herald.start()
            try:
                outcome = self._persist()
            except StopNow:
                outcome = Outcome(state=State.STOPPED, trouble=_CUT_SHORT)
            self._herald.finish(state=outcome.state, error=outcome.trouble, rows_per_s=0.0)
            self._listener(self._herald.status)
            self._close(outcome)
        return outcome

    def stop(self, reason: str) -> None:
        """Between two batches; may be called by any thread, and does not wait for the end."""
        self._stopping.want(reason)

    def _begin(self, board: Board) -> None:
        name = self._runnable.name
        generation = generation_of(board, name)
        checkpoint = checkpoint_of(self._launch.checkpoints, name, generation.number)
        mine = _first_status(self._runnable, self._launch, generation, checkpoint)
        if not self._launch.take_over:
            before = refuse_second(board, mine, now_ms=int(time.time() * 1000))
            refuse_moved(before, mine)
        self._run_settings = RunSettings(
            bootstrap=self._launch.bootstrap,
            checkpoint=checkpoint,
            connection=self._launch.connection,
            starting=generation.starting,
            master=self._launch.master,
            once=self._launch.once,
        )
        telling = self._launch.cluster(patience_ms=_BOARD_PATIENCE_MS)
        self._herald = Herald(telling, mine, on_stop=self._stopping.want)

    def _close(self, outcome: Outcome) -> None:
        """A server of Spark Connect goes on without us; a Spark of our own ends."""
        is_cut_short = outcome.trouble is _CUT_SHORT
        if self._is_own_session and self._spark is not None and not is_cut_short and not forget_dead():
            self._spark.stop()

    # Again and again

    def _persist(self) -> Outcome:
        while True:
            try:
                return Outcome(state=self._run_once())
            except Exception as error:
                trouble = watching.trouble_of(error)
            if self._stopping.is_wanted:
                return Outcome(state=State.STOPPED)
            if watching.is_lasting(trouble) or self._is_enough():
                return Outcome(state=State.FAILED, trouble=trouble)
            self._rest(trouble)

    def _is_enough(self) -> bool:
        limit = self._launch.restarts
        if limit is None and not isinstance(self._runnable, Pipeline):
            limit = 0  # whoever started a job is there to start it again
        return limit is not None and self._failures >= limit

    def _rest(self, trouble: Trouble) -> None:
        delay_ms = RESTARTS.delay_ms(self._failures, self._chance)
        self._failures += 1
        self._restarts += 1
        self._herald.tell(state=State.RESTARTING, error=trouble, restarts=self._restarts, rows_per_s=0.0)
        self._listener(self._herald.status)
        self._note(f"{trouble.kind}: {trouble.message}; starts again in {delay_ms / 1000:.0f} s")
        self._stopping.wait(delay_ms / 1000)

    def _run_once(self) -> State:
        if self._stopping.is_wanted:
            return State.STOPPED
        spark = self._session()
        if not isinstance(self._runnable, Pipeline):
            return self._run_job(self._runnable, spark)
        if self._backlog is None and (self._launch.once or self._runnable.available_now):
            with self._launch.cluster() as cluster:
                self._backlog = Backlog.of(cluster, self._runnable, self._run_settings.starting)
        queries = self._start(spark, self._runnable, self._run_settings)
        self._herald.tell(queries=tuple(str(query.id) for query in queries))
        try:
            return self._watch(queries)
        except Exception:
            for query in queries:
                query.stop()
            raise

    def _session(self) -> Any:
        """One that is there is used again, unless its JVM is gone."""
        is_ours = not is_remote(self._launch.master)
        if self._spark is not None and is_ours and forget_dead():
            self._spark = None
        if self._spark is None:
            self._spark = session(
                f"penstock {self._runnable.name}",
                master=self._launch.master,
                settings=self._launch.conf,
                log=log_of(self._launch.checkpoints, self._runnable.name) if is_ours else None,
            )
            if is_ours:
                _take_signals_back(self._stopping)
        return self._spark

    # Watching

    def _watch(self, queries: Sequence[Any]) -> State:
        last_ms: dict[int, int] = {}
        while not self._stopping.wait(_LOOK_S):
            looks = [watching.look(query) for query in queries]
            self._tell(queries, looks, last_ms)
            for query, seen in zip(queries, looks, strict=True):
                if not seen.is_active:
                    watching.refuse_failed(query)
            if not any(seen.is_active for seen in looks):
                return State.FINISHED
        self._stop(queries)
        return State.STOPPED

    def _tell(self, queries: Sequence[Any], looks: Sequence[watching.Look], last_ms: dict[int, int]) -> None:
        """The first query is the one that reads the source; its batches are those that people count."""
        now_ms, changes = int(time.time() * 1000), dict[str, Any]()
        done = watching.finished(queries[0])
        if done is not None and done.batch not in last_ms:
            last_ms.clear()
            last_ms[done.batch] = now_ms
            self._failures = 0
            changes = {"batch": done.batch, "batch_ms": done.batch_ms, "error": None}
            if self._backlog is not None:
                changes["extent"] = self._backlog.extent(done.end)
        is_recent = any(now_ms - at_ms < _IDLE_AFTER_MS for at_ms in last_ms.values())
        is_at_work = any(seen.is_at_work for seen in looks)
        changes["state"] = State.RUNNING if is_recent or is_at_work else State.IDLE
        changes["rows_per_s"] = done.rows_per_s if done is not None and (is_recent or is_at_work) else 0.0
        if any(getattr(self._herald.status, name) != value for name, value in changes.items()):
            self._herald.tell(**changes)
        self._listener(self._herald.status)

    def _stop(self, queries: Sequence[Any]) -> None:
        """Each between two of its batches, or after a minute wherever it is."""
        deadline = Deadline(STOP_MS_MAX)
        left = list(queries)
        while left and not deadline.is_over:
            for query in tuple(left):
                seen = watching.look(query)
                if seen.is_between or not seen.is_active:
                    query.stop()
                    left.remove(query)
            time.sleep(_GAP_LOOK_S)
        for query in left:
            self._note(
                f"a batch is not done after {STOP_MS_MAX / 1000:.0f} s; it is left, and done again next time"
            )
            query.stop()

    # Jobs

    def _run_job(self, job: Job, spark: Any) -> State:
        def progress(done: int, total: int | None) -> None:
            self._herald.tell(extent=Extent(done=done, total=total))
            self._listener(self._herald.status)

        self._herald.tell(state=State.RUNNING)
        job.run(
            JobContext(
                spark=spark,
                run=self._run_settings,
                progress=progress,
                should_stop=lambda: self._stopping.is_wanted,
                note=self._note,
            )
        )
        return State.STOPPED if self._stopping.is_wanted else State.FINISHED


_CUT_SHORT: Final = Trouble(
    kind="StopNow", message="stopped in the middle of a batch, which is done again next time"
)


def _first_status(
    runnable: Pipeline | Job, launch: Launch, generation: Generation, checkpoint: str
) -> Status:
    mine = Status(
        name=runnable.name,
        state=State.STARTING,
        host=socket.gethostname(),
        pid=os.getpid(),
        master=launch.master,
        generation=generation.number,
        since_ms=int(time.time() * 1000),
    )
    if not isinstance(runnable, Pipeline):
        return replace(mine, source=description(runnable))
    return replace(
        mine,
        source=runnable.source.describe(),
        sink=runnable.sink.describe() if runnable.sink is not None else "",
        delivery=runnable.delivery.value,
        group=runnable.group,
        checkpoint=checkpoint,
    )


# Signals


@contextmanager
def _signals(stopping: Stopping) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # who runs several in one process stops them in another way
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    _take_signals_back(stopping)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _take_signals_back(stopping: Stopping) -> None:
    """A session of Spark takes Ctrl-C for itself."""
    if threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, _frame: object) -> None:
        if stopping.is_wanted:
            raise StopNow
        stopping.want(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
