"""Share groups with confluent-kafka's ShareConsumer: accept, release, reject, and at-most-once."""

import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from kio.schema.errors import ErrorCode
from tests.brokers import BrokerProcess
from tests.compat import confluent
from tests.compat.message import Message, numbered
from tests.compat.raw import connected, schema
from tests.compat.share import (
    REJECT,
    RELEASE,
    SHARE_SETTINGS,
    ShareConsumer,
    accept,
    configure,
    counted,
    share_consumer,
    take,
    values,
    work,
)
from tests.waiting import eventually


@pytest.fixture(scope="module")
def broker(broker_with: Callable[..., BrokerProcess]) -> BrokerProcess:
    return broker_with(SHARE_SETTINGS)


@pytest.fixture(scope="module")
def admin(broker: BrokerProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})


@pytest.fixture
def group(unique: Callable[[str], str], admin: AdminClient) -> str:
    name = unique("group")
    configure(admin, name, share_auto_offset_reset="earliest")
    return name


Join = Callable[..., ShareConsumer]


@pytest.fixture
def join(bootstrap: str, group: str, topic: str, closing: contextlib.ExitStack) -> Join:
    """`join(**settings)`: one more member of the test's group, subscribed to the test's topic."""

    def make(**settings: Any) -> ShareConsumer:
        client = share_consumer(bootstrap, group, topic, **settings)
        closing.callback(client.close)
        return client

    return make


def publish(bootstrap: str, topic: str, count: int) -> list[bytes | None]:
    messages = numbered(count)
    confluent.publish(bootstrap, topic, messages)
    return [message.value for message in messages]


def ask(broker: BrokerProcess, api: str, version: int, name: str, **fields: Any) -> Any:
    """A request that confluent-kafka has no function for."""
    with connected(broker.address) as connection:
        return connection.call(schema(api, version, f"{name}Request")(**fields))


# -- what members do -----------------------------------------------------------------------------------


def test_what_is_accepted_is_delivered_once(bootstrap: str, topic: str, join: Join) -> None:
    sent = publish(bootstrap, topic, 100)
    first = join()
    assert counted(take(first, 100)) == Counter(sent)
    first.close()
    sent = publish(bootstrap, topic, 10)
    assert counted(take(join(), 10)) == Counter(sent)


def test_what_is_released_comes_again_and_what_is_rejected_does_not(
    bootstrap: str, topic: str, join: Join
) -> None:
    publish(bootstrap, topic, 3)
    fates = {b"0": accept, b"1": lambda _: RELEASE, b"2": lambda _: REJECT}
    client = join()
    assert sorted(values(take(client, 3, lambda message: fates[message.value()](message)))) == [
        b"0",
        b"1",
        b"2",
    ]
    (again,) = take(client, 1)
    assert (again.value(), again.delivery_count()) == (b"1", 2)
    publish(bootstrap, topic, 1)
    assert values(take(client, 1)) == [b"0"]


def test_a_group_begins_where_its_setting_says(
    bootstrap: str, topic: str, join: Join, admin: AdminClient, group: str, broker: BrokerProcess
) -> None:
    configure(admin, group, share_auto_offset_reset="latest")
    publish(bootstrap, topic, 5)
    client = join()
    eventually(lambda: work(client) or start_offset(broker, group, topic) == 5, what="a place to begin at")
    publish(bootstrap, topic, 1)
    assert [message.offset() for message in take(client, 1)] == [5]


def test_two_members_share_one_partition(bootstrap: str, topic: str, join: Join) -> None:
    members = [join(max_poll_records=10), join(max_poll_records=10)]
    seen: list[list[int]] = [[], []]
    sent = 0

    def both_work() -> bool:
        for offsets, client in zip(seen, members, strict=True):
            offsets += [message.offset() for message in work(client)]
        return all(seen)

    while not all(seen):
        assert sent < 2_000, f"one of them got nothing: {seen}"
        sent += len(publish(bootstrap, topic, 10))
        both_work()
    eventually(lambda: both_work() and len(seen[0]) + len(seen[1]) >= sent, what="all of it")
    assert sorted(seen[0] + seen[1]) == list(range(sent))


