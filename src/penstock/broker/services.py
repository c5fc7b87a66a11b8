"""What the handlers of requests use of their broker.

The node builds one `BrokerServices`, and every request context refers to it. Components that few brokers need are built
when a handler first uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.broker.network.audit import AuditTrail
from penstock.security.delegation_tokens import TokenHmacs

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.controller.channel import ControllerChannel
    from penstock.broker.controller.controller import Controller
    from penstock.broker.controller.producer_id_manager import ProducerIdManager
    from penstock.broker.controller.topic_creation import AutoTopicCreationManager, TopicCreator
    from penstock.broker.coordinators.groups.coordinator import GroupCoordinator
    from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator
    from penstock.broker.coordinators.share.coordinator import ShareCoordinator
    from penstock.broker.coordinators.share.partitions import SharePartitionManager
    from penstock.broker.coordinators.share.state_reconciler import ShareStateReconciler
    from penstock.broker.coordinators.transactions.coordinator import TransactionCoordinator
    from penstock.broker.environment import Environment, Lazy
    from penstock.broker.metrics.client_telemetry import ClientTelemetry
    from penstock.broker.metrics.counters import Metrics
    from penstock.broker.network.quotas import ClientQuotaManager
    from penstock.broker.network.requests import BrokerCalls
    from penstock.broker.network.response_cache import TopicResponseCache
    from penstock.broker.network.server import Server
    from penstock.broker.network.tenants import TenantManager
    from penstock.broker.partition.alter_partition_manager import AlterPartitionManager
    from penstock.broker.partition.fetch_sessions import FetchSessions
    from penstock.broker.partition.housekeeping import Housekeeping
    from penstock.broker.partition.overflow import OverflowManager
    from penstock.broker.partition.produced_batch import BatchPreparer
    from penstock.broker.partition.replica_fetcher import ReplicationQuota
    from penstock.broker.partition.replica_manager import ReplicaManager
    from penstock.broker.quorum import Quorum
    from penstock.broker.quorum.metadata_log import MetadataLog
    from penstock.cluster.image import ClusterImage
    from penstock.log.log_manager import LogManager
    from penstock.security.authorizer import Authorizer


class BrokerServices:
    __slots__ = (
        "_auto_creation",
        "_isr",
        "_leader_throttle",
        "_schedule",
        "_share",
        "_share_state",
        "_share_state_reconciler",
        "_telemetry",
        "_topic_responses",
        "_transactions",
        "audit",
        "authorizer",
        "brokers",
        "channel",
        "controller",
        "environment",
        "fetch_bytes_max",
        "fetch_sessions",
        "groups",
        "housekeeping",
        "in_thread",
        "metadata",
        "metrics",
        "node_id",
        "now_ms",
        "overflow",
        "partitions",
        "preparer",
        "producer_ids",
        "quorum",
        "quotas",
        "selects_replicas",
        "server",
        "settings",
        "spawn",
        "store",
        "tenants",
        "token_hmacs",
        "topic_creator",
    )

    def __init__(
        self,
        *,
        settings: NodeSettings,
        environment: Environment,
        metrics: Metrics,
        metadata: MetadataLog,
        partitions: ReplicaManager,
        store: LogManager,
        server: Server,
        quotas: ClientQuotaManager,
        quorum: Quorum,
        controller: Controller,
        channel: ControllerChannel,
        groups: GroupCoordinator,
        brokers: BrokerCalls,
        producer_ids: ProducerIdManager,
        topic_creator: TopicCreator,
        fetch_sessions: FetchSessions,
        housekeeping: Housekeeping,
        preparer: BatchPreparer,
        selects_replicas: bool,
        transactions: Lazy[TransactionCoordinator],
        share_state: Lazy[ShareCoordinator],
        share: Lazy[SharePartitionManager],
        share_state_reconciler: Lazy[ShareStateReconciler],
        schedule: Lazy[ScheduleCoordinator],
        telemetry: Lazy[ClientTelemetry],
        topic_responses: Lazy[TopicResponseCache],
        auto_creation: Lazy[AutoTopicCreationManager],
        isr: Lazy[AlterPartitionManager],
        leader_throttle: Lazy[ReplicationQuota],
        authorizer: Authorizer | None,
        tenants: TenantManager,
        overflow: OverflowManager,
    ) -> None:
        self.node_id = settings.node_id
        self.settings = settings
        secret = settings["delegation.token.secret.key"]
        self.token_hmacs = TokenHmacs(secret if isinstance(secret, str) else None)
        #: The access rules; None if everybody may do everything.
        self.authorizer = authorizer
        self.tenants = tenants
        self.overflow = overflow
        self.audit = AuditTrail()
        self.fetch_bytes_max = settings.integer("fetch.max.bytes")
        self.environment = environment
        # Bound methods, because the hot path calls them.
        self.now_ms = environment.now_ms
        self.spawn = environment.spawn
        self.in_thread = environment.in_thread
        self.metrics = metrics
        self.metadata = metadata
        self.partitions = partitions
        self.store = store
        self.server = server
        self.quorum = quorum
        self.quotas = quotas
        self.controller = controller
        self.channel = channel
        self.groups = groups
        self.brokers = brokers
        self.producer_ids = producer_ids
        self.topic_creator = topic_creator
        self.fetch_sessions = fetch_sessions
        self.housekeeping = housekeeping
        self.preparer = preparer
        self.selects_replicas = selects_replicas
        self._transactions = transactions
        self._share_state = share_state
        self._share = share
        self._share_state_reconciler = share_state_reconciler
        self._schedule = schedule
        self._telemetry = telemetry
        self._topic_responses = topic_responses
        self._auto_creation = auto_creation
        self._isr = isr
        self._leader_throttle = leader_throttle

    @property
    def image(self) -> ClusterImage:
        return self.metadata.image

    @property
    def cluster_id(self) -> str:
        return self.store.cluster_id

    @property
    def transactions(self) -> TransactionCoordinator:
        return self._transactions()

    @property
    def share_state(self) -> ShareCoordinator:
        return self._share_state()

    @property
    def share(self) -> SharePartitionManager:
        return self._share()

    @property
    def share_state_reconciler(self) -> ShareStateReconciler:
        return self._share_state_reconciler()

    @property
    def schedule(self) -> ScheduleCoordinator:
        return self._schedule()

    @property
    def telemetry(self) -> ClientTelemetry:
        return self._telemetry()

    @property
    def topic_responses(self) -> TopicResponseCache:
        return self._topic_responses()

    @property
    def auto_creation(self) -> AutoTopicCreationManager:
        return self._auto_creation()

    @property
    def isr(self) -> AlterPartitionManager:
        return self._isr()

    @property
    def leader_throttle(self) -> ReplicationQuota:
        """The quota for what this node, as leader, sends to followers that are not in sync."""
        return self._leader_throttle()
