"""Transactions: transactional producers (`transactors.py`), a producer of their input, and readers that check them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from penstock.log.log_manager import CLEAN_SHUTDOWN_FILE
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import (
    BatchHeader,
    Record,
    checksum,
    decode_records,
    encode_batch,
    iter_batches,
)
from simulation.checks.committed import CommittedLogs
from simulation.checks.transactions import (
    AbortedFilter,
    CommittedTransactions,
    Place,
    TransactionHistory,
)
from simulation.client import Client
from simulation.cluster import Cluster, TopicShape
from simulation.engine.machine import Machine
from simulation.worlds.base import World
from simulation.worlds.transactors import TRANSACTION_TIMEOUT_S, Copier, Transactor, Writer


class InputProducer(Client):
    """An idempotent producer without transactions."""

    def __init__(self, world: TransactionWorld, number: int) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.unacknowledged = 0

    async def run(self, index: int) -> None:
        producer_id = await self.new_producer_id()
        sequence = 0
        while not self.world.is_closing:
            values = tuple(b"input %d %d" % (index, sequence + n) for n in range(1 + self.loop.draw(2)))
            records = [Record(n, 1, None, value) for n, value in enumerate(values)]
            batch = encode_batch(records, producer_id=producer_id, producer_epoch=0, base_sequence=sequence)
            sequence += len(values)
            self.unacknowledged += 1
            while True:
                reply = await self.produce("input", index, batch)
                if reply is not None and reply[0] is ErrorCode.none:
                    break
                await self.back_off()
            self.world.committed.acknowledged("input", index, reply[1], values)
            self.unacknowledged -= 1
            await asyncio.sleep(self.loop.between(0.04, 0.25))


class CommittedReader(Client):
    """Reads partitions as read_committed, now and then once more from an earlier offset."""

    def __init__(self, world: TransactionWorld, number: int) -> None:
        super().__init__(world.cluster, number, world.counts)
        self.world = world
        self.history = world.history
        #: Up to here, everything was read.
        self.positions: dict[Place, int] = {}

    async def follow(self, place: Place) -> None:
        self.positions[place] = position = 0
        while True:
            if self.loop.chance(0.15):
                await self._check_latest(place)
            if self.loop.chance(0.05):
                position = self.loop.draw(position + 1)
            part = await self.fetch(*place, position, read_committed=True, wait_ms=200)
            if part is None or part.error_code != ErrorCode.none:
                await self.back_off()
                continue
            position = self._take(place, position, part)
            self.positions[place] = max(position, self.positions[place])
            await asyncio.sleep(self.loop.between(0.005, 0.06))

    def _take(self, place: Place, position: int, part: Any) -> int:
        """Return the next position."""
        aborted = AbortedFilter(
            [(each.first_offset, each.producer_id) for each in part.aborted_transactions or ()]
        )
        for header, batch in iter_batches(part.records or b""):
            if self.world.is_damaged(place, header, batch):
                self.counts["damaged batches"] += 1
                intact = self.world.intact(place, position)
                if intact is None:
                    return position
                header, batch = intact
            if header.last_offset >= part.last_stable_offset:
                raise self.loop.fail(
                    "readers of committed records stay below the last stable offset",
                    f"{header} of {place}, the last stable offset is {part.last_stable_offset}",
                )
            is_data = header.is_transactional and not header.is_control
            if is_data and not (self.world.has_clean_restarts or self._is_decided(place, header)):
                raise self.loop.fail(
                    "readers of committed records wait for the marker",
                    f"{header} of {place} has none that is committed",
                )
            shown = aborted.shows(header, batch)
            if not header.is_control:
                for record in decode_records(batch, 1 << 24):
                    if record.offset >= position:
                        self.world.committed.consumed(*place, record.offset, record.value)
                        self.history.read(place, record.offset, record.value or b"", shown=shown)
                        self.counts["committed records read" if shown else "aborted records read"] += 1
            position = max(position, header.last_offset + 1)
        self.history.stable_up_to(place, position)
        return position

    def _is_decided(self, place: Place, header: BatchHeader) -> bool:
        return any(
            base_offset > header.base_offset
            and each.header.is_control
            and each.header.producer_id == header.producer_id
            for base_offset, each in self.world.committed.named(*place).batches.items()
        )

    async def _check_latest(self, place: Place) -> None:
        """The newest leader knows of everything that is decided."""
        seen, leader = self.history.stable_offsets.get(place, 0), self.world.newest_leader(*place)
        latest = await self.latest_offset(*place, node_id=leader[0], read_committed=True)
        if latest is None or leader != self.world.newest_leader(*place):
            return
        if latest < seen and not self.world.has_clean_restarts:
            raise self.loop.fail(
                "the last stable offset never goes back",
                f"{latest} of {place}, {seen} was seen; leader {leader}",
            )
        self.history.stable_up_to(place, latest)

    def has_read(self, place: Place) -> bool:
        return self.positions.get(place, -1) >= self.world.committed.named(*place).end_offset


class TransactionWorld(World):
    settings: ClassVar[Mapping[str, str]] = {
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "100",
        "penstock.transaction.commit.timeout.ms": "500",
    }

    def __init__(self, cluster: Cluster, committed: CommittedLogs) -> None:
        super().__init__(cluster, committed)
        self.history = TransactionHistory(self.loop)
        self._decisions = CommittedTransactions(committed)
        self._topics = (
            TopicShape("input", 1 + int(self.loop.chance(0.3))),
            TopicShape("copies", 1),
            TopicShape("ledger", 2),
        )
        self.producer = InputProducer(self, 1)
        self.readers = [CommittedReader(self, 2)]
        names = ["writer0", "writer1", *(f"copier{index}" for index in range(self._topics[0].partitions))]
        self._is_newer = {name: self.loop.chance(0.7) for name in names}
        self._is_two_phase = self._is_newer["writer1"] and self.loop.chance(0.7)
        #: A partition that was closed cleanly has forgotten which of its markers are not committed, as in Apache Kafka.
        #: Readers may then pass a transaction early; its outcome is certain before the first marker is written.
        self.has_clean_restarts = False
        for machine in cluster.machines.values():
            machine.on_started.append(self._started)
        #: Every incarnation, and the one of each name that counts.
        self.transactors: list[Transactor] = []
        self._current: dict[str, Transactor] = {}

    @contextmanager
    def observing(self) -> Iterator[None]:
        with self._decisions.observing():
            yield

    def _started(self, machine: Machine) -> None:
        self.has_clean_restarts |= (machine.disk.folder / CLEAN_SHUTDOWN_FILE).exists()

    @property
    def topics(self) -> tuple[TopicShape, ...]:
        return self._topics

    @property
    def clients(self) -> list[Client]:
        return [made for made in self.transactors if not made.is_over]

    def places(self, topic: str) -> list[Place]:
        (shape,) = (each for each in self._topics if each.name == topic)
        return [Place(topic, index) for index in range(shape.partitions)]

    def newest_leader(self, topic: str, index: int) -> tuple[int, int]:
        state = self.cluster.image.partition(topic, index)
        return (-1, -1) if state is None else (state.leader, state.leader_epoch)

    def is_damaged(self, place: Place, header: BatchHeader, batch: memoryview) -> bool:
        """Whether a fault may have damaged this batch. The checksum does not cover its base offset."""
        if not self.committed.excused:
            return False
        known = self.committed.named(*place).batches.get(header.base_offset)
        return checksum(batch) != header.crc or known is None or known.header.crc != header.crc

    def intact(self, place: Place, offset: int) -> tuple[BatchHeader, memoryview] | None:
        """Read the batch with this offset from another replica after one was damaged."""
        for node in self.cluster.serving():
            held = node.partitions.get(*place)
            if held is not None and held.log.end_offset > offset >= held.log.start_offset:
                piece = self.cluster.in_process_of(node, held.log.read, offset, 1 << 22, held.log.end)
                for header, batch in iter_batches(piece.data):
                    if not self.is_damaged(place, header, batch):
                        return header, batch
                    break
        return None

    def begin(self) -> None:
        for place in self.places("input"):
            self.producer.spawn(self.producer.run(place.partition))
        self._read(self.readers[0])
        for name in self._is_newer:
            self._incarnate(name)
        self.admin.spawn(self._replace())

    def _read(self, reader: CommittedReader) -> None:
        for place in (*self.places("copies"), *self.places("ledger")):
            reader.spawn(reader.follow(place))

    # -- incarnations ----------------------------------------------------------------------------------

    def _incarnate(self, name: str) -> None:
        """A new incarnation takes the name over; the one before may not know it yet."""
        number, is_newer = 10 + len(self.transactors), self._is_newer[name]
        if name.startswith("writer"):
            is_two_phase = self._is_two_phase and name == "writer1"
            made: Transactor = Writer(self, number, name=name, is_newer=is_newer, is_two_phase=is_two_phase)
        else:
            made = Copier(self, number, name=name, is_newer=is_newer)
            made.source = int(name[-1])
        made.predecessor = self._current.get(name)
        self.transactors.append(made)
        self._current[name] = made
        made.spawn(made.live())

    def ended(self, made: Transactor) -> None:
        """It was fenced, or has left its transaction: its successor goes on, unless there is one."""
        if self._needs_successor(made):
            self.admin.spawn(self._go_on(made))

    async def _go_on(self, made: Transactor) -> None:
        await asyncio.sleep(
            2 * TRANSACTION_TIMEOUT_S if made.has_abandoned else self.loop.between(0.001, 0.15)
        )
        if self._needs_successor(made):
            self._incarnate(made.name)

    def _needs_successor(self, made: Transactor) -> bool:
        return self._current.get(made.name) is made and not (self.is_closing and self._may_rest(made))

    async def _replace(self) -> None:
        """Now and then, an operator starts a second producer with the same id; the first is often only suspended."""
        while True:
            await asyncio.sleep(self.loop.between(0.2, 0.9))
            if self.is_closing:
                return
            # A prepared transaction must have one successor.
            found = [made for made in self._current.values() if not made.is_two_phase]
            found = [made for made in found if made.process.is_suspended] or found
            self.counts["producers replaced"] += 1
            self._incarnate(found[self.loop.draw(len(found))].name)

    def _may_rest(self, made: Transactor) -> bool:
        """Timeouts do not end what a two-phase writer leaves open."""
        return (
            isinstance(made, Writer) and not made.is_prepared and not (made.is_two_phase and made.was_fenced)
        )

    # -- the end ---------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        return self.counts["transactions committed"] >= 4 and self.counts["records copied"] > 0

    def close(self) -> None:
        super().close()
        # It must see the same as the one that has read all the time.
        self.readers.append(CommittedReader(self, 3))
        self._read(self.readers[1])

    def unfinished(self) -> str | None:
        if self.producer.unacknowledged:
            return "inputs are not acknowledged"
        for made in self._current.values():
            if isinstance(made, Writer) and not (made.is_over and self._may_rest(made)):
                return f"{made} has not come to its end"
        inputs = sum(len(self.committed.named(*place).values) for place in self.places("input"))
        if self.history.copies_seen != inputs:
            return f"{self.history.copies_seen} of {inputs} inputs are copied"
        for topic, index, state in self.cluster.partitions():
            if (reason := self._unstable(Place(topic, index), state.leader)) is not None:
                return reason
        return None

    def _unstable(self, place: Place, leader: int) -> str | None:
        """Nothing hangs: the last stable offset of every leader reaches the end."""
        node = self.cluster.machines[leader].serving if leader in self.cluster.machines else None
        partition = None if node is None else node.partitions.get(*place)
        if partition is None or not partition.is_leader:
            return f"{place} is not led"
        if partition.last_stable_offset < partition.log.end_offset:
            return f"a transaction hangs in {place} at {partition.last_stable_offset}"
        for reader in self.readers:
            if place in reader.positions and not reader.has_read(place):
                return f"{reader} has not read {place} to its end"
        return None

    def finish(self) -> None:
        self.history.finish()
