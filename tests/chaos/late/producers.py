"""Transactional producers behind a few verbs: librdkafka, Java, and single requests of the newer protocol (KIP-890).

Each gives up a request that is not answered soon, and sends it again over a new connection.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from confluent_kafka import KafkaException, Producer
from kio.schema.end_txn.v5 import request as end_txn
from kio.schema.find_coordinator.v4 import request as find
from kio.schema.init_producer_id.v5 import request as init
from kio.schema.produce.v12 import request as produce
from tests.chaos.workload import CLIENT
from tests.compat.raw import RawConnection

from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import TRANSACTIONAL, Record, encode_batch

REQUEST_S = 1.0
CALL_S = 30.0
JAVA_PROGRAM = Path(__file__).with_name("Transactional.java")


class Fenced(Exception):
    """A newer producer has the transactional id, or the transaction was aborted by its coordinator."""


class TransactionalProducer(Protocol):
    def begin(self) -> None: ...

    def send(self, value: str, partition: int) -> None:
        """Returns when it is there."""

    def send_later(self, value: str, partition: int) -> None:
        """Returns at once, whatever becomes of it."""

    def end(self, *, commits: bool) -> None: ...

    def close(self) -> None: ...


class ConfluentProducer:
    """Of the older protocol: all transactions of a producer have the same epoch."""

    def __init__(self, servers: str, topic: str, name: str, *, timeout_ms: int = 60_000) -> None:
        self._topic = topic
        self._producer = Producer(
            {
                **CLIENT,
                "bootstrap.servers": servers,
                "linger.ms": 0,
                "request.timeout.ms": int(REQUEST_S * 1000),
                "socket.timeout.ms": int(REQUEST_S * 1000),
                "transaction.timeout.ms": timeout_ms,
                "transactional.id": name,
            }
        )
        self._producer.init_transactions(CALL_S)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, value: str, partition: int) -> None:
        self.send_later(value, partition)
        assert self._producer.flush(CALL_S) == 0

    def send_later(self, value: str, partition: int) -> None:
        self._producer.produce(self._topic, value.encode(), partition=partition)
        self._producer.poll(0)

    def end(self, *, commits: bool) -> None:
        finish = self._producer.commit_transaction if commits else self._producer.abort_transaction
        _insist(lambda: finish(5.0))

    def close(self) -> None:
        self._producer.purge(in_queue=True, in_flight=True)


def _insist(call: Callable[[], None]) -> None:
    deadline = time.monotonic() + CALL_S
    while True:
        try:
            return call()
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise Fenced(error.args[0].str()) from error


class RawProducer:
    """Of the newer protocol: each transaction has an epoch of its own, and leaders add partitions themselves."""

    def __init__(self, address: tuple[str, int], topic: str, name: str, *, timeout_ms: int = 60_000) -> None:
        self._address, self._topic, self._name = address, topic, name
        self._sequences: dict[int, int] = {}
        self._connection = self._connected()
        self._call(find.FindCoordinatorRequest(key_type=1, coordinator_keys=(name,)))
        begun = self._until_settled(
            init.InitProducerIdRequest(
                transactional_id=name, transaction_timeout=timedelta(milliseconds=timeout_ms)
            )
        )
        self._producer = (begun.producer_id, begun.producer_epoch)

    def _connected(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=REQUEST_S)

    def _call(self, request: Any) -> Any:
        while True:
            try:
                return RawConnection(self._connection).call(request)
            except (OSError, AssertionError):
                self._connection.close()
                self._connection = self._connected()

    def _until_settled(self, request: Any, part: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """Asks again while the end of the transaction before is still being written."""
        passing = {ErrorCode.concurrent_transactions, ErrorCode.coordinator_not_available}
        while (answer := part(self._call(request))).error_code in passing:
            time.sleep(0.02)
        if answer.error_code is not ErrorCode.none:
            raise Fenced(answer.error_code.name)
        return answer

    def begin(self) -> None:
        self._sequences.clear()

    def send(self, value: str, partition: int) -> None:
        request = self._batch(value, partition)
        self._until_settled(request, lambda answer: answer.responses[0].partition_responses[0])

    def send_later(self, value: str, partition: int) -> None:
        request, connection = self._batch(value, partition), self._connected()

        def call() -> None:
            with contextlib.suppress(OSError, AssertionError), connection:
                RawConnection(connection).call(request)

        threading.Thread(target=call, daemon=True).start()

    def _batch(self, value: str, partition: int) -> Any:
        sequence = self._sequences.get(partition, 0)
        self._sequences[partition] = sequence + 1
        producer_id, epoch = self._producer
        batch = encode_batch(
            [Record(0, int(time.time() * 1000), None, value.encode())],
            attributes=TRANSACTIONAL,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )
        data = produce.PartitionProduceData(index=partition, records=bytes(batch))
        return produce.ProduceRequest(
            transactional_id=self._name,
            acks=-1,
            timeout=timedelta(seconds=5),
            topic_data=(produce.TopicProduceData(name=self._topic, partition_data=(data,)),),
        )

    def end(self, *, commits: bool) -> None:
        producer_id, epoch = self._producer
        answer = self._until_settled(
            end_txn.EndTxnRequest(
                transactional_id=self._name, producer_id=producer_id, producer_epoch=epoch, committed=commits
            )
        )
        self._producer = (answer.producer_id, answer.producer_epoch)

    def close(self) -> None:
        self._connection.close()


class JavaProducer:
    """Apache Kafka's own client, told what to do line by line."""

    def __init__(self, servers: str, topic: str, name: str, *, timeout_ms: int = 60_000) -> None:
        libs = java_libs()
        assert libs is not None
        settings = [servers, topic, name, str(timeout_ms), str(int(REQUEST_S * 1000))]
        self._process = subprocess.Popen(
            ["java", "-cp", f"{libs}/*", str(JAVA_PROGRAM), *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def _tell(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if line != "ok":
            raise Fenced(line)

    def begin(self) -> None:
        self._tell("begin")

    def send(self, value: str, partition: int) -> None:
        self._tell(f"send {partition} {value}")

    def send_later(self, value: str, partition: int) -> None:
        self._tell(f"later {partition} {value}")

    def end(self, *, commits: bool) -> None:
        self._tell("commit" if commits else "abort")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def java_libs() -> Path | None:
    """Where the jars of Apache Kafka are: named by the environment, or where the benchmarks have put them."""
    from benchmarks.brokers.kafka import CACHE

    named = os.environ.get("PENSTOCK_KAFKA_LIBS")
    if named is None and not (CACHE / "complete").exists():
        return None  # Maven has fetched none of them, or was interrupted
    folder = Path(named or CACHE / "libs")
    return folder if any(folder.glob("kafka-clients-4.*.jar")) and shutil.which("java") else None
