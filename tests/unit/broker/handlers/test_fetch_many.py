"""Fetches that look at many partitions are served in slices, between which partitions change."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.raw_client import (
    Client,
    Fetched,
    create_topic,
    fetch_v7,
    fetched,
    running,
    until,
)

from penstock.broker.handlers import fetch as fetch_handler
from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode

PARTITIONS = 300
FOREVER_MS = 2**31 - 1
NO_SESSION = (0, -1)
NEW_SESSION = (0, 0)
ALL = [("t", index, 0) for index in range(PARTITIONS)]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        await create_topic(node, "t", partitions=PARTITIONS)
        yield node


async def ask(client: Client, *args: Any, **options: Any) -> Fetched:
    return fetched(await client.ask(fetch_v7(*args, **options)))


def indexes(answer: Fetched, *, with_records: bool = False) -> set[int]:
    return {index for (_, index), part in answer.partitions.items() if part.records or not with_records}


async def test_a_session_over_many_partitions_gets_what_is_new_and_nothing_twice(node: Node) -> None:
    client, producer = await Client.connect(node), await Client.connect(node)
    for index in (7, 280):
        await producer.produce("t", b"x", partition=index, acks=-1)
    first = await ask(client, ALL, session=NEW_SESSION)
    assert first.error is ErrorCode.none
    assert indexes(first) == set(range(PARTITIONS))
    assert indexes(first, with_records=True) == {7, 280}
    session = node.services.fetch_sessions._sessions[first.session_id]
    wanted = [("t", 7, 1), ("t", 280, 1)]
    asked = asyncio.ensure_future(ask(client, wanted, session=(session.id, 1), max_wait_ms=FOREVER_MS))
    await until(lambda: session.waiting is not None)
    await producer.produce("t", b"x", partition=100, acks=-1)
    assert indexes(await asked) == {100}
    # From now on only those that change are looked at.
    assert indexes(await ask(client, [("t", 100, 1)], session=(session.id, 2))) == set()
    assert not session.dirty


@pytest.mark.parametrize("session", [NEW_SESSION, NO_SESSION], ids=["session", "no session"])
async def test_what_arrives_behind_the_reads_ends_the_wait(
    node: Node, monkeypatch: pytest.MonkeyPatch, session: tuple[int, int]
) -> None:
    """Else the client would wait for data that is there."""
    client, producer = await Client.connect(node), await Client.connect(node)
    sent: list[bool] = []
    collect = fetch_handler._Fetch._collect_in_slices

    async def append_after(self: Any) -> Any:
        collected = await collect(self)
        if not sent:
            sent.append(True)
            await producer.produce("t", b"x", partition=3, acks=-1)
        return collected

    monkeypatch.setattr(fetch_handler._Fetch, "_collect_in_slices", append_after)
    answer = await ask(client, ALL, session=session, max_wait_ms=FOREVER_MS)
    assert indexes(answer, with_records=True) == {3}


async def test_every_negative_replica_id_is_that_of_a_consumer(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client could have all that it asks for read in one piece."""
    sliced: list[bool] = []
    collect = fetch_handler._Fetch._collect_in_slices

    async def noted(self: Any) -> Any:
        sliced.append(True)
        return await collect(self)

    monkeypatch.setattr(fetch_handler._Fetch, "_collect_in_slices", noted)
    some = ALL[:255]  # more than are read at once, in a request that is read at once
    answer = await ask(await Client.connect(node), some, session=NEW_SESSION, replica=-2)
    assert (len(answer.partitions), sliced) == (len(some), [True])


async def test_a_fetch_of_many_partitions_ends_after_its_wait_and_with_its_connection(node: Node) -> None:
    client = await Client.connect(node)
    answer = await ask(client, ALL, session=NO_SESSION, max_wait_ms=20)
    assert len(answer.partitions) == PARTITIONS
    partition = node.partitions.get("t", 3)
    assert not partition._fetch_waiters
    client.writer.write(fetch_v7(ALL, session=NO_SESSION, max_wait_ms=FOREVER_MS))
    await until(lambda: partition._fetch_waiters)
    client.writer.close()
    await until(lambda: not partition._fetch_waiters)


async def test_a_request_may_change_many_partitions_of_a_session(node: Node) -> None:
    client, producer = await Client.connect(node), await Client.connect(node)
    first, rest = ALL[: PARTITIONS // 3], ALL[PARTITIONS // 3 :]
    session = (await ask(client, first, session=NEW_SESSION)).session_id
    forgotten = [("t", index) for index in range(20)]
    answer = await ask(client, rest, session=(session, 1), forget=forgotten)
    assert answer.error is ErrorCode.none
    assert node.services.fetch_sessions._sessions[session].wanted.keys() == {
        (b"t", index) for index in range(20, PARTITIONS)
    }
    for index in (5, 299):
        await producer.produce("t", b"x", partition=index, acks=-1)
    assert indexes(await ask(client, session=(session, 2)), with_records=True) == {299}
    wrong = await ask(client, rest, session=(session, 9))
    assert (wrong.error, wrong.partitions) == (ErrorCode.invalid_fetch_session_epoch, {})


async def test_a_request_that_is_cut_short_closes_its_connection(node: Node) -> None:
    client = await Client.connect(node)
    whole = fetch_v7(ALL, session=NO_SESSION)
    cut = whole[:-3]
    client.writer.write((len(cut) - 4).to_bytes(4, "big") + cut[4:])
    assert await client.is_cut_off()
    assert node.metrics.malformed_frames == 1
    assert node.server.buffers.bytes_in_use == 0
