"""A world of share groups: at least once with dead letters and delays, and at most once, enforced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from penstock.cluster.topic_names import SHARE_GROUP_STATE
from penstock.groups.share.partition.share_partition_state import RedeliveryBackoff, SharePartitionPolicy
from penstock.groups.share.state.share_state import InitializeState, ReadStateSummary, ShareStateSummary
from penstock.groups.share.state.share_state import SharePartitionKey as ShareKey
from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard
from penstock.protocol.errors import ErrorCode
from simulation.burying import dead_letter_topic
from simulation.clients import Producer, Sleeper
from simulation.cluster import Cluster, Shape
from simulation.node import Node
from simulation.replica import Key
from simulation.script import Steps, play
from simulation.share_history import ShareHistory
from simulation.sharers import ShareMember
from simulation.sharing import Sharing, answer_of, state_question
from simulation.timings import SMALL
from simulation.workload import TopicShape, Workload, internal_topic
from simulation.world import World

TOPIC: Final = "orders"
_WORKERS: Final = "workers"
_ONCE: Final = "once"
_LOCK_MS: Final = 150
_LIMIT: Final = 3
_MEMBERS: Final = 2


def build(world: World) -> tuple[Cluster, Workload]:
    extra = 1 if world.chance(0.4) else 0
    cluster = Cluster(world, Shape(brokers=extra, clock_drift=0.03), SMALL)
    topics = (
        TopicShape(TOPIC, 1, 3, 2),
        TopicShape(dead_letter_topic(TOPIC), 1, 3, 2),
        internal_topic(SHARE_GROUP_STATE),
    )
    return cluster, ShareWorkload(cluster, topics)


def _policies(world: World) -> dict[str, SharePartitionPolicy]:
    backoffs = (None, RedeliveryBackoff(20, 20, 20, False), RedeliveryBackoff(10, 60, 10, True))
    backoff = backoffs[world.draw(len(backoffs))]
    base = SharePartitionPolicy(lock_ms=_LOCK_MS, delivery_limit=_LIMIT, locks_max=30)
    return {
        _WORKERS: base._replace(writes_dead_letters=True, backoff=backoff),
        _ONCE: base._replace(is_at_most_once=True),
    }


class ShareWorkload(Workload):
    def __init__(self, cluster: Cluster, topics: tuple[TopicShape, ...]) -> None:
        super().__init__(cluster, topics)
        self.policies = _policies(cluster.world)
        self.history = ShareHistory(at_most_once=frozenset({_ONCE}), limit=_LIMIT, lock_ms=_LOCK_MS)
        self.producer = Producer(cluster, -1, self.counts)
        self.members: list[ShareMember] = []
        cluster.on_start.append(partial(_share, policies=self.policies, history=self.history))
        self._initialized = 0
        self._letters_seen = 0
        self._says_last_words = False

    def begin(self) -> None:
        for group in self.policies:
            for key in self._keys():
                play(self.admin, self._initialize(group, key))

    def _keys(self) -> list[Key]:
        return self.cluster.partitions(TOPIC)

    def _initialize(self, group: str, key: Key) -> Steps:
        """What the coordinator of the group does when its members subscribe."""
        question = InitializeState(ShareKey(group, key.topic_id, key.partition), 1, 0)
        while True:
            reply = yield state_question(self.cluster, question)
            if answer_of(reply).error is ErrorCode.none:
                break
            yield 20
        for _ in range(_MEMBERS):
            self._join(group)

    def _join(self, group: str) -> None:
        member = ShareMember(self.cluster, -2 - len(self.members) % 25, self.counts, group)
        member.is_diligent = self.is_closing
        self.members.append(member)
        member.begin(self._keys())

    def _alive(self) -> list[ShareMember]:
        return [member for member in self.members if not member.is_over and not member.is_leaving]

    @property
    def has_begun(self) -> bool:
        groups = {record.group for record in self.history.delivered}
        return len(groups) == len(self.policies) and self.counts["outcomes told"] >= 10

    @property
    def sleepers(self) -> Sequence[Sleeper]:
        return self._alive()

    def step(self) -> None:
        world, alive = self.world, self._alive()
        kind = world.draw(40)
        self._look_at_letters()
        if self.is_closing:
            self._say_last_words()
        elif kind < 10:
            self.producer.send(self.partition_of(TOPIC), world.between(1, 3))
        elif kind < 12 and alive:
            member = alive[world.draw(len(alive))]
            self._join(member.group)
            if kind == 10:
                member.is_leaving = True
            else:
                world.note("member crashes", member)
                member.crash()

    def _say_last_words(self) -> None:
        """Whoever is left has something to do."""
        for key in self._keys():
            if not self._says_last_words and self.producer.send(key, 2):
                self._says_last_words = True

    def _look_at_letters(self) -> None:
        for key in self.cluster.partitions(dead_letter_topic(TOPIC)):
            batches = self.cluster.invariants.ledger(key).batches
            for batch in batches[self._letters_seen :]:
                for letter in batch.payload:
                    self.history.buried(letter)
                    self.counts["dead letters"] += 1
            self._letters_seen = len(batches)

    def close(self) -> None:
        super().close()
        for member in self.members:
            member.is_diligent = True

    def unfinished(self) -> str | None:
        if not self._says_last_words or self.producer.has_unacknowledged:
            return "records of an idempotent producer are not acknowledged"
        shard = self._observed()
        for group in self.policies:
            for key in self._keys():
                summary = _summary(shard, ShareKey(group, key.topic_id, key.partition))
                end_offset = self.cluster.invariants.ledger(key).end_offset
                # What is buried is final at once, and the start passes it with the next write.
                if summary.start_offset + summary.delivery_complete_count < end_offset:
                    return f"{group} is at {summary} of {end_offset} in {key}"
        if sum(shard.pending_by_group().values()):
            return f"dead letters are not buried: {shard.pending_by_group()}"
        return self.unavailable()

    def _observed(self) -> ShareCoordinatorShard:
        """The state of all share partitions, from what is committed."""
        shard = ShareCoordinatorShard()
        for key in self.cluster.partitions(SHARE_GROUP_STATE):
            for batch in self.cluster.invariants.ledger(key).batches:
                for record in batch.payload:
                    shard.replay(*record)
        return shard

    def finish(self) -> None:
        self._look_at_letters()
        for key in self._keys():
            self.history.finish(_WORKERS, key, self.cluster.invariants.ledger(key).end_offset)


def _share(node: Node, policies: dict[str, SharePartitionPolicy], history: ShareHistory) -> None:
    Sharing(node, policies, history)


def _summary(shard: ShareCoordinatorShard, key: ShareKey) -> ShareStateSummary:
    ((_, reply),) = shard.ask((ReadStateSummary(key, -1),), None, now_ms=0).replies
    summary = answer_of(reply).summary
    assert summary is not None
    return summary
