"""The replicas on this node. Only the metadata image creates and deletes them and gives them their roles.

A replica is lost when its log is missing, damaged, or on a disk that refuses it. The broker reports lost replicas to
the controller, which removes them from the ISR. Only after that, and only if another replica can lead, does the broker
set a damaged copy aside and fetch the records again. The last copy of a partition stays where it is for an operator,
however bad it is.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast
from uuid import UUID

from penstock.broker.config.effective_settings import log_config, node_layers
from penstock.broker.environment import end_process
from penstock.broker.partition.client_view import find_topic
from penstock.broker.partition.partition import Partition, ReplicaRole
from penstock.cluster.image import ClusterImage, ImageDelta, PartitionState, ResourceType, TopicState
from penstock.cluster.metadata_records import NO_LEADER
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.cluster.topic_settings import (
    FOLLOWER_THROTTLED,
    LEADER_THROTTLED,
    EffectiveSetting,
    TopicSettingsCache,
)
from penstock.log.log_manager import LogToOpen
from penstock.log.reader import DamagedRead
from penstock.log.recovery import CorruptLog
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Environment, ImageView
    from penstock.broker.metrics.counters import Metrics
    from penstock.broker.partition.alter_partition_manager import AlterPartitionManager
    from penstock.broker.partition.overflow import OverflowManager
    from penstock.log.config import LogConfig
    from penstock.log.log import Log
    from penstock.log.log_manager import LogManager, OpenReport


logger = logging.getLogger("penstock.partitions")

#: Error codes of a read from a missing or damaged file.
_UNREADABLE: Final = frozenset({ErrorCode.kafka_storage_error, ErrorCode.corrupt_message})

_REPORT_RETRY_S: Final = 0.5

#: Topic and partition.
TopicPartition = tuple[str, int]
#: Reports lost replicas to the controller, and returns those that it accepted. Raises ApiError.
ReportLost = Callable[[Collection[TopicPartition]], Awaitable[set[TopicPartition]]]


class Fetchers(Protocol):
    """The fetches of followed partitions; `partition.replica_fetcher.ReplicaFetcherManager` documents them."""

    def follow(self, partition: Partition) -> None: ...
    def unfollow(self, partition: Partition) -> Awaitable[object]: ...
    def is_truncating(self, partition: Partition) -> bool: ...


class LostReplicas:
    def __init__(self, node_id: int, metrics: Metrics, report: ReportLost) -> None:
        self._node_id = node_id
        self._metrics = metrics
        self._report = report
        self._reasons: dict[TopicPartition, str] = {}
        self._short: set[TopicPartition] = set()  # served without their tail, and not reported yet
        self._reported: set[TopicPartition] = set()
        self._is_reporting = False

    def __contains__(self, key: TopicPartition) -> bool:
        return key in self._reasons

    def __len__(self) -> int:
        return len(self._reasons.keys() | self._short)

    @property
    def keys(self) -> frozenset[TopicPartition]:
        return frozenset(self._reasons)

    def add(self, key: TopicPartition, reason: str) -> bool:
        """Return False if the replica is already known to be lost."""
        if key in self._reasons:
            return False
        self._reasons[key] = reason
        self._note(key, reason)
        return True

    def add_truncated(self, key: TopicPartition, reason: str) -> None:
        """Add a replica that lacks its tail. The rest is intact, so it stays in service and is only reported."""
        self._short.add(key)
        self._note(key, reason)

    def _note(self, key: TopicPartition, reason: str) -> None:
        self._metrics.replicas_lost += 1
        logger.error("replica lost", extra={"partition": f"{key[0]}-{key[1]}", "reason": reason})

    def forget(self, key: TopicPartition) -> None:
        self._reasons.pop(key, None)
        self._short.discard(key)
        self._reported.discard(key)

    async def told(self) -> None:
        """Wait until the controller knows of all replicas that lack their tail: until then it could elect them."""
        await self.report()
        while self._short:
            await asyncio.sleep(_REPORT_RETRY_S)
            await self.report()

    async def report(self) -> None:
        """Report the losses that the controller does not know yet. What it does not accept is reported again later."""
        keys = (self._reasons.keys() | self._short) - self._reported
        if not keys or self._is_reporting:
            return
        self._is_reporting = True
        try:
            accepted = await self._report(sorted(keys))
            self._reported |= accepted & self._reasons.keys()
            self._short -= accepted
        except ApiError as error:
            logger.warning("losses not reported yet", extra={"replicas": len(keys), "reason": str(error)})
        finally:
            self._is_reporting = False

    def is_replaceable(self, key: TopicPartition, state: PartitionState) -> bool:
        """Whether other replicas have all records, or an operator has chosen to go on without this copy."""
        able = {*state.isr, *state.elr}
        if self._node_id not in able:
            return bool(able)
        return key in self._reported and state.leader == self._node_id and state.leader_recovering


def is_damage(error: ApiError) -> bool:
    """Whether a file is missing or damaged, rather than the disk busy or full, or the process out of descriptors."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno in (errno.ENOENT, errno.EIO)
    return cause is None


