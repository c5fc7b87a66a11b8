"""Frames of a transaction: encoded once by kio, then only stamped with what changes from one to the next.

The newer protocol (KIP-890) sends Produce v12, which adds partitions by itself, and EndTxn v5, which answers with the
epoch of the next transaction. The older one adds partitions with a request of its own and keeps its epoch.
"""

import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from kio.schema.add_partitions_to_txn.v3 import request as add
from kio.schema.end_txn.v4 import request as end_v4
from kio.schema.end_txn.v5 import request as end_v5
from kio.schema.produce.v11 import request as produce_v11
from kio.schema.produce.v12 import request as produce_v12

from benchmarks.wire.frames import ACKS_ALL, request_frame
from penstock.protocol.record_batch import checksum

_CRC_AT = 17
_PRODUCER_AT = 43
_PRODUCER = struct.Struct(">qhi")
#: Of EndTxn, behind the transactional id: producer id and epoch, the outcome, no tags.
_END_TAIL = struct.Struct(">qh??")
_HEADER_BYTES = 5
_THROTTLE_BYTES = 4


class Answer(NamedTuple):
    """Where a response has its error codes: the first, and as long as it is 0 the next ones, so far apart."""

    first: int
    stride: int
    partitions: int

    def error_code(self, frame: memoryview) -> int:
        """The first that is not 0."""
        for index in range(self.partitions):
            (code,) = struct.unpack_from(">h", frame, self.first + index * self.stride)
            if code:
                return int(code)
        return 0


END_ANSWER = Answer(_HEADER_BYTES + _THROTTLE_BYTES, 0, 1)
_NEXT_PRODUCER = struct.Struct(">qh")
_NEXT_PRODUCER_AT = END_ANSWER.first + 2


def produce_answer(topic: str, partitions: int) -> Answer:
    """Of a partition: index, error code, three offsets, no record errors, no message, no tags."""
    return Answer(_HEADER_BYTES + 1 + 1 + len(topic) + 1 + 4, 4 + 2 + 3 * 8 + 3, partitions)


def add_answer(topic: str, partitions: int) -> Answer:
    return Answer(_HEADER_BYTES + _THROTTLE_BYTES + 1 + 1 + len(topic) + 1 + 4, 4 + 2 + 1, partitions)


def next_producer(frame: memoryview) -> tuple[int, int]:
    """Producer id and epoch of the next transaction, from the answer to EndTxn v5."""
    producer_id, epoch = _NEXT_PRODUCER.unpack_from(frame, _NEXT_PRODUCER_AT)
    return producer_id, epoch


class ProduceFrame:
    """One request with the same batch for each of some partitions; without a transactional id a plain one."""

    def __init__(
        self,
        topic: str,
        partitions: Sequence[int],
        batch: bytes,
        *,
        transactional_id: str | None,
        implicit: bool,
    ) -> None:
        produce = produce_v12 if implicit else produce_v11
        parts = tuple(produce.PartitionProduceData(index=p, records=batch) for p in partitions)
        request = produce.ProduceRequest(
            transactional_id=transactional_id,
            acks=ACKS_ALL,
            timeout=timedelta(seconds=30),
            topic_data=(produce.TopicProduceData(name=topic, partition_data=parts),),
        )
        self.data = bytearray(request_frame(request))
        self._batches: list[memoryview] = []
        at = 0
        for _ in partitions:
            at = self.data.index(batch, at)
            self._batches.append(memoryview(self.data)[at : at + len(batch)])
            at += len(batch)

    def stamp(self, producer_id: int, epoch: int, sequence: int) -> None:
        """All batches are the same, so they have one checksum."""
        for batch in self._batches:
            _PRODUCER.pack_into(batch, _PRODUCER_AT, producer_id, epoch, sequence)
        crc = checksum(self._batches[0])
        for batch in self._batches:
            struct.pack_into(">I", batch, _CRC_AT, crc)


class EndFrame:
    """EndTxn that commits."""

    def __init__(self, transactional_id: str, *, implicit: bool) -> None:
        end = end_v5 if implicit else end_v4
        self.data = bytearray(
            request_frame(
                end.EndTxnRequest(
                    transactional_id=transactional_id, producer_id=0, producer_epoch=0, committed=True
                )
            )
        )

    def stamp(self, producer_id: int, epoch: int) -> None:
        _END_TAIL.pack_into(self.data, len(self.data) - _END_TAIL.size, producer_id, epoch, True, False)


def add_frame(
    transactional_id: str, producer_id: int, epoch: int, topic: str, partitions: Sequence[int]
) -> bytes:
    return request_frame(
        add.AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=transactional_id,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=(add.AddPartitionsToTxnTopic(name=topic, partitions=tuple(partitions)),),
        )
    )
