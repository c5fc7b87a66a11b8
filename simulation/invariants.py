"""What must hold after every step. Each check is made where its subject moves, and costs little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from penstock.cluster.controller.decision import UncleanElection
from penstock.cluster.image import ClusterImage, ImageDelta, PartitionState
from penstock.raft.types import ReplicaKey, Voters
from simulation.ledger import Ledger, Violation
from simulation.quorum import METADATA
from simulation.replica import Key
from simulation.simlog import Batch, SimLog

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.node import Node
    from simulation.replica import Replica


class Invariants:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.ledgers: dict[Any, Ledger] = {METADATA: Ledger(METADATA)}
        #: The newest committed image, and its offset.
        self.image = ClusterImage()
        self.image_offset = 0
        #: Copies that a fault has taken, with the time of that. Nobody can know of it before the broker, started
        #: anew, registers; of mere damage (-1), before somebody reads it.
        self.excused: dict[tuple[Key, int], int] = {}
        self._started: dict[UUID, int] = {}
        self.records_lost_uncleanly = 0
        self._raft_leaders: dict[int, tuple[int, Any]] = {}
        self._partition_leaders: dict[tuple[Key, int], tuple[int, Any]] = {}
        self._written: dict[tuple[Any, int, int], int] = {}
        self._high_watermarks: dict[tuple[Key, int], int] = {}
        self._stable: dict[Key, int] = {}
        self._unclean: set[tuple[str, int, int]] = set()
        self._heard: dict[tuple[int, int], int] = {}
        self._silent_ms: dict[UUID, int] = {}
        self._is_small = len(cluster.machines) < 12

    def ledger(self, key: Key) -> Ledger:
        found = self.ledgers.get(key)
        if found is None:
            found = self.ledgers[key] = Ledger(key)
        return found

    # --- the quorum ---

    def raft_leader(self, node: Node, epoch: int) -> None:
        """One leader per epoch."""
        known = self._raft_leaders.setdefault(epoch, (node.id, node.incarnation))
        if known != (node.id, node.incarnation):
            raise Violation("one quorum leader per epoch", f"epoch {epoch}: {known[0]} and {node.id}")

    def metadata_appended(self, node: Node, log: SimLog, batch: Batch) -> None:
        self._match(METADATA, log, batch)
        if batch.is_control and any(isinstance(record, Voters) for record in batch.payload):
            self._one_voter_change(node, log, batch)

    def _one_voter_change(self, node: Node, log: SimLog, batch: Batch) -> None:
        committed = max(node.quorum.high_watermark, 0)
        pending = [
            each
            for each in log.read(committed, log.end_offset)
            if each.is_control and any(isinstance(record, Voters) for record in each.payload)
        ]
        if len(pending) > 1 and node.quorum.is_leader:
            raise Violation("one voter change at a time", f"node {node.id}: {pending} above {committed}")

    def metadata_committed(self, node: Node, log: SimLog, offset: int) -> None:
        self.ledgers[METADATA].extend(log, offset)
        if node.quorum.is_leader:
            self._committed_by_majority(node, log, offset)

    def _committed_by_majority(self, node: Node, log: SimLog, offset: int) -> None:
        """A leader commits with a record of its own epoch, which most voters would keep through a power loss."""
        core = node.quorum.core
        if offset > log.start_offset and log.epoch_at(offset - 1) != core.epoch:
            raise Violation("leaders commit in their own epoch", f"{core} commits {offset} of {log}")
        voters = core.voters.latest
        chain = log.chain_at(offset)
        holders = [key.id for key in voters.keys if self._keeps(key, offset, chain)]
        if len(holders) < voters.majority:
            raise Violation(
                "a majority holds what is committed", f"{core} commits {offset}, held by {holders}"
            )

    def _keeps(self, key: ReplicaKey, offset: int, chain: int | None) -> bool:
        """One whose disk was lost since is not held against the leader."""
        disk = self.cluster.machines[key.id].disk
        log = disk.logs.get(METADATA)
        if disk.directory != key.directory:
            return True
        return log is not None and log.kept_offset >= offset and log.chain_at(offset) == chain

    def metadata_chain(self, offset: int) -> int:
        chain = self.ledgers[METADATA].chain_at(offset)
        if chain is None:
            raise Violation(
                "committed data changed", f"a snapshot ends at {offset}, where nothing committed ends"
            )
        return chain

    def snapshot_installed(self, image: ClusterImage, offset: int) -> None:
        if offset == self.image_offset and _essence(image) != _essence(self.image):
            raise Violation("snapshot equals image", f"differs at {offset}")

    def heartbeat_accepted(self, controller: Node, broker: int, epoch: int) -> None:
        """By the newest controller: what a deposed one hears, the others cannot know."""
        if controller.quorum.core.epoch == max(self._raft_leaders):
            self._heard[broker, epoch] = self.cluster.world.now_ms

    def registration_decided(self, broker: int, incarnation: UUID) -> None:
        known = self.image.brokers.get(broker)
        heard_ms = -1_000 if known is None else self._heard.get((broker, known.epoch), -1_000)
        self._silent_ms[incarnation] = self.cluster.world.now_ms - heard_ms

    def _no_live_broker_replaced(
        self, before: ClusterImage, image: ClusterImage, brokers: tuple[int, ...]
    ) -> None:
        """Two live brokers with one id: the second waits until the first is fenced or silent."""
        for id in brokers:
            old, new = before.brokers.get(id), image.brokers.get(id)
            if old is None or new is None or old.incarnation == new.incarnation or old.fenced:
                continue
            node = self.cluster.machines[id].node
            is_alive = node is not None and node.incarnation == old.incarnation and not node.life.is_frozen
            silent_ms = self._silent_ms.get(new.incarnation, 0)
            if is_alive and silent_ms < self.cluster.timings.heartbeat_ms:
                raise Violation(
                    "a live broker is not replaced", f"{id}: {old} by {new}, heard {silent_ms} ms ago"
                )

    def image_published(self, image: ClusterImage, delta: ImageDelta, offset: int) -> None:
        """The first node that applies a batch tells what the cluster has decided."""
        if offset <= self.image_offset:
            return
        before, self.image, self.image_offset = self.image, image, offset
        if self._is_small:
            image.check_invariants()
        if delta.brokers_changed:
            self._no_live_broker_replaced(before, image, delta.brokers_changed)
        for name, index in delta.partitions_changed:
            topic = image.topics[name]
            known = before.topics_by_id.get(topic.id)
            old = None if known is None else known.partitions.get(index)
            self._partition_changed(Key(topic.id, index), name, old, topic.partitions[index])

    def _partition_changed(
        self, key: Key, name: str, old: PartitionState | None, new: PartitionState
    ) -> None:
        if old is not None and old.leader != new.leader and new.leader_epoch <= old.leader_epoch:
            raise Violation("leader epochs grow", f"{name} {key}: {old} -> {new}")
        self.cluster.world.note(
            "partition", name, key, f"leader {new.leader} e{new.leader_epoch}", new.isr, new.elr
        )
        is_new = old is not None and new.has_leader and new.leader_epoch != old.leader_epoch
        if old is not None and is_new and new.leader_recovering and new.leader not in (*old.isr, *old.elr):
            self._lost_uncleanly(key, name, old, new)
        for broker in (*new.isr, *new.elr):
            if old is None or broker not in (*old.isr, *old.elr) or (key, broker) in self.excused:
                self._holds_committed(key, broker, "entered the in-sync set")

    def _lost_uncleanly(self, key: Key, name: str, old: PartitionState, new: PartitionState) -> None:
        """Only where nobody complete is left, never in silence."""
        if (name, key.partition, new.leader_epoch) not in self._unclean:
            raise Violation("unclean elections are reported", f"{name} {key}: {new}")
        complete = [broker for broker in (*old.isr, *old.elr) if (key, broker) not in self.excused]
        if complete:
            raise Violation(
                "unclean election without need", f"{name} {key}: {complete} had everything, {new} leads"
            )
        log = self.cluster.machines[new.leader].disk.logs.get(key)
        ledger = self.ledger(key)
        end = 0 if log is None else _common_end(ledger, log)
        self.records_lost_uncleanly += ledger.cut(end)

    def unclean_decided(self, election: UncleanElection) -> None:
        self._unclean.add((election.topic, election.partition, election.leader_epoch))

    # --- logs ---

    def appended(self, node: Node, key: Key, log: SimLog, batch: Batch) -> None:
        self._match(key, log, batch)

    def _match(self, name: Any, log: SimLog, batch: Batch) -> None:
        """Log matching: the same epoch at the same offset means the same history."""
        place = (name, batch.base_offset, batch.epoch)
        chain = log.chains[-1]
        if self._written.setdefault(place, chain) != chain:
            raise Violation("log matching", f"{log} differs from another at {batch}")

    def truncating(self, node: Node, name: Any, log: SimLog, offset: int) -> None:
        self.cluster.world.note("truncates", node.id, name, log, "to", offset)
        ledger = self.ledgers.get(name)
        if ledger is None or offset >= ledger.end_offset or not isinstance(name, Key):
            return
        common = _common_end(ledger, log)
        if offset < common and self._is_complete(name, node.id):
            raise Violation(
                "truncation keeps committed data", f"{log} to {offset}, committed {ledger.end_offset}"
            )

    def chain(self, key: Key, offset: int) -> int:
        chain = self.ledger(key).chain_at(offset)
        if chain is None:
            raise Violation(
                "committed data changed", f"{key} restarts at {offset}, where nothing committed ends"
            )
        return chain

    # --- partitions ---

    def partition_leader(self, node: Node, replica: Replica) -> None:
        rules, key = replica.leading, replica.key
        assert rules is not None
        known = self._partition_leaders.setdefault((key, rules.leader_epoch), (node.id, node.incarnation))
        if known != (node.id, node.incarnation):
            raise Violation(
                "one partition leader per epoch", f"{key} e{rules.leader_epoch}: {known[0]}, {node.id}"
            )
        if rules.leader_epoch == self._newest_epoch(key) and not self.ledger(key).reaches(replica.log):
            raise Violation("a leader has everything committed", f"{replica} lacks {self.ledger(key)}")

    def high_watermark(self, node: Node, replica: Replica, epoch: int, offset: int) -> None:
        key = replica.key
        before = self._high_watermarks.get((key, epoch), 0)
        if offset < before:
            raise Violation("high watermark is monotonic", f"{replica} from {before} to {offset}")
        self._high_watermarks[key, epoch] = offset
        ledger = self.ledger(key)
        if offset > ledger.end_offset:
            ledger.extend(replica.log, offset)
            state = self._state(key)
            for broker in (*state.isr, *state.elr) if state is not None else ():
                self._holds_committed(key, broker, "is in sync")
        else:
            ledger.extend(replica.log, offset)

    def follower_high_watermark(self, node: Node, replica: Replica) -> None:
        """What any replica calls committed is."""
        log, ledger = replica.log, self.ledger(replica.key)
        high = log.high_watermark
        if high > ledger.end_offset or (
            high > log.start_offset and log.chain_at(high) != ledger.chain_at(high)
        ):
            raise Violation("a high watermark covers committed data", f"{replica} of {ledger}")

    def _holds_committed(self, key: Key, broker: int, why: str) -> None:
        """Who is in sync, or eligible, would keep everything committed through a power loss."""
        if self._is_excused(key, broker):
            return
        ledger, log = self.ledger(key), self.cluster.machines[broker].disk.logs.get(key)
        if ledger.end_offset == 0:
            return
        if log is None or log.kept_offset < ledger.end_offset or not ledger.reaches(log):
            raise Violation(
                "in-sync replicas hold what is committed", f"{broker} {why} of {ledger} with {log}"
            )

    def acknowledged(self, key: Key, base_offset: int, values: tuple[Any, ...]) -> None:
        """acks=all: at that offset, for ever."""
        ledger = self.ledger(key)
        batch = ledger.batch_at(base_offset)
        if batch is None or batch.payload != values:
            raise Violation("acknowledged means committed", f"{values} at {base_offset} of {ledger}: {batch}")
        ledger.shown_offset = max(ledger.shown_offset, batch.next_offset)

    def consumed(self, key: Key, position: int, batches: list[Batch]) -> int:
        """What a consumer gets is committed, in order and without holes. Its next position."""
        ledger = self.ledger(key)
        for batch in batches:
            known = ledger.batch_at(batch.base_offset)
            if known is None or known.serial != batch.serial:
                raise Violation(
                    "consumers see committed data only", f"{batch} at {position}, {ledger}: {known}"
                )
            if not batch.base_offset <= position < batch.next_offset:
                raise Violation("consumers see no holes", f"{batch} at {position}")
            position = batch.next_offset
        ledger.shown_offset = max(ledger.shown_offset, position)
        return position

    def latest_told(self, key: Key, epoch: int, offset: int) -> None:
        """Whoever leads now knows of all that clients know."""
        ledger = self.ledger(key)
        if epoch == self._newest_epoch(key) and offset < ledger.shown_offset:
            raise Violation(
                "the latest offset never goes back", f"told {offset} in epoch {epoch} of {ledger}"
            )

    def stable_told(self, replica: Replica, offset: int) -> None:
        """To readers of what is committed: what was stable stays so, for whoever knows what is committed."""
        rules, key = replica.leading, replica.key
        if rules is None or not rules.has_reached_epoch_start or not self.is_newest_leader(replica):
            return
        known = self._stable.get(key, 0)
        if offset < min(known, self.ledger(key).end_offset):
            raise Violation("the last stable offset never goes back", f"{offset} after {known} in {replica}")
        self._stable[key] = max(known, offset)

    # --- inside ---

    def started(self, node: Node) -> None:
        self._started[node.incarnation] = self.cluster.world.now_ms

    def excuse(self, key: Key, broker: int, *, is_damaged: bool = False) -> None:
        if not is_damaged:
            self.excused[key, broker] = self.cluster.world.now_ms
        else:
            self.excused.setdefault((key, broker), -1)

    def _is_excused(self, key: Key, broker: int) -> bool:
        """Until it is in sync again after it was found out."""
        since = self.excused.get((key, broker))
        if since is None:
            return False
        log = self.cluster.machines[broker].disk.logs.get(key)
        started_ms = self._started.get(self.image.brokers[broker].incarnation, -1)
        is_found_out = started_ms >= since and log is not None and not log.damaged
        if is_found_out:
            del self.excused[key, broker]
        return not is_found_out

    def _state(self, key: Key) -> PartitionState | None:
        topic = self.image.topics_by_id.get(key.topic_id)
        return None if topic is None else topic.partitions.get(key.partition)

    def _newest_epoch(self, key: Key) -> int:
        state = self._state(key)
        return -1 if state is None else state.leader_epoch

    def is_newest_leader(self, replica: Replica) -> bool:
        rules = replica.leading
        return rules is not None and rules.leader_epoch == self._newest_epoch(replica.key)

    def _is_complete(self, key: Key, broker: int) -> bool:
        state = self._state(key)
        return state is not None and broker in (*state.isr, *state.elr) and (key, broker) not in self.excused


def _common_end(ledger: Ledger, log: SimLog) -> int:
    """Up to where a log holds what is committed."""
    end = log.start_offset
    for batch in log.batches:
        if log.chain_at(batch.next_offset) != ledger.chain_at(batch.next_offset):
            break
        end = batch.next_offset
    return end


def _essence(image: ClusterImage) -> Any:
    return image.topics, image.brokers, image.configs, image.features, image.next_producer_id
