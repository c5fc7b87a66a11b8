"""What there is to see at one moment, as values: the view draws it, and knows nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.demo.tally import Letter, Sale


class Kind(Enum):
    SHOP = "shop"
    TOPIC = "topic"
    SUBSCRIBER = "subscriber"
    SPARK = "spark"
    TABLE = "table"
    TROUBLE = "trouble"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One thing that records flow into, below what they come from."""

    name: str
    #: How deep it stands, and whether it is the last of its neighbours, for itself and for all that it stands below.
    last: tuple[bool, ...]
    kind: Kind
    note: str
    per_s: float | None = None
    history: tuple[float, ...] = ()
    total: int | None = None
    #: Only readers have one.
    lag: int | None = None
    trouble: str | None = None


class Health(Enum):
    ABSENT = "absent"
    STARTING = "starting"
    UP = "up"
    TROUBLED = "troubled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at_s: float
    text: str
    is_trouble: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    now_s: float  # since the start
    address: str
    data: str
    broker: Health
    spark: Health
    #: What to know of Spark in a few words.
    spark_note: str
    flows: tuple[Flow, ...]
    sales: tuple[Sale, ...]
    letter: Letter | None
    letters: int
    replayed: int
    duplicates_dropped: int
    events: tuple[Event, ...]
