"""Converts a group in use from the classic to the consumer protocol and back; every member keeps its partitions.

The first member that joins with the consumer protocol makes the group a consumer group, in which the other members
go on with the classic protocol. When the last member with the consumer protocol has left, the group becomes a
classic group again.
"""

from collections.abc import Iterator
from typing import Final
from uuid import UUID

from penstock.groups.classic.classic_group import ClassicGroup, reply_to_waiting
from penstock.groups.classic.classic_group_data import ClassicGroupMember as ClassicMember
from penstock.groups.consumer.consumer_group_data import (
    ConsumerGroupData,
    ConsumerGroupDraft,
    schedule_session_timeout,
)
from penstock.groups.consumer.consumer_group_records import (
    ClassicMemberMetadata,
    ConsumerCurrentAssignment,
    ConsumerGroupMember,
    ConsumerGroupRecordType,
    ConsumerSubscription,
)
from penstock.groups.coordinator_records import GroupMetadataRecord, StoredGroup, StoredMember
from penstock.groups.embedded_protocol import (
    CONSUMER_PROTOCOL_TYPE,
    EmbeddedSubscription,
    MalformedConsumerProtocol,
    NamedPartitions,
    encode_assignment,
    parse_assignment,
    parse_subscription,
)
from penstock.groups.group import Operation, Protocols
from penstock.groups.modern_group import (
    Assignment,
    GroupEpoch,
    MemberState,
    TargetAssignmentEpoch,
    to_assignment,
    union,
)
from penstock.groups.topics import Topics
from penstock.protocol.errors import ApiError, ErrorCode


def with_classic_metadata(
    known: ConsumerSubscription, embedded: EmbeddedSubscription, protocols: Protocols, session_timeout_ms: int
) -> ConsumerSubscription:
    return known._replace(
        rack_id=known.rack_id if embedded.rack_id is None else embedded.rack_id,
        topic_names=tuple(sorted(set(embedded.topics))),
        topic_regex="",
        assignor=None,
        classic=ClassicMemberMetadata(session_timeout_ms, protocols),
    )


def topic_id_partitions(partitions: NamedPartitions, topics: Topics) -> Iterator[tuple[UUID, int]]:
    """The partitions of existing topics, by topic id."""
    for name, numbers in partitions:
        topic = topics.get(name)
        if topic is not None:
            yield from ((topic.id, number) for number in numbers)


def embedded_assignment(member: ConsumerGroupMember, assigned: Assignment, topics: Topics) -> bytes:
    """Encode for the member: by topic names, in the version of its subscription."""
    classic = member.subscription.classic
    assert classic is not None, member
    _, metadata = classic.protocols[0]
    named = [
        (topic.name, partitions)
        for topic_id, partitions in assigned.items()
        if (topic := topics.by_id(topic_id)) is not None
    ]
    return encode_assignment(sorted(named), parse_subscription(metadata).version)


_UPGRADES: Final = ("upgrade", "bidirectional")
_DOWNGRADES: Final = ("downgrade", "bidirectional")


# --- classic to consumer ---


def upgrade_to_consumer_group(group: ClassicGroup, operation: Operation) -> ConsumerGroupDraft:
    """Tell waiting members to join again. Raises ApiError if the group cannot become a consumer group."""
    settings = operation.settings
    is_allowed = (
        settings.consumer_migration_policy in _UPGRADES
        and group.is_consumer_group
        and len(group.members) <= settings.consumer_size_max
    )
    if not is_allowed:
        raise _refusal(group, "is not a consumer group")
    members = _members_of_classic_group(group, operation.topics)
    for waiting in group.members.values():
        error = ErrorCode.rebalance_in_progress
        reply_to_waiting(group, waiting, operation, error, member_id=waiting.member_id)
    operation.store_all(group.tombstones())
    draft = ConsumerGroupDraft(ConsumerGroupData(group.group_id), operation, is_new=True)
    _write_members(draft, group.generation, members)
    return draft


def _refusal(group: ClassicGroup, why: str) -> ApiError:
    return ApiError(ErrorCode.group_id_not_found, f"Group {group.group_id} {why}.")


def _write_members(draft: ConsumerGroupDraft, epoch: int, members: list[ConsumerGroupMember]) -> None:
    for member in members:
        draft.change(ConsumerGroupRecordType.MEMBER_METADATA, member.member_id, member.subscription)
    draft.change(ConsumerGroupRecordType.GROUP_METADATA, "", GroupEpoch(epoch))
    for member in members:
        draft.change(
            ConsumerGroupRecordType.TARGET_ASSIGNMENT_MEMBER, member.member_id, member.current.assigned
        )
    draft.change(ConsumerGroupRecordType.TARGET_ASSIGNMENT_METADATA, "", TargetAssignmentEpoch(epoch))
    for member in members:
        draft.change(ConsumerGroupRecordType.CURRENT_MEMBER_ASSIGNMENT, member.member_id, member.current)
        schedule_session_timeout(
            draft.operation, draft.group_id, member, draft.operation.settings.consumer_session_timeout_ms
        )


