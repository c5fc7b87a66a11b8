"""One node: opens its data, takes its place in the cluster, listens, and stops without losing anything."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeVar

from penstock.broker.channel import ControllerChannel
from penstock.broker.controller import Controller
from penstock.broker.coordinator import GroupCoordinator
from penstock.broker.dynamic_settings import DynamicSettings
from penstock.broker.fetch_sessions import FetchSessions
from penstock.broker.flusher import end_process
from penstock.broker.housekeeping import Housekeeping
from penstock.broker.lifecycle import BrokerLifecycle
from penstock.broker.listeners import Listener
from penstock.broker.metadata import MetadataLog
from penstock.broker.metrics import Metrics
from penstock.broker.partitions import PartitionTable
from penstock.broker.preparation import DecompressionBudget, prepare, unfolded_bytes
from penstock.broker.producer_ids import ProducerIds
from penstock.broker.quorum import Quorum
from penstock.broker.quorum.driver import QuorumFailed
from penstock.broker.quorum.election_file import DamagedElection
from penstock.broker.quorum.snapshots import DamagedSnapshot
from penstock.broker.server import Server
from penstock.broker.settings import Settings
from penstock.broker.settings_table import REPLICA_SELECTORS
from penstock.cluster.controller.features import ELIGIBLE_LEADER_REPLICAS
from penstock.cluster.delta import ImageDelta
from penstock.cluster.image import ClusterImage
from penstock.cluster.names import CLUSTER_METADATA, SCHEDULE, SHARE_GROUP_STATE, TRANSACTION_STATE
from penstock.cluster.serde import UnreadableRecord
from penstock.cluster.state import ResourceType
from penstock.log.files import open_files_limit
from penstock.log.identity import WrongOwner
from penstock.log.recovery import CorruptLog
from penstock.log.store import LogStore, StoreLocked
from penstock.log.timestamps import MoreToUnfold
from penstock.protocol.compression import Codec, DecompressedTooLarge
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.core import HistoryLost

if TYPE_CHECKING:
    from penstock.broker.bandwidth import Bandwidth
    from penstock.broker.connection import Connection
    from penstock.broker.context import RequestContext
    from penstock.broker.dispatch import Dispatcher
    from penstock.broker.fetchers import Fetchers
    from penstock.broker.group_settings import GroupConfigs
    from penstock.broker.http import HttpServer
    from penstock.broker.isr import IsrChanges
    from penstock.broker.partition import Partition
    from penstock.broker.peers import Peers
    from penstock.broker.schedule.service import Schedule
    from penstock.broker.sharded_coordinator import ShardedCoordinator
    from penstock.broker.share.table import SharePartitions
    from penstock.broker.share.upkeep import ShareUpkeep
    from penstock.broker.share_state.coordinator import ShareStateCoordinator
    from penstock.broker.telemetry import Telemetry
    from penstock.broker.topic_answers import TopicAnswers
    from penstock.broker.topic_creation import AutoCreation
    from penstock.broker.transactions.coordinator import TransactionCoordinator
    from penstock.log.flush import FlushTicket
    from penstock.log.log import Log

logger = logging.getLogger("penstock.node")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Faults = Callable[["RequestContext", "Connection", memoryview, "Dispatcher"], bool]

#: How long founders of a cluster wait for each other to vote before they serve.
_FOUNDING_SECONDS_MAX: Final = 15.0
#: Below this many open files connections and logs would take them from each other all the time.
_OPEN_FILES_MIN: Final = 128
#: When a sync that found no descriptors is tried again.
_POSTPONED_SECONDS: Final = 0.1
#: How long a thread that computes (a batch with many records, compaction) keeps the loop from running. Python's default
#: of 5 ms is paid each time the loop has waited for something.
_THREAD_SWITCH_S: Final = 0.0005
#: How long a stopping node waits for replies that are under way.
_DRAIN_SECONDS: Final = 2.0
#: What a search for a timestamp may unfold at first: enough for a batch of ordinary size.
_SEARCH_BYTES: Final = 1 << 20
_PRODUCER_EXPIRY: Final = "producer.id.expiration.ms"
_RECOVERY_THREADS: Final = "num.recovery.threads.per.data.dir"
_CODECS: Final = {
    "uncompressed": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}

#: Coordinators that are made when they are first needed, and the topics whose partitions they lead.
_LATER_COORDINATORS: Final = {"transactions": TRANSACTION_STATE, "share_state": SHARE_GROUP_STATE}


#: What members of a cluster ask each other while they elect a controller, register and report: AlterPartition,
#: Vote, BeginQuorumEpoch, EndQuorumEpoch, Envelope, FetchSnapshot, BrokerRegistration and BrokerHeartbeat.
_PEER_APIS: Final = (56, 52, 53, 54, 58, 59, 62, 63)


class StartFailed(Exception):
    """The node cannot start; the message tells the user why, the hint what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class DescriptorBudget(NamedTuple):
    """How many segment files may be open for reading, and how many logs for writing. The rest is for connections."""

    readers: int
    writers: int


