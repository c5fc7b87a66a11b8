"""The status of a pipeline: where it runs, its progress, its row counts and its lag.

The status is a document in the topic `penstock-pipelines`. `StatusReporter` writes it in a thread of its own, so that a
slow broker never delays a batch. The same thread reads stop requests, and notices if another runner has taken over.

Lag counts the records that a pipeline will read and has not read yet. Offsets also belong to transaction markers, to
records of aborted transactions, and in retry topics to records that other groups retry. What one fetch of a partition
returns is counted record by record; beyond that each offset counts, so that a large lag costs no more to measure than a
small one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final

from penstock.client.deadletters.headers import is_for_group, retry_level
from penstock.client.errors import ClientError, OutOfRange
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.fetch import BatchView, PartitionReader, checked_batches, visible_batches
from penstock.client.wire.metadata import IsolationLevel, TopicPartition
from penstock.client.wire.offsets import LATEST, committed_offsets, list_offsets
from penstock.protocol.record_batch import decode_records
from penstock.spark.at_most_once.task_claims import count_skipped
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.internal_topics import Document, DocumentStore
from penstock.spark.sink.options import Contract

_FETCH_BYTES: Final = 1 << 20
_RECORD_BYTES_MAX: Final = 64 << 20


def group_lag(cluster: Cluster, group: str) -> int | None:
    """Return how many records below the last stable offset the group has not read; None without committed offsets.

    Raises Unavailable, Refused.
    """
    positions = committed_offsets(cluster, group, stable=False)
    existing = cluster.topics({topic for topic, _ in positions})
    known = {tp: at.offset for tp, at in positions.items() if tp[0] in existing}
    if not known:
        return None
    ends = list_offsets(cluster, dict.fromkeys(known, LATEST), isolation=IsolationLevel.READ_COMMITTED)
    unread = {tp: (known[tp], end.offset) for tp, end in ends.items() if end is not None}
    return sum(_count_unread(cluster, group, tp, *each) for tp, each in unread.items() if each[0] < each[1])


def _count_unread(cluster: Cluster, group: str, tp: TopicPartition, start: int, end: int) -> int:
    reader = PartitionReader(
        cluster, tp[0], None, tp[1], isolation=IsolationLevel.READ_COMMITTED, bytes_max=_FETCH_BYTES
    )
    try:
        fetched = reader.fetch(start, wait_ms=0)
    except OutOfRange:
        return end - start  # the records are gone, which the pipeline itself will report
    names_group = retry_level(tp[0]) is not None
    found = 0
    for view in visible_batches(checked_batches(fetched.data), fetched.aborted):
        if names_group or view.header.base_offset < start or view.header.last_offset >= end:
            found += _count_records(view, group if names_group else None, start, end)
        else:
            found += view.header.record_count
    return found + max(end - max(fetched.next_offset, start), 0)


def _count_records(view: BatchView, group: str | None, start: int, end: int) -> int:
    return sum(
        start <= record.offset < end and (group is None or is_for_group(record.headers, group))
        for record in decode_records(view.data, _RECORD_BYTES_MAX)
    )


#: A run whose status has not been updated for this long is lost.
STATUS_AGE_MS_MAX: Final = 15_000
HEARTBEAT_MS: Final = 5_000
#: How many queries of a pipeline the document of row counts keeps. Each generation has new ones.
_QUERIES_MAX: Final = 8


class PipelineState(Enum):
    STARTING = "starting"
    RUNNING = "running"
    #: There is nothing to read at present.
    IDLE = "idle"
    #: Failed, and will start again after a backoff.
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"
    #: A run with an end is complete.
    FINISHED = "finished"
    #: Never written: readers derive it when a status is too old.
    LOST = "lost"

    @property
    def is_over(self) -> bool:
        return self in (
            PipelineState.FAILED,
            PipelineState.STOPPED,
            PipelineState.FINISHED,
            PipelineState.LOST,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows of a batch, or of all batches of a generation."""

    rows_in: int = 0
    rows_out: int = 0
    #: Sent to a retry topic, and to the dead-letter topic.
    retried: int = 0
    dead: int = 0
    #: At-most-once: not delivered again after an attempt that may have failed.
    skipped: int = 0

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(**{name: getattr(self, name) + getattr(other, name) for name in _COUNT_NAMES})

    def to_json(self) -> Document:
        return {key: getattr(self, name) for name, key in _COUNT_NAMES.items()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RowCounts:
        return cls(**{name: int(document.get(key, 0)) for name, key in _COUNT_NAMES.items()})


_COUNT_NAMES: Final = {
    "rows_in": "in",
    "rows_out": "out",
    "retried": "retried",
    "dead": "dead",
    "skipped": "skipped",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """The class and message of an error, as users see them."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How much of a run with an end is done."""

    done: int
    total: int | None
    unit: str = "records"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    name: str
    state: PipelineState
    host: str
    pid: int
    master: str
    source: str = ""
    sink: str = ""
    delivery: str = ""
    group: str | None = None
    generation: int = 1
    checkpoint: str | None = None
    queries: tuple[str, ...] = ()
    #: The last finished batch.
    batch: int | None = None
    batch_ms: int | None = None
    rows_per_s: float | None = None
    #: Records that it will read and has not read yet. None: unknown.
    lag: int | None = None
    extent: RunProgress | None = None
    restarts: int = 0
    error: ErrorInfo | None = None
    #: When it entered this state, and when the status was last written.
    since_ms: int = 0
    updated_ms: int = 0
    #: Stored under its own key, because batches add to it.
    rows: RowCounts = field(default_factory=RowCounts)

    def to_json(self) -> Document:
        """Return the status as users see it. What is stored has no `rows`."""
        return asdict(self) | {
            "state": self.state.value,
            "queries": list(self.queries),
            "rows": self.rows.to_json(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], rows: RowCounts) -> PipelineStatus:
        """Parse a stored status, without fields that a newer version has added."""
        known = {name: document[name] for name in _STATUS_NAMES if name in document}
        extent, error = document.get("extent"), document.get("error")
        return cls(
            **known
            | {
                "state": PipelineState(document["state"]),
                "queries": tuple(document.get("queries", ())),
                "extent": None if extent is None else RunProgress(**extent),
                "error": None if error is None else ErrorInfo(**error),
                "rows": rows,
            }
        )

    def current_state(self, now_ms: int) -> PipelineState:
        """Return the state, or LOST if the status is too old."""
        is_silent = not self.state.is_over and now_ms - self.updated_ms > STATUS_AGE_MS_MAX
        return PipelineState.LOST if is_silent else self.state


_STATE_NAMES: Final = frozenset(each.value for each in PipelineState)
_STATUS_NAMES: Final = frozenset(each.name for each in fields(PipelineStatus))


# Documents. Names of pipelines contain no slash.


def read_statuses(store: DocumentStore) -> dict[str, PipelineStatus]:
    """Return the status of all pipelines by name. Raises Unavailable, Refused."""
    documents = store.read()
    return {
        name: PipelineStatus.from_json(document, _totals(documents.get(_rows_key(name))))
        for name, document in sorted(documents.items())
        if "/" not in name and document.get("state") in _STATE_NAMES
    }


def write_status(store: DocumentStore, status: PipelineStatus) -> None:
    document = status.to_json()
    del document["rows"]
    store.write(status.name, document)


def forget_pipeline(store: DocumentStore, name: str) -> None:
    """Delete all documents of a pipeline."""
    for key in (name, _rows_key(name), _stop_request_key(name), _generation_key(name)):
        if key in store.read():
            store.write(key, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A reset starts another generation of a pipeline, with another checkpoint and another start."""

    number: int = 1
    #: As the option startingOffsets. None: as the pipeline declares.
    starting: str | None = None


def read_generation(store: DocumentStore, name: str) -> Generation:
    found = store.read().get(_generation_key(name))
    if found is None:
        return Generation()
    return Generation(number=int(found["generation"]), starting=found.get("starting"))


def write_generation(store: DocumentStore, name: str, generation: Generation) -> None:
    """Start a generation. The row counts of the previous one are dropped."""
    store.write(_rows_key(name), {"totals": RowCounts().to_json(), "batches": {}})
    store.write(_generation_key(name), {"generation": generation.number, "starting": generation.starting})


def read_stop_request(store: DocumentStore, name: str) -> str | None:
    """Return the id of the last stop request. A runner ignores the one that it found when it started."""
    found = store.read().get(_stop_request_key(name))
    return None if found is None else str(found.get("stop"))


def request_stop(store: DocumentStore, name: str, request_id: str) -> None:
    store.write(_stop_request_key(name), {"stop": request_id})


# Row counts

_STORES: weakref.WeakKeyDictionary[Cluster, DocumentStore] = weakref.WeakKeyDictionary()


def add_counts(cluster: Cluster, name: str, batch: MicroBatch, counts: RowCounts) -> RowCounts:
    """Add the counts of a finished batch, and return the totals. A repeated batch adds nothing.

    Raises Unavailable, Refused.
    """
    store = _STORES.setdefault(cluster, DocumentStore(cluster))
    found = store.read().get(_rows_key(name))
    totals, last = _totals(found), dict(found["batches"] if found is not None else {})
    if last.get(batch.query, -1) >= batch.number:
        return totals
    totals += counts
    last.pop(batch.query, None)
    last[batch.query] = batch.number
    kept = dict(list(last.items())[-_QUERIES_MAX:])
    store.write(_rows_key(name), {"totals": totals.to_json(), "batches": kept})
    return totals


def _totals(document: Mapping[str, Any] | None) -> RowCounts:
    return RowCounts() if document is None else RowCounts.from_json(document["totals"])


def _rows_key(name: str) -> str:
    return f"{name}/rows"


def _stop_request_key(name: str) -> str:
    return f"{name}/wish"  # the key that earlier versions have written


def _generation_key(name: str) -> str:
    return f"{name}/generation"


# Lag


def with_lag(cluster: Cluster, status: PipelineStatus) -> PipelineStatus:
    """Add what brokers know: the lag, and the skipped records. Raises Unavailable, Refused."""
    group, rows = status.group, status.rows
    if group is None:
        return status
    if status.delivery == Contract.AT_MOST_ONCE.value:
        rows = replace(rows, skipped=count_skipped(cluster, group))
    return replace(status, lag=group_lag(cluster, group), rows=rows)


_LOG: Final = logging.getLogger("penstock.spark")
_REPORT_EVERY_S: Final = 0.5
#: Measuring the lag takes two requests to brokers.
_LAG_EVERY_MS: Final = 2_000
_LAST_REPORT_WAIT_S: Final = 15.0


class RunningAlready(ClientError):
    """The pipeline is running elsewhere."""


def refuse_second_runner(store: DocumentStore, mine: PipelineStatus, *, now_ms: int) -> PipelineStatus | None:
    """Return the last status of the pipeline. Raises RunningAlready if another runner still updates it."""
    found = read_statuses(store).get(mine.name)
    if found is None or found.current_state(now_ms).is_over or _is_dead_on_this_host(found, mine):
        return found
    age_s = max(now_ms - found.updated_ms, 0) / 1000
    raise RunningAlready(
        f"{mine.name} is already running on {found.host} (process {found.pid}), updated {age_s:.0f} s ago"
    )


def _is_dead_on_this_host(found: PipelineStatus, mine: PipelineStatus) -> bool:
    """Return whether the runner was killed on this host, so that there is no need to wait until its status expires."""
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


class StatusReporter:
    """Writes the status between `start` and `finish`. Any thread may call `update`, which never waits for brokers."""

    def __init__(
        self,
        cluster: Cluster,
        status: PipelineStatus,
        *,
        on_stop: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = DocumentStore(cluster)
        self._cluster = cluster
        self._status = status
        self._on_stop = on_stop
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self._is_replaced = False
        self._request_id: str | None = None
        self._written: PipelineStatus | None = None
        self._lag_age = Deadline(0)
        self._counted: deque[tuple[MicroBatch, RowCounts]] = deque()
        self._thread = threading.Thread(target=self._run, name="status-reporter", daemon=True)

    @property
    def status(self) -> PipelineStatus:
        with self._lock:
            return self._status

    def start(self) -> None:
        """Write the first status before this returns, so that the caller sees errors. Raises Unavailable, Refused."""
        self._request_id = read_stop_request(self._store, self._status.name)
        self._touch()
        self._write()
        self._thread.start()

    def update(self, **changes: Any) -> None:
        with self._lock:
            self._change(changes)
        self._wake.set()

    def count(self, batch: MicroBatch, counts: RowCounts) -> None:
        """Add row counts, for a pipeline whose batches do not count their rows."""
        self._counted.append((batch, counts))
        self._wake.set()

    def finish(self, **changes: Any) -> None:
        """Write the last status, and wait until it is written."""
        with self._lock:
            self._change(changes)
            self._is_closing = True
        self._wake.set()
        self._thread.join(_LAST_REPORT_WAIT_S)

    def _change(self, changes: dict[str, Any]) -> None:
        before = self._status
        self._status = replace(before, **changes)
        if self._status.state is not before.state:
            self._status = replace(self._status, since_ms=self._now_ms())

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    # In the reporter thread

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(_REPORT_EVERY_S)
            self._wake.clear()
            self._try(self._report_once)
        if not self._is_replaced:
            self._try(self._report_last)
        self._store.close()
        self._cluster.close()

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ClientError as trouble:
            _LOG.warning("the status of %s could not be written: %s", self._status.name, trouble)

    def _report_once(self) -> None:
        self._flush_counts()
        self._read_requests()
        if self._is_replaced:
            return
        if self._lag_age.is_over:
            self._measure()
        status, now_ms = self.status, self._now_ms()
        if (
            self._written is None
            or _has_changed(status, self._written)
            or now_ms - status.updated_ms >= HEARTBEAT_MS
        ):
            self._touch()
            self._write()

    def _report_last(self) -> None:
        self._flush_counts()
        self._read_requests()
        self._measure()
        self._touch()
        self._write()

    def _flush_counts(self) -> None:
        while self._counted:
            add_counts(self._cluster, self._status.name, *self._counted[0])
            self._counted.popleft()

    def _read_requests(self) -> None:
        name = self._status.name
        found = read_statuses(self._store).get(name)
        request_id = read_stop_request(self._store, name)
        if request_id != self._request_id:
            self._request_id = request_id
            self._on_stop("stop request")
        if found is None:
            return
        with self._lock:
            rows = replace(found.rows, skipped=self._status.rows.skipped)
            self._status = replace(self._status, rows=rows)
        is_another = (found.host, found.pid) != (self._status.host, self._status.pid)
        if is_another and not found.state.is_over and self._written is not None:
            self._is_replaced = True
            self._on_stop(f"another runner on {found.host} (process {found.pid}) has taken over")

    def _measure(self) -> None:
        self._lag_age = Deadline(_LAG_EVERY_MS)
        found = with_lag(self._cluster, self.status)
        with self._lock:
            self._status = replace(self._status, lag=found.lag, rows=found.rows)

    def _touch(self) -> None:
        with self._lock:
            self._status = replace(self._status, updated_ms=self._now_ms())

    def _write(self) -> None:
        status = self.status
        write_status(self._store, status)
        self._written = status


def _has_changed(status: PipelineStatus, written: PipelineStatus) -> bool:
    """Return whether there is more to write than the time of the update. Row counts are stored elsewhere."""
    return replace(status, updated_ms=0, rows=written.rows) != replace(written, updated_ms=0)
