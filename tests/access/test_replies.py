"""What replies show and hide by topic, where the matrix has nothing to show: transactions, share groups, reassignments;
and access to the APIs that only Penstock has."""

import struct
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kio.schema.add_partitions_to_txn.v3 import request as add
from kio.schema.describe_share_group_offsets.v1 import request as offsets
from kio.schema.describe_transactions.v0.request import DescribeTransactionsRequest
from kio.schema.init_producer_id.v5.request import InitProducerIdRequest
from kio.schema.list_partition_reassignments.v0 import request as reassignments
from kio.schema.share_group_heartbeat.v1.request import ShareGroupHeartbeatRequest
from tests.access.matrix import (
    CLIENT,
    DESCRIBE_GROUP,
    DESCRIBE_TOPIC,
    DESCRIBE_TRANSACTION,
    HIDDEN,
    READ_GROUP,
    READ_TOPIC,
    TOPIC,
    TRANSACTION,
    Need,
    cluster,
    rule,
    set_up,
)
from tests.access.ours import ADMIN, SETTINGS, Client
from tests.unit.broker.network.test_sasl import sasl_node
from tests.unit.broker.raw_client import Client as RawClient
from tests.unit.broker.raw_client import create_topic, frame, until

from penstock.broker.handlers.alter_configs import alter_cluster_configs
from penstock.broker.network.apis import PRIVATE_APIS, SCHEDULE_API
from penstock.broker.node import Node
from penstock.cluster.controller.alter_configs import (
    AlterConfigsResource,
    ConfigChange,
    ConfigOp,
    incremental_alter_configs,
)
from penstock.cluster.image import ConfigResource
from penstock.cluster.image import ResourceType as ConfigType
from penstock.protocol.acls import Operation
from penstock.protocol.errors import ErrorCode
from penstock.protocol.share_failures import (
    SHARE_FAILURES,
    ShareFailures,
    WorkerFailure,
    encode_share_failures,
    parse_share_failures_response,
)
from penstock.protocol.tenant_usage import TENANT_USAGE, decode_usage, encode_usage_request
from penstock.protocol.topic_drops import TOPIC_DROPS, decode_drops, encode_drops_request
from penstock.security.overflow import DroppedBy, DropReason
from penstock.security.principal import Principal

SHARE_GROUP, GROUP = "m-share-group", "m-group"
MINUTE = timedelta(minutes=1)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with sasl_node(tmp_path, **SETTINGS) as node:
        for name in (TOPIC, HIDDEN):
            await create_topic(node, name)
        yield node


def give(node: Node, *needs: Need) -> None:
    """The client has these rules, and no others."""
    assert node.authorizer is not None
    node.authorizer.update({uuid4(): rule(need) for need in needs})


# -- transactions ----------------------------------------------------------------------------------------


async def transaction_seen(node: Node, *needs: Need) -> Any:
    give(node, *needs)
    (state,) = (
        await Client(node).ask(DescribeTransactionsRequest(transactional_ids=(TRANSACTION,)))
    ).transaction_states
    return state


async def test_a_described_transaction_shows_the_topics_that_the_client_may_describe(node: Node) -> None:
    admin = Client(node, principal=ADMIN)
    await set_up(admin.ask)
    begun = InitProducerIdRequest(
        transactional_id=TRANSACTION, transaction_timeout=MINUTE, producer_id=-1, producer_epoch=-1
    )
    answer = await admin.ask(begun)
    while answer.error_code is not ErrorCode.none:
        answer = await admin.ask(begun)
    topics = tuple(add.AddPartitionsToTxnTopic(name=name, partitions=(0,)) for name in (TOPIC, HIDDEN))
    await admin.ask(
        add.AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=TRANSACTION,
            v3_and_below_producer_id=answer.producer_id,
            v3_and_below_producer_epoch=answer.producer_epoch,
            v3_and_below_topics=topics,
        )
    )
    state = await transaction_seen(node, DESCRIBE_TRANSACTION, DESCRIBE_TOPIC)
    assert (state.error_code, state.transaction_state) == (ErrorCode.none, "Ongoing")
    assert [topic.topic for topic in state.topics] == [TOPIC]
    state = await transaction_seen(node, DESCRIBE_TRANSACTION)
    assert (state.error_code, state.topics) == (ErrorCode.none, ())
    state = await transaction_seen(node, DESCRIBE_TOPIC)
    refused = ErrorCode.transactional_id_authorization_failed
    assert (state.error_code, state.transaction_state, state.topics) == (refused, "", ())