def descriptor_budget(readers_max: int) -> DescriptorBudget:
    """Raises StartFailed where the system lets the process have too few."""
    limit = open_files_limit()
    if limit < _OPEN_FILES_MIN:
        raise StartFailed(
            f"the limit of open files is {limit}, and a node needs {_OPEN_FILES_MIN}",
            hint="`ulimit -n 65536` in the shell, or LimitNOFILE=65536 in the service, raises it",
        )
    quarter = limit // 4
    return DescriptorBudget(min(readers_max, quarter), quarter)


class Feature(NamedTuple):
    """`level` is what the cluster promises now; a level is raised only when what it promises is built."""

    name: str
    level_min: int
    level_max: int
    level: int = 0


#: metadata.version 23 (Kafka 4.0-IV1) is the one whose record formats are written here. The others promise
#: transactions that bump epochs, the server-side consumer protocol, share groups and streams groups. Eligible leader
#: replicas (KIP-966) are always kept, so that they cannot be switched off.
SUPPORTED_FEATURES: Final = (
    Feature("metadata.version", 23, 23),
    Feature(ELIGIBLE_LEADER_REPLICAS, 1, 1),
    Feature("transaction.version", 0, 2),
    Feature("group.version", 0, 1),
    Feature("share.version", 0, 1),
    Feature("streams.version", 0, 1),
)


