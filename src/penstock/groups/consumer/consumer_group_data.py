"""The data of a consumer group, the draft of an operation on it, and the topics that it subscribes to.

Only records change the data, in the same way whether they are decided, replayed or loaded. Regular expressions are
matched against whole topic names. A hash over everything that an assignment depends on is stored with the group epoch,
so that the next coordinator of the group can detect a change.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar, Self
from uuid import UUID

from penstock.groups.consumer.consumer_group_records import (
    CONSUMER_GROUP_CODEC,
    ConsumerCurrentAssignment,
    ConsumerGroupMember,
    ConsumerGroupRecordType,
    ConsumerSubscription,
    ResolvedRegularExpression,
)
from penstock.groups.group import Operation
from penstock.groups.modern_group import (
    NO_PARTITIONS,
    Assignment,
    GroupDraft,
    GroupEpoch,
    GroupRecordCodec,
    SubscribedGroup,
    TargetAssignmentEpoch,
    metadata_hash,
    put_or_remove,
)
from penstock.groups.timers import TimerKey
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.regex import InvalidRegex, compile_regex

# Timers of a member
SESSION_TIMER, REBALANCE_TIMER = "consumer session", "consumer rebalance"
JOIN_TIMER, SYNC_TIMER = "consumer join", "consumer sync"


class ConsumerGroupData(SubscribedGroup):
    __slots__ = ("owners", "regexes", "reported", "static_ids", "target_timestamp_ms")

    kind: ClassVar[str] = "consumer"
    codec: ClassVar[GroupRecordCodec[Any]] = CONSUMER_GROUP_CODEC
    member_timers: ClassVar[tuple[str, ...]] = (SESSION_TIMER, REBALANCE_TIMER, JOIN_TIMER, SYNC_TIMER)
    members: dict[str, ConsumerGroupMember]

    def __init__(self, group_id: str) -> None:
        super().__init__(group_id)
        self.target_epoch, self.target_timestamp_ms = TargetAssignmentEpoch()
        self.static_ids: dict[str, str] = {}
        #: The owner of each partition: the member to which it was assigned, until that member confirms the revocation.
        self.owners: dict[UUID, dict[int, str]] = {}
        self.regexes: dict[str, ResolvedRegularExpression] = {}
        #: The partitions that members last reported as owned. Not stored; no decision needs it to be complete.
        self.reported: dict[str, Assignment] = {}

    def fork(self) -> Self:
        copy = super().fork()
        copy.target_timestamp_ms = self.target_timestamp_ms
        copy.static_ids, copy.regexes = dict(self.static_ids), dict(self.regexes)
        copy.owners = {topic_id: dict(owners) for topic_id, owners in self.owners.items()}
        copy.reported = self.reported
        return copy

    # Properties

    def static_member(self, instance_id: str) -> ConsumerGroupMember | None:
        member_id = self.static_ids.get(instance_id)
        return None if member_id is None else self.members.get(member_id)

    def topics_of(self, member: ConsumerGroupMember) -> frozenset[str]:
        """The names that a member subscribed to, and the topics that its regular expression has matched."""
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
        """The assignor that most members request."""
        votes = Counter(member.subscription.assignor for member in self.members.values())
        del votes[None]
        return max(votes, key=votes.__getitem__) if votes else None

    def is_free(self, topic_id: UUID, partition: int, for_member: str) -> bool:
        return self.owners.get(topic_id, {}).get(partition, for_member) == for_member

    def waits_for_others(self, member: ConsumerGroupMember) -> bool:
        """Whether another member still holds a partition of this member's target."""
        return any(
            not self.is_free(topic_id, partition, member.member_id)
            for topic_id, partitions in self.targets.get(member.member_id, NO_PARTITIONS).items()
            for partition in partitions
        )

    def _other_records(self) -> Iterable[tuple[ConsumerGroupRecordType, str]]:
        return ((ConsumerGroupRecordType.REGULAR_EXPRESSION, expression) for expression in self.regexes)

    # Changes

    def apply(self, kind: ConsumerGroupRecordType, name: str, value: Any) -> None:
        match kind:
            case ConsumerGroupRecordType.GROUP_METADATA:
                self.epoch, self.metadata_hash = value or GroupEpoch(0)
            case ConsumerGroupRecordType.TARGET_ASSIGNMENT_METADATA:
                self.target_epoch, self.target_timestamp_ms = value or TargetAssignmentEpoch()
            case ConsumerGroupRecordType.TARGET_ASSIGNMENT_MEMBER:
                put_or_remove(self.targets, name, value)
            case ConsumerGroupRecordType.MEMBER_METADATA:
                self._subscribe(name, value)
            case ConsumerGroupRecordType.CURRENT_MEMBER_ASSIGNMENT:
                self._set_current(name, value)
            case ConsumerGroupRecordType.REGULAR_EXPRESSION:
                put_or_remove(self.regexes, name, value)
                self._subscribed = None

    def _subscribe(self, member_id: str, subscription: ConsumerSubscription | None) -> None:
        self._subscribed = None
        old = self.members.get(member_id)
        if old is not None and self.static_ids.get(old.instance_id or "") == member_id:
            del self.static_ids[old.instance_id or ""]
        if subscription is None:
            self._release(member_id)
            self.members.pop(member_id, None)
            self.reported.pop(member_id, None)
            return
        self.members[member_id] = (old or ConsumerGroupMember(member_id))._replace(subscription=subscription)
        if subscription.instance_id is not None:
            self.static_ids[subscription.instance_id] = member_id

    def _set_current(self, member_id: str, current: ConsumerCurrentAssignment | None) -> None:
        """After compaction the log may have a member's assignment before its subscription."""
        self._release(member_id)
        member = self.members.get(member_id)
        if current is None:
            if member is not None:
                self.members[member_id] = member._replace(current=ConsumerCurrentAssignment())
            return
        self.members[member_id] = (member or ConsumerGroupMember(member_id))._replace(current=current)
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


