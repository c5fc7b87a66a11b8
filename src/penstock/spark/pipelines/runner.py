"""Runs one pipeline or job in this process until it ends, is stopped, or fails for good.

A query that fails is started again after a backoff that grows with every failure in a row. A signal, a stop request in
the status topic, or another runner that takes over stops a run; the runner first waits until the current batch is done.
A run that has an end reports how much it has to read, and how much of that it has read.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from penstock.client.retry import Deadline
from penstock.client.signals import SignalEvent
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import IsolationLevel, TopicPartition
from penstock.client.wire.offsets import EARLIEST, LATEST, committed_offsets, list_offsets
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.backoff import ExponentialBackoff
from penstock.spark.exactly_once.decisions import MicroBatch, SinkError
from penstock.spark.internal_topics import DocumentStore
from penstock.spark.offsets import Position
from penstock.spark.pipelines.checkpoints import checkpoint_path, log_path, refuse_moved_checkpoint
from penstock.spark.pipelines.declaration import Job, JobContext, Pipeline, RunSettings, job_description
from penstock.spark.pipelines.open_transactions import (
    end_open_transactions,
    list_open_transactions,
    sink_queries,
)
from penstock.spark.pipelines.queries import (
    FinishedBatch,
    QueryActivity,
    WatchedQuery,
    error_info,
    is_permanent,
)
from penstock.spark.pipelines.status import (
    ErrorInfo,
    Generation,
    PipelineState,
    PipelineStatus,
    RowCounts,
    RunProgress,
    StatusReporter,
    read_generation,
    read_statuses,
    refuse_second_runner,
)
from penstock.spark.session import LOCAL_MASTER, forget_dead_jvm, is_jvm_dead, is_remote, session

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """A request to stop the run, with its reason."""

    def __init__(self) -> None:
        self._event = SignalEvent()
        self.reason = ""

    @property
    def is_requested(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str) -> None:
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)


class StopNow(BaseException):
    """A second signal: stop without waiting for the current batch."""


@contextmanager
def handle_signals(stopping: StopRequest) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers; `Runner.stop` works in every thread
        return
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    install_signal_handlers(stopping)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def install_signal_handlers(stopping: StopRequest) -> None:
    """Install the signal handlers, also after a session of Spark has replaced the one of SIGINT."""
    if threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, _frame: object) -> None:
        if stopping.is_requested:
            raise StopNow
        stopping.request(signal.Signals(number).name)

    for number in _STOP_SIGNALS:
        # With nohup, SIGHUP is ignored and must stay so.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


_BATCH_LIMIT_OPTION: Final = "maxOffsetsPerTrigger"
#: Large enough that the fixed cost of a batch does not matter, small enough for the memory of any machine.
_BATCH_OFFSETS_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The offsets that a run with an end has to read."""

    starts: Mapping[TopicPartition, int]
    ends: Mapping[TopicPartition, int]

    @classmethod
    def of(cls, cluster: Cluster, pipeline: Pipeline, starting: str | None) -> Backlog:
        """Measure from the committed offsets, or else from the start of the pipeline. Raises Unavailable, Refused."""
        source = pipeline.source
        wanted = re.compile(source.pattern) if source.pattern is not None else source.topics
        partitions = [
            (name, part.index) for name, topic in cluster.topics(wanted).items() for part in topic.partitions
        ]
        ends = _edge_offsets(cluster, partitions, LATEST)
        known = committed_offsets(cluster, pipeline.group, partitions, stable=False) if partitions else {}
        is_latest = (starting or source.starting) == "latest"
        starts = ends if is_latest else _edge_offsets(cluster, partitions, EARLIEST)
        return cls(starts=starts | {tp: at.offset for tp, at in known.items()}, ends=ends)

    @property
    def total(self) -> int:
        return sum(max(end - self.starts.get(tp, end), 0) for tp, end in self.ends.items())

    def progress(self, position: Position) -> RunProgress:
        at = dict(self.starts) | position.offsets
        left = sum(max(end - at.get(tp, end), 0) for tp, end in self.ends.items())
        return RunProgress(done=max(self.total - left, 0), total=self.total)


def _edge_offsets(cluster: Cluster, partitions: list[TopicPartition], edge: int) -> dict[TopicPartition, int]:
    wanted = dict.fromkeys(partitions, edge)
    found = list_offsets(cluster, wanted, isolation=IsolationLevel.READ_COMMITTED) if partitions else {}
    return {tp: at.offset for tp, at in found.items() if at is not None}


