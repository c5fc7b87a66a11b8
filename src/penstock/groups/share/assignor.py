"""`simple`: every partition is read by somebody, and everybody reads something, spread as evenly as can be.

With at least as many partitions as members each partition has one reader; with more members than partitions each
member has one partition, which others read too. As much as balance allows stays as it was. Where all members have the
same subscription all their partitions are spread at once, else those of each topic over its subscribers.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar
from uuid import UUID

from penstock.groups.consumer.values import Assignment, assignment

Place = tuple[UUID, int]
Item = TypeVar("Item", bound=Hashable)
Holder = TypeVar("Holder", bound=Hashable)


class Candidate(NamedTuple):
    """A member, as the assignor sees it."""

    topics: frozenset[UUID]
    #: Its target until now, of which as much as possible is kept.
    target: Assignment


#: By member id, in an order that does not depend on when members came.
Candidates = Mapping[str, Candidate]


def assign_simply(members: Candidates, partitions: Assignment) -> dict[str, Assignment]:
    """`partitions` are those that can be read."""
    hands: dict[str, list[Place]] = {member_id: [] for member_id in members}
    for readers, places in _pools(members, partitions):
        for member_id, place in _spread(readers, places, members):
            hands[member_id].append(place)
    return {member_id: assignment(places) for member_id, places in hands.items()}


def _pools(members: Candidates, partitions: Assignment) -> list[tuple[list[str], list[Place]]]:
    """Who may read what."""
    subscribers: dict[UUID, list[str]] = defaultdict(list)
    for member_id, member in members.items():
        for topic_id in member.topics:
            subscribers[topic_id].append(member_id)
    pools = [
        (subscribers[topic_id], [(topic_id, partition) for partition in sorted(partitions[topic_id])])
        for topic_id in partitions
        if topic_id in subscribers
    ]
    if pools and len({member.topics for member in members.values()}) == 1:
        return [(list(members), [place for _, places in pools for place in places])]
    return pools


def _spread(readers: list[str], places: list[Place], members: Candidates) -> list[tuple[str, Place]]:
    if not places:
        return []
    held: dict[Place, list[str]] = defaultdict(list)
    wanted = set(places)
    for member_id in readers:
        for topic_id, partitions in members[member_id].target.items():
            for partition in sorted(partitions):
                if (topic_id, partition) in wanted:
                    held[topic_id, partition].append(member_id)
    if len(places) >= len(readers):
        return [(member_id, place) for place, member_id in _deal(places, readers, held).items()]
    holds: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        for member_id in held.get(place, ()):
            holds[member_id].append(place)
    return list(_deal(readers, places, holds).items())


def _deal(
    items: Sequence[Item], holders: Sequence[Holder], held: Mapping[Item, Sequence[Holder]]
) -> dict[Item, Holder]:
    """Each item to one holder; holders differ by one item at most, and those keep one more that have most now."""
    claims = Counter(holder for item in items for holder in held.get(item, ()))
    fair, over = divmod(len(items), len(holders))
    by_claims = sorted(holders, key=lambda holder: -claims[holder])
    room = {holder: fair + (rank < over) for rank, holder in enumerate(by_claims)}
    dealt: dict[Item, Holder] = {}
    for item in items:
        for holder in held.get(item, ()):
            if room[holder]:
                room[holder] -= 1
                dealt[item] = holder
                break
    rounds = max(room.values())
    free = iter([holder for turn in range(rounds) for holder in holders if room[holder] > turn])
    return {item: dealt[item] if item in dealt else next(free) for item in items}
