"""Committed offsets in a log that is compacted during transactions: a reload gives the same state."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compacting import DAY_MS, NOW_MS, clean, open_log, roll
from tests.unit.groups.test_transactional_offsets import (
    PRODUCERS,
    SETTINGS,
    Entry,
    World,
    crowd,
    operations,
)

from penstock.broker.coordinators.runtime.active_shard import replay_log
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.log.compaction.cleaner import LogCleaner
from penstock.log.log import Log
from penstock.protocol.record_batch import TRANSACTIONAL, EndMarker, Record, encode_batch, encode_end_marker

steps = st.lists(
    st.one_of(
        crowd,
        crowd,
        operations,
        st.tuples(st.just("roll")),
        st.tuples(st.just("clean"), st.sampled_from((0, DAY_MS, 3 * DAY_MS))),
    ),
    max_size=40,
)


class LoggedWorld(World):
    """What is replayed is in a real log too, batch by batch."""

    def __init__(self, log: Log) -> None:
        self.disk = log
        self.clean_ms = NOW_MS
        self._cleaner = LogCleaner(log.directory.parent, dedupe_buffer_bytes=1 << 16)
        super().__init__()

    def roll(self) -> None:
        roll(self.disk)

    def clean(self, after_ms: int) -> None:
        self.clean_ms += after_ms
        first_open = self.disk.producers.transactions.first_open_offset
        stable = self.disk.end_offset if first_open is None else first_open
        clean(self.disk, self._cleaner, now_ms=self.clean_ms, stable_offset=stable)

    def _replay(self, entry: Entry) -> None:
        super()._replay(entry)
        self.disk.append(memoryview(batch_of(entry)), leader_epoch=0, now_ms=NOW_MS, internal=True)


def batch_of(entry: Entry) -> bytearray:
    if entry.key is None:
        assert entry.producer is not None
        return encode_end_marker(EndMarker(entry.producer, 0, 0, bool(entry.value)), NOW_MS)
    assert not isinstance(entry.value, bool)
    record = Record(0, NOW_MS, entry.key, entry.value)
    if entry.producer is None:
        return encode_batch([record])
    return encode_batch([record], attributes=TRANSACTIONAL, producer_id=entry.producer, producer_epoch=0)


def loaded(log: Log) -> GroupCoordinatorShard:
    async def at_once(call: Callable[..., Any], *given: Any) -> Any:
        return call(*given)

    shard = GroupCoordinatorShard(SETTINGS)
    asyncio.run(replay_log(shard, log, log.end, at_once))
    return shard


@settings(max_examples=40, deadline=None)
@given(steps)
def test_a_shard_loaded_from_a_cleaned_log_is_the_same(steps: list[tuple[Any, ...]]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        log = open_log(folder / "__consumer_offsets-0")
        world = LoggedWorld(log)
        for name, *arguments in steps:
            getattr(world, name)(*arguments)
        for producer in (*PRODUCERS, None, None):
            # With ever fewer transactions open, ever more can be cleaned.
            world.roll()
            world.clean(2 * DAY_MS)
            shard = loaded(log)
            assert shard.stored() == world.shard.stored()
            assert shard.offsets.staged().keys() == world.shard.offsets.staged().keys()
            if producer is not None:
                world.end(producer, committed=producer % 2 == 0)
        log.close()
    finally:
        shutil.rmtree(folder)
