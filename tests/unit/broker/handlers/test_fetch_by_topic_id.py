"""Fetch v12 and later: topic ids, leader epochs, diverging epochs, and sessions that change to topic ids."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from kio.schema.fetch.v17.request import FetchPartition, FetchRequest, FetchTopic
from tests.unit.broker.raw_client import Client, create_topic, delete_topic, running
from tests.unit.broker.wire_client import WireClient

from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode

READ_COMMITTED = 1


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path, penstock_flush="never") as node:
        await create_topic(node, "t")
        await (await Client.connect(node)).produce("t", b"x")
        yield node


def request(topic_id: UUID, *, session: tuple[int, int] = (0, -1), isolation: int = 0, **fields: Any) -> Any:
    values: dict[str, Any] = {
        "partition": 0,
        "current_leader_epoch": -1,
        "fetch_offset": 0,
        "last_fetched_epoch": -1,
        "log_start_offset": -1,
        "partition_max_bytes": 1 << 20,
    }
    return FetchRequest(
        max_wait=timedelta(0),
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=isolation,
        session_id=session[0],
        session_epoch=session[1],
        topics=(FetchTopic(topic_id=topic_id, partitions=(FetchPartition(**values | fields),)),),
        forgotten_topics_data=(),
        rack_id="",
    )


async def answer(client: WireClient, asked: Any) -> Any:
    response = await client.ask(asked)
    return response.responses[0].partitions[0]


async def test_an_id_that_no_topic_has_is_told_apart(node: Node) -> None:
    client = await WireClient.connect(node)
    topic_id = node.image.topics["t"].id
    assert (await answer(client, request(topic_id))).error_code is ErrorCode.none
    assert (await answer(client, request(uuid4()))).error_code is ErrorCode.unknown_topic_id
    unknown = await answer(client, request(topic_id, partition=9))
    assert unknown.error_code is ErrorCode.unknown_topic_or_partition
    await delete_topic(node, "t")
    await create_topic(node, "t")
    assert (await answer(client, request(topic_id))).error_code is ErrorCode.unknown_topic_id


async def test_a_leader_epoch_that_is_not_the_current_one_is_refused(node: Node) -> None:
    client = await WireClient.connect(node)
    partition = node.partitions.find("t", 0)
    partition.leader_epoch = epoch = 5

    async def error(asked: int) -> ErrorCode:
        got = await answer(client, request(partition.topic_id, current_leader_epoch=asked))
        return got.error_code  # type: ignore[no-any-return]

    assert [await error(epoch + change) for change in (-1, 0, 1)] == [
        ErrorCode.fenced_leader_epoch,
        ErrorCode.none,
        ErrorCode.unknown_leader_epoch,
    ]


async def test_a_reader_of_another_history_is_told_where_it_parts_from_ours(node: Node) -> None:
    client = await WireClient.connect(node)
    partition = node.partitions.find("t", 0)
    partition.leader_epoch += 1
    await (await Client.connect(node)).produce("t", b"y")
    before = partition.leader_epoch - 1
    same = await answer(client, request(partition.topic_id, fetch_offset=1, last_fetched_epoch=before))
    assert (same.error_code, same.diverging_epoch.epoch) == (ErrorCode.none, -1)
    other = await answer(client, request(partition.topic_id, fetch_offset=2, last_fetched_epoch=before))
    assert (other.diverging_epoch.epoch, other.diverging_epoch.end_offset) == (before, 1)
    assert not other.records


async def test_read_committed_lists_aborted_transactions_even_where_there_are_none(node: Node) -> None:
    client = await WireClient.connect(node)
    topic_id = node.image.topics["t"].id
    uncommitted = await answer(client, request(topic_id))
    committed = await answer(client, request(topic_id, isolation=READ_COMMITTED))
    assert (uncommitted.aborted_transactions, committed.aborted_transactions) == (None, ())
    assert committed.last_stable_offset == committed.high_watermark == 1
    assert committed.records == uncommitted.records


async def test_a_session_by_id_is_not_one_by_name(node: Node) -> None:
    client, older = await WireClient.connect(node), await Client.connect(node)
    topic_id = node.image.topics["t"].id
    opened = await client.ask(request(topic_id, session=(0, 0)))
    refused = await older.fetch([("t", 0, 0)], session=(opened.session_id, 1))
    assert refused.error is ErrorCode.fetch_session_topic_id_error
    again = await client.ask(request(topic_id, session=(opened.session_id, 1)))
    assert (again.error_code, again.session_id) == (ErrorCode.none, opened.session_id)