def with_batch_limit(pipeline: Pipeline) -> Pipeline:
    """Limit the batches of a run with an end, so that its progress can be seen."""
    options = pipeline.source.options
    if any(name.lower() == _BATCH_LIMIT_OPTION.lower() for name in options):
        return pipeline
    source = replace(pipeline.source, options={**options, _BATCH_LIMIT_OPTION: str(_BATCH_OFFSETS_MAX)})
    return replace(pipeline, source=source)


RESTART_BACKOFF: Final = ExponentialBackoff(base_ms=1_000, cap_ms=60_000)
_POLL_S: Final = 0.25
#: A short pause, so that the runner does not miss the gap between two batches.
_STOP_POLL_S: Final = 0.01
STOP_MS_MAX: Final = 60_000
#: A query without a batch for this long is idle.
_IDLE_AFTER_MS: Final = 2_000
#: The status may be late, so requests for it wait less for brokers than requests for data do.
_STATUS_DEADLINE_MS: Final = 10_000

Start = Callable[[Any, Pipeline, RunSettings], Sequence[Any]]
Listener = Callable[[PipelineStatus], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """How to run a pipeline: the options of the command line."""

    bootstrap: str
    checkpoints: str
    connection: Mapping[str, str] = field(default_factory=dict, repr=False)
    master: str = LOCAL_MASTER
    #: Settings of the Spark session.
    conf: Mapping[str, str] = field(default_factory=dict)
    #: Read what is available now, and end.
    once: bool = False
    #: How often in a row a failed query is started again. None: without limit.
    restarts: int | None = None
    take_over: bool = False

    def cluster(self, *, deadline_ms: int | None = None) -> Cluster:
        """Return a client for the cluster. Raises ClientError."""
        settings = {"client.id": "penstock-pipeline", **self.connection, "bootstrap.servers": self.bootstrap}
        parsed = ConnectionSettings.parse(settings)
        return Cluster(parsed if deadline_ms is None else replace(parsed, retry_deadline_ms=deadline_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    state: PipelineState
    trouble: ErrorInfo | None = None


def _start_queries(spark: Any, pipeline: Pipeline, run: RunSettings) -> Sequence[Any]:
    # This module is also imported by commands that start no query and need no pyspark.
    from penstock.spark.pipelines.assembly import start

    return start(spark, pipeline, run)


class _LastBatch:
    """The speed of a query's last batch, and whether that batch was recent."""

    def __init__(self) -> None:
        self.rows_per_s = 0.0
        self._since = Deadline(0)

    def note(self, done: FinishedBatch) -> None:
        self.rows_per_s, self._since = done.rows_per_s, Deadline(_IDLE_AFTER_MS)

    @property
    def is_recent(self) -> bool:
        return not self._since.is_over


class Runner:
    """Runs one pipeline or job once: in the main thread, or in any other thread with a given session."""

    def __init__(
        self,
        runnable: Pipeline | Job,
        launch: LaunchSettings,
        *,
        listener: Listener,
        note: Callable[[str], None],
        warn: Callable[[str], None] | None = None,
        start: Start = _start_queries,
        chance: random.Random | None = None,
        spark: Any = None,
    ) -> None:
        """A given session belongs to the caller, who may run several pipelines in it. It is not stopped here."""
        self._runnable = runnable
        self._launch = launch
        self._listener = listener
        self._note = note
        self._warn = warn or note
        self._start = start
        self._chance = chance or random.Random()
        self._stop_request = StopRequest()
        self._failures = 0
        self._restarts = 0
        self._spark: Any = spark
        self._is_own_session = spark is None
        self._backlog: Backlog | None = None

    def run(self) -> RunOutcome:
        """Run until the end. Raises ClientError if the run cannot start."""
        with self._launch.cluster(deadline_ms=_STATUS_DEADLINE_MS) as cluster:
            self._begin(DocumentStore(cluster))
        with handle_signals(self._stop_request):
            self._reporter.start()
            self._listener(self._reporter.status)
            try:
                outcome = self._run_with_restarts()
            except StopNow:
                outcome = RunOutcome(state=PipelineState.STOPPED, trouble=_STOPPED_IN_BATCH)
            self._reporter.finish(state=outcome.state, error=outcome.trouble, rows_per_s=0.0)
            self._listener(self._reporter.status)
            self._close(outcome)
        return outcome

    def stop(self, reason: str) -> None:
        """Stop after the current batch. Any thread may call this. It does not wait."""
        self._stop_request.request(reason)

    def _begin(self, store: DocumentStore) -> None:
        name = self._runnable.name
        generation = read_generation(store, name)
        checkpoint = checkpoint_path(self._launch.checkpoints, name, generation.number)
        mine = _initial_status(self._runnable, self._launch, generation, checkpoint)
        if self._launch.take_over:
            before = read_statuses(store).get(name)
        else:
            before = refuse_second_runner(store, mine, now_ms=int(time.time() * 1000))
            refuse_moved_checkpoint(before, mine)
        if before is not None:
            # Keep the old query ids until the new queries run: they identify open transactions.
            mine = replace(mine, queries=before.queries)
            self._release(store.cluster, before)
        self._run_settings = RunSettings(
            bootstrap=self._launch.bootstrap,
            checkpoint=checkpoint,
            connection=self._launch.connection,
            starting=generation.starting,
            master=self._launch.master,
            once=self._launch.once,
        )
        status_cluster = self._launch.cluster(deadline_ms=_STATUS_DEADLINE_MS)
        self._reporter = StatusReporter(status_cluster, mine, on_stop=self._stop_request.request)

    def _release(self, cluster: Cluster, before: PipelineStatus) -> None:
        """End open transactions of the previous run now, so that consumers need not wait until Spark has started."""
        queries = sink_queries(before)
        count = len(list_open_transactions(cluster, queries))
        if not count:
            return
        try:
            end_open_transactions(cluster, queries)
        except SinkError as error:
            self._warn(str(error))  # the query decides, by failOnDataLoss, whether this is an error
        else:
            self._note(f"ended {count} open transactions of the previous run")

    def _close(self, outcome: RunOutcome) -> None:
        """Stop our own Spark session. A Spark Connect server keeps running."""
        is_cut_short = outcome.trouble is _STOPPED_IN_BATCH
        if self._is_own_session and self._spark is not None and not is_cut_short and not forget_dead_jvm():
            self._spark.stop()

    # Restarts

    def _run_with_restarts(self) -> RunOutcome:
        while True:
            try:
                return RunOutcome(state=self._run_once())
            except Exception as error:
                trouble = self._trouble(error)
            if self._stop_request.is_requested:
                return RunOutcome(state=PipelineState.STOPPED)
            if is_permanent(trouble) or self._has_no_restarts_left():
                return RunOutcome(state=PipelineState.FAILED, trouble=trouble)
            self._wait_before_restart(trouble)

    def _trouble(self, error: Exception) -> ErrorInfo:
        if self._spark is None or is_remote(self._launch.master) or not is_jvm_dead():
            return error_info(error)
        log = log_path(self._launch.checkpoints, self._runnable.name)
        return ErrorInfo(kind="SparkFailed", message=f"the JVM of Spark has exited; see {log}")

    def _has_no_restarts_left(self) -> bool:
        limit = self._launch.restarts
        if limit is None and not isinstance(self._runnable, Pipeline):
            limit = 0  # the user who started a job can start it again
        return limit is not None and self._failures >= limit

    def _wait_before_restart(self, trouble: ErrorInfo) -> None:
        delay_ms = RESTART_BACKOFF.delay_ms(self._failures, self._chance)
        self._failures += 1
        self._restarts += 1
        self._reporter.update(
            state=PipelineState.RESTARTING, error=trouble, restarts=self._restarts, rows_per_s=0.0
        )
        self._listener(self._reporter.status)
        self._warn(f"{trouble.kind}: {trouble.message}; restart in {delay_ms / 1000:.0f} s")
        self._stop_request.wait(delay_ms / 1000)

    def _run_once(self) -> PipelineState:
        if self._stop_request.is_requested:
            return PipelineState.STOPPED
        spark = self._session()
        if not isinstance(self._runnable, Pipeline):
            return self._run_job(self._runnable, spark)
        pipeline = self._runnable
        if self._launch.once or pipeline.available_now:
            self._measure(pipeline)
            pipeline = with_batch_limit(pipeline)
        rounds = 1
        while True:
            queries = self._start(spark, pipeline, self._run_settings)
            state = self._watched(queries)
            # A query that reads the output of another query must run again after that one has ended.
            if state is not PipelineState.FINISHED or rounds == len(queries):
                return state
            rounds += 1

    def _measure(self, pipeline: Pipeline) -> None:
        """Measure how much there is to read. A restart continues the same work, so this is done once."""
        if self._backlog is None:
            with self._launch.cluster() as cluster:
                self._backlog = Backlog.of(cluster, pipeline, self._run_settings.starting)
            self._reporter.update(extent=RunProgress(done=0, total=self._backlog.total))
            self._listener(self._reporter.status)

    def _session(self) -> Any:
        """Return the session, or a new one if its JVM has exited."""
        is_ours = not is_remote(self._launch.master)
        if self._spark is not None and is_ours and forget_dead_jvm():
            self._spark = None
        if self._spark is None:
            self._spark = session(
                f"penstock {self._runnable.name}",
                master=self._launch.master,
                settings=self._launch.conf,
                log=log_path(self._launch.checkpoints, self._runnable.name) if is_ours else None,
            )
            if is_ours:
                install_signal_handlers(self._stop_request)
        return self._spark

    # Watching

    def _watched(self, queries: Sequence[Any]) -> PipelineState:
        self._reporter.update(queries=tuple(str(query.id) for query in queries))
        try:
            return self._watch([WatchedQuery(query) for query in queries])
        except Exception:
            for query in queries:
                with suppress(Exception):  # without its JVM, the query has ended too
                    query.stop()
            raise

    def _watch(self, queries: Sequence[WatchedQuery]) -> PipelineState:
        """Watch the queries until they end. The first query reads the source, and its batches are reported."""
        last = _LastBatch()
        while not self._stop_request.wait(_POLL_S):
            activities = [query.activity() for query in queries]
            for query, activity in zip(queries, activities, strict=True):
                if not activity.is_active:
                    query.raise_failure()
            self._report(last, queries[0].new_batches(), activities)
            if not any(activity.is_active for activity in activities):
                return PipelineState.FINISHED
        self._stop(queries)
        return PipelineState.STOPPED

    def _report(
        self, last: _LastBatch, new_batches: Sequence[FinishedBatch], activities: Sequence[QueryActivity]
    ) -> None:
        changes: dict[str, Any] = {}
        for done in new_batches:
            self._count(done)
            last.note(done)
            self._failures = 0
            changes = {"batch": done.batch, "batch_ms": done.batch_ms, "error": None}
            if self._backlog is not None:
                changes["extent"] = self._backlog.progress(done.end)
        if any(activity.is_decided for activity in activities):
            is_busy = last.is_recent or any(activity.is_at_work for activity in activities)
            changes["state"] = PipelineState.RUNNING if is_busy else PipelineState.IDLE
            changes["rows_per_s"] = last.rows_per_s if is_busy else 0.0
        if any(getattr(self._reporter.status, name) != value for name, value in changes.items()):
            self._reporter.update(**changes)
        self._listener(self._reporter.status)

    def _count(self, done: FinishedBatch) -> None:
        """Count the rows of a stateful query, which only Spark knows. Other batches count their own rows."""
        pipeline = self._runnable
        if isinstance(pipeline, Pipeline) and pipeline.stateful and not pipeline.evaluates:
            batch = MicroBatch(done.query, done.batch)
            self._reporter.count(batch, RowCounts(rows_in=done.rows, rows_out=done.rows_out))

    def _stop(self, queries: Sequence[WatchedQuery]) -> None:
        """Stop each query between two of its batches, or after `STOP_MS_MAX` in any case."""
        deadline = Deadline(STOP_MS_MAX)
        left = list(queries)
        has_warned = False
        while left and not deadline.is_over:
            for query in tuple(left):
                activity = query.activity()
                if activity.is_between or not activity.is_active:
                    query.query.stop()
                    left.remove(query)
            if left and not has_warned:
                self._warn(f"stops when its batch is done ({self._stop_request.reason})")
                has_warned = True
            time.sleep(_STOP_POLL_S)
        for query in left:
            self._warn(
                f"a batch is not done after {STOP_MS_MAX / 1000:.0f} s: it is interrupted, and repeated in the next run"
            )
            query.query.stop()

    # Jobs

    def _run_job(self, job: Job, spark: Any) -> PipelineState:
        def progress(done: int, total: int | None) -> None:
            self._reporter.update(extent=RunProgress(done=done, total=total))
            self._listener(self._reporter.status)

        self._reporter.update(state=PipelineState.RUNNING)
        job.run(
            JobContext(
                spark=spark,
                run=self._run_settings,
                progress=progress,
                should_stop=lambda: self._stop_request.is_requested,
                note=self._note,
            )
        )
        return PipelineState.STOPPED if self._stop_request.is_requested else PipelineState.FINISHED


_STOPPED_IN_BATCH: Final = ErrorInfo(
    kind="StopNow", message="stopped in the middle of a batch, which the next run repeats"
)


def _initial_status(
    runnable: Pipeline | Job, launch: LaunchSettings, generation: Generation, checkpoint: str
) -> PipelineStatus:
    mine = PipelineStatus(
        name=runnable.name,
        state=PipelineState.STARTING,
        host=socket.gethostname(),
        pid=os.getpid(),
        master=launch.master,
        generation=generation.number,
        since_ms=int(time.time() * 1000),
    )
    if not isinstance(runnable, Pipeline):
        return replace(mine, source=job_description(runnable))
    return replace(
        mine,
        source=runnable.source.describe(),
        sink=runnable.sink.describe() if runnable.sink is not None else "",
        delivery=runnable.delivery.value,
        group=runnable.group,
        checkpoint=checkpoint,
    )