class Node:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.dynamic = DynamicSettings(settings)
        self.node_id = settings.node_id
        self.metrics = Metrics()
        self.executor = ThreadPoolExecutor(settings.integer("penstock.io.threads"), "penstock-io")
        # Of their own, so that an acknowledgement never waits behind somebody's cold read.
        self.sync_executor = ThreadPoolExecutor(settings.integer("penstock.sync.threads"), "penstock-sync")
        self.partitions = PartitionTable(self)
        self.fetch_sessions = FetchSessions(
            settings.integer("max.incremental.fetch.session.cache.slots"),
            partial(random.randint, 1, 2**31 - 1),
        )
        self.fetch_bytes_max = settings.integer("fetch.max.bytes")
        self.selects_replicas = REPLICA_SELECTORS.get(str(settings["replica.selector.class"]), False)
        self.producer_ids = ProducerIds(self)
        self.quorum = Quorum(self)
        self.metadata = MetadataLog(self, self._follow, self.partitions.remove_leftovers)
        self.channel = ControllerChannel(self)
        self.controller = Controller(self)
        self.lifecycle = BrokerLifecycle(self)
        self.housekeeping = Housekeeping(self)
        self.faults: Faults | None = None
        self.decompression = DecompressionBudget(
            settings.integer("penstock.decompress.inflight.max.bytes"),
            settings.integer("penstock.decompress.inflight.connection.max.bytes"),
        )
        #: Held by what goes through all groups, so that many who ask take turns.
        self.describing = asyncio.Lock()
        self.store: LogStore
        self.server: Server
        self.groups: GroupCoordinator
        self.http: HttpServer | None = None
        self.listeners: tuple[Listener, ...] = ()  # as bound: port 0 has become a real one
        self.state = "starting"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._in_threads: set[Future[Any]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self.stopped_cleanly = True

    def __repr__(self) -> str:
        return f"<Node {self.node_id} {self.state}, {len(self.partitions)} partitions>"

    # -- life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises StartFailed; nothing is left open then."""
        try:
            await self._start_http()
            await self._open_data()
            if self._has_peers:
                _load_for_peers()
            await self._listen()
            await self._join_quorum()
            if self.settings.is_broker:
                await self._join_as_broker()
            self.state = "serving"  # first, or whoever waits at the door would be sent away
            await self.server.serve()
            await self.lifecycle.noted()
        except BaseException:
            await self.stop(clean=False)
            raise
        self.housekeeping.start()

    async def _start_http(self) -> None:
        if self.settings.http_address is None:
            return
        from penstock.broker.http import start_http

        try:
            self.http = await start_http(self)
        except OSError as error:
            raise StartFailed(str(error.strerror or error), hint="--http names another address") from None

    async def _open_data(self) -> None:
        budget = descriptor_budget(self.settings.integer("penstock.open.files.max"))
        try:
            self.store = LogStore.open(
                Path(self.settings.data_dir),
                node_id=self.node_id,
                founding=self.quorum.is_lone,
                threads=self.settings.integer(_RECOVERY_THREADS),
                descriptors_max=budget.readers,
                tails_max=budget.writers,
                reserve_bytes=self.settings.integer("penstock.disk.reserve.bytes"),
                producer_expiry_ms=self.settings.integer(_PRODUCER_EXPIRY),
            )
        except (StoreLocked, WrongOwner) as error:
            raise StartFailed(str(error), hint="--data-dir names another folder") from None
        self.store.files.tails.written_by_this_thread()
        try:
            self.quorum.open()
        except (CorruptLog, DamagedSnapshot, DamagedElection) as error:
            hint = (
                "nothing was changed; put a copy of the folder back, or give up what follows the damage with "
                f"`penstock disk accept-loss --data-dir {self.settings.data_dir} {CLUSTER_METADATA}-0`"
            )
            raise StartFailed(f"the metadata log is damaged: {error}", hint) from None
        self.metadata.open()
        self.dynamic.watch((_PRODUCER_EXPIRY, _RECOVERY_THREADS), self._configure_store)
        self.groups = GroupCoordinator(self)

    def _configure_store(self) -> None:
        self.store.configure(
            threads=self.dynamic.integer(_RECOVERY_THREADS),
            producer_expiry_ms=self.dynamic.integer(_PRODUCER_EXPIRY),
        )

    async def _listen(self) -> None:
        self._check_node_listener()
        self.server = Server(self)
        self.listeners = await self._bind()
        if self._has_peers:
            await self.server.serve_nodes()

    def _check_node_listener(self) -> None:
        """Raises StartFailed."""
        settings = self.settings
        if self._has_peers and settings.inter_broker_listener is None:
            raise StartFailed(
                f"node {self.node_id} belongs to a cluster of several and has no listener for the other nodes",
                hint="--listen NODES://HOST:PORT adds one, at the address that it had before",
            )
        if settings.is_listener_shared:
            logger.warning(
                "clients share the listener for nodes: whoever reaches it can take over the cluster",
                extra={"listener": settings.inter_broker_listener},
            )

    @property
    def _has_peers(self) -> bool:
        return not self.quorum.is_lone or len(self.quorum.state.voters.latest) > 1

    async def _join_quorum(self) -> None:
        is_new = not self.quorum.has_cluster
        try:
            await self.quorum.start()
            await self.metadata.caught_up()
            if is_new and self.node_id in self.settings.founders:
                await self._found_together()
        except (QuorumFailed, WrongOwner, HistoryLost, DamagedSnapshot, UnreadableRecord) as error:
            raise StartFailed(f"{self.settings.data_dir}: {error}") from None
        if not self.settings.is_broker:
            await self.metadata.follow(self.metadata.applied_offset)

    async def _found_together(self) -> None:
        """Bounded: one founder that went away meanwhile may join later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FOUNDING_SECONDS_MAX):
                await self.quorum.all_founders_vote()

    async def _join_as_broker(self) -> None:
        """Nothing is led or followed before the cluster knows of this incarnation: the last one's epochs are over."""
        await self.lifecycle.register()
        await self.metadata.follow(self.lifecycle.broker_epoch)
        if len(self.partitions.lost):
            await self.partitions.lost.told()
        if overruled := self.dynamic.overruled():
            logger.warning("settings of this node that the cluster overrules", extra={"settings": overruled})
        self.lifecycle.ready()
        await self.lifecycle.unfenced()
        self.spawn(self._start_coordinators())

    async def _start_coordinators(self) -> None:
        await self.groups.start()
        self._follow_schedule(ImageDelta())
        for name, topic in _LATER_COORDINATORS.items():
            if topic in self.image.topics:
                await self._coordinator(name).start()

    async def _bind(self) -> tuple[Listener, ...]:
        bound = []
        for listener in self.settings.listeners:
            try:
                port = await self.server.bind(listener)
            except OSError as error:
                raise StartFailed(
                    f"cannot listen on {listener}: {_reason(error)}", hint="--listen names another address"
                ) from None
            bound.append(listener._replace(port=port))
        return tuple(bound)

    async def stop(self, *, clean: bool = True) -> None:
        """`clean=False` leaves the data as a crash would, for tests and failed starts.

        Whoever asks again waits for the same stop.
        """
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(clean))
        await asyncio.shield(self._stopping)

    async def _stop(self, clean: bool) -> None:
        if clean and self.state == "serving":
            self.state = "leaving"
            await self._hand_over()
        self.state = "stopping"
        self.housekeeping.stop()
        if hasattr(self, "server"):
            await self.server.close(_DRAIN_SECONDS if clean else 0)
        if hasattr(self, "groups"):
            for coordinator in self._coordinators():
                coordinator.close()
        if "share" in self.__dict__:
            self.share.close()
        if "schedule" in self.__dict__:
            self.schedule.close()
        await self.lifecycle.close()
        if clean:
            await self.quorum.stop()
        await self._end_tasks()
        for partition in self.partitions:
            await partition.close()
        if self.http is not None:
            await self.http.close()
        await self._threads_idle()
        if hasattr(self, "store"):
            await self._close_store(clean)
        self.sync_executor.shutdown(wait=True)
        self.executor.shutdown(wait=True)
        self.state = "stopped"

    async def _hand_over(self) -> None:
        """Others lead in this node's place before it goes."""
        if self.settings.is_broker and self.settings.boolean("controlled.shutdown.enable"):
            await self.lifecycle.hand_over()

    async def _end_tasks(self) -> None:
        if "fetchers" in self.__dict__:
            await self.fetchers.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if "peers" in self.__dict__:
            await self.peers.close()

    async def _threads_idle(self) -> None:
        """A start that was broken off may still be opening files."""
        while self._in_threads:
            under_way = map(asyncio.wrap_future, tuple(self._in_threads))
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _close_store(self, clean: bool) -> None:
        try:
            high_watermarks = self.partitions.high_watermarks()
            await self.in_thread(self.store.close, clean=clean, high_watermarks=high_watermarks)
        except OSError as error:
            self.stopped_cleanly = False
            logger.error("not closed cleanly; the next start recovers", extra={"reason": str(error)})

    # -- what handlers use ---------------------------------------------------------------------------

    @property
    def image(self) -> ClusterImage:
        return self.metadata.image

    @cached_property
    def peers(self) -> Peers:
        """Made when it is first needed, which a node alone never does."""
        from penstock.broker.peers import Peers

        return Peers(self)

    @cached_property
    def fetchers(self) -> Fetchers:
        from penstock.broker.fetchers import Fetchers

        return Fetchers(self)

    @cached_property
    def leader_throttle(self) -> Bandwidth:
        """Of what this node sends, as a leader, to followers that are not in sync."""
        from penstock.broker.bandwidth import Bandwidth, throttled_rate

        rate = throttled_rate(self.dynamic, "leader.replication.throttled.rate")
        return Bandwidth(rate, asyncio.get_running_loop().time)

    @cached_property
    def telemetry(self) -> Telemetry:
        """Made with the first client that asks for a subscription."""
        from penstock.broker.telemetry import Telemetry

        return Telemetry(self)

    @cached_property
    def group_configs(self) -> GroupConfigs:
        from penstock.broker.group_settings import GroupConfigs

        return GroupConfigs(self)

    @cached_property
    def auto_creation(self) -> AutoCreation:
        from penstock.broker.topic_creation import AutoCreation

        return AutoCreation(self)

    @cached_property
    def isr(self) -> IsrChanges:
        from penstock.broker.isr import IsrChanges

        changes = IsrChanges(self)
        changes.start()
        return changes

    @cached_property
    def topic_answers(self) -> TopicAnswers:
        from penstock.broker.topic_answers import TopicAnswers

        return TopicAnswers(self)

    @cached_property
    def transactions(self) -> TransactionCoordinator:
        from penstock.broker.transactions.coordinator import TransactionCoordinator

        return TransactionCoordinator(self)

    @cached_property
    def share_state(self) -> ShareStateCoordinator:
        from penstock.broker.share_state.coordinator import ShareStateCoordinator

        return ShareStateCoordinator(self)

    @cached_property
    def share(self) -> SharePartitions:
        """Made with the first share session."""
        from penstock.broker.share.table import SharePartitions

        return SharePartitions(self)

    @cached_property
    def share_upkeep(self) -> ShareUpkeep:
        """Made with the first share group."""
        from penstock.broker.share.upkeep import ShareUpkeep

        return ShareUpkeep(self)

    @cached_property
    def schedule(self) -> Schedule:
        """Made with the first partition that has a schedule, or leads a part of it."""
        from penstock.broker.schedule.service import Schedule

        return Schedule(self)

    @property
    def cluster_id(self) -> str:
        return self.store.cluster_id

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def features(self) -> list[Feature]:
        levels = self.image.features
        return [
            feature._replace(level=max(feature.level_min, levels.get(feature.name, 0)))
            for feature in SUPPORTED_FEATURES
        ]

    async def prepared_batch(
        self,
        partition: Partition,
        records: bytearray,
        connection: Connection | None,
        *,
        is_owed: bool = False,
    ) -> bytearray | memoryview:
        """What a topic that must be looked into makes of a batch, when there is room for what that unfolds to.

        Where the answer `is_owed` to a connection that ends meanwhile, the batch is given up. Raises ApiError.
        """
        max_bytes = self.settings.integer("penstock.decompress.max.bytes")
        announced = unfolded_bytes(
            records,
            looks_inside=partition.is_compacted or partition.is_scheduled,
            codec=None if partition.codec is None else _CODECS[partition.codec],
            max_bytes=max_bytes,
        )
        # What announces too much is refused without any work; what holds more than it announces is tried once more.
        sizes = (0,) if announced > max_bytes else (announced, max_bytes)
        for size in sizes:
            await self.decompression.take(connection, size)
            try:
                if is_owed and connection is not None and not connection.is_open:
                    raise ApiError(ErrorCode.request_timed_out)
                return await self.in_thread(self.prepare_batch, partition, records, size or max_bytes)
            except DecompressedTooLarge:
                if size in (0, max_bytes):
                    raise
            finally:
                self.decompression.give_back(connection, size)
        raise AssertionError("the last size is the largest")

    def prepare_batch(
        self, partition: Partition, records: bytearray, max_bytes: int | None = None
    ) -> bytearray | memoryview:
        """Blocking: what a topic that must be looked into makes of a batch. Raises ApiError."""
        if max_bytes is None:
            max_bytes = self.settings.integer("penstock.decompress.max.bytes")
        return prepare(
            memoryview(records),
            compacted=partition.is_compacted,
            codec=None if partition.codec is None else _CODECS[partition.codec],
            max_bytes=max_bytes,
            stored_bytes_max=partition.log.config.max_message_bytes,
            schedule=self.schedule.limits(partition) if partition.is_scheduled else None,
        )

    async def looked_up(self, connection: Connection | None, look: Callable[[int | None], Result]) -> Result:
        """What a search of a log for a timestamp finds, when there is room for what that unfolds.

        `look` is called in a thread with the bytes that it may unfold; None: as many as one batch. The search is given
        up where the connection has ended meanwhile. Raises ApiError.
        """
        max_bytes = self.settings.integer("penstock.decompress.max.bytes")
        for size, allowed in ((min(_SEARCH_BYTES, max_bytes), _SEARCH_BYTES), (max_bytes, None)):
            await self.decompression.take(connection, size)
            try:
                if connection is not None and not connection.is_open:
                    raise ApiError(ErrorCode.request_timed_out)
                return await self.in_thread(look, allowed)
            except MoreToUnfold:
                pass
            finally:
                self.decompression.give_back(connection, size)
        raise AssertionError("the last search raises no MoreToUnfold")

    # -- tasks and threads ---------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """A task that is not lost when nobody awaits it, and ends with the node."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def in_thread(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> asyncio.Future[Result]:
        return self._watched(self.executor.submit(call, *args, **kwargs))

    def _watched(self, future: Future[Result]) -> asyncio.Future[Result]:
        self._in_threads.add(future)
        future.add_done_callback(self._in_threads.discard)
        return asyncio.wrap_future(future)

    async def sync(self, log: Log) -> None:
        """Make everything appended so far durable. A failure ends the process."""
        while True:
            try:
                ticket = log.flush_begin()
            except OSError:
                pass  # nothing could be opened; what is idle is closed, and it is tried again
            else:
                if ticket is None or await self._synced(log, ticket):
                    return
            log.files.close_idle()
            await asyncio.sleep(_POSTPONED_SECONDS)

    async def _synced(self, log: Log, ticket: FlushTicket) -> bool:
        """False where there was no descriptor for it."""
        try:
            await self._watched(self.sync_executor.submit(ticket.run))
        except OSError as error:
            end_process(error)
        log.flush_done(ticket)
        return not ticket.postponed

    async def _follow(self, delta: ImageDelta, image: ClusterImage) -> None:
        if self.lifecycle.is_replaced_in(image):
            reason = f"another process was let in as node {self.node_id}"
            end_process(StartFailed(reason, hint="--node-id gives this node an id of its own"), reason)
        await self.partitions.apply(delta, image)

    def image_changed(self, delta: ImageDelta) -> None:
        """Called once the new image can be seen."""
        if any(resource.type == ResourceType.BROKER for resource in delta.configs_changed):
            self.dynamic.image_changed(self.image)
        if delta.brokers_changed and "fetchers" in self.__dict__:
            self.fetchers.brokers_changed(delta.brokers_changed)
        for name, topic in _LATER_COORDINATORS.items():
            if any(place[0] == topic and self.partitions.led(*place) for place in delta.partitions_changed):
                self._coordinator(name)
        for coordinator in self._coordinators():
            coordinator.image_changed(delta)
        if "share" in self.__dict__:
            self.share.image_changed(delta)
        self._follow_schedule(delta)

    def may_hold_records(self, partition: Partition) -> bool:
        """Whether records may be in a partition's log that are held back until they are due."""
        return partition.is_scheduled or (
            "schedule" in self.__dict__ and self.schedule.looks_after(partition)
        )

    def _follow_schedule(self, delta: ImageDelta) -> None:
        """A node on which nothing is scheduled never loads it."""
        if "schedule" in self.__dict__ or any(map(_is_of_schedule, self._touched(delta))):
            self.schedule.image_changed(delta)

    def _touched(self, delta: ImageDelta) -> Iterable[Partition | None]:
        """Partitions whose role or settings may have changed."""
        if delta.configs_changed:
            return self.partitions
        return (self.partitions.get(*place) for place in delta.partitions_changed)

    def _coordinator(self, name: str) -> ShardedCoordinator[Any]:
        """Made, if it has not been yet."""
        coordinator: ShardedCoordinator[Any] = getattr(self, name)
        return coordinator

    def _coordinators(self) -> list[ShardedCoordinator[Any]]:
        """Those that have been made."""
        return [
            self.groups,
            *(self._coordinator(name) for name in _LATER_COORDINATORS if name in self.__dict__),
        ]


