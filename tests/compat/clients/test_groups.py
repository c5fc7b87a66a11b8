"""Consumer groups: partitions, joins, leaves and crashes, static members, commits."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import kafka.errors
import pytest
from aiokafka.coordinator.assignors.range import RangePartitionAssignor as AioRange
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor as AioRoundRobin
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor as AioSticky
from confluent_kafka import Consumer, KafkaError, TopicPartition
from kafka import OffsetAndMetadata
from kafka import TopicPartition as PythonPartition
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from tests.compat import aio, confluent, kafka_python
from tests.compat.message import Message, numbered, values
from tests.waiting import eventually, eventually_async

QUICK = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 200}
ALL_SIX = {0, 1, 2, 3, 4, 5}

Joining = Callable[..., Consumer]


@pytest.fixture
def six(new_topic: Callable[..., str]) -> str:
    return new_topic(partitions=6)


@pytest.fixture
def joining(bootstrap: str, group: str, closing: contextlib.ExitStack) -> Joining:
    """`joining(topic, **settings)`: one more member of the test's group."""

    def join(topic: str, **settings: Any) -> Consumer:
        client = confluent.consumer(bootstrap, group, **(QUICK | settings))
        closing.callback(client.close)
        client.subscribe([topic])
        return client

    return join


def shares(members: Iterable[Consumer], topic: str) -> list[set[int]]:
    return [confluent.assigned(member, topic) for member in members]


def fairly_shared(members: list[Consumer], topic: str, partitions: set[int]) -> bool:
    owned = shares(members, topic)
    disjoint = sum(map(len, owned)) == len(set().union(*owned))
    return disjoint and set().union(*owned) == partitions and max(map(len, owned)) - min(map(len, owned)) <= 1


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
def test_members_come_and_go_with_confluent(six: str, joining: Joining, strategy: str) -> None:
    settings = {"partition_assignment_strategy": strategy}
    first = joining(six, **settings)
    eventually(lambda: shares([first], six) == [ALL_SIX])
    second, third = joining(six, **settings), joining(six, **settings)
    eventually(lambda: fairly_shared([first, second, third], six, ALL_SIX))
    second.close()
    eventually(lambda: fairly_shared([first, third], six, ALL_SIX))


@pytest.mark.parametrize(
    "assignor",
    [RangePartitionAssignor, RoundRobinPartitionAssignor, StickyPartitionAssignor, CooperativeStickyAssignor],
)
def test_members_come_and_go_with_kafka_python(
    bootstrap: str, six: str, group: str, closing: contextlib.ExitStack, assignor: type
) -> None:
    settings = {"group_id": group, "partition_assignment_strategy": [assignor], **QUICK}
    members = [kafka_python.consumer(bootstrap, six, **settings) for _ in range(2)]
    for member in members:
        closing.callback(member.close)

    def owned(member: Any) -> set[int]:
        member.poll(timeout_ms=50)
        return {each.partition for each in member.assignment()}

    eventually(lambda: sorted(map(len, map(owned, members))) == [3, 3])
    assert set().union(*map(owned, members)) == ALL_SIX
    members[0].close()
    eventually(lambda: owned(members[1]) == ALL_SIX)


@pytest.mark.parametrize("assignor", [AioRange, AioRoundRobin, AioSticky])
async def test_members_come_and_go_with_aiokafka(
    bootstrap: str, six: str, group: str, assignor: type
) -> None:
    settings = {"group_id": group, "partition_assignment_strategy": [assignor], **QUICK}
    async with aio.consuming(bootstrap, six, **settings) as first:
        async with aio.consuming(bootstrap, six, **settings) as second:

            async def halves() -> bool:
                owned = [{each.partition for each in member.assignment()} for member in (first, second)]
                return sorted(map(len, owned)) == [3, 3] and owned[0] | owned[1] == ALL_SIX

            await eventually_async(halves)

        async def all_back() -> bool:
            return {each.partition for each in first.assignment()} == ALL_SIX

        await eventually_async(all_back)


async def test_different_clients_share_one_group(
    bootstrap: str, six: str, group: str, joining: Joining, closing: contextlib.ExitStack
) -> None:
    """The assignment travels as opaque bytes, so members written in different languages understand each other."""
    settings = {"group_id": group, "partition_assignment_strategy": [AioRange], **QUICK}
    async with aio.consuming(bootstrap, six, **settings) as asynchronous:
        native = joining(six, partition_assignment_strategy="range")
        python = kafka_python.consumer(
            bootstrap, six, group_id=group, partition_assignment_strategy=[RangePartitionAssignor], **QUICK
        )
        closing.callback(python.close)

        async def thirds() -> bool:
            await asyncio.to_thread(python.poll, 50)
            native_share = await asyncio.to_thread(confluent.assigned, native, six)
            others = [{each.partition for each in member.assignment()} for member in (python, asynchronous)]
            owned = [native_share, *others]
            return list(map(len, owned)) == [2, 2, 2] and set().union(*owned) == ALL_SIX

        await eventually_async(thirds)


