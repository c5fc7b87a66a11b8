"""Producers and consumers of plain topics: idempotent, careless, with acks=1, and a group that commits offsets."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final, NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch
from simulation.checks.committed import CommittedLogs
from simulation.client import FIND_COORDINATOR, Client, fetched_records, message
from simulation.cluster import Cluster, TopicShape
from simulation.worlds.base import World

OFFSET_COMMIT: Final = 8
OFFSET_FETCH: Final = 9
_WINDOW_MAX: Final = 4
_PACE_S: Final = (0.01, 0.08)
_NEW_PRODUCER_CHANCE: Final = 0.1
#: Pauses between the batches of a window: each goes to the leader of its moment.
_GAPS_CHANCE: Final = 0.3
_GAP_S: Final = (0.0, 0.08)


class Batch(NamedTuple):
    sequence: int
    values: tuple[bytes, ...]

    def encode(self, producer_id: int = -1, producer_epoch: int = -1) -> bytearray:
        records = [Record(place, 1, None, value) for place, value in enumerate(self.values)]
        return encode_batch(
            records,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=self.sequence if producer_id >= 0 else -1,
        )


class IdempotentProducer(Client):
    """acks=all, retries until it succeeds, several batches in flight."""

    def __init__(self, world: DataWorld, number: int) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.unacknowledged = 0

    async def run(self, topic: str, index: int) -> None:
        producer_id = await self.new_producer_id()
        written = first = 0  # of all its records, and of those under this producer id
        while not self.world.is_closing:
            if written > first and self.loop.chance(_NEW_PRODUCER_CHANCE):
                producer_id, first = await self.new_producer_id(), written
            if written == first and not self._must_begin(topic, index):
                window = [self._batch(index, first, written, 1)]
            else:
                window = []
                for _ in range(1 + self.loop.draw(_WINDOW_MAX)):
                    window.append(self._batch(index, first, written, 1 + self.loop.draw(3)))
                    written += len(window[-1].values)
            written = first + window[-1].sequence + len(window[-1].values)
            await self._send(topic, index, producer_id, window)
            await asyncio.sleep(self.loop.between(*_PACE_S))

    def _must_begin(self, topic: str, index: int) -> bool:
        """Whether the partition accepts no later sequence of a producer that it does not know.

        In the first leader epoch, and without its first records, it accepts any: then the first batch goes alone.
        """
        state = self.cluster.image.partition(topic, index)
        return state is not None and state.leader_epoch > 0 and not self.world.committed.excused

    def _batch(self, index: int, first: int, number: int, count: int) -> Batch:
        values = tuple(b"i%d-%d-%d" % (self.number, index, number + place) for place in range(count))
        return Batch(number - first, values)

    async def _send(self, topic: str, index: int, producer_id: int, window: list[Batch]) -> None:
        self.unacknowledged += len(window)
        while window:
            gap_s = _GAP_S if self.loop.chance(_GAPS_CHANCE) else None
            leader = self.cluster.leader_hint(topic, index)
            sends, pause_s = [], 0.0
            for batch in window:
                encoded = batch.encode(producer_id, 0)
                if gap_s is None:
                    sends.append(self.produce(topic, index, encoded, node_id=leader))
                else:
                    sends.append(self._send_later(topic, index, encoded, pause_s))
                    pause_s += self.loop.between(*gap_s)
            replies = await asyncio.gather(*sends)
            left = []
            for batch, reply in zip(window, replies, strict=True):
                if reply is None or reply[0] is not ErrorCode.none:
                    left.append(batch)
                    self.counts["batches sent again"] += 1
                    continue
                self.world.committed.acknowledged(topic, index, reply[1], batch.values)
                self.counts["records acknowledged"] += len(batch.values)
                self.unacknowledged -= 1
            window = left
            if window:
                await self.back_off()

    async def _send_later(
        self, topic: str, index: int, encoded: bytearray, pause_s: float
    ) -> tuple[ErrorCode, int] | None:
        await asyncio.sleep(pause_s)
        return await self.produce(topic, index, encoded)


class CarelessProducer(Client):
    """Never retries, and has no producer id. What it loses with acks=1 is counted."""

    def __init__(self, world: DataWorld, number: int, *, acks: int) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.acks = acks
        self.acknowledged: list[tuple[str, int, int, tuple[bytes, ...]]] = []

    async def run(self, topic: str, index: int) -> None:
        sent = 0
        while not self.world.is_closing:
            values = tuple(
                b"c%d-%d-%d" % (self.number, index, sent + place) for place in range(1 + self.loop.draw(2))
            )
            sent += len(values)
            reply = await self.produce(topic, index, Batch(0, values).encode(), acks=self.acks)
            if reply is not None and reply[0] is ErrorCode.none:
                if self.acks == -1:
                    self.world.committed.acknowledged(topic, index, reply[1], values)
                    self.counts["records acknowledged"] += len(values)
                else:
                    self.counts["acks=1 records acknowledged"] += len(values)
                    self.acknowledged.append((topic, index, reply[1], values))
            await asyncio.sleep(self.loop.between(*_PACE_S))

    def count_losses(self) -> None:
        for topic, index, base_offset, values in self.acknowledged:
            batch = self.world.committed.named(topic, index).batches.get(base_offset)
            if batch is None or batch.values != values:
                self.counts["acks=1 records lost"] += len(values)


class Consumer(Client):
    """Reads everything below the high watermark, and requests the latest offset now and then."""

    def __init__(self, world: DataWorld, number: int) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.positions: dict[tuple[str, int], int] = {}

    async def run(self, topic: str, index: int) -> None:
        self.positions[topic, index] = 0
        while True:
            if self.loop.chance(0.15):
                await self._check_latest(topic, index)
            position = self.positions[topic, index]
            part = await self.fetch(topic, index, position)
            if part is None or part.error_code != ErrorCode.none:
                await self.back_off()
                continue
            records, next_offset = fetched_records(part.records, position)
            for record in records:
                self.world.committed.consumed(topic, index, record.offset, record.value)
            self.counts["records consumed"] += len(records)
            self.positions[topic, index] = next_offset

    async def _check_latest(self, topic: str, index: int) -> None:
        """The newest leader knows of everything that clients have seen."""
        seen, leader = self.world.committed.named(topic, index).seen_offset, self._newest_leader(topic, index)
        latest = await self.latest_offset(topic, index, node_id=leader[0])
        if latest is not None and leader == self._newest_leader(topic, index) and latest < seen:
            raise self.loop.fail(
                "the latest offset never goes back", f"{latest} of {topic}-{index}, {seen} was seen"
            )

    def _newest_leader(self, topic: str, index: int) -> tuple[int, int]:
        state = self.cluster.image.partition(topic, index)
        return (-1, -1) if state is None else (state.leader, state.leader_epoch)

    def has_read(self, topic: str, index: int) -> bool:
        return self.positions.get((topic, index), 0) >= self.world.committed.named(topic, index).end_offset


class Committer(Client):
    """Commits ever higher offsets for one group, and checks that what it reads back was committed."""

    def __init__(self, world: DataWorld, number: int, group: str) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.group = group
        self.confirmed = -1
        self.sent = -1
        #: The coordinator may handle these at any time, even after later ones that came over another connection.
        self.unanswered: set[int] = set()
        self.is_checked = False

    async def run(self, topic: str) -> None:
        while not (self.world.is_closing and self.is_checked):
            node = await self._coordinator()
            if self.loop.chance(0.6) and not self.world.is_closing:
                await self._commit(node, topic)
            else:
                await self._check(node, topic)
            await asyncio.sleep(self.loop.between(*_PACE_S))

    async def _coordinator(self) -> int:
        while True:
            request = message(FIND_COORDINATOR, 4)(
                "FindCoordinatorRequest", key_type=0, coordinator_keys=(self.group,)
            )
            reply = await self.call(self.any_node(), FIND_COORDINATOR, 4, request)
            if reply is not None and reply.coordinators[0].error_code == ErrorCode.none:
                return int(reply.coordinators[0].node_id)
            await self.back_off()

    def _newest_coordinator(self) -> tuple[int, int]:
        state = self.cluster.image.partition("__consumer_offsets", 0)
        return (-1, -1) if state is None else (state.leader, state.leader_epoch)

    async def _commit(self, node: int, topic: str) -> None:
        self.sent += 1
        offset = self.sent
        new = message(OFFSET_COMMIT, 8)
        part = new(
            "OffsetCommitRequestPartition",
            partition_index=0,
            committed_offset=offset,
            committed_leader_epoch=-1,
            committed_metadata=None,
        )
        request = new(
            "OffsetCommitRequest",
            group_id=self.group,
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=(new("OffsetCommitRequestTopic", name=topic, partitions=(part,)),),
        )
        reply = await self.call(node, OFFSET_COMMIT, 8, request, timeout_s=0.8)
        if reply is None:
            self.unanswered.add(offset)
        elif reply.topics[0].partitions[0].error_code == ErrorCode.none:
            self.confirmed = max(self.confirmed, offset)
            self.counts["offsets committed"] += 1

    async def _check(self, node: int, topic: str) -> None:
        confirmed, newest = self.confirmed, self._newest_coordinator()
        new = message(OFFSET_FETCH, 7)
        request = new(
            "OffsetFetchRequest",
            group_id=self.group,
            topics=(new("OffsetFetchRequestTopic", name=topic, partition_indexes=(0,)),),
            require_stable=True,
        )
        reply = await self.call(node, OFFSET_FETCH, 7, request, timeout_s=0.8)
        if reply is None or reply.error_code != ErrorCode.none:
            return
        part = reply.topics[0].partitions[0]
        if part.error_code != ErrorCode.none:
            return
        offset = int(part.committed_offset)
        if (node, newest) != (newest[0], self._newest_coordinator()):
            return  # a coordinator that does not know its successor yet may answer with older offsets
        if not confirmed <= offset <= self.sent and offset not in self.unanswered:
            raise self.loop.fail(
                "a committed offset stays",
                f"{self.group} has {offset}, confirmed {confirmed}, sent {self.sent}",
            )
        self.confirmed = max(self.confirmed, offset)
        self.counts["offsets read"] += 1
        self.is_checked = self.world.is_closing


class DataWorld(World):
    def __init__(self, cluster: Cluster, committed: CommittedLogs) -> None:
        super().__init__(cluster, committed)
        self._topics: tuple[TopicShape, ...] = (TopicShape("orders", 1 + self.loop.draw(2)),)
        if self.loop.chance(0.4):
            self._topics += (TopicShape("events"),)
        self._unsynced: tuple[TopicShape, ...] = ()
        if self.loop.chance(0.3):
            self._unsynced = (TopicShape("metrics", configs=(("penstock.flush", "interval"),)),)
        self.producers = [IdempotentProducer(self, number) for number in (1, 2)]
        self.careless = [CarelessProducer(self, 3, acks=-1), CarelessProducer(self, 4, acks=1)]
        self.consumer = Consumer(self, 5)
        self.committer = Committer(self, 6, "group")

    @property
    def topics(self) -> tuple[TopicShape, ...]:
        return (*self._topics, *self._unsynced)

    @property
    def clients(self) -> list[Client]:
        return [*self.producers, *self.careless, self.consumer, self.committer]

    def begin(self) -> None:
        for shape in self._topics:
            for index in range(shape.partitions):
                for producer in self.producers:
                    producer.spawn(producer.run(shape.name, index))
                self.consumer.spawn(self.consumer.run(shape.name, index))
            for careless in self.careless:
                careless.spawn(careless.run(shape.name, 0))
        for shape in self._unsynced:
            for careless in self.careless:
                careless.spawn(careless.run(shape.name, 0))
        self.committer.spawn(self.committer.run(self._topics[0].name))

    @property
    def has_begun(self) -> bool:
        return self.counts["records consumed"] > 5 and self.counts["offsets committed"] > 0

    def unfinished(self) -> str | None:
        for producer in self.producers:
            if producer.unacknowledged:
                return f"{producer} waits for {producer.unacknowledged} acknowledgements"
        for shape in self._topics:
            for index in range(shape.partitions):
                if not self.consumer.has_read(shape.name, index):
                    return f"the consumer has not read all of {shape.name}-{index}"
                late = self._late_replica(shape.name, index)
                if late is not None:
                    return late
        return None if self.committer.is_checked else "the group's offsets were not read again"

    def _late_replica(self, topic: str, index: int) -> str | None:
        """Every replica learns what is committed, even if nothing is produced any more."""
        end_offset = self.committed.named(topic, index).end_offset
        for node in self.cluster.serving():
            held = node.partitions.get(topic, index)
            if held is not None and held.high_watermark < end_offset:
                return (
                    f"node {node.node_id} does not know that {topic}-{index} is committed up to {end_offset}"
                )
        return None

    def finish(self) -> None:
        for careless in self.careless:
            careless.count_losses()
        for shape in self._topics:
            for index in range(shape.partitions):
                self._check_order(shape.name, index)

    def _check_order(self, topic: str, index: int) -> None:
        """Idempotent producers have written every record once and in order."""
        last: Counter[bytes] = Counter()
        for offset, value in sorted(self.committed.named(topic, index).values.items()):
            if not value.startswith(b"i"):
                continue
            name, _, sequence = value.rpartition(b"-")
            if int(sequence) != last[name]:
                raise self.loop.fail(
                    "idempotent producers write once and in order",
                    f"{value!r} at {offset} of {topic}-{index}, after {last[name] - 1}",
                )
            last[name] += 1
