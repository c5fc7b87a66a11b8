"""Members of a share group that say something of every record they get, and the records for them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import uuid4

from kio.schema.share_group_heartbeat.v1 import request as heartbeat
from kio.schema.share_group_heartbeat.v1 import response as heartbeat_response

from benchmarks.load.acknowledgements import Dice, Mix
from benchmarks.load.processes import Phase, Slot
from benchmarks.load.raw import ProducePlan, Stream
from benchmarks.wire.raw_client import Address, BrokerError, Connection, Topic
from benchmarks.wire.share_frames import (
    Acquired,
    Outcomes,
    ShareWriter,
    check_share_acknowledge,
    read_share_fetch,
)

#: As much as the standard client takes at once.
RECORDS_MAX = 500
_WAIT_MS = 500
#: Long polls in a row that bring nothing: everything has been worked off.
_EMPTY_MAX = 3
_JOIN_S = 60.0
_RETRIABLE = frozenset((14, 15, 16))


class Joined(NamedTuple):
    member: str
    partitions: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePlan:
    address: Address
    group: str
    topic: Topic
    joined: Joined
    mix: Mix
    seed: int
    #: Whether outcomes go with the next fetch, or in a request of their own before it.
    piggybacks: bool


class Worked(NamedTuple):
    """(partition, first offset, outcomes) of everything that was acknowledged."""

    said: list[tuple[int, int, bytes]]


class _Worker:
    def __init__(self, plan: SharePlan) -> None:
        self._connection = Connection(plan.address)
        self._writer = ShareWriter(
            plan.group, plan.joined.member, plan.topic.id, records_max=RECORDS_MAX, wait_ms=_WAIT_MS
        )
        self._dice = Dice(plan.mix, plan.seed)
        self._piggybacks = plan.piggybacks
        self._held: dict[int, list[Acquired]] = {partition: [] for partition in plan.joined.partitions}
        self.said: list[tuple[int, int, bytes]] = []
        self.requests = self.acknowledged = 0

    def turn(self) -> bool:
        """Say something of all that is held, and get more; whether there was more."""
        said = self._decide()
        if not self._piggybacks and any(said.values()):
            self._acknowledge(said)
            said = {}
        self._connection.send(self._writer.fetch(said))
        self._held = read_share_fetch(self._connection.read_frame())
        self._note(said)
        return any(self._held.values())

    def finish(self) -> None:
        self._acknowledge(self._decide(), is_last=True)

    def _acknowledge(self, said: dict[int, list[Outcomes]], *, is_last: bool = False) -> None:
        self._connection.send(self._writer.acknowledge(said, is_last=is_last))
        check_share_acknowledge(self._connection.read_frame())
        self._note(said)

    def _decide(self) -> dict[int, list[Outcomes]]:
        throw = self._dice.throw
        return {
            partition: [Outcomes(first, throw(last - first + 1)) for first, last in runs]
            for partition, runs in self._held.items()
        }

    def _note(self, said: dict[int, list[Outcomes]]) -> None:
        self.requests += 1
        for partition, rows in said.items():
            for first, types in rows:
                self.said.append((partition, first, types))
                self.acknowledged += len(types)


def work(slot: Slot, plan: SharePlan) -> Worked:
    worker = _Worker(plan)
    slot.set_ready()
    slot.wait_for(Phase.RUN)
    empty = 0
    while slot.phase < Phase.STOP:
        empty = 0 if worker.turn() else empty + 1
        if empty >= _EMPTY_MAX:
            raise BrokerError(f"{plan.topic.name}: no more records after {worker.acknowledged}")
        slot.publish(worker.requests, worker.acknowledged)
    worker.finish()
    return Worked(worker.said)


def join(connection: Connection, group: str, topic: Topic, members: int, partitions: int) -> list[Joined]:
    """Members of a share group, once all of them have their partitions."""
    joining = [_Joining(connection, group, topic) for _ in range(members)]
    deadline = time.monotonic() + _JOIN_S
    while time.monotonic() < deadline:
        for member in joining:
            member.beat()
        held = [index for member in joining for index in member.partitions]
        wanted = max(members, partitions)
        if (
            len({member.epoch for member in joining}) == 1
            and len(held) == wanted
            and set(held) == {*range(partitions)}
        ):
            return [Joined(member.id, member.partitions) for member in joining]
        time.sleep(0.05)
    raise BrokerError(f"share group {group}: members have {held} after {_JOIN_S:.0f} s")


class _Joining:
    """Its session outlasts a run, so that it is silent in it."""

    def __init__(self, connection: Connection, group: str, topic: Topic) -> None:
        self.id = str(uuid4())
        self.epoch = 0
        self.partitions: tuple[int, ...] = ()
        self._connection, self._group, self._topic = connection, group, topic

    def beat(self) -> None:
        request = heartbeat.ShareGroupHeartbeatRequest(
            group_id=self._group,
            member_id=self.id,
            member_epoch=self.epoch,
            subscribed_topic_names=None if self.epoch else (self._topic.name,),
        )
        answer = self._connection.call(request, heartbeat_response.ShareGroupHeartbeatResponse)
        if answer.error_code.value in _RETRIABLE:
            return
        if answer.error_code.value:
            raise BrokerError(f"share group heartbeat: {answer.error_code.name} {answer.error_message}")
        self.epoch = answer.member_epoch
        if answer.assignment is not None:
            self.partitions = tuple(
                int(index) for topic in answer.assignment.topic_partitions for index in topic.partitions
            )


def leave(connection: Connection, group: str, joined: Sequence[Joined]) -> None:
    for member in joined:
        request = heartbeat.ShareGroupHeartbeatRequest(
            group_id=group, member_id=member.member, member_epoch=-1, subscribed_topic_names=None
        )
        connection.call(request, heartbeat_response.ShareGroupHeartbeatResponse)


def fill(topic: Topic, batch: bytes, batch_records: int, records: int) -> dict[int, int]:
    """At least so many records, evenly over the partitions; returns the end of each partition."""
    ((address, partitions),) = topic.leaders.items()
    window = 4 * len(partitions)
    plan = ProducePlan(
        address=address,
        topic=topic.name,
        partitions=partitions,
        batch=batch,
        batch_records=batch_records,
        connections=1,
        window=window,
        lag_records_max=None,
    )
    stream = Stream(plan)
    each = -(-records // batch_records // len(partitions))
    left = each * len(partitions)
    while left or stream.in_flight:
        if count := min(window - stream.in_flight, left):
            stream.send(count)
            left -= count
        stream.receive()
    return dict.fromkeys(partitions, each * batch_records)
