"""How a pipeline is, as it stands on the board: who runs it, how far it has come, what it has counted."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final

from penstock.client.cluster import Cluster
from penstock.spark.decisions import MicroBatch
from penstock.spark.pipelines.board import Board, Document
from penstock.spark.pipelines.lag import lag_of
from penstock.spark.sink_options import Contract
from penstock.spark.tickets import skipped

#: Who has not been heard of for so long is gone.
FRESH_MS: Final = 15_000
HEARTBEAT_MS: Final = 5_000
#: Queries of a pipeline whose last batch is remembered; each generation has new ones.
_QUERIES_MAX: Final = 8


class State(Enum):
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
        return self in (State.FAILED, State.STOPPED, State.FINISHED, State.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Rows of a batch, or of all batches of a generation."""

    rows_in: int = 0
    rows_out: int = 0
    #: Sent to a retry topic, and to the dead letters.
    retried: int = 0
    dead: int = 0
    #: Not given again to who may have seen them: at-most-once.
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in _COUNT_NAMES})

    def to_json(self) -> Document:
        return {told: getattr(self, name) for name, told in _COUNT_NAMES.items()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Counts:
        return cls(**{name: int(document.get(told, 0)) for name, told in _COUNT_NAMES.items()})


_COUNT_NAMES: Final = {
    "rows_in": "in",
    "rows_out": "out",
    "retried": "retried",
    "dead": "dead",
    "skipped": "skipped",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """An error as people are told of it."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Of something that has an end: how much of it is done."""

    done: int
    total: int | None
    unit: str = "records"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    name: str
    state: State
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
    extent: Extent | None = None
    restarts: int = 0
    error: Trouble | None = None
    #: In this state, and heard of.
    since_ms: int = 0
    updated_ms: int = 0
    #: Kept under a key of its own, where the batches add to it.
    rows: Counts = field(default_factory=Counts)

    def to_json(self) -> Document:
        """As it is shown; without `rows` it is what is written on the board."""
        return asdict(self) | {
            "state": self.state.value,
            "queries": list(self.queries),
            "rows": self.rows.to_json(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], rows: Counts) -> Status:
        """What a newer version has added is left out."""
        known = {name: document[name] for name in _STATUS_NAMES if name in document}
        extent, error = document.get("extent"), document.get("error")
        return cls(
            **known
            | {
                "state": State(document["state"]),
                "queries": tuple(document.get("queries", ())),
                "extent": None if extent is None else Extent(**extent),
                "error": None if error is None else Trouble(**error),
                "rows": rows,
            }
        )

    def seen(self, now_ms: int) -> State:
        """The state that it must be in by now."""
        is_silent = not self.state.is_over and now_ms - self.updated_ms > FRESH_MS
        return State.LOST if is_silent else self.state


_STATES: Final = frozenset(each.value for each in State)
_STATUS_NAMES: Final = frozenset(each.name for each in fields(Status))


# On the board. Names of pipelines have no slash.


def statuses(board: Board) -> dict[str, Status]:
    """Of all pipelines, by name. Raises Unavailable, Refused."""
    documents = board.read()
    return {
        name: Status.from_json(document, _totals(documents.get(_rows_key(name))))
        for name, document in sorted(documents.items())
        if "/" not in name and document.get("state") in _STATES
    }


def write_status(board: Board, status: Status) -> None:
    document = status.to_json()
    del document["rows"]
    board.write(status.name, document)


def forget(board: Board, name: str) -> None:
    """Take all that is known of a pipeline from the board."""
    for key in (name, _rows_key(name), _wish_key(name), _generation_key(name)):
        if key in board.read():
            board.write(key, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A pipeline begins anew with each: another checkpoint, another place to begin at."""

    number: int = 1
    #: As `startingOffsets` takes it; None: where the pipeline itself says.
    starting: str | None = None


def generation_of(board: Board, name: str) -> Generation:
    found = board.read().get(_generation_key(name))
    if found is None:
        return Generation()
    return Generation(number=int(found["generation"]), starting=found.get("starting"))


def write_generation(board: Board, name: str, generation: Generation) -> None:
    """What was counted belongs to the generation before."""
    board.write(_rows_key(name), {"totals": Counts().to_json(), "batches": {}})
    board.write(_generation_key(name), {"generation": generation.number, "starting": generation.starting})


def stop_wish(board: Board, name: str) -> str | None:
    """The id of the last one, which whoever has seen it before has fulfilled."""
    found = board.read().get(_wish_key(name))
    return None if found is None else str(found.get("stop"))


def wish_stop(board: Board, name: str, wish_id: str) -> None:
    board.write(_wish_key(name), {"stop": wish_id})


# Counting

_BOARDS: weakref.WeakKeyDictionary[Cluster, Board] = weakref.WeakKeyDictionary()


def add_counts(cluster: Cluster, name: str, batch: MicroBatch, counts: Counts) -> Counts:
    """At the end of a batch; one that is done again adds nothing. Returns the totals. Raises Unavailable, Refused."""
    board = _BOARDS.setdefault(cluster, Board(cluster))
    found = board.read().get(_rows_key(name))
    totals, last = _totals(found), dict(found["batches"] if found is not None else {})
    if last.get(batch.query, -1) >= batch.number:
        return totals
    totals += counts
    last.pop(batch.query, None)
    last[batch.query] = batch.number
    kept = dict(list(last.items())[-_QUERIES_MAX:])
    board.write(_rows_key(name), {"totals": totals.to_json(), "batches": kept})
    return totals


def _totals(document: Mapping[str, Any] | None) -> Counts:
    return Counts() if document is None else Counts.from_json(document["totals"])


def _rows_key(name: str) -> str:
    return f"{name}/rows"


def _wish_key(name: str) -> str:
    return f"{name}/wish"


def _generation_key(name: str) -> str:
    return f"{name}/generation"


# Lag


def measured(cluster: Cluster, status: Status) -> Status:
    """With what the brokers know of it at this moment. Raises Unavailable, Refused."""
    group, rows = status.group, status.rows
    if group is None:
        return status
    if status.delivery == Contract.AT_MOST_ONCE.value:
        rows = replace(rows, skipped=skipped(cluster, group))
    return replace(status, lag=lag_of(cluster, group), rows=rows)
