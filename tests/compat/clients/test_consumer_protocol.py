"""`group.protocol=consumer` with librdkafka, alone and in groups that move between it and the classic protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupState, ConsumerGroupType, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka import KafkaConsumer
from kafka.coordinator.assignors.range import RangePartitionAssignor
from tests.brokers import TEST_SETTINGS, BrokerProcess
from tests.compat import confluent
from tests.waiting import eventually

QUICK = {
    "group.consumer.heartbeat.interval.ms": "200",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.session.timeout.ms": "1000",
}
CLASSIC = {"group.protocol": "classic", "session.timeout.ms": 6000, "heartbeat.interval.ms": 200}


@pytest.fixture(scope="module")
def process(broker_with: Callable[..., BrokerProcess]) -> BrokerProcess:
    return broker_with(QUICK)


@pytest.fixture
def admin(process: BrokerProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": process.bootstrap_servers, "log_level": 0})


@pytest.fixture
def topic(admin: AdminClient, unique: Callable[[str], str]) -> str:
    return confluent.create_topic(admin, unique("topic"), 6)


class Member:
    """A consumer that writes down what it is given and what it gives up."""

    def __init__(self, bootstrap: str, group: str, topics: list[str], **settings: Any) -> None:
        base = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
        self.client = Consumer(base | {name.replace("_", "."): value for name, value in settings.items()})
        self.given: list[set[int]] = []
        self.lost: list[set[int]] = []
        self.read: list[tuple[int, int]] = []
        self.errors: list[KafkaError] = []
        self.client.subscribe(topics, on_assign=self._on(self.given), on_revoke=self._on(self.lost))

    @staticmethod
    def _on(notes: list[set[int]]) -> Callable[[Consumer, list[TopicPartition]], None]:
        return lambda _, partitions: notes.append({each.partition for each in partitions})

    def poll(self) -> None:
        message = self.client.poll(0.02)
        if message is not None and message.error() is not None:
            self.errors.append(message.error())
        elif message is not None:
            self.read.append((message.partition(), message.offset()))

    @property
    def owned(self) -> set[tuple[str, int]]:
        return {(each.topic, each.partition) for each in self.client.assignment()}


@pytest.fixture
def join(process: BrokerProcess, group: str) -> Iterator[Callable[..., Member]]:
    with contextlib.ExitStack() as closing:

        def join(*topics: str, **settings: Any) -> Member:
            member = Member(process.bootstrap_servers, group, list(topics), **settings)
            closing.callback(member.client.close)
            return member

        yield join


def shared(members: list[Member], *sizes: int) -> None:
    """Wait until the members have so many partitions each, none of them twice."""

    def check() -> bool:
        for member in members:
            member.poll()
        owned = [member.owned for member in members]
        return sorted(map(len, owned)) == sorted(sizes) and len(set().union(*owned)) == sum(sizes)

    eventually(check, what=f"partitions shared as {sizes}")


def publish(bootstrap: str, topic: str, *, each: int, partitions: int = 6) -> None:
    """So many messages to each partition."""
    producer = confluent.producer(bootstrap)
    for number in range(each * partitions):
        producer.produce(topic, str(number), partition=number % partitions)
    assert producer.flush(60) == 0


def test_three_members_share_and_give_up_only_what_another_one_gets(
    join: Callable[..., Member], topic: str, admin: AdminClient, group: str
) -> None:
    first = join(topic)
    shared([first], 6)
    second, third = join(topic), join(topic)
    members = [first, second, third]
    shared(members, 2, 2, 2)
    kept = {partition for _, partition in first.owned}
    assert not kept & set().union(*first.lost), "what it keeps is never taken from it"
    described = admin.describe_consumer_groups([group])[group].result()
    assert (described.state, described.type) == (ConsumerGroupState.STABLE, ConsumerGroupType.CONSUMER)
    told = {tp.partition for member in described.members for tp in member.assignment.topic_partitions}
    assert told == set(range(6))
    third.client.close()
    shared([first, second], 3, 3)
    assert kept <= {partition for _, partition in first.owned}


def test_positions_are_committed_and_a_member_that_left_starts_there(
    process: BrokerProcess, join: Callable[..., Member], topic: str
) -> None:
    publish(process.bootstrap_servers, topic, each=10)
    member = join(topic)
    shared([member], 6)
    eventually(lambda: member.poll() or len(member.read) == 60, what="60 messages")
    member.client.commit(asynchronous=False)
    member.client.close()
    publish(process.bootstrap_servers, topic, each=2)
    again = join(topic)
    eventually(lambda: again.poll() or len(again.read) == 12, what="12 more")
    assert not set(again.read) & set(member.read)


def test_a_static_member_returns_to_its_partitions_without_a_rebalance(
    join: Callable[..., Member], topic: str
) -> None:
    stays, goes = join(topic, group_instance_id="a"), join(topic, group_instance_id="b")
    shared([stays, goes], 3, 3)
    had, notes = goes.owned, (list(stays.given), list(stays.lost))
    goes.client.close()
    back = join(topic, group_instance_id="b")
    shared([stays, back], 3, 3)
    assert back.owned == had
    assert (stays.given, stays.lost) == notes


def test_a_pattern_is_matched_by_the_broker_when_topics_come(
    join: Callable[..., Member], admin: AdminClient, unique: Callable[[str], str]
) -> None:
    prefix = unique("pattern")
    confluent.create_topic(admin, f"{prefix}.one", 2)
    member = join(f"^{prefix}\\..*")
    shared([member], 2)
    confluent.create_topic(admin, f"{prefix}.two", 3)
    confluent.create_topic(admin, f"{prefix}-other", 3)
    shared([member], 5)
    assert {name for name, _ in member.owned} == {f"{prefix}.one", f"{prefix}.two"}


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_group_in_use_moves_to_the_consumer_protocol_and_back(
    process: BrokerProcess,
    join: Callable[..., Member],
    admin: AdminClient,
    topic: str,
    group: str,
    strategy: str,
) -> None:
    old = [join(topic, **CLASSIC, **{"partition.assignment.strategy": strategy}) for _ in range(2)]
    shared(old, 3, 3)
    publish(process.bootstrap_servers, topic, each=5)
    eventually(lambda: [m.poll() for m in old] and sum(len(m.read) for m in old) == 30, what="30 messages")
    for member in old:
        member.client.commit(asynchronous=False)
    new = join(topic)
    shared([*old, new], 2, 2, 2)
    assert _kind(admin, group) is ConsumerGroupType.CONSUMER
    publish(process.bootstrap_servers, topic, each=5)
    members = [*old, new]
    eventually(
        lambda: [m.poll() for m in members] and sum(len(m.read) for m in members) >= 60, what="30 more"
    )
    read = [place for member in members for place in member.read]
    assert len(read) == len(set(read)) == 60, "positions came with the group, so nothing is read twice"
    for member in members:
        member.client.commit(asynchronous=False)
    new.client.close()
    shared(old, 3, 3)
    assert _kind(admin, group) is ConsumerGroupType.CLASSIC
    assert not old[0].errors, old[0].errors


def _kind(admin: AdminClient, group: str) -> ConsumerGroupType:
    listed = admin.list_consumer_groups().result().valid
    (kind,) = (each.type for each in listed if each.group_id == group)
    return kind


def test_classic_members_of_another_library_go_on_in_a_consumer_group(
    process: BrokerProcess, join: Callable[..., Member], topic: str, group: str
) -> None:
    old = KafkaConsumer(
        topic,
        bootstrap_servers=process.bootstrap_servers,
        group_id=group,
        session_timeout_ms=6000,
        heartbeat_interval_ms=200,
        partition_assignment_strategy=[RangePartitionAssignor],
    )
    with contextlib.closing(old):
        # Otherwise it may join again as soon as it has read the topic's metadata: see tests/compat/kafka_python.py.
        eventually(lambda: topic in old.topics(), what="the topic")
        eventually(lambda: old.poll(timeout_ms=500) or len(old.assignment()) == 6, what="all partitions")
        new = join(topic)

        def halves() -> bool:
            old.poll(timeout_ms=50)
            new.poll()
            theirs = {(tp.topic, tp.partition) for tp in old.assignment()}
            return len(theirs) == len(new.owned) == 3 and not theirs & new.owned

        eventually(halves, what="half of the partitions each")


def test_a_group_goes_on_after_its_coordinator_was_killed(tmp_path: Path, group: str) -> None:
    broker = BrokerProcess(tmp_path / "data", TEST_SETTINGS | QUICK).start()
    try:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
        confluent.create_topic(admin, "t", 4)
        members = [Member(broker.bootstrap_servers, group, ["t"]) for _ in range(2)]
        shared(members, 2, 2)
        had = [member.owned for member in members]
        broker.kill()
        broker.start()
        publish(broker.bootstrap_servers, "t", each=5, partitions=4)
        eventually(
            lambda: [m.poll() for m in members] and sum(len(m.read) for m in members) == 20,
            what="20 messages",
        )
        assert [member.owned for member in members] == had
        members.append(Member(broker.bootstrap_servers, group, ["t"]))
        shared(members, 2, 1, 1)
        for member in members:
            member.client.close()
    finally:
        broker.stop()
