"""The status of a pipeline: who runs it, how far it has come, what it has counted, and its lag.

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
    """Records up to the last stable offset that the group has not read; None while it has no positions.

    Raises Unavailable, Refused.
    """
    positions = committed_offsets(cluster, group, stable=False)
    there = cluster.topics({topic for topic, _ in positions})
    known = {place: at.offset for place, at in positions.items() if place[0] in there}
    if not known:
        return None
    ends = list_offsets(cluster, dict.fromkeys(known, LATEST), isolation=IsolationLevel.READ_COMMITTED)
    unread = {place: (known[place], end.offset) for place, end in ends.items() if end is not None}
    return sum(
        _count_unread(cluster, group, place, *each) for place, each in unread.items() if each[0] < each[1]
    )


def _count_unread(cluster: Cluster, group: str, place: TopicPartition, start: int, end: int) -> int:
    reader = PartitionReader(
        cluster, place[0], None, place[1], isolation=IsolationLevel.READ_COMMITTED, bytes_max=_FETCH_BYTES
    )
    try:
        fetched = reader.fetch(start, wait_ms=0)
    except OutOfRange:
        return end - start  # its position is gone, and the pipeline will say so
    names_group = retry_level(place[0]) is not None
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


#: Who has not been heard of for so long is gone.
STATUS_AGE_MS_MAX: Final = 15_000
HEARTBEAT_MS: Final = 5_000
#: Queries of a pipeline whose last batch is remembered; each generation has new ones.
_QUERIES_MAX: Final = 8


class PipelineState(Enum):
    STARTING = "starting"
    RUNNING = "running"
    #: Nothing to read at present.
    IDLE = "idle"
    #: Failed, and waits before it is tried again.
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"
    #: It had an end, and has come to it.
    FINISHED = "finished"
    #: Never written: who should have told how it is does not tell any more.
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
    #: Sent to a retry topic, and to the dead letters.
    retried: int = 0
    dead: int = 0
    #: Not given again to who may have seen them: at-most-once.
    skipped: int = 0

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(**{name: getattr(self, name) + getattr(other, name) for name in _COUNT_NAMES})

    def to_json(self) -> Document:
        return {told: getattr(self, name) for name, told in _COUNT_NAMES.items()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RowCounts:
        return cls(**{name: int(document.get(told, 0)) for name, told in _COUNT_NAMES.items()})


_COUNT_NAMES: Final = {
    "rows_in": "in",
    "rows_out": "out",
    "retried": "retried",
    "dead": "dead",
    "skipped": "skipped",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """An error as people are told of it."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Of something that has an end: how much of it is done."""

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
    #: The last one that is finished.
    batch: int | None = None
    batch_ms: int | None = None
    rows_per_s: float | None = None
    #: Records that it will read and has not read yet; None while nobody knows.
    lag: int | None = None
    extent: RunProgress | None = None
    restarts: int = 0
    error: ErrorInfo | None = None
    #: In this state, and heard of.
    since_ms: int = 0
    updated_ms: int = 0
    #: Kept under a key of its own, where the batches add to it.
    rows: RowCounts = field(default_factory=RowCounts)

    def to_json(self) -> Document:
        """As it is shown; without `rows` it is what is written on the board."""
        return asdict(self) | {
            "state": self.state.value,
            "queries": list(self.queries),
            "rows": self.rows.to_json(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], rows: RowCounts) -> PipelineStatus:
        """What a newer version has added is left out."""
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

    def seen(self, now_ms: int) -> PipelineState:
        """The state that it must be in by now."""
        is_silent = not self.state.is_over and now_ms - self.updated_ms > STATUS_AGE_MS_MAX
        return PipelineState.LOST if is_silent else self.state


_STATE_NAMES: Final = frozenset(each.value for each in PipelineState)
_STATUS_NAMES: Final = frozenset(each.name for each in fields(PipelineStatus))


# On the board. Names of pipelines have no slash.


