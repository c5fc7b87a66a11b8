"""Assembly and life cycle of a node: it opens the data, joins the cluster, listens, and shuts down cleanly."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from penstock.broker.config.access_settings import new_authorizer
from penstock.broker.config.definitions import REPLICA_SELECTORS
from penstock.broker.config.effective_settings import DynamicSettings
from penstock.broker.config.listeners import Listener
from penstock.broker.config.node_settings import NodeSettings
from penstock.broker.controller.broker_lifecycle import BrokerLifecycleManager
from penstock.broker.controller.channel import ControllerChannel
from penstock.broker.controller.controller import Controller, LastController
from penstock.broker.controller.producer_id_manager import ProducerIdManager
from penstock.broker.controller.topic_creation import AutoTopicCreationManager, TopicCreator
from penstock.broker.coordinators.groups.coordinator import GroupCoordinator
from penstock.broker.coordinators.runtime.sharded_coordinator import CoordinatorContext
from penstock.broker.environment import Lazy, ProcessEnvironment, StartFailed, end_process
from penstock.broker.metrics.counters import Metrics
from penstock.broker.metrics.group_drops import GroupDrops
from penstock.broker.network.dispatch import Dispatcher, FaultInjector
from penstock.broker.network.quotas import ClientQuotaManager
from penstock.broker.network.requests import BrokerCalls, is_node_by_rule
from penstock.broker.network.server import Server
from penstock.broker.network.slices import TimeSlices
from penstock.broker.network.tenants import TenantManager
from penstock.broker.network.tls import Handshakes, TlsContexts, TlsUnusable, http_contexts, load_contexts
from penstock.broker.partition.fetch_sessions import FetchSessions
from penstock.broker.partition.housekeeping import Housekeeping
from penstock.broker.partition.overflow import OverflowManager
from penstock.broker.partition.produced_batch import BatchPreparer
from penstock.broker.partition.replica_manager import ReplicaManager
from penstock.broker.quorum import Quorum
from penstock.broker.quorum.driver import QuorumFailed
from penstock.broker.quorum.metadata_log import MetadataLog
from penstock.broker.quorum.snapshots import DamagedSnapshot
from penstock.broker.quorum.storage import DamagedElection
from penstock.broker.services import BrokerServices
from penstock.broker.start_checks import check_node_listener, descriptor_budget, preload_cluster_modules
from penstock.cluster.image import ClusterImage, ImageDelta, ResourceType
from penstock.cluster.metadata_records import UnreadableRecord
from penstock.cluster.security_image import acl_binding
from penstock.cluster.topic_names import CLUSTER_METADATA, SCHEDULE, SHARE_GROUP_STATE, TRANSACTION_STATE
from penstock.log.data_directory import InconsistentMetaProperties
from penstock.log.log_manager import DataDirectoryLocked, LogManager
from penstock.log.recovery import CorruptLog
from penstock.protocol.acls import AclBinding
from penstock.raft.state import CommittedRecordsLost

if TYPE_CHECKING:
    from penstock.broker.controller.bootstrap_user import BootstrapUser
    from penstock.broker.coordinators.runtime.sharded_coordinator import ShardedCoordinator
    from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator
    from penstock.broker.coordinators.share.coordinator import ShareCoordinator
    from penstock.broker.coordinators.share.partitions import SharePartitionManager
    from penstock.broker.coordinators.share.state_reconciler import ShareStateReconciler
    from penstock.broker.coordinators.transactions.coordinator import TransactionCoordinator
    from penstock.broker.metrics.client_telemetry import ClientTelemetry
    from penstock.broker.metrics.sources import MetricSources
    from penstock.broker.network.audit_topic import AuditTopicWriter
    from penstock.broker.network.connection import Connection
    from penstock.broker.network.http import HttpServer
    from penstock.broker.network.peers import Peers
    from penstock.broker.network.response_cache import TopicResponseCache
    from penstock.broker.partition.alter_partition_manager import AlterPartitionManager
    from penstock.broker.partition.idempotent_append import PlannedAppends
    from penstock.broker.partition.partition import Partition
    from penstock.broker.partition.replica_fetcher import ReplicaFetcherManager, ReplicationQuota
    from penstock.cluster.rare_records import AccessControlEntryRecord
    from penstock.security.initial_credentials import InitialCredential

logger = logging.getLogger("penstock.node")

#: How long the initial voters of a new cluster wait for each other to vote before they serve.
_INITIAL_VOTERS_SECONDS_MAX: Final = 15.0
#: How long a stopping node waits for pending replies.
_DRAIN_SECONDS: Final = 2.0
_PRODUCER_EXPIRY: Final = "producer.id.expiration.ms"
_RECOVERY_THREADS: Final = "num.recovery.threads.per.data.dir"


class Node:
    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.dynamic = DynamicSettings(settings)
        self.node_id = settings.node_id
        self.metrics = Metrics()
        self.slices = TimeSlices(settings.integer("penstock.connection.turn.ms") / 1000)
        self.environment = ProcessEnvironment(
            io_threads=settings.integer("penstock.io.threads"),
            sync_threads=settings.integer("penstock.sync.threads"),
        )
        self.fetch_sessions = FetchSessions(
            settings.integer("max.incremental.fetch.session.cache.slots"),
            partial(random.randint, 1, 2**31 - 1),
        )
        self.selects_replicas = REPLICA_SELECTORS.get(str(settings["replica.selector.class"]), False)
        self.faults: FaultInjector | None = None
        self.bootstrap_user: BootstrapUser | None = None  # set before the start
        self._initial_credentials: tuple[InitialCredential, ...] = ()
        self.authorizer = new_authorizer(settings)
        self.peers = Lazy(self._new_peers)
        self.brokers = BrokerCalls(lambda: self.services, self.peers)
        self.preparer = BatchPreparer(
            settings, self.environment, lambda partition: self.schedule().limits(partition)
        )
        self.fetchers = Lazy(self._new_fetchers)
        self.isr = Lazy(self._new_isr)
        self.leader_throttle = Lazy(self._new_leader_throttle)
        self.auto_creation = Lazy(lambda: AutoTopicCreationManager(self.environment, self.topic_creator))
        self.telemetry = Lazy(self._new_telemetry)
        self.topic_responses = Lazy(self._new_topic_responses)
        self.transactions = Lazy(self._new_transactions)
        self.share_state = Lazy(self._new_share_state)
        self.share = Lazy(self._new_share)
        self.share_state_reconciler = Lazy(self._new_share_state_reconciler)
        self.schedule = Lazy(self._new_schedule)
        self.planned_appends = Lazy(self._new_planned_appends)
        #: Coordinators that are built when they are first needed, and the topics that hold their state.
        self._lazy_coordinators: tuple[tuple[Lazy[Any], str], ...] = (
            (self.transactions, TRANSACTION_STATE),
            (self.share_state, SHARE_GROUP_STATE),
        )
        self.store: LogManager
        self.quorum: Quorum
        self.metadata: MetadataLog
        self.channel: ControllerChannel
        self.controller: Controller
        self.lifecycle: BrokerLifecycleManager
        self.tenants: TenantManager
        self.overflow: OverflowManager
        self.group_drops: GroupDrops
        self.partitions: ReplicaManager
        self.housekeeping: Housekeeping
        self.producer_ids: ProducerIdManager
        self.topic_creator: TopicCreator
        self.groups: GroupCoordinator
        self.server: Server
        self.quotas: ClientQuotaManager
        self.services: BrokerServices
        self.http: HttpServer | None = None
        #: None while no listener asks for security.
        self.handshakes: Handshakes | None = None
        self.tls_contexts: dict[str, TlsContexts] = {}
        self.http_contexts: TlsContexts | None = None
        self.listeners: tuple[Listener, ...] = ()  # as bound: port 0 is replaced with the actual port
        self.state = "starting"
        self._stopping: asyncio.Task[None] | None = None
        #: Closes the components that were built, in reverse order.
        self._closers = AsyncExitStack()
        self._closers.callback(self.environment.close)
        self._closes_cleanly = True
        self.stopped_cleanly = True

    def __repr__(self) -> str:
        return f"<Node {self.node_id} {self.state}>"

    # -- life cycle ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the node. Raises StartFailed, after everything is closed again."""
        try:
            self._load_certificates()
            await self._start_http()
            await self._open_data()
            if self._has_peers:
                preload_cluster_modules()
            await self._listen()
            await self._join_cluster()
            await self._create_first_users()
            self.state = "serving"  # before `serve`, or the first connections would be closed
            await self.server.serve()
            await self.lifecycle.noted()
        except BaseException:
            await self.stop(clean=False)
            raise
        self.housekeeping.start()
        self._closers.callback(self.housekeeping.stop)

    async def _create_first_users(self) -> None:
        """Raises StartFailed."""
        wanted = () if self.bootstrap_user is None else self.bootstrap_user.credentials()
        wanted += self._initial_credentials
        if not wanted:
            return
        # Imported here, because most nodes never need it.
        from penstock.broker.controller.bootstrap_user import create_first_users

        await create_first_users(wanted, self.metadata, self.channel, self.environment)

    def _load_certificates(self) -> None:
        serves_https = self.settings.boolean("penstock.http.tls") and self.settings.http_address is not None
        if not serves_https and not any(self.settings.protocols.values()):
            return
        try:
            self.tls_contexts = load_contexts(self.settings)
            if serves_https:
                self.http_contexts = http_contexts(self.settings)
        except TlsUnusable as error:
            raise StartFailed(str(error)) from None
        self.handshakes = Handshakes(self.slices)
        self._closers.callback(self.handshakes.close)

    async def _start_http(self) -> None:
        if self.settings.http_address is None:
            return
        # Imported here, because most nodes that start for a moment (tests, embedded ones) have no HTTP endpoint.
        from penstock.broker.metrics.exposition import Exposition
        from penstock.broker.network.http import HttpServer, HttpTls, NodeEndpoints

        tls = None
        if self.http_contexts is not None:
            assert self.handshakes is not None
            tls = HttpTls(self.handshakes, self.http_contexts)
        token = self.settings["penstock.http.token"]

        endpoints = NodeEndpoints(
            self.node_id,
            state=lambda: self.state,
            exposition=Lazy(lambda: Exposition(self.metric_sources())),
            groups=lambda: self.groups,
        )
        try:
            self.http = await HttpServer.start(
                self.settings.http_address,
                endpoints.routes(),
                token=None if token is None else str(token),
                tls=tls,
            )
        except OSError as error:
            raise StartFailed(str(error.strerror or error), hint="--http names another address") from None
        self._closers.push_async_callback(self.http.close)

    async def _open_data(self) -> None:
        budget = descriptor_budget(self.settings.integer("penstock.open.files.max"))
        try:
            self.store = LogManager.open(
                Path(self.settings.data_dir),
                node_id=self.node_id,
                founding=self.settings.is_standalone,
                threads=self.settings.integer(_RECOVERY_THREADS),
                descriptors_max=budget.readers,
                tails_max=budget.writers,
                reserve_bytes=self.settings.integer("penstock.disk.reserve.bytes"),
                producer_expiry_ms=self.settings.integer(_PRODUCER_EXPIRY),
            )
        except (DataDirectoryLocked, InconsistentMetaProperties) as error:
            raise StartFailed(str(error), hint="--data-dir names another folder") from None
        self.store.files.tails.written_by_this_thread()
        self._build_quorum()
        self._build_controller()
        self._build_partitions()
        self._closers.push_async_callback(self._close_store)
        try:
            self.quorum.open()
        except (CorruptLog, DamagedSnapshot, DamagedElection) as error:
            hint = (
                "nothing was changed; put a copy of the folder back, or give up what follows the damage with "
                f"`penstock disk accept-loss --data-dir {self.settings.data_dir} {CLUSTER_METADATA}-0`"
            )
            raise StartFailed(f"the metadata log is damaged: {error}", hint) from None
        self.metadata.open()
        self._closers.push_async_callback(self._close_quorum)
        self.dynamic.watch((_PRODUCER_EXPIRY, _RECOVERY_THREADS), self._configure_store)
        self._coordinator_context = CoordinatorContext(
            node_id=self.node_id,
            settings=self.settings,
            metadata=self.metadata,
            partitions=self.partitions,
            environment=self.environment,
            create_topics=self.topic_creator.create,
        )
        self.groups = GroupCoordinator(self._coordinator_context)
        self._closers.callback(self._close_coordinators)

    def _build_quorum(self) -> None:
        self.quorum = Quorum(
            self.environment,
            self.settings,
            self.store,
            peers=self.peers,
            listeners=lambda: self.listeners,
            is_starting=lambda: self.state == "starting",
        )
        self.metadata = MetadataLog(
            self.environment,
            self.settings,
            self.quorum,
            follow=self._follow,
            begin=lambda image, deleted: self.partitions.remove_leftovers(image, deleted),
            image_changed=self.image_changed,
            active_changed=self._active_changed,
            run_steps=lambda steps: self.slices.run(steps, None),
        )

    def _build_controller(self) -> None:
        self.channel = ControllerChannel(
            self.node_id,
            self.quorum,
            self.metadata,
            peers=self.peers,
            call_local=self.brokers.call_local,
        )
        self.controller = Controller(
            self.environment,
            self.settings,
            self.metadata,
            self.metrics,
            own_incarnation=lambda: self.lifecycle.incarnation,
            last_controller=lambda: LastController(
                self.channel.last_controller_id, self.lifecycle.silent_ms()
            ),
        )
        self.lifecycle = BrokerLifecycleManager(
            self.environment,
            self.settings,
            self.store,
            quorum=self.quorum,
            metadata=self.metadata,
            channel=self.channel,
            controller=self.controller,
            listeners=lambda: self.listeners,
        )
        self.producer_ids = ProducerIdManager(
            self.node_id, self.metadata, self.channel, lambda: self.lifecycle.broker_epoch
        )
        self.topic_creator = TopicCreator(
            self.settings, self.metadata, self.channel, refused_by_disk=lambda: self.partitions.refused
        )

    def _build_partitions(self) -> None:
        self.tenants = TenantManager(
            self.environment,
            self.settings,
            self.metadata,
            partitions=lambda: self.partitions,
            connections=lambda: tuple(self.server.connections),
            group_names=lambda: [shard.groups for shard in self.groups.loaded_shards()],
            peers=self.peers,
        )
        self.overflow = OverflowManager(
            self.environment,
            self.settings,
            self.store,
            metadata=self.metadata,
            budgets=self.tenants,
            partitions=lambda: self.partitions,
            retain=lambda partition: self.housekeeping.apply_retention(partition),
            is_unlinking=lambda partition: self.housekeeping.is_unlinking(partition),
        )
        self.group_drops = GroupDrops(
            self.environment,
            self.node_id,
            self.metadata,
            partitions=lambda: self.partitions,
            groups=lambda: self.groups,
            peers=self.peers,
        )
        self.partitions = ReplicaManager(
            self.environment,
            self.settings,
            self.store,
            metadata=self.metadata,
            metrics=self.metrics,
            sync_executor=self.environment.sync_executor,
            fetchers=self.fetchers,
            isr=self.isr,
            overflow=self.overflow,
            report_lost=self.lifecycle.report_lost,
            was_clean=lambda: self.lifecycle.was_clean,
            is_starting=lambda: self.state == "starting",
            pause=self.slices.pause,
        )
        self.housekeeping = Housekeeping(
            self.environment,
            self.settings,
            self.store,
            dynamic=self.dynamic,
            metadata=self.metadata,
            partitions=self.partitions,
            fetchers=self.fetchers,
            schedule=self.schedule,
            image_changed=self.image_changed,
        )

    def _new_peers(self) -> Peers:
        from penstock.broker.network.peers import Peers, peer_security

        bind_host = self.settings.string("penstock.peer.bind.host")
        return Peers(
            self.node_id,
            address_of=self._peer_address,
            bind_host=bind_host,
            security=peer_security(self.settings, self.handshakes, self.tls_contexts),
        )

    def _peer_address(self, node_id: int) -> tuple[str, int] | None:
        """Return where a node listens for other nodes: as it registered, or else as the quorum knows it.

        For the quorum's leader, the address that the quorum knows takes precedence.
        """
        broker, listener = self.image.brokers.get(node_id), self.settings.inter_broker_listener
        endpoint = None if broker is None or listener is None else broker.endpoints.get(listener)
        if endpoint is not None and node_id != self.quorum.leader_id:
            return endpoint.host, endpoint.port
        return self.quorum.address_of(node_id) or (endpoint and (endpoint.host, endpoint.port))

    def _active_changed(self, is_active: bool) -> None:
        if is_active:
            self.controller.became_active()
        else:
            self.controller.became_inactive()

    def _configure_store(self) -> None:
        self.store.configure(
            threads=self.dynamic.integer(_RECOVERY_THREADS),
            producer_expiry_ms=self.dynamic.integer(_PRODUCER_EXPIRY),
        )

    async def _listen(self) -> None:
        check_node_listener(self.settings, has_peers=self._has_peers)
        self._build_server()
        if any(protocol.uses_sasl for protocol in self.settings.protocols.values()):
            # Imported here, because a node without SASL never needs it.
            from penstock.broker.network.authentications import ListenerAuthentications

            authentications = ListenerAuthentications(
                self.settings, self.metadata, is_starting=lambda: self.state == "starting"
            )
            self._initial_credentials = authentications.initial_credentials
            self._closers.callback(authentications.close)
            authentications.start(self.environment)
            self.server.new_authentication = authentications.new
            self.server.wait_for_newer_keys = authentications.wait_for_newer_keys
        self.listeners = await self._bind()
        if self._has_peers:
            await self.server.serve_inter_broker()

    def _build_server(self) -> None:
        self.server = Server(self.settings, self.dynamic, self.metrics, self.slices)
        self.quotas = ClientQuotaManager(self.settings, self.environment.now_ms)
        self.server.limits.rate_of = self.quotas.connection_rate
        self.server.tenants = self.tenants
        if self.handshakes is not None:
            contexts = dict(self.tls_contexts)
            if self.http_contexts is not None:
                contexts["the HTTP endpoint"] = self.http_contexts
            self.server.use_tls(self.handshakes, contexts)
        self._closers.push_async_callback(self._close_server)
        self.services = BrokerServices(
            settings=self.settings,
            environment=self.environment,
            metrics=self.metrics,
            metadata=self.metadata,
            partitions=self.partitions,
            store=self.store,
            server=self.server,
            quotas=self.quotas,
            quorum=self.quorum,
            controller=self.controller,
            channel=self.channel,
            groups=self.groups,
            brokers=self.brokers,
            producer_ids=self.producer_ids,
            topic_creator=self.topic_creator,
            fetch_sessions=self.fetch_sessions,
            housekeeping=self.housekeeping,
            preparer=self.preparer,
            selects_replicas=self.selects_replicas,
            transactions=self.transactions,
            share_state=self.share_state,
            share=self.share,
            share_state_reconciler=self.share_state_reconciler,
            schedule=self.schedule,
            telemetry=self.telemetry,
            topic_responses=self.topic_responses,
            auto_creation=self.auto_creation,
            isr=self.isr,
            leader_throttle=self.leader_throttle,
            authorizer=self.authorizer,
            tenants=self.tenants,
            overflow=self.overflow,
        )
        self.server.certificate_refused = self._audit_certificate
        self.server.is_node_by_rule = partial(is_node_by_rule, self.services)
        if self.settings.boolean("penstock.audit.topic.enable"):
            self.services.audit.topic = self._new_audit_topic()
        self.dispatcher = Dispatcher(self.services, is_starting=lambda: self.state == "starting")
        self.dispatcher.faults = self.faults
        self.server.dispatch = self.dispatcher.dispatch

    def metric_sources(self) -> MetricSources:
        from penstock.broker.metrics.sources import MetricSources

        return MetricSources(
            settings=self.settings,
            listeners=self.listeners,
            is_serving=lambda: self.state == "serving",
            threads=self.environment,
            metrics=self.metrics,
            server=self.server,
            quotas=self.quotas,
            store=self.store,
            metadata=self.metadata,
            quorum=self.quorum,
            partitions=self.partitions,
            fetch_sessions=self.fetch_sessions,
            groups=self.groups,
            tenants=self.tenants,
            overflow=self.overflow,
            group_drops=self.group_drops,
            brokers=self.brokers,
            audit=self.services.audit,
            fetchers=self.fetchers,
            telemetry=self.telemetry,
            transactions=self.transactions,
            share_state=self.share_state,
            share=self.share,
            schedule=self.schedule,
        )

    def _audit_certificate(self, connection: Connection, reason: str) -> None:
        self.services.audit.login_failed(
            self.environment.now_ms(),
            principal=str(connection.principal),
            host=connection.client_host,
            listener=connection.listener,
            mechanism="certificate",
            reason=reason,
        )

    @property
    def _has_peers(self) -> bool:
        return not self.settings.is_standalone or len(self.quorum.state.voters.latest) > 1

    async def _join_cluster(self) -> None:
        """Join the quorum and the brokers. The quorum may fail at any time until the node serves, too."""
        joining = asyncio.create_task(self._join())
        failure = asyncio.create_task(self.metadata.failure())
        try:
            await asyncio.wait((joining, failure), return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                raise failure.result()
            await joining
        except (
            QuorumFailed,
            InconsistentMetaProperties,
            CommittedRecordsLost,
            DamagedSnapshot,
            UnreadableRecord,
        ) as error:
            raise StartFailed(f"{self.settings.data_dir}: {error}") from None
        finally:
            joining.cancel()
            failure.cancel()
            await asyncio.gather(joining, failure, return_exceptions=True)

    async def _join(self) -> None:
        is_new = not self.quorum.has_cluster
        await self.quorum.start()
        await self.metadata.caught_up()
        if is_new and self.node_id in self.settings.initial_voters:
            await self._wait_for_initial_voters()
        if self.settings.is_broker:
            await self._join_as_broker()
        else:
            await self.metadata.follow(self.metadata.applied_offset)
        self._update_tenants()  # the first image may be without any change
        self.group_drops.image_changed()

    async def _wait_for_initial_voters(self) -> None:
        """Wait for a bounded time: an initial voter that is gone meanwhile may join later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_INITIAL_VOTERS_SECONDS_MAX):
                await self.quorum.all_initial_voters_vote()

    async def _join_as_broker(self) -> None:
        """Register first: the node leads and follows nothing before the cluster knows this incarnation.

        The epochs of the last incarnation are over.
        """
        await self.lifecycle.register()
        await self.metadata.follow(self.lifecycle.broker_epoch)
        if len(self.partitions.lost):
            await self.partitions.lost.told()
        if overridden := self.dynamic.overridden():
            logger.warning("settings of this node that the cluster overrules", extra={"settings": overridden})
        self.lifecycle.ready()
        await self.lifecycle.unfenced()
        self.environment.spawn(self._start_coordinators())

    async def _start_coordinators(self) -> None:
        await self.groups.start()
        self._update_schedule(ImageDelta())
        for lazy, topic in self._lazy_coordinators:
            if topic in self.image.topics:
                await lazy().start()

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

        A second call waits for the same stop.
        """
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(clean))
        await asyncio.shield(self._stopping)

    async def _stop(self, clean: bool) -> None:
        if clean and self.state == "serving":
            self.state = "leaving"
            await self._hand_over()
        self.state = "stopping"
        self._closes_cleanly = clean
        await self._closers.aclose()
        self.state = "stopped"

    async def _hand_over(self) -> None:
        """Let other brokers take over leadership before this node stops."""
        if self.settings.is_broker and self.settings.boolean("controlled.shutdown.enable"):
            await self.lifecycle.controlled_shutdown()

    async def _close_server(self) -> None:
        await self.server.close(_DRAIN_SECONDS if self._closes_cleanly else 0)

    def _close_coordinators(self) -> None:
        for coordinator in self._coordinators():
            coordinator.close()
        for lazy in (self.share, self.schedule):
            if (existing := lazy.existing) is not None:
                existing.close()

    async def _close_quorum(self) -> None:
        await self.lifecycle.close()
        if self._closes_cleanly:
            await self.quorum.stop()

    async def _close_store(self) -> None:
        """Close the store once no task and no thread uses it."""
        if (fetchers := self.fetchers.existing) is not None:
            await fetchers.close()
        await self.environment.cancel_tasks()
        if (peers := self.peers.existing) is not None:
            await peers.close()
        for partition in self.partitions:
            await partition.close()
        await self.environment.wait_for_threads()
        high_watermarks = self.partitions.high_watermarks()
        try:
            await self.environment.in_thread(self.overflow.save)
            await self.environment.in_thread(
                self.store.close, clean=self._closes_cleanly, high_watermarks=high_watermarks
            )
        except OSError as error:
            self.stopped_cleanly = False
            logger.error("not closed cleanly; the next start recovers", extra={"reason": str(error)})

    # -- components that are built when they are first needed ----------------------------------------
    #
    # Each imports its module here, so that a node that never needs it starts faster.

    def _new_fetchers(self) -> ReplicaFetcherManager:
        from penstock.broker.partition.follower_replica import FollowerReplica
        from penstock.broker.partition.replica_fetcher import ReplicaFetcherManager

        return ReplicaFetcherManager(
            self.environment,
            self.settings,
            self.dynamic,
            metadata=self.metadata,
            peers=self.peers(),
            new_follower=partial(
                FollowerReplica,
                environment=self.environment,
                store=self.store,
                handle_read_error=self.partitions.handle_read_error,
                truncated=self.housekeeping.truncated,
            ),
            broker_epoch=lambda: self.lifecycle.broker_epoch,
        )

    def _new_leader_throttle(self) -> ReplicationQuota:
        from penstock.broker.partition.replica_fetcher import ReplicationQuota, replication_rate

        rate = replication_rate(self.dynamic, "leader.replication.throttled.rate")
        return ReplicationQuota(rate, asyncio.get_running_loop().time)

    def _new_isr(self) -> AlterPartitionManager:
        from penstock.broker.partition.alter_partition_manager import AlterPartitionManager

        changes = AlterPartitionManager(
            self.environment,
            self.settings,
            self.metadata,
            partitions=self.partitions,
            call_controller=self.channel.call,
            broker_epoch=lambda: self.lifecycle.broker_epoch,
        )
        changes.start()
        return changes

    def _new_telemetry(self) -> ClientTelemetry:
        from penstock.broker.metrics.client_telemetry import ClientTelemetry

        return ClientTelemetry(self.settings, self.metadata, self.environment)

    def _new_topic_responses(self) -> TopicResponseCache:
        from penstock.broker.network.response_cache import TopicResponseCache

        return TopicResponseCache(self.metadata, self.environment)

    def _new_transactions(self) -> TransactionCoordinator:
        from penstock.broker.coordinators.transactions.coordinator import TransactionCoordinator

        return TransactionCoordinator(
            self._coordinator_context,
            groups=self.groups,
            brokers=self.brokers,
            new_producer_id=self.producer_ids.fresh,
            dynamic=self.dynamic,
            metrics=self.metrics,
        )

    def _new_share_state(self) -> ShareCoordinator:
        from penstock.broker.coordinators.share.coordinator import ShareCoordinator

        return ShareCoordinator(
            self._coordinator_context,
            appends=self.planned_appends(),
            peers=self.peers,
            group_config=self.groups.config,
        )

    def _new_share(self) -> SharePartitionManager:
        from penstock.broker.coordinators.share.partitions import SharePartitionManager

        return SharePartitionManager(
            settings=self.settings,
            partitions=self.partitions,
            environment=self.environment,
            metrics=self.metrics,
            persister=self.share_state().persister,
            preparer=self.preparer,
            group_config=self.groups.config,
            response_bytes_left=self.server.response_bytes_left,
        )

    def _new_share_state_reconciler(self) -> ShareStateReconciler:
        from penstock.broker.coordinators.share.state_reconciler import ShareStateReconciler

        return ShareStateReconciler(
            settings=self.settings,
            groups=self.groups,
            persister=self.share_state().persister,
            tasks=self.environment,
        )

    def _new_schedule(self) -> ScheduleCoordinator:
        from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator

        return ScheduleCoordinator(
            self._coordinator_context,
            directory=self.store.directory,
            appends=self.planned_appends(),
            peers=self.peers,
        )

    def _new_audit_topic(self) -> AuditTopicWriter:
        from penstock.broker.network.audit_topic import AuditTopicWriter

        return AuditTopicWriter(
            settings=self.settings,
            metadata=self.metadata,
            environment=self.environment,
            appends=self.planned_appends(),
            create_topics=self.topic_creator.create,
        )

    def _new_planned_appends(self) -> PlannedAppends:
        from penstock.broker.partition.idempotent_append import PlannedAppends

        return PlannedAppends(
            node_id=self.node_id,
            metadata=self.metadata,
            partitions=self.partitions,
            environment=self.environment,
            preparer=self.preparer,
            peers=self.peers,
            new_producer_id=self.producer_ids.fresh,
        )

    # -- the image -----------------------------------------------------------------------------------

    @property
    def image(self) -> ClusterImage:
        return self.metadata.image

    async def _follow(self, delta: ImageDelta, image: ClusterImage) -> None:
        if self.lifecycle.is_replaced_in(image):
            reason = f"another process was let in as node {self.node_id}"
            end_process(StartFailed(reason, hint="--node-id gives this node an id of its own"), reason)
        await self.partitions.apply(delta, image)

    def _update_authorizer(self) -> None:
        if self.authorizer is not None:
            rules: dict[UUID, AccessControlEntryRecord | AclBinding] = {
                **self.image.security.acls,
                **self.tenants.rules,
            }
            self.authorizer.update_from(rules, _as_binding)
            self.authorizer.confine(self.tenants.users)

    def _update_tenants(self) -> None:
        self.tenants.configure()
        self.overflow.tenants_changed()
        self.quotas.measure_tenants(bool(self.tenants))
        self.groups.check_tenant = self.tenants.check_group if self.tenants else None
        self._update_authorizer()

    def image_changed(self, delta: ImageDelta) -> None:
        """Called once the new image is published."""
        if delta.security_changed:
            self.quotas.configure(self.image.security.quotas)
        if any(resource.type == ResourceType.BROKER for resource in delta.configs_changed):
            self.dynamic.image_changed(self.image)
        is_first = self.authorizer is not None and not self.authorizer.is_loaded
        if is_first or any(resource.type == ResourceType.TENANT for resource in delta.configs_changed):
            self._update_tenants()
        elif delta.security_changed:
            self._update_authorizer()
        if delta.configs_changed:
            self.group_drops.image_changed()
        if delta.brokers_changed and (fetchers := self.fetchers.existing) is not None:
            fetchers.brokers_changed(delta.brokers_changed)
        for lazy, topic in self._lazy_coordinators:
            if any(key[0] == topic and self.partitions.led(*key) for key in delta.partitions_changed):
                lazy()
        for coordinator in self._coordinators():
            coordinator.image_changed(delta)
        if (share := self.share.existing) is not None:
            share.image_changed(delta)
        self._update_schedule(delta)

    def _update_schedule(self, delta: ImageDelta) -> None:
        """Update the schedule coordinator; a node without scheduled records never creates it."""
        if self.schedule.existing is not None or any(map(_uses_schedule, self._changed_partitions(delta))):
            self.schedule().image_changed(delta)

    def _changed_partitions(self, delta: ImageDelta) -> Iterable[Partition | None]:
        """Partitions whose role or settings may have changed."""
        if delta.configs_changed:
            return self.partitions
        return (self.partitions.get(*key) for key in delta.partitions_changed)

    def _coordinators(self) -> list[ShardedCoordinator[Any]]:
        """Return the coordinators that exist."""
        lazy = (coordinator.existing for coordinator, _ in self._lazy_coordinators)
        return [self.groups, *(coordinator for coordinator in lazy if coordinator is not None)]


def _as_binding(rule: AccessControlEntryRecord | AclBinding) -> AclBinding:
    return rule if isinstance(rule, AclBinding) else acl_binding(rule)


def _uses_schedule(partition: Partition | None) -> bool:
    return partition is not None and (partition.is_scheduled or partition.topic == SCHEDULE)


def _reason(error: OSError) -> str:
    """Return the system's own short message, because uvloop and asyncio word the same failure differently."""
    return os.strerror(error.errno) if error.errno else str(error)
