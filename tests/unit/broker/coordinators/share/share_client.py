"""A raw member of a share group for tests of leaders: requests from kio's schemas, and a topic to read."""

import asyncio
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from kio.schema.share_acknowledge.v2 import request as acknowledging
from kio.schema.share_fetch.v2 import request as fetching
from tests.unit.broker.raw_client import create_topic
from tests.unit.broker.wire_client import WireClient

from penstock.broker.handlers.alter_configs import alter_cluster_configs
from penstock.broker.node import Node
from penstock.cluster.controller.alter_configs import (
    AlterConfigsResource,
    ConfigChange,
    ConfigOp,
    incremental_alter_configs,
)
from penstock.cluster.image import ConfigResource, ResourceType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, decode_records, encode_batch, iter_batches

SETTINGS = {
    "share_coordinator_state_topic_num_partitions": "2",
    "group_share_min_record_lock_duration_ms": "50",
    "group_share_record_lock_duration_ms": "30000",
    "penstock_flush": "never",
}
ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
GROUP = "workers"
Batch = tuple[int, int, Sequence[int]]
_names = itertools.count()


class Clock:
    """The time by which locks and delays run out. A test moves it on, so that none depends on its own speed."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self._node = node
        self._ahead_ms = 0
        for module in ("fetch", "partitions"):
            monkeypatch.setattr(f"penstock.broker.coordinators.share.{module}.monotonic_ms", self._now_ms)

    def advance(self, ms: int) -> None:
        self._ahead_ms += ms
        for partition in self._node.share():
            partition._tick()

    def _now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000) + self._ahead_ms


class Got(NamedTuple):
    """One partition of an reply: acquired offsets with their delivery counts, and the records that came along."""

    error: ErrorCode
    acknowledge_error: ErrorCode
    acquired: list[tuple[int, int]]
    ranges: list[tuple[int, int, int]]
    values: dict[int, bytes | None]


class Member:
    def __init__(self, node: Node, client: WireClient, topic: str, group: str) -> None:
        self.node, self.client, self.group = node, client, group
        self.name = f"member-{next(_names)}"
        self.topic_id: UUID = node.image.topics[topic].id
        self.epoch = 0

    @classmethod
    async def join(cls, node: Node, topic: str = "t", group: str = GROUP) -> "Member":
        return cls(node, await WireClient.connect(node), topic, group)

    async def ask(self, *batches: Batch, epoch: int | None = None, version: int = 2, **options: Any) -> Any:
        """The whole reply of a ShareFetch of partition 0."""
        partitions = options.pop("partitions", (0,))
        limits: dict[str, Any] = {
            "max_wait": timedelta(milliseconds=options.pop("wait_ms", 0)),
            "min_bytes": options.pop("min_bytes", 1),
            "max_bytes": options.pop("max_bytes", 1 << 20),
            "max_records": options.pop("records", 500),
            "batch_size": options.pop("batch_size", 500),
        }
        parts = tuple(
            fetching.FetchPartition(
                partition_index=index, acknowledgement_batches=_batches(fetching, batches)
            )
            for index in partitions
        )
        request = fetching.ShareFetchRequest(
            group_id=self.group,
            member_id=self.name,
            share_session_epoch=self.epoch if epoch is None else epoch,
            topics=(fetching.FetchTopic(topic_id=self.topic_id, partitions=parts),),
            forgotten_topics_data=(),
            **limits,
            **options,
        )
        reply = await self.client.ask(request, version=version)
        if reply.error_code is ErrorCode.none and epoch is None:
            self.epoch += 1
        return reply

    async def fetch(self, *batches: Batch, **options: Any) -> Got:
        reply = await self.ask(*batches, **options)
        assert reply.error_code is ErrorCode.none, reply
        return got(reply)

    async def acknowledge(
        self, *batches: Batch, epoch: int | None = None, version: int = 2, is_renew_ack: bool = False
    ) -> ErrorCode:
        """The partition's error, or that of the whole request."""
        part = acknowledging.AcknowledgePartition(
            partition_index=0, acknowledgement_batches=_batches(acknowledging, batches)
        )
        request = acknowledging.ShareAcknowledgeRequest(
            group_id=self.group,
            member_id=self.name,
            share_session_epoch=self.epoch if epoch is None else epoch,
            is_renew_ack=is_renew_ack,
            topics=(acknowledging.AcknowledgeTopic(topic_id=self.topic_id, partitions=(part,)),),
        )
        reply = await self.client.ask(request, version=version)
        if reply.error_code is not ErrorCode.none:
            return reply.error_code
        if epoch is None:
            self.epoch += 1
        return reply.responses[0].partitions[0].error_code if reply.responses else ErrorCode.none

    async def leave(self) -> Any:
        return await self.ask(epoch=-1)

    async def vanish(self) -> None:
        await self.client.close()


def _batches(schema: Any, batches: Sequence[Batch]) -> tuple[Any, ...]:
    return tuple(
        schema.AcknowledgementBatch(first_offset=first, last_offset=last, acknowledge_types=tuple(types))
        for first, last, types in batches
    )


def got(reply: Any) -> Got:
    if not reply.responses:
        return Got(ErrorCode.none, ErrorCode.none, [], [], {})
    (topic,) = reply.responses
    (part,) = topic.partitions
    records = part.records or b""
    ranges = [(one.first_offset, one.last_offset, one.delivery_count) for one in part.acquired_records]
    return Got(
        part.error_code,
        ErrorCode(part.acknowledge_error_code),
        [(offset, count) for first, last, count in ranges for offset in range(first, last + 1)],
        ranges,
        {
            record.offset: record.value
            for header, batch in iter_batches(records)
            if not header.is_control
            for record in decode_records(batch, 1 << 20)
        },
    )


async def share_topic(
    node: Node, *, group: str = GROUP, topic: str = "t", start: int = 0, **configs: str
) -> None:
    """A topic whose state for the group is there, as the group coordinator would have made it."""
    if topic not in node.image.topics:
        await create_topic(node, topic)
    if configs:
        await set_group(node, group, **configs)
    topic_id = node.image.topics[topic].id
    await node.share_state().persister.initialize(group, topic_id, 0, state_epoch=1, start_offset=start)


async def set_group(node: Node, group: str = GROUP, **configs: str) -> None:
    changes = tuple(
        ConfigChange(name.replace("_", "."), ConfigOp.SET, value) for name, value in configs.items()
    )
    change = AlterConfigsResource(resource=ConfigResource(ResourceType.GROUP, group), changes=changes)
    (result,) = await alter_cluster_configs(node, incremental_alter_configs, [change], False)
    assert result.error is ErrorCode.none, result


async def publish(node: Node, count: int, *, topic: str = "t", index: int = 0, batches: int = 1) -> None:
    partition = node.partitions.find(topic, index)
    for _ in range(batches):
        first = partition.log.end_offset
        records = [Record(at, 1000 + at, None, b"v%d" % (first + at)) for at in range(count)]
        partition.append(memoryview(encode_batch(records)), node.environment.now_ms())
    await partition.committed(partition.log.end_offset - 1)


async def stored(node: Node, *, group: str = GROUP, topic: str = "t", index: int = 0) -> Any:
    found = node.partitions.find(topic, index)
    return await node.share_state().persister.read(group, found.topic_id, index, found.leader_epoch)
