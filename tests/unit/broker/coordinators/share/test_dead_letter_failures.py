"""Dead letters with problems (unreadable records, deleted topics, limits) block no others and are written once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.coordinators.share.dead_letter_harness import (
    DEAD,
    GROUP,
    TOPIC,
    CrashPoints,
    all_dead_letters_written,
    append,
    dead_letter_offsets,
    dead_letters_in,
    header,
    prepare,
    started,
    until_pending,
    write,
)
from tests.unit.broker.coordinators.share.share_client import set_group
from tests.unit.broker.raw_client import create_topic, delete_topic, set_config, until
from tests.waiting import eventually_async

from penstock.broker.coordinators.share import dead_letter_writer as writer_module
from penstock.broker.coordinators.share import dead_letters as dead_letters_module
from penstock.broker.coordinators.share.dead_letter_writer import DeadLetterLogs
from penstock.broker.metrics.exposition import Exposition
from penstock.broker.node import Node
from penstock.broker.partition.idempotent_append import PlannedAppends
from penstock.broker.partition.partition import Partition
from penstock.broker.partition.replica_manager import ReplicaManager
from penstock.cluster.image import TopicState
from penstock.groups.share.state.share_state import SharePartitionKey
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import Record, encode_batch, pack_batch, read_header

REJECTED = 33


async def append_batch(node: Node, batch: bytearray) -> None:
    partition = node.partitions.find(TOPIC, 0)
    appended = partition.append(memoryview(batch), node.environment.now_ms())
    await partition.committed(appended.last_offset)


async def keys_of(node: Node) -> list[SharePartitionKey]:
    return [key for keys in await node.share_state().read_all(lambda shard: shard.keys()) for key in keys]


async def until_keys(node: Node, *keys: SharePartitionKey) -> None:
    async def are_left() -> bool:
        assert await keys_of(node) == list(keys)
        return True

    await eventually_async(are_left, what=f"{len(keys)} share partitions with state")


async def test_an_unreadable_record_does_not_block_the_others(tmp_path: Path) -> None:
    """A broker takes batches without a look inside, and consumers reject what they cannot read."""
    node = await started(tmp_path)
    key = await prepare(node, 2)
    fine = encode_batch([Record(place, 5, b"k", b"fine", (("own", b"%d" % place),)) for place in range(2)])
    await append_batch(node, pack_batch(read_header(fine), b"\x7f" * 40))
    await append_batch(node, bytearray(fine))
    lying = bytearray(fine)
    lying[lying.index(b"own") + 3] = 60  # the header of the first of them would end beyond it
    await append_batch(node, pack_batch(read_header(lying), bytes(lying[61:])))
    await write(node, key, (0, 7, REJECTED, 1))
    await all_dead_letters_written(node)
    assert dead_letter_offsets(node) == dict.fromkeys(range(8), 1)
    without = [header(record, "penstock.dlq.without.record") for record in dead_letters_in(node)]
    assert without == [None, None, *["cannot be read"] * 2, None, None, "cannot be read", None]
    assert [record.value for record in dead_letters_in(node)[4:]] == [b"fine", b"fine", None, b"fine"]
    await node.stop()


async def test_what_fits_its_topic_only_compressed_comes_whole(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 2, max_message_bytes="10000")
    large = encode_batch([Record(0, 5, b"k", b"." * 2_000_000)], codec=Codec.GZIP)
    await append_batch(node, large)
    await write(node, key, (0, 2, REJECTED, 1))
    await all_dead_letters_written(node)
    assert [len(record.value or b"") for record in dead_letters_in(node)] == [7, 7, 2_000_000]
    assert not any(header(record, "penstock.dlq.without.record") for record in dead_letters_in(node))
    await node.stop()


@pytest.mark.parametrize("change", [("max.message.bytes", "600"), ("cleanup.policy", "compact")])
async def test_what_was_appended_stays_so_when_its_topic_would_refuse_it_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str]
) -> None:
    points = CrashPoints(7)  # the plan is carried out, but that is not stored
    with monkeypatch.context() as patch:
        points.install(patch)
        node = await started(tmp_path)
        key = await prepare(node, 1)
        await append_batch(node, encode_batch([Record(place, 5, None, b"no key") for place in range(3)]))
        await write(node, key, (1, 3, REJECTED, 1))
        await until(lambda: points.is_reached)
        assert points.passed[-1] == "before append"
        await until(lambda: len(dead_letters_in(node)) == 3)
        await set_config(node, DEAD, *change)
        await node.stop(clean=False)
    again = await started(tmp_path)
    await until(lambda: again.share_state().shards())
    await all_dead_letters_written(again)
    assert dead_letter_offsets(again) == {1: 1, 2: 1, 3: 1}
    await again.stop()


async def test_a_plan_stays_small_when_whole_records_are_asked_for_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = CrashPoints(6)  # the plan is stored, nothing appended
    with monkeypatch.context() as patch:
        points.install(patch)
        node = await started(tmp_path)
        key = await prepare(node, 1)
        await set_group(node, GROUP, errors_deadletterqueue_copy_record_enable="false")
        for _ in range(5):
            await append(node, TOPIC, 1, padding=200_000)
        await write(node, key, (1, 5, REJECTED, 1))
        await until(lambda: points.is_reached)
        await set_group(node, GROUP, errors_deadletterqueue_copy_record_enable="true")
        await node.stop(clean=False)
    again = await started(tmp_path)
    await until(lambda: again.share_state().shards())
    await all_dead_letters_written(again)
    assert dead_letter_offsets(again) == dict.fromkeys(range(1, 6), 1)
    assert [len(record.value or b"") for record in dead_letters_in(again)] == [200_007] * 3 + [0] * 2
    await again.stop()


async def test_a_group_is_not_given_its_own_dead_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait until the group's settings name another topic."""
    node = await started(tmp_path)
    key = await prepare(node, 3)
    await set_group(node, GROUP, errors_deadletterqueue_topic_name=TOPIC)
    tried = []
    looked_for = DeadLetterLogs.ensure_topic

    async def noted(node: Node, name: str, source: TopicState) -> TopicState:
        tried.append(name)
        return await looked_for(node, name, source)

    monkeypatch.setattr(DeadLetterLogs, "ensure_topic", noted)
    await write(node, key, (0, 1, REJECTED, 1))
    await until(lambda: len(tried) > 1)
    await set_group(node, GROUP, errors_deadletterqueue_topic_name="graves")
    await all_dead_letters_written(node)
    assert dead_letter_offsets(node, "graves") == {0: 1, 1: 1}
    assert node.partitions.find(TOPIC, 0).log.end_offset == 3
    await node.stop()


