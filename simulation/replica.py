"""One partition on one broker: leader, follower or neither, over a simulated log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from penstock.cluster.image import PartitionState
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import EndMarker
from penstock.replication.follower import EpochEndOffset, FetchPosition, FollowerRules, ReplicaFetchReply
from penstock.replication.leader import IsrProposal, LeaderRules
from simulation.simlog import NO_PRODUCER, Batch, SimLog

if TYPE_CHECKING:
    from penstock.log.producer_state import VerificationGuard
    from simulation.coordinator import Coordinator
    from simulation.node import Node

_SERVED_BATCHES_MAX: Final = 8

OnCommit = Callable[[ErrorCode], None]


class Key(NamedTuple):
    """A partition by topic id, which a topic made anew does not share."""

    topic_id: UUID
    partition: int

    def __repr__(self) -> str:
        return f"{self.topic_id.int & 0xFFFF:x}-{self.partition}"


class Produce(NamedTuple):
    key: Key
    values: tuple[Any, ...]
    acks_all: bool
    producer_id: int = NO_PRODUCER
    producer_epoch: int = -1
    sequence: int = -1
    #: Of a transactional batch, and whether the leader adds the partition to the transaction (KIP-890).
    transactional_id: str = ""
    adds: bool = False

    @property
    def is_transactional(self) -> bool:
        return bool(self.transactional_id)


class Served(NamedTuple):
    """A leader's answer to a follower about one partition."""

    answer: ReplicaFetchReply
    batches: tuple[Batch, ...]


