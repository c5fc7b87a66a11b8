"""How a node without data finds its place: nodes of a running cluster, or founders that found one together.

A founder waits until all the others have said that they belong to no cluster; then the lowest id founds a quorum of
one, and the others join it. So a founder that has lost its disk finds the others' cluster and never founds a second.
"""

from __future__ import annotations

import asyncio
import logging
import random
from enum import Enum
from typing import TYPE_CHECKING, Final

from kio.schema.describe_cluster.v2.request import DescribeClusterRequest
from kio.schema.describe_quorum.v2.request import DescribeQuorumRequest, PartitionData, TopicData

from penstock.broker.peers import CONTROL, PeerUnreachable
from penstock.broker.quorum.driver import bootstrap_servers
from penstock.cluster.names import CLUSTER_METADATA
from penstock.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node

logger = logging.getLogger("penstock.quorum")

_DESCRIBE_QUORUM: Final = 55
_DESCRIBE_CLUSTER: Final = 60
_BROKERS: Final = 1
_REST_S: Final = 0.1
_REPORT_EVERY_ROUNDS: Final = 50


class Found(Enum):
    NO_CLUSTER = "belongs to no cluster"
    NOT_KNOWN = "does not answer"


async def find_cluster(node: Node) -> str | None:
    """The id of the cluster to join; None: this node shall found one. Waits for as long as it takes."""
    round_number = 0
    while True:
        answers = await asyncio.gather(*(_ask(node, at) for at in bootstrap_servers(node)))
        for answer in answers:
            if isinstance(answer, str):
                return answer
        if may_found(node) and all(answer is Found.NO_CLUSTER for answer in answers):
            return None
        if round_number % _REPORT_EVERY_ROUNDS == 0:
            logger.info("looking for a cluster", extra={"servers": _said(node, answers)})
        round_number += 1
        await asyncio.sleep(_REST_S * random.uniform(0.5, 1.5))


def may_found(node: Node) -> bool:
    """Only the lowest of the founders, and only where nobody is named that has a cluster already."""
    settings = node.settings
    return (
        settings.is_controller
        and not settings.bootstrap_servers
        and node.node_id == min(settings.founders, default=None)
    )


async def _ask(node: Node, where: tuple[str, int]) -> str | Found:
    timeout_s = node.settings.integer("controller.quorum.request.timeout.ms") / 1000
    cluster_question = DescribeClusterRequest(
        include_cluster_authorized_operations=False, endpoint_type=_BROKERS, include_fenced_brokers=False
    )
    partition = PartitionData(partition_index=0)
    quorum_question = DescribeQuorumRequest(
        topics=(TopicData(topic_name=CLUSTER_METADATA, partitions=(partition,)),)
    )
    try:
        cluster = await node.peers.call(
            where, _DESCRIBE_CLUSTER, cluster_question, timeout_s=timeout_s, purpose=CONTROL
        )
        if cluster.cluster_id:
            return str(cluster.cluster_id)
        quorum = await node.peers.call(
            where, _DESCRIBE_QUORUM, quorum_question, timeout_s=timeout_s, purpose=CONTROL
        )
    except (PeerUnreachable, TimeoutError):
        return Found.NOT_KNOWN
    says_none = quorum.error_code is ErrorCode.unknown_topic_or_partition
    return Found.NO_CLUSTER if says_none else Found.NOT_KNOWN


def _said(node: Node, answers: list[str | Found]) -> str:
    pairs = zip(bootstrap_servers(node), answers, strict=True)
    return ", ".join(
        f"{host}:{port} {answer.value if isinstance(answer, Found) else answer}"
        for (host, port), answer in pairs
    )
