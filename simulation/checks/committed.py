"""Observes the partitions of all nodes: what is committed stays, on every replica that counts as in sync.

The checks wrap methods of the shipped `Partition`, so they see each high watermark at the moment it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.broker.controller.broker_lifecycle import BrokerLifecycleManager
from penstock.broker.node import Node
from penstock.broker.partition.alter_partition_manager import AlterPartitionManager, IsrChange
from penstock.broker.partition.fetch_reader import FetchReader
from penstock.broker.partition.follower_replica import FollowerReplica
from penstock.broker.partition.partition import Partition
from penstock.broker.partition.replica_manager import ReplicaManager
from penstock.cluster.image import BrokerState, TopicState
from penstock.log.data_directory import LOG_SUFFIX, offset_file_name
from penstock.protocol.record_batch import BatchHeader, Record, checksum, decode_records, iter_batches
from simulation.cluster import Cluster
from simulation.engine.loop import CURRENT
from simulation.engine.machine import Machine

_READ_BYTES: Final = 1 << 22
_RECORDS_BYTES_MAX: Final = 1 << 24

Key = tuple[UUID, int]


class CommittedBatch(NamedTuple):
    header: BatchHeader
    values: tuple[bytes, ...]  # empty for control batches


class CommittedLog:
    """What has been committed to one partition, by offset."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.batches: dict[int, CommittedBatch] = {}
        self.values: dict[int, bytes] = {}
        self.end_offset = 0
        #: By the end offset of each batch: the leader epoch that it was written in.
        self.epochs: dict[int, int] = {}
        #: Up to here, clients have seen that records are committed.
        self.seen_offset = 0

    def __repr__(self) -> str:
        return f"<committed {self.name} up to {self.end_offset}>"


