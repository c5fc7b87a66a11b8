"""After any sequence of events, no replica leads that may lack acknowledged records.

Beside the image the test keeps, for each partition, who really has everything: with enough replicas in sync a
record may be committed at any moment, and from then on only the in-sync replicas have it.
"""

from collections.abc import Callable
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.unit.cluster.clusters import CHANCE, CONTROLLER, broker

from penstock.cluster.controller.alter_configs import (
    AlterConfigsResource,
    ConfigChange,
    ConfigOp,
    NodeConfig,
    incremental_alter_configs,
)
from penstock.cluster.controller.alter_partition import (
    LOST_DIRECTORY,
    AlterPartition,
    DirectoryAssignment,
    IsrMember,
    alter_partitions,
    assign_replicas_to_dirs,
)
from penstock.cluster.controller.brokers import register_broker
from penstock.cluster.controller.create_topics import NewTopic, TopicDefaults, create_topics
from penstock.cluster.controller.decision import Decision
from penstock.cluster.controller.elect_leaders import (
    ElectionType,
    balance_leaders,
    elect_leaderless_partitions,
    elect_leaders,
)
from penstock.cluster.controller.heartbeats import (
    BrokerHeartbeat,
    BrokerSessions,
    fence_brokers,
    heartbeat,
    unregister_broker,
)
from penstock.cluster.controller.reassignment import Reassignment, alter_reassignments
from penstock.cluster.image import ClusterImage, ConfigResource, PartitionState, ResourceType
from penstock.cluster.image_snapshot import snapshot_records
from penstock.cluster.metadata_records import decode_record, encode_records
from penstock.cluster.topic_settings import effective_isr_min
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import finish

Key = tuple[str, int]
Answer = TypeVar("Answer")

BROKERS = st.integers(1, 4)
TOPICS = st.sampled_from(["synced", "unsynced", "careless", "single"])
NEW_TOPICS = (
    NewTopic(name="synced", partitions=2, replication_factor=3),
    NewTopic(name="unsynced", partitions=1, replication_factor=3, configs=(("penstock.flush", "never"),)),
    NewTopic(
        name="careless",
        partitions=1,
        replication_factor=3,
        configs=(("unclean.leader.election.enable", "true"),),
    ),
    NewTopic(name="single", partitions=1, replication_factor=1, configs=(("penstock.flush", "never"),)),
)
RULES = TopicDefaults(partitions=1, replication_factor=3, partitions_max=20)


