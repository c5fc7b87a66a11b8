"""A copier on kafka-python, whose positions are fenced by the generation of its group (KIP-447)."""

from typing import Any

from kafka import ConsumerRebalanceListener, KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition
from kafka.errors import KafkaError
from tests.chaos.copier.worker import GROUP, SOURCE, TARGET, Item, Job, MustAbort, next_offsets, target_of
from tests.compat import kafka_python

WAIT_MS = 200
CLIENT = {"reconnect_backoff_max_ms": 200, "request_timeout_ms": 5000, "retry_backoff_ms": 50}


class PythonCopier(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, job: Job) -> None:
        self._batch = job.batch
        self._metadata: Any = None
        self._is_moved = False  # a rebalance has come in between
        self._producer = KafkaProducer(
            bootstrap_servers=job.servers,
            transactional_id=job.transactional_id,
            transaction_timeout_ms=job.transaction_timeout_ms,
            linger_ms=2,
            **CLIENT,
        )
        self._producer.init_transactions()
        self._consumer: KafkaConsumer = kafka_python.consumer(
            job.servers,
            group_id=GROUP,
            heartbeat_interval_ms=job.session_timeout_ms // 8,
            isolation_level="read_committed",
            session_timeout_ms=job.session_timeout_ms,
            **({} if job.instance_id is None else {"group_instance_id": job.instance_id}),
            **{**CLIENT, "request_timeout_ms": 2 * job.session_timeout_ms},
        )
        self._consumer.partitions_for_topic(SOURCE)
        self._consumer.subscribe([SOURCE], listener=self)

    def on_partitions_revoked(self, revoked: Any) -> None:
        self._is_moved = True

    def on_partitions_assigned(self, assigned: Any) -> None:
        self._is_moved = True

    def poll(self) -> list[Item]:
        self._is_moved = False
        found = self._consumer.poll(timeout_ms=WAIT_MS, max_records=self._batch)
        self._metadata = self._consumer.group_metadata()
        items = [
            Item(each.partition, each.offset, each.key, each.value)
            for records in found.values()
            for each in records
        ]
        if items and (self._is_moved or self._metadata.generation_id < 0):
            self.rewind()
            return []
        return items

    def copy(self, items: list[Item]) -> None:
        offsets = {
            TopicPartition(SOURCE, partition): OffsetAndMetadata(offset, "", -1)
            for partition, offset in next_offsets(items).items()
        }
        try:
            self._producer.begin_transaction()
            for item in items:
                self._producer.send(TARGET, item.value, item.key, partition=target_of(item.key))
            self._producer.send_offsets_to_transaction(offsets, self._metadata)
            self._producer.commit_transaction()
        except KafkaError as error:
            raise MustAbort(type(error).__name__) from error

    def abort(self) -> None:
        """Raises where no transaction of this producer can ever be again."""
        self._producer.abort_transaction()

    def rewind(self) -> None:
        for place in self._consumer.assignment():
            self._consumer.seek(place, self._consumer.committed(place) or 0)

    def close(self) -> None:
        self._consumer.close()
        self._producer.close()


def connect(job: Job) -> PythonCopier:
    return PythonCopier(job)
