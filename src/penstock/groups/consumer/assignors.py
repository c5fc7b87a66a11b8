"""`uniform`: as even as can be, with as few moves as possible, close to the replicas where there is a choice.

Members with one and the same subscription differ by one partition at most. Where subscriptions differ, no partition
could move to a member with two fewer. A member that has too many gives up those without a replica in its rack first,
and what is free goes to members in the racks of its replicas before it goes to others.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from uuid import UUID

from penstock.groups.consumer.assignor import Candidate, Candidates, Targets
from penstock.groups.consumer.values import assignment
from penstock.groups.topics import Topic

Place = tuple[UUID, int]
Topics = Mapping[UUID, Topic]
#: What each member has so far.
Hands = dict[str, list[Place]]


def assign_uniformly(members: Candidates, topics: Topics) -> Targets:
    if not members:
        return {}
    kept, free = _keep(members, topics)
    if len({member.topics for member in members.values()}) == 1:
        hands = _share_evenly(members, topics, kept, free)
    else:
        hands = _share_by_load(members, topics, kept, free)
    return {member_id: assignment(places) for member_id, places in hands.items()}


def _keep(members: Candidates, topics: Topics) -> tuple[Hands, list[Place]]:
    """What of the last target still holds, and what nobody has."""
    taken: dict[Place, str] = {}
    kept: Hands = {}
    for member_id, member in members.items():
        places = kept[member_id] = []
        for topic_id, partitions in member.target.items():
            topic = topics.get(topic_id)
            if topic is None or topic_id not in member.topics:
                continue
            for partition in sorted(partitions):
                if partition < topic.partition_count and (topic_id, partition) not in taken:
                    taken[topic_id, partition] = member_id
                    places.append((topic_id, partition))
    free = [
        (topic_id, partition)
        for topic_id, topic in topics.items()
        for partition in range(topic.partition_count)
        if (topic_id, partition) not in taken
    ]
    return kept, free


def _is_local(topics: Topics, place: Place, rack: str | None) -> bool:
    topic_id, partition = place
    return rack is not None and rack in topics[topic_id].racks[partition]


# --- one subscription ---


def _share_evenly(members: Candidates, topics: Topics, kept: Hands, free: list[Place]) -> Hands:
    some = next(iter(members.values()))
    free = [place for place in free if place[0] in some.topics]
    total = len(free) + sum(len(places) for places in kept.values())
    quotas = _quotas(kept, total)
    for member_id, member in members.items():
        places, quota = kept[member_id], quotas[member_id]
        if len(places) > quota:
            # Stable: among those in its rack, and among the others, the first ones stay.
            places.sort(key=lambda place: not _is_local(topics, place, member.rack))
            free += places[quota:]
            del places[quota:]
    _fill(members, topics, kept, quotas, free)
    return kept


def _quotas(kept: Hands, total: int) -> dict[str, int]:
    """Those that have most keep one more, where it does not divide evenly."""
    fair, over = divmod(total, len(kept))
    by_size = sorted(kept, key=lambda member_id: -len(kept[member_id]))
    return {member_id: fair + (rank < over) for rank, member_id in enumerate(by_size)}


def _fill(
    members: Candidates, topics: Topics, hands: Hands, quotas: Mapping[str, int], free: list[Place]
) -> None:
    """First everyone what is in their rack, then what is left."""
    left = dict.fromkeys(free)
    by_rack: dict[str, list[Place]] = defaultdict(list)
    for topic_id, partition in reversed(free):
        for rack in topics[topic_id].racks[partition]:
            by_rack[rack].append((topic_id, partition))
    for member_id, member in members.items():
        near = by_rack.get(member.rack or "", [])
        while near and len(hands[member_id]) < quotas[member_id]:
            place = near.pop()
            if place in left:
                del left[place]
                hands[member_id].append(place)
    rest = iter(tuple(left))
    for member_id in members:
        for _ in range(quotas[member_id] - len(hands[member_id])):
            hands[member_id].append(next(rest))


# --- different subscriptions ---


def _share_by_load(members: Candidates, topics: Topics, kept: Hands, free: list[Place]) -> Hands:
    subscribers: dict[UUID, list[str]] = defaultdict(list)
    for member_id, member in members.items():
        for topic_id in member.topics:
            subscribers[topic_id].append(member_id)
    held: dict[UUID, dict[int, str]] = defaultdict(dict)
    for member_id, places in kept.items():
        for topic_id, partition in places:
            held[topic_id][partition] = member_id
    load = Counter({member_id: len(places) for member_id, places in kept.items()})
    # Topics that few can have come first: who has a choice makes room for who has none.
    order = sorted((topic for topic in topics if topic in subscribers), key=lambda id: len(subscribers[id]))
    unheld: dict[UUID, list[int]] = defaultdict(list)
    for topic_id, partition in free:
        unheld[topic_id].append(partition)
    for topic_id in order:
        _hand_out(topics[topic_id], unheld[topic_id], subscribers[topic_id], members, load, held[topic_id])
    while sum(_level(topics[id], held[id], subscribers[id], members, load) for id in order):
        pass
    return _hands(members, held)


def _hands(members: Candidates, held: Mapping[UUID, Mapping[int, str]]) -> Hands:
    hands: Hands = {member_id: [] for member_id in members}
    for topic_id, owners in held.items():
        for partition, member_id in owners.items():
            hands[member_id].append((topic_id, partition))
    return hands


def _hand_out(
    topic: Topic,
    partitions: Iterable[int],
    subscribers: list[str],
    members: Candidates,
    load: Counter[str],
    owners: dict[int, str],
) -> None:
    """Each to one of those with least, in a rack of its replicas if one is there."""
    heaps: dict[str | None, list[tuple[int, int, str]]] = defaultdict(list)
    for rank, member_id in enumerate(subscribers):
        heaps[members[member_id].rack].append((load[member_id], rank, member_id))
    for heap in heaps.values():
        heapq.heapify(heap)
    for partition in partitions:
        lightest = min(heaps.values())
        for rack in sorted(topic.racks[partition]):
            if rack in heaps and heaps[rack][0][0] == lightest[0][0]:
                lightest = heaps[rack]
                break
        least, rank, member_id = lightest[0]
        heapq.heapreplace(lightest, (least + 1, rank, member_id))
        owners[partition] = member_id
        load[member_id] += 1


def _near(topic: Topic, partition: int, member: Candidate) -> bool:
    return member.rack is not None and member.rack in topic.racks[partition]


def _level(
    topic: Topic, owners: dict[int, str], subscribers: list[str], members: Candidates, load: Counter[str]
) -> bool:
    """Move partitions of this topic to members with at least two fewer. Every move evens the loads: this ends."""
    lightest = [(load[member_id], rank, member_id) for rank, member_id in enumerate(subscribers)]
    heapq.heapify(lightest)
    by_owner: dict[str, list[int]] = defaultdict(list)
    for partition, member_id in owners.items():
        by_owner[member_id].append(partition)
    moved = False
    for owner in sorted(by_owner, key=lambda member_id: -load[member_id]):
        # Those without a replica in its rack go first.
        partitions = sorted(by_owner[owner], key=lambda p: not _near(topic, p, members[owner]))
        while partitions and load[owner] - _least(lightest, load) > 1:
            _, rank, member_id = heapq.heappop(lightest)
            owners[partitions.pop()] = member_id
            load[owner] -= 1
            load[member_id] += 1
            heapq.heappush(lightest, (load[member_id], rank, member_id))
            moved = True
    return moved


def _least(heap: list[tuple[int, int, str]], load: Mapping[str, int]) -> int:
    """An entry may be of before its member gave something up."""
    while heap[0][0] != load[heap[0][2]]:
        _, rank, member_id = heapq.heappop(heap)
        heapq.heappush(heap, (load[member_id], rank, member_id))
    return heap[0][0]
