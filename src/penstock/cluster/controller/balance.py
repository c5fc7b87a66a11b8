"""What the controller does unasked: preferred leaders lead again, internal topics get their replicas."""

from collections import Counter
from collections.abc import Mapping

from penstock.cluster.controller.election import Election
from penstock.cluster.controller.leadership import all_partitions
from penstock.cluster.controller.partition_change import Changes
from penstock.cluster.controller.reassignment import is_reassigning, reassign
from penstock.cluster.controller.rules import ControllerRules
from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.state import PartitionState

Replicas = tuple[int, ...]


def balance_leaders(image: ClusterImage, *, rules: ControllerRules, partitions_max: int) -> Decision[int]:
    """Leaders go back to the first replicas where these are in sync. The reply is how many moved: when it is
    `partitions_max` there may be more."""
    changes = Changes(image, rules)
    for topic, index, partition in all_partitions(image):
        if len(changes.records) >= partitions_max:
            break
        if has_better_leader(image, partition):
            change = changes.of(topic, index)
            change.election = Election.PREFERRED
            changes.add(change)
    return changes.decision(len(changes.records))


def has_better_leader(image: ClusterImage, partition: PartitionState) -> bool:
    preferred = partition.replicas[0]
    if partition.leader == preferred or preferred not in partition.isr or preferred not in image.brokers:
        return False
    return partition.has_leader and image.brokers[preferred].is_active


def raise_internal_topics(
    image: ClusterImage,
    replication_factors: Mapping[str, int],
    *,
    rules: ControllerRules,
    partitions_max: int = 1000,
) -> Decision[int]:
    """As many replicas as there are active brokers, up to what each topic is given, so that a cluster that grew out
    of one node keeps its groups when that node dies. The reply is how many partitions are being raised."""
    changes = Changes(image, rules)
    load = _replicas_by_broker(image)
    for name, replication_factor in sorted(replication_factors.items()):
        topic = image.topics.get(name)
        for index, partition in topic.partitions.items() if topic is not None else ():
            target = _more_replicas(image, partition, replication_factor, load)
            if is_reassigning(partition) or len(target) == len(partition.replicas):
                continue
            if len(changes.records) >= partitions_max:
                break
            load.update(target[len(partition.replicas) :])
            assert topic is not None
            change = changes.of(topic, index)
            reassign(change, _led_in_turn(target, index))
            changes.add(change)
    return changes.decision(len(changes.records))


def _led_in_turn(replicas: Replicas, index: int) -> Replicas:
    """Otherwise the node that the cluster grew out of would stay everyone's preferred leader."""
    turn = index % len(replicas)
    return replicas[turn:] + replicas[:turn]


def _replicas_by_broker(image: ClusterImage) -> Counter[int]:
    return Counter(replica for _, _, partition in all_partitions(image) for replica in partition.replicas)


def _more_replicas(
    image: ClusterImage, partition: PartitionState, replication_factor: int, load: Counter[int]
) -> Replicas:
    """On racks that have none yet before others, and on brokers with little before those with much."""
    replicas = list(partition.replicas)
    racks = [image.brokers[broker].rack_or_host for broker in replicas if broker in image.brokers]
    free = {broker.id: broker.rack_or_host for broker in image.active_brokers() if broker.id not in replicas}
    while free and len(replicas) < replication_factor:
        chosen = min(free, key=lambda broker: (racks.count(free[broker]), load[broker], broker))
        replicas.append(chosen)
        racks.append(free.pop(chosen))
    return tuple(replicas)
