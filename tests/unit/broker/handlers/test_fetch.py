"""Fetch on the wire: long polls, sessions, bounds and errors."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.partition.flush_gate import FlushGate
from tests.unit.broker.raw_client import (
    Client,
    Fetched,
    create_topic,
    delete_topic,
    fetch_v7,
    fetched,
    running,
    until,
)

from penstock.broker.node import Node
from penstock.log.log import Log
from penstock.log.segment_files import FilePool
from penstock.protocol.errors import ApiError, ErrorCode

_FOREVER_MS = 2**31 - 1


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path, penstock_flush="never") as node:
        yield node


async def _waiting(node: Node, client: Client, *args: Any, **options: Any) -> None:
    """A long poll that has come to its wait."""
    before = len(node.partitions.find("t", 0)._fetch_waiters)
    client.writer.write(fetch_v7(*args, max_wait_ms=_FOREVER_MS, **options))
    await until(lambda: len(node.partitions.find("t", 0)._fetch_waiters) == before + 1)


async def _answer(client: Client) -> Fetched:
    return fetched((await client.reply())[1])


# -- waiting ---------------------------------------------------------------------------------------------


async def test_bytes_of_all_partitions_count_towards_min_bytes(node: Node) -> None:
    await create_topic(node, "t", 3)
    reader, writer = await Client.connect(node), await Client.connect(node)
    await writer.produce("t", bytes(100), partition=2)
    await _waiting(node, reader, [("t", i, 0) for i in range(3)], min_bytes=500)
    await writer.produce("t", bytes(100), partition=0)
    assert node.partitions.find("t", 0)._fetch_waiters
    await writer.produce("t", bytes(200), partition=1)
    answer = await _answer(reader)
    assert [bool(answer.partitions["t", i].records) for i in range(3)] == [True] * 3


async def test_a_reader_is_told_at_once_that_its_topic_is_gone(node: Node) -> None:
    await create_topic(node, "t", 2)
    reader = await Client.connect(node)
    await _waiting(node, reader, [("t", 0, 0), ("t", 1, 0)], min_bytes=1_000_000)
    await delete_topic(node, "t")
    answer = await _answer(reader)
    assert {part.error_code for part in answer.partitions.values()} == {ErrorCode.unknown_topic_or_partition}


async def test_a_topic_that_came_again_is_read_from_its_new_start(node: Node) -> None:
    await create_topic(node, "t")
    client = await Client.connect(node)
    await client.produce("t", b"old")
    await delete_topic(node, "t")
    await create_topic(node, "t")
    assert (await client.fetch([("t", 0, 1)])).one().error_code is ErrorCode.offset_out_of_range
    assert (await client.fetch([("t", 0, 0)])).one().high_watermark == 0


async def test_the_end_of_a_segment_is_no_reason_to_wait(node: Node) -> None:
    await create_topic(node, "t", segment_bytes="1000")
    client = await Client.connect(node)
    for _ in range(5):
        await client.produce("t", bytes(600))
    answer = await client.fetch([("t", 0, 0)], min_bytes=3000, max_wait_ms=_FOREVER_MS)
    assert 600 < len(answer.one().records) < 1000


async def test_a_segment_that_begins_wakes_those_who_wait(node: Node) -> None:
    await create_topic(node, "t", segment_bytes="1000")
    reader, writer = await Client.connect(node), await Client.connect(node)
    await writer.produce("t", bytes(600))
    await _waiting(node, reader, [("t", 0, 0)], min_bytes=5000)
    await writer.produce("t", bytes(600))
    assert len((await _answer(reader)).one().records) > 600


async def test_what_does_not_fit_into_a_reply_is_no_reason_to_wait(tmp_path: Path) -> None:
    bounds = {"penstock_flush": "never", "penstock_max_queued_response_bytes": "100000"}
    async with running(tmp_path, **bounds) as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        for _ in range(30):
            await client.produce("t", bytes(10_000))
        answer = await client.fetch([("t", 0, 0)], min_bytes=200_000, max_wait_ms=_FOREVER_MS)
        assert 80_000 < len(answer.one().records) <= 100_000


async def test_a_record_that_is_not_safe_yet_is_there_but_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = FlushGate(monkeypatch)
    async with running(tmp_path) as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        gate.close()
        await client.produce("t", b"x", acks=1)
        # Offset 1 lies above the high watermark and below the end of the log: nothing to read, and no error.
        for offset in (0, 1):
            answer = (await client.fetch([("t", 0, offset)])).one()
            assert (answer.error_code, answer.high_watermark, answer.records) == (ErrorCode.none, 0, b"")
        assert (await client.fetch([("t", 0, 2)])).one().error_code is ErrorCode.offset_out_of_range
        gate.open()


async def test_traffic_counts_what_was_sent_and_nothing_else(node: Node) -> None:
    await create_topic(node, "t")
    reader, writer = await Client.connect(node), await Client.connect(node)
    await writer.produce("t", bytes(100))
    await _waiting(node, reader, [("t", 0, 0)], min_bytes=300)
    await writer.produce("t", bytes(200))
    answer = await _answer(reader)
    traffic = node.partitions.find("t", 0).traffic
    assert (traffic.bytes_out, traffic.messages_out) == (len(answer.one().records), 2)


# -- bounds ----------------------------------------------------------------------------------------------


async def test_max_bytes_is_shared_but_the_first_batch_always_fits(node: Node) -> None:
    await create_topic(node, "t", 3)
    client = await Client.connect(node)
    for index in range(3):
        for _ in range(3):
            await client.produce("t", bytes(1000), partition=index)
    everything = [("t", index, 0) for index in range(3)]
    tiny = await client.fetch(everything, max_bytes=1, partition_bytes=1)
    assert [len(tiny.partitions["t", i].records) // 1000 for i in range(3)] == [1, 0, 0]
    some = await client.fetch(everything, max_bytes=5000)
    assert [len(some.partitions["t", i].records) // 1000 for i in range(3)] == [3, 1, 0]
    each = await client.fetch(everything, partition_bytes=2500)
    assert [len(each.partitions["t", i].records) // 1000 for i in range(3)] == [2, 2, 2]


# -- reading from disk -----------------------------------------------------------------------------------


def _nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FilePool.read

    def read(pool: FilePool, fd: int, size: int, position: int, nowait: bool) -> Any:
        if nowait:
            raise BlockingIOError
        return real(pool, fd, size, position, nowait)

    monkeypatch.setattr(FilePool, "read", read)


async def test_what_is_not_in_memory_is_read_from_disk(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await create_topic(node, "t", 3)
    client = await Client.connect(node)
    for index in range(3):
        await client.produce("t", b"x" * 100, partition=index)
    _nothing_is_cached(monkeypatch)
    client.writer.write(
        fetch_v7([("t", i, 0) for i in range(3)], correlation=1) + fetch_v7([("t", 0, 1)], correlation=2)
    )
    (first, reply), (second, _) = [await client.reply() for _ in range(2)]
    assert (first, second) == (1, 2)
    assert all(len(part.records) > 100 for part in fetched(reply).partitions.values())


async def test_a_disk_that_cannot_be_read_is_reported_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(node, "t")
    client = await Client.connect(node)
    await client.produce("t", b"x")
    attempts = []

    def read(log: Log, offset: int, *args: Any, nowait: bool = False, **options: Any) -> Any:
        if nowait:
            raise BlockingIOError
        attempts.append(offset)
        raise ApiError(ErrorCode.kafka_storage_error, "cannot read the log")

    monkeypatch.setattr(Log, "read", read)
    answer = await client.fetch([("t", 0, 0)])
    assert answer.one().error_code is ErrorCode.kafka_storage_error
    assert attempts == [0]


async def test_a_mistake_of_ours_in_a_long_poll_does_not_reach_the_producer(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(node, "t")
    reader, writer = await Client.connect(node), await Client.connect(node)
    await _waiting(node, reader, [("t", 0, 0)])

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("a mistake")

    monkeypatch.setattr(Log, "read", fail)
    assert (await writer.produce("t", b"x")).error is ErrorCode.none
    assert await reader.is_cut_off()


# -- sessions --------------------------------------------------------------------------------------------


async def _session(client: Client, *wanted: tuple[str, int, int]) -> int:
    opened = await client.fetch(wanted, session=(0, 0))
    assert opened.error is ErrorCode.none
    assert set(opened.partitions) == {(topic, index) for topic, index, _ in wanted}
    assert opened.session_id != 0
    return opened.session_id


async def test_a_session_answers_only_what_is_new(node: Node) -> None:
    await create_topic(node, "t", 3)
    client = await Client.connect(node)
    session = await _session(client, ("t", 0, 0), ("t", 1, 0), ("t", 2, 0))
    assert (await client.fetch(session=(session, 1))).partitions == {}
    await client.produce("t", b"x", partition=1)
    answer = await client.fetch(session=(session, 2))
    assert set(answer.partitions) == {("t", 1)}
    # Until the reader says where it goes on, it gets the same again.
    assert set((await client.fetch(session=(session, 3))).partitions) == {("t", 1)}
    assert (await client.fetch([("t", 1, 1)], session=(session, 4))).partitions == {}


async def test_a_session_takes_in_and_forgets_partitions(node: Node) -> None:
    await create_topic(node, "t", 3)
    client = await Client.connect(node)
    for index in range(3):
        await client.produce("t", b"x", partition=index)
    session = await _session(client, ("t", 0, 0))
    added = await client.fetch([("t", 1, 0), ("t", 2, 0)], forget=[("t", 0)], session=(session, 1))
    assert set(added.partitions) == {("t", 1), ("t", 2)}
    emptied = await client.fetch(forget=[("t", 1), ("t", 2)], session=(session, 2))
    assert (emptied.session_id, emptied.partitions) == (0, {})
    gone = await client.fetch(session=(session, 3))
    assert gone.error is ErrorCode.fetch_session_id_not_found


async def test_partitions_that_were_served_let_the_others_go_first(node: Node) -> None:
    await create_topic(node, "t", 3)
    client = await Client.connect(node)
    for index in range(3):
        await client.produce("t", bytes(1000), partition=index)
    opened = await client.fetch([("t", i, 0) for i in range(3)], session=(0, 0), max_bytes=1)
    served = [[key for key, part in opened.partitions.items() if part.records]]
    for epoch in (1, 2, 3):
        answer = await client.fetch(session=(opened.session_id, epoch), max_bytes=1)
        served.append([key for key, part in answer.partitions.items() if part.records])
    assert served == [[("t", 0)], [("t", 1)], [("t", 2)], [("t", 0)]]


async def test_an_error_is_told_each_time_and_its_end_too(node: Node) -> None:
    await create_topic(node, "t")
    client = await Client.connect(node)
    session = await _session(client, ("t", 0, 0), ("late", 0, 0))
    for epoch in (1, 2):
        again = await client.fetch(session=(session, epoch))
        assert again.one().error_code is ErrorCode.unknown_topic_or_partition
    await create_topic(node, "late")
    better = await client.fetch(session=(session, 3))
    assert (set(better.partitions), better.one().error_code) == ({("late", 0)}, ErrorCode.none)
    assert (await client.fetch(session=(session, 4))).partitions == {}


async def test_epochs_out_of_turn_are_refused_and_a_full_request_starts_over(node: Node) -> None:
    await create_topic(node, "t")
    client = await Client.connect(node)
    session = await _session(client, ("t", 0, 0))
    wrong = await client.fetch(session=(session, 5))
    assert (wrong.error, wrong.session_id) == (ErrorCode.invalid_fetch_session_epoch, 0)
    assert (await client.fetch(session=(session, 1))).error is ErrorCode.none
    renewed = await client.fetch([("t", 0, 0)], session=(session, 0))
    assert renewed.session_id not in (0, session)
    assert len(node.fetch_sessions) == 1


async def test_the_final_epoch_ends_a_session(node: Node) -> None:
    await create_topic(node, "t")
    client = await Client.connect(node)
    session = await _session(client, ("t", 0, 0))
    final = await client.fetch([("t", 0, 0)], session=(session, -1))
    assert (final.session_id, set(final.partitions)) == (0, {("t", 0)})
    assert len(node.fetch_sessions) == 0


async def test_an_answer_that_a_later_request_has_overtaken_is_an_error(node: Node) -> None:
    await create_topic(node, "t")
    client, other = await Client.connect(node), await Client.connect(node)
    session = await _session(client, ("t", 0, 0))
    client.writer.write(fetch_v7(session=(session, 1), max_wait_ms=_FOREVER_MS))
    await until(lambda: node.fetch_sessions._sessions[session].waiting)
    await other.fetch([("t", 0, 0)], session=(session, 2))
    overtaken = await _answer(client)
    await other.produce("t", b"x")
    assert (overtaken.error, overtaken.partitions) == (ErrorCode.invalid_fetch_session_epoch, {})
    assert set((await other.fetch(session=(session, 3))).partitions) == {("t", 0)}


async def test_a_partition_may_be_forgotten_while_it_is_read_from_disk(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_topic(node, "t", 2)
    client = await Client.connect(node)
    await client.produce("t", b"x")
    session = await _session(client, ("t", 0, 0), ("t", 1, 0))
    _nothing_is_cached(monkeypatch)
    client.writer.write(
        fetch_v7(session=(session, 1), correlation=1)
        + fetch_v7(session=(session, 2), forget=[("t", 0)], correlation=2)
    )
    answers = [await client.reply() for _ in range(2)]
    assert [number for number, _ in answers] == [1, 2]
    assert fetched(answers[0][1]).error is ErrorCode.invalid_fetch_session_epoch
    assert fetched(answers[1][1]).error is ErrorCode.none


async def test_without_room_for_a_session_the_answer_is_whole_and_has_none(tmp_path: Path) -> None:
    async with running(tmp_path, max_incremental_fetch_session_cache_slots="1") as node:
        await create_topic(node, "t")
        client = await Client.connect(node)
        await _session(client, ("t", 0, 0))
        alone = await client.fetch([("t", 0, 0)], session=(0, 0))
        assert (alone.session_id, set(alone.partitions)) == (0, {("t", 0)})
