"""After any sequence of requests the image is consistent, and replaying the log gives the same image."""

from collections.abc import Callable
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.unit.cluster.clusters import CHANCE, CONTROLLER, broker

from penstock.cluster.controller.alter_configs import (
    AlterConfigsResource,
    ConfigChange,
    NodeConfig,
    incremental_alter_configs,
)
from penstock.cluster.controller.alter_topics import NewPartitions, TopicRef, create_partitions, delete_topics
from penstock.cluster.controller.brokers import register_broker
from penstock.cluster.controller.create_topics import NewTopic, TopicDefaults, create_topics
from penstock.cluster.controller.decision import Decision
from penstock.cluster.controller.heartbeats import fence_broker, unfence_broker, unregister_broker
from penstock.cluster.image import ClusterImage, ConfigResource
from penstock.cluster.metadata_records import decode_record, encode_records
from penstock.protocol.errors import ApiError
from penstock.protocol.steps import finish

NAMES = st.sampled_from(["a", "a.b", "a_b", "c", "__consumer_offsets", "not legal"])
BROKERS = st.integers(1, 3)
RULES = TopicDefaults(partitions=2, replication_factor=1, partitions_max=20)


class ControllerHistory(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.image = ClusterImage()
        self.log: list[bytes] = []
        self.epochs: dict[tuple[UUID, int], int] = {}
        self.start_broker(1)

    def commit(self, decide: Callable[[], Decision[object]]) -> None:
        try:
            decision = decide()
        except ApiError:
            return
        self.log += encode_records(decision.records)
        self.image.apply(decision.records)

    @rule(broker_id=BROKERS)
    def start_broker(self, broker_id: int) -> None:
        incarnation = epoch = len(self.log)
        self.commit(
            lambda: register_broker(
                self.image,
                broker(broker_id, incarnation=incarnation),
                broker_epoch=epoch,
                silent_ms=0,
                rules=CONTROLLER,
            )
        )
        self.commit(lambda: unfence_broker(self.image, broker_id, broker_epoch=epoch, rules=CONTROLLER))

    @rule(broker_id=BROKERS)
    def fence(self, broker_id: int) -> None:
        if broker_id in self.image.brokers and not self.image.brokers[broker_id].fenced:
            self.commit(lambda: fence_broker(self.image, broker_id, rules=CONTROLLER))

    @rule(broker_id=BROKERS)
    def unregister(self, broker_id: int) -> None:
        in_use = {
            replica
            for topic in self.image.topics.values()
            for partition in topic.partitions.values()
            for replica in partition.replicas
        }
        if broker_id not in in_use:
            self.commit(lambda: unregister_broker(self.image, broker_id, rules=CONTROLLER))

    @rule(name=NAMES, partitions=st.integers(-1, 4), replicas=st.integers(-1, 3))
    def create(self, name: str, partitions: int, replicas: int) -> None:
        topic = NewTopic(name=name, partitions=partitions, replication_factor=replicas)
        self.commit(lambda: finish(create_topics(self.image, [topic], rules=RULES, chance=CHANCE)))

    @rule(names=st.lists(NAMES, max_size=3))
    def delete(self, names: list[str]) -> None:
        self.commit(lambda: finish(delete_topics(self.image, [TopicRef(name) for name in names])))

    @rule(name=NAMES, count=st.integers(0, 6))
    def grow(self, name: str, count: int) -> None:
        more = NewPartitions(name=name, count=count)
        self.commit(
            lambda: finish(create_partitions(self.image, [more], partitions_max=20, draw=CHANCE.draw))
        )

    @rule(name=NAMES, op=st.integers(0, 3), value=st.sampled_from(["compact", "delete", "oops", None]))
    def alter(self, name: str, op: int, value: str | None) -> None:
        change = AlterConfigsResource(
            resource=ConfigResource(2, name), changes=(ConfigChange("cleanup.policy", op, value),)
        )
        rules = NodeConfig(node_settings={})
        self.commit(lambda: finish(incremental_alter_configs(self.image, [change], rules=rules)))

    @invariant()
    def image_is_sound(self) -> None:
        self.image.check_invariants()

    @invariant()
    def only_active_brokers_lead(self) -> None:
        for topic in self.image.topics.values():
            for partition in topic.partitions.values():
                assert not partition.has_leader or self.image.brokers[partition.leader].is_active

    @invariant()
    def leader_epochs_never_fall(self) -> None:
        for topic in self.image.topics.values():
            for index, partition in topic.partitions.items():
                assert partition.leader_epoch >= self.epochs.get((topic.id, index), 0)
                self.epochs[topic.id, index] = partition.leader_epoch

    def teardown(self) -> None:
        again = ClusterImage()
        for value in self.log:
            again.replay(decode_record(value))
        assert again.topics == self.image.topics
        assert again.configs == self.image.configs
        assert again.brokers == self.image.brokers


TestControllerHistory = ControllerHistory.TestCase
TestControllerHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
