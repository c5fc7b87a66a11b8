"""Releasing what is due: source by source, each by a plan that is stored before anything is appended.

A source whose partition does not take its records is tried again later, on a lane of its own: it does not hold up the
others. Nothing is released before its time by this node's clock, whichever way that is set.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.broker.planned_append import append_batch_once, planned_producer_id
from penstock.broker.schedule.loading import read_groups
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.scheduling.records import Plan, Source
from penstock.scheduling.release import Release, gather, release_batch

if TYPE_CHECKING:
    from penstock.broker.schedule.index import SourceIndex
    from penstock.broker.schedule.shard_host import ShardHost
    from penstock.cluster.state import TopicState

logger = logging.getLogger("penstock.schedule")

#: However far away the next record is, the clock may be set.
_LOOK_S: Final = 1.0
_RELEASE_BYTES_MAX: Final = 512 << 10
_AHEAD_BYTES_MAX: Final = 8 << 20
_RECORDS_MIN: Final = 500
_RECORDS_FEW: Final = 2000
_RECORDS_MAX: Final = 40_000
_UNBOUNDED: Final = 1 << 62
#: To each broker: answers come in order, so a slow partition holds up those that share a connection.
_CONNECTIONS: Final = 8
_APPEND_S: Final = 3.0
_SLOW_APPEND_S: Final = 15.0
_RETRY_S: Final = 0.5
_RETRY_MAX_S: Final = 30.0
_DROP_GROUPS: Final = 1000
_SEQUENCE_MASK: Final = (1 << 31) - 1
#: The producer is not known there as we know it: nothing of the plan is in the log, and another one can have it.
_OTHER_PRODUCER: Final = frozenset({ErrorCode.out_of_order_sequence_number, ErrorCode.invalid_producer_epoch})
_TOO_LARGE: Final = frozenset({ErrorCode.message_too_large, ErrorCode.record_list_too_large})


class _Line:
    """What this node knows of one source besides its state."""

    def __init__(self) -> None:
        self.producer_id = -1
        self.sequence = 0
        self.retry_at = 0.0
        self.retry_s = _RETRY_S
        self.is_slow = False
        self.bytes_max = _RELEASE_BYTES_MAX
        self.records_max = _RECORDS_MIN
        self.ahead: Release | None = None  # read already, to be released next
        self.reads_ahead = False
        self.gathered = asyncio.Event()  # not while it is found out what is due
        self.gathered.set()

    def adapt(self, record_count: int, asked: int) -> None:
        """Records that lie here and there are read in one go with others: the more are due, the more at a time."""
        if record_count < asked:
            self.records_max = max(record_count + record_count // 4, _RECORDS_MIN)
        else:
            self.records_max = min(2 * asked, _RECORDS_MAX)

    def appended(self, plan: Plan) -> None:
        """Plans of an earlier leader had a producer of their own."""
        if plan.producer_id == self.producer_id:
            self.sequence = (plan.sequence + plan.record_count) & _SEQUENCE_MASK


class Releaser:
    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._node = host.node
        self._wake = asyncio.Event()
        self._tasks: dict[Source, asyncio.Task[None]] = {}
        self._lines: dict[Source, _Line] = {}

    @property
    def waiting_count(self) -> int:
        """Sources whose partition has not taken what is due."""
        return sum(line.is_slow for line in self._lines.values())

    def wake(self) -> None:
        self._wake.set()

    async def gathered(self, source: Source) -> None:
        """Until nobody is finding out what is due: what arrives has to come after that, and nothing later."""
        line = self._lines.get(source)
        while line is not None and not line.gathered.is_set():
            await line.gathered.wait()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def run(self) -> None:
        while self._host.is_current:
            self._wake.clear()
            for source in self._due():
                self._begin(source)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rest_s()):
                    await self._wake.wait()

    def _due(self) -> list[Source]:
        """Sources with something to do now: records that are due, a plan that is open, or no topic any more."""
        host, now_ms, now = self._host, self._node.now_ms(), _monotonic()
        topics, knows_topics = self._node.image.topics_by_id, host.knows_topics
        due = []
        for source, state in host.shard.sources.items():
            if source in self._tasks or ((line := self._lines.get(source)) and line.retry_at > now):
                continue
            is_gone = source.topic_id not in topics
            if is_gone and not knows_topics:
                continue
            first_ms = host.first_due_ms(source)
            is_due = (first_ms is not None and first_ms <= now_ms) or host.indexes.is_crowded(source)
            if state.plan is not None:
                is_due = state.plan.may_begin(now_ms)
            if is_due or is_gone:
                due.append(source)
        return due

    def _rest_s(self) -> float:
        """Until the next record is due, or a source is tried again."""
        host, now_ms, now = self._host, self._node.now_ms(), _monotonic()
        rest_s = _LOOK_S
        for source in host.shard.sources:
            if source in self._tasks:
                continue
            line, first_ms = self._lines.get(source), host.first_due_ms(source)
            wait_s = 0.0 if line is None else line.retry_at - now
            if first_ms is not None and (wait_s > 0 or first_ms > now_ms):
                rest_s = min(rest_s, max(wait_s, (first_ms - now_ms) / 1000))
        return max(rest_s, 0.001)

    def _begin(self, source: Source) -> None:
        task = self._tasks[source] = self._node.spawn(self._serve(source))
        task.add_done_callback(lambda _: self._finished(source))

    def _finished(self, source: Source) -> None:
        del self._tasks[source]
        self.wake()

    async def _serve(self, source: Source) -> None:
        line = self._lines.setdefault(source, _Line())
        try:
            async with self._host.schedule.slow_lanes if line.is_slow else self._host.schedule.lanes:
                topic = self._node.image.topics_by_id.get(source.topic_id)
                if topic is None:
                    await self._drop(source)
                else:
                    await self._release(source, topic, line)
            line.retry_at, line.retry_s, line.is_slow = 0.0, _RETRY_S, False
        except (ApiError, ConnectionError, TimeoutError) as error:
            self._put_off(source, line, error)
        except Exception:
            # What the index has of it may be incomplete, as after a disk that was full.
            logger.exception("release failed", extra={"source": str(source)})
            self._host.schedule.begin_anew(self._host)
        finally:
            line.ahead = None
            if line.reads_ahead:
                line.reads_ahead = False
                self._host.schedule.readers_ahead.give_back()
            self._host.shard.unreserve(source)

    def _put_off(self, source: Source, line: _Line, error: Exception) -> None:
        if not self._host.is_current:
            return
        line.is_slow = True
        line.retry_at, line.retry_s = _monotonic() + line.retry_s, min(2 * line.retry_s, _RETRY_MAX_S)
        extra = {"source": f"{source.topic_id}-{source.partition}", "reason": str(error) or repr(error)}
        logger.warning("due records wait for their partition", extra=extra)

    # -- one source ------------------------------------------------------------------------------------------------

    async def _release(self, source: Source, topic: TopicState, line: _Line) -> None:
        """All that is due of it. Each batch says that what was appended before is done, and what is planned next."""
        host, index = self._host, self._host.indexes.by_source.get(source)
        assert index is not None, f"nothing is held of {source}"
        done: Release | None = None
        if (plan := host.shard.sources[source].plan) is not None:
            # An earlier leader's may not be committed yet: whoever leads after us would make another one.
            await host.committed()
            done = await self._planned(source, index, plan)
            done = await self._append(source, topic, done, line)
        while host.is_current:
            release = await self._next(source, index, line)
            if release is None and done is None:
                return
            plan = None if release is None else await self._plan(release, line)
            host.append(host.shard.plan(source, plan, () if done is None else done.finished))
            await host.committed()
            if release is None:
                return
            done = await self._append(source, topic, release, line)

    async def _next(self, source: Source, index: SourceIndex, line: _Line) -> Release | None:
        """What is due now, as far as it fits into one batch."""
        if line.ahead is not None:
            release, line.ahead = line.ahead.split(line.bytes_max)
            return release
        now_ms, arrived, log = self._node.now_ms(), index.taken_in(), self._host.partition.log
        shard = self._host.shard
        state = shard.sources[source]
        records_max, bytes_max = self._read_ahead(line)

        def gathered() -> tuple[Release | None, int | None]:
            dues, first_ms = index.next_dues(arrived, state, now_ms, records_max)
            if not dues:
                return None, first_ms
            return gather(dues, read_groups(log, dues), bytes_max), first_ms

        line.gathered.clear()
        try:
            found, index.ladder_first_ms = await self._host.schedule.in_thread(gathered)
            if found is None:
                return None
            # Not up to now: if this clock is ahead, whoever leads next would wait for that time to come.
            shard.reserve(source, found.dues[-1].due_ms)
        finally:
            line.gathered.set()
        line.adapt(len(found.dues), records_max)
        release, line.ahead = found.split(line.bytes_max)
        return release

    def _read_ahead(self, line: _Line) -> tuple[int, int]:
        """How many records are read at a time, and how many bytes of them: much by a few sources only."""
        if line.records_max > _RECORDS_FEW and not line.reads_ahead:
            line.reads_ahead = self._host.schedule.readers_ahead.take()
        if line.reads_ahead:
            return line.records_max, _AHEAD_BYTES_MAX
        return min(line.records_max, _RECORDS_FEW), line.bytes_max

    async def _planned(self, source: Source, index: SourceIndex, plan: Plan) -> Release:
        """What an open plan is about: the same records in the same order, whoever repeats it."""
        state, arrived = self._host.shard.sources[source], index.taken_in()
        log = self._host.partition.log

        def gathered() -> Release:
            dues = index.planned_dues(arrived, state)
            return gather(dues, read_groups(log, dues), _UNBOUNDED)

        release = await self._host.schedule.in_thread(gathered)
        assert release.dues[-1] == plan.upto, f"{plan} ends at {release.dues[-1]}"
        assert len(release.dues) == plan.record_count, f"{plan} has {len(release.dues)} records"
        return release

    async def _plan(self, release: Release, line: _Line) -> Plan:
        if line.producer_id < 0:
            line.producer_id, line.sequence = await planned_producer_id(self._node), 0
        return Plan(line.producer_id, 0, line.sequence, release.dues[-1], len(release.dues))

    async def _append(self, source: Source, topic: TopicState, release: Release, line: _Line) -> Release:
        """Returns what is in the partition now: this, or a smaller part of it under another plan."""
        host = self._host
        while True:
            plan = host.shard.sources[source].plan
            assert plan is not None
            try:
                await self._append_planned(source, topic, plan, release, line)
            except ApiError as error:
                if error.code in _TOO_LARGE and len(release.dues) > 1:
                    line.bytes_max //= 2
                    release, line.ahead = release.first(len(release.dues) // 2), None
                elif error.code in _OTHER_PRODUCER:
                    line.producer_id = -1
                else:
                    raise
                # Nothing of it is there: another plan takes its place.
                host.append(host.shard.plan(source, await self._plan(release, line), is_repeat=True))
                await host.committed()
                continue
            line.appended(plan)
            self._host.schedule.counts.released(release.dues, self._node.now_ms())
            return release

    async def _append_planned(
        self, source: Source, topic: TopicState, plan: Plan, release: Release, line: _Line
    ) -> None:
        if not plan.may_begin(self._node.now_ms()):
            raise ApiError(ErrorCode.request_timed_out, "the clock was set back")
        partition = self._node.image.partition(topic.name, source.partition)
        if partition is None or not partition.has_leader:
            raise ApiError(ErrorCode.leader_not_available, f"{topic.name}-{source.partition} has no leader")
        batch = await self._node.in_thread(
            release_batch,
            release.records,
            producer_id=plan.producer_id,
            epoch=plan.epoch,
            sequence=plan.sequence,
            now_ms=self._node.now_ms(),
        )
        async with asyncio.timeout(_SLOW_APPEND_S if line.is_slow else _APPEND_S):
            await append_batch_once(
                self._node,
                topic.name,
                source.partition,
                batch,
                topic_id=source.topic_id,
                purpose=f"release-{source.partition % _CONNECTIONS}",
            )

    async def _drop(self, source: Source) -> None:
        """Its topic is gone."""
        host, index = self._host, self._host.indexes.by_source.get(source)
        held_count = host.shard.sources[source].held_count
        while index is not None:
            arrived = index.taken_in()
            groups = await host.schedule.in_thread(index.groups, arrived, _DROP_GROUPS)
            if not groups:
                break
            host.append(host.shard.drop_groups(source, groups))
            await host.committed()
        host.append(host.shard.drop(source))
        await host.committed()
        self._lines.pop(source, None)
        host.schedule.counts.dropped_count += held_count
        extra = {"topic_id": str(source.topic_id), "partition": source.partition, "held": held_count}
        logger.info("topic deleted, and what was held of it", extra=extra)


def _monotonic() -> float:
    return asyncio.get_running_loop().time()