def is_lost_without_folder(state: PartitionState, node_id: int, *, has_held: bool) -> bool:
    """Whether records that count are lost with a folder that is missing when the node starts.

    `has_held` says whether this node has ever synced a record of the partition. If it has not, the topic may have been
    created just before a power loss, and the folder may never have existed.
    """
    return has_held and has_other_replicas(state) and node_id in (*state.isr, *state.elr)


def has_other_replicas(state: PartitionState) -> bool:
    return len(state.replicas) > 1


def _refuse_later_epochs(log: Log, state: PartitionState) -> None:
    """A log with records of an epoch that has not begun is damaged: no checksum covers the leader epoch of a batch.

    Followers would cut their logs to match it.
    """
    if log.epochs.latest > state.leader_epoch:
        raise ApiError(
            ErrorCode.kafka_storage_error,
            f"the log has records of leader epoch {log.epochs.latest}, but epoch {state.leader_epoch} begins now",
        )


def is_held_elsewhere(state: PartitionState, node_id: int) -> bool:
    """Whether another replica has all committed records."""
    return bool({*state.isr, *state.elr} - {node_id})


class ReplicaManager:
    def __init__(
        self,
        environment: Environment,
        settings: NodeSettings,
        store: LogManager,
        *,
        metadata: ImageView,
        metrics: Metrics,
        sync_executor: Executor,
        fetchers: Callable[[], Fetchers],
        isr: Callable[[], AlterPartitionManager],
        overflow: OverflowManager,
        report_lost: ReportLost,
        was_clean: Callable[[], bool],
        is_starting: Callable[[], bool],
        pause: Callable[[], Awaitable[None]],
    ) -> None:
        """`fetchers` and `isr` are called when a partition first needs them.

        `was_clean` returns whether nothing that the last run of this node wrote can be lost. `pause` is awaited between
        the parts of long work, so that clients are served meanwhile.
        """
        self._environment = environment
        self._settings = settings
        self._node_id = settings.node_id
        self._store = store
        self._metadata = metadata
        self._metrics = metrics
        self._sync_executor = sync_executor
        self._fetchers = fetchers
        self._isr = isr
        self._overflow = overflow
        self._was_clean = was_clean
        self._is_starting = is_starting
        self._pause = pause
        self._lag_ms_max = settings.integer("replica.lag.time.max.ms")
        self._behind_bytes_max = settings.integer("penstock.write.behind.bytes")
        # Look-ups and compaction must be able to decompress whatever produce accepts.
        self._decoded_bytes_max = settings.integer("penstock.decompress.max.bytes")
        # Keyed by the bytes that requests carry, so that the hot path decodes no names.
        self.by_raw_name: dict[bytes, dict[int, Partition]] = {}
        self.by_raw_id: dict[bytes, dict[int, Partition]] = {}
        #: Partitions of the image that are not open, because the disk refused them; housekeeping retries.
        self.refused: set[TopicPartition] = set()
        #: Open partitions that this node should lead, but whose log it could not read; housekeeping retries.
        self.not_led: set[TopicPartition] = set()
        #: Partitions whose only copy is gone: not served until an operator restores the folder or accepts the loss.
        self.missing: set[TopicPartition] = set()
        self.lost = LostReplicas(settings.node_id, metrics, report_lost)
        self._surveyed: set[TopicPartition] = set()  # scans in progress

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
        """Return a partition that this node leads.

        Raises ApiError if it is unknown, led by another broker, or led under another leader epoch.
        """
        partition = self.get(topic, index)
        if partition is None:
            raise self.missing_partition_error(self._metadata.image.topics.get(topic), index, by_id=False)
        partition.check_leader(leader_epoch)
        return partition

    def find_by_raw_id(self, raw_topic_id: bytes, index: int) -> Partition:
        """Like `find`, by the bytes of a topic id. Raises ApiError."""
        found = self.by_raw_id.get(raw_topic_id)
        partition = None if found is None else found.get(index)
        if partition is None:
            topic = find_topic(self._metadata.image, raw_topic_id, by_id=True)
            raise self.missing_partition_error(topic, index, by_id=True)
        partition.check_leader()
        return partition

    def missing_partition_error(self, topic: TopicState | None, index: int, *, by_id: bool) -> ApiError:
        """Return why a partition is not on this node: unknown, led by another broker, or kept offline by its disk."""
        if topic is None:
            return ApiError(ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition)
        state = topic.partitions.get(index)
        if state is None:
            return ApiError(ErrorCode.unknown_topic_or_partition)
        if state.leader != self._node_id:
            return ApiError(ErrorCode.not_leader_or_follower)
        if self.is_kept_offline((topic.name, index)):
            return ApiError(ErrorCode.kafka_storage_error, "the disk keeps the partition from being served")
        return ApiError(ErrorCode.unknown_topic_or_partition)

    def is_kept_offline(self, key: TopicPartition) -> bool:
        """Whether the disk keeps a replica of this node from being served: full, unreadable, damaged or gone."""
        kept_out = key in self.refused or key in self.missing or key in self.lost
        return kept_out or key in self._store.failed

    def high_watermarks(self) -> dict[TopicPartition, int]:
        """Return the high watermarks to save; a partition with a single replica does not need it."""
        return {p.key: p.high.offset for p in self if p.is_replicated}

    # -- applying the image --------------------------------------------------------------------------

    async def apply(self, delta: ImageDelta, image: ClusterImage) -> None:
        """Apply the changes of the image, deletions first: a new topic may have the name of a deleted one.

        If the disk refuses a partition, this is logged and retried later, because the image cannot be undone.
        """
        await self._drop(delta.topics_deleted)
        # Settings come first: an ISR decided under a higher min.insync.replicas must not count under a lower one.
        for resource in delta.configs_changed:
            await self._reconfigure(image, resource.type, resource.name)
        wanted: dict[TopicPartition, TopicState] = {}
        for name, index in delta.partitions_changed:
            topic = image.topics[name]
            try:
                if await self._is_to_be_opened((name, index), topic.partitions[index]):
                    wanted[name, index] = topic
            except Exception:
                self._drop_role((name, index), topic.partitions[index])
            await self._pause()
        await self._open(wanted, image)

    async def _is_to_be_opened(self, key: TopicPartition, state: PartitionState) -> bool:
        """Return True if the partition has to be opened. An open one takes its role, or is removed, at once."""
        partition = self.get(*key)
        if self._node_id not in state.replicas:
            await self._remove(key)
        elif partition is None or self._is_to_be_replaced(key, state):
            return True
        else:
            await self._take_role(partition, state)
        return False

    def _drop_role(self, key: TopicPartition, state: PartitionState) -> None:
        """Take a partition offline after a failure: its old role has ended in any case. The other partitions go on."""
        logger.exception("partition cannot follow the metadata", extra={"partition": _partition_name(key)})
        partition = self.get(*key)
        if partition is not None:
            partition.follow(state._replace(leader=NO_LEADER), local_id=self._node_id)

    async def _take_role(self, partition: Partition, state: PartitionState) -> None:
        self.not_led.discard(partition.key)
        was_following = partition.role is ReplicaRole.FOLLOWER
        if was_following and state.leader in (self._node_id, NO_LEADER):
            await self._fetchers().unfollow(partition)
        if state.leader == self._node_id:
            self._lead(partition, state)
            return
        partition.follow(state, local_id=self._node_id)
        if state.has_leader:
            self._fetchers().follow(partition)

    def _lead(self, partition: Partition, state: PartitionState) -> None:
        is_new = not partition.is_leader or partition.leader_epoch != state.leader_epoch
        high_watermark = max(partition.high.offset, partition.leaders_high_watermark)
        try:
            if is_new and is_held_elsewhere(state, self._node_id):
                _refuse_later_epochs(partition.log, state)
            partition.lead(state, local_id=self._node_id, lag_ms_max=self._lag_ms_max)
            if partition.leading is not None:
                self._isr().wake(partition)  # starts the checks of its ISR
        except ApiError as error:
            partition.follow(state._replace(leader=NO_LEADER), local_id=self._node_id)
            self.handle_read_error(partition, error)
            self.not_led.add(partition.key)
            return
        if is_new and state.leader_recovering:
            self._report_unclean(partition, state, high_watermark)

    def _report_unclean(self, partition: Partition, state: PartitionState, high_watermark: int) -> None:
        """Log an unclean election. Followers that had more records log their own losses when they truncate."""
        self._metrics.unclean_leaderships += 1
        end_offset = partition.log.end_offset
        logger.warning(
            "leading after an unclean election: what was committed from here on is lost",
            extra={
                "partition": _partition_name(partition.key),
                "leader_epoch": state.leader_epoch,
                "epoch_start_offset": end_offset,
                "known_high_watermark": high_watermark,
                "known_lost": max(0, high_watermark - end_offset),
            },
        )

    async def retry_refused(self, image: ClusterImage) -> list[TopicPartition]:
        """Open the partitions that the disk refused before, and return those that are open now.

        The caller must hold `metadata.turn`.
        """
        wanted = {key: image.topics[key[0]] for key in sorted(self.refused) if self._is_mine(image, key)}
        self.refused.clear()
        await self._open(wanted, image)
        return [key for key in wanted if self.get(*key) is not None]

    async def retry_leading(self, image: ClusterImage) -> list[TopicPartition]:
        """Lead the partitions whose log could not be read before, and return those that this node leads now.

        A lost replica does not lead, and a damaged one waits for the scan that finds out which part is intact. The
        caller must hold `metadata.turn`.
        """
        wanted = sorted(self.not_led - self.lost.keys - self._surveyed)
        for key in wanted:
            self.not_led.discard(key)
            partition, state = self.get(*key), image.partition(*key)
            if partition is not None and state is not None and state.leader == self._node_id:
                await self._take_role(partition, state)
        return [key for key in wanted if self.led(*key) is not None]

    def _is_mine(self, image: ClusterImage, key: TopicPartition) -> bool:
        state = image.partition(*key)
        return state is not None and self._node_id in state.replicas

    # -- opening -------------------------------------------------------------------------------------

    async def _open(self, wanted: dict[TopicPartition, TopicState], image: ClusterImage) -> None:
        wanted = await self._without_lost(wanted)
        if not wanted:
            return
        cache, settings = self._settings_cache(image), dict[str, dict[str, EffectiveSetting]]()
        configs: dict[str, LogConfig] = {}
        for name in {name for name, _ in wanted}:
            settings[name] = cache.of(image.config(ResourceType.TOPIC, name))
            configs[name] = self._log_config(settings[name])
            await self._pause()
        report = await self._open_logs(wanted, settings, configs)
        self.refused |= {key for key, error in report.failed.items() if isinstance(error, OSError)}
        again: dict[TopicPartition, TopicState] = {}
        for key, error in report.failed.items():
            if has_other_replicas(wanted[key].partitions[key[1]]):
                self._mark_lost(key, str(error))
                if isinstance(error, CorruptLog):
                    again[key] = wanted[key]
        await self._open(again, image)

    async def _without_lost(
        self, wanted: dict[TopicPartition, TopicState]
    ) -> dict[TopicPartition, TopicState]:
        """Return the partitions to open: a lost one starts again if other replicas exist, and is left alone if not."""
        states = {key: topic.partitions[key[1]] for key, topic in wanted.items()}
        replaced = [key for key, state in states.items() if self._is_to_be_replaced(key, state)]
        for key in replaced:
            await self._give_up(key)
        if wanted and self._is_starting():
            here = {*await self._environment.in_thread(self._store.stored), *replaced}
            for key, state in states.items():
                if key in here:
                    continue
                has_held = self._store.has_held(*key, wanted[key].id)
                if is_lost_without_folder(state, self._node_id, has_held=has_held):
                    self._mark_lost(key, "the folder is missing")
                elif not has_other_replicas(state) and has_held:
                    self._mark_missing(key)
        return {
            key: topic
            for key, topic in wanted.items()
            if key not in self.missing and (key not in self.lost or key in self.refused)
        }

    async def _open_logs(
        self,
        wanted: dict[TopicPartition, TopicState],
        settings: dict[str, dict[str, EffectiveSetting]],
        configs: dict[str, LogConfig],
    ) -> OpenReport:
        report = await self._environment.in_thread(self._open_in_store, wanted, configs)
        for (name, index), log in report.opened.items():
            topic = wanted[name, index]
            state = topic.partitions[index]
            if log.lost_first_segments and has_other_replicas(state):
                # Treat it as a log that could not be opened: a copy without its beginning must not lead.
                report.failed[name, index] = CorruptLog(f"what was before offset {log.start_offset} has gone")
                continue
            if log.damages and is_held_elsewhere(state, self._node_id):
                report.failed[name, index] = CorruptLog(f"damaged: {log.damages[0]}")
                continue
            partition = self._adopt(topic, index, log, _min_insync_replicas(settings[name]))
            self._throttle(partition, settings[name])
            self._overflow.configure(partition, settings[name])
            self.lost.forget((name, index))
            if (name, index) in report.short and has_other_replicas(state):
                self._mark_tail_lost(
                    (name, index), f"the log ends at {log.end_offset}, and more was synced once"
                )
            elif self._may_lack_tail(log, state):
                self._mark_tail_lost((name, index), "it was not stopped cleanly, and syncs when it likes")
            await self._take_role(partition, state)
            await self._pause()
        return report

    def _open_in_store(
        self, wanted: dict[TopicPartition, TopicState], configs: dict[str, LogConfig]
    ) -> OpenReport:
        store, now_ms = self._store, self._environment.now_ms()
        logs = {key: LogToOpen(topic.id, configs[key[0]]) for key, topic in wanted.items()}
        try:
            report = store.open_or_create_these(logs, now_ms=now_ms)
            for key in report.short:
                if not has_other_replicas(wanted[key].partitions[key[1]]):
                    # No other replica has the lost tail, and its offsets must not be assigned again.
                    synced_offset = store.synced_offset(*key, wanted[key].id)
                    report.opened[key].mark_lost_until(synced_offset, now_ms)
        except OSError as error:
            end_process(error)
            raise
        return report

    def _adopt(self, topic: TopicState, index: int, log: Log, min_insync_replicas: int) -> Partition:
        """Create the partition for an open log, and register it so that requests find it."""
        has_followers = has_other_replicas(topic.partitions[index])
        saved = self._store.high_watermarks.get((topic.name, index), 0)
        partition = Partition(
            log,
            topic=topic.name,
            topic_id=topic.id,
            index=index,
            executor=self._sync_executor,
            behind_bytes_max=self._behind_bytes_max,
            metrics=self._metrics,
            loop=asyncio.get_running_loop(),
            high_watermark=saved if has_followers else None,
            min_insync_replicas=min_insync_replicas,
        )
        self.by_raw_name.setdefault(topic.name.encode(), {})[index] = partition
        self.by_raw_id[topic.id.bytes] = self.by_raw_name[topic.name.encode()]
        return partition

    # -- losses --------------------------------------------------------------------------------------

    def handle_read_error(self, partition: Partition, error: ApiError) -> ApiError:
        """Handle a missing or damaged file below the high watermark: the copy is lost if there are other replicas.

        Returns what a reader should know: CORRUPT_MESSAGE only if the records are lost, because this is the only copy
        in sync, no eligible replica has them, and a scan has found out which records are damaged; KAFKA_STORAGE_ERROR
        while a later read may find them, here or with the next leader. An error that is not about a file is returned
        as it is.
        """
        if error.code not in _UNREADABLE:
            return error
        if not partition.is_retired:
            if error.code is ErrorCode.corrupt_message and partition.isr_size <= 1:
                if isinstance(error, DamagedRead):
                    self._scan_for_damage(partition, error.offset)
                elif not self._may_others_hold(partition.key):
                    return error
            elif is_damage(error) and partition.is_replicated:
                self._mark_lost(partition.key, error.message or error.code.name)
        return ApiError(ErrorCode.kafka_storage_error, error.message)

    def _may_others_hold(self, key: TopicPartition) -> bool:
        state = self._metadata.image.partition(*key)
        return state is not None and is_held_elsewhere(state, self._node_id)

    def _scan_for_damage(self, partition: Partition, offset: int) -> None:
        """Find out which part of a damaged segment is intact, to serve that part."""
        if partition.key not in self._surveyed:
            self._surveyed.add(partition.key)
            self._environment.spawn(self._survey(partition, offset))

    async def _survey(self, partition: Partition, offset: int) -> None:
        try:
            await self._environment.in_thread(partition.log.scan_for_damage, offset)
        except OSError as error:
            logger.error(
                "damage not surveyed",
                extra={"partition": _partition_name(partition.key), "reason": str(error)},
            )
        finally:
            self._surveyed.discard(partition.key)

    def _mark_lost(self, key: TopicPartition, reason: str) -> None:
        if self.lost.add(key, reason) and not self._is_starting():
            self._environment.spawn(self.lost.report())

    def _mark_missing(self, key: TopicPartition) -> None:
        """Do not serve the partition: an empty log in its place would claim that nothing was ever written."""
        self.missing.add(key)
        logger.critical(
            "partition folder is missing: bring it back and restart, or accept the loss with `penstock disk`",
            extra={"partition": _partition_name(key), "data_dir": str(self._store.directory)},
        )

    def _may_lack_tail(self, log: Log, state: PartitionState) -> bool:
        """Whether the log may lack its tail although the controller keeps this node in the ELR.

        That happens if the controller assumes another flush policy than the one this node has.
        """
        may_lack_end = log.config.flush != "ack" and not self._was_clean()
        return may_lack_end and self._is_starting() and self._node_id in state.elr

    def _mark_tail_lost(self, key: TopicPartition, reason: str) -> None:
        """Report a replica that lacks its tail. It stays in service, but must not lead before it has fetched that."""
        self.lost.add_truncated(key, reason)
        if not self._is_starting():
            self._environment.spawn(self.lost.report())

    def _is_to_be_replaced(self, key: TopicPartition, state: PartitionState) -> bool:
        return key in self.lost and key not in self.refused and self.lost.is_replaceable(key, state)

    async def _give_up(self, key: TopicPartition) -> None:
        """Abandon a copy that is no longer needed; it stays in the data directory under another name."""
        await self._close(key)
        try:
            await self._environment.in_thread(self._keep_aside, key)
        except OSError as error:
            logger.error("log not set aside", extra={"partition": _partition_name(key), "reason": str(error)})
        else:
            self.lost.forget(key)

    def _keep_aside(self, key: TopicPartition) -> None:
        if key in self._store.stored():
            self._store.rename_to_stray(*key)

    # -- removing ------------------------------------------------------------------------------------

    async def _remove(self, key: TopicPartition) -> None:
        """Close and delete a partition of which this node is no longer a replica."""
        is_here = self.get(*key) is not None or key in self.lost or key in self._store.failed
        self.refused.discard(key)
        self.missing.discard(key)
        self.lost.forget(key)
        if not is_here:
            return
        await self._close(key)
        folders = await self._environment.in_thread(self._set_aside_stored, {key})
        self._environment.spawn(self._purge(folders))

    async def _close(self, key: TopicPartition) -> None:
        partitions = self.by_raw_name.get(key[0].encode(), {})
        partition = partitions.pop(key[1], None)
        if partition is None:
            return
        if not partitions:
            del self.by_raw_name[key[0].encode()]
            self.by_raw_id.pop(partition.topic_id.bytes, None)
            self._metrics.topics.pop(key[0], None)
        await self._close_partition(partition)

    async def _close_partition(self, partition: Partition) -> None:
        if partition.role is ReplicaRole.FOLLOWER:
            await self._fetchers().unfollow(partition)
        await partition.close()

    def _set_aside_stored(self, keys: set[TopicPartition]) -> list[Path]:
        return self._set_aside(key for key in self._store.stored() if key in keys)

    def _settings_cache(self, image: ClusterImage) -> TopicSettingsCache:
        return TopicSettingsCache(node_layers(self._settings, image))

    def _log_config(self, settings: dict[str, EffectiveSetting]) -> LogConfig:
        return log_config(settings, decoded_bytes_max=self._decoded_bytes_max)

    async def _drop(self, topics: Sequence[TopicState]) -> None:
        for topic in topics:
            try:
                await self._close_topic(topic)
            except Exception:
                # A failure of one topic must not affect the others.
                logger.exception("topic not dropped", extra={"topic": topic.name})
            await self._pause()
        # All at once, as this reads the whole data directory. Also delete partitions that could not be opened.
        keys = {(topic.name, index) for topic in topics for index in topic.partitions}
        if keys:
            folders = await self._environment.in_thread(self._set_aside_stored, keys)
            self._environment.spawn(self._purge(folders))

    async def _close_topic(self, topic: TopicState) -> None:
        partitions = self.by_raw_name.pop(topic.name.encode(), {})
        self.by_raw_id.pop(topic.id.bytes, None)
        self._metrics.topics.pop(topic.name, None)
        self.refused = {key for key in self.refused if key[0] != topic.name}
        self.missing = {key for key in self.missing if key[0] != topic.name}
        for index in topic.partitions:
            self.lost.forget((topic.name, index))
        for partition in partitions.values():
            await self._close_partition(partition)

    def _set_aside(self, keys: Iterable[TopicPartition]) -> list[Path]:
        """Rename folders for deletion. A failure is only logged, as the topic is gone anyway."""
        folders = []
        for key in keys:
            try:
                folders.append(self._store.delete(*key))
            except OSError as error:
                logger.error(
                    "log not deleted", extra={"partition": _partition_name(key), "reason": str(error)}
                )
        return folders

    async def _purge(self, folders: list[Path]) -> None:
        """Erase folders, which may take long. If the node stops first, the next start erases them."""
        await self._environment.in_thread(self._store.purge, folders)

    def remove_leftovers(self, image: ClusterImage, deleted: set[UUID]) -> None:
        """Finish deletions and moves to other brokers that a crash interrupted. Blocking; call before opening logs."""
        store, node_id = self._store, self._node_id
        states = {(name, i): state for name, t in image.topics.items() for i, state in t.partitions.items()}
        stored = set(store.stored()) - {(CLUSTER_METADATA, 0)}
        unknown = stored - states.keys()
        leftovers = {key for key in unknown if store.topic_id(*key) in deleted}
        leftovers |= {key for key in stored & states.keys() if node_id not in states[key].replicas}
        for key in sorted(unknown - leftovers):
            logger.warning(
                "no topic has this partition; it is left alone", extra={"partition": _partition_name(key)}
            )
        store.purge(self._set_aside(sorted(leftovers)))

    async def _reconfigure(self, image: ClusterImage, resource_type: int, name: str) -> None:
        cache = self._settings_cache(image)
        names = [name] if resource_type == ResourceType.TOPIC else list(image.topics)
        for topic in names:
            await self._pause()
            partitions = self.by_raw_name.get(topic.encode(), {})
            if not partitions:
                continue
            settings = cache.of(image.config(ResourceType.TOPIC, topic))
            config = self._log_config(settings)
            for partition in partitions.values():
                partition.log.configure(config)
                partition.set_min_insync_replicas(_min_insync_replicas(settings))
                self._throttle(partition, settings)
                self._overflow.configure(partition, settings)
                partition.configured()

    def _throttle(self, partition: Partition, settings: dict[str, EffectiveSetting]) -> None:
        names = ("*", f"{partition.index}:{self._node_id}")
        partition.is_leader_throttled, partition.is_follower_throttled = (
            any(name in cast(tuple[str, ...], settings[setting].value) for name in names)
            for setting in (LEADER_THROTTLED, FOLLOWER_THROTTLED)
        )


def _partition_name(key: TopicPartition) -> str:
    return f"{key[0]}-{key[1]}"


def _min_insync_replicas(settings: dict[str, EffectiveSetting]) -> int:
    value = settings["min.insync.replicas"].value
    assert isinstance(value, int)
    return value
