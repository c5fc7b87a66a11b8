"""Members that speak the classic protocol, as members of a consumer group."""

from collections.abc import Iterator
from uuid import UUID

from penstock.groups.consumer.embedded import (
    EmbeddedSubscription,
    TopicPartitions,
    assignment_bytes,
    parse_subscription,
)
from penstock.groups.consumer.values import Assignment, ClassicPart, Member, Subscription
from penstock.groups.messages import Protocols
from penstock.groups.topics import Topics


def with_classic_part(
    known: Subscription, embedded: EmbeddedSubscription, protocols: Protocols, session_timeout_ms: int
) -> Subscription:
    return known._replace(
        rack_id=known.rack_id if embedded.rack_id is None else embedded.rack_id,
        topic_names=tuple(sorted(set(embedded.topics))),
        topic_regex="",
        assignor=None,
        classic=ClassicPart(session_timeout_ms, protocols),
    )


def places(partitions: TopicPartitions, topics: Topics) -> Iterator[tuple[UUID, int]]:
    """Those of topics that exist, by the topics' ids."""
    for name, numbers in partitions:
        topic = topics.get(name)
        if topic is not None:
            yield from ((topic.id, number) for number in numbers)


def embedded_assignment(member: Member, assigned: Assignment, topics: Topics) -> bytes:
    """As the member can read it: by names, in the version of its subscription."""
    classic = member.subscription.classic
    assert classic is not None, member
    _, metadata = classic.protocols[0]
    named = [
        (topic.name, partitions)
        for topic_id, partitions in assigned.items()
        if (topic := topics.by_id(topic_id)) is not None
    ]
    return assignment_bytes(sorted(named), parse_subscription(metadata).version)