# -- share groups ----------------------------------------------------------------------------------------


async def share_offsets_seen(node: Node, *needs: Need, named: bool) -> tuple[ErrorCode, dict[str, ErrorCode]]:
    give(node, *needs)
    topics = tuple(
        offsets.DescribeShareGroupOffsetsRequestTopic(topic_name=name, partitions=(0,))
        for name in (TOPIC, HIDDEN)
    )
    asked = offsets.DescribeShareGroupOffsetsRequestGroup(
        group_id=SHARE_GROUP, topics=topics if named else None
    )
    request = offsets.DescribeShareGroupOffsetsRequest(groups=(asked,))
    (group,) = (await Client(node).ask(request)).groups
    return group.error_code, {topic.topic_name: topic.partitions[0].error_code for topic in group.topics}


async def test_offsets_of_a_share_group_are_shown_by_topic(node: Node) -> None:
    admin = Client(node, principal=ADMIN)
    member, epoch = "AAAAAAAAAAAAAAAAAAAAAQ", 0
    assigned: set[Any] = set()
    while len(assigned) < 2:
        answer = await admin.ask(
            ShareGroupHeartbeatRequest(
                group_id=SHARE_GROUP,
                member_id=member,
                member_epoch=epoch,
                rack_id=None,
                subscribed_topic_names=(TOPIC, HIDDEN),
            )
        )
        if answer.error_code is ErrorCode.none:
            epoch = answer.member_epoch
            if answer.assignment is not None:
                assigned = {each.topic_id for each in answer.assignment.topic_partitions}
    describe_group: Need = (DESCRIBE_GROUP[0], DESCRIBE_GROUP[1], SHARE_GROUP)
    none, refused = ErrorCode.none, ErrorCode.topic_authorization_failed
    seen = await share_offsets_seen(node, describe_group, DESCRIBE_TOPIC, named=True)
    assert seen == (none, {TOPIC: none, HIDDEN: refused})
    seen = await share_offsets_seen(node, describe_group, DESCRIBE_TOPIC, named=False)
    assert seen == (none, {TOPIC: none})
    seen = await share_offsets_seen(node, describe_group, named=True)
    assert seen == (none, {TOPIC: refused, HIDDEN: refused})
    seen = await share_offsets_seen(node, DESCRIBE_TOPIC, named=True)
    assert seen[0] is ErrorCode.group_authorization_failed
    assert none not in seen[1].values()


# -- reassignments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("topics", [None, (TOPIC, HIDDEN)])
async def test_reassignments_need_the_cluster_and_no_topic(
    node: Node, topics: tuple[str, ...] | None
) -> None:
    named = topics and tuple(
        reassignments.ListPartitionReassignmentsTopics(name=name, partition_indexes=(0,)) for name in topics
    )
    request = reassignments.ListPartitionReassignmentsRequest(timeout=MINUTE, topics=named)
    for needs, error in (
        ((cluster(Operation.DESCRIBE),), ErrorCode.none),
        ((DESCRIBE_TOPIC,), ErrorCode.cluster_authorization_failed),
        ((), ErrorCode.cluster_authorization_failed),
    ):
        give(node, *needs)
        answer = await Client(node).ask(request)
        assert (answer.error_code, answer.topics) == (error, ())


# -- APIs of our own -------------------------------------------------------------------------------------


