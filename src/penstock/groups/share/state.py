"""The state of a share group: changed by its records only, whether they are decided on, replayed or loaded."""

from collections.abc import Iterator
from typing import Any

from penstock.groups.assigned_records import Record
from penstock.groups.consumer.values import NO_TARGET, Assignment, GroupEpoch
from penstock.groups.records import KeyValue
from penstock.groups.share.records import FORMS, Kind
from penstock.groups.share.values import NO_STATES, Current, Member, StatePlaces, Subscription


class GroupState:
    __slots__ = (
        "_subscribed",
        "epoch",
        "group_id",
        "members",
        "metadata_hash",
        "states",
        "target_epoch",
        "targets",
        "topics_version",
    )

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.epoch = 0
        self.metadata_hash = 0
        self.target_epoch = NO_TARGET
        self.members: dict[str, Member] = {}
        self.targets: dict[str, Assignment] = {}
        self.states: StatePlaces = NO_STATES
        self._subscribed: frozenset[str] | None = None
        #: As of when topics were last looked at; not stored, so who loads the group looks again.
        self.topics_version: int | None = None

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.group_id} epoch={self.epoch} target={self.target_epoch}"
            f" members={list(self.members.values())}>"
        )

    def fork(self) -> "GroupState":
        copy = GroupState(self.group_id)
        copy.epoch, copy.metadata_hash, copy.target_epoch = self.epoch, self.metadata_hash, self.target_epoch
        copy.members, copy.targets, copy.states = dict(self.members), dict(self.targets), self.states
        copy._subscribed, copy.topics_version = self._subscribed, self.topics_version
        return copy

    @property
    def subscribed(self) -> frozenset[str]:
        if self._subscribed is None:
            subscriptions = {member.subscription.topic_names for member in self.members.values()}
            self._subscribed = frozenset().union(*subscriptions)
        return self._subscribed

    def tombstones(self) -> Iterator[KeyValue]:
        """Records that take all of it from the log."""
        for kind in (Kind.CURRENT, Kind.TARGET):
            for member_id in self.members:
                yield self._tombstone(kind, member_id)
        yield self._tombstone(Kind.TARGET_EPOCH)
        for member_id in self.members:
            yield self._tombstone(Kind.SUBSCRIPTION, member_id)
        yield self._tombstone(Kind.STATES)
        yield self._tombstone(Kind.GROUP_EPOCH)

    def _tombstone(self, kind: Kind, name: str = "") -> KeyValue:
        return self.record_of(kind, name, None)

    def record_of(self, kind: Kind, name: str, value: Any) -> KeyValue:
        return FORMS.encode(Record(kind, self.group_id, name, value))

    # Changes

    def apply(self, kind: Kind, name: str, value: Any) -> None:
        """A record's key says what it is about. Deleting what is not there is harmless: tombstones outlive it."""
        match kind:
            case Kind.GROUP_EPOCH:
                self.epoch, self.metadata_hash = value or GroupEpoch(0)
            case Kind.TARGET_EPOCH:
                self.target_epoch = NO_TARGET if value is None else value
            case Kind.TARGET:
                if value is None:
                    self.targets.pop(name, None)
                else:
                    self.targets[name] = value
            case Kind.SUBSCRIPTION:
                self._subscribe(name, value)
            case Kind.CURRENT:
                self._tell(name, value)
            case Kind.STATES:
                self.states = NO_STATES if value is None else value
                # What is missing now is found when topics are looked at.
                self.topics_version = None

    def _subscribe(self, member_id: str, subscription: Subscription | None) -> None:
        self._subscribed = None
        if subscription is None:
            self.members.pop(member_id, None)
        else:
            member = self.members.get(member_id) or Member(member_id)
            self.members[member_id] = member._replace(subscription=subscription)

    def _tell(self, member_id: str, current: Current | None) -> None:
        """A log that was compacted may tell of an assignment before it tells of the subscription."""
        member = self.members.get(member_id)
        if current is not None:
            self.members[member_id] = (member or Member(member_id))._replace(current=current)
        elif member is not None:
            self.members[member_id] = member._replace(current=Current())
