"""The state of a consumer group: changed by its records only, whether they are decided on, replayed or loaded."""

from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from penstock.groups.assigned_records import Record
from penstock.groups.consumer.records import FORMS, Kind
from penstock.groups.consumer.values import (
    NOTHING,
    Assignment,
    Current,
    GroupEpoch,
    Member,
    Resolved,
    Subscription,
    TargetEpoch,
)
from penstock.groups.records import KeyValue


class GroupState:
    __slots__ = (
        "_subscribed",
        "epoch",
        "group_id",
        "members",
        "metadata_hash",
        "owners",
        "regexes",
        "reported",
        "static_ids",
        "target_epoch",
        "target_timestamp_ms",
        "targets",
        "topics_version",
    )

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.epoch = 0
        self.metadata_hash = 0
        self.target_epoch, self.target_timestamp_ms = TargetEpoch()
        self.members: dict[str, Member] = {}
        self.static_ids: dict[str, str] = {}
        self.targets: dict[str, Assignment] = {}
        #: By whom a partition is held: whoever was told to have it, and has not confirmed that it let go.
        self.owners: dict[UUID, dict[int, str]] = {}
        self.regexes: dict[str, Resolved] = {}
        self._subscribed: frozenset[str] | None = None
        #: What members last said they own; not stored, and nothing is decided here that needs it to be complete.
        self.reported: dict[str, Assignment] = {}
        #: As of when topics were last looked at; not stored, so who loads the group looks again.
        self.topics_version: int | None = None

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.group_id} epoch={self.epoch} target={self.target_epoch}"
            f" members={list(self.members.values())}>"
        )

    def fork(self) -> "GroupState":
        copy = GroupState(self.group_id)
        copy.epoch, copy.metadata_hash = self.epoch, self.metadata_hash
        copy.target_epoch, copy.target_timestamp_ms = self.target_epoch, self.target_timestamp_ms
        copy.members, copy.static_ids = dict(self.members), dict(self.static_ids)
        copy.targets, copy.regexes = dict(self.targets), dict(self.regexes)
        copy.owners = {topic_id: dict(owners) for topic_id, owners in self.owners.items()}
        copy._subscribed, copy.topics_version = self._subscribed, self.topics_version
        copy.reported = self.reported
        return copy

    # What it is

    def static_member(self, instance_id: str) -> Member | None:
        member_id = self.static_ids.get(instance_id)
        return None if member_id is None else self.members.get(member_id)

    def topics_of(self, member: Member) -> frozenset[str]:
        """The names that a member subscribed to, and those that its regular expression has matched."""
        names = frozenset(member.subscription.topic_names)
        resolved = self.regexes.get(member.subscription.topic_regex)
        return names if resolved is None else names | resolved.topics

    @property
    def subscribed(self) -> frozenset[str]:
        if self._subscribed is None:
            alike = {
                (member.subscription.topic_names, member.subscription.topic_regex): member
                for member in self.members.values()
            }
            self._subscribed = frozenset().union(*map(self.topics_of, alike.values()))
        return self._subscribed

    @property
    def classic_count(self) -> int:
        return sum(member.is_classic for member in self.members.values())

    @property
    def preferred_assignor(self) -> str | None:
        """The one that most members ask for."""
        votes = Counter(member.subscription.assignor for member in self.members.values())
        del votes[None]
        return max(votes, key=votes.__getitem__) if votes else None

    def is_free(self, topic_id: UUID, partition: int, for_member: str) -> bool:
        return self.owners.get(topic_id, {}).get(partition, for_member) == for_member

    def waits_for_others(self, member: Member) -> bool:
        """Whether somebody else still holds a partition that this member is to have."""
        return any(
            not self.is_free(topic_id, partition, member.member_id)
            for topic_id, partitions in self.targets.get(member.member_id, NOTHING).items()
            for partition in partitions
        )

    def tombstones(self) -> Iterator[KeyValue]:
        """Records that take all of it from the log."""
        for kind in (Kind.CURRENT, Kind.TARGET):
            for member_id in self.members:
                yield self._tombstone(kind, member_id)
        yield self._tombstone(Kind.TARGET_EPOCH)
        for member_id in self.members:
            yield self._tombstone(Kind.SUBSCRIPTION, member_id)
        for expression in self.regexes:
            yield self._tombstone(Kind.REGEX, expression)
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
                self.target_epoch, self.target_timestamp_ms = value or TargetEpoch()
            case Kind.TARGET:
                _put(self.targets, name, value)
            case Kind.SUBSCRIPTION:
                self._subscribe(name, value)
            case Kind.CURRENT:
                self._tell(name, value)
            case Kind.REGEX:
                _put(self.regexes, name, value)
                self._subscribed = None

    def _subscribe(self, member_id: str, subscription: Subscription | None) -> None:
        self._subscribed = None
        old = self.members.get(member_id)
        if old is not None and self.static_ids.get(old.instance_id or "") == member_id:
            del self.static_ids[old.instance_id or ""]
        if subscription is None:
            self._release(member_id)
            self.members.pop(member_id, None)
            self.reported.pop(member_id, None)
            return
        self.members[member_id] = (old or Member(member_id))._replace(subscription=subscription)
        if subscription.instance_id is not None:
            self.static_ids[subscription.instance_id] = member_id

    def _tell(self, member_id: str, current: Current | None) -> None:
        """A log that was compacted may tell of an assignment before it tells of the subscription."""
        self._release(member_id)
        member = self.members.get(member_id)
        if current is None:
            if member is not None:
                self.members[member_id] = member._replace(current=Current())
            return
        self.members[member_id] = (member or Member(member_id))._replace(current=current)
        for topic_id, partition in current.owned():
            self.owners.setdefault(topic_id, {})[partition] = member_id

    def _release(self, member_id: str) -> None:
        member = self.members.get(member_id)
        for topic_id, partition in () if member is None else member.current.owned():
            owners = self.owners.get(topic_id, {})
            if owners.get(partition) == member_id:
                del owners[partition]
                if not owners:
                    del self.owners[topic_id]


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        values.pop(name, None)
    else:
        values[name] = value