class CommittedLogs:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.logs: dict[Key, CommittedLog] = {}
        self._ids: dict[str, UUID] = {}
        #: Replicas with a damaged batch: (topic id, partition, node id).
        self.damaged: set[tuple[UUID, int, int]] = set()
        #: Replicas whose disk was replaced with an empty one.
        self.replaced: set[tuple[UUID, int, int]] = set()
        #: Partitions that do not sync before they acknowledge, and had a reported unclean election.
        self._gave_up: set[Key] = set()
        self._high_watermarks: dict[tuple[Key, int], int] = {}
        self._leaders: dict[tuple[Key, int], int] = {}
        #: By partition: the highest leader epoch in which a node has led, and that node.
        self._newest_leaders: dict[tuple[str, int], tuple[int, int]] = {}
        #: By node id: how often the machine had been started when its broker was last registered.
        self._boots: dict[int, int] = {}
        #: Called with each batch when it is committed, in the order of the log: topic, partition, header, records.
        self.on_committed: list[Callable[[str, int, BatchHeader, list[Record]], None]] = []

    def log(self, partition: Partition) -> CommittedLog:
        key = (partition.topic_id, partition.index)
        found = self.logs.get(key)
        if found is None:
            found = self.logs[key] = CommittedLog(f"{partition.topic}-{partition.index}")
            self._ids[partition.topic] = partition.topic_id
        return found

    def named(self, topic: str, index: int) -> CommittedLog:
        key = self._ids.get(topic)
        found = None if key is None else self.logs.get((key, index))
        return CommittedLog(f"{topic}-{index}") if found is None else found

    @property
    def excused(self) -> set[tuple[UUID, int, int]]:
        """Replicas that may lack records: their disk was lost or damaged."""
        return self.damaged | self.replaced

    def replaces_disk(self, topic_id: UUID, index: int, node_id: int) -> None:
        self.replaced.add((topic_id, index, node_id))

    def gives_up(self, topic_id: UUID, index: int) -> None:
        """An unclean election of a partition that does not sync before it acknowledges: its records may be lost."""
        self._gave_up.add((topic_id, index))

    def _syncs_first(self, partition: Partition) -> bool:
        return partition.log.config.flush == "ack"

    def _is_given_up(self, partition: Partition) -> bool:
        return (partition.topic_id, partition.index) in self._gave_up

    @contextmanager
    def observing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrapper in (
                (Partition, "advance", self._advance),
                (Partition, "lead", self._lead),
                (Partition, "follower_high_watermark", self._follower_high_watermark),
                (Partition, "in_sync_changed", self._in_sync_changed),
                (ReplicaManager, "_adopt", self._adopt),
                (FollowerReplica, "_run_truncation", self._run_truncation),
                (FollowerReplica, "take", self._take),
                (FetchReader, "_count", self._count),
                (AlterPartitionManager, "_wanted_by", self._wanted_by),
                (BrokerLifecycleManager, "_registered", self._registered),
            ):
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, wrapper(original))
            yield

    def _advance(self, original: Callable[..., None]) -> Callable[..., None]:
        def advance(partition: Partition, to: Any, size: int | None = None) -> None:
            before = partition.high.offset
            if to.offset > before:
                self.committing(partition, to.offset)
            original(partition, to, size)
            if partition.high.offset < before:
                self.went_back(partition, before)

        return advance

    def _lead(self, original: Callable[..., None]) -> Callable[..., None]:
        def lead(partition: Partition, state: Any, *, local_id: int, lag_ms_max: int) -> None:
            is_new = not partition.is_leader or state.leader_epoch != partition.leader_epoch
            if is_new:
                self.leading(partition, state.leader_epoch, local_id)
            original(partition, state, local_id=local_id, lag_ms_max=lag_ms_max)

        return lead

    def _follower_high_watermark(self, original: Callable[..., None]) -> Callable[..., None]:
        def follower_high_watermark(partition: Partition, offset: int) -> None:
            original(partition, offset)
            self.followed(partition)

        return follower_high_watermark

    def _in_sync_changed(self, original: Callable[..., None]) -> Callable[..., None]:
        def in_sync_changed(partition: Partition, before: frozenset[int], after: frozenset[int]) -> None:
            original(partition, before, after)
            self.in_sync(partition)

        return in_sync_changed

    def _adopt(self, original: Callable[..., Partition]) -> Callable[..., Partition]:
        def adopt(manager: ReplicaManager, *args: Any) -> Partition:
            partition = original(manager, *args)
            self.opened(partition)
            return partition

        return adopt

    def _run_truncation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def run_truncation(follower: FollowerReplica, action: Any) -> None:
            self.truncating(follower.partition, action.offset)
            await original(follower, action)
            self.truncated(follower.partition)

        return run_truncation

    def _take(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def take(follower: FollowerReplica, asked: Any, answer: Any) -> Any:
            position, log = follower.position(), follower.partition.log
            is_stale = follower._is_over or asked.offset != log.end_offset or asked[:3] != position[:3]
            before = log.end_offset, follower.partition.high.offset, follower.is_truncating
            outcome = original(follower, asked, answer)
            after = log.end_offset, follower.partition.high.offset, follower.is_truncating
            if is_stale and after != before:
                raise self.cluster.loop.fail(
                    "followers take answers to what they would ask now",
                    f"{follower} at {position} takes {asked}",
                )
            return outcome

        return take

    def _count(self, original: Callable[..., None]) -> Callable[..., None]:
        def count(reader: FetchReader, partition: Partition, wanted: Any) -> None:
            epoch, was_uncounted = wanted.leader_epoch, wanted.is_uncounted
            original(reader, partition, wanted)
            is_counted = was_uncounted and wanted.counted_epoch == partition.leader_epoch
            if is_counted and epoch != partition.leader_epoch and partition.leading is not None:
                raise self.cluster.loop.fail(
                    "leaders count fetches of their own epoch", f"{partition} counts {wanted} of {epoch}"
                )

        return count

    def _wanted_by(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wanted_by(manager: AlterPartitionManager, partition: Partition, now_ms: int) -> Any:
            change = original(manager, partition, now_ms)
            if change is not None:
                self.proposing(partition, change)
            return change

        return wanted_by

    def _registered(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def registered(lifecycle: BrokerLifecycleManager, last_epoch: int, timeout_s: float) -> int:
            self.registering(lifecycle, last_epoch)
            epoch: int = await original(lifecycle, last_epoch, timeout_s)
            self.registered()
            return epoch

        return registered

    # -- leaders ---------------------------------------------------------------------------------------

    def leading(self, partition: Partition, leader_epoch: int, node_id: int) -> None:
        key = (partition.topic_id, partition.index)
        self.cluster.loop.note(
            "leads", node_id, f"{partition.topic}-{partition.index}", "epoch", leader_epoch
        )
        known = self._leaders.setdefault((key, leader_epoch), node_id)
        if known != node_id:
            raise self.cluster.loop.fail("one leader per epoch", f"{partition} and node {known}")
        name = (partition.topic, partition.index)
        self._newest_leaders[name] = max(self.newest_leader(*name), (leader_epoch, node_id))
        newest = self.cluster.image.partition(partition.topic, partition.index)
        if newest is not None and newest.leader_epoch > leader_epoch:
            return  # this node lags behind; it leads only until it learns of its successor
        if self._is_given_up(partition):
            return
        committed = self.log(partition)
        if (*key, node_id) in self.replaced and partition.log.end_offset < committed.end_offset:
            raise self.cluster.loop.fail(
                "a leader has everything committed", f"{partition} on a new disk lacks records of {committed}"
            )
        self._compare(partition, committed, committed.end_offset, "a leader has everything committed")

    # -- replicas that may lead ------------------------------------------------------------------------

    def may_lead(self, topic: TopicState, index: int, brokers: Mapping[int, BrokerState]) -> None:
        """The controller has decided that these replicas are in sync, or eligible to lead."""
        state = topic.partitions[index]
        for replica in (*state.isr, *state.elr):
            node = self.cluster.machines[replica].node
            broker = brokers.get(replica)
            if node is None or broker is None or broker.incarnation != node.lifecycle.incarnation:
                continue  # the controller does not know yet what this replica has lost
            self._check_may_lead(topic, index, replica, node.partitions.get(topic.name, index))

    def _check_may_lead(self, topic: TopicState, index: int, replica: int, held: Partition | None) -> None:
        committed = self.logs.get((topic.id, index))
        if (
            committed is None
            or (topic.id, index) in self._gave_up
            or (topic.id, index, replica) in self.damaged
        ):
            return
        if held is None or held.topic_id != topic.id:
            # A replica that is on the disk is opened later, and checked then.
            folder = self.cluster.machines[replica].disk.folder / f"{topic.name}-{index}"
            has, is_known = 0, not folder.exists()
        else:
            has, is_known = held.log.synced.offset if self._syncs_first(held) else held.log.end_offset, True
        if has >= committed.end_offset and held is not None:
            self._check_lineage(held, committed, committed.end_offset, replica)
        if is_known and has < committed.end_offset:
            raise self.cluster.loop.fail(
                "replicas that may lead hold what is committed",
                f"node {replica} has {has} of {committed}, the controller decided {topic.partitions[index]}",
            )

    def newest_leader(self, topic: str, index: int) -> tuple[int, int]:
        """Return the highest leader epoch so far and its leader. Other leaders may answer from an earlier state."""
        return self._newest_leaders.get((topic, index), (-1, -1))

    def committing(self, partition: Partition, offset: int) -> None:
        key, epoch = (partition.topic_id, partition.index), partition.leader_epoch
        if key in self._gave_up:
            return
        before = self._high_watermarks.get((key, epoch), 0)
        if offset < before:
            raise self.cluster.loop.fail(
                "the high watermark never goes back", f"{partition}: {before} to {offset}"
            )
        self._high_watermarks[key, epoch] = offset
        committed = self.log(partition)
        if offset > committed.end_offset:
            self._extend(partition, committed, offset)
            self._check_in_sync_replicas(partition, offset)
            if partition.isr_size < partition.isr_needed:
                raise self.cluster.loop.fail(
                    "below min.insync.replicas nothing is committed",
                    f"{partition} to {offset}: {partition.leading}",
                )

    def in_sync(self, partition: Partition) -> None:
        """The leader has taken over a new in-sync set from the image."""
        newest, leading = self.cluster.image.partition(*partition.key), partition.leading
        if (
            newest is not None
            and leading is not None
            and newest.partition_epoch <= leading.rules.partition_epoch
        ):
            self._check_in_sync_replicas(partition, self.log(partition).end_offset)

    def went_back(self, partition: Partition, before: int) -> None:
        if self._is_given_up(partition):
            return
        raise self.cluster.loop.fail("the high watermark never goes back", f"{partition}: from {before}")

    def followed(self, partition: Partition) -> None:
        """What a follower calls committed is committed: consumers may read it there.

        Two logs that have the same leader epoch at an offset are equal up to there.
        """
        high, committed = partition.high.offset, self.log(partition)
        if high <= partition.log.start_offset or self._is_excused(partition) or self._is_given_up(partition):
            return
        epoch = partition.log.epochs.epoch_at(high - 1)
        if committed.epochs.get(high) != epoch:
            raise self.cluster.loop.fail(
                "followers call only committed records committed",
                f"{partition} has epoch {epoch} before {high}, {committed} has {committed.epochs.get(high)}",
            )

    def truncating(self, partition: Partition, offset: int) -> None:
        """A follower cuts off records of another history only, and none that are committed."""
        committed = self.log(partition).batches.get(offset)
        if committed is None or self._is_excused(partition) or self._is_given_up(partition):
            return
        if partition.log.epochs.epoch_at(offset) == committed.header.leader_epoch:
            raise self.cluster.loop.fail(
                "committed records are not cut off",
                f"{partition} is cut at {offset}, {committed.header} is committed",
            )

    def truncated(self, partition: Partition) -> None:
        """Of producers, the replica remembers nothing that was cut off."""
        log = partition.log
        for producer_id, entry in log.producers.states.items():
            if entry.batches and entry.batches[-1].last_offset >= log.end_offset:
                raise self.cluster.loop.fail(
                    "producer state follows the log",
                    f"{partition} ends at {log.end_offset}, producer {producer_id} has {entry.batches[-1]}",
                )

    def _is_excused(self, partition: Partition) -> bool:
        process = CURRENT.get()
        if process is None:
            return False
        return (partition.topic_id, partition.index, process.machine.node_id) in self.excused

    def _extend(self, partition: Partition, committed: CommittedLog, offset: int) -> None:
        for header, records in self._read(partition, committed.end_offset, offset):
            if header.last_offset < committed.end_offset:
                continue
            if header.base_offset < committed.end_offset:
                raise self.cluster.loop.fail(
                    "committed data does not change", f"{header} overlaps {committed}"
                )
            values = _values(records)
            committed.batches[header.base_offset] = CommittedBatch(header, values)
            committed.values.update(
                zip(range(header.base_offset, header.last_offset + 1), values, strict=False)
            )
            committed.end_offset = header.last_offset + 1
            committed.epochs[committed.end_offset] = header.leader_epoch
            for call in self.on_committed:
                call(partition.topic, partition.index, header, records)

    def _check_in_sync_replicas(self, partition: Partition, offset: int) -> None:
        """Everything committed is synced on every replica that the leader or the controller calls in sync."""
        if not self._syncs_first(partition):
            return
        if partition.leading is None:
            return
        rules, newest = partition.leading.rules, self.cluster.image.partition(*partition.key)
        # The leader takes a change over before its node publishes the image.
        is_newer = newest is not None and newest.partition_epoch > rules.partition_epoch
        for replica in sorted({*rules.isr, *(newest.isr if newest is not None and is_newer else ())}):
            if (partition.topic_id, partition.index, replica) in self.excused:
                continue
            machine = self.cluster.machines[replica]
            held = None if machine.node is None else machine.node.partitions.get(*partition.key)
            if held is None or held.topic_id != partition.topic_id:
                continue
            synced = held.log.synced
            if synced.offset < offset:
                raise self.cluster.loop.fail(
                    "in-sync replicas hold what is committed",
                    f"node {replica} has synced {synced.offset} of {partition.topic}-{partition.index}, "
                    f"committed up to {offset}",
                )
            self._check_lineage(held, self.log(partition), offset, replica)
            self._check_disk(machine, held)

    def _check_lineage(self, held: Partition, committed: CommittedLog, offset: int, node_id: int) -> None:
        """Two logs that have the same leader epoch at an offset are equal up to there."""
        if not held.log.start_offset < offset <= held.log.end_offset or offset not in committed.epochs:
            return
        if any(key[:2] == (held.topic_id, held.index) for key in self.damaged):
            return  # no checksum covers the leader epoch in the header of a batch
        epoch = held.log.epochs.epoch_at(offset - 1)
        if epoch != committed.epochs[offset]:
            raise self.cluster.loop.fail(
                "replicas that count have the same history",
                f"node {node_id} has epoch {epoch} before {offset} of {committed}, not {committed.epochs[offset]}",
            )

    def proposing(self, partition: Partition, change: IsrChange) -> None:
        """A leader requests another in-sync set. Who joins holds what is committed, by what the leader knows."""
        rules, newest = change.leading.rules, self.cluster.image.partition(*partition.key)
        if newest is None or newest.leader_epoch > rules.leader_epoch or self._is_given_up(partition):
            return
        committed = self.log(partition)
        for replica in sorted(change.proposal.members - rules.isr):
            offset = rules._followers[replica].offset
            if offset < max(committed.end_offset, rules.epoch_start_offset):
                raise self.cluster.loop.fail(
                    "who joins the in-sync set holds what is committed",
                    f"node {replica} has fetched up to {offset} of {committed}: {rules}",
                )

    def _check_disk(self, machine: Machine, partition: Partition) -> None:
        """What a replica promises to keep through a power loss is on its disk."""
        synced = partition.log.synced
        path = partition.log.directory / offset_file_name(synced.segment_base, LOG_SUFFIX)
        kept = machine.disk.synced_bytes(path)
        if kept < synced.position:
            raise self.cluster.loop.fail(
                "what counts as synced is on the disk",
                f"node {machine.node_id} counts {synced} as synced, {path.name} of {partition} has {kept} bytes",
            )

    def opened(self, partition: Partition) -> None:
        process = CURRENT.get()
        if process is None:
            return
        if not self._is_excused(partition):
            self._check_disk(process.machine, partition)
        node_id, image = process.machine.node_id, self.cluster.image
        topic, broker, node = (
            image.topics.get(partition.topic),
            image.brokers.get(node_id),
            process.machine.node,
        )
        if (
            topic is None
            or broker is None
            or node is None
            or broker.incarnation != node.lifecycle.incarnation
        ):
            return
        state = topic.partitions.get(partition.index)
        if topic.id == partition.topic_id and state is not None and node_id in (*state.isr, *state.elr):
            self._check_may_lead(topic, partition.index, node_id, partition)

    def _compare(self, partition: Partition, committed: CommittedLog, offset: int, invariant: str) -> None:
        """Check that a replica holds everything committed up to an offset."""
        process = CURRENT.get()
        if (
            process is not None
            and (partition.topic_id, partition.index, process.machine.node_id) in self.excused
        ):
            return
        if partition.log.end_offset < offset:
            raise self.cluster.loop.fail(invariant, f"{partition} lacks records of {committed}")
        seen = partition.log.start_offset
        for header, records in self._read(partition, seen, offset):
            known = committed.batches.get(header.base_offset)
            if known is None or known.values != _values(records) or known.header.crc != header.crc:
                raise self.cluster.loop.fail(invariant, f"{partition} has {header}, committed is {known}")

    def _read(
        self, partition: Partition, offset: int, end: int
    ) -> Iterator[tuple[BatchHeader, list[Record]]]:
        node, source = self._intact_copy(partition, end)
        while offset < end:
            piece = (
                source.log.read(offset, _READ_BYTES, source.log.end)
                if node is None
                else self.cluster.in_process_of(node, source.log.read, offset, _READ_BYTES, source.log.end)
            )
            before = offset
            for header, batch in iter_batches(piece.data):
                if header.base_offset >= end:
                    return
                if header.last_offset >= offset:
                    yield (header, []) if header.is_control else self._records(partition, header, batch)
                    offset = header.last_offset + 1
            if offset == before:
                return

    def _intact_copy(self, partition: Partition, end: int) -> tuple[Node | None, Partition]:
        """Return the partition, or, if its log is damaged, the copy of an in-sync replica and the node that has it.

        Other copies may have other records there.
        """
        key, process = (partition.topic_id, partition.index), CURRENT.get()
        if (
            process is None
            or partition.leading is None
            or (*key, process.machine.node_id) not in self.damaged
        ):
            return None, partition
        for replica in sorted(partition.leading.rules.isr):
            node = self.cluster.machines[replica].node
            held = None if node is None else node.partitions.get(*partition.key)
            is_intact = (*key, replica) not in self.damaged
            if held is not None and is_intact and held.topic_id == key[0] and held.log.end_offset >= end:
                return node, held
        return None, partition

    def _records(
        self, partition: Partition, header: BatchHeader, batch: memoryview
    ) -> tuple[BatchHeader, list[Record]]:
        """Return the header and the records of a batch, from another replica if this one is damaged."""
        if checksum(batch) == header.crc:
            return header, list(decode_records(batch, _RECORDS_BYTES_MAX))
        for node in self.cluster.serving():
            other = node.partitions.get(partition.topic, partition.index)
            if other is None or other is partition or other.log.end_offset <= header.last_offset:
                continue
            epochs = other.log.epochs, partition.log.epochs
            if len({known.epoch_at(header.base_offset) for known in epochs}) > 1:
                continue  # it has other records there
            piece = self.cluster.in_process_of(node, other.log.read, header.base_offset, 1, other.log.end)
            for intact, copy in iter_batches(piece.data):
                # The damage may be in the header, even in the checksum.
                if intact.base_offset == header.base_offset and checksum(copy) == intact.crc:
                    return intact, list(decode_records(copy, _RECORDS_BYTES_MAX))
        return header, [Record(header.base_offset, 0, None, b"unreadable")]

    # -- restarts ------------------------------------------------------------------------------------

    def registering(self, lifecycle: BrokerLifecycleManager, last_epoch: int) -> None:
        """After a power loss, a broker says that it may have lost records, until the controller knows."""
        process = CURRENT.get()
        assert process is not None
        machine = process.machine
        has_told = self._boots.get(machine.node_id) == machine.disk.boots
        if last_epoch >= 0 and not has_told and not lifecycle._store.clean:
            raise self.cluster.loop.fail(
                "a broker tells the controller of a power loss", f"node {machine.node_id} calls itself clean"
            )

    def registered(self) -> None:
        process = CURRENT.get()
        assert process is not None
        self._boots[process.machine.node_id] = process.machine.disk.boots

    # -- clients ---------------------------------------------------------------------------------------

    def acknowledged(self, topic: str, index: int, base_offset: int, values: tuple[bytes, ...]) -> None:
        """A producer with acks=all was told this offset."""
        committed = self.named(topic, index)
        if (self._ids.get(topic), index) in self._gave_up:
            return
        batch = committed.batches.get(base_offset)
        if batch is None or batch.values != values:
            raise self.cluster.loop.fail(
                "acknowledged means committed", f"{values} at {base_offset} of {committed}: {batch}"
            )
        committed.seen_offset = max(committed.seen_offset, batch.header.last_offset + 1)

    def consumed(self, topic: str, index: int, offset: int, value: bytes | None) -> None:
        committed = self.named(topic, index)
        if committed.values.get(offset) != value:
            raise self.cluster.loop.fail(
                "consumers see committed data only",
                f"{value!r} at {offset} of {committed}: {committed.values.get(offset)!r}",
            )
        committed.seen_offset = max(committed.seen_offset, offset + 1)

    # -- the end ---------------------------------------------------------------------------------------

    def check_replicas(self) -> None:
        """Once the cluster is healthy, all replicas are identical and hold everything committed."""
        for topic, index, state in self.cluster.partitions():
            info = self.cluster.image.topics[topic]
            committed = self.logs.get((info.id, index))
            if committed is None or (info.id, index) in self._gave_up:
                continue
            for replica in state.replicas:
                if (info.id, index, replica) in self.excused:
                    continue  # its disk was damaged, which only a reader of that batch can notice
                node = self.cluster.machines[replica].serving
                held = None if node is None else node.partitions.get(topic, index)
                if held is None:
                    raise self.cluster.loop.fail(
                        "replicas are complete", f"node {replica} has no {topic}-{index}"
                    )
                self._compare(held, committed, committed.end_offset, "replicas are identical")


def _values(records: list[Record]) -> tuple[bytes, ...]:
    return tuple(record.value or b"" for record in records)
