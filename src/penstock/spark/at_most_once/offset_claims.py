"""At most once, on the driver: offsets are claimed before anybody reads them, and what was claimed is not given again.

The positions of the query's group are the claims: all below them has been given away. A batch is claimed when it is
planned, in a transaction under an id that belongs to the group, so that of two drivers only the newer one can claim.
Then, and not before, its tasks get their tickets. Whoever plans the same batch again, with the same checkpoint or
without one, finds it claimed and gets nothing; what may have been lost by that is written down and can be counted.

Brokers forget the positions of a group that nobody has told them of for a week or so (offsets.retention.minutes): a
query that stood still for longer does not know its claims any more, and goes by its checkpoint alone.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError, Fenced
from penstock.client.metadata import Place
from penstock.client.positions import CommittedOffset, committed, group_info
from penstock.client.producing import RawProducer
from penstock.client.retrying import Deadline
from penstock.spark import bookkeeping
from penstock.spark.bookkeeping import CLAIMS, SKIPPED
from penstock.spark.offsets import OffsetRange, Position
from penstock.spark.progress import METADATA, REPEAT_MS, REST_MS
from penstock.spark.tickets import ClaimError, Ticket, covered, make_topics, ranges_json, skipped, skipping

__all__ = ["Claim", "ClaimError", "Claims", "cut", "driver_name", "in_doubt", "skipped"]

_LOG: Final = logging.getLogger("penstock.spark")
_WITHOUT_MEMBERS: Final = ("", "Empty", "Dead")
_UNKNOWN: Final = -1


def driver_name(group: str) -> str:
    """The transactional id of a group's claims."""
    return f"penstock-claim-{group}"


class Claim(NamedTuple):
    """How far a partition has been given away."""

    offset: int
    #: Of the topic that was meant; None where nobody has said.
    topic_id: UUID | None = None
    #: Where the last batch that claimed some of it began, and where that is written; -1 where nobody has said.
    since: int = _UNKNOWN
    base: int = _UNKNOWN

    def is_about(self, topic_id: UUID | None) -> bool:
        """A topic that was created anew begins anew."""
        return None in (self.topic_id, topic_id) or self.topic_id == topic_id


def cut(
    ranges: Iterable[OffsetRange], claims: Mapping[Place, Claim]
) -> tuple[list[OffsetRange], list[OffsetRange]]:
    """What can be given yet, and what has been given already."""
    left, gone = [], []
    for each in ranges:
        claim = claims.get(each.place)
        if claim is None or claim.offset <= each.start or not claim.is_about(each.topic_id):
            left.append(each)
            continue
        border = min(claim.offset, each.end)
        gone.append(each._replace(end=border))
        if border < each.end:
            left.append(each._replace(start=border))
    return left, gone


def in_doubt(start: Position, claims: Mapping[Place, Claim]) -> list[OffsetRange]:
    """What a query that begins anew at `start` may never learn of: the last batch that was claimed before.

    All batches before that one were over when it was claimed.
    """
    last = max((claim.base for claim in claims.values()), default=_UNKNOWN)
    found = []
    for place, claim in sorted(claims.items()):
        topic_id = start.ids.get(place[0])
        if claim.base == last != _UNKNOWN and claim.is_about(topic_id):
            since = max(claim.since, start.offsets.get(place, 0))
            found.append(OffsetRange(*(place[0], topic_id, place[1]), since, claim.offset))
    return [each for each in found if each.size]


