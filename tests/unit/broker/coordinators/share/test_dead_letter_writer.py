"""Dead letters: all of them, once, with complete headers, whatever fails meanwhile."""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.unit.broker.coordinators.share import dead_letter_harness
from tests.unit.broker.coordinators.share.dead_letter_harness import (
    DEAD,
    GROUP,
    TOPIC,
    CrashPoints,
    all_dead_letters_written,
    dead_letter_offsets,
    dead_letters_in,
    header,
    prepare,
    started,
    until_pending,
    write,
)
from tests.unit.broker.coordinators.share.share_client import set_group
from tests.unit.broker.raw_client import create_topic, delete_topic, until

from penstock.broker.coordinators.share import dead_letter_writer as writer_module
from penstock.broker.metrics.exposition import Exposition
from penstock.cluster.image import ResourceType
from penstock.groups.share.state.share_state import ARCHIVED

LIMIT, REJECTED, LOCK_EXPIRED = 32, 33, 34


async def test_letters_are_kept_for_longer_than_their_source(tmp_path: Path) -> None:
    node = await started(tmp_path)
    quarter = str(90 * 24 * 60 * 60 * 1000)
    key = await prepare(node, 1, **{"retention.ms": quarter})
    await write(node, key, (0, 0, REJECTED, 1))
    await all_dead_letters_written(node)
    settings = node.image.config(ResourceType.TOPIC, DEAD)
    assert settings["retention.ms"] == quarter
    assert (settings["cleanup.policy"], settings["retention.bytes"]) == ("delete", "-1")
    await node.stop()


async def test_a_dead_letter_is_the_record_and_where_it_is_from(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 10)
    await write(node, key, (2, 2, LIMIT, 5), (3, 3, 2, 1), (4, 4, REJECTED, 1), (7, 7, LOCK_EXPIRED, 5))
    await all_dead_letters_written(node)
    days = 24 * 60 * 60 * 1000
    assert node.image.config(ResourceType.TOPIC, DEAD)["retention.ms"] == str(30 * days)
    limit, rejected, expired = dead_letters_in(node)
    assert (limit.key, limit.value) == (b"key 2", b"value 2")
    assert [
        (name, (value or b"").decode()) for name, value in limit.headers if name != "__dlq.errors.message"
    ] == [
        ("own", "2"),
        ("__dlq.errors.topic", TOPIC),
        ("__dlq.errors.partition", "0"),
        ("__dlq.errors.offset", "2"),
        ("__dlq.errors.group", GROUP),
        ("__dlq.errors.delivery.count", "5"),
        ("penstock.dlq.reason", "limit"),
        ("penstock.dlq.timestamp", "1002"),
    ]
    reasons = [header(record, "penstock.dlq.reason") for record in (rejected, expired)]
    assert reasons == ["rejected", "lock expired"]
    assert all(header(record, "__dlq.errors.message") for record in (limit, rejected, expired))
    state = await node.share_state().persister.read(*key, 0)
    assert [batch[:3] for batch in state.batches if batch.delivery_state == ARCHIVED] == [
        (2, 2, ARCHIVED),
        (4, 4, ARCHIVED),
        (7, 7, ARCHIVED),
    ]
    await node.stop()


async def test_a_write_that_comes_again_buries_nothing_twice(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 10)
    for _ in range(2):
        await write(node, key, (0, 4, REJECTED, 1), start_offset=5)
        await all_dead_letters_written(node)
    assert dead_letter_offsets(node) == dict.fromkeys(range(5), 1)
    await node.stop()


