"""The demo's pipelines, each with a runner of its own as `penstock pipeline run` has it, in one session of Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.demo.names import SUMMING, Folders
from penstock.demo.pipelines import story
from penstock.spark import register
from penstock.spark.pipelines.declaration import Pipeline
from penstock.spark.pipelines.runner import Launch, Runner
from penstock.spark.pipelines.status import State, Status

_DROPPED: Final = "numDroppedDuplicateRows"
#: How long others wait for the first batch of one.
_HEAD_START_S: Final = 45.0
_AT_WORK: Final = (State.RUNNING, State.IDLE)

Tell = Callable[..., None]


class Queries:
    def __init__(self, spark: Any, bootstrap: str, folders: Folders, tell: Tell) -> None:
        launch = Launch(bootstrap=bootstrap, checkpoints=str(folders.checkpoints), take_over=True)
        self._running = [_Running(spark, pipeline, launch, tell) for pipeline in story(folders)]
        self._lock = threading.Lock()
        self._is_ending = False

    def start(self) -> None:
        """One after the other, so that there is something to see soon: each reads what the first one writes."""
        threading.Thread(target=self._start_each, name="starting", daemon=True).start()

    def _start_each(self) -> None:
        for each in self._running:
            with self._lock:
                if self._is_ending:
                    return
                each.start()
            each.has_begun.wait(_HEAD_START_S)

    def stop(self) -> None:
        """Each between two of its batches."""
        with self._lock:
            self._is_ending = True
        started = [each for each in self._running if each.ident is not None]
        for each in started:
            each.runner.stop("the demo ends")
        for each in started:
            each.join()


class _Running(threading.Thread):
    """One pipeline."""

    def __init__(self, spark: Any, pipeline: Pipeline, launch: Launch, tell: Tell) -> None:
        super().__init__(name=pipeline.name, daemon=True)
        #: Its first batch is done.
        self.has_begun = threading.Event()
        self._spark = spark
        self.runner = Runner(
            pipeline, launch, listener=self._hear, note=self._note, warn=self._warn, spark=spark
        )
        self._tell = tell
        self._told: dict[str, Any] = {}

    def run(self) -> None:
        register(self._spark)
        try:
            trouble = self.runner.run().trouble
            message = None if trouble is None else trouble.message
        except ClientError as error:
            message = str(error)
        if message is not None:
            self._news(is_running=False, trouble=message)
            self._warn(f"has ended: {message}")

    def _hear(self, status: Status) -> None:
        if status.batch is not None:
            self.has_begun.set()
        self._news(
            is_running=status.state in _AT_WORK,
            trouble=None if status.error is None else status.error.message,
            rows=status.rows.rows_in,
            batch_ms=status.batch_ms,
        )

    def _news(self, **facts: Any) -> None:
        if facts != self._told:
            self._told = facts
            self._tell(pipeline=self.name, **facts)

    def _note(self, text: str) -> None:
        self._tell(event=f"{self.name}: {text}")

    def _warn(self, text: str) -> None:
        self._tell(event=f"{self.name}: {text}", is_trouble=True)


class Duplicates:
    """Rows that were left out because they had been there before, counted over all batches."""

    def __init__(self, spark: Any, tell: Tell) -> None:
        self._spark = spark
        self._tell = tell
        self._count = 0
        self._last: dict[str, int] = {}

    def look(self) -> None:
        """Raises what Spark raises."""
        before = self._count
        for query in self._spark.streams.active:
            for told in query.recentProgress:
                if told.batchId > self._last.get(query.runId, -1):
                    self._last[query.runId] = told.batchId
                    self._count += sum(
                        int(operator.customMetrics.get(_DROPPED, 0)) for operator in told.stateOperators
                    )
        if self._count != before:
            self._tell(pipeline=SUMMING, dropped=self._count)