class LeadershipHistory(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.image = ClusterImage()
        self.sessions = BrokerSessions(session_timeout_ms=10)
        self.offset = 0
        self.starts = 0
        self.disks = dict.fromkeys(range(1, 5), 0)
        self.complete: dict[Key, set[int]] = {}
        self.joining: set[int] = set()  # they have caught up, and may lead as soon as they are in sync
        for broker_id in range(1, 5):
            self.start(broker_id, was_clean=True, same_disk=True)
            self.beat(broker_id)
        self.commit(lambda: finish(create_topics(self.image, NEW_TOPICS, rules=RULES, chance=CHANCE)))
        for name, isr_min in (("synced", "2"), ("unsynced", "2"), ("careless", "2"), ("single", "1")):
            self.set_config(name, "min.insync.replicas", isr_min)

    # --- what the test knows ---

    def partitions(self) -> dict[Key, PartitionState]:
        return {
            (topic.name, index): partition
            for topic in self.image.topics.values()
            for index, partition in topic.partitions.items()
        }

    def allowed(self, name: str) -> bool:
        return CONTROLLER.unclean_allowed(self.image, name)

    def commit(
        self, decide: Callable[[], Decision[Answer]], *, by_operator: bool = False
    ) -> Decision[Answer] | None:
        try:
            decision = decide()
        except ApiError:
            return None
        before = self.partitions()
        unclean = {(each.topic, each.partition): each for each in decision.unclean}
        self.image.apply(map(decode_record, encode_records(decision.records)))
        self.offset += len(decision.records)
        for key, after in self.partitions().items():
            if key in before:
                self.check_change(before[key], after, unclean.get(key), key, by_operator)
            if key in unclean or key not in before:
                self.complete[key] = set(after.isr)
        return decision

    def check_change(
        self, before: PartitionState, after: PartitionState, unclean: object, key: Key, by_operator: bool
    ) -> None:
        assert (after == before) == (after.partition_epoch == before.partition_epoch), (before, after)
        assert after.leader_epoch >= before.leader_epoch
        if after.leader != before.leader:
            assert after.leader_epoch > before.leader_epoch, (before, after)
        if after.leader not in (before.leader, -1) and unclean is None:
            assert after.leader in {*before.isr, *before.elr, *self.joining}, (before, after)
        if unclean is not None:
            returned = before.last_known_elr == (after.leader,) or after.replicas == (after.leader,)
            trusted = not CONTROLLER.syncs_before_ack(self.image, key[0]) or len(after.replicas) == 1
            assert by_operator or self.allowed(key[0]) or (returned and trusted), (before, after)

    def let_commit(self) -> None:
        for key, partition in self.partitions().items():
            needed = effective_isr_min(CONTROLLER.isr_min(self.image, key[0]), partition)
            if partition.has_leader and len(partition.isr) >= needed:
                self.complete[key] = set(partition.isr)

    # --- brokers ---

    @rule(broker_id=BROKERS, was_clean=st.booleans(), same_disk=st.sampled_from([True, True, True, False]))
    def start(self, broker_id: int, was_clean: bool, same_disk: bool) -> None:
        self.starts += 1
        disk = self.disks[broker_id] if same_disk else self.starts
        registration = broker(broker_id, incarnation=self.starts, was_clean=was_clean, disk=disk)
        known = self.image.brokers.get(broker_id)
        registered = self.commit(
            lambda: register_broker(
                self.image,
                registration,
                broker_epoch=self.offset,
                silent_ms=10 if known is None or known.fenced else None,
                rules=CONTROLLER,
            )
        )
        assert registered is not None
        self.disks[broker_id] = disk
        for (name, index), partition in self.partitions().items():
            in_doubt = not was_clean and not CONTROLLER.syncs_before_ack(self.image, name)
            # There is no better copy than that of a sole replica.
            if (in_doubt and partition.replicas != (broker_id,)) or not same_disk:
                self.complete[name, index].discard(broker_id)

    @rule(broker_id=BROKERS, wish=st.sampled_from(["", "", "", "fence", "shutdown"]))
    def beat(self, broker_id: int, wish: str = "") -> None:
        known = self.image.brokers.get(broker_id)
        if known is None:
            return
        beat = BrokerHeartbeat(
            broker_id,
            known.epoch,
            self.offset,
            want_fence=wish == "fence",
            want_shutdown=wish == "shutdown" or known.in_controlled_shutdown,
        )
        self.sessions.contacted(broker_id, known.epoch, 0, metadata_offset=self.offset)
        self.commit(
            lambda: heartbeat(self.image, self.sessions, beat, committed_offset=self.offset, rules=CONTROLLER)
        )

    @rule(broker_ids=st.sets(BROKERS, min_size=1))
    def expire(self, broker_ids: set[int]) -> None:
        alive = [
            b for b in sorted(broker_ids) if b in self.image.brokers and not self.image.brokers[b].fenced
        ]
        self.commit(lambda: fence_brokers(self.image, alive, rules=CONTROLLER))

    @rule(broker_id=BROKERS)
    def unregister(self, broker_id: int) -> None:
        self.commit(lambda: unregister_broker(self.image, broker_id, rules=CONTROLLER))

    @rule(broker_id=BROKERS, name=TOPICS)
    def lose(self, broker_id: int, name: str) -> None:
        known = self.image.brokers.get(broker_id)
        if known is None:
            return
        item = DirectoryAssignment(self.image.topics[name].id, 0, LOST_DIRECTORY)
        done = self.commit(
            lambda: assign_replicas_to_dirs(
                self.image, [item], broker_id=broker_id, broker_epoch=known.epoch, rules=CONTROLLER
            )
        )
        assert done is not None
        # A sole replica goes on, and its loss is reported.
        if done.reply[0].error is ErrorCode.none and not done.unclean:
            self.complete[name, 0].discard(broker_id)

    # --- leaders and operators ---

    @rule(name=TOPICS, members=st.sets(BROKERS), behind=st.sampled_from([0, 0, 0, 1]))
    def alter_isr(self, name: str, members: set[int], behind: int) -> None:
        partition = self.image.topics[name].partitions[0]
        leader = self.image.brokers.get(partition.leader)
        if leader is None:
            return
        isr = tuple(b for b in partition.replicas if b in members | {leader.id} and b in self.image.brokers)
        item = AlterPartition(
            topic_id=self.image.topics[name].id,
            partition=0,
            leader_epoch=partition.leader_epoch,
            partition_epoch=partition.partition_epoch - behind,
            isr=tuple(IsrMember(b, self.image.brokers[b].epoch) for b in isr),
        )
        self.joining = set(isr)
        done = self.commit(
            lambda: alter_partitions(
                self.image, [item], broker_id=leader.id, broker_epoch=leader.epoch, rules=CONTROLLER
            )
        )
        self.joining = set()
        assert done is not None
        if behind:
            assert done.reply[0].error is not ErrorCode.none
        elif done.records:
            self.complete[name, 0].update(isr)  # who joined had caught up

    @rule(name=TOPICS, replicas=st.none() | st.lists(BROKERS, min_size=1, max_size=4, unique=True))
    def reassign(self, name: str, replicas: list[int] | None) -> None:
        target = None if replicas is None else tuple(replicas)
        item = Reassignment(topic=name, partition=0, replicas=target)
        self.commit(lambda: finish(alter_reassignments(self.image, [item], rules=CONTROLLER)))

    @rule(election=st.sampled_from([ElectionType.PREFERRED, ElectionType.PREFERRED, ElectionType.UNCLEAN]))
    def elect(self, election: ElectionType) -> None:
        self.commit(
            lambda: finish(elect_leaders(self.image, None, election=election, rules=CONTROLLER)),
            by_operator=election is ElectionType.UNCLEAN,
        )

    @rule()
    def tidy(self) -> None:
        self.commit(lambda: balance_leaders(self.image, rules=CONTROLLER, partitions_max=3))
        self.commit(lambda: elect_leaderless_partitions(self.image, rules=CONTROLLER, partitions_max=3))

    @rule(name=TOPICS, isr_min=st.sampled_from(["1", "2", "3"]))
    def change_isr_min(self, name: str, isr_min: str) -> None:
        self.set_config(name, "min.insync.replicas", isr_min)

    def set_config(self, name: str, setting: str, value: str) -> None:
        change = AlterConfigsResource(
            resource=ConfigResource(ResourceType.TOPIC, name),
            changes=(ConfigChange(setting, ConfigOp.SET, value),),
        )
        rules = NodeConfig(node_settings={})
        self.commit(lambda: finish(incremental_alter_configs(self.image, [change], rules=rules)))

    # --- what always holds ---

    @invariant()
    def image_is_sound(self) -> None:
        self.image.check_invariants()
        self.let_commit()

    @invariant()
    def who_counts_is_alive(self) -> None:
        for partition in self.partitions().values():
            for member in (*partition.isr, *([partition.leader] if partition.has_leader else [])):
                assert self.image.brokers[member].is_active, partition

    @invariant()
    def who_may_lead_has_everything(self) -> None:
        for key, partition in self.partitions().items():
            assert {*partition.isr, *partition.elr} <= self.complete[key], (
                key,
                partition,
                self.complete[key],
            )

    @invariant()
    def who_has_everything_and_is_alive_leads(self) -> None:
        for key, partition in self.partitions().items():
            if not partition.has_leader:
                alive = [
                    b for b in partition.elr if b in self.image.brokers and self.image.brokers[b].is_active
                ]
                assert not alive, (key, partition)

    @invariant()
    def a_snapshot_tells_it_all(self) -> None:
        again = ClusterImage()
        for batch in snapshot_records(self.image):
            again.apply(map(decode_record, encode_records(batch)))
        again.check_invariants()
        assert again == self.image


TestLeadershipHistory = LeadershipHistory.TestCase
TestLeadershipHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