async def write_dead_letters_with_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: int
) -> CrashPoints:
    """Six dead letters in two plans; the node is killed at the chosen step, and started again."""
    points = CrashPoints(chosen)
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "_PLAN_MAX", 3)
        points.install(patch)
        node = await started(tmp_path)
        key = await prepare(node, 8)
        await write(node, key, (0, 0, 2, 1), (1, 3, LIMIT, 5), (4, 6, REJECTED, 2))
        done = asyncio.ensure_future(all_dead_letters_written(node))
        await points.reached_or(done)
        done.cancel()
        archived = dict.fromkeys(range(1, 7), 1)
        assert dead_letter_offsets(node).items() <= archived.items()
        await node.stop(clean=False)
    again = await started(tmp_path)
    await until(lambda: again.share_state().shards())
    await all_dead_letters_written(again)
    assert dead_letter_offsets(again) == archived, points.passed
    assert {header(record, "__dlq.errors.group") for record in dead_letters_in(again)} == {GROUP}
    assert all(header(record, "penstock.dlq.without.record") is None for record in dead_letters_in(again))
    # The next ones continue where the plans before have ended.
    await write(again, key, (7, 7, REJECTED, 1))
    await all_dead_letters_written(again)
    assert dead_letter_offsets(again) == {**archived, 7: 1}
    await again.stop()
    return points


async def test_a_kill_at_any_step_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen in range(100):
        folder = tmp_path / str(chosen)
        folder.mkdir()
        points = await write_dead_letters_with_a_crash(folder, monkeypatch, chosen)
        if not points.is_reached:
            break
    assert points.passed.count("after append") == 2, "the last round went through all steps"
    assert chosen == len(points.passed) >= 18


async def test_records_that_are_gone_leave_what_is_known_of_them_or_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = CrashPoints(6)  # the plan is stored, nothing appended
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "_PLAN_MAX", 3)
        points.install(patch)
        node = await started(tmp_path)
        key = await prepare(node, 8)
        await write(node, key, (0, 2, LIMIT, 5), (3, 5, REJECTED, 2))
        await until(lambda: points.is_reached)
        assert points.passed[-1] == "after a write"
        partition = node.partitions.find(TOPIC, 0)
        partition.log.delete_records_before(5)
        await node.environment.in_thread(node.store.checkpoint)
        await node.stop(clean=False)
    again = await started(tmp_path)
    await until(lambda: again.share_state().shards())
    await all_dead_letters_written(again)
    by_offset = {header(record, "__dlq.errors.offset"): record for record in dead_letters_in(again)}
    assert len(dead_letters_in(again)) == len(by_offset)
    # Those of the plan were promised to the topic; those behind it are not there any more; the last one is.
    assert list(by_offset) == ["0", "1", "2", "5"]
    assert header(by_offset["1"], "penstock.dlq.without.record") == "gone from the source"
    assert by_offset["5"].value == b"value 5"
    assert again.share_state().dead_letters.lost == {(GROUP, "gone from the source"): 2}
    await again.stop()


async def test_a_deleted_source_takes_its_dead_letters_along_and_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = CrashPoints(0)
    with monkeypatch.context() as patch:
        points.install(patch)
        node = await started(tmp_path)
        key = await prepare(node, 8)
        await write(node, key, (0, 2, LIMIT, 5))
        await until(lambda: points.is_reached)
        await delete_topic(node, TOPIC)
        await node.stop(clean=False)
    again = await started(tmp_path)
    await until(lambda: again.share_state().shards())
    await all_dead_letters_written(again)
    await until(lambda: again.share_state().dead_letters.lost)
    assert again.share_state().dead_letters.lost == {(GROUP, "source deleted"): 3}
    await again.stop()


async def test_what_does_not_fit_its_topic_leaves_what_is_known_of_it(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 3)
    await dead_letter_harness.append(node, TOPIC, 2, padding=2_000)
    await create_topic(node, DEAD, max_message_bytes="1500")
    await write(node, key, (0, 4, REJECTED, 1))
    await all_dead_letters_written(node)
    assert dead_letter_offsets(node) == dict.fromkeys(range(5), 1)
    without = [header(record, "penstock.dlq.without.record") for record in dead_letters_in(node)]
    assert without == [None, None, None, *["refused: message_too_large"] * 2]
    assert [record.value for record in dead_letters_in(node)[:3]] == [b"value 0", b"value 1", b"value 2"]
    await node.stop()


async def test_a_deleted_dead_letter_topic_is_made_again_for_what_comes(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 8)
    await write(node, key, (0, 0, REJECTED, 1))
    await all_dead_letters_written(node)
    await delete_topic(node, DEAD)
    await write(node, key, (1, 1, REJECTED, 1))
    await all_dead_letters_written(node)
    assert dead_letter_offsets(node) == {1: 1}
    await node.stop()


