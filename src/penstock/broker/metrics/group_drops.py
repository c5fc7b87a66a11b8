"""Counts the records that drop-oldest has deleted before a group had committed them.

The coordinator of a group compares committed offsets with where the leaders have moved the log start to, every two
seconds. Nothing of this runs in a cluster without drop-oldest topics.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from penstock.cluster.image import ResourceType
from penstock.cluster.topic_settings import DROP_OLDEST, OVERFLOW_POLICY
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.topic_drops import TOPIC_DROPS, decode_drops, encode_drops_request

if TYPE_CHECKING:
    from penstock.broker.environment import ImageView, Partitions, PeerCalls, Tasks
    from penstock.groups.group_shard import GroupCoordinatorShard

logger = logging.getLogger("penstock.overflow")

_SAMPLE_SECONDS: Final = 2.0
_ANSWER_SECONDS_MAX: Final = 2.0
#: Groups that are looked at before the event loop gets a turn.
_CHUNK: Final = 200
_HEADER: Final = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_CORRELATION_BYTES: Final = 4

Place = tuple[str, int]


class Groups(Protocol):
    def loaded_shards(self) -> list[GroupCoordinatorShard]: ...


class GroupDrops:
    def __init__(
        self,
        environment: Tasks,
        node_id: int,
        metadata: ImageView,
        *,
        partitions: Callable[[], Partitions],
        groups: Callable[[], Groups],
        peers: Callable[[], PeerCalls],
    ) -> None:
        self._environment = environment
        self._node_id = node_id
        self._metadata = metadata
        self._partitions = partitions
        self._groups = groups
        self._peers = peers
        #: Records by group and topic, of this process.
        self.dropped: Counter[tuple[str, str]] = Counter()
        #: Up to where the losses of the groups that this node coordinates are counted, by group and partition. What a
        #: group has lost before it was sampled here is not counted: another coordinator may have done it.
        self._counted: dict[tuple[str, str, int], int] = {}
        self._sampling: asyncio.Task[None] | None = None

    def image_changed(self) -> None:
        """Begin to sample if a topic has become drop-oldest."""
        if (self._sampling is None or self._sampling.done()) and self._topics():
            self._sampling = self._environment.spawn(self._sample_repeatedly())

    def _topics(self) -> set[str]:
        return {
            resource.name
            for resource, overrides in self._metadata.image.configs.items()
            if resource.type == ResourceType.TOPIC and overrides.get(OVERFLOW_POLICY) == DROP_OLDEST
        }

    async def _sample_repeatedly(self) -> None:
        while topics := self._topics():
            try:
                await self.sample(topics)
            except Exception:
                logger.exception("what groups have lost could not be sampled")  # the next round may succeed
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def sample(self, topics: set[str]) -> None:
        starts = await self._dropped_before(topics)
        counted: dict[tuple[str, str, int], int] = {}
        number = 0
        for shard in self._groups().loaded_shards():
            for group in list(shard.groups):
                self._count(group, shard, starts, counted)
                number += 1
                if number % _CHUNK == 0:
                    await asyncio.sleep(0)
        self._counted = counted

    def knows(self, group: str) -> bool:
        """Whether losses of the group are counted from now on."""
        return any(key[0] == group for key in self._counted)

    def _count(
        self,
        group: str,
        shard: GroupCoordinatorShard,
        starts: dict[Place, int],
        counted: dict[tuple[str, str, int], int],
    ) -> None:
        for topic, index, committed in list(shard.offsets.of_group(group)):
            key, start = (group, topic, index), starts.get((topic, index))
            before = self._counted.get(key, start)
            if before is None:
                continue  # not a drop-oldest topic, or its leader has never answered
            counted[key] = before if start is None else max(before, start)
            lost = counted[key] - max(committed.offset, before)
            if lost > 0:
                self.dropped[group, topic] += lost

    async def _dropped_before(self, topics: set[str]) -> dict[Place, int]:
        """Return where drop-oldest has moved the log start of partitions to, as far as their leaders answer."""
        image, starts = self._metadata.image, dict[Place, int]()
        remote: dict[int, set[Place]] = {}
        for name in topics & image.topics.keys():
            for index, state in image.topics[name].partitions.items():
                led = self._partitions().led(name, index)
                if led is not None:
                    starts[name, index] = led.dropped_before
                elif state.has_leader and state.leader != self._node_id:
                    remote.setdefault(state.leader, set()).add((name, index))
        for answer in await asyncio.gather(*(self._ask(*asked) for asked in remote.items())):
            starts.update(answer)
        return starts

    async def _ask(self, node: int, places: set[Place]) -> dict[Place, int]:
        from penstock.broker.network.peers import PeerUnreachable

        frame = _HEADER.pack(TOPIC_DROPS, 0, 0, -1) + encode_drops_request(
            sorted({topic for topic, _ in places})
        )
        try:
            reply = await self._peers().raw(node, frame, timeout_s=_ANSWER_SECONDS_MAX, purpose="topic-drops")
            rows = decode_drops(reply, _CORRELATION_BYTES)
        except (PeerUnreachable, TimeoutError, MalformedFrame) as error:
            logger.info("a node did not say what it has dropped", extra={"node": node, "reason": str(error)})
            return {}
        starts = dict.fromkeys(places, -1)  # where nothing was dropped, there is no row
        starts.update(
            ((row.topic, row.partition), row.dropped_before)
            for row in rows
            if (row.topic, row.partition) in places
        )
        return starts
