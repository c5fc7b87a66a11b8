"""From a change in a group of a hundred members until every member has its final assignment.

Members behave as client libraries do, over raw frames. Told to heartbeat every five seconds, members hear of a change
after that long, whatever the broker does; so each protocol is measured with eager members too, who ask every tenth of
a second: there the broker's own part shows. A crash counts from the moment that the session has run out.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.brokers.broker import SESSION_TIMEOUT_MIN_S, Subject
from benchmarks.load import classic_members, consumer_members
from benchmarks.load.classic_members import ClassicMember
from benchmarks.load.consumer_members import ConsumerMember
from benchmarks.load.group_members import Member, Troop
from benchmarks.measure import Metrics, temporary_topic
from benchmarks.scenarios.scenario import Measure, Pace, Scenario, Site
from benchmarks.wire.admin import Coordinated, Resource, alter_configs, await_coordinator, create_partitions
from benchmarks.wire.raw_client import Address, Topic

MEMBERS = 100
_PARTITIONS = 3 * MEMBERS
_MORE_PARTITIONS = 4 * MEMBERS
_EAGER_S = 0.1
#: What client libraries of the classic protocol do unless told otherwise.
_CLASSIC_S = 3.0
#: Members that are told to wait for five seconds need a session that forgives a late answer.
_PATIENT_SESSION_S = 15.0
_CALM_S = 0.5
_TIMEOUT_S = 120.0


class _Consumers:
    """A group under the consumer protocol (KIP-848)."""

    def __init__(self, address: Address, topic: Topic, interval_s: float | None) -> None:
        self.response_class = consumer_members.response_class
        self.troop = Troop(self.response_class)
        self._address, self._topic, self._interval_s = address, topic.name, interval_s
        self.session_s = SESSION_TIMEOUT_MIN_S if interval_s else _PATIENT_SESSION_S
        self.group = f"{topic.name}-group"
        self.partitions = _PARTITIONS

    def new_member(self, due_s: float) -> ConsumerMember:
        return ConsumerMember(self._address, self.group, self._topic, due_s, self._interval_s)

    def is_settled(self) -> Callable[[Iterable[Any]], bool]:
        epoch = max((member.epoch for member in self.members()), default=0)
        return lambda members: consumer_members.is_settled(members, self.partitions, epoch)

    def members(self) -> Sequence[Any]:
        return list(self.troop.members.values())

    @property
    def spread_s(self) -> float:
        """Members have joined some time ago, each at its own moment."""
        return self._interval_s or 5.0


class _Classics:
    """A group under the classic protocol: every change is a rebalance of all members."""

    def __init__(self, address: Address, topic: Topic, interval_s: float | None) -> None:
        self.response_class = classic_members.response_class
        self.troop = Troop(self.response_class)
        self._address, self.spread_s = address, interval_s or _CLASSIC_S
        self.session_s = SESSION_TIMEOUT_MIN_S if interval_s else _PATIENT_SESSION_S
        self.group = f"{topic.name}-group"

    def new_member(self, due_s: float) -> ClassicMember:
        return ClassicMember(self._address, self.group, self.session_s, due_s, self.spread_s)

    def is_settled(self) -> Callable[[Iterable[Any]], bool]:
        return classic_members.is_settled

    def members(self) -> Sequence[Any]:
        return list(self.troop.members.values())


_Group = _Consumers | _Classics


class _Kind(NamedTuple):
    name: str
    title: str
    make: Callable[[Address, Topic, float | None], _Group]
    interval_s: float | None


def _measured(kind: _Kind) -> Measure:
    def measure(site: Site) -> Metrics:
        with _group(site.broker, kind) as (group, topic):
            return _events(site.broker, group, topic)

    return measure


@contextmanager
def _group(broker: Subject, kind: _Kind) -> Iterator[tuple[_Group, Topic]]:
    with temporary_topic(broker, _PARTITIONS, fsync=False) as topic:
        ((address, _),) = topic.leaders.items()
        group = kind.make(address, topic, kind.interval_s)
        with broker.connect() as admin:
            await_coordinator(admin, Coordinated.GROUP, group.group)
            if isinstance(group, _Consumers):
                session = {"consumer.session.timeout.ms": str(int(group.session_s * 1000))}
                alter_configs(admin, Resource.GROUP, group.group, session)
        try:
            yield group, topic
        finally:
            for member in group.members():
                group.troop.remove(member)


def _events(broker: Subject, group: _Group, topic: Topic) -> Metrics:
    chance = random.Random(topic.name)
    cpu_before_s, began_s = broker.cpu_seconds(), time.monotonic()
    metrics = {"rebalance_all_s": _join(group, MEMBERS - 1)}
    _spread(group, chance)
    metrics["rebalance_join_s"] = _join(group, 1)
    if isinstance(group, _Consumers):
        _spread(group, chance)
        metrics["rebalance_partitions_s"] = _more_partitions(broker, group, topic)
    _spread(group, chance)
    metrics["rebalance_leave_s"] = _leave(group, chance.choice(group.members()))
    _spread(group, chance)
    metrics["rebalance_crash_s"] = _crash(group, chance.choice(group.members()))
    cpu_s = broker.cpu_seconds() - cpu_before_s
    return {
        **metrics,
        "rebalance_cpu_s": cpu_s,
        "broker_cores": cpu_s / (time.monotonic() - began_s),
        "cpu_us_per_heartbeat": cpu_s / group.troop.requests * 1e6,
    }


def _spread(group: _Group, chance: random.Random) -> None:
    """The events find the members anywhere between two heartbeats."""
    now_s = time.monotonic()
    for member in group.members():
        member.due_s = min(member.due_s, now_s + chance.uniform(0, group.spread_s))
    group.troop.run_for(_CALM_S)


def _join(group: _Group, count: int) -> float:
    began_s = time.monotonic()
    is_settled = group.is_settled()
    for _ in range(count):
        group.troop.add(group.new_member(began_s))
    return group.troop.run_until(is_settled, _TIMEOUT_S, f"join of {count}") - began_s


def _more_partitions(broker: Subject, group: _Consumers, topic: Topic) -> float:
    is_settled = group.is_settled()
    group.partitions = _MORE_PARTITIONS
    # Beside them, as members go on meanwhile.
    with broker.connect() as admin, ThreadPoolExecutor(1) as thread:
        began_s = time.monotonic()
        created = thread.submit(create_partitions, admin, topic.name, _MORE_PARTITIONS)
        settled_s = group.troop.run_until(is_settled, _TIMEOUT_S, "new partitions")
        created.result()
    return settled_s - began_s


def _leave(group: _Group, member: Any) -> float:
    _finish_request(group, member)
    is_settled = group.is_settled()
    began_s = time.monotonic()
    request = member.farewell()
    member.link.send(request, group.response_class(request))
    member.link.read()
    group.troop.remove(member)
    return group.troop.run_until(is_settled, _TIMEOUT_S, "leave") - began_s


def _crash(group: _Group, member: Any) -> float:
    _finish_request(group, member)
    is_settled = group.is_settled()
    group.troop.remove(member)
    began_s: float = member.heard_s + group.session_s
    return group.troop.run_until(is_settled, _TIMEOUT_S, "crash") - began_s


def _finish_request(group: _Group, member: Member) -> None:
    """What it has asked is answered, and it asks no more."""
    member.due_s = time.monotonic() + _TIMEOUT_S
    while not member.link.is_idle:
        group.troop.run_for(0.01)
        member.due_s = time.monotonic() + _TIMEOUT_S


def warm_up(broker: Subject, pace: Pace) -> None:
    for kind in _KINDS:
        if kind.interval_s is not None:
            with _group(broker, kind) as (group, _):
                _join(group, MEMBERS - 1)
                end_s = time.monotonic() + pace.warm_up.duration_s
                while time.monotonic() < end_s:
                    _join(group, 1)
                    _leave(group, group.members()[0])


_KINDS = (
    _Kind("consumer-eager", "KIP-848, eager", _Consumers, _EAGER_S),
    _Kind("consumer", "KIP-848, as told", _Consumers, None),
    _Kind("classic-eager", "classic, eager", _Classics, _EAGER_S),
    _Kind("classic", "classic, every 3 s", _Classics, None),
)
_SHOWN = (
    "rebalance_all_s",
    "rebalance_join_s",
    "rebalance_partitions_s",
    "rebalance_leave_s",
    "rebalance_crash_s",
    "rebalance_cpu_s",
)

SCENARIOS = tuple(
    Scenario(
        name=f"rebalance-{kind.name}",
        title=f"{MEMBERS} members, {kind.title}",
        measure=_measured(kind),
        shown=tuple(name for name in _SHOWN if kind.make is _Consumers or name != "rebalance_partitions_s"),
        quick=kind.name == "consumer-eager",
        rounds_max=99 if kind.interval_s else 1,
        warm_up=warm_up,
    )
    for kind in _KINDS
)
