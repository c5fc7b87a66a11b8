"""Observes coordinators: they load everything committed, reply once it is committed, and stay in their epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from penstock.broker.coordinators.runtime import active_shard
from penstock.broker.coordinators.runtime.active_shard import ActiveShard
from penstock.broker.coordinators.runtime.runtime import CoordinatorRuntime
from penstock.broker.partition.partition import Partition
from penstock.protocol.record_batch import BatchHeader, checksum
from simulation.checks.committed import CommittedLogs


class Coordinators:
    def __init__(self, committed: CommittedLogs) -> None:
        self.committed = committed
        self.loop = committed.cluster.loop

    @contextmanager
    def observing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrapper in (
                (ActiveShard, "_reply_when_committed", self._reply_when_committed),
                (ActiveShard, "_append_batch", self._append_batch),
                (CoordinatorRuntime, "_activate", self._activate),
                (active_shard, "_replay_batch", self._replay_batch),
            ):
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, wrapper(original))
            yield

    def _reply_when_committed(self, original: Callable[..., None]) -> Callable[..., None]:
        def reply_when_committed(active: ActiveShard[Any], replies: Any) -> None:
            last_offset, partition = active._last_offset, active.partition
            assert isinstance(partition, Partition)
            waiting = (
                [token for token, _ in replies if not token.done()] if isinstance(replies, tuple) else ()
            )
            original(active, replies)
            if partition.high_watermark > last_offset:
                return
            for token in waiting:
                if token.done() and not token.cancelled() and token.exception() is None:
                    raise self.loop.fail(
                        "coordinators reply once their records are committed", f"{active}: {token.result()}"
                    )

        return reply_when_committed

    def _append_batch(self, original: Callable[..., None]) -> Callable[..., None]:
        def append_batch(active: ActiveShard[Any], batch: bytearray) -> None:
            original(active, batch)
            if active.partition.leader_epoch != active.leader_epoch:
                raise self.loop.fail(
                    "a shard appends in the epoch that it was loaded in", f"{active} of {active.leader_epoch}"
                )

        return append_batch

    def _activate(self, original: Callable[..., None]) -> Callable[..., None]:
        def activate(
            runtime: CoordinatorRuntime[Any], index: int, shard: Any, partition: Partition, last_offset: int
        ) -> None:
            newest = self.committed.cluster.image.partition(*partition.key)
            if newest is not None and newest.leader_epoch <= partition.leader_epoch:
                end_offset = self.committed.log(partition).end_offset
                if last_offset + 1 < end_offset:
                    raise self.loop.fail(
                        "a shard loads everything committed", f"{shard} up to {last_offset}, {end_offset}"
                    )
            original(runtime, index, shard, partition, last_offset)

        return activate

    def _replay_batch(self, original: Callable[..., None]) -> Callable[..., None]:
        def replay_batch(shard: Any, header: BatchHeader, batch: memoryview) -> None:
            if checksum(batch) != header.crc:
                raise self.loop.fail("coordinators load intact records", f"{shard}: {header}")
            original(shard, header, batch)

        return replay_batch
