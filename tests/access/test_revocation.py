"""A right that is taken away ends at once, also for requests that wait; a forwarded request has its client's rights."""

import asyncio
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from kio.schema.alter_user_scram_credentials.v0.request import AlterUserScramCredentialsRequest
from kio.schema.describe_cluster.v2.request import DescribeClusterRequest
from kio.schema.envelope.v0.request import EnvelopeRequest
from kio.schema.fetch.v13 import request as fetching
from tests.access.matrix import CLIENT, GROUP, READ_GROUP, READ_TOPIC, TOPIC, Need, rule
from tests.access.ours import ADMIN, SETTINGS, Client
from tests.unit.broker.coordinators.share.share_client import Member, got, publish, share_topic
from tests.unit.broker.network.test_sasl import sasl_node
from tests.unit.broker.raw_client import create_topic, until
from tests.unit.broker.wire_client import WireClient

from penstock.broker.controller.forwarding import encode_principal
from penstock.broker.node import Node
from penstock.protocol.errors import ErrorCode
from penstock.security.principal import Principal

_LONG = timedelta(seconds=600)


async def connect(node: Node, principal: str = CLIENT) -> WireClient:
    before = set(node.server.connections)
    wire = await WireClient.connect(node)
    await until(lambda: node.server.connections.keys() - before)
    (connection,) = node.server.connections.keys() - before
    connection.principal = Principal.parse(principal)
    return wire


def allow(node: Node, *needs: Need) -> None:
    assert node.authorizer is not None
    node.authorizer.update({uuid4(): rule(need) for need in needs})


def fetch_request(topic_id: UUID, session: tuple[int, int] = (0, 0)) -> Any:
    partition = fetching.FetchPartition(
        partition=0, fetch_offset=0, last_fetched_epoch=-1, log_start_offset=-1, partition_max_bytes=1 << 20,
        current_leader_epoch=-1,
    )  # fmt: skip
    topic = fetching.FetchTopic(topic_id=topic_id, partitions=(partition,))
    return fetching.FetchRequest(
        replica_id=-1, max_wait=_LONG, min_bytes=1, max_bytes=1 << 20, isolation_level=0,
        session_id=session[0], session_epoch=session[1], topics=(topic,), forgotten_topics_data=(), rack_id="",
    )  # fmt: skip


async def test_a_fetch_that_waits_gets_no_records_after_its_rule_is_gone(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **SETTINGS) as node:
        await create_topic(node, TOPIC)
        allow(node, READ_TOPIC)
        wire = await connect(node)
        waiting = asyncio.create_task(wire.ask(fetch_request(node.image.topics[TOPIC].id)))
        await until(lambda: any(session.waiting for session in node.fetch_sessions._sessions.values()))
        allow(node)
        await publish(node, 1, topic=TOPIC)
        answer = await waiting
        assert answer.responses[0].partitions[0].error_code is ErrorCode.topic_authorization_failed
        assert not answer.responses[0].partitions[0].records


async def test_a_share_fetch_that_waits_gets_no_records_after_its_rule_is_gone(tmp_path: Path) -> None:
    async with sasl_node(tmp_path, **SETTINGS) as node:
        await share_topic(node, topic=TOPIC, group=GROUP)
        allow(node, READ_GROUP, READ_TOPIC)
        member = Member(node, await connect(node), TOPIC, GROUP)
        waiting = asyncio.create_task(member.ask(wait_ms=600_000))
        await until(lambda: any(led._watchers for led in node.share()))
        allow(node, READ_GROUP)
        await publish(node, 1, topic=TOPIC)
        received = got(await waiting)
        assert (received.error, received.values) == (ErrorCode.topic_authorization_failed, {})


async def test_a_refused_request_without_a_field_for_errors_does_not_cut_off_the_node_that_forwards_it(
    tmp_path: Path,
) -> None:
    """It has to be closed by the node that the client is connected to."""
    request = AlterUserScramCredentialsRequest(deletions=(), upsertions=())
    async with sasl_node(tmp_path, **SETTINGS) as node:
        frame = struct.pack(">hhih", 51, 0, 1, -1) + b"\0" + b"\1\1\0"
        envelope = EnvelopeRequest(
            request_data=frame,
            request_principal=encode_principal(Principal.parse(CLIENT), is_by_token=False),
            client_host_address=bytes((127, 0, 0, 1)),
        )
        peer = Client(node, is_node=True, principal=ADMIN)
        answer = await peer.ask(envelope)
        assert answer.error_code is ErrorCode.none
        assert len(answer.response_data) == 8, (
            "the offset, and no reply: the forwarding node closes the connection"
        )
        assert await Client(node).ask(request) is None
        assert node.metrics.internal_errors == 0
        assert (
            await peer.ask(
                DescribeClusterRequest(
                    include_cluster_authorized_operations=False, endpoint_type=1, include_fenced_brokers=False
                )
            )
            is not None
        )
        assert len(node.server.connections) == 1, "that of the node"