def test_a_cooperative_rebalance_takes_only_what_moves(six: str, joining: Joining) -> None:
    """The first member keeps consuming what it keeps: only the moved partitions are ever revoked."""
    revoked: list[int] = []
    settings = {"partition_assignment_strategy": "cooperative-sticky"}
    first = joining(six, **settings)
    first.subscribe(
        [six], on_revoke=lambda _, partitions: revoked.extend(each.partition for each in partitions)
    )
    eventually(lambda: shares([first], six) == [ALL_SIX])
    second = joining(six, **settings)
    eventually(lambda: fairly_shared([first, second], six, ALL_SIX))
    [kept, moved] = shares([first, second], six)
    assert set(revoked) == moved
    assert kept == ALL_SIX - moved


def test_work_is_shared_without_loss_or_repeat(bootstrap: str, six: str, joining: Joining) -> None:
    members = [joining(six) for _ in range(3)]
    eventually(lambda: fairly_shared(members, six, ALL_SIX))
    confluent.publish(bootstrap, six, [each for index in range(6) for each in numbered(50, partition=index)])
    seen = [each for member in members for each in confluent.take(member, 100)]
    places = sorted((each.message.partition, each.offset) for each in seen)
    assert places == [(partition, offset) for partition in range(6) for offset in range(50)]


def test_groups_are_independent(bootstrap: str, topic: str, unique: Callable[[str], str]) -> None:
    confluent.publish(bootstrap, topic, numbered(20))
    for group in (unique("one"), unique("two")):
        client = confluent.consumer(bootstrap, group)
        client.subscribe([topic])
        assert [each.offset for each in confluent.take(client, 20)] == list(range(20))
        client.commit(asynchronous=False)
        client.close()


def test_a_group_resumes_where_it_committed(bootstrap: str, topic: str, joining: Joining) -> None:
    confluent.publish(bootstrap, topic, numbered(30))
    first = joining(topic)
    confluent.take(first, 12)
    first.commit(asynchronous=False)
    confluent.take(first, 5)
    first.close()
    second = joining(topic)
    assert [each.offset for each in confluent.take(second, 18)] == list(range(12, 30))


async def test_commits_are_seen_by_every_client(
    bootstrap: str, topic: str, group: str, closing: contextlib.ExitStack
) -> None:
    client = kafka_python.consumer(bootstrap, group_id=group)
    closing.callback(client.close)
    partition = PythonPartition(topic, 0)
    client.assign([partition])
    client.commit({partition: OffsetAndMetadata(7, "a note", -1)})
    assert client.committed(partition) == 7
    assert client.committed(partition, metadata=True).metadata == "a note"
    native = confluent.consumer(bootstrap, group)
    closing.callback(native.close)
    [stored] = native.committed([TopicPartition(topic, 0)], timeout=10)
    assert (stored.offset, stored.metadata) == (7, "a note")
    async with aio.consuming(bootstrap, group_id=group) as other:
        assert await other.committed(aio.TopicPartition(topic, 0)) == 7


def test_automatic_commits_happen_on_close(bootstrap: str, topic: str, group: str) -> None:
    confluent.publish(bootstrap, topic, numbered(10))
    client = kafka_python.consumer(bootstrap, topic, group_id=group, enable_auto_commit=True)
    kafka_python.take(client, 10)
    client.close()
    reader = kafka_python.consumer(bootstrap, group_id=group)
    assert reader.committed(PythonPartition(topic, 0)) == 10
    reader.close()


CRASHING_MEMBER = """
import os, sys
from kafka import KafkaConsumer
bootstrap, topic, group = sys.argv[1:]
member = KafkaConsumer(
    bootstrap_servers=bootstrap, group_id=group, session_timeout_ms=1500, heartbeat_interval_ms=200
)
member.subscribe([topic])
member.topics()  # as in tests/compat/kafka_python.py
while not member.assignment():
    member.poll(timeout_ms=100)
print("joined", flush=True)
sys.stdin.read()
os._exit(1)
"""


