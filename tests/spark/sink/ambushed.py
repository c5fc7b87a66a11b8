"""A data source like `penstock`, except that a process dies when a point is reached for the n-th time.

Options: `ambush` is `point:n`. `ambushFile` is the file in which all processes count together. `ambushKills` is whether
to kill the whole session of processes, including the JVM, or only the process that reached the point.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from pyspark.sql.datasource import DataSourceStreamArrowWriter

from penstock.client.wire.producer import RawProducer
from penstock.spark.at_most_once.offset_claims import OffsetClaims
from penstock.spark.datasource import PenstockDataSource
from penstock.spark.exactly_once import two_phase_commit
from penstock.spark.exactly_once.decisions import DecisionLog
from penstock.spark.sink import writers
from penstock.spark.source import task
from penstock.spark.source.stream import StreamPlan, StreamReader

NAME = "penstock_ambushed"
OPTIONS = ("ambush", "ambushfile", "ambushkills")
#: Point -> the function there, and whether the process dies before or after it. Readers reach these points.
READER_POINTS: dict[str, tuple[Any, str, str]] = {
    "before planning": (StreamPlan, "next_end", "before"),
    "after planning": (StreamPlan, "tasks", "after"),
    "before the claim": (OffsetClaims, "claim", "before"),
    "in the claim": (OffsetClaims, "_write", "after"),
    "after the claim": (OffsetClaims, "claim", "after"),
    "task claimed": (task, "claim_task", "after"),
}
#: Writers reach these points.
WRITER_POINTS: dict[str, tuple[Any, str, str]] = {
    "task begun": (writers, "_send", "before"),
    "task prepared": (RawProducer, "prepare", "after"),
    "before the decision": (DecisionLog, "decide", "before"),
    "in the decision": (RawProducer, "commit_offsets", "after"),
    "after the decision": (DecisionLog, "decide", "after"),
    "between two commits": (two_phase_commit, "end_prepared_transaction", "after"),
    "before undecided transactions are aborted": (two_phase_commit, "abort_undecided", "before"),
}
POINTS = {**READER_POINTS, **WRITER_POINTS}
#: The commit has returned, and Spark has not recorded it in the checkpoint yet.
AFTER_COMMIT = "before the checkpoint"


class Ambush:
    def __init__(self, options: Any) -> None:
        point, _, number = options.get("ambush", "").partition(":")
        self.point, self.number = point, int(number or 0)
        self.file = options.get("ambushfile", "")
        self.kills = options.get("ambushkills", "false") == "true"

    def come(self) -> None:
        """Count, and die if this is the n-th time in all processes."""
        with open(self.file, "ab") as counter:
            counter.write(b".")
            counter.flush()
            is_time = os.fstat(counter.fileno()).st_size == self.number
        if is_time:
            Path(self.file + ".sprung").touch()
            self._die()

    def _die(self) -> None:
        if self.kills:
            kill_session(os.getsid(0))
        os._exit(9)

    @contextmanager
    def laid(self, points: dict[str, tuple[Any, str, str]]) -> Iterator[None]:
        with ExitStack() as stack:
            if self.point in points:
                owner, name, when = points[self.point]
                stack.enter_context(mock.patch.object(owner, name, self._around(getattr(owner, name), when)))
            yield

    def _around(self, real: Callable[..., Any], when: str) -> Callable[..., Any]:
        def ambushed(*args: Any, **kwargs: Any) -> Any:
            if when == "before":
                self.come()
            result = real(*args, **kwargs)
            if when == "after":
                self.come()
            return result

        return ambushed


def kill_session(session: int) -> None:
    """Kill all processes of the session, this one last: a driver with its JVM, its executors and its workers."""
    mine = os.getpid()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            if int(fields[3]) == session and pid != mine:
                os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            continue
    if os.getsid(0) == session:
        os.kill(mine, signal.SIGKILL)


class AmbushedWriter(DataSourceStreamArrowWriter):
    def __init__(self, ambush: Ambush, real: Any) -> None:
        self.ambush, self.real = ambush, real

    def write(self, iterator: Any) -> Any:
        with self.ambush.laid(WRITER_POINTS):
            return self.real.write(iterator)

    def commit(self, messages: Any, batchId: int) -> None:
        with self.ambush.laid(WRITER_POINTS):
            self.real.commit(messages, batchId)
        if self.ambush.point == AFTER_COMMIT:
            self.ambush.come()

    def abort(self, messages: Any, batchId: int) -> None:
        self.real.abort(messages, batchId)


class AmbushedReader(StreamReader):
    """Tasks die in `read`. For planning, the data source sets the ambush in the process that plans."""

    def __init__(self, ambush: Ambush, real: StreamReader) -> None:
        super().__init__(real.options, real.projection)
        self.ambush = ambush

    def read(self, partition: Any) -> Iterator[Any]:
        with self.ambush.laid(READER_POINTS):
            yield from super().read(partition)


#: Held until this process ends, because it serves one reader.
_LAID = ExitStack()


class AmbushedDataSource(PenstockDataSource):
    @classmethod
    def name(cls) -> str:
        return NAME

    def _real(self) -> PenstockDataSource:
        return PenstockDataSource({k: v for k, v in self.options.items() if k.lower() not in OPTIONS})

    def streamWriter(self, schema: Any, overwrite: bool) -> AmbushedWriter:
        return AmbushedWriter(Ambush(self.options), self._real().streamWriter(schema, overwrite))

    def streamReader(self, schema: Any) -> Any:
        ambush = Ambush(self.options)
        if ambush.point in READER_POINTS:
            _LAID.enter_context(ambush.laid(READER_POINTS))
        return AmbushedReader(ambush, self._real().streamReader(schema))


assert sys.platform == "linux", "sessions are found in /proc"