def read_statuses(store: DocumentStore) -> dict[str, PipelineStatus]:
    """Of all pipelines, by name. Raises Unavailable, Refused."""
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
    """Take all that is known of a pipeline from the board."""
    for key in (name, _rows_key(name), _stop_request_key(name), _generation_key(name)):
        if key in store.read():
            store.write(key, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A pipeline begins anew with each: another checkpoint, another place to begin at."""

    number: int = 1
    #: As `startingOffsets` takes it; None: where the pipeline itself says.
    starting: str | None = None


def read_generation(store: DocumentStore, name: str) -> Generation:
    found = store.read().get(_generation_key(name))
    if found is None:
        return Generation()
    return Generation(number=int(found["generation"]), starting=found.get("starting"))


def write_generation(store: DocumentStore, name: str, generation: Generation) -> None:
    """What was counted belongs to the generation before."""
    store.write(_rows_key(name), {"totals": RowCounts().to_json(), "batches": {}})
    store.write(_generation_key(name), {"generation": generation.number, "starting": generation.starting})


def read_stop_request(store: DocumentStore, name: str) -> str | None:
    """The id of the last one, which whoever has seen it before has fulfilled."""
    found = store.read().get(_stop_request_key(name))
    return None if found is None else str(found.get("stop"))


def request_stop(store: DocumentStore, name: str, request_id: str) -> None:
    store.write(_stop_request_key(name), {"stop": request_id})


# Counting

_STORES: weakref.WeakKeyDictionary[Cluster, DocumentStore] = weakref.WeakKeyDictionary()


def add_counts(cluster: Cluster, name: str, batch: MicroBatch, counts: RowCounts) -> RowCounts:
    """At the end of a batch; one that is done again adds nothing. Returns the totals. Raises Unavailable, Refused."""
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
    return f"{name}/wish"


def _generation_key(name: str) -> str:
    return f"{name}/generation"


# Lag


def with_lag(cluster: Cluster, status: PipelineStatus) -> PipelineStatus:
    """With what the brokers know of it at this moment. Raises Unavailable, Refused."""
    group, rows = status.group, status.rows
    if group is None:
        return status
    if status.delivery == Contract.AT_MOST_ONCE.value:
        rows = replace(rows, skipped=count_skipped(cluster, group))
    return replace(status, lag=group_lag(cluster, group), rows=rows)


_LOG: Final = logging.getLogger("penstock.spark")
_REPORT_EVERY_S: Final = 0.5
#: The lag costs two questions to brokers.
_LAG_EVERY_MS: Final = 2_000
_LAST_REPORT_WAIT_S: Final = 15.0


class RunningAlready(ClientError):
    """The same pipeline runs somewhere else."""


def refuse_second_runner(store: DocumentStore, mine: PipelineStatus, *, now_ms: int) -> PipelineStatus | None:
    """What was last known of the pipeline. Raises RunningAlready while another runner tells of it."""
    found = read_statuses(store).get(mine.name)
    if found is None or found.seen(now_ms).is_over or _is_dead_on_this_host(found, mine):
        return found
    age_s = max(now_ms - found.updated_ms, 0) / 1000
    raise RunningAlready(
        f"{mine.name} runs already on {found.host} (process {found.pid}), which told so {age_s:.0f} s ago"
    )


def _is_dead_on_this_host(found: PipelineStatus, mine: PipelineStatus) -> bool:
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


class StatusReporter:
    """Between `start` and `finish`. `tell` may be called by any thread, and never waits for brokers."""

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
        self._is_overtaken = False
        self._request_id: str | None = None
        self._written: PipelineStatus | None = None
        self._lag_age = Deadline(0)
        self._counted: deque[tuple[MicroBatch, RowCounts]] = deque()
        self._thread = threading.Thread(target=self._run, name="herald", daemon=True)

    @property
    def status(self) -> PipelineStatus:
        with self._lock:
            return self._status

    def start(self) -> None:
        """The first word is the caller's: whoever cannot reach the board should know. Raises Unavailable, Refused."""
        self._request_id = read_stop_request(self._store, self._status.name)
        self._touch()
        self._write()
        self._thread.start()

    def tell(self, **changes: Any) -> None:
        with self._lock:
            self._change(changes)
        self._wake.set()

    def count(self, batch: MicroBatch, counts: RowCounts) -> None:
        """For a pipeline whose batches do not count themselves."""
        self._counted.append((batch, counts))
        self._wake.set()

    def finish(self, **changes: Any) -> None:
        """The last word, which is waited for."""
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

    # In the thread

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(_REPORT_EVERY_S)
            self._wake.clear()
            self._try(self._report_once)
        if not self._is_overtaken:
            self._try(self._report_last)
        self._store.close()
        self._cluster.close()

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ClientError as trouble:
            _LOG.warning("the board does not show how %s is: %s", self._status.name, trouble)

    def _report_once(self) -> None:
        self._flush_counts()
        self._read_requests()
        if self._is_overtaken:
            return
        if self._lag_age.is_over:
            self._measure()
        told, now_ms = self.status, self._now_ms()
        if (
            self._written is None
            or _has_changed(told, self._written)
            or now_ms - told.updated_ms >= HEARTBEAT_MS
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
        found = with_lag(self._cluster, self.status)
        with self._lock:
            self._status = replace(self._status, lag=found.lag, rows=found.rows)

    def _touch(self) -> None:
        with self._lock:
            self._status = replace(self._status, updated_ms=self._now_ms())

    def _write(self) -> None:
        told = self.status
        write_status(self._store, told)
        self._written = told


def _has_changed(told: PipelineStatus, written: PipelineStatus) -> bool:
    """Whether there is news, other than that somebody is still there and what is kept elsewhere."""
    return replace(told, updated_ms=0, rows=written.rows) != replace(written, updated_ms=0)
