"""The demo's Spark, in its own process: one session for all pipelines, and for replays when they are requested.

Each pipeline has its own runner, as in `penstock pipeline run`. Repaired dead letters are replayed to their original
topic, each once, while everything else continues. The rows of the archive are counted in the table itself. The process
reports to its parent, one JSON document per line, and ends on SIGTERM or when its stdin ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.client.signals import SignalEvent
from penstock.demo.access import BrokerAccess
from penstock.demo.names import DEAD_LETTERS, REVENUE_PIPELINE, Folders
from penstock.demo.pipelines import NoPrice, demo_pipelines
from penstock.demo.processes import REPLAY_COMMAND
from penstock.spark import register
from penstock.spark.pipelines.declaration import JobContext, Pipeline, RunSettings
from penstock.spark.pipelines.queries import error_info
from penstock.spark.pipelines.runner import LaunchSettings, Runner
from penstock.spark.pipelines.status import PipelineState, PipelineStatus
from penstock.spark.replay import replay
from penstock.spark.session import LOCAL_MASTER, session


class ArchiveCounter:
    def __init__(self, table: Path, report: Callable[..., None]) -> None:
        self._path = table
        self._report = report
        self._table: Any = None
        self._version = -1

    def look(self) -> None:
        """Raises the errors of the deltalake library."""
        from deltalake import DeltaTable

        if self._table is None:
            if not DeltaTable.is_deltatable(str(self._path)):
                return
            self._table = DeltaTable(str(self._path))
        self._table.update_incremental()
        if self._table.version() != self._version:
            self._version = self._table.version()
            self._report(archived=self._table.count())


_DROPPED_METRIC: Final = "numDroppedDuplicateRows"
#: How long the next pipeline waits for the first batch of the one before.
_FIRST_BATCH_WAIT_S: Final = 45.0
_ACTIVE_STATES: Final = (PipelineState.RUNNING, PipelineState.IDLE)

Report = Callable[..., None]


class PipelineThreads:
    def __init__(self, spark: Any, access: BrokerAccess, folders: Folders, report: Report) -> None:
        launch = LaunchSettings(
            bootstrap=access.bootstrap,
            checkpoints=str(folders.checkpoints),
            take_over=True,
            connection=access.security,
        )
        self._running = [
            _PipelineThread(spark, pipeline, launch, report) for pipeline in demo_pipelines(folders)
        ]
        self._lock = threading.Lock()
        self._is_ending = False

    def start(self) -> None:
        """Starts one after the other, so that results appear soon: the others read what the first one writes."""
        threading.Thread(target=self._start_each, name="starting", daemon=True).start()

    def _start_each(self) -> None:
        for each in self._running:
            with self._lock:
                if self._is_ending:
                    return
                each.start()
            each.has_begun.wait(_FIRST_BATCH_WAIT_S)

    def stop(self) -> None:
        """Stops each pipeline between two of its batches."""
        with self._lock:
            self._is_ending = True
        started = [each for each in self._running if each.ident is not None]
        for each in started:
            each.runner.stop("the demo ends")
        for each in started:
            each.join()


class _PipelineThread(threading.Thread):
    """Runs one pipeline."""

    def __init__(self, spark: Any, pipeline: Pipeline, launch: LaunchSettings, report: Report) -> None:
        super().__init__(name=pipeline.name, daemon=True)
        #: Set when its first batch is done.
        self.has_begun = threading.Event()
        self._spark = spark
        self.runner = Runner(
            pipeline, launch, listener=self._on_status, note=self._note, warn=self._warn, spark=spark
        )
        self._report = report
        self._reported: dict[str, Any] = {}

    def run(self) -> None:
        register(self._spark)
        try:
            trouble = self.runner.run().trouble
            message = None if trouble is None else trouble.message
        except ClientError as error:
            message = str(error)
        if message is not None:
            self._report_changes(is_running=False, trouble=message)
            self._warn(f"has ended: {message}")

    def _on_status(self, status: PipelineStatus) -> None:
        if status.batch is not None:
            self.has_begun.set()
        self._report_changes(
            is_running=status.state in _ACTIVE_STATES,
            trouble=None if status.error is None else status.error.message,
            rows=status.rows.rows_in,
            batch_ms=status.batch_ms,
        )

    def _report_changes(self, **facts: Any) -> None:
        if facts != self._reported:
            self._reported = facts
            self._report(pipeline=self.name, **facts)

    def _note(self, text: str) -> None:
        self._report(event=f"{self.name}: {text}")

    def _warn(self, text: str) -> None:
        self._report(event=f"{self.name}: {text}", is_trouble=True)


class DuplicateCounter:
    """Counts the rows that the pipeline dropped as duplicates, over all batches."""

    def __init__(self, spark: Any, report: Report) -> None:
        self._spark = spark
        self._report = report
        self._count = 0
        self._last: dict[str, int] = {}

    def look(self) -> None:
        """Raises the errors of Spark."""
        before = self._count
        for query in self._spark.streams.active:
            for progress in query.recentProgress:
                if progress.batchId > self._last.get(query.runId, -1):
                    self._last[query.runId] = progress.batchId
                    self._count += sum(
                        int(operator.customMetrics.get(_DROPPED_METRIC, 0))
                        for operator in progress.stateOperators
                    )
        if self._count != before:
            self._report(pipeline=REVENUE_PIPELINE, dropped=self._count)


#: Dead letters that a price has repaired; records that cannot be parsed stay where they are.
_REPAIRED: Final = f"error_class like '%{NoPrice.__name__}'"


class Replayer:
    """Runs one replay at a time."""

    def __init__(
        self, spark: Any, access: BrokerAccess, report: Callable[..., None], wants_end: threading.Event
    ) -> None:
        self._spark = spark
        self._run = RunSettings(bootstrap=access.bootstrap, checkpoint="", connection=access.security)
        self._report = report
        self._wants_end = wants_end
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._report(is_replaying=True)
            self._thread = threading.Thread(target=self._replay, name="replay")
            self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _replay(self) -> None:
        job = replay(letters=DEAD_LETTERS, where=_REPAIRED, id=f"demo-{int(time.time() * 1000)}")
        context = JobContext(
            spark=self._spark,
            run=self._run,
            progress=lambda done, total: None,
            should_stop=self._wants_end.is_set,
            note=lambda text: self._report(event=f"replay: {text.partition(': ')[2]}"),
        )
        try:
            register(self._spark)
            job.run(context)
        except Exception as error:
            self._report(event=f"replay: {error_info(error).message}", is_trouble=True)
        finally:
            self._report(is_replaying=False)


_POLL_S: Final = 1.0
#: Little data comes in, and three queries share the machine with everything else.
_SPARK_SETTINGS: Final = {
    "spark.driver.memory": "1g",
    # Halves the time to the first batch on a small machine: nothing runs long enough to repay the second JIT compiler.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "WARN",
}


class ParentProcess:
    """The process that started this one: it receives reports, and may request a replay or a stop."""

    def __init__(self) -> None:
        # Output of libraries and of the JVM goes to the log, so that only reports reach the parent.
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._lock = threading.Lock()
        self.wants_end = SignalEvent()
        self.wants_replay = threading.Event()
        self._is_ready = False

    def report(self, **facts: Any) -> None:
        try:
            with self._lock:
                print(json.dumps(facts), file=self._out, flush=True)
        except OSError:
            self.wants_end.set()

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def is_ready(self) -> None:
        """From now on, a stop request shuts Spark down cleanly instead of exiting at once."""
        self._is_ready = True

    def _read(self) -> None:
        for line in sys.stdin:
            if line.strip() == REPLAY_COMMAND:
                self.wants_replay.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_ready:
            os._exit(0)  # nothing runs yet, and the start of Java would take too long to wait for
        self.wants_end.set()


def main(words: dict[str, Any]) -> int:
    parent = ParentProcess()
    parent.listen()
    parent.report(event="Spark is starting, which takes some seconds; everything else flows already")
    folders = Folders(root=Path(words["data"]))
    access = BrokerAccess(bootstrap=words["bootstrap"], properties=words["properties"])
    spark = session("penstock-demo", master=LOCAL_MASTER, settings=_SPARK_SETTINGS)
    java = spark.sparkContext._gateway.proc
    parent.is_ready()
    parent.report(is_up=True, event="Spark is up")
    queries = PipelineThreads(spark, access, folders, parent.report)
    queries.start()
    replayer = Replayer(spark, access, parent.report, parent.wants_end)
    watched = (DuplicateCounter(spark, parent.report), ArchiveCounter(folders.archive, parent.report))
    try:
        while not parent.wants_end.wait(_POLL_S):
            if java.poll() is not None:
                os._exit(1)  # without Java there is nothing to stop cleanly; the parent restarts this process
            for each in watched:
                _log_errors(each.look)
            if parent.wants_replay.is_set():
                parent.wants_replay.clear()
                replayer.begin()
    finally:
        replayer.join()
        queries.stop()
        spark.stop()
    return 0


def _log_errors(look: Callable[[], None]) -> None:
    """Logs errors of a counter: it is only for display, and must not stop the pipelines."""
    try:
        look()
    except Exception:
        logging.getLogger("penstock.demo").exception("looking")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
