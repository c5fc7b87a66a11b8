"""Small clusters for tests of the controller."""

from collections.abc import Sequence
from itertools import count
from typing import Any, TypeVar
from uuid import UUID

from penstock.cluster.controller.brokers import BrokerRegistration, register_broker
from penstock.cluster.controller.create_topics import (
    CreateTopicResult,
    NewTopic,
    Randomness,
    TopicDefaults,
    create_topics,
)
from penstock.cluster.controller.decision import ControllerConfig, Decision
from penstock.cluster.controller.heartbeats import fence_brokers, unfence_broker
from penstock.cluster.image import ClusterImage
from penstock.cluster.metadata_records import BrokerEndpoint
from penstock.protocol.steps import finish

Answer = TypeVar("Answer")

#: A cluster whose nodes set nothing: flush policy ack, one replica in sync is enough.
CONTROLLER = ControllerConfig()
RULES = TopicDefaults(partitions=2, replication_factor=1, partitions_max=100)


def broker(
    broker_id: int, *, rack: str | None = None, incarnation: int = 0, was_clean: bool = True, disk: int = 0
) -> BrokerRegistration:
    return BrokerRegistration(
        broker_id=broker_id,
        incarnation=UUID(int=1000 + incarnation),
        endpoints=(BrokerEndpoint(name="PLAINTEXT", host=f"b{broker_id}", port=9092, security_protocol=0),),
        rack=rack,
        log_dirs=(UUID(int=100 * (disk + 1) + broker_id),),
        was_clean=was_clean,
    )


def cluster(brokers: int = 1) -> ClusterImage:
    """Brokers 1, 2, ... alive, no topics."""
    image = ClusterImage()
    for broker_id in range(1, brokers + 1):
        register(image, broker(broker_id), epoch=broker_id)
        unfence(image, broker_id)
    image.check_invariants()
    return image


def register(
    image: ClusterImage,
    registration: BrokerRegistration,
    *,
    epoch: int,
    silent_ms: int | None = 0,
    rules: ControllerConfig = CONTROLLER,
) -> Decision[int]:
    decision = register_broker(image, registration, broker_epoch=epoch, silent_ms=silent_ms, rules=rules)
    return applied(image, decision)


def fence(image: ClusterImage, *brokers: int, rules: ControllerConfig = CONTROLLER) -> Decision[None]:
    return applied(image, fence_brokers(image, brokers, rules=rules))


def unfence(image: ClusterImage, broker_id: int, *, rules: ControllerConfig = CONTROLLER) -> Decision[None]:
    epoch = image.brokers[broker_id].epoch
    return applied(image, unfence_broker(image, broker_id, broker_epoch=epoch, rules=rules))


def applied(image: ClusterImage, decision: Decision[Answer]) -> Decision[Answer]:
    image.apply(decision.records)
    image.check_invariants()
    return decision


#: No randomness: placement starts at the first broker, ids count up.
CHANCE = Randomness(draw=lambda _: 0, fresh_id=map(UUID, map("{:032x}".format, count(1))).__next__)


def create(
    image: ClusterImage, *topics: NewTopic, rules: TopicDefaults = RULES, **options: Any
) -> Sequence[CreateTopicResult]:
    decision = finish(create_topics(image, topics, rules=rules, chance=CHANCE, **options))
    image.apply(decision.records)
    image.check_invariants()
    return decision.reply
