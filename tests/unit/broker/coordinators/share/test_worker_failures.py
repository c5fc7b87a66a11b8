"""ShareFailures: a broker accepts failure reports only from the member that holds the records."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

import pytest
from tests.unit.broker.coordinators.share.share_client import (
    ACCEPT,
    GROUP,
    RELEASE,
    Member,
    publish,
    share_topic,
)
from tests.unit.broker.raw_client import Client, frame, running, until

from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode
from penstock.protocol.share_failures import (
    DELAY_MS_MAX,
    SHARE_FAILURES,
    ShareFailures,
    WorkerError,
    WorkerFailure,
    encode_share_failures,
    parse_share_failures_response,
)
from penstock.security.principal import ANONYMOUS, Principal

ALICE, MALLORY = Principal("User", "alice"), Principal("User", "mallory")
ERROR = WorkerError("ValueError", "no such customer", "")


_SETTINGS = {"share_coordinator_state_topic_num_partitions": "1", "penstock_flush": "never"}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path, **_SETTINGS) as node:
        yield node


@asynccontextmanager
async def acting_as(node: Node, principal: Principal) -> AsyncIterator[None]:
    """The connection that is made here belongs to this principal."""
    before = set(node.server.connections)
    yield
    await until(lambda: node.server.connections.keys() - before)
    (connection,) = node.server.connections.keys() - before
    connection.principal = principal


async def tell(
    node: Node,
    topic_id: UUID,
    *failures: WorkerFailure,
    partition: int = 0,
    principal: Principal = ANONYMOUS,
) -> ErrorCode:
    async with acting_as(node, principal):
        client = await Client.connect(node)
    body = encode_share_failures(ShareFailures(GROUP, topic_id, partition, failures))
    return parse_share_failures_response(memoryview(await client.ask(frame(SHARE_FAILURES, 0, body))))


async def kept(node: Node) -> list[int]:
    (offsets,) = await node.share_state().read_all(
        lambda shard: [
            offset for dead_letters in shard._dead_letters.values() for offset in dead_letters.errors
        ]
    )
    return offsets


async def test_only_what_is_said_of_records_in_delivery_counts(node: Node) -> None:
    await share_topic(node)
    await publish(node, 3)
    member = await Member.join(node)
    topic_id = member.topic_id
    assert await tell(node, topic_id, WorkerFailure(0, 1, error=ERROR)) is ErrorCode.invalid_record_state
    assert (await member.fetch(wait_ms=20_000)).acquired
    said = [
        WorkerFailure(0, 1, delay_ms=3_600_000),
        WorkerFailure(1, 1, error=ERROR),
        WorkerFailure(2, 2, error=ERROR),  # it is in its first delivery
        WorkerFailure(9, 1, error=ERROR),
    ]
    assert await tell(node, topic_id, *said) is ErrorCode.none
    assert await kept(node) == [1]
    # The group has no delay: what was not asked to rest comes again at once.
    assert await member.acknowledge((0, 2, [RELEASE])) is ErrorCode.none
    assert (await member.fetch(wait_ms=20_000)).acquired == [(1, 2), (2, 2)]


async def test_only_the_user_whose_member_holds_a_record_may_say_that_it_failed(node: Node) -> None:
    """Others who may read the group and the topic could keep its records away, or forge why they failed."""
    await share_topic(node)
    await publish(node, 2)
    async with acting_as(node, ALICE):
        victim = await Member.join(node)
    async with acting_as(node, MALLORY):
        mallory = await Member.join(node)
    assert (await victim.fetch(wait_ms=20_000)).acquired == [(0, 1), (1, 1)]
    lies = [WorkerFailure(0, 1, delay_ms=3_600_000), WorkerFailure(1, 1, error=ERROR)]
    assert await tell(node, victim.topic_id, *lies, principal=MALLORY) is ErrorCode.none
    # Nor may another user take over the member, whose id everybody knows who may describe the group.
    mallory.name = victim.name
    for epoch in (0, victim.epoch, -1):
        assert (await mallory.ask(epoch=epoch)).error_code is ErrorCode.share_session_not_found
    assert (
        await mallory.acknowledge((0, 1, [ACCEPT]), epoch=victim.epoch) is ErrorCode.share_session_not_found
    )
    assert await tell(node, victim.topic_id, *lies, principal=MALLORY) is ErrorCode.none
    assert await kept(node) == []
    assert (
        await tell(node, victim.topic_id, WorkerFailure(1, 1, error=ERROR), principal=ALICE) is ErrorCode.none
    )
    assert await kept(node) == [1]
    assert await victim.acknowledge((0, 1, [RELEASE])) is ErrorCode.none
    assert (await victim.fetch(wait_ms=20_000)).acquired == [(0, 2), (1, 2)]


async def test_a_delay_that_was_asked_for_outlives_a_restart(tmp_path: Path) -> None:
    """The leader and the share coordinator load it again: a long delay goes on, a short one is over."""
    async with running(tmp_path, **_SETTINGS) as node:
        await share_topic(node)
        await publish(node, 3)
        member = await Member.join(node)
        assert (await member.fetch(wait_ms=20_000)).acquired
        asked = [WorkerFailure(0, 1, delay_ms=3_600_000), WorkerFailure(1, 1, delay_ms=1)]
        assert await tell(node, member.topic_id, *asked) is ErrorCode.none
        assert await member.acknowledge((0, 2, [RELEASE])) is ErrorCode.none
    async with running(tmp_path, **_SETTINGS) as node:
        member = await Member.join(node)
        assert (await member.fetch(wait_ms=20_000)).acquired == [(1, 2), (2, 2)]
        assert (await member.fetch(wait_ms=1)).acquired == []


async def test_what_is_not_for_clients_or_too_large_ends_the_connection(node: Node) -> None:
    await share_topic(node)
    await publish(node, 1)
    member = await Member.join(node)
    assert (await member.fetch(wait_ms=20_000)).acquired
    failures = [WorkerFailure(0, 1, error=ERROR)]
    between_nodes = ShareFailures(GROUP, member.topic_id, 0, failures, for_coordinator=True)
    large = WorkerError("E", "m", "s" * 8_000)
    too_large = ShareFailures(GROUP, member.topic_id, 0, [WorkerFailure(0, 1, error=large)] * 100)
    for asked in (between_nodes, too_large):
        client = await Client.connect(node)
        client.writer.write(frame(SHARE_FAILURES, 0, encode_share_failures(asked)))
        assert await client.is_cut_off()
    assert await kept(node) == []


async def test_no_delay_keeps_a_record_from_being_acknowledged(node: Node) -> None:
    """The end of a delay has to be a moment that can be kept: one that cannot would fail every ShareAcknowledge."""
    await share_topic(node)
    await publish(node, 2)
    member = await Member.join(node)
    assert (await member.fetch(wait_ms=20_000)).acquired
    hostile = await Client.connect(node)
    asked = ShareFailures(GROUP, member.topic_id, 0, [WorkerFailure(0, 1, delay_ms=2**63 - 1)])
    hostile.writer.write(frame(SHARE_FAILURES, 0, encode_share_failures(asked)))
    assert await hostile.is_cut_off()
    longest = WorkerFailure(0, 1, delay_ms=DELAY_MS_MAX)
    assert await tell(node, member.topic_id, longest) is ErrorCode.none
    assert await member.acknowledge((0, 1, [RELEASE])) is ErrorCode.none
    assert (await member.fetch(wait_ms=20_000)).acquired == [(1, 2)]


async def test_an_unknown_or_unshared_partition_is_refused(node: Node) -> None:
    await share_topic(node)
    failure = WorkerFailure(0, 1, error=ERROR)
    unknown = await tell(node, UUID(int=5), failure)
    assert unknown is ErrorCode.unknown_topic_id
    topic_id = node.image.topics["t"].id
    assert await tell(node, topic_id, failure, partition=9) is ErrorCode.unknown_topic_or_partition