def test_a_group_may_get_no_more_than_it_asks_for(
    bootstrap: str, group: str, topic: str, join: Join, admin: AdminClient
) -> None:
    """Ten records in one batch, of which this client could only have all by its own means."""
    publish(bootstrap, topic, 10)
    configure(admin, group, penstock_share_acquire_mode="record_limit")
    client = join(max_poll_records=3)
    sizes: list[int] = []

    def all_of_it() -> bool:
        sizes.append(len(work(client)))
        return sum(sizes) == 10

    eventually(all_of_it)
    assert [size for size in sizes if size] == [3, 3, 3, 1]


def test_new_partitions_are_read_without_a_new_member(
    bootstrap: str, topic: str, join: Join, admin: AdminClient
) -> None:
    client = join()
    publish(bootstrap, topic, 1)
    take(client, 1)
    confluent.add_partitions(admin, topic, 2)
    confluent.publish(bootstrap, topic, [Message(value=b"new", partition=1)])
    assert values(take(client, 1)) == [b"new"]


# -- when they fail ------------------------------------------------------------------------------------

_GREEDY = """
import sys
from tests.compat.share import share_consumer
client = share_consumer(*sys.argv[1:])
while not (messages := client.poll(1.0)):
    pass
print(*sorted(message.offset() for message in messages), flush=True)
sys.stdin.read()
"""


