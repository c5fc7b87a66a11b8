"""Observes the share coordinator: who may write share state, and dead letters that follow their plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from penstock.broker.coordinators.share.dead_letter_writer import DeadLetterWriter
from penstock.broker.partition.idempotent_append import PlannedAppends
from penstock.cluster.topic_names import SHARE_GROUP_STATE
from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard, _name
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import BatchHeader, Record, iter_batches
from simulation.checks.committed import CommittedLogs


class CommittedShareState:
    def __init__(self, committed: CommittedLogs) -> None:
        self.loop = committed.cluster.loop
        self._shard = ShareCoordinatorShard()
        #: Producer id and sequence of every plan that was stored.
        self._planned: set[tuple[int, int]] = set()
        #: Producer id and first sequence of every committed batch that has them.
        self._appended: set[tuple[int, int]] = set()
        #: By loaded shard and share partition: the newest leader that has read the state. Loaded shards stay in memory.
        self._readers: dict[tuple[ShareCoordinatorShard, Any], int] = {}
        committed.on_committed.append(self._take_in)

    @contextmanager
    def observing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrapper in (
                (ShareCoordinatorShard, "_read", self._read),
                (ShareCoordinatorShard, "_write", self._write),
                (PlannedAppends, "append", self._append),
                (DeadLetterWriter, "_append", self._append_planned),
            ):
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, wrapper(original))
            yield

    def _take_in(self, topic: str, index: int, header: BatchHeader, records: list[Record]) -> None:
        if topic != SHARE_GROUP_STATE:
            self._appended.add((header.producer_id, header.base_sequence))
            return
        for record in records:
            self._shard.replay(record.key or b"", record.value)
            for dead_letters in self._shard._dead_letters.values():
                if dead_letters.plan is not None:
                    self._planned.add((dead_letters.plan.producer_id, dead_letters.plan.sequence))

    def _read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read_observed(shard: ShareCoordinatorShard, read: Any, stored: list[Any], now_ms: int) -> Any:
            count = len(stored)
            reply = original(shard, read, stored, now_ms)
            if reply.error is ErrorCode.none:
                place = (shard, read.key)
                self._readers[place] = max(self._readers.get(place, -1), read.leader_epoch)
                if shard._states[_name(read.key)].leader_epoch < read.leader_epoch and len(stored) == count:
                    raise self.loop.fail(
                        "a share leader that reads the state fences the ones before", f"{read}"
                    )
            return reply

        return read_observed

    def _write(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def write_observed(shard: ShareCoordinatorShard, write: Any, *rest: Any) -> Any:
            reply = original(shard, write, *rest)
            newest = self._readers.get((shard, write.key), -1)
            if reply.error is ErrorCode.none and 0 <= write.leader_epoch < newest:
                raise self.loop.fail(
                    "an earlier leader does not write share state", f"{write}, leader {newest} has read it"
                )
            return reply

        return write_observed

    def _append(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def append(
            appends: PlannedAppends, topic: str, index: int, batch: bytearray, **rest: Any
        ) -> int:
            for header, _ in iter_batches(batch):
                if (header.producer_id, header.base_sequence) not in self._planned:
                    raise self.loop.fail(
                        "a plan is stored before it is carried out", f"{header} to {topic}-{index}"
                    )
            offset: int = await original(appends, topic, index, batch, **rest)
            return offset

        return append

    def _append_planned(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def append_planned(writer: DeadLetterWriter, plan: Any, letters: Any) -> None:
            await original(writer, plan, letters)
            if (plan.producer_id, plan.sequence) not in self._appended:
                raise self.loop.fail("a plan is done once its records are committed", f"{plan}")

        return append_planned
