"""Observes the partitions of all nodes: what is committed stays, on every replica that counts as in sync.

The checks wrap methods of the shipped `Partition`, so they see each high watermark at the moment it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.broker.controller.broker_lifecycle import BrokerLifecycleManager
from penstock.broker.partition.follower_replica import FollowerReplica
from penstock.broker.partition.partition import Partition
from penstock.broker.partition.replica_manager import ReplicaManager
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
        #: Replicas whose disk was lost or damaged: (topic id, partition, node id).
        self.excused: set[tuple[UUID, int, int]] = set()
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

    @contextmanager
    def observing(self) -> Iterator[None]:
        advance, lead, follow = Partition.advance, Partition.lead, Partition.follower_high_watermark
        in_sync_changed, adopt = Partition.in_sync_changed, ReplicaManager._adopt
        truncate, register = FollowerReplica._run_truncation, BrokerLifecycleManager._registered
        observer = self

        def advance_observed(self: Partition, to: Any, size: int | None = None) -> None:
            before = self.high.offset
            if to.offset > before:
                observer.committing(self, to.offset)
            advance(self, to, size)
            if self.high.offset < before:
                observer.went_back(self, before)

        def lead_observed(self: Partition, state: Any, *, local_id: int, lag_ms_max: int) -> None:
            is_new = not self.is_leader or state.leader_epoch != self.leader_epoch
            if is_new:
                observer.leading(self, state.leader_epoch, local_id)
            lead(self, state, local_id=local_id, lag_ms_max=lag_ms_max)

        def follower_observed(self: Partition, offset: int) -> None:
            follow(self, offset)
            observer.followed(self)

        def adopt_observed(self: ReplicaManager, *args: Any) -> Partition:
            partition = adopt(self, *args)
            observer.opened(partition)
            return partition

        def in_sync_observed(self: Partition, before: frozenset[int], after: frozenset[int]) -> None:
            in_sync_changed(self, before, after)
            observer.in_sync(self)

        async def truncate_observed(self: FollowerReplica, action: Any) -> None:
            observer.truncating(self.partition, action.offset)
            await truncate(self, action)

        async def register_observed(self: BrokerLifecycleManager, last_epoch: int, timeout_s: float) -> int:
            observer.registering(self, last_epoch)
            epoch = await register(self, last_epoch, timeout_s)
            observer.registered()
            return epoch

        BrokerLifecycleManager._registered = register_observed  # type: ignore[method-assign]
        FollowerReplica._run_truncation = truncate_observed  # type: ignore[method-assign]
        ReplicaManager._adopt = adopt_observed  # type: ignore[method-assign, assignment]
        Partition.in_sync_changed = in_sync_observed  # type: ignore[method-assign]
        Partition.advance = advance_observed  # type: ignore[method-assign]
        Partition.follower_high_watermark = follower_observed  # type: ignore[method-assign]
        Partition.lead = lead_observed  # type: ignore[method-assign]
        try:
            yield
        finally:
            Partition.advance = advance  # type: ignore[method-assign]
            Partition.lead = lead  # type: ignore[method-assign]
            Partition.follower_high_watermark = follow  # type: ignore[method-assign]
            ReplicaManager._adopt = adopt  # type: ignore[method-assign]
            Partition.in_sync_changed = in_sync_changed  # type: ignore[method-assign]
            FollowerReplica._run_truncation = truncate  # type: ignore[method-assign]
            BrokerLifecycleManager._registered = register  # type: ignore[method-assign]

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
        committed = self.log(partition)
        self._compare(partition, committed, committed.end_offset, "a leader has everything committed")

    def newest_leader(self, topic: str, index: int) -> tuple[int, int]:
        """Return the highest leader epoch so far and its leader. Other leaders may answer from an earlier state."""
        return self._newest_leaders.get((topic, index), (-1, -1))

    def committing(self, partition: Partition, offset: int) -> None:
        key, epoch = (partition.topic_id, partition.index), partition.leader_epoch
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
        raise self.cluster.loop.fail("the high watermark never goes back", f"{partition}: from {before}")

    def followed(self, partition: Partition) -> None:
        """What a follower calls committed is committed: consumers may read it there.

        Two logs that have the same leader epoch at an offset are equal up to there.
        """
        high, committed = partition.high.offset, self.log(partition)
        if high <= partition.log.start_offset or self._is_excused(partition):
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
        if committed is None or self._is_excused(partition):
            return
        if partition.log.epochs.epoch_at(offset) == committed.header.leader_epoch:
            raise self.cluster.loop.fail(
                "committed records are not cut off",
                f"{partition} is cut at {offset}, {committed.header} is committed",
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
        if partition.log.config.flush != "ack":
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
            self._check_disk(machine, held)

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
        if process is not None and not self._is_excused(partition):
            self._check_disk(process.machine, partition)

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
        while offset < end:
            piece = partition.log.read(offset, _READ_BYTES, partition.log.end)
            before = offset
            for header, batch in iter_batches(piece.data):
                if header.base_offset >= end:
                    return
                if header.last_offset >= offset:
                    yield (header, []) if header.is_control else self._records(partition, header, batch)
                    offset = header.last_offset + 1
            if offset == before:
                return

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
            if committed is None:
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
