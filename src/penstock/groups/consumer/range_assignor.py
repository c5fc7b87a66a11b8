"""`range`: neighbouring partitions of a topic to one member, and the same numbers of topics that are partitioned alike.

Topics with as many partitions and the same subscribers are cut into the same pieces, and a piece goes to one member in
all of them. Members stay in the order in which they hold partitions now; newcomers come last. Where racks are known, a
piece goes to a member in the rack that most of its replicas are in.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import accumulate
from uuid import UUID

from penstock.groups.consumer.assignor import Candidates, Targets
from penstock.groups.topics import Topic


def assign_ranges(members: Candidates, topics: Mapping[UUID, Topic]) -> Targets:
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


def _pieces(members: Candidates, names: tuple[str, ...], topics: list[Topic]) -> list[tuple[str, range]]:
    fair, over = divmod(topics[0].partition_count, len(names))
    sizes = [fair + (place < over) for place in range(len(names))]
    ends = list(accumulate(sizes))
    pieces = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    order = _order(members, names, topics)
    if not any(members[member_id].rack for member_id in names):
        return list(zip(order, pieces, strict=True))
    return _near_replicas(members, order, pieces, topics)


def _order(members: Candidates, names: tuple[str, ...], topics: list[Topic]) -> list[str]:
    """By the first partition that a member holds; then by name."""

    def first_held(member_id: str) -> int:
        target = members[member_id].target
        return min((min(target[topic.id]) for topic in topics if target.get(topic.id)), default=1 << 31)

    def place(member_id: str) -> tuple[int, str]:
        return first_held(member_id), members[member_id].instance_id or member_id

    return sorted(names, key=place)


def _near_replicas(
    members: Candidates, order: list[str], pieces: list[range], topics: list[Topic]
) -> list[tuple[str, range]]:
    """By racks rather than by members: there are few of them."""
    waiting: dict[str | None, deque[tuple[int, str]]] = defaultdict(deque)
    for rank, member_id in enumerate(order):
        waiting[members[member_id].rack].append((rank, member_id))
    result = []
    for piece in pieces:
        local = _local_counts(piece, topics)
        best = min(waiting, key=lambda rack: (-local.get(rack, 0), waiting[rack][0]))
        _, member_id = waiting[best].popleft()
        if not waiting[best]:
            del waiting[best]
        result.append((member_id, piece))
    return result


def _local_counts(piece: range, topics: list[Topic]) -> dict[str | None, int]:
    counts: dict[str | None, int] = defaultdict(int)
    for topic in topics:
        for partition in piece:
            for rack in topic.racks[partition]:
                counts[rack] += 1
    return counts
