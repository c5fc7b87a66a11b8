"""Topics with a schedule at their leaders: intake of held records, and the mover that hands them over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cluster.topic_names import SCHEDULE
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import BatchHeader
from penstock.scheduling.intake import HeldBatch
from penstock.scheduling.schedule_log import (
    HeldRecord,
    ScheduleSource,
    SourcePosition,
    open_block,
    pack_block,
)
from penstock.scheduling.schedule_shard import FoundHeldBatch, HeldChunk, cut_chunks, resume_from
from simulation.disk import DiskFull
from simulation.replica import Key, Produce
from simulation.script import Ask, Steps, play

if TYPE_CHECKING:
    from simulation.network import Respond
    from simulation.node import Node
    from simulation.replica import Replica
    from simulation.simlog import Batch

SCHEDULED_TOPIC: Final = "later"
_CHUNK_BYTES: Final = 8
_READ_BATCHES_MAX: Final = 8


class Later(NamedTuple):
    """A record that is to be held until its time has come."""

    name: bytes
    due_ms: int


class Intake:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.movers: dict[Key, Mover] = {}
        node.services["schedule"] = self.received

    def leads(self, replica: Replica) -> None:
        if replica.topic == SCHEDULED_TOPIC:
            mover = self.movers[replica.key] = Mover(self.node, replica)
            self.node.after(1, mover.begin)

    def received(self, request: Produce, respond: Respond) -> None:
        try:
            self._take(request, respond)
        except ApiError as error:
            respond((error.code, None))
        except DiskFull:
            respond((ErrorCode.kafka_storage_error, None))

    def _take(self, request: Produce, respond: Respond) -> None:
        replica = self.node.replica(request.key)
        rules, mover = replica.require_leader(), self.movers.get(request.key)
        if mover is None or not mover.is_ready:
            raise ApiError(ErrorCode.not_leader_or_follower)
        if rules.is_below_min:
            raise ApiError(ErrorCode.not_enough_replicas)
        self.node.machine.disk.require_room()
        held = [value for value in request.values if isinstance(value, Later)]
        rest = tuple(None if isinstance(value, Later) else value for value in request.values)
        parted = request._replace(values=rest)
        if held and replica.repeated(parted) is None:
            replica.append((self._held(request, held),), is_control=True)
        replica.produce(parted, lambda error, base: respond((error, base)))

    def _held(self, request: Produce, held: list[Later]) -> HeldBatch:
        records = [HeldRecord(each.due_ms, each.name, 0, b"") for each in held]
        link = (request.producer_id, request.producer_epoch, request.sequence, len(request.values) - 1)
        now_ms = self.node.machine.clock.wall_ms()
        return HeldBatch(Codec.NONE, *link, now_ms, open_block(pack_block(records)))


class Mover:
    """Of one partition while it is led here in one epoch."""

    def __init__(self, node: Node, replica: Replica) -> None:
        self.node = node
        self.replica = replica
        self.source = ScheduleSource(replica.key.topic_id, replica.key.partition)
        self._rules = replica.require_leader()
        self._position: SourcePosition | None = None
        self._next = 0

    def __repr__(self) -> str:
        return f"<Mover of {self.replica.key} on {self.node.id} at {self._next}, {self._position} is saved>"

    @property
    def is_current(self) -> bool:
        return self.replica.leading is self._rules

    @property
    def is_ready(self) -> bool:
        return self.is_current and self._position is not None

    def begin(self) -> None:
        play(self.node, self._live())

    def _asked(self, operation: Any) -> Ask:
        key = self.node.cluster.partitions(SCHEDULE)[0]
        return Ask(key, "group", (key, lambda shard, token, _: operation(shard, token)))

    def _live(self) -> Steps:
        while self.is_current:
            if self._position is None:
                yield from self._find()
            else:
                yield from self._move_on()
            yield self.node.world.between(3, 25)

    def _find(self) -> Steps:
        reply = yield self._asked(lambda shard, token: shard.find(self.source, token))
        if not isinstance(reply, tuple) or not self.is_current:
            return
        if reply[0] is None:
            # Held records are taken from here on only, so there are none before.
            start = SourcePosition(self._rules.leader_epoch, self.replica.log.end_offset)
            reply = yield self._asked(lambda shard, token: shard.register(self.source, start, token))
        if isinstance(reply, tuple):
            self._go_on_from(reply[0])

    def _go_on_from(self, position: SourcePosition) -> None:
        self._position = position
        _, end = self.replica.end_of_epoch(position.epoch)
        # An unclean election may have taken away what the last leader had handed over.
        offset = end if 0 <= end < position.offset else position.offset
        self._next = max(offset, self.replica.log.start_offset)

    def _move_on(self) -> Steps:
        position = self._position
        assert position is not None
        found, next_offset = self.scan()
        if found:
            found = resume_from(position, found)
        for chunk in cut_chunks(found, _CHUNK_BYTES):
            is_taken = yield from self._send(chunk)
            if not is_taken:
                return
        self._next = max(self._next, next_offset)

    def scan(self) -> tuple[list[FoundHeldBatch], int]:
        """Held records count when the batch that they were taken from follows them, and both are committed."""
        log = self.replica.log
        batches = log.read(self._next, self.upto(), _READ_BATCHES_MAX)
        if log.is_damaged(batches):
            self.node.found_damage(self.replica)
            return [], self._next
        found: list[FoundHeldBatch] = []
        pending: Batch | None = None
        for batch in batches:
            if pending is not None and pending.payload[0].belongs_to(_header(pending), _header(batch)):
                at = SourcePosition(pending.epoch, pending.base_offset)
                found.append(
                    FoundHeldBatch(at, SourcePosition(batch.epoch, batch.next_offset), pending.payload[0])
                )
            pending = batch if batch.is_control else None
        next_offset = batches[-1].next_offset if batches else self._next
        return found, next_offset if pending is None else pending.base_offset

    def upto(self) -> int:
        return self.replica.log.last_stable_offset

    def _send(self, chunk: HeldChunk) -> Steps:
        expected = self._position
        reply = yield self._asked(lambda shard, token: shard.take(self.source, expected, chunk, token))
        if not isinstance(reply, tuple) or not self.is_current:
            return False
        if reply[0] is None:
            self._position = None  # the shard has forgotten the source: begin anew
            return False
        if reply[0] == chunk.position:
            self.taken(reply[0])
            return True
        self._go_on_from(reply[0])
        return False

    def taken(self, position: SourcePosition) -> None:
        """Should the next chunk fail, what was taken is not looked at again."""
        self._position = position
        self._next = max(self._next, position.offset)


def _header(batch: Batch) -> BatchHeader:
    """As much of a header as tells whether two batches belong together."""
    return BatchHeader(
        base_offset=batch.base_offset,
        length=0,
        leader_epoch=batch.epoch,
        magic=2,
        crc=0,
        attributes=0x20 if batch.is_control else 0,
        last_offset_delta=batch.next_offset - batch.base_offset - 1,
        base_timestamp=0,
        max_timestamp=0,
        producer_id=batch.producer_id,
        producer_epoch=batch.producer_epoch,
        base_sequence=batch.sequence,
        record_count=sum(value is not None for value in batch.payload),
    )


def with_schedule(node: Node) -> None:
    """What every process of a world with a schedule has."""
    node.on_lead.append(Intake(node).leads)