async def test_no_topic_means_no_dead_letters(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 8)
    await set_group(node, GROUP, errors_deadletterqueue_topic_name="")
    await write(node, key, (0, 1, REJECTED, 1))
    await all_dead_letters_written(node)
    assert DEAD not in node.image.topics
    await set_group(node, GROUP, errors_deadletterqueue_topic_name="graves")
    await set_group(node, GROUP, errors_deadletterqueue_copy_record_enable="false")
    await write(node, key, (2, 2, REJECTED, 1))
    await all_dead_letters_written(node)
    (record,) = dead_letters_in(node, "graves")
    assert (record.key, record.value, header(record, "own")) == (None, None, None)
    assert header(record, "__dlq.errors.offset") == "2"
    await node.stop()


async def test_the_breaker_holds_back_and_lets_go(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 60)
    await set_group(node, GROUP, penstock_share_dlq_rate_max="0")
    await write(node, key, (0, 49, REJECTED, 1))
    letters = node.share_state().dead_letters
    await until(lambda: letters.open_breakers().get(GROUP) and dead_letter_offsets(node))
    assert letters.held_back == {GROUP: 1}
    await until_pending(node, 49)  # one is always let through at first
    text = (await Exposition(node.metric_sources()).scrape()).decode()
    for line in (
        f'penstock_dead_letters_total{{group="{GROUP}"}} 1.0',
        f'penstock_dead_letters_pending{{group="{GROUP}"}} 49.0',
        f'penstock_dead_letter_breaker_open{{group="{GROUP}"}} 1.0',
        f'penstock_dead_letter_breaker_opened_total{{group="{GROUP}"}} 1.0',
    ):
        assert line in text
    state = await node.share_state().persister.read(*key, 0)
    assert [batch[:3] for batch in state.batches] == [(0, 49, ARCHIVED)]
    await set_group(node, GROUP, penstock_share_dlq_rate_max="-1")
    await all_dead_letters_written(node)
    assert dead_letter_offsets(node) == dict.fromkeys(range(50), 1)
    assert not letters.open_breakers().get(GROUP)
    await node.stop()


async def test_a_flood_waits_for_the_traffic_that_it_is_a_part_of(tmp_path: Path) -> None:
    node = await started(tmp_path)
    key = await prepare(node, 300)
    await set_group(node, GROUP, penstock_share_dlq_share_max="0.1")
    await write(node, key, (0, 49, REJECTED, 1), start_offset=50)
    letters = node.share_state().dead_letters
    await until(lambda: letters.open_breakers().get(GROUP))
    await until_pending(node, 40)  # ten are free, of fifty that are finished five would be
    await write(node, key, (50, 249, 2, 1), start_offset=250)
    await until_pending(node, 25)  # a tenth of 250
    await set_group(node, GROUP, penstock_share_dlq_share_max="1")
    await all_dead_letters_written(node)
    assert dead_letter_offsets(node) == dict.fromkeys(range(50), 1)
    await node.stop()


async def test_a_source_that_this_node_has_not_heard_of_yet_is_not_taken_for_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new leader's image may be older than the pending dead letters of its shard."""
    node = await started(tmp_path)
    key = await prepare(node, 8)
    image, looked = node.image, []

    class Older:
        topics_by_id: ClassVar[dict[Any, Any]] = {}

        def __getattr__(self, name: str) -> Any:
            return getattr(image, name)

        def partition(self, topic: str, index: int) -> Any:
            looked.append(topic)
            state = image.partition(topic, index)
            assert state is not None
            return state._replace(leader_epoch=state.leader_epoch - 1)

    points = CrashPoints(0)
    with monkeypatch.context() as patch:
        points.install(patch)
        await write(node, key, (0, 2, LIMIT, 5))
        await until(lambda: points.is_reached)
    with monkeypatch.context() as patch:
        patch.setattr(node.metadata, "image", Older())
        node.share_state()._runtime.unload(0)  # the next life finds what is pending
        looked.clear()
        await until(lambda: len(looked) > 3)
    await all_dead_letters_written(node)
    assert not node.share_state().dead_letters.lost
    assert dead_letter_offsets(node) == {0: 1, 1: 1, 2: 1}
    await node.stop()