class Claims:
    """Of one query, on its driver."""

    def __init__(
        self, cluster: Cluster, group: str, *, deadline: Callable[[float], Deadline] = Deadline
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._deadline = deadline
        self._producer: RawProducer | None = None
        self._rest = deadline(0)
        #: What was cut away, and is not written down yet.
        self._gone: list[OffsetRange] = []

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    # Planning

    def starting(self, position: Position) -> Position:
        """Where a query without a checkpoint begins: where it was told to, but behind all claims.

        Raises ClaimError, Unavailable, Refused.
        """
        with self._told_of_fencing():
            # First of all: what a dead driver has left half done would be waited for.
            self._begin()
            claims = self._claims(position.offsets)
        self._gone += in_doubt(position, claims)
        offsets = position.offsets
        for place, claim in claims.items():
            if claim.is_about(position.ids[place[0]]):
                offsets[place] = max(offsets[place], claim.offset)
        return Position.of(offsets, position.ids)

    def cut(self, ranges: Sequence[OffsetRange]) -> list[OffsetRange]:
        """What of these can be given yet. From now on no other driver can claim anything, until one begins.

        Raises ClaimError, Unavailable, Refused.
        """
        with self._told_of_fencing():
            self._begin()
            left, gone = cut(ranges, self._claims(each.place for each in ranges))
        if gone:
            _LOG.warning(
                "%d offsets were claimed before: they may have been lost, and are not given again",
                covered(gone),
            )
            self._gone += gone
        return left

    def claim(self, tasks: Sequence[OffsetRange]) -> list[Ticket]:
        """Once this returns they are given away, each to the task that redeems its ticket; when it raises, they may be.

        Raises ClaimError, Unavailable, Refused.
        """
        if not tasks and not self._gone:
            return []
        with self._told_of_fencing():
            producer, batch = self._begin(), uuid.uuid4().hex
            base = self._write(producer, batch, tasks)
            producer.commit_offsets(self._group, positions(tasks, base))
            producer.end(commit=True)
        self._gone = []
        self._rest = self._deadline(REPEAT_MS)
        return [Ticket(self._group, batch, base, index) for index in range(len(tasks))]

    def _write(self, producer: RawProducer, batch: str, tasks: Sequence[OffsetRange]) -> int:
        told = {"group": self._group, "batch": batch, "ranges": ranges_json(tasks)}
        sent = producer.send(*bookkeeping.place_of(CLAIMS), bookkeeping.batch_of(told, key=batch))
        if self._gone:
            lost = bookkeeping.batch_of(skipping(self._group, self._gone), key=self._group)
            producer.send(*bookkeeping.place_of(SKIPPED), lost)
        producer.flush()
        # Where a broker does not tell where it put the record, tasks look through all of them.
        return sent.offset if sent.offset is not None else bookkeeping.beginning_of(self._cluster, CLAIMS)

    # While there is nothing to plan

    def repeat(self) -> None:
        """Say again what is claimed, lest brokers forget it: the query may have nothing to read for weeks.

        Raises ClaimError where another driver goes on. What else goes wrong is told of in the log.
        """
        if not self._rest.is_over:
            return
        try:
            with self._told_of_fencing():
                producer = self._begin()
                producer.commit_offsets(self._group, self._all())
                producer.end(commit=True)
        except ClaimError:
            raise
        except ClientError as trouble:
            _LOG.warning("group %s could not be told again what is claimed: %s", self._group, trouble)
            # Who has taken over meanwhile is fenced when this one begins again; nothing is given twice by that.
            self.close()
            self._rest = self._deadline(REST_MS)
        else:
            self._rest = self._deadline(REPEAT_MS)

    # Its turn

    def _begin(self) -> RawProducer:
        if self._producer is None:
            self._refuse_members()
            make_topics(self._cluster)
            producer = RawProducer(self._cluster, transactional_id=driver_name(self._group))
            producer.init()
            self._producer = producer
        return self._producer

    def _refuse_members(self) -> None:
        info = group_info(self._cluster, self._group)
        if info is not None and info.state not in _WITHOUT_MEMBERS:
            raise ClaimError(
                f"group {self._group} has members of its own; a query with contract=at-most-once needs a group "
                "that nobody else uses (kafka.group.id)"
            )

    def _all(self) -> dict[Place, CommittedOffset]:
        """Brokers take no positions in topics that are gone."""
        found = committed(self._cluster, self._group)
        there = self._cluster.topics({topic for topic, _ in found})
        return {place: each for place, each in found.items() if place[0] in there}

    def _claims(self, places: Iterable[Place]) -> dict[Place, Claim]:
        wanted = sorted(set(places))
        found = committed(self._cluster, self._group, wanted, stable=True) if wanted else {}
        return {place: claim_of(each) for place, each in found.items()}

    @contextmanager
    def _told_of_fencing(self) -> Iterator[None]:
        try:
            yield
        except Fenced:
            raise ClaimError(
                f"group {self._group}: another driver has begun to claim for it, and this one must stop; with "
                "contract=at-most-once only one query at a time can use a group (kafka.group.id)"
            ) from None


# Positions of the group


def positions(tasks: Iterable[OffsetRange], base: int) -> dict[Place, CommittedOffset]:
    """That all of these are claimed."""
    starts: dict[Place, int] = {}
    found = {}
    for each in sorted(tasks, key=lambda each: (each.place, each.start)):
        since = starts.setdefault(each.place, each.start)
        metadata = _metadata(each.topic_id, since=since, base=base)
        found[each.place] = CommittedOffset(offset=each.end, metadata=metadata)
    return found


def claim_of(position: CommittedOffset) -> Claim:
    """Whoever has committed it, and whatever they have written beside it."""
    told = _told(position.metadata)
    topic_id = told.get("topic")
    return Claim(
        offset=position.offset,
        topic_id=UUID(topic_id) if topic_id else None,
        since=told.get("since", _UNKNOWN),
        base=told.get("base", _UNKNOWN),
    )


def _metadata(topic_id: UUID | None, **more: int) -> str:
    """Begins as that of every query does."""
    told = ({"topic": str(topic_id)} if topic_id is not None else {}) | more
    return f"{METADATA} {json.dumps(told)}"


def _told(metadata: str) -> dict[str, Any]:
    if not metadata.startswith(METADATA):
        return {}
    try:
        found = json.loads(metadata.removeprefix(METADATA))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
