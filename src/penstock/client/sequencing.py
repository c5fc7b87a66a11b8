"""The order of an idempotent producer's batches in one partition, without I/O.

A broker takes a producer's batches in sequence only, and knows the last five of them again. So no more than five are
on their way, and when one fails, it and all behind it are sent again in the same order with the same numbers. Of a
producer that it does not know a broker takes any number: the first batch therefore goes alone, lest one behind it be
taken first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from penstock.client.errors import ClientError
from penstock.client.retrying import Deadline
from penstock.protocol.records import HEADER_BYTES, read_header, stamp_producer

UNACKED_MAX: Final = 5
#: After the last of them comes 0 again.
SEQUENCES: Final = 1 << 31
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1


class Producer(NamedTuple):
    """Who sends: an id, and which incarnation of it."""

    id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH


NO_PRODUCER: Final = Producer()


@dataclass(slots=True, eq=False)
class Delivery:
    """A batch on its way. `offset` is that of its first record; None when the broker had it, but forgot where."""

    topic: str
    partition: int
    data: bytearray
    sequence: int
    is_acknowledged: bool = False
    offset: int | None = None


class Lane:
    """One partition of one producer, in one epoch of it."""

    def __init__(self, topic: str, partition: int, topic_id: UUID | None) -> None:
        self.topic = topic
        self.partition = partition
        self.topic_id = topic_id
        self.unacked: deque[Delivery] = deque()
        #: Set while what is not acknowledged has to be sent again, before anything new.
        self.is_stalled = False
        #: How much longer it is tried, counted from the first failure since the last success.
        self.patience: Deadline | None = None
        self._next_sequence = 0
        self._is_known = False

    def __repr__(self) -> str:
        return f"<Lane {self.topic}[{self.partition}], {len(self.unacked)} unacknowledged>"

    @property
    def is_full(self) -> bool:
        return len(self.unacked) >= (UNACKED_MAX if self._is_known else 1)

    def admit(self, batch: bytearray, producer: Producer, *, is_transactional: bool) -> Delivery:
        """Number the batch and keep it until it is acknowledged."""
        assert not self.is_full, f"{self} has no room"
        count = _record_count(batch)
        stamp_producer(
            batch,
            producer_id=producer.id,
            producer_epoch=producer.epoch,
            base_sequence=self._next_sequence,
            is_transactional=is_transactional,
        )
        delivery = Delivery(self.topic, self.partition, batch, self._next_sequence)
        self._next_sequence = (self._next_sequence + count) % SEQUENCES
        self.unacked.append(delivery)
        return delivery

    def acknowledge(self, delivery: Delivery, offset: int | None) -> None:
        delivery.is_acknowledged, delivery.offset = True, offset
        delivery.data = bytearray()  # whoever keeps the delivery need not keep the batch
        self._is_known = True
        # One may be acknowledged before one ahead of it, which was appended and answered with an error.
        while self.unacked and self.unacked[0].is_acknowledged:
            self.unacked.popleft()

    def waits_for_another(self, delivery: Delivery) -> bool:
        """Whether one before it is not acknowledged, so that it could not be in order."""
        return bool(self.unacked) and self.unacked[0] is not delivery

    def to_send_again(self) -> list[Delivery]:
        return [delivery for delivery in self.unacked if not delivery.is_acknowledged]


def _record_count(batch: bytearray) -> int:
    """Raises ClientError for what no broker would take."""
    header = read_header(batch) if len(batch) >= HEADER_BYTES else None
    if header is None or header.size != len(batch) or header.magic != 2:
        raise ClientError(f"{len(batch)} bytes are not one whole record batch of format 2")
    if header.record_count < 1 or header.record_count != header.last_offset_delta + 1:
        raise ClientError(
            f"a batch of {header.record_count} records over {header.last_offset_delta + 1} offsets cannot be sent"
        )
    return header.record_count
