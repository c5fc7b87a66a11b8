"""ListOffsets: the latest offset is that of the time of the request, so a consumer misses nothing published later."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from kio.index import load_response_schema
from kio.serial import entity_reader
from tests.unit.broker.raw_client import Client, create_topic, frame, produce, produced, running, string

LIST_OFFSETS = 2
LATEST = -1


def latest(topic: str, correlation: int) -> bytes:
    body = (
        struct.pack(">ib", -1, 0) + struct.pack(">i", 1) + string(topic) + struct.pack(">iiq", 1, 0, LATEST)
    )
    return frame(LIST_OFFSETS, 2, body, correlation)


def offset_in(reply: bytes) -> int:
    response, _ = entity_reader(load_response_schema(LIST_OFFSETS, 2))(reply, 0)
    offset: int = response.topics[0].partitions[0].offset
    return offset


@pytest.mark.parametrize("flush", ["ack", "interval"])
async def test_latest_does_not_count_what_is_produced_after_the_request(tmp_path: Path, flush: str) -> None:
    async with running(tmp_path) as node:
        await create_topic(node, "t", penstock_flush=flush)
        client = await Client.connect(node)
        # One write: the broker reads all of it at once. The second query waits for the record before it to be synced.
        client.writer.write(
            latest("t", 1)
            + produce("t", b"a", correlation=2)
            + latest("t", 3)
            + produce("t", b"b", correlation=4)
        )
        replies = dict([await client.reply() for _ in range(4)])
    assert offset_in(replies[1]) == 0
    assert [produced(replies[each])[0].offset for each in (2, 4)] == [0, 1]
    assert offset_in(replies[3]) == 1
