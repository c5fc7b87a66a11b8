"""Releases records that are due, source by source.

Each release follows a plan that is stored before anything is appended.

A source whose partition does not accept its records is retried later under a concurrency limit of its own, so it
does not delay the others. Nothing is released before its time by the clock of this broker, whichever way the clock
is set.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.broker.coordinators.schedule.storage import read_groups
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.scheduling.release_batch import DueRecords, encode_release_batch, gather_due_records
from penstock.scheduling.schedule_log import ReleasePlan, ScheduleSource

if TYPE_CHECKING:
    from penstock.broker.coordinators.schedule.active_shard import ActiveScheduleShard
    from penstock.broker.coordinators.schedule.storage import SourceDueIndex
    from penstock.cluster.image import TopicState

logger = logging.getLogger("penstock.schedule")

#: The longest sleep, because the wall clock may be set while the next due time is far away.
_CLOCK_CHECK_S: Final = 1.0
_RELEASE_BYTES_MAX: Final = 512 << 10
_READ_AHEAD_BYTES_MAX: Final = 8 << 20
_RECORDS_MIN: Final = 500
_RECORDS_WITHOUT_READ_AHEAD_MAX: Final = 2000
_RECORDS_MAX: Final = 40_000
_UNBOUNDED: Final = 1 << 62
#: Connections to each broker. Responses come in order, so a slow partition delays those that share its connection.
_CONNECTIONS: Final = 8
_APPEND_TIMEOUT_S: Final = 3.0
_SLOW_APPEND_TIMEOUT_S: Final = 15.0
_BACKOFF: Final = ExponentialBackoff(base_ms=500, cap_ms=30_000)
_DROP_GROUPS: Final = 1000
_SEQUENCE_MASK: Final = (1 << 31) - 1
#: The partition does not know the producer as expected, so nothing of the plan is in its log: use a new producer id.
_NEW_PRODUCER_CODES: Final = frozenset(
    {ErrorCode.out_of_order_sequence_number, ErrorCode.invalid_producer_epoch}
)
_TOO_LARGE_CODES: Final = frozenset({ErrorCode.message_too_large, ErrorCode.record_list_too_large})


class _SourceRelease:
    """What this node knows about one source in addition to its stored state."""

    def __init__(self) -> None:
        self.producer_id = -1
        self.sequence = 0
        self.retry_at = 0.0
        self.failures = 0
        self.is_slow = False
        self.bytes_max = _RELEASE_BYTES_MAX
        self.records_max = _RECORDS_MIN
        self.ahead: DueRecords | None = None  # already read, to be released next
        self.reads_ahead = False
        self.gathered = asyncio.Event()  # cleared while a thread collects the due records
        self.gathered.set()

    def adapt(self, record_count: int, asked: int) -> None:
        """Read more at a time when more records are due: each batch that holds some of them is then read less often."""
        if record_count < asked:
            self.records_max = max(record_count + record_count // 4, _RECORDS_MIN)
        else:
            self.records_max = min(2 * asked, _RECORDS_MAX)

    def appended(self, plan: ReleasePlan) -> None:
        """Advance the sequence, unless the plan comes from an earlier leader, which used its own producer id."""
        if plan.producer_id == self.producer_id:
            self.sequence = (plan.sequence + plan.record_count) & _SEQUENCE_MASK


class Releaser:
    def __init__(self, host: ActiveScheduleShard) -> None:
        self._host = host
        self._environment = host.environment
        self._metadata = host.schedule.metadata
        self._appends = host.schedule.appends
        self._wake = asyncio.Event()
        self._tasks: dict[ScheduleSource, asyncio.Task[None]] = {}
        self._lines: dict[ScheduleSource, _SourceRelease] = {}

    @property
    def waiting_count(self) -> int:
        """The number of sources whose partition has not accepted their due records."""
        return sum(line.is_slow for line in self._lines.values())

    def wake(self) -> None:
        self._wake.set()

    async def gathered(self, source: ScheduleSource) -> None:
        """Wait while a thread collects due records, because records that arrive now must sort after those."""
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

    def _due(self) -> list[ScheduleSource]:
        """Sources with something to do now: records that are due, an open plan, or a deleted topic."""
        host, now_ms, now = self._host, self._environment.now_ms(), _monotonic_s()
        topics, knows_topics = self._metadata.image.topics_by_id, host.knows_topics
        due = []
        for source, state in host.shard.sources.items():
            if source in self._tasks or ((line := self._lines.get(source)) and line.retry_at > now):
                continue
            is_gone = source.topic_id not in topics
            if is_gone and not knows_topics:
                continue
            first_ms = host.first_due_ms(source)
            is_due = (first_ms is not None and first_ms <= now_ms) or host.indexes.has_excess_arrivals(source)
            if state.plan is not None:
                is_due = state.plan.may_begin(now_ms)
            if is_due or is_gone:
                due.append(source)
        return due

    def _rest_s(self) -> float:
        """Seconds until the next record is due or the next source is retried."""
        host, now_ms, now = self._host, self._environment.now_ms(), _monotonic_s()
        rest_s = _CLOCK_CHECK_S
        for source in host.shard.sources:
            if source in self._tasks:
                continue
            line, first_ms = self._lines.get(source), host.first_due_ms(source)
            wait_s = 0.0 if line is None else line.retry_at - now
            if first_ms is not None and (wait_s > 0 or first_ms > now_ms):
                rest_s = min(rest_s, max(wait_s, (first_ms - now_ms) / 1000))
        return max(rest_s, 0.001)

    def _begin(self, source: ScheduleSource) -> None:
        task = self._tasks[source] = self._environment.spawn(self._serve(source))
        task.add_done_callback(lambda _: self._finished(source))

    def _finished(self, source: ScheduleSource) -> None:
        del self._tasks[source]
        self.wake()

    async def _serve(self, source: ScheduleSource) -> None:
        line = self._lines.setdefault(source, _SourceRelease())
        try:
            async with (
                self._host.schedule.slow_source_limit if line.is_slow else self._host.schedule.source_limit
            ):
                topic = self._metadata.image.topics_by_id.get(source.topic_id)
                if topic is None:
                    await self._drop(source)
                else:
                    await self._release(source, topic, line)
            line.retry_at, line.failures, line.is_slow = 0.0, 0, False
        except (ApiError, ConnectionError, TimeoutError) as error:
            self._back_off(source, line, error)
        except Exception:
            # The index may be incomplete, for example after the disk was full.
            logger.exception("release failed", extra={"source": str(source)})
            self._host.schedule.reload_later(self._host)
        finally:
            line.ahead = None
            if line.reads_ahead:
                line.reads_ahead = False
                self._host.schedule.readers_ahead.give_back()
            self._host.shard.unreserve(source)

    def _back_off(self, source: ScheduleSource, line: _SourceRelease, error: Exception) -> None:
        if not self._host.is_current:
            return
        line.is_slow = True
        line.retry_at = _monotonic_s() + _BACKOFF.minimum_ms(line.failures) / 1000
        line.failures += 1
        extra = {"source": f"{source.topic_id}-{source.partition}", "reason": str(error) or repr(error)}
        logger.warning("due records wait for their partition", extra=extra)

    # -- one source ------------------------------------------------------------------------------------------------

    async def _release(self, source: ScheduleSource, topic: TopicState, line: _SourceRelease) -> None:
        """Release everything that is due. One append to the shard completes the last plan and stores the next one."""
        host, index = self._host, self._host.indexes.by_source.get(source)
        assert index is not None, f"nothing is held of {source}"
        done: DueRecords | None = None
        if (plan := host.shard.sources[source].plan) is not None:
            # The plan of an earlier leader may not be committed yet; if it is lost, the next leader makes another.
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

    async def _next(
        self, source: ScheduleSource, index: SourceDueIndex, line: _SourceRelease
    ) -> DueRecords | None:
        """Return the records that are due now, as many as fit into one batch."""
        if line.ahead is not None:
            release, line.ahead = line.ahead.split(line.bytes_max)
            return release
        now_ms, arrived, log = self._environment.now_ms(), index.drain_arrivals(), self._host.partition.log
        shard = self._host.shard
        state = shard.sources[source]
        records_max, bytes_max = self._read_ahead(line)

        def gathered() -> tuple[DueRecords | None, int | None]:
            dues, first_ms = index.next_dues(arrived, state, now_ms, records_max)
            if not dues:
                return None, first_ms
            return gather_due_records(dues, read_groups(log, dues), bytes_max), first_ms

        line.gathered.clear()
        try:
            found, index.ladder_first_ms = await self._host.read(gathered)
            if found is None:
                return None
            # Not up to now: if this clock is ahead, the next leader could not release new records until then.
            shard.reserve(source, found.dues[-1].due_ms)
        finally:
            line.gathered.set()
        line.adapt(len(found.dues), records_max)
        release, line.ahead = found.split(line.bytes_max)
        return release

    def _read_ahead(self, line: _SourceRelease) -> tuple[int, int]:
        """Return how many records and bytes to read at a time: a lot, but only for a few sources at once."""
        if line.records_max > _RECORDS_WITHOUT_READ_AHEAD_MAX and not line.reads_ahead:
            line.reads_ahead = self._host.schedule.readers_ahead.take()
        if line.reads_ahead:
            return line.records_max, _READ_AHEAD_BYTES_MAX
        return min(line.records_max, _RECORDS_WITHOUT_READ_AHEAD_MAX), line.bytes_max

    async def _planned(self, source: ScheduleSource, index: SourceDueIndex, plan: ReleasePlan) -> DueRecords:
        """Return the records of an open plan: the same records in the same order for every leader that repeats it."""
        state, arrived = self._host.shard.sources[source], index.drain_arrivals()
        log = self._host.partition.log

        def gathered() -> DueRecords:
            dues = index.planned_dues(arrived, state)
            return gather_due_records(dues, read_groups(log, dues), _UNBOUNDED)

        release = await self._host.read(gathered)
        assert release.dues[-1] == plan.upto, f"{plan} ends at {release.dues[-1]}"
        assert len(release.dues) == plan.record_count, f"{plan} has {len(release.dues)} records"
        return release

    async def _plan(self, release: DueRecords, line: _SourceRelease) -> ReleasePlan:
        if line.producer_id < 0:
            line.producer_id, line.sequence = await self._appends.new_producer_id(), 0
        return ReleasePlan(line.producer_id, 0, line.sequence, release.dues[-1], len(release.dues))

    async def _append(
        self, source: ScheduleSource, topic: TopicState, release: DueRecords, line: _SourceRelease
    ) -> DueRecords:
        """Append the release. Returns what is now in the partition: all of it, or a smaller part under a new plan."""
        host = self._host
        while True:
            plan = host.shard.sources[source].plan
            assert plan is not None
            try:
                await self._append_planned(source, topic, plan, release, line)
            except ApiError as error:
                if error.code in _TOO_LARGE_CODES and len(release.dues) > 1:
                    line.bytes_max //= 2
                    release, line.ahead = release.first(len(release.dues) // 2), None
                elif error.code in _NEW_PRODUCER_CODES:
                    line.producer_id = -1
                else:
                    raise
                # Nothing of the plan is in the partition, so a new plan replaces it.
                host.append(host.shard.plan(source, await self._plan(release, line), is_repeat=True))
                await host.committed()
                continue
            line.appended(plan)
            self._host.schedule.counts.released(release.dues, self._environment.now_ms())
            return release

    async def _append_planned(
        self,
        source: ScheduleSource,
        topic: TopicState,
        plan: ReleasePlan,
        release: DueRecords,
        line: _SourceRelease,
    ) -> None:
        if not plan.may_begin(self._environment.now_ms()):
            raise ApiError(ErrorCode.request_timed_out, "the clock was set back")
        partition = self._metadata.image.partition(topic.name, source.partition)
        if partition is None or not partition.has_leader:
            raise ApiError(ErrorCode.leader_not_available, f"{topic.name}-{source.partition} has no leader")
        batch = await self._environment.in_thread(
            encode_release_batch,
            release.records,
            producer_id=plan.producer_id,
            epoch=plan.epoch,
            sequence=plan.sequence,
            now_ms=self._environment.now_ms(),
        )
        async with asyncio.timeout(_SLOW_APPEND_TIMEOUT_S if line.is_slow else _APPEND_TIMEOUT_S):
            await self._appends.append(
                topic.name,
                source.partition,
                batch,
                topic_id=source.topic_id,
                purpose=f"release-{source.partition % _CONNECTIONS}",
            )

    async def _drop(self, source: ScheduleSource) -> None:
        """Delete everything held for a source whose topic was deleted."""
        host, index = self._host, self._host.indexes.by_source.get(source)
        held_count = host.shard.sources[source].held_count
        while index is not None:
            arrived = index.drain_arrivals()
            groups = await host.schedule.in_thread(index.groups, arrived, _DROP_GROUPS)
            if not groups:
                break
            host.append(host.shard.drop_blocks(source, groups))
            await host.committed()
        host.append(host.shard.drop(source))
        await host.committed()
        self._lines.pop(source, None)
        host.schedule.counts.dropped_count += held_count
        extra = {"topic_id": str(source.topic_id), "partition": source.partition, "held": held_count}
        logger.info("topic deleted with its held records", extra=extra)


def _monotonic_s() -> float:
    return asyncio.get_running_loop().time()