def serve(settings: Settings, on_ready: Callable[[Node], None] | None = None) -> int:
    """Run a node until SIGINT or SIGTERM; a second signal does not wait. Raises StartFailed."""
    from penstock.broker.logs import configure_logging

    configure_logging(settings.string("penstock.log.format"), settings.string("penstock.log.level"))
    sys.setswitchinterval(_THREAD_SWITCH_S)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(settings, on_ready))


async def _serve(settings: Settings, on_ready: Callable[[Node], None] | None) -> int:
    import signal

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, stop)
    node = Node(settings)
    if not await _start_unless(stop, node):
        return 0
    logger.info("serving", extra={"node": node.node_id, "partitions": len(node.partitions)})
    if on_ready is not None:
        on_ready(node)
    gc.freeze()  # modules and schemas live as long as the process: no need to look through them again and again
    await stop.wait()
    logger.info("stopping", extra={"node": node.node_id})
    await node.stop()
    return 0 if node.stopped_cleanly else 1


async def _start_unless(stop: asyncio.Event, node: Node) -> bool:
    """A signal breaks off a start, which may have much to recover."""
    starting = asyncio.create_task(node.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        return False
    await starting
    return True


def _load_for_peers() -> None:
    """What a member of a cluster needs as soon as it listens.

    Loaded when it is first used, it would hold up the event loop in the middle of an election: for seconds, where the
    processor is busy, and longer than votes are waited for.
    """
    from penstock.broker import fetchers, isr, leader_care, relay  # noqa: F401
    from penstock.broker.peers import load_codecs
    from penstock.broker.quorum import asking, fetching, joining  # noqa: F401
    from penstock.broker.routes import route
    from penstock.cluster.controller import fencing, heartbeats  # noqa: F401

    for api_key, version in load_codecs(_PEER_APIS):
        route(api_key, version)


def _is_of_schedule(partition: Partition | None) -> bool:
    return partition is not None and (partition.is_scheduled or partition.topic == SCHEDULE)


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        logger.warning("stopping at once; the next start recovers")
        logging.shutdown()
        os._exit(1)
    stop.set()


def _reason(error: OSError) -> str:
    """uvloop and asyncio word the same failure differently; the system's own words are short."""
    return os.strerror(error.errno) if error.errno else str(error)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it can be had."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()  # type: ignore[no-any-return]
