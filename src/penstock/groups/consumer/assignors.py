"""The assignors of consumer groups, by name.

`range`: neighbouring partitions of a topic go to one member. Topics with the same number of partitions and the same
subscribers are split into the same ranges, and one member gets the same range in all of them. Members stay in the
order in which they hold partitions now; new members come last. If racks are known, a range goes to a member in the
rack that holds most of its replicas.

`uniform`: as even as possible, with as few moves as possible. Members with the same subscription differ by at most one
partition. If subscriptions differ, no partition can move to a member with at least two fewer. A member with too many
partitions first loses those without a replica in its rack, and free partitions go first to members in the racks of
their replicas.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import accumulate
from typing import NamedTuple
from uuid import UUID

from penstock.groups.modern_group import Assignment, to_assignment
from penstock.groups.topics import Topic


class ConsumerAssignorMember(NamedTuple):
    """The input of an assignor for one member."""

    topics: frozenset[UUID]
    rack: str | None
    #: The previous target, of which the assignor keeps as much as possible.
    target: Assignment
    #: Static members are sorted by this, so that they keep their position after a restart.
    instance_id: str | None = None


#: By member id, in an order that does not depend on when members joined.
ConsumerAssignorMembers = Mapping[str, ConsumerAssignorMember]
TargetAssignments = dict[str, Assignment]
#: Assigns every partition of the topics to one of the subscribed members, if there are any.
ConsumerAssignor = Callable[[ConsumerAssignorMembers, Mapping[UUID, Topic]], TargetAssignments]


@cache
def consumer_assignor(name: str) -> ConsumerAssignor:

    return {"uniform": assign_uniformly, "range": assign_ranges}[name]


def assign_ranges(members: ConsumerAssignorMembers, topics: Mapping[UUID, Topic]) -> TargetAssignments:
    subscribers: dict[UUID, list[str]] = defaultdict(list)
    for member_id, member in members.items():
        for topic_id in member.topics:
            subscribers[topic_id].append(member_id)
    alike: dict[tuple[int, tuple[str, ...]], list[Topic]] = defaultdict(list)
    for topic_id, topic in topics.items():
        if topic_id in subscribers:
            alike[topic.partition_count, tuple(subscribers[topic_id])].append(topic)
    targets: dict[str, dict[UUID, frozenset[int]]] = {member_id: {} for member_id in members}
    for (_, names), group in alike.items():
        for member_id, piece in _pieces(members, names, group):
            if piece:
                targets[member_id].update((topic.id, frozenset(piece)) for topic in group)
    return dict(targets.items())


def _pieces(
    members: ConsumerAssignorMembers, names: tuple[str, ...], topics: list[Topic]
) -> list[tuple[str, range]]:
    fair, over = divmod(topics[0].partition_count, len(names))
    sizes = [fair + (index < over) for index in range(len(names))]
    ends = list(accumulate(sizes))
    pieces = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    order = _range_order(members, names, topics)
    if not any(members[member_id].rack for member_id in names):
        return list(zip(order, pieces, strict=True))
    return _assign_near_replicas(members, order, pieces, topics)


def _range_order(members: ConsumerAssignorMembers, names: tuple[str, ...], topics: list[Topic]) -> list[str]:
    """Order by the first partition that a member holds, then by name."""

    def first_held(member_id: str) -> int:
        target = members[member_id].target
        return min((min(target[topic.id]) for topic in topics if target.get(topic.id)), default=1 << 31)

    def rank(member_id: str) -> tuple[int, str]:
        return first_held(member_id), members[member_id].instance_id or member_id

    return sorted(names, key=rank)


def _assign_near_replicas(
    members: ConsumerAssignorMembers, order: list[str], pieces: list[range], topics: list[Topic]
) -> list[tuple[str, range]]:
    """Search by rack instead of by member, because there are few racks."""
    waiting: dict[str | None, deque[tuple[int, str]]] = defaultdict(deque)
    for rank, member_id in enumerate(order):
        waiting[members[member_id].rack].append((rank, member_id))
    result = []
    for piece in pieces:
        local = _replicas_by_rack(piece, topics)
        best = min(waiting, key=lambda rack: (-local.get(rack, 0), waiting[rack][0]))
        _, member_id = waiting[best].popleft()
        if not waiting[best]:
            del waiting[best]
        result.append((member_id, piece))
    return result


def _replicas_by_rack(piece: range, topics: list[Topic]) -> dict[str | None, int]:
    counts: dict[str | None, int] = defaultdict(int)
    for topic in topics:
        for partition in piece:
            for rack in topic.racks[partition]:
                counts[rack] += 1
    return counts


TopicIdPartition = tuple[UUID, int]
TopicsById = Mapping[UUID, Topic]
#: The partitions of each member so far.
HeldPartitions = dict[str, list[TopicIdPartition]]


def assign_uniformly(members: ConsumerAssignorMembers, topics: TopicsById) -> TargetAssignments:
    if not members:
        return {}
    kept, free = _kept_and_free(members, topics)
    if len({member.topics for member in members.values()}) == 1:
        hands = _share_evenly(members, topics, kept, free)
    else:
        hands = _share_by_load(members, topics, kept, free)
    return {member_id: to_assignment(partitions) for member_id, partitions in hands.items()}


def _kept_and_free(
    members: ConsumerAssignorMembers, topics: TopicsById
) -> tuple[HeldPartitions, list[TopicIdPartition]]:
    """The part of the previous target that is still valid, and the partitions that no member holds."""
    taken: dict[TopicIdPartition, str] = {}
    kept: HeldPartitions = {}
    for member_id, member in members.items():
        tps = kept[member_id] = []
        for topic_id, partitions in member.target.items():
            topic = topics.get(topic_id)
            if topic is None or topic_id not in member.topics:
                continue
            for partition in sorted(partitions):
                if partition < topic.partition_count and (topic_id, partition) not in taken:
                    taken[topic_id, partition] = member_id
                    tps.append((topic_id, partition))
    free = [
        (topic_id, partition)
        for topic_id, topic in topics.items()
        for partition in range(topic.partition_count)
        if (topic_id, partition) not in taken
    ]
    return kept, free


def _is_local(topic: Topic, partition: int, rack: str | None) -> bool:
    return rack is not None and rack in topic.racks[partition]


# --- one subscription ---


def _share_evenly(
    members: ConsumerAssignorMembers, topics: TopicsById, kept: HeldPartitions, free: list[TopicIdPartition]
) -> HeldPartitions:
    some = next(iter(members.values()))
    free = [partition for partition in free if partition[0] in some.topics]
    total = len(free) + sum(len(partitions) for partitions in kept.values())
    quotas = _quotas(kept, total)
    for member_id, member in members.items():
        partitions, quota = kept[member_id], quotas[member_id]
        if len(partitions) > quota:
            # A stable sort: of the local partitions, and of the others, the first ones stay.
            partitions.sort(
                key=lambda partition: not _is_local(topics[partition[0]], partition[1], member.rack)
            )
            free += partitions[quota:]
            del partitions[quota:]
    _fill(members, topics, kept, quotas, free)
    return kept


def _quotas(kept: HeldPartitions, total: int) -> dict[str, int]:
    """If the total does not divide evenly, the members that hold most get one more."""
    fair, over = divmod(total, len(kept))
    by_size = sorted(kept, key=lambda member_id: -len(kept[member_id]))
    return {member_id: fair + (rank < over) for rank, member_id in enumerate(by_size)}


def _fill(
    members: ConsumerAssignorMembers,
    topics: TopicsById,
    held: HeldPartitions,
    quotas: Mapping[str, int],
    free: list[TopicIdPartition],
) -> None:
    """Give every member free partitions in its rack first, then the remaining ones."""
    left = dict.fromkeys(free)
    by_rack: dict[str, list[TopicIdPartition]] = defaultdict(list)
    for topic_id, partition in reversed(free):
        for rack in topics[topic_id].racks[partition]:
            by_rack[rack].append((topic_id, partition))
    for member_id, member in members.items():
        near = by_rack.get(member.rack or "", [])
        while near and len(held[member_id]) < quotas[member_id]:
            tp = near.pop()
            if tp in left:
                del left[tp]
                held[member_id].append(tp)
    rest = iter(tuple(left))
    for member_id in members:
        for _ in range(quotas[member_id] - len(held[member_id])):
            held[member_id].append(next(rest))


# --- different subscriptions ---


def _share_by_load(
    members: ConsumerAssignorMembers, topics: TopicsById, kept: HeldPartitions, free: list[TopicIdPartition]
) -> HeldPartitions:
    subscribers: dict[UUID, list[str]] = defaultdict(list)
    for member_id, member in members.items():
        for topic_id in member.topics:
            subscribers[topic_id].append(member_id)
    held: dict[UUID, dict[int, str]] = defaultdict(dict)
    for member_id, tps in kept.items():
        for topic_id, partition in tps:
            held[topic_id][partition] = member_id
    load = Counter({member_id: len(tps) for member_id, tps in kept.items()})
    # Topics with few subscribers come first, so that members with a choice leave room for members without one.
    order = sorted((topic for topic in topics if topic in subscribers), key=lambda id: len(subscribers[id]))
    unheld: dict[UUID, list[int]] = defaultdict(list)
    for topic_id, partition in free:
        unheld[topic_id].append(partition)
    for topic_id in order:
        _assign_free(topics[topic_id], unheld[topic_id], subscribers[topic_id], members, load, held[topic_id])
    while sum(_move_to_lighter(topics[id], held[id], subscribers[id], members, load) for id in order):
        pass
    return _held_by_member(members, held)


def _held_by_member(
    members: ConsumerAssignorMembers, held: Mapping[UUID, Mapping[int, str]]
) -> HeldPartitions:
    by_member: HeldPartitions = {member_id: [] for member_id in members}
    for topic_id, owners in held.items():
        for partition, member_id in owners.items():
            by_member[member_id].append((topic_id, partition))
    return by_member


def _assign_free(
    topic: Topic,
    partitions: Iterable[int],
    subscribers: list[str],
    members: ConsumerAssignorMembers,
    load: Counter[str],
    owners: dict[int, str],
) -> None:
    """Give each partition to a member with the lowest load, if possible in a rack of its replicas."""
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


def _move_to_lighter(
    topic: Topic,
    owners: dict[int, str],
    subscribers: list[str],
    members: ConsumerAssignorMembers,
    load: Counter[str],
) -> bool:
    """Move partitions of this topic to members with at least two fewer. Ends, because every move evens the loads."""
    lightest = [(load[member_id], rank, member_id) for rank, member_id in enumerate(subscribers)]
    heapq.heapify(lightest)
    by_owner: dict[str, list[int]] = defaultdict(list)
    for partition, member_id in owners.items():
        by_owner[member_id].append(partition)
    moved = False
    for owner in sorted(by_owner, key=lambda member_id: -load[member_id]):
        # Partitions without a replica in the owner's rack move first.
        partitions = sorted(by_owner[owner], key=lambda p: not _is_local(topic, p, members[owner].rack))
        while partitions and load[owner] - _least_load(lightest, load) > 1:
            _, rank, member_id = heapq.heappop(lightest)
            owners[partitions.pop()] = member_id
            load[owner] -= 1
            load[member_id] += 1
            heapq.heappush(lightest, (load[member_id], rank, member_id))
            moved = True
    return moved


def _least_load(heap: list[tuple[int, int, str]], load: Mapping[str, int]) -> int:
    """Update heap entries that are out of date because their member has lost partitions."""
    while heap[0][0] != load[heap[0][2]]:
        _, rank, member_id = heapq.heappop(heap)
        heapq.heappush(heap, (load[member_id], rank, member_id))
    return heap[0][0]
