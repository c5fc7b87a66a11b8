"""What the lives of a campaign are told: which contract, where, what breaks it on purpose, and where they end."""

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

AT_MOST_ONCE, AT_LEAST_ONCE = "at-most-once", "at-least-once"
EFFECTIVELY_ONCE, CLAIMED = "effectively-once", "effectively-once with a connection"
EXACTLY_ONCE, LEDGERED = "exactly-once", "exactly-once with a ledger"
CONTRACTS = (AT_MOST_ONCE, AT_LEAST_ONCE, EFFECTIVELY_ONCE, CLAIMED, EXACTLY_ONCE, LEDGERED)
#: Their results are rows of a database.
WITH_ROWS = (CLAIMED, LEDGERED)

INLINE, THREADS, TASKS, BATCHES, ORDERED = "inline", "threads", "tasks", "batches", "ordered"
#: How handlers are run, where the contract allows it.
SHAPES = {
    AT_MOST_ONCE: (INLINE, THREADS, BATCHES, TASKS),
    AT_LEAST_ONCE: (INLINE, ORDERED, THREADS, BATCHES, TASKS),
    EFFECTIVELY_ONCE: (INLINE, THREADS, TASKS),
    CLAIMED: (INLINE, THREADS),
    EXACTLY_ONCE: (INLINE, THREADS, BATCHES, TASKS),
    LEDGERED: (INLINE,),
}
KILL, FREEZE = "kill", "freeze"
CLASSIC, CONSUMER = "classic", "consumer"

PARTITIONS = 2
KEYS = 8  # of each partition
ATTEMPTS = 3
TAKEN_MAX = 12
IN_FLIGHT_MAX = 30
SESSION_MS = 1_000
#: Where nothing is killed, a starved machine must not end a session: the next member would rightly repeat messages.
CALM_SESSION_MS = 30_000
TRANSACTION_MS = 2_500  # librdkafka wants it to be no less than what it waits for an answer


class Trap(NamedTuple):
    """Which passage of a point kills the process, or suspends it until it is resumed."""

    point: str
    passage: int
    action: str = KILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One life of one member."""

    servers: str
    slot: str
    topic: str
    contract: str
    shape: str
    journal: str
    log: str
    #: Of results, marks or positions.
    database: str
    fails: bool
    protocol: str = CLASSIC
    #: A static member, whose heir need not wait for the end of its session.
    instance: str | None = None
    trap: Trap | None = None
    #: So many messages, and it ends as an operator would end it.
    stops_after: int | None = None
    mutation: str | None = None
    #: Whether it lives in a round in which nothing is killed.
    is_calm: bool = False

    @property
    def session_ms(self) -> int:
        """Of members of the classic protocol that are not static."""
        return CALM_SESSION_MS if self.is_calm else SESSION_MS

    @property
    def group(self) -> str:
        return f"{self.topic}-group"

    @property
    def target(self) -> str:
        return f"{self.topic}-target"

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Job":
        given = json.loads(text)
        trap = given.pop("trap")
        return cls(**given, trap=Trap(*trap) if trap else None)


class Place(NamedTuple):
    topic: str
    partition: int
    offset: int


def place_of(number: int, topic: str) -> Place:
    """Where a message is first: nothing but messages is in the topic, and each of them once."""
    return Place(topic, number % PARTITIONS, number // PARTITIONS)


def key_of(number: int) -> bytes:
    return b"%d" % (number % (PARTITIONS * KEYS))


def id_of(number: int, topic: str) -> str:
    """Every other message has an id of its own; the others are known by their place."""
    return f"m{number}" if has_id(number) else ":".join(map(str, place_of(number, topic)))


def has_id(number: int) -> bool:
    return number // PARTITIONS % 2 == 0


def is_poison(number: int) -> bool:
    """It fails whenever it is tried."""
    return number % 29 == 11


def is_slow_starter(number: int) -> bool:
    """It fails when it is tried for the first time."""
    return number % 7 == 3


def fails(number: int, attempt: int) -> bool:
    return is_poison(number) or (is_slow_starter(number) and attempt == 1)


def ends_dead(number: int, job_fails: bool, contract: str) -> bool:
    """Whether it must end in the dead-letter topic."""
    if not job_fails:
        return False
    return fails(number, 1) if contract == AT_MOST_ONCE else is_poison(number)
