"""What transactional clients did and were told, and what follows from it for everybody who reads committed records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from penstock.broker.coordinators.transactions.markers import MarkerSender
from penstock.cluster.topic_names import TRANSACTION_STATE
from penstock.protocol.record_batch import BatchHeader, Record, parse_end_marker
from penstock.transactions.messages import TransactionConfig
from penstock.transactions.transaction import TransactionMetadata
from penstock.transactions.transaction_shard import TransactionCoordinatorShard
from simulation.checks.committed import CommittedLogs
from simulation.engine.loop import VirtualLoop


class Place(NamedTuple):
    topic: str
    partition: int


class Producer(NamedTuple):
    id: int = -1
    epoch: int = -1


class Written(NamedTuple):
    """A record of a transaction. `copied` is the input record that it is a copy of, as "partition@offset"."""

    transaction: int
    number: int
    copied: str = ""

    def encode(self) -> bytes:
        return f"{self.transaction} {self.number} {self.copied}".encode()

    @classmethod
    def decode(cls, value: bytes) -> Written:
        transaction, number, copied = value.decode().split(" ")
        return cls(int(transaction), int(number), copied)


class TransactionHistory:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._count = 0
        #: Acknowledged records of each transaction.
        self._written: dict[int, list[tuple[Place, Written]]] = {}
        #: Transactions that their client wants to commit, after all their records were acknowledged.
        self._wanted: dict[int, None] = {}
        self._told: dict[int, bool] = {}
        #: Where a reader of committed records has seen each record.
        self._seen: dict[Written, tuple[Place, int]] = {}
        self._copies: dict[str, None] = {}
        #: Whether the record at each offset was shown to the first reader that passed it.
        self._shown: dict[tuple[Place, int], bool] = {}
        #: The newest epoch that InitProducerId has returned for each transactional id and producer id.
        self._owners: dict[tuple[str, int], int] = {}
        #: Up to here, readers have been told that everything is decided.
        self.stable_offsets: dict[Place, int] = {}

    # -- producers -------------------------------------------------------------------------------------

    def took_over(self, name: str, producer: Producer) -> None:
        """A producer was told by InitProducerId that it owns this transactional id."""
        key = (name, producer.id)
        self._owners[key] = max(self._owners.get(key, -1), producer.epoch)

    def is_zombie(self, name: str, producer: Producer) -> bool:
        return self._owners.get((name, producer.id), -1) > producer.epoch

    def accepted(self, name: str, producer: Producer, what: str, *, was_zombie: bool) -> None:
        """A request succeeded. `was_zombie`: when it was sent, another producer already owned the id."""
        if was_zombie:
            raise self._loop.fail(
                "a producer is fenced by its successor",
                f"{what} of {name} {producer} succeeded, the owner has {self._owners[name, producer.id]}",
            )

    def begins(self) -> int:
        self._count += 1
        self._written[self._count] = []
        return self._count

    def wrote(self, transaction: int, place: Place, records: list[Written]) -> None:
        self._written[transaction] += [(place, record) for record in records]

    def wants_commit(self, transaction: int) -> None:
        self._wanted[transaction] = None

    def told(self, transaction: int, *, committed: bool) -> None:
        """Its client was told that it is committed, or aborted."""
        self._told[transaction] = committed
        if not committed:
            for place, record in self._written[transaction]:
                if record in self._seen:
                    raise self._loop.fail(
                        "a transaction has one outcome", f"{record} in {place} was seen, then aborted"
                    )

    # -- readers ---------------------------------------------------------------------------------------

    def read(self, place: Place, offset: int, value: bytes, *, shown: bool) -> None:
        """A reader of committed records has passed this record. `shown`: it was not filtered out as aborted."""
        if self._shown.setdefault((place, offset), shown) != shown:
            raise self._loop.fail(
                "a transaction has one outcome",
                f"{value!r} at {offset} of {place} was {'not ' * shown}shown before",
            )
        if shown:
            self._see(place, offset, Written.decode(value))

    def _see(self, place: Place, offset: int, record: Written) -> None:
        if record.transaction not in self._wanted or self._told.get(record.transaction) is False:
            raise self._loop.fail(
                "readers of committed records see committed transactions only",
                f"{record} at {offset} of {place}, its client was told {self._told.get(record.transaction)}",
            )
        known = self._seen.get(record)
        if known == (place, offset):
            return
        if known is not None:
            raise self._loop.fail(
                "each record is written once", f"{record} at {offset} of {place} and {known}"
            )
        self._seen[record] = (place, offset)
        if record.copied:
            if record.copied in self._copies:
                raise self._loop.fail("each input is copied exactly once", f"{record} at {offset} of {place}")
            self._copies[record.copied] = None

    def stable_up_to(self, place: Place, offset: int) -> None:
        self.stable_offsets[place] = max(self.stable_offsets.get(place, 0), offset)

    @property
    def copies_seen(self) -> int:
        return len(self._copies)

    # -- the end ---------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything committed was read."""
        for transaction, written in self._written.items():
            missing = [each for each in written if each[1] not in self._seen]
            if missing and len(missing) != len(written):
                raise self._loop.fail(
                    "a transaction is all or nothing", f"{missing} of {written} are missing"
                )
            if missing and self._told.get(transaction):
                raise self._loop.fail(
                    "a transaction that was committed is there", f"{transaction}: {written}"
                )


