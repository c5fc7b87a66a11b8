"""Consuming: seeks, resets, long polls, pauses, small fetches, watermarks and lag."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import kafka.errors
import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from kafka import TopicPartition as PythonPartition
from tests.compat import aio, confluent, kafka_python
from tests.compat.message import CODECS, Message, numbered, values
from tests.waiting import eventually

CREATED_MS = 1_700_000_000_000
STEP_MS = 1000


@pytest.fixture
def dated(bootstrap: str, new_topic: Callable[..., str]) -> str:
    """A topic of 100 messages, one second apart, in several batches."""
    topic = new_topic(**{"retention.ms": "-1"})
    messages = [each._replace(timestamp_ms=CREATED_MS + n * STEP_MS) for n, each in enumerate(numbered(100))]
    confluent.publish(bootstrap, topic, messages, batch_num_messages=7)
    return topic


@pytest.fixture
def reader(bootstrap: str, group: str, closing: contextlib.ExitStack) -> Any:
    client = confluent.consumer(bootstrap, group)
    closing.callback(client.close)
    return client


@pytest.fixture
def python_reader(bootstrap: str, closing: contextlib.ExitStack) -> Any:
    client = kafka_python.consumer(bootstrap)
    closing.callback(client.close)
    return client


@pytest.mark.parametrize("offset", [0, 1, 42, 99])
def test_seek_to_an_offset_inside_a_batch(bootstrap: str, dated: str, reader: Any, offset: int) -> None:
    confluent.assign(reader, [TopicPartition(dated, 0, OFFSET_BEGINNING)])
    confluent.take(reader, 100)
    reader.seek(TopicPartition(dated, 0, offset))
    assert [each.offset for each in confluent.take(reader, 100 - offset)] == list(range(offset, 100))


def test_seek_back_and_forth_with_kafka_python(dated: str, python_reader: Any) -> None:
    partition = PythonPartition(dated, 0)
    python_reader.assign([partition])
    for offset in (50, 3, 98, 0):
        python_reader.seek(partition, offset)
        assert [each.offset for each in kafka_python.take(python_reader, 2)] == [offset, offset + 1]
        assert python_reader.position(partition) == offset + 2
    python_reader.seek_to_end(partition)
    assert python_reader.position(partition) == 100
    python_reader.seek_to_beginning(partition)
    assert python_reader.position(partition) == 0


async def test_seek_with_aiokafka(bootstrap: str, dated: str) -> None:
    partition = aio.TopicPartition(dated, 0)
    async with aio.consuming(bootstrap) as client:
        client.assign([partition])
        client.seek(partition, 77)
        assert [each.offset for each in await aio.take(client, 3)] == [77, 78, 79]
        await client.seek_to_beginning(partition)
        assert [each.offset for each in await aio.take(client, 1)] == [0]
        await client.seek_to_end(partition)
        assert await client.position(partition) == 100


@pytest.mark.parametrize(
    ("timestamp_ms", "offset"),
    [
        pytest.param(0, 0, id="before-all"),
        pytest.param(CREATED_MS, 0, id="first"),
        pytest.param(CREATED_MS + 41 * STEP_MS + 1, 42, id="between"),
        pytest.param(CREATED_MS + 42 * STEP_MS, 42, id="exact"),
        pytest.param(CREATED_MS + 99 * STEP_MS, 99, id="last"),
    ],
)
async def test_offsets_for_times_agree(
    bootstrap: str, dated: str, reader: Any, python_reader: Any, timestamp_ms: int, offset: int
) -> None:
    [found] = reader.offsets_for_times([TopicPartition(dated, 0, timestamp_ms)], timeout=10)
    assert found.offset == offset
    partition = PythonPartition(dated, 0)
    found = python_reader.offsets_for_times({partition: timestamp_ms})[partition]
    assert found.offset == offset
    assert found.timestamp == CREATED_MS + offset * STEP_MS
    async with aio.consuming(bootstrap) as client:
        found = (await client.offsets_for_times({aio.TopicPartition(dated, 0): timestamp_ms})).popitem()[1]
        assert (found.offset, found.timestamp) == (offset, CREATED_MS + offset * STEP_MS)


def test_a_time_after_the_last_message_has_no_offset(dated: str, reader: Any, python_reader: Any) -> None:
    after_ms = CREATED_MS + 100 * STEP_MS
    [found] = reader.offsets_for_times([TopicPartition(dated, 0, after_ms)], timeout=10)
    assert found.offset == OFFSET_END
    partition = PythonPartition(dated, 0)
    assert python_reader.offsets_for_times({partition: after_ms}) == {partition: None}


@pytest.mark.parametrize("codec", CODECS)
def test_offsets_for_times_look_inside_compressed_batches(
    bootstrap: str, new_topic: Callable[..., str], reader: Any, codec: str
) -> None:
    topic = new_topic(**{"retention.ms": "-1"})
    messages = [each._replace(timestamp_ms=CREATED_MS + n * STEP_MS) for n, each in enumerate(numbered(50))]
    confluent.publish(bootstrap, topic, messages, codec, linger_ms=200)
    [found] = reader.offsets_for_times([TopicPartition(topic, 0, CREATED_MS + 33 * STEP_MS)], timeout=10)
    assert found.offset == 33


def test_reset_to_the_earliest(bootstrap: str, dated: str, group: str, closing: contextlib.ExitStack) -> None:
    client = confluent.consumer(bootstrap, group, auto_offset_reset="earliest")
    closing.callback(client.close)
    client.subscribe([dated])
    assert [each.offset for each in confluent.take(client, 100)] == list(range(100))


def test_reset_to_the_latest(bootstrap: str, dated: str, group: str, closing: contextlib.ExitStack) -> None:
    client = kafka_python.consumer(bootstrap, dated, group_id=group, auto_offset_reset="latest")
    closing.callback(client.close)
    partition = PythonPartition(dated, 0)
    eventually(lambda: client.poll(50) == {} and client.assignment() == {partition})
    assert client.position(partition) == 100
    confluent.publish(bootstrap, dated, [Message(value=b"new")])
    assert values(kafka_python.take(client, 1)) == [b"new"]


def test_no_reset_is_an_error_for_the_application(
    bootstrap: str, dated: str, group: str, closing: contextlib.ExitStack
) -> None:
    client = confluent.consumer(bootstrap, group, auto_offset_reset="error")
    closing.callback(client.close)
    client.subscribe([dated])
    with pytest.raises(KafkaException) as refused:
        confluent.take(client, 1)
    assert refused.value.args[0].code() == KafkaError._AUTO_OFFSET_RESET
    python = kafka_python.consumer(bootstrap, dated, group_id=group + "-2", auto_offset_reset="none")
    closing.callback(python.close)
    with pytest.raises(kafka.errors.NoOffsetForPartitionError):
        kafka_python.take(python, 1)


def test_an_offset_out_of_range_is_reset(bootstrap: str, dated: str, reader: Any) -> None:
    confluent.assign(reader, [TopicPartition(dated, 0, 5_000)])
    assert [each.offset for each in confluent.take(reader, 2)] == [0, 1]


def test_a_long_poll_ends_as_soon_as_a_message_arrives(
    bootstrap: str, topic: str, group: str, closing: contextlib.ExitStack
) -> None:
    """The broker may hold this fetch for a minute; it answers at once when there is something to say."""
    patient = {"fetch_wait_max_ms": 60_000, "socket_timeout_ms": 90_000}
    client = confluent.consumer(bootstrap, group, **patient)
    closing.callback(client.close)
    confluent.assign(client, [TopicPartition(topic, 0, 0)])
    assert client.poll(0.5) is None
    publisher = threading.Thread(target=confluent.publish, args=(bootstrap, topic, [Message(value=b"x")]))
    publisher.start()
    assert values(confluent.take(client, 1)) == [b"x"]
    publisher.join()


def test_a_fetch_waits_for_the_bytes_it_asked_for(
    bootstrap: str, topic: str, closing: contextlib.ExitStack
) -> None:
    client = kafka_python.consumer(bootstrap, fetch_min_bytes=50_000, fetch_max_wait_ms=20_000)
    closing.callback(client.close)
    client.assign([PythonPartition(topic, 0)])
    kafka_python.publish(bootstrap, topic, numbered(1))
    assert client.poll(timeout_ms=300) == {}
    kafka_python.publish(bootstrap, topic, numbered(1, size=60_000))
    assert len(kafka_python.take(client, 2)) == 2


def test_paused_partitions_stay_silent(bootstrap: str, new_topic: Callable[..., str], reader: Any) -> None:
    topic = new_topic(partitions=2)
    partitions = [TopicPartition(topic, index, OFFSET_BEGINNING) for index in range(2)]
    confluent.assign(reader, partitions)
    reader.pause([TopicPartition(topic, 0)])
    confluent.publish(bootstrap, topic, [*numbered(20), *numbered(20, partition=1)])
    assert {each.message.partition for each in confluent.take(reader, 20)} == {1}
    assert reader.poll(0.3) is None
    reader.resume([TopicPartition(topic, 0)])
    assert [each.message.partition for each in confluent.take(reader, 20)] == [0] * 20


async def test_pause_and_resume_with_aiokafka(bootstrap: str, new_topic: Callable[..., str]) -> None:
    topic = new_topic(partitions=2)
    zero, one = aio.TopicPartition(topic, 0), aio.TopicPartition(topic, 1)
    await aio.publish_async(bootstrap, topic, [*numbered(5), *numbered(5, partition=1)])
    async with aio.consuming(bootstrap) as client:
        client.assign([zero, one])
        client.pause(zero)
        assert {each.message.partition for each in await aio.take(client, 5)} == {1}
        assert await client.getmany(timeout_ms=200) == {}
        client.resume(zero)
        assert {each.message.partition for each in await aio.take(client, 5)} == {0}


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_fetch_smaller_than_a_batch_still_makes_progress(bootstrap: str, topic: str, codec: str) -> None:
    messages = numbered(300, size=1000)
    confluent.publish(bootstrap, topic, messages, codec, linger_ms=200)
    expected = [each.value for each in messages]
    assert values(kafka_python.read(bootstrap, topic, 300, max_partition_fetch_bytes=100)) == expected
    assert values(aio.read(bootstrap, topic, 300, max_partition_fetch_bytes=100)) == expected
    tiny = {"max_partition_fetch_bytes": 1000, "fetch_max_bytes": 1000, "message_max_bytes": 1000}
    assert values(confluent.read(bootstrap, topic, 300, **tiny)) == expected


def test_fetches_are_shared_fairly_over_many_partitions(
    bootstrap: str, new_topic: Callable[..., str]
) -> None:
    """A response limit far below the backlog: every partition still gets its turn."""
    topic = new_topic(partitions=30)
    messages = [each for index in range(30) for each in numbered(20, partition=index, size=2000)]
    confluent.publish(bootstrap, topic, messages)
    received = kafka_python.read(bootstrap, topic, 600, partitions=30, fetch_max_bytes=20_000)
    seen = {
        index: [each.offset for each in received if each.message.partition == index] for index in range(30)
    }
    assert seen == {index: list(range(20)) for index in range(30)}


def test_a_session_survives_changes_of_its_partitions(
    bootstrap: str, new_topic: Callable[..., str], reader: Any
) -> None:
    """Adding, dropping and re-adding partitions goes through the same incremental fetch session."""
    topic = new_topic(partitions=3)
    confluent.publish(
        bootstrap, topic, [each for index in range(3) for each in numbered(10, partition=index)]
    )
    confluent.assign(reader, [TopicPartition(topic, 0, 0)])
    assert {each.message.partition for each in confluent.take(reader, 10)} == {0}
    reader.incremental_assign([TopicPartition(topic, 1, 0), TopicPartition(topic, 2, 5)])
    assert sorted(each.message.partition for each in confluent.take(reader, 15)) == [1] * 10 + [2] * 5
    reader.incremental_unassign([TopicPartition(topic, 0)])
    confluent.publish(bootstrap, topic, [Message(value=b"new", partition=index) for index in range(3)])
    assert {each.message.partition for each in confluent.take(reader, 2)} == {1, 2}
    reader.incremental_assign([TopicPartition(topic, 0, 9)])
    assert [each.offset for each in confluent.take(reader, 2)] == [9, 10]


def test_fetching_without_sessions(bootstrap: str, dated: str) -> None:
    received = kafka_python.read(bootstrap, dated, 100, enable_incremental_fetch_sessions=False)
    assert [each.offset for each in received] == list(range(100))


def test_read_committed_sees_what_was_never_in_a_transaction(bootstrap: str, dated: str) -> None:
    for read in (kafka_python.read, aio.read, confluent.read):
        received = read(bootstrap, dated, 100, isolation_level="read_committed")
        assert [each.offset for each in received] == list(range(100))


def test_watermarks_and_positions(bootstrap: str, dated: str, reader: Any) -> None:
    partition = TopicPartition(dated, 0)
    assert reader.get_watermark_offsets(partition, timeout=10) == (0, 100)
    confluent.assign(reader, [TopicPartition(dated, 0, 10)])
    confluent.take(reader, 5)
    assert reader.position([partition])[0].offset == 15
    assert reader.get_watermark_offsets(partition, cached=True) == (0, 100)
    assert reader.committed([partition], timeout=10)[0].offset == OFFSET_INVALID


async def test_lag_as_an_application_counts_it(bootstrap: str, dated: str, python_reader: Any) -> None:
    partition = PythonPartition(dated, 0)
    python_reader.assign([partition])
    python_reader.seek(partition, 60)
    kafka_python.take(python_reader, 10)
    assert python_reader.beginning_offsets([partition]) == {partition: 0}
    assert python_reader.end_offsets([partition])[partition] - python_reader.position(partition) == 30
    assert python_reader.highwater(partition) == 100
    async with aio.consuming(bootstrap) as client:
        other = aio.TopicPartition(dated, 0)
        client.assign([other])
        await aio.take(client, 10)
        assert client.highwater(other) - await client.position(other) == 90
        assert await client.end_offsets([other]) == {other: 100}
        assert await client.beginning_offsets([other]) == {other: 0}


def test_end_of_partition_is_announced(
    bootstrap: str, dated: str, group: str, closing: contextlib.ExitStack
) -> None:
    client = confluent.consumer(bootstrap, group, enable_partition_eof=True)
    closing.callback(client.close)
    confluent.assign(client, [TopicPartition(dated, 0, 95)])
    deadline = time.monotonic() + 10
    while (message := client.poll(1)) is None or message.error() is None:
        assert time.monotonic() < deadline
    assert message.error().code() == KafkaError._PARTITION_EOF
    assert message.offset() == 100


def test_a_pattern_picks_up_a_new_topic(
    bootstrap: str, unique: Callable[[str], str], admin: Any, group: str, closing: contextlib.ExitStack
) -> None:
    prefix = unique("pattern")
    client = confluent.consumer(bootstrap, group, topic_metadata_refresh_interval_ms=200)
    closing.callback(client.close)
    first = confluent.create_topic(admin, f"{prefix}.one")
    client.subscribe([f"^{prefix}.*"])
    confluent.publish(bootstrap, first, [Message(value=b"one")])
    assert values(confluent.take(client, 1)) == [b"one"]
    client.commit(asynchronous=False)
    second = confluent.create_topic(admin, f"{prefix}.two")
    confluent.publish(bootstrap, second, [Message(value=b"two")])
    assert values(confluent.take(client, 1)) == [b"two"]


async def test_a_pattern_with_aiokafka(
    bootstrap: str, unique: Callable[[str], str], admin: Any, group: str
) -> None:
    prefix = unique("pattern")
    first = confluent.create_topic(admin, f"{prefix}.one")
    await aio.publish_async(bootstrap, first, [Message(value=b"one")])
    async with aio.consuming(bootstrap, group_id=group, metadata_max_age_ms=200) as client:
        client.subscribe(pattern=f"^{prefix}.*")
        assert values(await aio.take(client, 1)) == [b"one"]
        await client.commit()
        second = confluent.create_topic(admin, f"{prefix}.two")
        await aio.publish_async(bootstrap, second, [Message(value=b"two")])
        assert values(await aio.take(client, 1)) == [b"two"]


async def test_lists_of_topics_agree(bootstrap: str, topic: str, python_reader: Any, admin: Any) -> None:
    assert topic in python_reader.topics()
    assert topic in admin.list_topics(timeout=60).topics
    async with aio.consuming(bootstrap) as client:
        assert topic in await client.topics()