def test_the_partitions_of_a_crashed_member_move_on(
    tuned_broker: Any, six: str, group: str, joining: Joining
) -> None:
    """The process dies without a word to the broker; its session runs out and the survivor takes over."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        CRASHING_MEMBER,
        tuned_broker.bootstrap_servers,
        six,
        group,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as crashing:
        assert crashing.stdout is not None
        assert crashing.stdin is not None
        assert crashing.stdout.readline() == b"joined\n"
        survivor = joining(six, partition_assignment_strategy="range,roundrobin")
        crashing.kill()
        eventually(lambda: shares([survivor], six) == [ALL_SIX])


def test_a_static_member_restarts_without_a_rebalance(
    six: str, joining: Joining, python_admin: Any, group: str
) -> None:
    first = joining(six, group_instance_id="one", session_timeout_ms=30_000)
    second = joining(six, group_instance_id="two", session_timeout_ms=30_000)
    eventually(lambda: fairly_shared([first, second], six, ALL_SIX))
    before = shares([second, first], six)
    first.close()
    assert _members(python_admin, group) == {"one", "two"}
    returned = joining(six, group_instance_id="one", session_timeout_ms=30_000)
    eventually(lambda: confluent.assigned(returned, six))
    assert shares([second, returned], six) == before
    assert _members(python_admin, group) == {"one", "two"}


def _members(python_admin: Any, group: str) -> set[str]:
    return {each["group_instance_id"] for each in python_admin.describe_groups([group])[group]["members"]}


def test_a_second_instance_fences_the_first(six: str, joining: Joining) -> None:
    first = joining(six, group_instance_id="same")
    eventually(lambda: shares([first], six) == [ALL_SIX])
    second = joining(six, group_instance_id="same")
    eventually(lambda: shares([second], six) == [ALL_SIX])
    eventually(lambda: _fenced(first))


def _fenced(member: Consumer) -> bool:
    message = member.poll(0.1)
    return message is not None and message.error() is not None and message.error().code() == KafkaError._FATAL


def test_too_short_a_session_timeout_is_refused(
    tuned_broker: Any, bootstrap: str, topic: str, group: str, closing: contextlib.ExitStack
) -> None:
    client = kafka_python.consumer(
        bootstrap, topic, group_id=group, session_timeout_ms=100, heartbeat_interval_ms=30
    )
    closing.callback(client.close)
    with pytest.raises(kafka.errors.InvalidSessionTimeoutError):
        kafka_python.take(client, 1)


def test_members_without_a_common_strategy_are_refused(
    bootstrap: str, topic: str, group: str, joining: Joining, closing: contextlib.ExitStack
) -> None:
    first = joining(topic, partition_assignment_strategy="roundrobin")
    eventually(lambda: shares([first], topic) == [{0}])
    settings = {"group_id": group, "partition_assignment_strategy": [RangePartitionAssignor]}
    second = kafka_python.consumer(bootstrap, topic, **settings)
    closing.callback(second.close)
    with pytest.raises(kafka.errors.InconsistentGroupProtocolError):
        kafka_python.take(second, 1)


def test_a_group_learns_of_new_partitions(bootstrap: str, topic: str, admin: Any, joining: Joining) -> None:
    member = joining(topic, topic_metadata_refresh_interval_ms=200)
    eventually(lambda: shares([member], topic) == [{0}])
    confluent.add_partitions(admin, topic, 4)
    eventually(lambda: shares([member], topic) == [{0, 1, 2, 3}])
    confluent.publish(bootstrap, topic, [Message(value=b"new", partition=3)])
    assert values(confluent.take(member, 1)) == [b"new"]


def test_a_whole_group_restarting_at_once_settles(bootstrap: str, six: str, group: str) -> None:
    """Ten members leave and ten come back together; each partition has one owner again."""
    for _ in range(2):
        members = [confluent.consumer(bootstrap, group, **QUICK) for _ in range(10)]
        for member in members:
            member.subscribe([six])
        eventually(lambda members=members: sorted(map(len, shares(members, six))) == [0] * 4 + [1] * 6)
        for member in members:
            member.close()


def test_one_member_may_read_several_topics(
    bootstrap: str, new_topic: Callable[..., str], joining: Joining
) -> None:
    topics = [new_topic(partitions=2) for _ in range(3)]
    for topic in topics:
        confluent.publish(bootstrap, topic, [*numbered(5), *numbered(5, partition=1)])
    member = joining(topics[0])
    member.subscribe(topics)
    assert len(confluent.take(member, 30)) == 30
