"""Observes the schedule from outside: plans come before what they plan, and positions before what is told of them.

The observer replays every record of the schedule when it is committed. It wraps shipped methods of shards and
releasers, and compares what they do with what is committed at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from penstock.broker.coordinators.schedule.active_shard import ActiveScheduleShard
from penstock.broker.coordinators.schedule.messages import ScheduleOperation, ScheduleRequest
from penstock.broker.coordinators.schedule.releaser import Releaser
from penstock.cluster.topic_names import SCHEDULE
from penstock.protocol.record_batch import BatchHeader, Record
from penstock.scheduling.schedule_log import (
    ReleasePlan,
    ScheduleSource,
    SourcePosition,
    source_key,
    source_of,
)
from penstock.scheduling.schedule_shard import ScheduleShard
from simulation.checks.committed import CommittedLogs


class _NoIndex:
    """The observer releases nothing, so it needs no order of due times."""

    def add(self, source: ScheduleSource, dues: Sequence[bytes]) -> None: ...
    def forget(self, source: ScheduleSource) -> None: ...


class CommittedSchedule:
    def __init__(self, committed: CommittedLogs) -> None:
        self.committed = committed
        self.loop = committed.cluster.loop
        self._shard = ScheduleShard(_NoIndex())
        self._plans: set[tuple[ScheduleSource, ReleasePlan]] = set()
        #: Producer id and first sequence of every committed batch that has them.
        self._appended: set[tuple[int, int]] = set()
        committed.on_committed.append(self._take_in)

    @contextmanager
    def observing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrapper in (
                (ActiveScheduleShard, "ask", self._ask),
                (ActiveScheduleShard, "append", self._append),
                (ActiveScheduleShard, "_load", self._load),
                (Releaser, "_append_planned", self._append_planned),
            ):
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, wrapper(original))
            yield

    def _take_in(self, topic: str, index: int, header: BatchHeader, records: list[Record]) -> None:
        if topic != SCHEDULE:
            self._appended.add((header.producer_id, header.base_sequence))
            return
        keys = [record.key or b"" for record in records]
        for record, key in zip(records, keys, strict=True):
            source, is_block = source_of(key)
            if is_block and record.value is not None and source_key(source) not in keys:
                raise self.loop.fail(
                    "held records are stored with the position after them", f"{source} at {record.offset}"
                )
            self._shard.replay(record.offset, key, record.value)
            state = self._shard.sources.get(source)
            if state is not None and state.plan is not None:
                self._plans.add((source, state.plan))

    def _ask(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def ask(host: ActiveScheduleShard, request: ScheduleRequest) -> SourcePosition | None:
            source = request.source
            if request.what is ScheduleOperation.MOVE:
                log = self.committed.logs.get((source.topic_id, source.partition))
                moved = request.chunks[-1].position.offset
                if log is None or moved > log.end_offset:
                    raise self.loop.fail("only committed records are moved", f"{source} up to {moved}: {log}")
            position: SourcePosition | None = await original(host, request)
            known = self._shard.position(source)
            if position is not None and (known is None or position[1:] > known[1:]):
                raise self.loop.fail(
                    "movers are told committed positions", f"{source} is told {position}, committed {known}"
                )
            return position

        return ask

    def _append(self, original: Callable[..., None]) -> Callable[..., None]:
        def append(host: ActiveScheduleShard, records: Sequence[Any], *args: Any) -> None:
            original(host, records, *args)
            if records and host.partition.leader_epoch != host.leader_epoch:
                raise self.loop.fail(
                    "a shard appends in the epoch that it was loaded in",
                    f"{host} of epoch {host.leader_epoch}",
                )

        return append

    def _load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def load(host: ActiveScheduleShard) -> None:
            end_offset = self.committed.named(SCHEDULE, host.partition.index).end_offset
            is_newest = host.is_current
            await original(host)
            if is_newest and host.is_current and host._last_offset + 1 < end_offset:
                raise self.loop.fail(
                    "a shard loads everything committed", f"{host} up to {host._last_offset}, {end_offset}"
                )

        return load

    def _append_planned(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def append_planned(
            releaser: Releaser, source: ScheduleSource, topic: Any, plan: ReleasePlan, *rest: Any
        ) -> None:
            if (source, plan) not in self._plans:
                raise self.loop.fail("a plan is stored before it is carried out", f"{plan} of {source}")
            await original(releaser, source, topic, plan, *rest)
            if (plan.producer_id, plan.sequence) not in self._appended:
                raise self.loop.fail("a plan is done once its records are committed", f"{plan} of {source}")

        return append_planned
