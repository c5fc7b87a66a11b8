"""Kill points: a member of a share group that dies, or whose connection does, at a chosen place of the protocol.

A member is a connection with frames made by hand, so that it can end within a frame. It ends with a reset, as that of
a process that was killed does. No other member may get what it may have got before.
"""

import collections
import contextlib
import itertools
import random
import socket
import struct
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from kio.schema.errors import ErrorCode
from tests.chaos.share.journals import RecordPosition
from tests.compat.raw import RawConnection, framed, schema

TIMEOUT_S = 60.0
WAIT_MS = 300
RECORDS = 4
RETURNING = 0.3  # of members have the name of one that died
EMPTY_BYTES = 150  # a reply without records is not larger
ACCEPT, RELEASE, REJECT = 1, 2, 3

BEFORE, IN_FETCH, FETCH_SENT, IN_REPLY = (
    "before the fetch",
    "within the fetch",
    "fetch sent",
    "within the reply",
)
GOT, IN_ACK, ACK_SENT, ACKED = (
    "before acknowledging",
    "within the acknowledgement",
    "acknowledgement sent",
    "after the acknowledgement",
)
#: Points after which it is known what the broker knows.
DEFINITE = {BEFORE: 4, IN_FETCH: 8, IN_REPLY: 30, GOT: 20, IN_ACK: 15, ACKED: 15, FETCH_SENT: 15}
ALL = {**DEFINITE, ACK_SENT: 20}
NO_KILL = "none"


class Report(NamedTuple):
    """What came of a member. `is_hit`: it died where it was to die, which takes records to be given."""

    point: str
    is_hit: bool
    received: tuple[RecordPosition, ...] = ()
    confirmed: int = 0  # accepted, and told that this is stored
    doubtful: int = 0  # accepted, and never told
    again: tuple[
        RecordPosition, ...
    ] = ()  # handed out with a delivery count that says that it was not for the first time


class Target(NamedTuple):
    address: tuple[str, int]
    group: str
    topic_id: uuid.UUID
    partition: int


class Broken(Exception):
    """The broker did not answer as it does when it is well: nothing that the member did."""


_numbers = itertools.count()
_dead: collections.deque[str] = collections.deque(maxlen=50)


def _take_name(chance: random.Random) -> str:
    """Some come back from the dead."""
    with contextlib.suppress(IndexError):
        if chance.random() < RETURNING:
            return _dead.popleft()
    return f"member-{next(_numbers)}-{chance.randrange(1 << 32):x}"


class Member:
    def __init__(self, link: socket.socket, target: Target, chance: random.Random) -> None:
        self._link = link
        self._raw = RawConnection(link)
        self._target = target
        self._chance = chance
        self.name = _take_name(chance)

    def live(self, point: str) -> Report:
        """Up to its end at this point."""
        if point == BEFORE:
            return Report(point, True)
        request = self._fetch(0)
        frame = framed(request)
        if point == IN_FETCH:
            self._raw.send(frame[: self._chance.randrange(1, len(frame))])
            return Report(point, True)
        self._raw.send(frame)
        if point == FETCH_SENT:
            return Report(point, True)
        if point == IN_REPLY:
            return self._lose_reply(point)
        return self._receive(point, request)

    def _lose_reply(self, point: str) -> Report:
        size = struct.unpack(">i", self._exactly(4))[0]
        self._exactly(self._chance.randrange(size))
        return Report(point, size > EMPTY_BYTES)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._link.recv(count - len(data))
            if not piece:
                raise Broken("closed within a reply")
            data += piece
        return data

    def _receive(self, point: str, request: Any) -> Report:
        ranges = _acquired(self._raw.answer(request))
        received = tuple(
            RecordPosition(self._target.partition, offset)
            for first, last, _ in ranges
            for offset in range(first, last + 1)
        )
        again = tuple(
            RecordPosition(self._target.partition, first) for first, _, count in ranges if count != 1
        )
        report = Report(point, bool(ranges), received, again=again)
        if not ranges or point == GOT:
            return report
        return self._acknowledge(point, ranges, report)

    def _acknowledge(self, point: str, ranges: list[tuple[int, int, int]], report: Report) -> Report:
        """What it says makes no difference but to what is counted."""
        said = ACCEPT if point == NO_KILL else self._chance.choices((ACCEPT, RELEASE, REJECT), (8, 1, 1))[0]
        request = self._answer_to(ranges, said)
        frame = framed(request)
        if point == IN_ACK:
            self._raw.send(frame[: self._chance.randrange(1, len(frame))])
            return report
        accepted = len(report.received) if said == ACCEPT else 0
        self._raw.send(frame)
        if point == ACK_SENT:
            return report._replace(doubtful=accepted)
        try:
            answer = self._raw.answer(request)
        except (OSError, AssertionError):
            return report._replace(is_hit=False, doubtful=accepted)
        if _is_stored(answer):
            return report._replace(confirmed=accepted)
        return report._replace(is_hit=False, doubtful=accepted)

    def _fetch(self, epoch: int) -> Any:
        part = schema("share_fetch", 1, "FetchPartition")(
            partition_index=self._target.partition, acknowledgement_batches=()
        )
        topic = schema("share_fetch", 1, "FetchTopic")(topic_id=self._target.topic_id, partitions=(part,))
        return schema("share_fetch", 1, "ShareFetchRequest")(
            group_id=self._target.group,
            member_id=self.name,
            share_session_epoch=epoch,
            max_wait=timedelta(milliseconds=WAIT_MS),
            min_bytes=1,
            max_bytes=1 << 20,
            max_records=RECORDS,
            batch_size=RECORDS,
            topics=(topic,),
            forgotten_topics_data=(),
        )

    def _answer_to(self, ranges: list[tuple[int, int, int]], said: int) -> Any:
        api = "share_acknowledge"
        batches = tuple(
            schema(api, 1, "AcknowledgementBatch")(
                first_offset=first, last_offset=last, acknowledge_types=(said,)
            )
            for first, last, _ in ranges
        )
        part = schema(api, 1, "AcknowledgePartition")(
            partition_index=self._target.partition, acknowledgement_batches=batches
        )
        topic = schema(api, 1, "AcknowledgeTopic")(topic_id=self._target.topic_id, partitions=(part,))
        return schema(api, 1, "ShareAcknowledgeRequest")(
            group_id=self._target.group, member_id=self.name, share_session_epoch=1, topics=(topic,)
        )


def _acquired(answer: Any) -> list[tuple[int, int, int]]:
    """First, last, delivery count."""
    if answer.error_code is not ErrorCode.none:
        raise Broken(answer.error_code.name)
    parts = [part for topic in answer.responses for part in topic.partitions]
    for part in parts:
        if part.error_code is not ErrorCode.none:
            raise Broken(part.error_code.name)
    return [
        (one.first_offset, one.last_offset, one.delivery_count)
        for part in parts
        for one in part.acquired_records
    ]


def _is_stored(answer: Any) -> bool:
    parts = [part for topic in answer.responses for part in topic.partitions]
    return answer.error_code is ErrorCode.none and all(part.error_code is ErrorCode.none for part in parts)


@contextlib.contextmanager
def member(target: Target, chance: random.Random) -> Iterator[Member]:
    """One life: in the end its connection is reset, whatever is on its way."""
    with socket.create_connection(target.address, timeout=TIMEOUT_S) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one = Member(link, target, chance)
        try:
            yield one
        finally:
            link.close()
            _dead.append(one.name)
