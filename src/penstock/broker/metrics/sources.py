"""The components of a node whose numbers a scrape reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.broker.config.listeners import Listener
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.coordinators.groups.coordinator import GroupCoordinator
    from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator
    from penstock.broker.coordinators.share.coordinator import ShareCoordinator
    from penstock.broker.coordinators.share.partitions import SharePartitionManager
    from penstock.broker.coordinators.transactions.coordinator import TransactionCoordinator
    from penstock.broker.environment import Lazy, Threads
    from penstock.broker.metrics.client_telemetry import ClientTelemetry
    from penstock.broker.metrics.counters import Metrics
    from penstock.broker.metrics.group_drops import GroupDrops
    from penstock.broker.network.audit import AuditTrail
    from penstock.broker.network.quotas import ClientQuotaManager
    from penstock.broker.network.requests import BrokerCalls
    from penstock.broker.network.server import Server
    from penstock.broker.network.tenants import TenantManager
    from penstock.broker.partition.fetch_sessions import FetchSessions
    from penstock.broker.partition.overflow import OverflowManager
    from penstock.broker.partition.replica_fetcher import ReplicaFetcherManager
    from penstock.broker.partition.replica_manager import ReplicaManager
    from penstock.broker.quorum import Quorum
    from penstock.broker.quorum.metadata_log import MetadataLog
    from penstock.log.log_manager import LogManager


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSources:
    """The components whose numbers a scrape reads. A lazy component has no metrics before it exists."""

    settings: NodeSettings
    listeners: tuple[Listener, ...]
    is_serving: Callable[[], bool]
    threads: Threads
    metrics: Metrics
    server: Server
    quotas: ClientQuotaManager
    store: LogManager
    metadata: MetadataLog
    quorum: Quorum
    partitions: ReplicaManager
    fetch_sessions: FetchSessions
    groups: GroupCoordinator
    tenants: TenantManager
    overflow: OverflowManager
    group_drops: GroupDrops
    brokers: BrokerCalls
    audit: AuditTrail
    fetchers: Lazy[ReplicaFetcherManager]
    telemetry: Lazy[ClientTelemetry]
    transactions: Lazy[TransactionCoordinator]
    share_state: Lazy[ShareCoordinator]
    share: Lazy[SharePartitionManager]
    schedule: Lazy[ScheduleCoordinator]
