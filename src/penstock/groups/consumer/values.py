"""What is known of a consumer group, as values: subscriptions, assignments and where a member is between two."""

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Final, NamedTuple
from uuid import UUID

from penstock.groups.messages import Protocols

#: Partitions by topic. Values, never changed in place; a topic without partitions is left out.
Assignment = Mapping[UUID, frozenset[int]]
NOTHING: Final[Assignment] = {}
#: For partitions by topic, an epoch each.
Epochs = Mapping[UUID, Mapping[int, int]]
NO_EPOCHS: Final[Epochs] = {}

#: What a member says when it joins, leaves, or goes for a while and keeps its place.
JOINING: Final = 0
LEFT: Final = -1
AWAY: Final = -2
#: The epoch of a group that has no target assignment yet.
NO_TARGET: Final = -1


class Phase(IntEnum):
    """Where a member is on its way to its target assignment, numbered as Kafka stores it."""

    STABLE = 0
    #: It must let go of partitions before it can be given the next epoch.
    UNREVOKED = 1
    #: It waits for partitions that others have not let go of.
    UNRELEASED = 2


class ClassicPart(NamedTuple):
    """What a member brought that speaks the classic protocol."""

    session_timeout_ms: int
    protocols: Protocols


class Subscription(NamedTuple):
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    #: Sorted.
    topic_names: tuple[str, ...] = ()
    topic_regex: str = ""
    rebalance_timeout_ms: int = -1
    assignor: str | None = None
    classic: ClassicPart | None = None


class Current(NamedTuple):
    """What a member has been told."""

    epoch: int = JOINING
    previous_epoch: int = -1
    phase: Phase = Phase.STABLE
    assigned: Assignment = NOTHING
    #: Told to be given up, and still the member's until it says that it has.
    revoking: Assignment = NOTHING
    #: Since which epoch the member has had each of them without a break.
    since: Epochs = NO_EPOCHS

    def moved(
        self, epoch: int, phase: Phase, assigned: Assignment, revoking: Assignment = NOTHING
    ) -> "Current":
        """What it did not have before, or was away from, it has since this epoch."""
        known = self.since if self.epoch > JOINING else NO_EPOCHS
        since = {
            topic_id: {
                number: known.get(topic_id, {}).get(number, epoch)
                for part in (assigned, revoking)
                for number in part.get(topic_id, ())
            }
            for topic_id in {**assigned, **revoking}
        }
        return Current(epoch, self.epoch, phase, assigned, revoking, since)

    def is_settled(self, target_epoch: int) -> bool:
        return self.phase is Phase.STABLE and self.epoch == target_epoch

    def owned(self) -> Iterator[tuple[UUID, int]]:
        for part in (self.assigned, self.revoking):
            for topic_id, partitions in part.items():
                for partition in partitions:
                    yield topic_id, partition


class Member(NamedTuple):
    member_id: str
    subscription: Subscription = Subscription()
    current: Current = Current()

    @property
    def is_classic(self) -> bool:
        return self.subscription.classic is not None

    @property
    def instance_id(self) -> str | None:
        return self.subscription.instance_id


class GroupEpoch(NamedTuple):
    epoch: int
    #: Of the topics that were subscribed to at this epoch, as they were.
    metadata_hash: int = 0


class TargetEpoch(NamedTuple):
    """For which epoch of the group the target was last worked out, and when."""

    epoch: int = NO_TARGET
    timestamp_ms: int = 0


class Resolved(NamedTuple):
    """The topics that a regular expression matched."""

    topics: frozenset[str]
    version: int
    timestamp_ms: int


def assignment(partitions: Iterable[tuple[UUID, int]]) -> Assignment:
    found: dict[UUID, list[int]] = {}
    for topic_id, partition in partitions:
        found.setdefault(topic_id, []).append(partition)
    return {topic_id: frozenset(numbers) for topic_id, numbers in found.items()}


def overlap(one: Assignment, other: Assignment) -> bool:
    return any(not partitions.isdisjoint(other.get(topic_id, ())) for topic_id, partitions in one.items())


def is_within(part: Assignment, whole: Assignment) -> bool:
    return all(partitions <= whole.get(topic_id, frozenset()) for topic_id, partitions in part.items())


def without(whole: Assignment, part: Assignment) -> Assignment:
    left = {topic_id: partitions - part.get(topic_id, frozenset()) for topic_id, partitions in whole.items()}
    return {topic_id: partitions for topic_id, partitions in left.items() if partitions}


def union(one: Assignment, other: Assignment) -> Assignment:
    return {
        topic_id: one.get(topic_id, frozenset()) | other.get(topic_id, frozenset())
        for topic_id in {**one, **other}
    }