def _members_of_classic_group(group: ClassicGroup, topics: Topics) -> list[ConsumerGroupMember]:
    """Members may still hold what is assigned to them, however far a rebalance has come.

    A cooperative member may also hold what it owned when it joined: it lets go of that when it gets its assignment,
    which the group does not learn before the member joins again. Raises ApiError.
    """
    stored = (
        {} if group.stored is None else {each.member_id: each.assignment for each in group.stored.members}
    )
    try:
        assigned = {member_id: parse_assignment(stored.get(member_id, b"")) for member_id in group.members}
        embedded = {
            member_id: parse_subscription(_subscription_metadata(group, member))
            for member_id, member in group.members.items()
        }
    except MalformedConsumerProtocol:
        why = "cannot be a consumer group because the embedded consumer protocol is malformed"
        raise _refusal(group, why) from None
    # The members' own assignor may have assigned a partition to two of them.
    holders: dict[tuple[UUID, int], str] = {}
    for partitions in (assigned, {member_id: each.owned for member_id, each in embedded.items()}):
        for member_id, named in partitions.items():
            for tp in topic_id_partitions(named, topics):
                holders.setdefault(tp, member_id)
    members = []
    for member_id, member in group.members.items():
        held = to_assignment(tp for tp, holder in holders.items() if holder == member_id)
        current = ConsumerCurrentAssignment(group.generation).moved(
            group.generation, MemberState.STABLE, held
        )
        subscription = _subscription(member, embedded[member_id])
        members.append(ConsumerGroupMember(member_id, subscription, current))
    return members


def _subscription_metadata(group: ClassicGroup, member: ClassicMember) -> bytes:
    protocols = dict(member.protocols)
    return protocols.get(group.protocol or "", next(iter(protocols.values())))


def _subscription(member: ClassicMember, embedded: EmbeddedSubscription) -> ConsumerSubscription:
    known = ConsumerSubscription(
        instance_id=member.instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
    )
    return with_classic_metadata(known, embedded, member.protocols, member.session_timeout_ms)


# --- consumer to classic ---


def can_downgrade(state: ConsumerGroupData, operation: Operation, *, others: int = 0) -> bool:
    """Whether all members except `others` use the classic protocol, and the settings allow a classic group."""
    settings, members = operation.settings, state.members
    return (
        bool(members)
        and state.classic_count == len(members) - others
        and settings.consumer_migration_policy in _DOWNGRADES
        and len(members) <= settings.size_max
    )


def downgrade_to_classic_group(state: ConsumerGroupData, operation: Operation) -> ClassicGroup:
    """Tell all members to join again; until then they keep their assignments.

    Earlier in the same operation, only tombstones of the consumer group may be stored, no other records of it: when
    they are replayed, the group is already a classic group.
    """
    operation.store_all(state.tombstones())
    for member_id in state.members:
        state.cancel_member_timers(operation.timers, member_id)
    stored = _stored_group(state, operation)
    group = ClassicGroup(state.group_id)
    group.install(stored)
    # Replaced at once, because the rebalance that starts here is in no record. It starts again with each coordinator
    # that loads the group, until a generation is stored.
    operation.groups[state.group_id] = group
    operation.store_group(GroupMetadataRecord(group=state.group_id, value=stored))
    group.loaded(operation)
    return group


def _stored_group(state: ConsumerGroupData, operation: Operation) -> StoredGroup:
    protocol = _common_protocol(state)
    return StoredGroup(
        protocol_type=CONSUMER_PROTOCOL_TYPE,
        generation=state.epoch,
        protocol=protocol,
        leader=None,  # no member has assigned partitions in this generation
        state_timestamp_ms=operation.now_ms,
        members=tuple(
            _stored_member(member, protocol, operation.topics) for member in state.members.values()
        ),
    )


def _common_protocol(state: ConsumerGroupData) -> str:
    """The first protocol that all members support. There is one, because members are admitted only if there is."""
    parts = [member.subscription.classic for member in state.members.values()]
    names = [{name for name, _ in part.protocols} for part in parts if part is not None]
    first = parts[0]
    assert first is not None
    return next(name for name, _ in first.protocols if all(name in each for each in names))


def _stored_member(member: ConsumerGroupMember, protocol: str, topics: Topics) -> StoredMember:
    subscription, current = member.subscription, member.current
    assert subscription.classic is not None
    # What the member has not confirmed to have revoked it may still hold.
    held = union(current.assigned, current.revoking)
    return StoredMember(
        member_id=member.member_id,
        instance_id=subscription.instance_id,
        client_id=subscription.client_id,
        client_host=subscription.client_host,
        rebalance_timeout_ms=subscription.rebalance_timeout_ms,
        session_timeout_ms=subscription.classic.session_timeout_ms,
        subscription=dict(subscription.classic.protocols)[protocol],
        assignment=embedded_assignment(member, held, topics),
    )