async def prepare_many(node: Node, partitions: int) -> list[SharePartitionKey]:
    await create_topic(node, TOPIC, partitions)
    topic_id = node.image.topics[TOPIC].id
    keys = [SharePartitionKey(GROUP, topic_id, index) for index in range(partitions)]
    batch = encode_batch([Record(0, 5, b"k", b"v"), Record(1, 5, b"k", b"w")])
    for key in keys:
        partition = node.partitions.find(TOPIC, key.partition)
        await partition.committed(
            partition.append(memoryview(bytearray(batch)), node.environment.now_ms()).last_offset
        )
        await node.share_state().persister.initialize(*key, state_epoch=0, start_offset=0)
    return keys


async def test_a_rate_holds_for_all_share_partitions_of_a_group_together(tmp_path: Path) -> None:
    node = await started(tmp_path)
    await set_group(node, GROUP, penstock_share_dlq_rate_max="0")
    keys = await prepare_many(node, 8)
    await asyncio.gather(*(write(node, key, (0, 1, REJECTED, 1)) for key in keys))
    letters = node.share_state().dead_letters
    await until(lambda: len(letters._held.get(GROUP, ())) == 8)
    await until_pending(node, 15)  # one is let through at first
    assert len(dead_letters_in(node)) == 1
    assert letters.held_back == {GROUP: 1}
    await set_group(node, GROUP, penstock_share_dlq_rate_max="-1")
    await all_dead_letters_written(node)
    await until(lambda: not letters.open_breakers().get(GROUP))
    await node.stop()


async def test_traffic_is_that_of_all_share_partitions_wherever_they_are_kept(tmp_path: Path) -> None:
    node = await started(tmp_path, share_coordinator_state_topic_num_partitions="4")
    await set_group(node, GROUP, penstock_share_dlq_share_max="0.1")
    first, *others = await prepare_many(node, 8)
    shard_of_key = node.share_state().shard_of_key
    elsewhere = next(key for key in others if shard_of_key(key) != shard_of_key(first))
    await write(node, elsewhere, start_offset=1_000)
    assert node.share_state().dead_letters.allowed(first, 500).left == 100
    await node.stop()


