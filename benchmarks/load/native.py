"""The load of a real client: librdkafka producers and consumers, one process each."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load.librdkafka import BatchProducer, QueueConsumer
from benchmarks.load.processes import Phase, Slot
from benchmarks.load.results import Consumed, Produced, Timeline, int64s
from benchmarks.wire.raw_client import Topic, topic_ends
from penstock.protocol.compression import Codec

_ARRAY_LENGTH = 2000
#: Enough for several batches per partition; more would only measure the client's queue.
_QUEUED_RECORDS_MAX = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePlan:
    """What one librdkafka producer process sends. `batch_records_max` of 1 makes it unbatched."""

    bootstrap_servers: str
    topic: str
    partitions: Sequence[int]
    pool: list[bytes]
    codec: Codec
    batch_bytes_max: int
    lag_records_max: int | None
    batch_records_max: int = 10_000

    def config(self) -> dict[str, str]:
        return {
            **_common_config(self.bootstrap_servers),
            "acks": "all",
            "compression.codec": self.codec.name.lower(),
            "batch.size": str(self.batch_bytes_max),
            "batch.num.messages": str(self.batch_records_max),
            "queue.buffering.max.messages": str(2 * _QUEUED_RECORDS_MAX),
            "queue.buffering.max.kbytes": str(2**20),
        }


def _common_config(bootstrap_servers: str) -> dict[str, str]:
    return {
        "bootstrap.servers": bootstrap_servers,
        "client.id": "bench",
        "log.connection.close": "false",
    }


def produce_native(slot: Slot, plan: NativePlan) -> Produced:
    """Keep the client's queue filled, partition after partition, as long as the consumers keep up."""
    producer = BatchProducer(plan.config(), plan.topic, plan.pool, _ARRAY_LENGTH)
    slot.set_ready()
    slot.wait_for(Phase.RUN)
    turn = 0
    while slot.phase < Phase.STOP:
        keeps_up = plan.lag_records_max is None or slot.lag_records() <= plan.lag_records_max
        if keeps_up and producer.queued() < _QUEUED_RECORDS_MAX:
            producer.produce(plan.partitions[turn % len(plan.partitions)])
            turn += 1
            producer.serve(0)
        else:
            producer.serve(1)
        _publish(slot, producer, plan)
    while producer.queued():
        producer.serve(10)
    _publish(slot, producer, plan)
    return Produced(producer.acknowledged(), int64s(), Timeline(int64s()))


# How the library batches is its own business: only unbatched, records and requests are the same.
def _publish(slot: Slot, producer: BatchProducer, plan: NativePlan) -> None:
    records = producer.acknowledged()
    slot.publish(records if plan.batch_records_max == 1 else 0, records)


def consume_native(slot: Slot, topic: Topic, partitions: Sequence[int]) -> Consumed:
    """Read until the producers are done and the end is reached."""
    config = {**_common_config(topic.bootstrap_servers), "enable.partition.eof": "false"}
    consumer = QueueConsumer(config, topic.name, partitions)
    slot.set_ready()
    end: int | None = None
    while end is None or consumer.position() < end:
        consumer.consume(20)
        slot.publish(0, consumer.position())
        if end is None and slot.phase >= Phase.DRAIN:
            end = sum(topic_ends(topic, partitions))
    return Consumed(consumer.position(), Timeline(int64s()))
