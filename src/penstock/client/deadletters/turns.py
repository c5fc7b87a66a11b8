"""Whose turn it is to write to the list of letters that are done with: one at a time, on Spark or without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError, Fenced
from penstock.client.producing import RawProducer

#: Two who begin at the same moment may both have to begin again.
_ATTEMPTS_MAX: Final = 5
#: A transaction holds what is sent at once, and is never left open while anybody rests.
_TIMEOUT_MS: Final = 60_000


class Overtaken(ClientError):
    """Somebody else has the turn by now. Nothing is lost and nothing is twice; what is left can be done anew."""


class Turn(Protocol):
    @property
    def name(self) -> str:
        """The transactional id under which the list is written."""

    def take(self) -> None:
        """Nobody who had it before can go on with anything. Raises Unavailable, Refused, what its settling raises."""

    def check(self) -> None:
        """Raises Overtaken where somebody took it since."""


def turn_query(topic: str) -> str:
    """By which replays on Spark of the letters of a topic know each other."""
    return f"letters-{topic}"


@contextmanager
def taken(cluster: Cluster, turn: Turn, topic: str) -> Iterator[RawProducer]:
    """A producer that nobody but who takes the turn next can fence. Raises Overtaken, Unavailable, Refused."""
    try:
        with _begun(cluster, turn) as producer:
            yield producer
    except Fenced:
        raise Overtaken(f"somebody else has begun to replay, edit or purge letters of {topic}") from None


def _begun(cluster: Cluster, turn: Turn) -> RawProducer:
    for attempt in range(_ATTEMPTS_MAX):
        turn.take()
        producer = RawProducer(cluster, transactional_id=turn.name, transaction_timeout_ms=_TIMEOUT_MS)
        try:
            producer.init()
            turn.check()
            return producer
        except (Overtaken, Fenced):
            producer.close()
            if attempt == _ATTEMPTS_MAX - 1:
                raise
        except BaseException:
            producer.close()
            raise
    raise AssertionError("unreachable")