class ConsumerGroupDraft(GroupDraft[ConsumerGroupData]):
    __slots__ = ()

    @property
    def subscribed_before(self) -> frozenset[str]:
        return self._origin.subscribed

    # Combined changes

    def tell(self, member: ConsumerGroupMember, current: ConsumerCurrentAssignment) -> ConsumerGroupMember:
        self.change(ConsumerGroupRecordType.CURRENT_MEMBER_ASSIGNMENT, member.member_id, current)
        return self.state.members[member.member_id]

    def begin_epoch(self, metadata_hash: int) -> None:
        self.change(
            ConsumerGroupRecordType.GROUP_METADATA, "", GroupEpoch(self.state.epoch + 1, metadata_hash)
        )


def schedule_session_timeout(
    operation: Operation, group_id: str, member: ConsumerGroupMember, session_timeout_ms: int
) -> None:
    """`session_timeout_ms` is the group's; members with the classic protocol have their own."""
    classic = member.subscription.classic
    delay_ms = session_timeout_ms if classic is None else classic.session_timeout_ms
    operation.schedule_in(TimerKey(SESSION_TIMER, group_id, member.member_id), delay_ms)


def matching_topics(expression: str, names: Iterable[str]) -> frozenset[str]:
    """Raises ApiError for an expression that RE2 does not accept."""
    match = compile_topic_regex(expression).fullmatch
    return frozenset(name for name in names if match(name) is not None)


def compile_topic_regex(expression: str) -> Any:
    """Raises ApiError."""
    try:
        return compile_regex(expression)
    except InvalidRegex as error:
        message = f"SubscribedTopicRegex `{expression[:256]}` is not a valid regular expression: {error}."
        raise ApiError(ErrorCode.invalid_regular_expression, message) from None


def subscription_hash(draft: ConsumerGroupDraft) -> int:
    """The hash of the subscribed topics; the stored one if neither topics nor subscriptions have changed."""
    if draft.topics_unchanged and draft.state.subscribed == draft.subscribed_before:
        return draft.state.metadata_hash
    return metadata_hash(draft.state.subscribed, draft.operation.topics)


def resolve_regular_expressions(draft: ConsumerGroupDraft) -> None:
    """Drop expressions that no member uses any more, and match the others again if topics may have changed.

    An expression must not reveal topics, so only those that the client may describe match.
    """
    topics = draft.operation.topics
    used = {member.subscription.topic_regex: None for member in draft.state.members.values()}
    for expression in [each for each in draft.state.regexes if each not in used]:
        draft.change(ConsumerGroupRecordType.REGULAR_EXPRESSION, expression, None)
    for expression in used:
        known = draft.state.regexes.get(expression)
        if not expression or (known is not None and draft.topics_unchanged):
            continue
        names = topics.names()
        if draft.operation.settings.hides_topics:
            may_describe = draft.operation.may_describe
            if may_describe is None:
                continue  # the next heartbeat of a member, which is a client, matches it
            names = tuple(filter(may_describe, names))
        found = matching_topics(expression, names)
        if known is None or known.topics != found:
            draft.change(
                ConsumerGroupRecordType.REGULAR_EXPRESSION,
                expression,
                ResolvedRegularExpression(found, topics.version, draft.operation.now_ms),
            )
