"""Batches of an idempotent producer on their way to leaders: several at a time, each once, in order.

While all goes well, answers are read only when there is no room for more. When a connection breaks or a batch is
refused for a reason that passes, everything under way is waited for first; then each partition concerned sends what is
not acknowledged again, to whoever leads it by then.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.client.cluster import Cluster
from penstock.client.connection import Connection, Ticket
from penstock.client.errors import ClientError, Refused, TopicChanged, Unavailable, refusal
from penstock.client.metadata import Place
from penstock.client.remedies import REMEDIES, UNKNOWN_TOPIC
from penstock.client.retrying import Deadline
from penstock.client.sequencing import Delivery, Lane, Producer
from penstock.protocol import client_produce
from penstock.protocol.errors import ErrorCode
from penstock.protocol.produce import TOPIC_IDS_FROM

PRODUCE: Final = 0
IN_FLIGHT_MAX: Final = 5
_ACKS_ALL: Final = -1
#: A broker that gives up waiting for replicas says so, if it is waited for a little longer.
_GRACE_MS: Final = 2_000


class _Sent(NamedTuple):
    number: int
    lane: Lane
    delivery: Delivery
    ticket: Ticket


class _Line:
    """A connection to one leader, and what was sent on it and not answered yet."""

    def __init__(self, node_id: int, connection: Connection) -> None:
        self.node_id = node_id
        self.connection = connection
        self.sent: deque[_Sent] = deque()

    @property
    def is_full(self) -> bool:
        return len(self.sent) >= IN_FLIGHT_MAX


class Pipeline:
    """Once it has raised, only `reset` makes it usable again: what became of unacknowledged batches is not known."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        transactional_id: str | None = None,
        version_max: int = client_produce.NEWEST,
    ) -> None:
        self._cluster = cluster
        self._transactional_id = transactional_id
        self._version_max = version_max
        self._producer = Producer()
        self._owner = os.getpid()
        self._lanes: dict[Place, Lane] = {}
        self._stalled: dict[Place, Lane] = {}
        self._lines: dict[int, _Line] = {}
        self._sent_count = 0
        self._rounds = 0
        self._trouble: ClientError | None = None
        self.failure: ClientError | None = None

    def __repr__(self) -> str:
        return f"<Pipeline of {self._producer}, {self.unacknowledged} unacknowledged>"

    @property
    def unacknowledged(self) -> int:
        return sum(len(lane.unacked) for lane in self._lanes.values())

    def reset(self, producer: Producer, *, version_max: int = client_produce.NEWEST) -> None:
        """Begin anew in another epoch; what is not acknowledged is let go."""
        assert producer != self._producer, f"{producer} has sent before"
        if self._stalled or self.failure is not None:
            self.close()
        self._producer = producer
        self._version_max = version_max
        self._lanes, self._stalled = {}, {}
        self.failure = None

    def close(self) -> None:
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.connection.close()

    # What users do

    def submit(self, topic: str, partition: int, batch: bytearray) -> Delivery:
        """Send it, or wait for room to. Raises Unavailable, Refused, TopicChanged."""
        self._check_usable()
        lane = self._lane(topic, partition)
        while self._stalled or lane.is_full:
            self._step()
        is_transactional = self._transactional_id is not None
        delivery = lane.admit(batch, self._producer, is_transactional=is_transactional)
        self._transmit(lane, delivery)
        return delivery

    def drain(self) -> None:
        """Wait until all is acknowledged. Raises Unavailable, Refused, TopicChanged."""
        self._check_usable()
        while self.unacknowledged:
            self._step()

    def settle(self) -> bool:
        """Wait for the answers to what was sent, and send nothing again; returns whether all was acknowledged.

        Raises nothing: it is for who gives up what was not acknowledged.
        """
        while (line := self._oldest()) is not None:
            try:
                self._receive(line)
            except ClientError as error:
                self.failure = self.failure or error
        return self.failure is None and not self.unacknowledged

    def _check_usable(self) -> None:
        if self._owner != os.getpid():
            raise ClientError("a producer cannot be used by a process that was forked from its own")
        if self.failure is not None:
            raise self.failure

    def _lane(self, topic: str, partition: int) -> Lane:
        known = self._lanes.get((topic, partition))
        if known is None:
            known = Lane(topic, partition, self._topic_id(topic))
            self._lanes[topic, partition] = known
        return known

    def _topic_id(self, topic: str) -> UUID | None:
        """A later topic of the same name would take the batches out of sequence: so the id is held on to."""
        siblings = (lane.topic_id for (name, _), lane in self._lanes.items() if name == topic)
        return next(siblings, None) or self._cluster.await_topic(topic).id

    # Sending

    def _transmit(self, lane: Lane, delivery: Delivery) -> None:
        """Send it, unless that would be out of order; what cannot be sent is sent again later."""
        try:
            line = self._line(lane)
            while line.is_full:
                self._receive(line)
                if lane.is_stalled:
                    return
            self._send(line, lane, delivery)
        except Unavailable as error:
            self._stall(lane, error)
        except (Refused, TopicChanged) as error:
            self._stall_or_fail(lane, error)
        except ClientError as error:
            self.failure = error
            raise

    def _line(self, lane: Lane) -> _Line:
        """Raises Unavailable; Refused where nobody leads; TopicChanged."""
        node_id = self._cluster.leader(lane.topic, lane.partition, lane.topic_id).leader_id
        line = self._lines.get(node_id)
        if line is not None and not line.sent and not line.connection.is_usable:
            line.connection.close()
            line = None
        if line is None:
            line = self._lines[node_id] = _Line(node_id, self._cluster.connect(node_id))
        return line

    def _send(self, line: _Line, lane: Lane, delivery: Delivery) -> None:
        connection = line.connection
        newest = self._version_max if lane.topic_id is not None else TOPIC_IDS_FROM - 1
        version = connection.version(PRODUCE, min(newest, self._version_max), client_produce.OLDEST)
        is_by_id = version >= TOPIC_IDS_FROM and lane.topic_id is not None
        key = lane.topic_id.bytes if lane.topic_id is not None and is_by_id else lane.topic.encode()
        body = client_produce.encode_client_produce(
            version,
            key,
            lane.partition,
            delivery.data,
            transactional_id=self._transactional_id,
            acks=_ACKS_ALL,
            timeout_ms=self._cluster.settings.request_timeout_ms,
        )
        try:
            ticket = connection.begin(PRODUCE, version, body)
        except Unavailable as error:
            self._break(line, error)
            raise
        self._sent_count += 1
        line.sent.append(_Sent(self._sent_count, lane, delivery, ticket))

    # Hearing what became of it

    def _step(self) -> None:
        """Come a little nearer to where all is acknowledged. Raises what ends this."""
        line = self._oldest()
        if line is not None:
            self._receive(line)
        else:
            self._recover()

    def _oldest(self) -> _Line | None:
        busy = [line for line in self._lines.values() if line.sent]
        return min(busy, key=lambda line: line.sent[0].number, default=None)

    def _receive(self, line: _Line) -> None:
        """The answer to the oldest on this line. Raises what ends this."""
        sent = line.sent[0]
        timeout_ms = self._cluster.settings.request_timeout_ms + _GRACE_MS
        try:
            body = line.connection.finish(sent.ticket, timeout_ms=timeout_ms)
            answer = line.connection.decode(sent.ticket, body)
            told = _told(line.connection, answer, sent.lane)
        except Unavailable as error:
            self._break(line, error)
            return
        line.sent.popleft()
        self._settle(sent.lane, sent.delivery, told)

    def _settle(self, lane: Lane, delivery: Delivery, told: Any) -> None:
        code = told.error_code
        if code is ErrorCode.none:
            self._acknowledge(lane, delivery, int(told.base_offset))
        elif code is ErrorCode.duplicate_sequence_number:
            self._acknowledge(lane, delivery, None)
        else:
            message = getattr(told, "error_message", None)
            error = refusal(code, f"{lane.topic}[{lane.partition}]", message)
            # Behind one that was refused everything is out of order, and will not be when that is there.
            if code is ErrorCode.out_of_order_sequence_number and lane.waits_for_another(delivery):
                self._stall(lane, error)
            else:
                self._stall_or_fail(lane, error)

    def _acknowledge(self, lane: Lane, delivery: Delivery, offset: int | None) -> None:
        lane.acknowledge(delivery, offset)
        self._rounds = 0
        lane.patience = self._patience() if lane.is_stalled else None

    def _patience(self) -> Deadline:
        return Deadline(self._cluster.settings.retry_deadline_ms)

    def _break(self, line: _Line, error: ClientError) -> None:
        """Nobody knows what became of what was sent on it."""
        line.connection.close()
        if self._lines.get(line.node_id) is line:
            del self._lines[line.node_id]
        while line.sent:
            self._stall(line.sent.popleft().lane, error)

    # Sending again

    def _stall(self, lane: Lane, error: ClientError) -> None:
        self._trouble = error
        self._stalled[lane.topic, lane.partition] = lane
        lane.is_stalled = True
        lane.patience = lane.patience or self._patience()

    def _stall_or_fail(self, lane: Lane, error: Refused | TopicChanged) -> None:
        """Raises the error where sending again cannot help."""
        may_pass = isinstance(error, TopicChanged) or error.code in REMEDIES
        is_of_topic = isinstance(error, TopicChanged) or error.code in UNKNOWN_TOPIC
        tried_ms = 0.0 if lane.patience is None else lane.patience.timeout_ms - lane.patience.left_ms
        if not may_pass or (is_of_topic and tried_ms > self._cluster.settings.unknown_topic_ms_max):
            self.failure = error
            raise error
        self._stall(lane, error)

    def _recover(self) -> None:
        """Nothing is under way: rest, look who leads, and send again what is not acknowledged."""
        assert self._stalled, f"{self} waits for nothing"
        lanes = list(self._stalled.values())
        self._rest(lanes)
        self._look_around({lane.topic for lane in lanes})
        self._stalled = {}
        for lane in lanes:
            lane.is_stalled = False
        for lane in lanes:
            self._send_again(lane)

    def _rest(self, lanes: list[Lane]) -> None:
        """Raises Unavailable when it was long enough."""
        for lane in lanes:
            if lane.patience is not None and lane.patience.is_over:
                seconds = lane.patience.timeout_ms / 1000
                self.failure = Unavailable(
                    f"{lane.topic}[{lane.partition}] took no batch within {seconds:g} s: {self._trouble}"
                )
                raise self.failure
        time.sleep(self._cluster.backoff.delay_ms(self._rounds, self._cluster.chance) / 1000)
        self._rounds += 1

    def _look_around(self, topics: set[str]) -> None:
        for topic in topics:
            self._cluster.forget_topic(topic)
        # Whoever cannot be heard of now is asked for once more, one by one.
        with suppress(Refused, Unavailable):
            self._cluster.learn_topics(topics)

    def _send_again(self, lane: Lane) -> None:
        for delivery in lane.to_send_again():
            if lane.is_stalled:
                return
            if not delivery.is_acknowledged:
                self._transmit(lane, delivery)


def _told(connection: Connection, answer: Any, lane: Lane) -> Any:
    """Raises Unavailable for an answer about something else."""
    partitions = [each for topic in answer.responses for each in topic.partition_responses]
    if len(partitions) != 1 or int(partitions[0].index) != lane.partition:
        connection.close()
        raise Unavailable(
            f"{connection.peer} answered about something else than {lane.topic}[{lane.partition}]"
        )
    return partitions[0]
