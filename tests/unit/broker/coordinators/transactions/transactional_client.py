"""A transactional producer made of single requests, in the older or the newer protocol, and a reader."""

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tests.unit.broker.wire_client import WireClient

from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import TRANSACTIONAL, Record, decode_records, encode_batch, iter_batches

PRODUCE, FETCH, FIND_COORDINATOR, INIT_PRODUCER_ID = 0, 1, 10, 22
ADD_PARTITIONS, ADD_OFFSETS, END_TXN, WRITE_TXN_MARKERS = 24, 25, 26, 27
DESCRIBE_PRODUCERS, DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS = 61, 65, 66
_ACKS_ALL = -1
#: Of now, as the markers are: a record of long ago would have the next one begin a segment.
NOW_MS = int(time.time() * 1000)


class Versions(NamedTuple):
    """The versions that a producer uses, which show what protocol of transactions it speaks."""

    produce: int
    end: int


OLD = Versions(produce=11, end=4)
NEW = Versions(produce=12, end=5)
BOTH = pytest.mark.parametrize("versions", [OLD, NEW], ids=["old", "new"])


class TransactionalClient:
    def __init__(self, client: WireClient, transactional_id: str, versions: Versions) -> None:
        self.client = client
        self.transactional_id = transactional_id
        self.versions = versions
        self.producer_id = self.epoch = -1
        self.sequences: dict[tuple[str, int], int] = {}

    async def ask(self, api_key: int, version: int, **fields: Any) -> Any:
        return await self.client.ask(SimpleNamespace(**fields), api_key=api_key, version=version)

    async def find(self) -> ErrorCode:
        found = await self.ask(
            FIND_COORDINATOR, 4, key_type=1, coordinator_keys=(self.transactional_id,), key=None
        )
        error: ErrorCode = found.coordinators[0].error_code
        return error

    async def try_init(self, version: int = 5, **fields: Any) -> Any:
        defaults = {
            "transactional_id": self.transactional_id,
            "transaction_timeout": timedelta(seconds=60),
            "producer_id": -1,
            "producer_epoch": -1,
            "enable2_pc": False,
            "keep_prepared_txn": False,
        }
        return await self.ask(INIT_PRODUCER_ID, version, **defaults | fields)

    async def init(self, **fields: Any) -> None:
        """As clients do: again while the coordinator starts, and while an open transaction is being aborted."""
        while (error := await self.find()) is ErrorCode.coordinator_not_available:
            pass
        assert error is ErrorCode.none
        while (reply := await self.try_init(**fields)).error_code is ErrorCode.concurrent_transactions:
            pass
        assert reply.error_code is ErrorCode.none, reply
        self.producer_id, self.epoch = reply.producer_id, reply.producer_epoch
        self.sequences.clear()

    async def add(self, *partitions: int, topic: str = "t", version: int = 3) -> list[ErrorCode]:
        reply = await self.ask(
            ADD_PARTITIONS,
            version,
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=(SimpleNamespace(name=topic, partitions=partitions),),
        )
        return [
            partition.partition_error_code
            for each in reply.results_by_topic_v3_and_below
            for partition in each.results_by_partition
        ]

    def batch(self, *values: str, topic: str = "t", partition: int = 0) -> bytes:
        sequence = self.sequences.get((topic, partition), 0)
        self.sequences[topic, partition] = sequence + len(values)
        return bytes(
            encode_batch(
                [Record(place, NOW_MS, None, value.encode()) for place, value in enumerate(values)],
                attributes=TRANSACTIONAL,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                base_sequence=sequence,
            )
        )

    async def send(self, *values: str, topic: str = "t", partition: int = 0) -> ErrorCode:
        return await self.send_batch(self.batch(*values, topic=topic, partition=partition), topic, partition)

    async def send_batch(self, batch: bytes, topic: str = "t", partition: int = 0) -> ErrorCode:
        (error,) = await self.send_batches({partition: batch}, topic)
        return error

    async def send_batches(self, batches: dict[int, bytes], topic: str = "t") -> list[ErrorCode]:
        """In one request, a batch for each partition."""
        reply = await self.ask(
            PRODUCE,
            self.versions.produce,
            transactional_id=self.transactional_id,
            acks=_ACKS_ALL,
            timeout=timedelta(seconds=30),
            topic_data=(
                SimpleNamespace(
                    name=topic,
                    partition_data=tuple(
                        SimpleNamespace(index=index, records=batch) for index, batch in batches.items()
                    ),
                ),
            ),
        )
        return [partition.error_code for partition in reply.responses[0].partition_responses]

    async def end(self, commit: bool, **fields: Any) -> ErrorCode:
        defaults = {
            "transactional_id": self.transactional_id,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
            "committed": commit,
        }
        while True:
            reply = await self.ask(END_TXN, self.versions.end, **defaults | fields)
            if reply.error_code is not ErrorCode.concurrent_transactions:
                break
        if self.versions.end >= NEW.end and reply.error_code is ErrorCode.none:
            self.producer_id, self.epoch = reply.producer_id, reply.producer_epoch
            self.sequences.clear()
        error: ErrorCode = reply.error_code
        return error

    async def state_name(self) -> str:
        """By a request that does not tell when it began: kio does not read "never"."""
        reply = await self.ask(
            LIST_TRANSACTIONS, 0, state_filters=(), producer_id_filters=(self.producer_id,)
        )
        return str(reply.transaction_states[0].transaction_state)

    async def state(self) -> Any:
        reply = await self.ask(DESCRIBE_TRANSACTIONS, 0, transactional_ids=(self.transactional_id,))
        return reply.transaction_states[0]


class Seen(NamedTuple):
    values: list[str]
    last_stable_offset: int
    high_watermark: int


async def seen(client: WireClient, topic: str = "t", partition: int = 0, *, committed: bool = True) -> Seen:
    """What a consumer shows to its application, of all that is there now."""
    reply = await client.ask(_fetch(topic, partition, committed), api_key=FETCH, version=11)
    (found,) = reply.responses[0].partitions
    assert found.error_code is ErrorCode.none, found
    aborted = sorted((each.first_offset, each.producer_id) for each in found.aborted_transactions or ())
    skipped: set[int] = set()
    values: list[str] = []
    for header, batch in iter_batches(memoryview(found.records or b"")):
        while aborted and aborted[0][0] <= header.base_offset:
            skipped.add(aborted.pop(0)[1])
        if header.is_control:
            skipped.discard(header.producer_id)
        elif header.producer_id not in skipped:
            values += [(record.value or b"").decode() for record in decode_records(batch, 1 << 20)]
    return Seen(values, found.last_stable_offset, found.high_watermark)


def _fetch(topic: str, partition: int, committed: bool) -> Any:
    return SimpleNamespace(
        replica_id=-1,
        max_wait=timedelta(0),
        min_bytes=0,
        max_bytes=1 << 20,
        isolation_level=int(committed),
        session_id=0,
        session_epoch=-1,
        topics=(
            SimpleNamespace(
                topic=topic,
                partitions=(
                    SimpleNamespace(
                        partition=partition,
                        current_leader_epoch=-1,
                        fetch_offset=0,
                        log_start_offset=-1,
                        partition_max_bytes=1 << 20,
                    ),
                ),
            ),
        ),
        forgotten_topics_data=(),
        rack_id="",
    )
