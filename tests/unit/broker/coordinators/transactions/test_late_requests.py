"""Late requests of the older transaction protocol on a connection that the producer has given up."""

import asyncio
from pathlib import Path

import pytest
from tests.unit.broker.coordinators.transactions.transactional_client import OLD, TransactionalClient, seen
from tests.unit.broker.raw_client import create_topic, running
from tests.unit.broker.wire_client import WireClient

from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode


async def two_connections(node: Node) -> tuple[TransactionalClient, TransactionalClient]:
    """One producer by its older connection and by its newer one."""
    await create_topic(node, "t")
    older = TransactionalClient(await WireClient.connect(node), "tx", OLD)
    await older.init()
    newer = TransactionalClient(await WireClient.connect(node), "tx", OLD)
    newer.producer_id, newer.epoch, newer.sequences = older.producer_id, older.epoch, older.sequences
    return older, newer


async def test_a_late_end_is_cut_off(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        older, newer = await two_connections(node)
        assert await older.add(0) == [ErrorCode.none]
        assert await older.send("first") is ErrorCode.none
        assert await newer.end(True) is ErrorCode.none
        while ErrorCode.concurrent_transactions in await newer.add(0):
            pass
        assert await newer.send("second") is ErrorCode.none
        with pytest.raises(asyncio.IncompleteReadError):
            await older.end(True)
        assert (await seen(newer.client)).values == ["first"]
        assert await newer.end(False) is ErrorCode.none


async def test_a_late_addition_is_cut_off(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        older, newer = await two_connections(node)
        assert await newer.add(0) == [ErrorCode.none]
        assert await newer.end(False) is ErrorCode.none
        with pytest.raises(asyncio.IncompleteReadError):
            await older.add(0)
        assert await newer.state_name() in ("PrepareAbort", "CompleteAbort")


async def test_who_comes_back_by_a_new_connection_is_served(tmp_path: Path) -> None:
    """A client that uses two connections in turn, as none is known to do, is slowed down and not broken."""
    async with running(tmp_path) as node:
        older, newer = await two_connections(node)
        assert await newer.add(0) == [ErrorCode.none]
        with pytest.raises(asyncio.IncompleteReadError):
            await older.end(True)
        older.client = await WireClient.connect(node)
        assert await older.end(True) is ErrorCode.none
