"""The partitions on this node, made and unmade only by what the image says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from penstock.broker.flusher import end_process
from penstock.broker.partition import Partition
from penstock.broker.topic_settings import log_config, node_layers
from penstock.cluster.delta import ImageDelta
from penstock.cluster.effective import Effective, effective_topic_settings
from penstock.cluster.image import ClusterImage
from penstock.cluster.names import CLUSTER_METADATA
from penstock.cluster.state import ResourceType, TopicState
from penstock.log.store import Wanted
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.log.config import LogConfig
    from penstock.log.log import Log
    from penstock.log.store import OpenReport

logger = logging.getLogger("penstock.partitions")

#: Topic and partition.
Key = tuple[str, int]


class PartitionTable:
    def __init__(self, node: Node) -> None:
        self._node = node
        # Keyed by the bytes that requests carry, so that the hot path decodes no names.
        self.by_raw_name: dict[bytes, dict[int, Partition]] = {}
        self.by_raw_id: dict[bytes, dict[int, Partition]] = {}
        #: In the image but not here yet, because the disk refused them; housekeeping tries again.
        self.refused: set[Key] = set()

    def __iter__(self) -> Iterator[Partition]:
        return iter([p for partitions in self.by_raw_name.values() for p in partitions.values()])

    def __len__(self) -> int:
        return sum(len(partitions) for partitions in self.by_raw_name.values())

    def get(self, topic: str, index: int) -> Partition | None:
        found = self.by_raw_name.get(topic.encode())
        return None if found is None else found.get(index)

    def find(self, topic: str, index: int, leader_epoch: int = -1) -> Partition:
        """Raises ApiError: unknown, or asked for under another leader epoch."""
        partition = self.get(topic, index)
        if partition is None:
            raise ApiError(ErrorCode.unknown_topic_or_partition)
        if leader_epoch >= 0 and leader_epoch != partition.leader_epoch:
            is_old = leader_epoch < partition.leader_epoch
            raise ApiError(ErrorCode.fenced_leader_epoch if is_old else ErrorCode.unknown_leader_epoch)
        return partition

    async def apply(self, delta: ImageDelta, image: ClusterImage) -> None:
        """Follow the image: deletions first, since a name may have been taken again.

        What the disk refuses is reported and kept in mind, for the image cannot be taken back.
        """
        for topic in delta.topics_deleted:
            await self._drop(topic)
        wanted: dict[Key, TopicState] = {}
        for name, index in delta.partitions_changed:
            topic = image.topics[name]
            state = topic.partitions[index]
            partition = self.get(name, index)
            if partition is not None:
                partition.leader_epoch = state.leader_epoch
                partition.isr_size, partition.replica_count = len(state.isr), len(state.replicas)
            elif self._node.node_id in state.replicas:
                wanted[name, index] = topic
        await self._open(wanted, image)
        for resource in delta.configs_changed:
            self._reconfigure(image, resource.type, resource.name)

    async def try_again(self, image: ClusterImage) -> list[Key]:
        """Make what the disk refused before; returns what is there now. With the metadata log's turn held."""
        wanted = {key: image.topics[key[0]] for key in self.refused if key[0] in image.topics}
        self.refused.clear()
        await self._open(wanted, image)
        return [key for key in wanted if self.get(*key) is not None]

    async def _open(self, wanted: dict[Key, TopicState], image: ClusterImage) -> None:
        if not wanted:
            return
        settings = {name: self._settings_of(image, name) for name in {name for name, _ in wanted}}
        configs = {name: self._log_config(effective) for name, effective in settings.items()}
        report = await self._node.in_thread(self._open_logs, wanted, configs)
        for (name, index), log in report.opened.items():
            partition = self._adopt(wanted[name, index], index, log)
            partition.min_insync_replicas = _min_insync_replicas(settings[name])
        self.refused |= {key for key, error in report.failed.items() if isinstance(error, OSError)}

    def _open_logs(self, wanted: dict[Key, TopicState], configs: dict[str, LogConfig]) -> OpenReport:
        logs = {key: Wanted(topic.id, configs[key[0]]) for key, topic in wanted.items()}
        try:
            return self._node.store.open_or_create_these(logs, now_ms=self._node.now_ms())
        except OSError as error:
            end_process(error)
            raise

    def _adopt(self, topic: TopicState, index: int, log: Log) -> Partition:
        """Serve a log that is open already."""
        state = topic.partitions[index]
        partition = Partition(
            log,
            topic=topic.name,
            topic_id=topic.id,
            index=index,
            leader_epoch=state.leader_epoch,
            executor=self._node.sync_executor,
            behind_bytes_max=self._node.settings.integer("penstock.write.behind.bytes"),
            metrics=self._node.metrics,
            loop=asyncio.get_running_loop(),
        )
        partition.isr_size, partition.replica_count = len(state.isr), len(state.replicas)
        self.by_raw_name.setdefault(topic.name.encode(), {})[index] = partition
        self.by_raw_id[topic.id.bytes] = self.by_raw_name[topic.name.encode()]
        return partition

    def _settings_of(self, image: ClusterImage, topic: str) -> dict[str, Effective]:
        overrides = image.config(ResourceType.TOPIC, topic)
        return effective_topic_settings(overrides, node_layers(self._node.settings, image))

    def _log_config(self, settings: dict[str, Effective]) -> LogConfig:
        """What produce may unfold is what look-ups and compaction can unfold again."""
        decoded_bytes_max = self._node.settings.integer("penstock.decompress.max.bytes")
        return log_config(settings, decoded_bytes_max=decoded_bytes_max)

    async def _drop(self, topic: TopicState) -> None:
        partitions = self.by_raw_name.pop(topic.name.encode(), {})
        self.by_raw_id.pop(topic.id.bytes, None)
        self._node.metrics.topics.pop(topic.name, None)
        self.refused = {key for key in self.refused if key[0] != topic.name}
        for partition in partitions.values():
            await partition.close()
        folders = await self._node.in_thread(self._take_out, topic)
        self._node.spawn(self._purge(folders))

    def _take_out(self, topic: TopicState) -> list[Path]:
        """Those that could not be opened too. What cannot be moved is reported, as the topic is gone anyway."""
        stored = self._node.store.stored()
        return self._set_aside(key for key in stored if key[0] == topic.name and key[1] in topic.partitions)

    def _set_aside(self, keys: Iterable[Key]) -> list[Path]:
        folders = []
        for key in keys:
            try:
                folders.append(self._node.store.delete(*key))
            except OSError as error:
                logger.error("log not deleted", extra={"partition": _name(key), "reason": str(error)})
        return folders

    async def _purge(self, folders: list[Path]) -> None:
        """Erasing may take long, and nobody has to wait for it; a stop leaves it to the next start."""
        await self._node.in_thread(self._node.store.purge, folders)

    def remove_leftovers(self, image: ClusterImage, deleted: set[UUID]) -> None:
        """Blocking, before anything is opened: topics whose deletion a crash has interrupted."""
        store = self._node.store
        known = {(name, index) for name, topic in image.topics.items() for index in topic.partitions}
        unknown = set(store.stored()) - known - {(CLUSTER_METADATA, 0)}
        leftovers = {key for key in unknown if store.topic_id(*key) in deleted}
        for key in sorted(unknown - leftovers):
            logger.warning("no topic has this partition; it is left alone", extra={"partition": _name(key)})
        store.purge(self._set_aside(leftovers))

    def _reconfigure(self, image: ClusterImage, resource_type: int, name: str) -> None:
        names = [name] if resource_type == ResourceType.TOPIC else list(image.topics)
        for topic in names:
            partitions = self.by_raw_name.get(topic.encode(), {})
            if not partitions:
                continue
            settings = self._settings_of(image, topic)
            config = self._log_config(settings)
            for partition in partitions.values():
                partition.log.configure(config)
                partition.min_insync_replicas = _min_insync_replicas(settings)
                partition.configured()


def _name(key: Key) -> str:
    return f"{key[0]}-{key[1]}"


def _min_insync_replicas(settings: dict[str, Effective]) -> int:
    value = settings["min.insync.replicas"].value
    assert isinstance(value, int)
    return value
