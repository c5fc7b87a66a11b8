"""What is known of a share group, as values: subscriptions, what members were told, and where its state is."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from uuid import UUID

from penstock.groups.consumer.values import JOINING, NOTHING, Assignment, union, without


class Subscription(NamedTuple):
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    #: Sorted.
    topic_names: tuple[str, ...] = ()


class Current(NamedTuple):
    """What a member has been told."""

    epoch: int = JOINING
    previous_epoch: int = -1
    assigned: Assignment = NOTHING


class Member(NamedTuple):
    member_id: str
    subscription: Subscription = Subscription()
    current: Current = Current()


class StatePlaces(NamedTuple):
    """Which share partitions have a state at the share coordinator, or are about to have or to lose one."""

    initializing: Assignment = NOTHING
    initialized: Assignment = NOTHING
    #: Topics of which all state goes.
    deleting: frozenset[UUID] = frozenset()
    #: Of all the topics above.
    names: Mapping[UUID, str] = {}

    @property
    def is_empty(self) -> bool:
        return not (self.initializing or self.initialized or self.deleting)

    def of_topic(self, topic_id: UUID) -> frozenset[int]:
        """The partitions that have a state, or may have one."""
        none: frozenset[int] = frozenset()
        return self.initializing.get(topic_id, none) | self.initialized.get(topic_id, none)

    def initialize(self, places: Assignment, names: Mapping[UUID, str]) -> "StatePlaces":
        initializing = union(self.initializing, without(places, self.initialized))
        return StatePlaces(initializing, self.initialized, self.deleting, {**self.names, **names}).tidied()

    def initialization_done(self, places: Assignment) -> "StatePlaces":
        """Those only that are still wanted: a deletion may have come in between."""
        done = _common(places, self.initializing)
        return self._replace(
            initializing=without(self.initializing, done), initialized=union(self.initialized, done)
        )

    def delete(self, topic_ids: Iterable[UUID]) -> "StatePlaces":
        deleting = self.deleting.union(topic_ids)
        return self._replace(
            initializing=_without_topics(self.initializing, deleting),
            initialized=_without_topics(self.initialized, deleting),
            deleting=deleting,
        )

    def deletion_done(self, topic_ids: Iterable[UUID]) -> "StatePlaces":
        return self._replace(deleting=self.deleting.difference(topic_ids)).tidied()

    def forget(self, topic_ids: frozenset[UUID]) -> "StatePlaces":
        """These topics are gone, and what the coordinator knew of them with them."""
        return StatePlaces(
            _without_topics(self.initializing, topic_ids),
            _without_topics(self.initialized, topic_ids),
            self.deleting - topic_ids,
            self.names,
        ).tidied()

    def tidied(self) -> "StatePlaces":
        known = (*self.initializing, *self.initialized, *self.deleting)
        return self._replace(names={topic_id: self.names[topic_id] for topic_id in dict.fromkeys(known)})


NO_STATES: Final = StatePlaces()


def _common(one: Assignment, other: Assignment) -> Assignment:
    both = {topic_id: partitions & other.get(topic_id, frozenset()) for topic_id, partitions in one.items()}
    return {topic_id: partitions for topic_id, partitions in both.items() if partitions}


def _without_topics(places: Assignment, topic_ids: frozenset[UUID]) -> Assignment:
    return {topic_id: partitions for topic_id, partitions in places.items() if topic_id not in topic_ids}