def greedy(*arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A member that takes messages and does nothing with them, and the offsets that it has."""
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", _GREEDY, *arguments],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, [int(offset) for offset in process.stdout.readline().split()]


def test_what_a_killed_member_had_comes_to_another(
    bootstrap: str, group: str, topic: str, join: Join
) -> None:
    publish(bootstrap, topic, 10)
    process, held = greedy(bootstrap, group, topic)
    process.kill()
    process.communicate()
    assert held
    taken = take(join(), 10)
    counts = {message.offset(): message.delivery_count() for message in taken}
    assert counts == {offset: 2 if offset in held else 1 for offset in range(10)}


def test_a_lock_that_runs_out_gives_the_message_to_another(
    bootstrap: str, group: str, topic: str, join: Join, admin: AdminClient
) -> None:
    configure(admin, group, share_record_lock_duration_ms="5000")
    publish(bootstrap, topic, 3)
    process, held = greedy(bootstrap, group, topic)
    try:
        assert held == [0, 1, 2]
        taken = take(join(), 3)
        assert [message.delivery_count() for message in taken] == [2, 2, 2]
    finally:
        process.kill()
        process.communicate()


def test_a_released_message_rests_as_long_as_the_group_says(
    bootstrap: str, group: str, topic: str, join: Join, admin: AdminClient
) -> None:
    rest = {"backoff": "fixed", "backoff_ms": "5000", "backoff_jitter_ms": "0"}
    configure(admin, group, **{f"penstock_share_{name}": value for name, value in rest.items()})
    publish(bootstrap, topic, 1)
    client = join()
    take(client, 1, lambda _: RELEASE)
    released_s = time.monotonic()
    publish(bootstrap, topic, 1)
    assert [message.offset() for message in take(client, 1)] == [1]  # later records do not wait for it
    (again,) = take(client, 1)
    assert again.offset() == 0
    # It was released a moment before that was known here.
    assert time.monotonic() - released_s > 4.0


def test_a_poison_message_gets_one_dead_letter_with_its_story(
    bootstrap: str, group: str, topic: str, join: Join, admin: AdminClient
) -> None:
    configure(admin, group, share_delivery_count_limit="2")
    confluent.publish(bootstrap, topic, [Message(value=b"poison", key=b"k", headers=(("h", b"1"),))])
    publish(bootstrap, topic, 1)
    client = join()
    tries: list[int] = []

    def judge(message: Any) -> Any:
        if message.value() == b"poison":
            tries.append(message.delivery_count())
            return RELEASE
        return accept(message)

    take(client, 3, judge)
    assert tries == [1, 2]
    (dead_letter,) = confluent.read(bootstrap, f"{topic}.dlq", 1)
    assert (dead_letter.message.value, dead_letter.message.key) == (b"poison", b"k")
    headers = dict(dead_letter.message.headers)
    assert headers["h"] == b"1"
    assert group.encode() in headers.values()
    assert topic.encode() in headers.values()
    # Nothing follows it, neither there nor here.
    take_one_more(bootstrap, topic, client)
    assert high_watermark(bootstrap, f"{topic}.dlq") == 1


def take_one_more(bootstrap: str, topic: str, client: ShareConsumer) -> None:
    confluent.publish(bootstrap, topic, [Message(value=b"last")])
    assert values(take(client, 1)) == [b"last"]


def high_watermark(bootstrap: str, topic: str) -> int:
    client = confluent.consumer(bootstrap)
    try:
        return int(client.get_watermark_offsets(TopicPartition(topic, 0), timeout=20)[1])
    finally:
        client.close()


# -- positions -----------------------------------------------------------------------------------------


def described_offsets(broker: BrokerProcess, group: str) -> dict[tuple[str, int], tuple[int, int]]:
    """Start offset and lag of all that the group has."""
    api = "describe_share_group_offsets"
    asked = schema(api, 1, "DescribeShareGroupOffsetsRequestGroup")(group_id=group, topics=None)
    (found,) = ask(broker, api, 1, "DescribeShareGroupOffsets", groups=(asked,)).groups
    assert found.error_code is ErrorCode.none, found
    return {
        (topic.topic_name, part.partition_index): (part.start_offset, part.lag)
        for topic in found.topics
        for part in topic.partitions
    }


def start_offset(broker: BrokerProcess, group: str, topic: str) -> int | None:
    try:
        return described_offsets(broker, group).get((topic, 0), (None, 0))[0]
    except AssertionError:
        return None


def alter(broker: BrokerProcess, group: str, topic: str, start: int) -> ErrorCode:
    api = "alter_share_group_offsets"
    part = schema(api, 0, "AlterShareGroupOffsetsRequestPartition")(partition_index=0, start_offset=start)
    asked = schema(api, 0, "AlterShareGroupOffsetsRequestTopic")(topic_name=topic, partitions=(part,))
    reply = ask(broker, api, 0, "AlterShareGroupOffsets", group_id=group, topics=(asked,))
    if reply.error_code is not ErrorCode.none:
        return reply.error_code
    return reply.responses[0].partitions[0].error_code


def delete_offsets(broker: BrokerProcess, group: str, topic: str) -> ErrorCode:
    api = "delete_share_group_offsets"
    asked = schema(api, 0, "DeleteShareGroupOffsetsRequestTopic")(topic_name=topic)
    reply = ask(broker, api, 0, "DeleteShareGroupOffsets", group_id=group, topics=(asked,))
    return reply.error_code if reply.error_code is not ErrorCode.none else reply.responses[0].error_code


def delete_group(broker: BrokerProcess, group: str) -> ErrorCode:
    (result,) = ask(broker, "delete_groups", 2, "DeleteGroups", groups_names=(group,)).results
    return result.error_code


def test_positions_are_described_and_moved_and_forgotten(
    bootstrap: str, topic: str, group: str, join: Join, broker: BrokerProcess
) -> None:
    publish(bootstrap, topic, 10)
    client = join(max_poll_records=1)
    take(client, 4)
    assert alter(broker, group, topic, 0) is ErrorCode.non_empty_group
    assert delete_offsets(broker, group, topic) is ErrorCode.non_empty_group
    client.close()
    before = described_offsets(broker, group)[topic, 0]
    assert before[0] >= 4
    assert before[1] == 10 - before[0]
    assert alter(broker, group, topic, 2) is ErrorCode.none
    assert described_offsets(broker, group) == {(topic, 0): (2, 8)}
    assert alter(broker, group, f"{topic}-not", 2) is ErrorCode.unknown_topic_or_partition
    client = join()
    assert [message.offset() for message in take(client, 8)] == list(range(2, 10))
    client.close()
    assert delete_offsets(broker, group, topic) is ErrorCode.none
    assert described_offsets(broker, group) == {}
    assert delete_offsets(broker, group, topic) is ErrorCode.unknown_topic_or_partition
    assert [message.offset() for message in take(join(), 10)] == list(range(10))


def test_a_group_is_listed_described_and_deleted(
    bootstrap: str, topic: str, group: str, join: Join, broker: BrokerProcess
) -> None:
    publish(bootstrap, topic, 3)
    client = join()
    take(client, 3)
    listed = ask(broker, "list_groups", 5, "ListGroups", states_filter=(), types_filter=("Share",)).groups
    assert (group, "share", "Stable") in {(g.group_id, g.group_type, g.group_state) for g in listed}
    fields = {"group_ids": (group,), "include_authorized_operations": False}
    (found,) = ask(broker, "share_group_describe", 1, "ShareGroupDescribe", **fields).groups
    (member,) = found.members
    (assigned,) = member.assignment.topic_partitions
    assert (assigned.topic_name, assigned.partitions, member.subscribed_topic_names) == (
        topic,
        (0,),
        (topic,),
    )
    assert delete_group(broker, group) is ErrorCode.non_empty_group
    client.close()
    assert delete_group(broker, group) is ErrorCode.none
    (gone,) = ask(broker, "share_group_describe", 1, "ShareGroupDescribe", **fields).groups
    assert gone.error_code is ErrorCode.group_id_not_found
    # Another group of that name knows nothing of the first.
    assert counted(take(join(), 3)) == Counter([b"0", b"1", b"2"])


def test_a_topic_that_is_made_again_is_another_topic(
    bootstrap: str, topic: str, join: Join, admin: AdminClient
) -> None:
    publish(bootstrap, topic, 3)
    client = join()
    take(client, 3)
    admin.delete_topics([topic])[topic].result(60)
    eventually(lambda: topic not in admin.list_topics(timeout=20).topics, what="the topic gone")
    confluent.create_topic(admin, topic)
    publish(bootstrap, topic, 2)
    assert counted(take(client, 2)) == Counter([b"0", b"1"])


# -- at most once --------------------------------------------------------------------------------------


def test_an_at_most_once_group_is_handed_each_message_once(
    bootstrap: str, topic: str, group: str, join: Join, admin: AdminClient, broker: BrokerProcess
) -> None:
    configure(admin, group, penstock_share_delivery="at-most-once", share_session_timeout_ms="1000")
    publish(bootstrap, topic, 10)
    process, held = greedy(bootstrap, group, topic)
    process.kill()
    process.communicate()
    assert held
    client = join()
    rest = take(client, 10 - len(held), lambda _: RELEASE) if len(held) < 10 else []
    assert sorted(held + [message.offset() for message in rest]) == list(range(10))
    take_one_more(bootstrap, topic, client)  # and nothing that was released before it
    client.close()
    eventually(
        lambda: alter(broker, group, topic, 0) is not ErrorCode.non_empty_group, what="the killed one put out"
    )
    assert alter(broker, group, topic, 0) is ErrorCode.policy_violation
    assert alter(broker, group, topic, 10) is ErrorCode.policy_violation
    assert delete_offsets(broker, group, topic) is ErrorCode.policy_violation
    assert delete_group(broker, group) is ErrorCode.policy_violation
    assert alter(broker, group, topic, 11) is ErrorCode.none
    take_one_more(bootstrap, topic, join())
