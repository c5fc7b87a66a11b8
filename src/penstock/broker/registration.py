"""What a broker says of itself when it takes its place in the cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from penstock.cluster.controller.brokers import BrokerRegistration, restart_sole_broker
from penstock.cluster.controller.features import set_feature_levels
from penstock.cluster.decision import Decision
from penstock.cluster.guarantees import MIN_ISR
from penstock.cluster.image import ClusterImage
from penstock.cluster.records import BrokerEndpoint, BrokerFeature
from penstock.protocol.errors import ApiError

if TYPE_CHECKING:
    from penstock.broker.node import Node


def is_sole_broker(node: Node) -> bool:
    """Nobody else could object, lead, or hold a copy: this node decides alone and no other broker is alive."""
    return (
        node.metadata.is_active
        and node.quorum.is_alone
        and not any(broker.id != node.node_id and not broker.fenced for broker in node.image.brokers.values())
    )


def own_registration(node: Node, incarnation: UUID, last_epoch: int) -> BrokerRegistration:
    from penstock.broker.node import SUPPORTED_FEATURES

    ports = {listener.name: listener.port for listener in node.listeners}
    return BrokerRegistration(
        broker_id=node.node_id,
        incarnation=incarnation,
        endpoints=tuple(
            BrokerEndpoint(
                name=advertised.name,
                host=advertised.host,
                port=advertised.port or ports[advertised.name],
                security_protocol=0,
            )
            for advertised in node.settings.advertised
        ),
        features=tuple(
            BrokerFeature(name=f.name, min_supported_version=f.level_min, max_supported_version=f.level_max)
            for f in SUPPORTED_FEATURES
        ),
        rack=node.settings.rack,
        log_dirs=(node.store.directory_id,),
        was_clean=last_epoch >= 0,
    )


async def register_alone(node: Node, registration: BrokerRegistration) -> int:
    """Registered, unfenced and leading in one write, because a start waits for it. Raises StartFailed."""
    from penstock.broker.node import StartFailed

    def decide(image: ClusterImage) -> Decision[int]:
        joined = restart_sole_broker(
            image, registration, broker_epoch=node.metadata.next_offset, rules=node.controller.rules()
        )
        return with_feature_levels(node, image, joined, raise_them=True)

    try:
        return await node.controller.propose(decide)
    except ApiError as error:
        raise StartFailed(f"{node.settings.data_dir}: {error.message or error.code.name}") from None


def with_feature_levels(
    node: Node, image: ClusterImage, joined: Decision[int], *, raise_them: bool
) -> Decision[int]:
    """The first broker brings the cluster's feature levels; later `raise_them` or UpdateFeatures changes them."""
    from penstock.broker.node import SUPPORTED_FEATURES

    if image.features and not raise_them:
        return joined
    after = image.fork()
    after.apply(joined.records)
    wanted = {f.name: f.level_max for f in SUPPORTED_FEATURES}
    levels = set_feature_levels(after, wanted, isr_min=given_isr_min(node))
    return Decision((*joined.records, *levels.records), joined.reply, joined.unclean)


def given_isr_min(node: Node) -> str | None:
    """The min.insync.replicas that this node was started with; None where nobody chose one."""
    if MIN_ISR not in node.settings.origins:
        return None
    return str(node.settings.integer(MIN_ISR))


def registration_request(node: Node, incarnation: UUID, last_epoch: int) -> Any:
    from kio.schema.broker_registration.v4 import request as schema

    own = own_registration(node, incarnation, last_epoch)
    return schema.BrokerRegistrationRequest(
        broker_id=own.broker_id,
        cluster_id=node.cluster_id,
        incarnation_id=own.incarnation,
        listeners=tuple(
            schema.Listener(name=e.name, host=e.host, port=e.port, security_protocol=e.security_protocol)
            for e in own.endpoints
        ),
        features=tuple(
            schema.Feature(
                name=f.name,
                min_supported_version=f.min_supported_version,
                max_supported_version=f.max_supported_version,
            )
            for f in own.features
        ),
        rack=own.rack,
        log_dirs=own.log_dirs,
        previous_broker_epoch=last_epoch,
    )


def lost_request(broker_id: int, broker_epoch: int, replicas: Iterable[tuple[UUID, int]]) -> Any:
    from kio.schema.assign_replicas_to_dirs.v0 import request as schema

    from penstock.cluster.controller.lost_replicas import LOST_DIRECTORY

    by_topic: defaultdict[UUID, list[int]] = defaultdict(list)
    for topic_id, index in replicas:
        by_topic[topic_id].append(index)
    topics = tuple(
        schema.TopicData(
            topic_id=topic_id,
            partitions=tuple(schema.PartitionData(partition_index=index) for index in indexes),
        )
        for topic_id, indexes in by_topic.items()
    )
    return schema.AssignReplicasToDirsRequest(
        broker_id=broker_id,
        broker_epoch=broker_epoch,
        directories=(schema.DirectoryData(id_=LOST_DIRECTORY, topics=topics),),
    )
