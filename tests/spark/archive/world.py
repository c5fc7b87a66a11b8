"""Drivers that archive one topic, in an order that a seed determines: some die, some are late, some start over.

There is no Spark and no broker. Checkpoint, files and commits are real.
"""

import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from tests.spark.archive.lake import Frame, note_offsets, record_batch, rows_in
from tests.spark.sink.actors import Stage, patched

from penstock.client.retry import Deadline
from penstock.spark.archive.delta_table import ArchiveTable, EndOffsets
from penstock.spark.archive.files import FileWriter
from penstock.spark.archive.sink import DeltaSink, parse_offsets_file
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.offsets import Position, ranges_between, start_offset
from penstock.spark.pipelines.declaration import RunSettings

TOPIC = "orders"
TOPIC_ID = uuid.UUID(int=7)
PARTITIONS = 3
#: Other drivers may run before each of these steps, and a driver may die there.
GATES = (
    (ArchiveTable, "open"),
    (ArchiveTable, "create"),
    (ArchiveTable, "refresh"),
    (ArchiveTable, "append"),
    (FileWriter, "write"),
)


class ArchiveStage(Stage):
    @contextmanager
    def gated(self) -> Iterator[Stage]:
        patches = [self._patch(*each, switches=True) for each in GATES]
        with patched(*patches):
            yield self


class Checkpoint:
    """The checkpoint of a query, which survives its driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.query = uuid.uuid4().hex
        (folder / "commits").mkdir(parents=True)

    def last(self, kind: str) -> int:
        return max((int(each.name) for each in (self.folder / kind).glob("*")), default=-1)

    def position(self, number: int) -> Position:
        if number < 0:
            return Position({})
        return parse_offsets_file((self.folder / "offsets" / str(number)).read_text())

    def commit(self, number: int) -> None:
        (self.folder / "commits" / str(number)).touch()


class World:
    def __init__(self, folder: Path, seed: int, *, counts_offsets: bool = True) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.counts_offsets = counts_offsets
        self.stage = ArchiveStage(self.chance, deaths=self.chance.choice([0, 0.05, 0.15]))
        self.logs = [0] * PARTITIONS
        self.checkpoints = [self._new_checkpoint()]
        self.failures: list[str] = []

    @property
    def table(self) -> Path:
        return self.folder / "table"

    def _new_checkpoint(self) -> Checkpoint:
        return Checkpoint(self.folder / uuid.uuid4().hex)

    def run(self) -> None:
        with self.stage.gated():
            for _ in range(self.chance.randint(2, 5)):
                self._feed()
                self._enter()
                while self.stage.step():
                    pass

    def _feed(self) -> None:
        for partition in range(PARTITIONS):
            self.logs[partition] += self.chance.randint(0, 6)

    def _enter(self) -> None:
        if self.counts_offsets and self.chance.random() < 0.3:
            # The checkpoint was deleted. A driver that uses it may not have noticed yet.
            self.checkpoints.append(self._new_checkpoint())
        known = self.checkpoints[-2:] if self.chance.random() < 0.5 else self.checkpoints[-1:]
        for number in range(self.chance.choice([1, 1, 2, 3])):
            checkpoint = self.chance.choice(known)
            self.stage.enter(f"driver {number}", lambda checkpoint=checkpoint: self._drive(checkpoint))

    def _drive(self, checkpoint: Checkpoint) -> None:
        sink = self._sink(checkpoint)
        while (number := checkpoint.last("commits") + 1) >= 0:
            if checkpoint.last("offsets") < number and not self._plan(checkpoint, number):
                return
            batch = MicroBatch(checkpoint.query, number)
            try:
                sink.write(self._rows(checkpoint, number), batch)
            except Exception as error:
                self.failures.append(str(error))
                raise
            self.stage.gate("before the checkpoint", switches=True)
            checkpoint.commit(number)

    def _sink(self, checkpoint: Checkpoint) -> DeltaSink:
        sink = DeltaSink(str(self.table), topic=TOPIC if self.counts_offsets else None)
        sink._run = RunSettings(bootstrap="unused", checkpoint=str(checkpoint.folder))
        sink._topic_id = str(TOPIC_ID) if self.counts_offsets else None
        sink._next_compaction = Deadline(0 if self.chance.random() < 0.5 else 1e6)
        sink._next_vacuum = Deadline(1e9)
        return sink

    def _plan(self, checkpoint: Checkpoint, number: int) -> bool:
        """Run a batch. Return False if there is nothing to read."""
        start = checkpoint.position(number - 1)
        ends = {}
        for partition, end in enumerate(self.logs):
            begin = start_offset(start, TOPIC, TOPIC_ID, partition)
            ends[TOPIC, partition] = self.chance.randint(begin, end) if number % 3 else end
        position = Position.of(ends, {TOPIC: TOPIC_ID})
        if not ranges_between(start, position):
            return False
        note_offsets(checkpoint.folder, number, position)
        return True

    def _rows(self, checkpoint: Checkpoint, number: int) -> Frame:
        """Divide the batch into tasks, in another way each time."""
        found = ranges_between(checkpoint.position(number - 1), checkpoint.position(number))
        tasks: list[list[Any]] = [[] for _ in range(self.chance.randint(1, 3))]
        for each in found:
            # Offsets that end with 9 are transaction markers.
            offsets = [offset for offset in range(each.start, each.end) if offset % 10 != 9]
            middle = self.chance.randint(0, len(offsets))
            for part in (offsets[:middle], offsets[middle:]):
                self.chance.choice(tasks).append(record_batch(each.partition, part))
        return Frame(tasks)

    def check(self) -> None:
        """The last driver is not disturbed, and finishes."""
        checkpoint = self.checkpoints[-1]
        self._drive(checkpoint)
        self._drive(checkpoint)
        expected = [
            (partition, offset)
            for partition, end in enumerate(self.logs)
            for offset in range(end)
            if offset % 10 != 9
        ]
        found = rows_in(self.table)
        doubled = len(found) - len(set(found))
        missing = len(set(expected) - set(found))
        assert not doubled, f"{doubled} rows are in the table more than once"
        assert not missing, f"{missing} rows are missing"
        assert found == expected
        assert not self.failures, self.failures[0]
        if self.counts_offsets and any(self.logs):
            handle = DeltaTable(str(self.table))
            ends = EndOffsets.found(TOPIC, handle.transaction_version)
            assert [ends.of(each) for each in range(PARTITIONS)] == self.logs, (
                "end offsets are not those of the logs"
            )
