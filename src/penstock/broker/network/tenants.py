"""The tenants on this node: which connections are theirs, what they use, and what they may still use.

Limits hold for all nodes together. Every two seconds a node measures what tenants use on it and asks the other nodes
for the same, so connections, groups and storage are known as they were up to four seconds ago, and rates are shared out
by `security.tenant_limits`. Nothing of this runs in a cluster without tenants.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from penstock.cluster.tenants import (
    CONNECTIONS_MAX,
    GROUPS_MAX,
    STORAGE_BYTES_MAX,
    Tenant,
    Tenants,
    partition_count,
    tenants_of,
)
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.protocol.tenant_usage import TENANT_USAGE, TenantUsage, decode_usage, encode_usage_request
from penstock.security.principal import USER, Principal
from penstock.security.quotas import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE
from penstock.security.tenant_limits import REQUEST_RATE, TenantRates

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Clock, ImageView, PeerCalls, Tasks
    from penstock.broker.network.connection import Connection
    from penstock.broker.partition.partition import Partition
    from penstock.protocol.acls import AclBinding

    class ClockAndTasks(Clock, Tasks, Protocol):
        """What is used of the process."""


logger = logging.getLogger("penstock.tenants")

_MEASURE_SECONDS: Final = 2.0
_ANSWER_SECONDS_MAX: Final = 2.0
#: Partitions or groups that are looked at before the event loop gets a turn.
_CHUNK: Final = 500
#: Topics whose tenants are remembered; clients choose names.
_NAMES_MAX: Final = 20_000
_LOG_SECONDS: Final = 1.0
_HEADER: Final = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_CORRELATION_BYTES: Final = 4
_NOTHING: Final = TenantUsage()


class TenantOnNode:
    """One tenant, and what it uses here. Connections of its users refer to it."""

    __slots__ = (
        "connections",
        "elsewhere",
        "groups",
        "new_groups",
        "rates",
        "refused",
        "stored_bytes",
        "tenant",
    )

    def __init__(self, tenant: Tenant, rates: TenantRates) -> None:
        self.tenant = tenant
        self.rates = rates
        self.connections = 0
        #: When they were last counted.
        self.groups = self.stored_bytes = 0
        #: Groups that may have been created since.
        self.new_groups: set[str] = set()
        self.elsewhere = _NOTHING
        #: How many connections and groups were refused.
        self.refused: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<TenantOnNode {self.tenant.name}>"

    def usage(self, now_ms: int) -> TenantUsage:
        rates = self.rates
        return TenantUsage(
            connections=self.connections,
            groups=self.groups + len(self.new_groups),
            stored_bytes=self.stored_bytes,
            produced=rates.per_second(PRODUCER_BYTE_RATE, now_ms),
            fetched=rates.per_second(CONSUMER_BYTE_RATE, now_ms),
            requests=rates.per_second(REQUEST_RATE, now_ms),
            throttled_ms=rates.throttled_ms,
        )


class TenantManager:
    """Implements `StorageBudgets`. `connections` and `group_names` return those of this node."""

    def __init__(
        self,
        environment: ClockAndTasks,
        settings: NodeSettings,
        metadata: ImageView,
        *,
        partitions: Callable[[], Iterable[Partition]],
        connections: Callable[[], Iterable[Connection]],
        group_names: Callable[[], Iterable[Iterable[str]]],
        peers: Callable[[], PeerCalls],
    ) -> None:
        self._environment = environment
        self._metadata = metadata
        self._node_id = settings.node_id
        self._windows = settings.integer("quota.window.num")
        self._window_ms = 1000 * settings.integer("quota.window.size.seconds")
        self._partitions = partitions
        self._connections = connections
        self._group_names = group_names
        self._peers = peers
        self._tenants = Tenants()
        #: The access rules that follow from the tenants.
        self.rules: Mapping[UUID, AclBinding] = {}
        self._here: dict[str, TenantOnNode] = {}
        self._owners: dict[str, TenantOnNode | None] = {}  # by the name of a topic
        self._reports: dict[int, Mapping[str, TenantUsage]] = {}  # by node
        self._measuring: asyncio.Task[None] | None = None
        #: Set, and made again, whenever usage has been measured.
        self.measured = asyncio.Event()
        self._logged_ms = 0

    def __repr__(self) -> str:
        return f"<TenantManager {sorted(self._here)}>"

    def __bool__(self) -> bool:
        """Whether there are tenants."""
        return bool(self._here)

    @property
    def users(self) -> Iterable[Principal]:
        return (Principal(USER, user) for user in self._tenants.users)

    @property
    def here(self) -> Iterable[TenantOnNode]:
        """The tenants, with what they use on this node."""
        return self._here.values()

    # -- configuration -------------------------------------------------------------------------------

    def configure(self) -> None:
        """Apply the tenants of the published image. What they have used so far stays known."""
        tenants = tenants_of(self._metadata.image)
        if tenants.flaws != self._tenants.flaws:
            for unread, flaw in tenants.flaws.items():
                logger.error(
                    "a stored tenant cannot be read: its limits are 0, or no user may use its names",
                    extra={"tenant": unread, "reason": flaw},
                )
        self._tenants, self.rules = tenants, tenants.access_rules()
        here: dict[str, TenantOnNode] = {}
        for name, tenant in tenants.by_name.items():
            known = self._here.get(name) or TenantOnNode(tenant, TenantRates(self._windows, self._window_ms))
            known.tenant = tenant
            known.rates.limit(tenant.limits)
            known.connections = 0
            here[name] = known
        self._here = here
        self._owners.clear()
        for connection in self._connections():
            found = self._of_user(connection.principal)
            connection.joins(found)
            if found is not None:
                found.connections += 1
            connection.server.assign_account(connection)
        if here and (self._measuring is None or self._measuring.done()):
            self._measuring = self._environment.spawn(self._measure_repeatedly())

    def _of_user(self, principal: Principal) -> TenantOnNode | None:
        tenant = self._tenants.of_user(principal.name) if principal.type == USER else None
        return None if tenant is None else self._here[tenant.name]

    def _of_name(self, name: str) -> TenantOnNode | None:
        tenant = self._tenants.of_name(name)
        return None if tenant is None else self._here[tenant.name]

    # -- limits --------------------------------------------------------------------------------------

    def admit(self, connection: Connection) -> None:
        """Count a connection that has authenticated. It is closed if its tenant has as many as it may have."""
        found = self._of_user(connection.principal) if self._here else None
        if found is None or found is connection.tenant:
            return
        limit = found.tenant.limit(CONNECTIONS_MAX)
        if limit is not None and found.connections + found.elsewhere.connections >= limit:
            self._refused(found, "connections", limit, connection.peer)
            connection.close_after_replies()
            return
        connection.joins(found)
        found.connections += 1

    def forget(self, connection: Connection) -> None:
        if connection.tenant is not None:
            connection.tenant.connections -= 1
            connection.tenant = None

    def check_group(self, group_id: str) -> None:
        """Raises ApiError: POLICY_VIOLATION if the tenant of this new group has as many groups as it may have."""
        found = self._of_name(group_id) if self._here else None
        limit = None if found is None else found.tenant.limit(GROUPS_MAX)
        if found is None or limit is None or group_id in found.new_groups:
            return
        if found.groups + len(found.new_groups) + found.elsewhere.groups >= limit:
            self._refused(found, "groups", limit, group_id)
            raise ApiError(
                ErrorCode.policy_violation,
                f"Tenant {found.tenant.name} has {limit} groups, which is its limit.",
            )
        found.new_groups.add(group_id)

    def excess_bytes(self, topic: str) -> int:
        """Return how many bytes the tenant that owns the topic is above its storage bound; 0 where there is none."""
        stored, limit = self._storage(topic)
        return 0 if limit is None else max(stored - limit, 0)

    def free_share(self, topic: str) -> float:
        """Return from 0 to 1 how much of its storage bound that tenant has left; 1 where there is none."""
        stored, limit = self._storage(topic)
        return 1.0 if limit is None else max(limit - stored, 0) / max(limit, 1)

    def is_bounded(self, topic: str) -> bool:
        """Return whether the topic belongs to a tenant with a storage bound."""
        return self._storage(topic)[1] is not None

    def _storage(self, topic: str) -> tuple[int, int | None]:
        """Return what the tenant that owns a topic stores, and its bound."""
        if not self._here:
            return 0, None
        if topic not in self._owners:
            if len(self._owners) >= _NAMES_MAX:
                self._owners.clear()
            self._owners[topic] = self._of_name(topic)
        found = self._owners[topic]
        if found is None:
            return 0, None
        return found.stored_bytes + found.elsewhere.stored_bytes, found.tenant.limit(STORAGE_BYTES_MAX)

    def _refused(self, found: TenantOnNode, what: str, limit: int, which: str) -> None:
        found.refused[what] += 1
        now_ms = self._environment.now_ms()
        if abs(now_ms - self._logged_ms) >= _LOG_SECONDS * 1000:
            self._logged_ms = now_ms
            logger.warning(
                "a tenant has reached a limit",
                extra={"tenant": found.tenant.name, "limit": what, "value": limit, "refused": which},
            )

    # -- usage ---------------------------------------------------------------------------------------

    def usage(self) -> dict[str, TenantUsage]:
        """Return what tenants use on this node."""
        now_ms = self._environment.now_ms()
        return {name: found.usage(now_ms) for name, found in self._here.items()}

    def cluster_usage(self) -> dict[str, TenantUsage]:
        """Return what tenants use on all nodes, as far as this node knows."""
        image = self._metadata.image
        return {
            name: used.plus(self._here[name].elsewhere)._replace(
                partitions=partition_count(image, self._here[name].tenant)
            )
            for name, used in self.usage().items()
        }

    def tenant_name(self, principal: Principal) -> str | None:
        """Return the tenant to which a user belongs."""
        found = self._of_user(principal)
        return None if found is None else found.tenant.name

    async def _measure_repeatedly(self) -> None:
        while self._here:
            try:
                await self._measure()
                await self._ask_others()
                self._settle()
            except Exception:
                logger.exception("what tenants use could not be measured")  # the next round may succeed
            measured, self.measured = self.measured, asyncio.Event()
            measured.set()
            await asyncio.sleep(_MEASURE_SECONDS)

    async def _measure(self) -> None:
        stored: Counter[str] = Counter()
        for number, partition in enumerate(list(self._partitions()), start=1):
            if (owner := self._tenants.of_name(partition.topic)) is not None:
                stored[owner.name] += partition.log.size_bytes
            if number % _CHUNK == 0:
                await asyncio.sleep(0)
        groups: Counter[str] = Counter()
        counted: dict[str, set[str]] = {name: set(found.new_groups) for name, found in self._here.items()}
        for names in self._group_names():
            for number, name in enumerate(list(names), start=1):
                if (owner := self._tenants.of_name(name)) is not None:
                    groups[owner.name] += 1
                if number % _CHUNK == 0:
                    await asyncio.sleep(0)
        for name, found in self._here.items():
            found.stored_bytes, found.groups = stored[name], groups[name]
            found.new_groups -= counted.get(name, set())

    async def _ask_others(self) -> None:
        brokers = self._metadata.image.brokers
        self._reports = {node: report for node, report in self._reports.items() if node in brokers}
        others = [
            broker.id for broker in brokers.values() if not broker.fenced and broker.id != self._node_id
        ]
        if others:
            await asyncio.gather(*map(self._ask, others))
        for node, report in self._reports.items():
            if brokers[node].fenced:
                # It serves nothing now, but what it stores is still on its disk.
                self._reports[node] = {
                    name: TenantUsage(stored_bytes=used.stored_bytes) for name, used in report.items()
                }

    async def _ask(self, node: int) -> None:
        """Take what the node reports; without an answer, its last report stays."""
        from penstock.broker.network.peers import PeerUnreachable

        frame = _HEADER.pack(TENANT_USAGE, 0, 0, -1) + encode_usage_request(of_cluster=False)
        try:
            reply = await self._peers().raw(
                node, frame, timeout_s=_ANSWER_SECONDS_MAX, purpose="tenant-usage"
            )
            self._reports[node] = decode_usage(reply, _CORRELATION_BYTES)
        except (PeerUnreachable, TimeoutError, MalformedFrame) as error:
            logger.info("a node did not say what tenants use", extra={"node": node, "reason": str(error)})

    def _settle(self) -> None:
        for name, found in self._here.items():
            elsewhere = _NOTHING
            for report in self._reports.values():
                elsewhere = elsewhere.plus(report.get(name, _NOTHING))
            found.elsewhere = elsewhere
            found.rates.settle(
                {
                    PRODUCER_BYTE_RATE: elsewhere.produced,
                    CONSUMER_BYTE_RATE: elsewhere.fetched,
                    REQUEST_RATE: elsewhere.requests,
                },
                max(sum(not broker.fenced for broker in self._metadata.image.brokers.values()), 1),
            )