class AbortedFilter:
    """What a client leaves out of one response, which lists aborted transactions and where they began."""

    def __init__(self, aborted: list[tuple[int, int]]) -> None:
        """`aborted`: pairs of first offset and producer id."""
        self._coming = sorted(aborted, reverse=True)
        self._aborting: dict[int, None] = {}

    def shows(self, header: BatchHeader, batch: memoryview) -> bool:
        while self._coming and self._coming[-1][0] <= header.last_offset:
            self._aborting[self._coming.pop()[1]] = None
        if header.is_control:
            marker = parse_end_marker(batch)
            if marker is not None and not marker.committed:
                self._aborting.pop(marker.producer_id, None)
            return False
        return not (header.is_transactional and header.producer_id in self._aborting)


class CommittedTransactions:
    """Replays what the transaction coordinator has committed, and compares data and markers with it."""

    def __init__(self, committed: CommittedLogs) -> None:
        self._loop = committed.cluster.loop
        self._shard = TransactionCoordinatorShard(TransactionConfig(), transaction_version=lambda: 2)
        #: By producer: the partitions of its transactions so far.
        self._added: dict[Producer, set[Place]] = {}
        #: The outcomes that are stored: producer, and whether it commits.
        self._decided: set[tuple[Producer, bool]] = set()
        #: By partition and producer id: the epoch of the last transaction that has ended, or a later one that began.
        self._ended: dict[tuple[Place, int], int] = {}
        committed.on_committed.append(self._take_in)

    @contextmanager
    def observing(self) -> Iterator[None]:
        write, report = MarkerSender._write, MarkerSender._report

        async def write_observed(sender: MarkerSender, active: Any, markers: Any, partitions: Any) -> Any:
            if (Producer(markers.producer_id, markers.epoch), markers.committed) not in self._decided:
                raise self._loop.fail("markers follow the stored decision", f"{markers}")
            return await write(sender, active, markers, partitions)

        async def report_observed(sender: MarkerSender, active: Any, markers: Any, written: Any) -> None:
            for topic, partition in written:
                ended = self._ended.get((Place(topic, partition), markers.producer_id), -1)
                if ended < markers.epoch:
                    raise self._loop.fail(
                        "a marker counts once it is committed", f"{markers} in {topic}-{partition}"
                    )
            await report(sender, active, markers, written)

        MarkerSender._write = write_observed  # type: ignore[method-assign, assignment]
        MarkerSender._report = report_observed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            MarkerSender._write, MarkerSender._report = write, report  # type: ignore[method-assign]

    def _take_in(self, topic: str, index: int, header: BatchHeader, records: list[Record]) -> None:
        if topic == TRANSACTION_STATE:
            for record in records:
                self._shard.replay(record.key or b"", record.value)
                for transaction in self._shard.transactions.values():
                    self._note(transaction)
        elif header.is_transactional:
            place, producer = Place(topic, index), Producer(header.producer_id, header.producer_epoch)
            if header.is_control:
                self._ended[place, producer.id] = producer.epoch
            elif place not in self._added.get(producer, ()):
                raise self._loop.fail(
                    "a partition is in the transaction before its first record", f"{header} of {place}"
                )
            else:
                self._ended[place, producer.id] = max(
                    self._ended.get((place, producer.id), -1), producer.epoch - 1
                )

    def _note(self, transaction: TransactionMetadata) -> None:
        producer = Producer(*transaction.producer)
        self._added.setdefault(producer, set()).update(Place(*each) for each in transaction.partitions)
        if transaction.state.is_prepared:
            self._decided.add((producer, transaction.state.is_committed))
