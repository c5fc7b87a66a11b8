"""A node with a source topic and dead letters, which a test can stop at any step of writing them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.raw_client import create_topic, new_node, until
from tests.waiting import eventually_async

from penstock.broker.coordinators.share import dead_letters as dead_letters_module
from penstock.broker.coordinators.share.dead_letter_writer import DeadLetterLogs, DeadLetterWriter
from penstock.broker.node import Node
from penstock.broker.partition.idempotent_append import PlannedAppends
from penstock.groups.share.state.share_state import SharePartitionKey
from penstock.protocol.record_batch import Record, decode_records, encode_batch, iter_batches

GROUP, TOPIC, DEAD = "workers", "jobs", "jobs.dlq"
SETTINGS = {"share_coordinator_state_topic_num_partitions": "1"}


async def started(tmp_path: Path, **settings: str) -> Node:
    node = new_node(tmp_path, **{**SETTINGS, **settings})
    await node.start()
    return node


async def prepare(node: Node, records: int, **configs: str) -> SharePartitionKey:
    """A source with records, and a share partition at its start."""
    await create_topic(node, TOPIC, **configs)
    await append(node, TOPIC, records)
    topic_id = node.image.topics[TOPIC].id
    await node.share_state().persister.initialize(GROUP, topic_id, 0, state_epoch=0, start_offset=0)
    return SharePartitionKey(GROUP, topic_id, 0)


async def append(node: Node, topic: str, count: int, padding: int = 0) -> None:
    partition = node.partitions.find(topic, 0)
    records = [
        Record(
            place,
            1_000 + place,
            b"key %d" % place,
            b"value %d" % place + b"." * padding,
            (("own", b"%d" % place),),
        )
        for place in range(count)
    ]
    appended = partition.append(memoryview(encode_batch(records)), node.environment.now_ms())
    await partition.committed(appended.last_offset)


async def write(
    node: Node, key: SharePartitionKey, *batches: tuple[int, int, int, int], start_offset: int = 0
) -> None:
    await node.share_state().persister.write(
        *key,
        state_epoch=0,
        leader_epoch=0,
        start_offset=start_offset,
        delivery_complete_count=0,
        batches=batches,
    )


def dead_letters_in(node: Node, topic: str = DEAD, index: int | None = None) -> list[Record]:
    """All that readers of any isolation level can see, in one partition or in all."""
    found: list[Record] = []
    state = node.image.topics.get(topic)
    if state is None:
        return found
    for place in state.partitions if index is None else (index,):
        partition = node.partitions.find(topic, place)
        if partition.high_watermark > 0:
            data = partition.log.read(0, 1 << 24, partition.high).data
            found += [record for _, batch in iter_batches(data) for record in decode_records(batch, 1 << 24)]
    return found


def header(record: Record, name: str) -> str | None:
    values = [value for key, value in record.headers if key == name]
    assert len(values) < 2, record
    return values[0].decode() if values and values[0] is not None else None


def dead_letter_offsets(node: Node, topic: str = DEAD) -> Counter[int]:
    return Counter(
        int(header(record, "__dlq.errors.offset") or "-1") for record in dead_letters_in(node, topic)
    )


async def pending(node: Node) -> int:
    return sum(counts[0] for counts in await node.share_state().read_all(lambda shard: shard.counts()))


async def until_pending(node: Node, count: int) -> None:
    async def is_reached() -> bool:
        assert await pending(node) == count
        return True

    await eventually_async(is_reached, what=f"{count} pending dead letters")


async def all_dead_letters_written(node: Node) -> None:
    await until_pending(node, 0)


class CrashPoints:
    """Who first comes to the chosen one goes no further, or only once something has happened to others."""

    def __init__(self, chosen: int, happens: Callable[[], Awaitable[object]] | None = None) -> None:
        self.chosen = chosen
        self._happens = happens or asyncio.Event().wait
        self.passed: list[str] = []
        self.is_reached = False

    async def at(self, name: str) -> None:
        if len(self.passed) == self.chosen and not self.is_reached:
            self.is_reached = True
            await self._happens()
        self.passed.append(name)

    def around(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def wrapped(*args: Any, **options: Any) -> Any:
            await self.at(f"before {name}")
            result = await call(*args, **options)
            await self.at(f"after {name}")
            return result

        return wrapped

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        points = self

        class WatchedShard:
            def __init__(self, active: Any) -> None:
                self._active = active
                self.read = active.read
                self.submit = points.around("a write", active.submit)

        class WatchedWriter(DeadLetterWriter):
            def __init__(self, logs: Any, active: Any, key: Any, manager: Any) -> None:
                super().__init__(logs, WatchedShard(active), key, manager)  # type: ignore[arg-type]

        monkeypatch.setattr(dead_letters_module, "DeadLetterWriter", WatchedWriter)
        for owner, name in (
            (PlannedAppends, "append"),
            (DeadLetterLogs, "read"),
            (DeadLetterLogs, "ensure_topic"),
        ):
            monkeypatch.setattr(owner, name, self.around(name, getattr(owner, name)))

    async def reached_or(self, done: asyncio.Future[Any]) -> None:
        await until(lambda: self.is_reached or done.done())
