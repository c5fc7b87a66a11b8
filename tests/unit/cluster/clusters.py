"""Small clusters for the tests of this room."""

from collections.abc import Sequence
from itertools import count
from typing import Any
from uuid import UUID

from penstock.cluster.controller.brokers import BrokerRegistration, register_broker
from penstock.cluster.controller.create_topics import Chance, NewTopic, TopicResult, TopicRules, create_topics
from penstock.cluster.controller.fencing import unfence_broker
from penstock.cluster.image import ClusterImage
from penstock.cluster.records import BrokerEndpoint

RULES = TopicRules(partitions=2, replication_factor=1, partitions_max=100)


def broker(broker_id: int, *, rack: str | None = None, incarnation: int = 0) -> BrokerRegistration:
    return BrokerRegistration(
        broker_id=broker_id,
        incarnation=UUID(int=1000 + incarnation),
        endpoints=(BrokerEndpoint(name="PLAINTEXT", host=f"b{broker_id}", port=9092, security_protocol=0),),
        rack=rack,
        log_dirs=(UUID(int=100 + broker_id),),
    )


def cluster(brokers: int = 1) -> ClusterImage:
    """Brokers 1, 2, ... alive, no topics."""
    image = ClusterImage()
    for broker_id in range(1, brokers + 1):
        image.apply(register_broker(image, broker(broker_id), broker_epoch=broker_id).records)
        image.apply(unfence_broker(image, broker_id, broker_epoch=broker_id).records)
    image.check_invariants()
    return image


#: No randomness: placement starts at the first broker, ids count up.
CHANCE = Chance(draw=lambda _: 0, fresh_id=map(UUID, map("{:032x}".format, count(1))).__next__)


def create(
    image: ClusterImage, *topics: NewTopic, rules: TopicRules = RULES, **options: Any
) -> Sequence[TopicResult]:
    decision = create_topics(image, topics, rules=rules, chance=CHANCE, **options)
    image.apply(decision.records)
    image.check_invariants()
    return decision.reply