async def ask_raw(node: Node, api_key: int, body: bytes) -> memoryview:
    before = set(node.server.connections)
    client = await RawClient.connect(node)
    await until(lambda: node.server.connections.keys() - before)
    (connection,) = node.server.connections.keys() - before
    connection.principal = Principal.parse(CLIENT)
    connection.is_inter_broker = True
    answer = await client.ask(frame(api_key, 0, body))
    client.writer.close()
    return memoryview(answer)


async def failures_told(node: Node, *, for_coordinator: bool) -> ErrorCode:
    told = ShareFailures(GROUP, node.image.topics[TOPIC].id, 0, [WorkerFailure(0, 1)], for_coordinator)
    return parse_share_failures_response(await ask_raw(node, SHARE_FAILURES, encode_share_failures(told)))


async def check_share_failures(node: Node) -> None:
    for needs, error in (
        ((), ErrorCode.group_authorization_failed),
        ((READ_TOPIC,), ErrorCode.group_authorization_failed),
        ((READ_GROUP,), ErrorCode.topic_authorization_failed),
        ((READ_GROUP, READ_TOPIC), ErrorCode.invalid_record_state),
    ):
        give(node, *needs)
        assert await failures_told(node, for_coordinator=False) is error, needs
    give(node, READ_GROUP, READ_TOPIC, cluster(Operation.DESCRIBE))
    assert await failures_told(node, for_coordinator=True) is ErrorCode.cluster_authorization_failed


async def check_tenant_usage(node: Node) -> None:
    changes = tuple(
        ConfigChange(name, ConfigOp.SET, value)
        for name, value in (("users", "User:ann"), ("prefix", "acme."))
    )
    tenant = AlterConfigsResource(resource=ConfigResource(ConfigType.TENANT, "acme"), changes=changes)
    (result,) = await alter_cluster_configs(node, incremental_alter_configs, [tenant], False)
    assert result.error is ErrorCode.none, result
    for needs, expected in (
        ((), set()),
        ((DESCRIBE_TOPIC,), set()),
        ((cluster(Operation.DESCRIBE),), {"acme"}),
        ((cluster(Operation.CLUSTER_ACTION),), {"acme"}),
    ):
        give(node, *needs)
        answer = await ask_raw(node, TENANT_USAGE, encode_usage_request(of_cluster=False))
        assert decode_usage(answer).keys() == expected, needs


async def check_topic_drops(node: Node) -> None:
    for name in (TOPIC, HIDDEN):
        node.overflow.drops.add((node.image.topics[name].id, 0), DroppedBy.SHED, DropReason.DISK, 5)
    for needs, expected in (
        ((), []),
        ((cluster(Operation.DESCRIBE),), []),
        ((DESCRIBE_TOPIC,), [TOPIC]),
        ((cluster(Operation.CLUSTER_ACTION),), [TOPIC, HIDDEN]),
    ):
        give(node, *needs)
        answer = await ask_raw(node, TOPIC_DROPS, encode_drops_request([TOPIC, HIDDEN, "unknown"]))
        assert [row.topic for row in decode_drops(answer)] == expected, needs


async def check_schedule(node: Node) -> None:
    give(node, READ_GROUP, READ_TOPIC, cluster(Operation.DESCRIBE))
    with pytest.raises((EOFError, ConnectionError)):
        await ask_raw(node, SCHEDULE_API, struct.pack(">i", 0))


CHECKS: dict[int, Callable[[Node], Any]] = {
    SCHEDULE_API: check_schedule,
    SHARE_FAILURES: check_share_failures,
    TENANT_USAGE: check_tenant_usage,
    TOPIC_DROPS: check_topic_drops,
}


def test_every_api_of_our_own_is_played() -> None:
    assert CHECKS.keys() == PRIVATE_APIS.keys()


@pytest.mark.parametrize("api_key", sorted(CHECKS), ids=lambda key: PRIVATE_APIS[key].name)
async def test_access_to_an_api_of_our_own(node: Node, api_key: int) -> None:
    await CHECKS[api_key](node)
