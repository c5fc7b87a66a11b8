"""TopicDrops (key 30003), v0. How many records of topics this node has dropped, and how far drop-oldest has come.

Our own API, encoded by hand. Topics that the client may not describe, and topics that do not exist, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.broker.network.connection import Connection, Reply
from penstock.broker.network.requests import RequestContext, own_api_reply
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.topic_drops import PartitionDrops, encode_drops, parse_drops_request


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply:
    """Raises MalformedFrame."""
    names = dict.fromkeys(parse_drops_request(frame, position))
    is_node = ctx.may(Operation.CLUSTER_ACTION, ResourceType.CLUSTER)
    rows = [
        row
        for name in names
        if is_node or ctx.may(Operation.DESCRIBE, ResourceType.TOPIC, name)
        for row in _rows(ctx, name)
    ]
    return own_api_reply(correlation_id, encode_drops(rows))


def _rows(ctx: RequestContext, name: str) -> Iterator[PartitionDrops]:
    services = ctx.services
    topic = services.image.topics.get(name)
    if topic is None:
        return
    for index in topic.partitions:
        led = services.partitions.led(name, index)
        dropped_before = -1 if led is None else led.dropped_before
        counts = services.overflow.drops.of(topic.id, index)
        if counts or dropped_before >= 0:
            yield PartitionDrops(
                name,
                index,
                dropped_before,
                tuple((by.value, reason.value, count) for (by, reason), count in sorted(counts.items())),
            )
