"""Runs one pipeline or job in this process until it ends, is stopped, or fails for good.

A query that fails is started again after a rest that grows with every failure in a row. Who stops a pipeline waits
until the batch that is under way is done.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from penstock.client.cluster import Cluster
from penstock.client.retrying import Backoff, Deadline
from penstock.client.settings import ConnectionSettings
from penstock.spark.decisions import MicroBatch, SinkError
from penstock.spark.pipelines.backlog import Backlog, in_steps
from penstock.spark.pipelines.board import Board
from penstock.spark.pipelines.declaration import Pipeline
from penstock.spark.pipelines.jobs import Job, JobContext, description
from penstock.spark.pipelines.leftovers import left_open, release, sink_queries
from penstock.spark.pipelines.places import checkpoint_of, log_of, refuse_moved
from penstock.spark.pipelines.settings import RunSettings
from penstock.spark.pipelines.status import (
    Counts,
    Extent,
    Generation,
    State,
    Status,
    Trouble,
    generation_of,
    statuses,
)
from penstock.spark.pipelines.stopping import StopNow, Stopping, signals_of, take_signals
from penstock.spark.pipelines.telling import Herald, refuse_second
from penstock.spark.pipelines.watching import Finished, Look, Watched, is_lasting, trouble_of
from penstock.spark.session import LOCAL, forget_dead, is_dead, is_remote, session

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


def _assembled(spark: Any, pipeline: Pipeline, run: RunSettings) -> Sequence[Any]:
    from penstock.spark.pipelines.assembly import start

    return start(spark, pipeline, run)


class _LastBatch:
    """Of a query that is watched: how fast it was, and whether that was just now."""

    def __init__(self) -> None:
        self.rows_per_s = 0.0
        self._since = Deadline(0)

    def note(self, done: Finished) -> None:
        self.rows_per_s, self._since = done.rows_per_s, Deadline(_IDLE_AFTER_MS)

    @property
    def is_recent(self) -> bool:
        return not self._since.is_over


class Runner:
    """Of one pipeline or job, once: in the main thread, or in any other with a session that is given."""

    def __init__(
        self,
        runnable: Pipeline | Job,
        launch: Launch,
        *,
        listener: Listener,
        note: Callable[[str], None],
        warn: Callable[[str], None] | None = None,
        start: Start = _assembled,
        chance: random.Random | None = None,
        spark: Any = None,
    ) -> None:
        """A session that is given is the caller's, who may run several pipelines in it, and is not ended here."""
        self._runnable = runnable
        self._launch = launch
        self._listener = listener
        self._note = note
        self._warn = warn or note
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
        with signals_of(self._stopping):
            self._herald.start()
            self._listener(self._herald.status)
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
        if self._launch.take_over:
            before = statuses(board).get(name)
        else:
            before = refuse_second(board, mine, now_ms=int(time.time() * 1000))
            refuse_moved(before, mine)
        if before is not None:
            # Until its queries run again, these are what `release` knows it by.
            mine = replace(mine, queries=before.queries)
            self._release(board.cluster, before)
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

    def _release(self, cluster: Cluster, before: Status) -> None:
        """Whoever waits for what it had left open need not wait until Spark has started."""
        queries = sink_queries(before)
        count = len(left_open(cluster, queries))
        if not count:
            return
        try:
            release(cluster, queries)
        except SinkError as error:
            self._warn(str(error))  # whether that may be is for the query to say, by failOnDataLoss
        else:
            self._note(f"ended {count} open transactions of the run before")

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
                trouble = self._trouble(error)
            if self._stopping.is_wanted:
                return Outcome(state=State.STOPPED)
            if is_lasting(trouble) or self._is_enough():
                return Outcome(state=State.FAILED, trouble=trouble)
            self._rest(trouble)

    def _trouble(self, error: Exception) -> Trouble:
        if self._spark is None or is_remote(self._launch.master) or not is_dead():
            return trouble_of(error)
        log = log_of(self._launch.checkpoints, self._runnable.name)
        return Trouble(
            kind="SparkFailed", message=f"Spark's own process has ended; its last words are in {log}"
        )

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
        self._warn(f"{trouble.kind}: {trouble.message}; starts again in {delay_ms / 1000:.0f} s")
        self._stopping.wait(delay_ms / 1000)

    def _run_once(self) -> State:
        if self._stopping.is_wanted:
            return State.STOPPED
        spark = self._session()
        if not isinstance(self._runnable, Pipeline):
            return self._run_job(self._runnable, spark)
        pipeline = self._runnable
        if self._launch.once or pipeline.available_now:
            self._measure(pipeline)
            pipeline = in_steps(pipeline)
        rounds = 1
        while True:
            queries = self._start(spark, pipeline, self._run_settings)
            state = self._watched(queries)
            # A query that reads what another one writes has come to its end once that one has.
            if state is not State.FINISHED or rounds == len(queries):
                return state
            rounds += 1

    def _measure(self, pipeline: Pipeline) -> None:
        """How much there is to read, once: what comes after a failure is still the same work."""
        if self._backlog is None:
            with self._launch.cluster() as cluster:
                self._backlog = Backlog.of(cluster, pipeline, self._run_settings.starting)
            self._herald.tell(extent=Extent(done=0, total=self._backlog.total))
            self._listener(self._herald.status)

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
                take_signals(self._stopping)
        return self._spark

    # Watching

    def _watched(self, queries: Sequence[Any]) -> State:
        self._herald.tell(queries=tuple(str(query.id) for query in queries))
        try:
            return self._watch([Watched(query) for query in queries])
        except Exception:
            for query in queries:
                with suppress(Exception):  # where Spark itself is gone, they are too
                    query.stop()
            raise

    def _watch(self, queries: Sequence[Watched]) -> State:
        """The first query is the one that reads the source; its batches are those that people count."""
        last = _LastBatch()
        while not self._stopping.wait(_LOOK_S):
            looks = [query.look() for query in queries]
            for query, seen in zip(queries, looks, strict=True):
                if not seen.is_active:
                    query.refuse_failed()
            self._tell(last, queries[0].news(), looks)
            if not any(seen.is_active for seen in looks):
                return State.FINISHED
        self._stop(queries)
        return State.STOPPED

    def _tell(self, last: _LastBatch, news: Sequence[Finished], looks: Sequence[Look]) -> None:
        changes: dict[str, Any] = {}
        for done in news:
            self._count(done)
            last.note(done)
            self._failures = 0
            changes = {"batch": done.batch, "batch_ms": done.batch_ms, "error": None}
            if self._backlog is not None:
                changes["extent"] = self._backlog.extent(done.end)
        if any(seen.is_decided for seen in looks):
            is_busy = last.is_recent or any(seen.is_at_work for seen in looks)
            changes["state"] = State.RUNNING if is_busy else State.IDLE
            changes["rows_per_s"] = last.rows_per_s if is_busy else 0.0
        if any(getattr(self._herald.status, name) != value for name, value in changes.items()):
            self._herald.tell(**changes)
        self._listener(self._herald.status)

    def _count(self, done: Finished) -> None:
        """Batches count their rows themselves, except where Spark alone knows them."""
        pipeline = self._runnable
        if isinstance(pipeline, Pipeline) and pipeline.stateful and not pipeline.evaluates:
            batch = MicroBatch(done.query, done.batch)
            self._herald.count(batch, Counts(rows_in=done.rows, rows_out=done.rows_out))

    def _stop(self, queries: Sequence[Watched]) -> None:
        """Each between two of its batches, or after a minute wherever it is."""
        deadline = Deadline(STOP_MS_MAX)
        left = list(queries)
        is_told = False
        while left and not deadline.is_over:
            for query in tuple(left):
                seen = query.look()
                if seen.is_between or not seen.is_active:
                    query.query.stop()
                    left.remove(query)
            if left and not is_told:
                self._warn(f"stops when its batch is done ({self._stopping.reason})")
                is_told = True
            time.sleep(_GAP_LOOK_S)
        for query in left:
            self._warn(
                f"a batch is not done after {STOP_MS_MAX / 1000:.0f} s: it is left, and done again next time"
            )
            query.query.stop()

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