class Replica:
    def __init__(self, node: Node, key: Key, topic: str, log: SimLog) -> None:
        self.node = node
        self.key = key
        self.topic = topic
        self.log = log
        self.state: PartitionState | None = None
        self.leading: LeaderRules | None = None
        self.following: FollowerRules | None = None
        #: The coordinator that lives on this partition while it leads.
        self.coordinator: Coordinator | None = None
        self.is_damaged = False
        self._waiters: list[tuple[int, OnCommit]] = []
        #: What each follower was last told of the high watermark.
        self.told: dict[int, int] = {}

    def __repr__(self) -> str:
        role = self.leading or self.following
        return f"<Replica {self.topic}-{self.key.partition} on {self.node.id} {role} {self.log}>"

    # --- roles ---

    def assume(self, state: PartitionState) -> None:
        """What the image says of this partition now."""
        before, self.state = self.state, state
        if before is not None and before.leader_epoch == state.leader_epoch:
            if self.leading is not None:
                self._reconfigured(self.leading, state)
            return
        self.give_up()
        self.node.fetches.wake(self.key)
        if self.is_damaged:
            return
        if state.leader == self.node.id:
            self._lead(state)
        elif state.has_leader:
            self.following = FollowerRules(leader_id=state.leader, leader_epoch=state.leader_epoch)

    def give_up(self) -> None:
        """Whoever waits here must look for the leader elsewhere."""
        self.leading = self.following = None
        self.told.clear()
        waiters, self._waiters = self._waiters, []
        if self.coordinator is not None:
            self.coordinator.close()
            self.coordinator = None
        for _, on_commit in waiters:
            on_commit(self.last_word())

    def last_word(self) -> ErrorCode:
        """What those hear who wait for a leader that is none any more."""
        return ErrorCode.not_leader_or_follower

    def _lead(self, state: PartitionState) -> None:
        log, node = self.log, self.node
        node.world.note("leads", node.id, self.topic, self.key, "epoch", state.leader_epoch, log)
        self.leading = LeaderRules(
            local_id=node.id,
            leader_epoch=state.leader_epoch,
            partition_epoch=state.partition_epoch,
            replicas=state.replicas,
            isr=state.isr,
            epoch_start_offset=log.end_offset,
            high_watermark=log.high_watermark,
            local_offset=self.counted_offset(),
            lag_ms_max=node.timings.lag_ms_max,
            isr_min=node.isr_min(self.topic, state),
            now_ms=node.now_ms(),
        )
        node.invariants.partition_leader(node, self)
        if log.durable_offset < log.end_offset:
            self.sync()
        self.moved()
        node.leads(self)

    def _reconfigured(self, rules: LeaderRules, state: PartitionState) -> None:
        isr_min = self.node.isr_min(self.topic, state)
        if rules.changed(
            isr=state.isr, partition_epoch=state.partition_epoch, replicas=state.replicas, isr_min=isr_min
        ):
            self.moved()

    # --- leading ---

    def require_leader(self) -> LeaderRules:
        if self.leading is None:
            raise ApiError(ErrorCode.not_leader_or_follower)
        return self.leading

    def produce(
        self,
        request: Produce,
        on_commit: Callable[[ErrorCode, int], None],
        guard: VerificationGuard | None = None,
    ) -> None:
        rules = self.require_leader()
        self.node.machine.disk.require_room()
        if request.acks_all and rules.is_below_min:
            raise ApiError(ErrorCode.not_enough_replicas)
        base_offset = self.repeated(request)
        if base_offset is None:
            if guard is not None:
                self.log.producers.check_guard(request.producer_id, request.producer_epoch, guard)
            base_offset = self.append(
                request.values,
                request.producer_id,
                request.producer_epoch,
                request.sequence,
                is_transactional=request.is_transactional,
            )
        end = base_offset + len(request.values)
        if request.acks_all:
            self.when_committed(end, lambda error: on_commit(error, base_offset))
        else:
            on_commit(ErrorCode.none, base_offset)

    def repeated(self, request: Produce) -> int | None:
        if request.producer_id == NO_PRODUCER:
            return None
        last_delta = len(request.values) - 1
        trace = self.log.producers.check(
            request.producer_id,
            request.producer_epoch,
            request.sequence,
            last_delta,
            request.is_transactional,
            0 if self.leading is None else self.leading.leader_epoch,
        )
        return None if trace is None else trace.base_offset

    def append(
        self,
        values: tuple[Any, ...],
        producer_id: int = NO_PRODUCER,
        producer_epoch: int = -1,
        sequence: int = -1,
        *,
        is_transactional: bool = False,
        is_control: bool = False,
        marker: EndMarker | None = None,
    ) -> int:
        """The leader's own append; followers and the disk hear of it at once."""
        log, rules = self.log, self.require_leader()
        base = log.end_offset
        batch = Batch(
            self.node.world.serial(),
            base,
            base + len(values),
            rules.leader_epoch,
            values,
            producer_id,
            producer_epoch,
            sequence,
            is_control,
            is_transactional,
            marker,
        )
        self.put(batch)
        self.sync()
        if self.leading is rules and rules.local_moved(self.counted_offset()):
            self.moved()
        self.node.fetches.wake(self.key)
        return base

    def append_marker(self, marker: EndMarker, transaction_version: int) -> None:
        """End a producer's transaction here, unless it has ended by this marker already. Raises ApiError."""
        self.require_leader()
        if self.log.producers.check_marker(marker, transaction_version):
            self.append(
                (marker,),
                marker.producer_id,
                marker.producer_epoch,
                is_transactional=True,
                is_control=True,
                marker=marker,
            )

    def when_committed(self, end_offset: int, on_commit: OnCommit) -> None:
        if self.log.high_watermark >= end_offset:
            on_commit(ErrorCode.none)
        else:
            self._waiters.append((end_offset, on_commit))

    def put(self, batch: Batch) -> None:
        self.log.append(batch)
        self.node.invariants.appended(self.node, self.key, self.log, batch)

    def sync(self) -> None:
        self.when_durable(self._synced)

    def when_durable(self, then: Callable[[], None]) -> None:
        """At once where the flush policy promises nothing about power."""
        if self.log.is_synced_to_count:
            self.node.sync(self.log, then)
        else:
            then()

    def _synced(self) -> None:
        if self.leading is not None and self.leading.local_moved(self.counted_offset()):
            self.moved()

    def counted_offset(self) -> int:
        """How much of its own log the leader counts."""
        return self.log.durable_offset

    def moved(self) -> None:
        """The high watermark of the rules may have moved."""
        rules = self.leading
        if rules is None:
            return
        self.log.high_watermark = high = rules.high_watermark
        self.node.invariants.high_watermark(self.node, self, rules.leader_epoch, high)
        if self._waiters:
            due = [waiter for waiter in self._waiters if waiter[0] <= high]
            self._waiters = [waiter for waiter in self._waiters if waiter[0] > high]
            for _, on_commit in due:
                on_commit(ErrorCode.none)
        self.node.fetches.wake(self.key)

    def serve(self, follower: int, broker_epoch: int, asked: FetchPosition, *, is_new: bool) -> Served:
        """What a follower is told; its question, when it comes, says how far it has come."""
        rules, log = self.leading, self.log
        if rules is None:
            return refusal(ErrorCode.not_leader_or_follower)
        if (error := self.fenced(rules, asked.leader_epoch)) is not None:
            return refusal(error)
        if follower not in rules.replicas:
            return refusal(ErrorCode.unknown_topic_or_partition)
        diverging = self.parting(asked)
        if diverging is not None:
            answer = ReplicaFetchReply(ErrorCode.none, log.high_watermark, log.start_offset, diverging, False)
            return Served(answer, ())
        if not log.start_offset <= asked.offset <= log.end_offset:
            answer = ReplicaFetchReply(ErrorCode.offset_out_of_range, -1, log.start_offset, None, False)
            return Served(answer, ())
        if is_new:
            self._count(rules, follower, broker_epoch, asked.offset)
        batches = tuple(log.read(asked.offset, log.end_offset, self.node.cluster.served_batches_max))
        if log.is_damaged(batches):
            self.node.found_damage(self)
            return refusal(ErrorCode.kafka_storage_error)
        return Served(
            ReplicaFetchReply(ErrorCode.none, log.high_watermark, log.start_offset, None, bool(batches)),
            batches,
        )

    def _count(self, rules: LeaderRules, follower: int, broker_epoch: int, offset: int) -> None:
        now_ms, log_end = self.node.now_ms(), self.log.end_offset
        if rules.fetched(follower, offset=offset, log_end=log_end, broker_epoch=broker_epoch, now_ms=now_ms):
            self.moved()
        if rules.can_join(follower):
            self.node.propose_isr(self)

    def fenced(self, rules: LeaderRules, asked_epoch: int) -> ErrorCode | None:
        if asked_epoch < rules.leader_epoch:
            return ErrorCode.fenced_leader_epoch
        return ErrorCode.unknown_leader_epoch if asked_epoch > rules.leader_epoch else None

    def parting(self, asked: FetchPosition) -> EpochEndOffset | None:
        """Where the follower's history leaves the leader's, judged by epochs."""
        if asked.last_fetched_epoch < 0:
            return None
        epoch, end = self.end_of_epoch(asked.last_fetched_epoch)
        if epoch < asked.last_fetched_epoch or end < asked.offset:
            return EpochEndOffset(epoch, end)
        return None

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """The largest epoch up to the asked one, and where it ended; this leader's may have no records yet."""
        log, leader_epoch = self.log, self.require_leader().leader_epoch
        latest = log.epochs.latest
        if epoch == leader_epoch:
            return epoch, log.end_offset
        if 0 <= epoch < leader_epoch and epoch >= latest:
            return (latest if latest >= 0 else epoch), log.end_offset
        return log.end_offset_for(epoch)

    def wanted_isr(self) -> IsrProposal | None:
        rules = self.leading
        if rules is None:
            return None
        if rules.expired(self.node.now_ms()):
            self.moved()
        return rules.wanted_isr(self.node.now_ms(), self.node.is_eligible)

    # --- for clients ---

    def consume(self, offset: int) -> tuple[int, list[Batch]]:
        """The high watermark, and committed batches from an offset on."""
        self.require_leader()
        log = self.log
        if not log.start_offset <= offset <= log.end_offset:
            raise ApiError(ErrorCode.offset_out_of_range)
        batches = log.read(offset, self.readable_end(), _SERVED_BATCHES_MAX)
        if log.is_damaged(batches):
            self.node.found_damage(self)
            raise ApiError(ErrorCode.kafka_storage_error)
        return log.high_watermark, batches

    def consume_committed(self, offset: int) -> tuple[int, list[Batch], tuple[tuple[int, int], ...]]:
        """The last stable offset, batches below it, and which of them are aborted: all of one moment."""
        self.require_leader()
        log = self.log
        if not log.start_offset <= offset <= log.end_offset:
            raise ApiError(ErrorCode.offset_out_of_range)
        stable = self.log.last_stable_offset
        self.node.invariants.stable_told(self, stable)
        batches = log.read(offset, stable, _SERVED_BATCHES_MAX)
        if log.is_damaged(batches):
            self.node.found_damage(self)
            raise ApiError(ErrorCode.kafka_storage_error)
        next_offset = batches[-1].next_offset if batches else offset
        return stable, batches, self.aborted_in(offset, next_offset)

    def aborted_in(self, offset: int, next_offset: int) -> tuple[tuple[int, int], ...]:
        return self.log.aborted_in(offset, next_offset)

    def readable_end(self) -> int:
        return self.log.high_watermark

    def latest_offset(self) -> int:
        rules = self.require_leader()
        if not self.knows_latest(rules):
            raise ApiError(ErrorCode.offset_not_available)
        # What is told must cover all that any client was told before.
        self.node.invariants.latest_told(self.key, rules.leader_epoch, self.log.high_watermark)
        return self.log.high_watermark

    def knows_latest(self, rules: LeaderRules) -> bool:
        """A new leader's high watermark may be older than what was committed."""
        return rules.has_reached_epoch_start


def refusal(error: ErrorCode) -> Served:
    return Served(ReplicaFetchReply(error, -1, -1, None, False), ())
