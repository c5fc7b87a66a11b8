"""The partitions on this node, made and unmade, and given their roles, only by what the image says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast
from uuid import UUID

from penstock.broker.flusher import end_process
from penstock.broker.losses import Key, Losses, has_peers, is_damage, is_owed, others_have
from penstock.broker.partition import Partition, Role
from penstock.broker.topic_settings import log_config, node_layers
from penstock.broker.topology import absence
from penstock.cluster.delta import ImageDelta
from penstock.cluster.effective import Effective, effective_topic_settings
from penstock.cluster.image import ClusterImage
from penstock.cluster.names import CLUSTER_METADATA
from penstock.cluster.records import NO_LEADER
from penstock.cluster.state import PartitionState, ResourceType, TopicState
from penstock.cluster.topic_settings import FOLLOWER_THROTTLED, LEADER_THROTTLED
from penstock.log.reader import DamagedRead
from penstock.log.recovery import CorruptLog
from penstock.log.store import Wanted
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.log.config import LogConfig
    from penstock.log.log import Log
    from penstock.log.store import OpenReport

logger = logging.getLogger("penstock.partitions")


class PartitionTable:
    def __init__(self, node: Node) -> None:
        self._node = node
        # Keyed by the bytes that requests carry, so that the hot path decodes no names.
        self.by_raw_name: dict[bytes, dict[int, Partition]] = {}
        self.by_raw_id: dict[bytes, dict[int, Partition]] = {}
        #: In the image but not here yet, because the disk refused them; housekeeping tries again.
        self.refused: set[Key] = set()
        #: The only copy, whose folder has gone: not served until an operator brings it back or accepts the loss.
        self.missing: set[Key] = set()
        self.lost = Losses(node)
        self._surveyed: set[Key] = set()  # just now

    def __iter__(self) -> Iterator[Partition]:
        return iter([p for partitions in self.by_raw_name.values() for p in partitions.values()])

    def __len__(self) -> int:
        return sum(len(partitions) for partitions in self.by_raw_name.values())

    def get(self, topic: str, index: int) -> Partition | None:
        found = self.by_raw_name.get(topic.encode())
        return None if found is None else found.get(index)

    def led(self, topic: str, index: int) -> Partition | None:
        partition = self.get(topic, index)
        return partition if partition is not None and partition.is_leader else None

    def find(self, topic: str, index: int, leader_epoch: int = -1) -> Partition:
        """One that this node leads. Raises ApiError: unknown, led elsewhere, or under another leader epoch."""
        partition = self.get(topic, index)
        if partition is None:
            found = self._node.image.topics.get(topic)
            raise absence(self._node, found, index, by_id=False)
        partition.check_leader(leader_epoch)
        return partition

    def is_kept_out(self, key: Key) -> bool:
        """A replica that should be here, and the disk does not let it: full, unreadable, damaged or gone."""
        kept_out = key in self.refused or key in self.missing or key in self.lost
        return kept_out or key in self._node.store.failed

    def high_watermarks(self) -> dict[Key, int]:
        """What is saved of them: a leader without followers does not need it."""
        return {p.key: p.high.offset for p in self if p.is_replicated}

    # -- following the image -------------------------------------------------------------------------

    async def apply(self, delta: ImageDelta, image: ClusterImage) -> None:
        """Follow the image: deletions first, since a name may have been taken again.

        What the disk refuses is reported and kept in mind, for the image cannot be taken back.
        """
        for topic in delta.topics_deleted:
            try:
                await self._drop(topic)
            except Exception:
                # The other topics have to be followed all the same.
                logger.exception("topic not dropped", extra={"topic": topic.name})
        # Before the in-sync sets: a set that was decided under a higher minimum must not be counted under a lower one.
        for resource in delta.configs_changed:
            self._reconfigure(image, resource.type, resource.name)
        wanted: dict[Key, TopicState] = {}
        for name, index in delta.partitions_changed:
            topic = image.topics[name]
            try:
                if await self._is_to_be_opened((name, index), topic.partitions[index]):
                    wanted[name, index] = topic
            except Exception:
                self._take_no_role((name, index), topic.partitions[index])
        await self._open(wanted, image)

    async def _is_to_be_opened(self, key: Key, state: PartitionState) -> bool:
        """What is open already takes its role at once, or goes."""
        partition = self.get(*key)
        if self._node.node_id not in state.replicas:
            await self._remove(key)
        elif partition is None or self._is_to_be_replaced(key, state):
            return True
        else:
            await self._take_role(partition, state)
        return False

    def _take_no_role(self, key: Key, state: PartitionState) -> None:
        """After a failure: its old role is over in any case, and the other partitions go on."""
        logger.exception("partition cannot follow the metadata", extra={"partition": _name(key)})
        partition = self.get(*key)
        if partition is not None:
            partition.follow(state._replace(leader=NO_LEADER), local_id=self._node.node_id)

    async def _take_role(self, partition: Partition, state: PartitionState) -> None:
        node, was_following = self._node, partition.role is Role.FOLLOWER
        if was_following and state.leader in (node.node_id, NO_LEADER):
            await node.fetchers.unfollow(partition)
        if state.leader == node.node_id:
            self._lead(partition, state)
            return
        partition.follow(state, local_id=node.node_id)
        if state.has_leader:
            node.fetchers.follow(partition)

    def _lead(self, partition: Partition, state: PartitionState) -> None:
        is_new = not partition.is_leader or partition.leader_epoch != state.leader_epoch
        high_watermark = max(partition.high.offset, partition.leaders_high_watermark)
        lag_ms_max = self._node.settings.integer("replica.lag.time.max.ms")
        try:
            partition.lead(state, local_id=self._node.node_id, lag_ms_max=lag_ms_max)
            if partition.leading is not None:
                self._node.isr.wake(partition)  # from now on somebody looks after who is in sync
        except ApiError as error:
            partition.follow(state._replace(leader=NO_LEADER), local_id=self._node.node_id)
            self.unreadable(partition, error)
        if is_new and state.leader_recovering:
            self._report_unclean(partition, state, high_watermark)

    def _report_unclean(self, partition: Partition, state: PartitionState, high_watermark: int) -> None:
        """Followers that had more report what they give up when they truncate."""
        self._node.metrics.unclean_leaderships += 1
        end_offset = partition.log.end_offset
        logger.warning(
            "leading after an unclean election: what was committed from here on is lost",
            extra={
                "partition": _name(partition.key),
                "leader_epoch": state.leader_epoch,
                "epoch_start_offset": end_offset,
                "known_high_watermark": high_watermark,
                "known_lost": max(0, high_watermark - end_offset),
            },
        )

    async def try_again(self, image: ClusterImage) -> list[Key]:
        """Make what the disk refused before; returns what is there now. With the metadata log's turn held."""
        wanted = {key: image.topics[key[0]] for key in self.refused if self._is_mine(image, key)}
        self.refused.clear()
        await self._open(wanted, image)
        return [key for key in wanted if self.get(*key) is not None]

    def _is_mine(self, image: ClusterImage, key: Key) -> bool:
        state = image.partition(*key)
        return state is not None and self._node.node_id in state.replicas

    # -- opening -------------------------------------------------------------------------------------

    async def _open(self, wanted: dict[Key, TopicState], image: ClusterImage) -> None:
        wanted = await self._without_lost(wanted)
        if not wanted:
            return
        settings = {name: self._settings_of(image, name) for name in {name for name, _ in wanted}}
        report = await self._open_logs(wanted, settings)
        self.refused |= {key for key, error in report.failed.items() if isinstance(error, OSError)}
        again: dict[Key, TopicState] = {}
        for key, error in report.failed.items():
            if has_peers(wanted[key].partitions[key[1]]):
                self._lose(key, str(error))
                if isinstance(error, CorruptLog):
                    again[key] = wanted[key]
        await self._open(again, image)

    async def _without_lost(self, wanted: dict[Key, TopicState]) -> dict[Key, TopicState]:
        """What was lost is begun anew where others have it, and not touched where they do not."""
        states = {key: topic.partitions[key[1]] for key, topic in wanted.items()}
        replaced = {key for key, state in states.items() if self._is_to_be_replaced(key, state)}
        for key in replaced:
            await self._give_up(key)
        if wanted and self._node.state == "starting":
            here = {*await self._node.in_thread(self._node.store.stored), *replaced}
            for key, state in states.items():
                if key in here:
                    continue
                if is_owed(state, self._node.node_id):
                    self._lose(key, "the folder is missing")
                elif not has_peers(state) and self._node.store.has_held(*key, wanted[key].id):
                    self._miss(key)
        return {
            key: topic
            for key, topic in wanted.items()
            if key not in self.missing and (key not in self.lost or key in self.refused)
        }

    async def _open_logs(
        self, wanted: dict[Key, TopicState], settings: dict[str, dict[str, Effective]]
    ) -> OpenReport:
        configs = {name: self._log_config(settings[name]) for name in {name for name, _ in wanted}}
        report = await self._node.in_thread(self._open_in_store, wanted, configs)
        for (name, index), log in report.opened.items():
            topic = wanted[name, index]
            state = topic.partitions[index]
            if log.was_beheaded and has_peers(state):
                # Not served, as if it could not be opened: a copy without its beginning must not lead.
                report.failed[name, index] = CorruptLog(f"what was before offset {log.start_offset} has gone")
                continue
            if log.damages and others_have(state, self._node.node_id):
                report.failed[name, index] = CorruptLog(f"damaged: {log.damages[0]}")
                continue
            partition = self._adopt(topic, index, log, _min_insync_replicas(settings[name]))
            self._throttle(partition, settings[name])
            self.lost.forget((name, index))
            if (name, index) in report.short and has_peers(state):
                self._lose_end((name, index), f"the log ends at {log.end_offset}, and more was synced once")
            elif self._is_trusted_too_far(log, state):
                self._lose_end((name, index), "it was not stopped cleanly, and syncs when it likes")
            await self._take_role(partition, state)
        return report

    def _open_in_store(self, wanted: dict[Key, TopicState], configs: dict[str, LogConfig]) -> OpenReport:
        store, now_ms = self._node.store, self._node.now_ms()
        logs = {key: Wanted(topic.id, configs[key[0]]) for key, topic in wanted.items()}
        try:
            report = store.open_or_create_these(logs, now_ms=now_ms)
            for key in report.short:
                if not has_peers(wanted[key].partitions[key[1]]):
                    # Nobody else has what was at its end, and its offsets must not be given out again.
                    synced_offset = store.synced_offset(*key, wanted[key].id)
                    report.opened[key].continue_at(synced_offset, now_ms)
        except OSError as error:
            end_process(error)
            raise
        return report

    def _adopt(self, topic: TopicState, index: int, log: Log, min_insync_replicas: int) -> Partition:
        """Serve a log that is open already."""
        has_followers = has_peers(topic.partitions[index])
        saved = self._node.store.high_watermarks.get((topic.name, index), 0)
        partition = Partition(
            log,
            topic=topic.name,
            topic_id=topic.id,
            index=index,
            executor=self._node.sync_executor,
            behind_bytes_max=self._node.settings.integer("penstock.write.behind.bytes"),
            metrics=self._node.metrics,
            loop=asyncio.get_running_loop(),
            high_watermark=saved if has_followers else None,
            min_insync_replicas=min_insync_replicas,
        )
        self.by_raw_name.setdefault(topic.name.encode(), {})[index] = partition
        self.by_raw_id[topic.id.bytes] = self.by_raw_name[topic.name.encode()]
        return partition

    # -- losses --------------------------------------------------------------------------------------

    def unreadable(self, partition: Partition, error: ApiError) -> None:
        """A file below the high watermark is missing or damaged: others have it, if there are others."""
        if isinstance(error, DamagedRead) and partition.isr_size <= 1:
            self.survey(partition, error.segment_base)
            return
        if error.code is ErrorCode.corrupt_message and partition.isr_size <= 1:
            return  # known, and served as far as it is whole
        if is_damage(error) and partition.is_replicated:
            self._lose(partition.key, error.message or error.code.name)

    def survey(self, partition: Partition, offset: int) -> None:
        """Somebody met damage in the only copy: find out what of the segment is whole, to serve that."""
        if partition.key not in self._surveyed:
            self._surveyed.add(partition.key)
            self._node.spawn(self._survey(partition, offset))

    async def _survey(self, partition: Partition, offset: int) -> None:
        try:
            await self._node.in_thread(partition.log.survey, offset)
        except OSError as error:
            logger.error(
                "damage not surveyed", extra={"partition": _name(partition.key), "reason": str(error)}
            )
        finally:
            self._surveyed.discard(partition.key)

    def _lose(self, key: Key, reason: str) -> None:
        if self.lost.add(key, reason) and self._node.state != "starting":
            self._node.spawn(self.lost.report())

    def _miss(self, key: Key) -> None:
        """An empty log in its place would say that nothing was ever written."""
        self.missing.add(key)
        logger.critical(
            "partition folder is missing: bring it back and restart, or accept the loss with `penstock disk`",
            extra={"partition": _name(key), "data_dir": str(self._node.store.directory)},
        )

    def _is_trusted_too_far(self, log: Log, state: PartitionState) -> bool:
        """The controller counts on a copy that may lack its end: it takes this node's flush policy for another."""
        may_lack_end = log.config.flush != "ack" and not self._node.lifecycle.was_clean
        return may_lack_end and self._node.state == "starting" and self._node.node_id in state.elr

    def _lose_end(self, key: Key, reason: str) -> None:
        """Served, as what is there is sound, but it must not lead before the rest has been fetched."""
        self.lost.add_short(key, reason)
        if self._node.state != "starting":
            self._node.spawn(self.lost.report())

    def _is_to_be_replaced(self, key: Key, state: PartitionState) -> bool:
        return key in self.lost and key not in self.refused and self.lost.is_replaceable(key, state)

    async def _give_up(self, key: Key) -> None:
        """The copy here is not needed any more; it stays in the folder under another name."""
        await self._close(key)
        try:
            await self._node.in_thread(self._keep_aside, key)
        except OSError as error:
            logger.error("log not set aside", extra={"partition": _name(key), "reason": str(error)})
        else:
            self.lost.forget(key)

    def _keep_aside(self, key: Key) -> None:
        if key in self._node.store.stored():
            self._node.store.keep_aside(*key)

    # -- removing ------------------------------------------------------------------------------------

    async def _remove(self, key: Key) -> None:
        """This node is no replica any more."""
        is_here = self.get(*key) is not None or key in self.lost or key in self._node.store.failed
        self.refused.discard(key)
        self.missing.discard(key)
        self.lost.forget(key)
        if not is_here:
            return
        await self._close(key)
        folders = await self._node.in_thread(self._set_aside_stored, {key})
        self._node.spawn(self._purge(folders))

    async def _close(self, key: Key) -> None:
        partitions = self.by_raw_name.get(key[0].encode(), {})
        partition = partitions.pop(key[1], None)
        if partition is None:
            return
        if not partitions:
            del self.by_raw_name[key[0].encode()]
            self.by_raw_id.pop(partition.topic_id.bytes, None)
            self._node.metrics.topics.pop(key[0], None)
        await self._close_partition(partition)

    async def _close_partition(self, partition: Partition) -> None:
        if partition.role is Role.FOLLOWER:
            await self._node.fetchers.unfollow(partition)
        await partition.close()

    def _set_aside_stored(self, keys: set[Key]) -> list[Path]:
        return self._set_aside(key for key in self._node.store.stored() if key in keys)

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
        self.missing = {key for key in self.missing if key[0] != topic.name}
        for index in topic.partitions:
            self.lost.forget((topic.name, index))
        for partition in partitions.values():
            await self._close_partition(partition)
        # Those that could not be opened too.
        keys = {(topic.name, index) for index in topic.partitions}
        folders = await self._node.in_thread(self._set_aside_stored, keys)
        self._node.spawn(self._purge(folders))

    def _set_aside(self, keys: Iterable[Key]) -> list[Path]:
        """What cannot be moved is reported, as the topic is gone anyway."""
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
        """Blocking, before anything is opened: deletions and moves to other brokers that a crash has interrupted."""
        store, node_id = self._node.store, self._node.node_id
        states = {(name, i): state for name, t in image.topics.items() for i, state in t.partitions.items()}
        stored = set(store.stored()) - {(CLUSTER_METADATA, 0)}
        unknown = stored - states.keys()
        leftovers = {key for key in unknown if store.topic_id(*key) in deleted}
        leftovers |= {key for key in stored & states.keys() if node_id not in states[key].replicas}
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
                partition.set_min_insync_replicas(_min_insync_replicas(settings))
                self._throttle(partition, settings)
                partition.configured()

    def _throttle(self, partition: Partition, settings: dict[str, Effective]) -> None:
        names = ("*", f"{partition.index}:{self._node.node_id}")
        partition.is_leader_throttled, partition.is_follower_throttled = (
            any(name in cast(tuple[str, ...], settings[setting].value) for name in names)
            for setting in (LEADER_THROTTLED, FOLLOWER_THROTTLED)
        )


def _name(key: Key) -> str:
    return f"{key[0]}-{key[1]}"


def _min_insync_replicas(settings: dict[str, Effective]) -> int:
    value = settings["min.insync.replicas"].value
    assert isinstance(value, int)
    return value