async def test_so_many_are_in_memory_at_a_time_and_none_holds_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two of them, and a dead-letter partition that takes nothing for a while."""
    monkeypatch.setattr(dead_letters_module, "_CONCURRENT_WRITERS_MAX", 2)
    monkeypatch.setattr(writer_module, "_APPEND_TIMEOUT_S", 0.05)
    node = await started(tmp_path)
    keys = await prepare_many(node, 6)
    stuck, under_way, most = asyncio.Event(), [0], [0]
    read, appended = DeadLetterLogs.read, PlannedAppends.append

    async def counted(*args: Any) -> Any:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        return await read(*args)

    async def append_late(
        appends: PlannedAppends, topic: str, partition: int, batch: bytearray, **named: Any
    ) -> int:
        try:
            if partition < 2:
                await stuck.wait()
            return await appended(appends, topic, partition, batch, **named)
        finally:
            under_way[0] -= 1

    monkeypatch.setattr(DeadLetterLogs, "read", counted)
    monkeypatch.setattr(PlannedAppends, "append", append_late)
    await asyncio.gather(*(write(node, key, (0, 1, REJECTED, 1)) for key in keys))
    await until_pending(node, 4)
    assert most == [2]
    stuck.set()
    await all_dead_letters_written(node)
    assert dead_letter_offsets(node) == {0: 6, 1: 6}
    await node.stop()


async def test_a_breaker_is_not_open_when_nothing_waits_for_it(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 9)
    await set_group(node, GROUP, penstock_share_dlq_rate_max="0")
    await write(node, key, (0, 8, REJECTED, 1))
    letters = node.share_state().dead_letters
    await until(lambda: letters.open_breakers().get(GROUP))
    await delete_topic(node, TOPIC)
    await all_dead_letters_written(node)
    await until(lambda: not letters.open_breakers().get(GROUP))
    text = (await Exposition(node.metric_sources()).scrape()).decode()
    assert f'penstock_dead_letter_breaker_open{{group="{GROUP}"}} 0.0' in text
    await node.stop()


async def test_nothing_remains_of_what_is_deleted(tmp_path: Path) -> None:
    """Neither when all dead letters were written before, nor when some are written afterwards."""
    node = await started(tmp_path)
    key = await prepare(node, 9)
    await write(node, key, (0, 1, REJECTED, 1))
    await all_dead_letters_written(node)
    await node.share_state().persister.delete(*key, state_epoch=0)
    await until_keys(node)
    await node.share_state().persister.initialize(*key, state_epoch=0, start_offset=0)
    await set_group(node, GROUP, penstock_share_dlq_rate_max="0")
    await write(node, key, (2, 4, REJECTED, 1))
    await until(lambda: node.share_state().dead_letters.open_breakers().get(GROUP))
    await node.share_state().persister.delete(*key, state_epoch=0)
    assert await keys_of(node) == [key]
    await set_group(node, GROUP, penstock_share_dlq_rate_max="-1")
    await until_keys(node)
    assert dead_letter_offsets(node) == dict.fromkeys(range(5), 1)
    await node.stop()


async def test_share_state_of_a_topic_deleted_without_a_coordinator_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 3)
    await write(node, key, (0, 1, REJECTED, 1))
    await all_dead_letters_written(node)

    async def not_reached(*_: object) -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(type(node.share_state()), "_forget_topics", not_reached)
        await delete_topic(node, TOPIC)
    assert await keys_of(node) == [key]
    node.share_state()._runtime.unload(0)
    await until(lambda: node.share_state().loaded_shards())
    await until_keys(node)
    await node.stop()


async def test_the_state_outlives_what_a_node_keeps_of_other_topics(tmp_path: Path) -> None:
    settings = {"log_retention_bytes": "1", "share_coordinator_state_topic_segment_bytes": "1000"}
    node = await started(tmp_path, **settings)
    key = await prepare(node, 1)
    for offset in range(30):
        await write(node, key, (2 * offset, 2 * offset, 2, 1))
    log = node.partitions.find("__share_group_state", 0).log
    assert len(list(log._reader.segments)) > 2
    assert log.expired_segments(node.environment.now_ms()) == []
    await node.stop()


async def test_a_log_of_small_segments_is_pruned_too(tmp_path: Path) -> None:
    node = await started(tmp_path, share_coordinator_state_topic_segment_bytes="1000")
    keys = await prepare_many(node, 12)
    for key in keys:
        await write(node, key, (0, 0, 2, 1))
    before = await node.share_state().read_all(lambda shard: shard.stored())
    partition = node.partitions.find("__share_group_state", 0)
    end = partition.log.end_offset
    assert await node.share_state()._pruning.prune(0, records_min=1)
    assert partition.log.start_offset == end
    node.share_state()._runtime.unload(0)
    assert await node.share_state().read_all(lambda shard: shard.stored()) == before
    await node.stop()


async def test_a_damaged_source_is_reported_so_that_another_replica_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, the dead letters would wait for ever although other replicas have the records."""
    node = await started(tmp_path)
    key = await prepare(node, 2)
    partition = node.partitions.find(TOPIC, 0)
    (path,) = partition.log.directory.glob("*.log")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"value 0", b"VALUE 0"))
    reported: list[tuple[Partition, ErrorCode]] = []

    def note(manager: ReplicaManager, damaged: Partition, error: ApiError) -> ApiError:
        reported.append((damaged, error.code))
        return ApiError(ErrorCode.kafka_storage_error)

    monkeypatch.setattr(ReplicaManager, "handle_read_error", note)
    await write(node, key, (0, 1, REJECTED, 1))
    await until(lambda: reported)
    assert reported[0] == (partition, ErrorCode.corrupt_message)
    path.write_bytes(whole)
    await all_dead_letters_written(node)
    assert dead_letter_offsets(node) == {0: 1, 1: 1}
    await node.stop()
