"""In-flight batches of an idempotent producer: several at a time, each written once, in order.

A broker accepts the batches of a producer in sequence only, and recognises the last five of them. So a partition has
at most five unacknowledged batches, and when one fails, the producer sends it and all later ones again in the same
order with the same sequence numbers. A broker accepts any sequence number from a producer that it does not know. The
first batch therefore travels alone: otherwise the broker might accept a later one first. `PartitionQueue` holds these
rules, without I/O.

While all goes well, `InFlightBatches` reads responses only when there is no room for more requests. When a connection
breaks or a broker refuses a batch with a retriable error, it first waits for every request that is under way. Then
each partition concerned sends its unacknowledged batches again, to the current leader.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.client.errors import (
    RETRIABLE_ERRORS,
    UNKNOWN_TOPIC_ERRORS,
    ClientError,
    Refused,
    TopicChanged,
    Unavailable,
    broker_error,
)
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection, PendingRequest
from penstock.client.wire.metadata import TopicPartition
from penstock.protocol import produce
from penstock.protocol.errors import ErrorCode
from penstock.protocol.produce import TOPIC_IDS_FROM
from penstock.protocol.record_batch import BATCH_HEADER_BYTES, read_header, set_producer_state

UNACKED_MAX: Final = 5
#: Sequence numbers wrap around to 0.
SEQUENCE_NUMBERS: Final = 1 << 31
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1


class ProducerIdAndEpoch(NamedTuple):
    """The producer id, and the epoch that fences earlier producers with this id."""

    id: int = NO_PRODUCER_ID
    epoch: int = NO_PRODUCER_EPOCH


NO_PRODUCER: Final = ProducerIdAndEpoch()


@dataclass(slots=True, eq=False)
class SentBatch:
    """A sent batch. `offset` is that of its first record; None if the broker recognised a duplicate without offset."""

    topic: str
    partition: int
    data: bytearray
    sequence: int
    is_acknowledged: bool = False
    offset: int | None = None


class PartitionQueue:
    """The unacknowledged batches of one producer epoch for one partition."""

    def __init__(self, topic: str, partition: int, topic_id: UUID | None) -> None:
        self.topic = topic
        self.partition = partition
        self.topic_id = topic_id
        self.unacked: deque[SentBatch] = deque()
        #: Set while unacknowledged batches must be sent again before new ones.
        self.is_stalled = False
        #: When to give up; starts at the first failure after the last success.
        self.retry_deadline: Deadline | None = None
        self._next_sequence = 0
        self._is_known = False

    def __repr__(self) -> str:
        return f"<PartitionQueue {self.topic}[{self.partition}], {len(self.unacked)} unacknowledged>"

    @property
    def is_full(self) -> bool:
        return len(self.unacked) >= (UNACKED_MAX if self._is_known else 1)

    def admit(self, batch: bytearray, producer: ProducerIdAndEpoch, *, is_transactional: bool) -> SentBatch:
        """Assigns sequence numbers to the batch and keeps it until it is acknowledged."""
        assert not self.is_full, f"{self} has no room"
        count = _record_count(batch)
        set_producer_state(
            batch,
            producer_id=producer.id,
            producer_epoch=producer.epoch,
            base_sequence=self._next_sequence,
            is_transactional=is_transactional,
        )
        delivery = SentBatch(self.topic, self.partition, batch, self._next_sequence)
        self._next_sequence = (self._next_sequence + count) % SEQUENCE_NUMBERS
        self.unacked.append(delivery)
        return delivery

    def acknowledge(self, delivery: SentBatch, offset: int | None) -> None:
        delivery.is_acknowledged, delivery.offset = True, offset
        delivery.data = bytearray()  # frees the memory of the batch
        self._is_known = True
        # A batch may be acknowledged before an earlier one that was appended and answered with an error.
        while self.unacked and self.unacked[0].is_acknowledged:
            self.unacked.popleft()

    def waits_for_another(self, delivery: SentBatch) -> bool:
        """Whether an earlier batch is unacknowledged, so that this one is out of order."""
        return bool(self.unacked) and self.unacked[0] is not delivery

    def to_send_again(self) -> list[SentBatch]:
        return [delivery for delivery in self.unacked if not delivery.is_acknowledged]


def _record_count(batch: bytearray) -> int:
    """Raises ClientError for a batch that brokers refuse."""
    header = read_header(batch) if len(batch) >= BATCH_HEADER_BYTES else None
    if header is None or header.size != len(batch) or header.magic != 2:
        raise ClientError(f"{len(batch)} bytes are not one whole record batch of format 2")
    if header.record_count < 1 or header.record_count != header.last_offset_delta + 1:
        raise ClientError(
            f"a batch of {header.record_count} records over {header.last_offset_delta + 1} offsets cannot be sent"
        )
    return header.record_count


PRODUCE: Final = 0
IN_FLIGHT_MAX: Final = 5
_ACKS_ALL: Final = -1
#: Wait a little longer than the broker waits for replicas, to get its error.
_RESPONSE_GRACE_MS: Final = 2_000


class _InFlightRequest(NamedTuple):
    number: int
    queue: PartitionQueue
    delivery: SentBatch
    pending: PendingRequest


class _LeaderLink:
    """A connection to one leader, and its requests without a response."""

    def __init__(self, node_id: int, connection: Connection) -> None:
        self.node_id = node_id
        self.connection = connection
        self.sent: deque[_InFlightRequest] = deque()

    @property
    def is_full(self) -> bool:
        return len(self.sent) >= IN_FLIGHT_MAX


class InFlightBatches:
    """After it has raised, only `reset` makes it usable again: the fate of unacknowledged batches is unknown."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        transactional_id: str | None = None,
        version_max: int = produce.PRODUCER_VERSION_MAX,
    ) -> None:
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._version_max = version_max
        self._producer = ProducerIdAndEpoch()
        self._owner = os.getpid()
        self._queues: dict[TopicPartition, PartitionQueue] = {}
        self._stalled: dict[TopicPartition, PartitionQueue] = {}
        self._links: dict[int, _LeaderLink] = {}
        self._sent_count = 0
        self._retry_rounds = 0
        self._last_error: ClientError | None = None
        self.failure: ClientError | None = None

    def __repr__(self) -> str:
        return f"<InFlightBatches of {self._producer}, {self.unacknowledged} unacknowledged>"

    @property
    def unacknowledged(self) -> int:
        return sum(len(queue.unacked) for queue in self._queues.values())

    def reset(self, producer: ProducerIdAndEpoch, *, version_max: int = produce.PRODUCER_VERSION_MAX) -> None:
        """Continues in another epoch, and drops unacknowledged batches."""
        assert producer != self._producer, f"{producer} has sent before"
        if self._stalled or self.failure is not None:
            self.close()
        self._producer = producer
        self._version_max = version_max
        self._queues, self._stalled = {}, {}
        self.failure = None

    def close(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            link.connection.close()

    # Submitting

    def submit(self, topic: str, partition: int, batch: bytearray) -> SentBatch:
        """Sends a batch; waits while there is no room. Raises Unavailable, Refused, TopicChanged."""
        self._check_usable()
        queue = self._queue(topic, partition)
        while self._stalled or queue.is_full:
            self._step()
        is_transactional = self._transactional_id is not None
        delivery = queue.admit(batch, self._producer, is_transactional=is_transactional)
        self._transmit(queue, delivery)
        return delivery

    def drain(self) -> None:
        """Waits until all batches are acknowledged. Raises Unavailable, Refused, TopicChanged."""
        self._check_usable()
        while self.unacknowledged:
            self._step()

    def settle(self) -> bool:
        """Waits for pending responses without retries; returns whether all batches were acknowledged. Never raises."""
        while (link := self._oldest()) is not None:
            try:
                self._receive(link)
            except ClientError as error:
                self.failure = self.failure or error
        return self.failure is None and not self.unacknowledged

    def _check_usable(self) -> None:
        if self._owner != os.getpid():
            raise ClientError("a producer cannot be used in a forked process")
        if self.failure is not None:
            raise self.failure

    def _queue(self, topic: str, partition: int) -> PartitionQueue:
        known = self._queues.get((topic, partition))
        if known is None:
            known = PartitionQueue(topic, partition, self._topic_id(topic))
            self._queues[topic, partition] = known
        return known

    def _topic_id(self, topic: str) -> UUID | None:
        """Keeps the id of the first batch: a new topic of the same name would accept batches out of sequence."""
        siblings = (queue.topic_id for (name, _), queue in self._queues.items() if name == topic)
        return next(siblings, None) or self._cluster.await_topic(topic).id

    # Sending

    def _transmit(self, queue: PartitionQueue, delivery: SentBatch) -> None:
        """Sends a batch, unless it would be out of order. A batch that cannot be sent is sent again later."""
        try:
            link = self._link(queue)
            while link.is_full:
                self._receive(link)
                if queue.is_stalled:
                    return
            self._send(link, queue, delivery)
        except Unavailable as error:
            self._stall(queue, error)
        except (Refused, TopicChanged) as error:
            self._stall_or_fail(queue, error)
        except ClientError as error:
            self.failure = error
            raise

    def _link(self, queue: PartitionQueue) -> _LeaderLink:
        """Raises Unavailable, TopicChanged, Refused if there is no leader."""
        node_id = self._cluster.leader(queue.topic, queue.partition, queue.topic_id).leader_id
        link = self._links.get(node_id)
        if link is not None and not link.sent and not link.connection.is_usable:
            link.connection.close()
            link = None
        if link is None:
            link = self._links[node_id] = _LeaderLink(node_id, self._cluster.connect(node_id))
        return link

    def _send(self, link: _LeaderLink, queue: PartitionQueue, delivery: SentBatch) -> None:
        connection = link.connection
        newest = self._version_max if queue.topic_id is not None else TOPIC_IDS_FROM - 1
        version = connection.version(PRODUCE, min(newest, self._version_max), produce.PRODUCER_VERSION_MIN)
        is_by_id = version >= TOPIC_IDS_FROM and queue.topic_id is not None
        key = queue.topic_id.bytes if queue.topic_id is not None and is_by_id else queue.topic.encode()
        body = produce.encode_produce_request(
            version,
            key,
            queue.partition,
            delivery.data,
            transactional_id=self._transactional_id,
            acks=_ACKS_ALL,
            timeout_ms=self._cluster.settings.request_timeout_ms,
        )
        try:
            pending = connection.begin(PRODUCE, version, body)
        except Unavailable as error:
            self._close_link(link, error)
            raise
        self._sent_count += 1
        link.sent.append(_InFlightRequest(self._sent_count, queue, delivery, pending))

    # Responses

    def _step(self) -> None:
        """Receives one response, or sends stalled batches again. Raises permanent errors."""
        link = self._oldest()
        if link is not None:
            self._receive(link)
        else:
            self._recover()

    def _oldest(self) -> _LeaderLink | None:
        busy = [link for link in self._links.values() if link.sent]
        return min(busy, key=lambda link: link.sent[0].number, default=None)

    def _receive(self, link: _LeaderLink) -> None:
        """Receives the response to the oldest request of this connection. Raises permanent errors."""
        sent = link.sent[0]
        timeout_ms = self._cluster.settings.request_timeout_ms + _RESPONSE_GRACE_MS
        try:
            body = link.connection.finish(sent.pending, timeout_ms=timeout_ms)
            response = link.connection.decode(sent.pending, body)
            reply = _partition_response(link.connection, response, sent.queue)
        except Unavailable as error:
            self._close_link(link, error)
            return
        link.sent.popleft()
        self._settle(sent.queue, sent.delivery, reply)

    def _settle(self, queue: PartitionQueue, delivery: SentBatch, reply: Any) -> None:
        code = reply.error_code
        if code is ErrorCode.none:
            self._acknowledge(queue, delivery, int(reply.base_offset))
        elif code is ErrorCode.duplicate_sequence_number:
            self._acknowledge(queue, delivery, None)
        else:
            message = getattr(reply, "error_message", None)
            error = broker_error(code, f"{queue.topic}[{queue.partition}]", message)
            # After a refused batch all later ones are out of order, until it is sent again.
            if code is ErrorCode.out_of_order_sequence_number and queue.waits_for_another(delivery):
                self._stall(queue, error)
            else:
                self._stall_or_fail(queue, error)

    def _acknowledge(self, queue: PartitionQueue, delivery: SentBatch, offset: int | None) -> None:
        queue.acknowledge(delivery, offset)
        self._retry_rounds = 0
        queue.retry_deadline = self._new_retry_deadline() if queue.is_stalled else None

    def _new_retry_deadline(self) -> Deadline:
        return Deadline(self._cluster.settings.retry_deadline_ms)

    def _close_link(self, link: _LeaderLink, error: ClientError) -> None:
        """Closes the connection and stalls its partitions: the fate of its batches is unknown."""
        link.connection.close()
        if self._links.get(link.node_id) is link:
            del self._links[link.node_id]
        while link.sent:
            self._stall(link.sent.popleft().queue, error)

    # Sending again

    def _stall(self, queue: PartitionQueue, error: ClientError) -> None:
        self._last_error = error
        self._stalled[queue.topic, queue.partition] = queue
        queue.is_stalled = True
        queue.retry_deadline = queue.retry_deadline or self._new_retry_deadline()

    def _stall_or_fail(self, queue: PartitionQueue, error: Refused | TopicChanged) -> None:
        """Raises the error if a retry cannot help."""
        may_pass = isinstance(error, TopicChanged) or error.code in RETRIABLE_ERRORS
        is_of_topic = isinstance(error, TopicChanged) or error.code in UNKNOWN_TOPIC_ERRORS
        tried_ms = (
            0.0
            if queue.retry_deadline is None
            else queue.retry_deadline.timeout_ms - queue.retry_deadline.left_ms
        )
        if not may_pass or (is_of_topic and tried_ms > self._cluster.settings.unknown_topic_ms_max):
            self.failure = error
            raise error
        self._stall(queue, error)

    def _recover(self) -> None:
        """When no response is pending: waits, refreshes metadata, and sends unacknowledged batches again."""
        assert self._stalled, f"{self} waits for nothing"
        queues = list(self._stalled.values())
        self._wait_before_retry(queues)
        self._refresh_metadata({queue.topic for queue in queues})
        self._stalled = {}
        for queue in queues:
            queue.is_stalled = False
        for queue in queues:
            self._send_again(queue)

    def _wait_before_retry(self, queues: list[PartitionQueue]) -> None:
        """Raises Unavailable after the retry deadline."""
        for queue in queues:
            if queue.retry_deadline is not None and queue.retry_deadline.is_over:
                seconds = queue.retry_deadline.timeout_ms / 1000
                self.failure = Unavailable(
                    f"{queue.topic}[{queue.partition}] accepted no batch within {seconds:g} s: {self._last_error}"
                )
                raise self.failure
        time.sleep(self._cluster.backoff.delay_ms(self._retry_rounds, self._cluster.chance) / 1000)
        self._retry_rounds += 1

    def _refresh_metadata(self, topics: set[str]) -> None:
        for topic in topics:
            self._cluster.forget_topic(topic)
        # If this fails, each send fetches the metadata of its topic again.
        with suppress(Refused, Unavailable):
            self._cluster.learn_topics(topics)

    def _send_again(self, queue: PartitionQueue) -> None:
        for delivery in queue.to_send_again():
            if queue.is_stalled:
                return
            if not delivery.is_acknowledged:
                self._transmit(queue, delivery)


def _partition_response(connection: Connection, response: Any, queue: PartitionQueue) -> Any:
    """Raises Unavailable for a response about another partition."""
    partitions = [each for topic in response.responses for each in topic.partition_responses]
    if len(partitions) != 1 or int(partitions[0].index) != queue.partition:
        connection.close()
        raise Unavailable(
            f"{connection.peer} sent a response about another partition than {queue.topic}[{queue.partition}]"
        )
    return partitions[0]
