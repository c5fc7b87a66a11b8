"""`sticky`: each task is active at one member, all members have equally many, and as much as possible stays in place.

A task that must move goes to a member that has it as a standby, where it finds its state, or to the least loaded one.
Standby tasks are for tasks that have state; no process has a task twice.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from heapq import heapify, heapreplace
from typing import NamedTuple

from penstock.groups.streams.values import Tasks, TaskSets

Task = tuple[str, int]


class Candidate(NamedTuple):
    """A member, as the assignor sees it."""

    process_id: str
    #: Its target until now, of which as much as possible is kept.
    target: TaskSets


def assign_sticky(
    members: Mapping[str, Candidate],
    task_counts: Mapping[str, int],
    stateful: Iterable[str],
    standby_replicas: int,
) -> dict[str, TaskSets]:
    """`task_counts` by subtopology; `stateful` are the subtopologies with changelogs. The order of members matters."""
    if not members:
        return {}
    tasks = [(name, partition) for name in sorted(task_counts) for partition in range(task_counts[name])]
    active = _assign_active(members, tasks)
    standby: dict[str, set[Task]] = {member_id: set() for member_id in members}
    if standby_replicas:
        with_state = frozenset(stateful)
        _assign_standby(
            members, active, standby, [task for task in tasks if task[0] in with_state], standby_replicas
        )
    owned: dict[str, set[Task]] = {member_id: set() for member_id in members}
    for task, member_id in active.items():
        owned[member_id].add(task)
    return {
        member_id: TaskSets(_by_subtopology(owned[member_id]), _by_subtopology(standby[member_id]))
        for member_id in members
    }


def _assign_active(members: Mapping[str, Candidate], tasks: list[Task]) -> dict[Task, str]:
    previous: dict[Task, str] = {}
    standbys: dict[Task, list[str]] = defaultdict(list)
    for member_id, member in members.items():
        for task in _each(member.target.active):
            previous.setdefault(task, member_id)
        for task in _each(member.target.standby):
            standbys[task].append(member_id)
    # Those that have the most keep one more, where the tasks cannot be divided evenly.
    claims = Counter(previous[task] for task in tasks if task in previous)
    fair, over = divmod(len(tasks), len(members))
    by_claims = sorted(members, key=lambda member_id: -claims[member_id])
    room = {member_id: fair + (rank < over) for rank, member_id in enumerate(by_claims)}
    owner: dict[Task, str] = {}

    def give(task: Task, member_id: str) -> None:
        owner[task] = member_id
        room[member_id] -= 1

    for task in tasks:
        if task in previous and room[previous[task]]:
            give(task, previous[task])
    for task in tasks:
        if task not in owner:
            with_state = [member_id for member_id in standbys.get(task, ()) if room[member_id]]
            if with_state:
                give(task, max(with_state, key=room.__getitem__))
    # The member with the most room, and of those the first, without looking at all of them for each task.
    open_to = [(-room[member_id], rank, member_id) for rank, member_id in enumerate(members)]
    heapify(open_to)
    for task in tasks:
        if task not in owner:
            left, rank, member_id = open_to[0]
            give(task, member_id)
            heapreplace(open_to, (left + 1, rank, member_id))
    return owner


def _assign_standby(
    members: Mapping[str, Candidate],
    active: Mapping[Task, str],
    standby: dict[str, set[Task]],
    tasks: list[Task],
    replicas: int,
) -> None:
    """Fewer than asked for where there are not enough processes."""
    load = Counter(active.values())
    previous: dict[Task, list[str]] = defaultdict(list)
    for member_id, member in members.items():
        # A member that had the task, in whatever role, still has its state.
        for task in dict.fromkeys((*_each(member.target.standby), *_each(member.target.active))):
            previous[task].append(member_id)
    total = sum(load.values()) + len(tasks) * min(replicas, len({m.process_id for m in members.values()}) - 1)
    quota = -(-total // len(members))
    processes: dict[Task, set[str]] = {task: {members[active[task]].process_id} for task in tasks}
    missing: list[Task] = []
    for task in tasks:
        for _ in range(replicas):
            keepers = [
                member_id
                for member_id in previous.get(task, ())
                if members[member_id].process_id not in processes[task] and load[member_id] < quota
            ]
            if keepers:
                _place(min(keepers, key=load.__getitem__), task, members, standby, processes, load)
            else:
                missing.append(task)
    for task in missing:
        others = [
            member_id for member_id, member in members.items() if member.process_id not in processes[task]
        ]
        if others:
            _place(min(others, key=load.__getitem__), task, members, standby, processes, load)


def _place(
    member_id: str,
    task: Task,
    members: Mapping[str, Candidate],
    standby: dict[str, set[Task]],
    processes: dict[Task, set[str]],
    load: Counter[str],
) -> None:
    standby[member_id].add(task)
    processes[task].add(members[member_id].process_id)
    load[member_id] += 1


def _each(tasks: Tasks) -> Iterable[Task]:
    return ((name, partition) for name in sorted(tasks) for partition in sorted(tasks[name]))


def _by_subtopology(tasks: Iterable[Task]) -> Tasks:
    found: dict[str, set[int]] = defaultdict(set)
    for name, partition in tasks:
        found[name].add(partition)
    return {name: frozenset(found[name]) for name in sorted(found)}
