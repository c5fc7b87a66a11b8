"""Writes the dead letters of one share partition, one plan at a time: read the records, store the plan, append the
dead letters, settle the plan.

An open plan is left over from an earlier leader, or from an append that timed out. The writer repeats it with the same
producer id and sequence, so that nothing is appended twice. If a record was deleted meanwhile, its dead letter is
written without it, because the number of records in a plan never changes. The dead-letter topic is created when the
first dead letter needs it, with the partition count and replication factor of the source topic. Source records are
read from the leader of their partition at the time when the dead letters are written. The leader verifies them: if its
copy is damaged, another replica leads soon, and the read is repeated. If it is the only copy in sync, the dead letters
of the damaged records are written without them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.config.effective_settings import node_layers
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.image import ResourceType
from penstock.cluster.topic_names import is_internal
from penstock.cluster.topic_settings import effective_topic_setting
from penstock.groups.share.state.dead_letters import (
    RECORD_DAMAGED,
    RECORD_GONE,
    DeadLetterBatch,
    SourceRecord,
    SourceScan,
    UnreadableSourceRecord,
    each_with_cause,
    offsets_with_cause,
    ranges_with_cause,
)
from penstock.groups.share.state.share_state import StateRange, first_offsets, offset_count
from penstock.groups.share.state.share_state_records import (
    DeadLetterPlan,
    DeadLetterProducer,
    DeadLetterTarget,
    OffsetInterval,
    SettledPlan,
    offset_intervals,
)
from penstock.log.validation import read_intact
from penstock.protocol.compression import BytesLike
from penstock.protocol.dead_letter_headers import DEAD_LETTER_TOPIC_SETTINGS, dead_letter_retention_ms
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.coordinators.runtime.runtime import ActiveShard
    from penstock.broker.coordinators.runtime.sharded_coordinator import CoordinatorContext
    from penstock.broker.coordinators.share.dead_letters import DeadLetterManager
    from penstock.broker.environment import PeerCalls
    from penstock.broker.partition.idempotent_append import PlannedAppends
    from penstock.broker.partition.partition import Partition
    from penstock.cluster.image import ClusterImage, PartitionState, TopicState
    from penstock.groups.share.state.share_state import SharePartitionKey
    from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard
    from penstock.groups.share.state.stored_share_state import DeadLetterView


#: A dead letter may be this much larger than the largest record of its source, because of its headers.
_HEADERS_BYTES_MAX: Final = 64 << 10
_MAX_MESSAGE_BYTES: Final = "max.message.bytes"
_RETENTION_MS: Final = "retention.ms"


#: Bytes to read at a time. Reads return whole batches, so one may be larger.
_READ_BYTES: Final = 1 << 20
_READ_TIMEOUT_S: Final = 5.0
#: How many damaged records to find at a time, each with a read of its own.
_DAMAGED_MAX: Final = 100
_NO_SESSION: Final = -1
_OFFSET_MAX: Final = 1 << 62

#: Receives records, and may return the offset from which on it does not want any more.
CollectRecords = Callable[[Iterable[SourceRecord | UnreadableSourceRecord]], int | None]


class SourceRead(NamedTuple):
    """How far the log was read: a wanted offset below `seen_upto` that was not collected has no record.

    Below `start_offset` the record was deleted.
    """

    start_offset: int
    seen_upto: int


class _LogPiece(NamedTuple):
    data: BytesLike
    start_offset: int
    is_beyond_end: bool = False


class DeadLetterLogs:
    """Reads source records, creates dead-letter topics and appends to them, wherever the leaders are."""

    def __init__(
        self, context: CoordinatorContext, *, appends: PlannedAppends, peers: Callable[[], PeerCalls]
    ) -> None:
        self._settings = context.settings
        self._metadata = context.metadata
        self._partitions = context.partitions
        self._create_topics = context.create_topics
        self._peers = peers
        self.environment = context.environment
        self.appends = appends

    @property
    def image(self) -> ClusterImage:
        return self._metadata.image

    async def ensure_topic(self, name: str, source: TopicState) -> TopicState:
        """Raises ApiError if the topic does not exist and cannot be created."""
        if is_internal(name):
            raise ApiError(ErrorCode.invalid_topic_exception, f"{name} is an internal topic")
        if name == source.name:
            # The group would receive its own dead letters, and reject them again, endlessly.
            raise ApiError(ErrorCode.invalid_topic_exception, f"{name} is the source topic")
        if name not in self.image.topics:
            (result,) = await self._create_topics([self._new_topic(name, source)])
            if result.error not in (ErrorCode.none, ErrorCode.topic_already_exists):
                raise ApiError(result.error, result.message)
        found = self.image.topics.get(name)
        if found is None:
            raise ApiError(ErrorCode.leader_not_available, f"{name} is being created")
        return found

    def batch_bytes_max(self, name: str) -> int:
        """The largest batch that a topic accepts."""
        return self._topic_setting(name, _MAX_MESSAGE_BYTES)

    def _topic_setting(self, name: str, setting: str) -> int:
        """The effective value of a topic setting."""
        own = self.image.config(ResourceType.TOPIC, name)
        found = effective_topic_setting(setting, own, node_layers(self._settings, self.image)).value
        assert isinstance(found, int)
        return found

    def _new_topic(self, name: str, source: TopicState) -> NewTopic:
        replicas = min(len(partition.replicas) for partition in source.partitions.values())
        largest = self.batch_bytes_max(source.name) + _HEADERS_BYTES_MAX
        kept_ms = dead_letter_retention_ms(self._topic_setting(source.name, _RETENTION_MS))
        return NewTopic(
            name=name,
            partitions=len(source.partitions),
            replication_factor=min(
                replicas, len(self.image.brokers)
            ),  # includes brokers that are down for now
            configs=(
                (_MAX_MESSAGE_BYTES, str(largest)),
                (_RETENTION_MS, str(kept_ms)),
                *DEAD_LETTER_TOPIC_SETTINGS.items(),
            ),
        )

    async def read(
        self, topic: TopicState, index: int, wanted: Sequence[StateRange], collect: CollectRecords
    ) -> SourceRead:
        """Read one chunk of the log, with at least one of the `wanted` offsets, which are sorted.

        `collect` is called in a thread. Raises ApiError: a transient error, or UNKNOWN_TOPIC_OR_PARTITION.
        """
        offset, last = wanted[0][0], wanted[-1][1]
        try:
            piece = await self._read_source(topic, index, offset)
        except ApiError as error:
            if error.code is not ErrorCode.corrupt_message:
                raise
            damaged = await self._damaged_from(topic, index, wanted)
            stopped_at = collect(damaged)
            return SourceRead(offset, damaged[-1].offset + 1 if stopped_at is None else stopped_at)
        if piece.is_beyond_end:
            # An unclean election has truncated records that were delivered.
            return SourceRead(_OFFSET_MAX, _OFFSET_MAX)
        if offset < piece.start_offset:
            return SourceRead(piece.start_offset, min(piece.start_offset, last + 1))
        scan = SourceScan(piece.data, wanted, self._settings.integer("penstock.decompress.max.bytes"))
        stopped_at = await self.environment.in_thread(collect, scan)
        seen_upto = scan.seen_upto if stopped_at is None else stopped_at
        if seen_upto <= offset:
            # The leader has verified its copy, so the bytes have changed on the way.
            raise ApiError(ErrorCode.corrupt_message, f"no whole batch at {offset} of {topic.name}-{index}")
        return SourceRead(piece.start_offset, seen_upto)

    async def _damaged_from(
        self, topic: TopicState, index: int, wanted: Sequence[StateRange]
    ) -> list[UnreadableSourceRecord]:
        """Return the damaged ones among the first wanted records, of which at least the first is damaged.

        The leader is asked for each, because only it knows where the damage ends.
        """
        damaged: list[UnreadableSourceRecord] = []
        for offset, cause in islice(each_with_cause(wanted), _DAMAGED_MAX):
            if damaged:
                try:
                    await self._read_source(topic, index, offset)
                except ApiError as error:
                    if error.code is not ErrorCode.corrupt_message:
                        break
                else:
                    break
            damaged.append(UnreadableSourceRecord(offset, cause, RECORD_DAMAGED))
        return damaged

    async def _read_source(self, topic: TopicState, index: int, offset: int) -> _LogPiece:
        """Raises ApiError; CORRUPT_MESSAGE if the record is damaged in the only copy in sync."""
        state = self.image.partition(topic.name, index)
        if state is None or self.image.topics[topic.name].id != topic.id:
            raise ApiError(ErrorCode.unknown_topic_or_partition, f"{topic.name}-{index} is gone")
        here = self._partitions.led(topic.name, index)
        piece = await (
            self._read_local(here, offset) if here else self._read_remote(topic, index, state, offset)
        )
        if not piece.data and offset >= piece.start_offset and not piece.is_beyond_end:
            raise ApiError(
                ErrorCode.offset_not_available, "the new leader does not know the high watermark yet"
            )
        return piece

    async def _read_local(self, partition: Partition, offset: int) -> _LogPiece:
        log, upto = partition.log, partition.high
        if offset < log.start_offset:
            return _LogPiece(b"", log.start_offset)
        if offset >= log.end_offset:
            return _LogPiece(b"", log.start_offset, is_beyond_end=True)
        if offset >= upto.offset:
            return _LogPiece(b"", log.start_offset)
        try:
            piece = await self.environment.in_thread(read_intact, log, offset, _READ_BYTES, upto)
        except ApiError as error:
            raise self._partitions.handle_read_error(partition, error) from None
        return _LogPiece(piece.data, log.start_offset)

    async def _read_remote(
        self, topic: TopicState, index: int, state: PartitionState, offset: int
    ) -> _LogPiece:
        # Imported here, because a standalone node never needs them.
        from penstock.broker.network.peers import PeerUnreachable
        from penstock.protocol.fetch import (
            DEBUGGING_REPLICA_ID,
            REPLICA_FETCH_VERSION,
            FetchPartition,
            encode_replica_fetch_request,
            parse_replica_fetch_response,
        )

        if not state.has_leader:
            raise ApiError(ErrorCode.leader_not_available)
        partition = FetchPartition(index, state.leader_epoch, offset, -1, -1, _READ_BYTES)
        body = encode_replica_fetch_request(
            replica_id=DEBUGGING_REPLICA_ID,
            broker_epoch=-1,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=_READ_BYTES,
            session_id=0,
            session_epoch=_NO_SESSION,
            topics=[(topic.id.bytes, [partition])],
        )
        try:
            reply = await self._peers().fetch(
                state.leader,
                body,
                version=REPLICA_FETCH_VERSION,
                timeout_s=_READ_TIMEOUT_S,
                purpose="dead-letters",
            )
        except (PeerUnreachable, TimeoutError) as error:
            raise ApiError(ErrorCode.network_exception, str(error)) from None
        parsed = parse_replica_fetch_response(reply)
        if parsed.error or not parsed.partitions:
            raise ApiError(ErrorCode(parsed.error) if parsed.error else ErrorCode.unknown_server_error)
        (part,) = parsed.partitions
        if part.error == ErrorCode.offset_out_of_range.value:
            return _LogPiece(b"", part.log_start_offset, is_beyond_end=offset >= part.log_start_offset)
        if part.error:
            raise ApiError(ErrorCode(part.error))
        return _LogPiece(part.records, part.log_start_offset)


logger = logging.getLogger("penstock.share")

#: Dead letters in one plan, and about how large its batch becomes: less than topics accept by default.
_PLAN_MAX: Final = 5_000
_PLAN_BYTES_MAX: Final = 512 << 10
_APPEND_TIMEOUT_S: Final = 15.0
#: Errors that a single dead letter may cause.
_INVALID_RECORD_CODES: Final = frozenset(
    {
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_record,
        ErrorCode.invalid_timestamp,
        ErrorCode.policy_violation,
    }
)


class DeadLetterWriter:
    def __init__(
        self,
        logs: DeadLetterLogs,
        active: ActiveShard[ShareCoordinatorShard],
        key: SharePartitionKey,
        manager: DeadLetterManager,
    ) -> None:
        self._logs = logs
        self._active = active
        self._key = key
        self._manager = manager
        self._plan_max = _PLAN_MAX
        #: Whether the last plan was not full: then it pays to wait for more dead letters before the next plan.
        self.had_room = False

    async def step(self) -> bool:
        """Returns whether there was work to do. Raises ApiError or TimeoutError if it must be retried later."""
        self.had_room = False
        key = self._key
        view = await self._active.read(lambda shard: shard.pending_dead_letters(key))
        topic = self._logs.image.topics_by_id.get(key.topic_id)
        if view is None:
            await self._active.submit(lambda shard, token: shard.forget_dead_letters(key, token))
            return False
        if topic is None:
            await self._abandon(view, "source deleted")
            return True
        async with self._manager.room:
            if view.plan is not None:
                await self._repeat(view, view.plan, topic)
                return True
            is_held = await self._begin(view, topic)
        if is_held:
            await self._manager.wait_for_breaker(key.group)
        return True

    async def _begin(self, view: DeadLetterView, topic: TopicState) -> bool:
        """Start the next plan. Returns True if the circuit breaker allows no dead letters now."""
        config = self._manager.group_config(self._key.group)
        name = config.dead_letter_topic_of(topic.name)
        if name is None:
            await self._abandon(view, "no dead-letter topic")
            return False
        wanted = min(view.pending_count, self._plan_max)
        allowance = self._manager.allowed(self._key, wanted)
        if allowance.left == 0:
            return True
        dead_letters = self._new_dead_letters(view, topic)
        try:
            plan = await self._planned(
                view, topic, name, first_offsets(view.pending, allowance.left), dead_letters
            )
            if plan is not None:
                allowance.left -= dead_letters.count
        finally:
            self._manager.give_back(allowance)
        if plan is not None:
            await self._carry_out(view, plan, topic, dead_letters)
        return False

    async def _planned(
        self,
        view: DeadLetterView,
        topic: TopicState,
        name: str,
        pending: Sequence[StateRange],
        dead_letters: DeadLetterBatch,
    ) -> DeadLetterPlan | None:
        """Store a plan for the records that could be read. Returns None if something else had to be settled first."""
        target_topic = await self._logs.ensure_topic(name, topic)
        found = await self._logs.read(topic, self._key.partition, pending, dead_letters.fill)
        gone = _offsets_before(pending, min(found.start_offset, found.seen_upto))
        if gone:
            await self._settle(None, gone, lost=offset_count(gone), reason=RECORD_GONE)
            return None
        resolved, offsets = _offsets_before(pending, found.seen_upto), tuple(dead_letters.offsets)
        self.had_room = offset_count(resolved) == view.pending_count < self._plan_max
        if not offsets:
            await self._settle(None, resolved)  # gaps, for example from compaction
            return None
        target = DeadLetterTarget(target_topic.id, self._key.partition % len(target_topic.partitions))
        producer = view.producer
        if producer is None or producer.target != target:
            producer = DeadLetterProducer(await self._logs.appends.new_producer_id(), 0, 0, target)
        plan = DeadLetterPlan(
            producer.id, producer.epoch, producer.next_sequence, target_topic.name, target, resolved, offsets
        )
        key = self._key
        stored = await self._active.submit(lambda shard, token: shard.plan_dead_letters(key, plan, token))
        return plan if stored else None

    def _new_dead_letters(self, view: DeadLetterView, topic: TopicState) -> DeadLetterBatch:
        config = self._manager.group_config(self._key.group)
        return DeadLetterBatch(
            self._key,
            topic.name,
            now_ms=self._logs.environment.now_ms(),
            copies_record=config.dead_letter_copies_record,
            bytes_max=_PLAN_BYTES_MAX,
            errors=view.errors,
        )

    async def _repeat(self, view: DeadLetterView, plan: DeadLetterPlan, topic: TopicState) -> None:
        dead_letters, owed = (
            self._new_dead_letters(view, topic),
            offsets_with_cause(view.pending, plan.offsets),
        )
        left = ranges_with_cause(view.pending, plan.offsets)
        while left:
            collect = partial(dead_letters.repeat, owed)
            found = await self._logs.read(topic, self._key.partition, left, collect)
            left = _ranges_from(left, found.seen_upto)
        for offset, cause in owed:
            dead_letters.add_without(offset, cause, RECORD_GONE)
        await self._carry_out(view, plan, topic, dead_letters)

    async def _carry_out(
        self, view: DeadLetterView, plan: DeadLetterPlan, topic: TopicState, dead_letters: DeadLetterBatch
    ) -> None:
        target = self._logs.image.topics.get(plan.topic)
        if target is None or target.id != plan.target.topic_id:
            await self._settle(plan, (), keeps_producer=False)
            return
        try:
            await self._append(plan, dead_letters)
        except ApiError as error:
            await self._refused(view, plan, topic, error)
            return
        await self._settle(plan, plan.resolved)
        self._manager.written_by_group[self._key.group] += dead_letters.count
        self._plan_max = min(self._plan_max * 2, _PLAN_MAX)

    async def _append(self, plan: DeadLetterPlan, dead_letters: DeadLetterBatch) -> None:
        assert dead_letters.count == offset_count(plan.offsets), "a plan's number of records never changes"
        batch_of = partial(
            dead_letters.batch, producer_id=plan.producer_id, epoch=plan.epoch, sequence=plan.sequence
        )
        batch, target = batch_of(), plan.target
        if dead_letters.codec and len(batch) > self._logs.batch_bytes_max(plan.topic):
            # The record fits into its source topic only because it is compressed.
            batch = await self._logs.environment.in_thread(batch_of, codec=dead_letters.codec)
        # Do not wait for long, because other writers need this permit. The plan is stored and will be repeated.
        async with asyncio.timeout(_APPEND_TIMEOUT_S):
            await self._logs.appends.append(plan.topic, target.partition, batch, topic_id=target.topic_id)

    async def _refused(
        self, view: DeadLetterView, plan: DeadLetterPlan, topic: TopicState, error: ApiError
    ) -> None:
        """Handle a permanent error: nothing was appended, and this plan cannot succeed as it is."""
        logger.warning(
            "dead letters were refused", extra={"topic": plan.topic, "reason": f"{error.code.name}: {error}"}
        )
        if error.code not in _INVALID_RECORD_CODES:
            # The topic is gone or has lost earlier dead letters: start again with a new producer id.
            await self._settle(plan, (), keeps_producer=False)
        elif offset_count(plan.offsets) > 1:
            self._plan_max = 1  # one record causes the error, and the others must not wait for it
            await self._settle(plan, (), keeps_producer=False)
        else:
            await self._write_without_record(view, plan, topic, error)

    async def _write_without_record(
        self, view: DeadLetterView, plan: DeadLetterPlan, topic: TopicState, error: ApiError
    ) -> None:
        ((offset, cause),) = offsets_with_cause(view.pending, plan.offsets)
        dead_letters = self._new_dead_letters(view, topic)
        name = f"{topic.name}-{self._key.partition}-{offset}".encode()
        dead_letters.add_without(offset, cause, f"refused: {error.code.name}", name)
        try:
            await self._append(plan, dead_letters)
        except ApiError:
            await self._settle(plan, plan.resolved, lost=1, reason="refused by the dead-letter topic")
            return
        await self._settle(plan, plan.resolved)
        self._manager.written_by_group[self._key.group] += 1

    async def _abandon(self, view: DeadLetterView, reason: str) -> None:
        count = offset_count(view.pending)
        await self._settle(view.plan, offset_intervals(view.pending), lost=count, reason=reason)

    async def _settle(
        self,
        plan: DeadLetterPlan | None,
        resolved: tuple[OffsetInterval, ...],
        *,
        lost: int = 0,
        reason: str = "",
        keeps_producer: bool = True,
    ) -> None:
        key, settled = self._key, SettledPlan(keeps_producer, lost, resolved)
        if plan is not None and resolved == plan.resolved:
            settled = SettledPlan(keeps_producer, lost, (), as_planned=True)
        stored = await self._active.submit(
            lambda shard, token: shard.settle_dead_letters(key, settled, plan, token)
        )
        if stored and lost:
            self._manager.lost[key.group, reason] += lost
            logger.warning(
                "dead letters are lost", extra={"group": key.group, "count": lost, "reason": reason}
            )


def _offsets_before(ranges: Sequence[StateRange], offset: int) -> tuple[OffsetInterval, ...]:
    """The offsets before `offset`; adjacent ranges are joined."""
    joined: list[OffsetInterval] = []
    for first, last, _, _ in ranges:
        if first >= offset:
            break
        last = min(last, offset - 1)
        if joined and joined[-1][1] == first - 1:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def _ranges_from(ranges: Sequence[StateRange], offset: int) -> list[StateRange]:
    return [(max(one[0], offset), *one[1:]) for one in ranges if one[1] >= offset]
