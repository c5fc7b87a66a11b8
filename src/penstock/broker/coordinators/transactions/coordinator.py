"""The transaction coordinator of a broker, on the coordinator runtime. The handlers of producers' requests call it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from penstock.broker.config.internal_topics import TRANSACTION_STATE_TOPIC
from penstock.broker.coordinators.runtime.sharded_coordinator import ShardedCoordinator
from penstock.broker.coordinators.transactions.markers import MarkerAppender, MarkerSender
from penstock.broker.coordinators.transactions.request_queue import PartitionErrors
from penstock.broker.coordinators.transactions.requests import ProducerConnections, check_transactional_id
from penstock.broker.coordinators.transactions.verification import AddPartitionsToTxnManager, AppendVerifier
from penstock.cluster.topic_names import CONSUMER_OFFSETS
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import (
    AddPartitionsReply,
    AddPartitionsRequest,
    DescribedTransaction,
    EndTxnReply,
    EndTxnRequest,
    InitProducerIdReply,
    InitProducerIdRequest,
    ListTransactionsFilters,
    ListTransactionsReply,
    NeedsProducerId,
    TopicPartition,
    TransactionConfig,
)

if TYPE_CHECKING:
    from penstock.broker.config.effective_settings import DynamicSettings
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.coordinators.groups.coordinator import GroupCoordinator
    from penstock.broker.coordinators.runtime.runtime import CoordinatorResult, Token
    from penstock.broker.coordinators.runtime.sharded_coordinator import CoordinatorContext
    from penstock.broker.metrics.counters import Metrics
    from penstock.broker.network.requests import BrokerCalls
    from penstock.transactions.transaction_shard import TransactionCoordinatorShard

TRANSACTION_VERSION_FEATURE = "transaction.version"

#: Decides a request, with a fresh producer id or None.
Decide = Callable[["TransactionCoordinatorShard", "Token", int | None], "CoordinatorResult"]


class TransactionCoordinator(ShardedCoordinator["TransactionCoordinatorShard"]):
    """The methods raise ApiError if this node cannot answer."""

    def __init__(
        self,
        context: CoordinatorContext,
        *,
        groups: GroupCoordinator,
        brokers: BrokerCalls,
        new_producer_id: Callable[[], Awaitable[int]],
        dynamic: DynamicSettings,
        metrics: Metrics,
    ) -> None:
        super().__init__(context, TRANSACTION_STATE_TOPIC)
        self._groups = groups
        self._new_producer_id = new_producer_id
        self._settings = transaction_settings(context.settings)
        self._patience_s = context.settings.integer("add.partitions.to.txn.retry.backoff.max.ms") / 1000
        self.marker_appender = MarkerAppender(
            metadata=context.metadata,
            partitions=context.partitions,
            groups=groups,
            clock=context.environment,
            metrics=metrics,
        )
        self._markers = MarkerSender(self, context, appender=self.marker_appender, brokers=brokers)
        #: Number of transactions that were ended here, by reason.
        self.ended: dict[str, int] = {}
        self.verification = AddPartitionsToTxnManager(
            self, node_id=context.node_id, brokers=brokers, tasks=context.environment
        )
        self.admission = AppendVerifier(self.verification, dynamic, context.environment)
        self.callers = ProducerConnections()
        self.offset_callers = ProducerConnections()

    @property
    def transaction_version(self) -> int:
        """The feature level that is in force in the whole cluster."""
        return self._image.features.get(TRANSACTION_VERSION_FEATURE, 0)

    async def init_producer_id(self, request: InitProducerIdRequest) -> InitProducerIdReply:
        def init(shard: TransactionCoordinatorShard, token: Token, fresh: int | None) -> CoordinatorResult:
            return shard.init_producer_id(request, token, now_ms=self.now_ms(), fresh_producer_id=fresh)

        reply: InitProducerIdReply = await self._retry_while_concurrent(
            request.transactional_id, lambda: self._with_producer_id(request.transactional_id, init)
        )
        return reply

    async def add_partitions(self, request: AddPartitionsRequest) -> AddPartitionsReply:
        def add(shard: TransactionCoordinatorShard, token: Token) -> CoordinatorResult:
            return shard.add_partitions(request, token, now_ms=self.now_ms())

        reply: AddPartitionsReply = await self._retry_while_concurrent(
            request.transactional_id, lambda: self.write(request.transactional_id, add)
        )
        return reply

    async def verify_partitions(self, request: AddPartitionsRequest) -> AddPartitionsReply:
        reply: AddPartitionsReply = await self.write(
            request.transactional_id, lambda shard, token: shard.verify_partitions(request, token)
        )
        return reply

    async def end(self, request: EndTxnRequest) -> EndTxnReply:
        def end(shard: TransactionCoordinatorShard, token: Token, fresh: int | None) -> CoordinatorResult:
            return shard.end(request, token, now_ms=self.now_ms(), fresh_producer_id=fresh)

        reply: EndTxnReply = await self._with_producer_id(request.transactional_id, end)
        return reply

    async def join(self, request: AddPartitionsRequest, *, verify_only: bool) -> PartitionErrors:
        """Add partitions to a transaction, or verify that it contains them. Returns an error code for each partition.

        If a partition does not exist, the others are not added either.
        """
        partition_of = self._image.partition
        unknown = [partition for partition in request.partitions if partition_of(*partition) is None]
        if unknown:
            return {
                **dict.fromkeys(request.partitions, ErrorCode.operation_not_attempted),
                **dict.fromkeys(unknown, ErrorCode.unknown_topic_or_partition),
            }
        return await self.join_existing(request, verify_only=verify_only)

    async def join_existing(self, request: AddPartitionsRequest, *, verify_only: bool) -> PartitionErrors:
        """Like `join`, for partitions that exist."""
        try:
            check_transactional_id(request.transactional_id)
            reply = await (self.verify_partitions(request) if verify_only else self.add_partitions(request))
        except ApiError as error:
            return dict.fromkeys(request.partitions, error.code)
        return dict(reply.partitions)

    async def describe(self, transactional_id: str) -> DescribedTransaction:
        return await self.read(transactional_id, lambda shard: shard.describe(transactional_id))

    async def list_transactions(self, filters: ListTransactionsFilters) -> list[ListTransactionsReply]:
        """One reply for each shard that this node leads."""
        return [*await self.read_all(lambda shard: shard.list_transactions(filters, now_ms=self.now_ms()))]

    def offsets_partition(self, group_id: str) -> TopicPartition:
        """The partition that stores the offsets of a group. Raises ApiError while the topic does not exist."""
        return TopicPartition(CONSUMER_OFFSETS, self._groups.shard_of(group_id))

    def _new_shard(self) -> TransactionCoordinatorShard:
        from penstock.transactions.transaction_shard import END_REASONS, TransactionCoordinatorShard

        self.ended = self.ended or dict.fromkeys(END_REASONS, 0)
        return TransactionCoordinatorShard(
            self._settings, transaction_version=lambda: self.transaction_version, ended=self.ended
        )

    def _led(self, index: int) -> None:
        self._markers.serve(index)

    async def _retry_while_concurrent(self, transactional_id: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Retry CONCURRENT_TRANSACTIONS for a while: markers of the last transaction are often still being written."""
        reply = await ask()
        if reply.error is not ErrorCode.concurrent_transactions:
            return reply
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while reply.error is ErrorCode.concurrent_transactions and (left_s := deadline - loop.time()) > 0:
            await self._markers.ended(transactional_id, left_s)
            reply = await ask()
        return reply

    async def _with_producer_id(self, transactional_id: str, decide: Decide) -> Any:
        """Allocate a producer id only when it is needed, because an unused one is lost."""
        reply = await self._decide(transactional_id, decide, None)
        while isinstance(reply, NeedsProducerId):
            reply = await self._decide(transactional_id, decide, await self._new_producer_id())
        return reply

    async def _decide(self, transactional_id: str, decide: Decide, fresh: int | None) -> Any:
        return await self.write(transactional_id, lambda shard, token: decide(shard, token, fresh))


def transaction_settings(settings: NodeSettings) -> TransactionConfig:
    return TransactionConfig(
        timeout_max_ms=settings.integer("transaction.max.timeout.ms"),
        id_expiration_ms=settings.integer("transactional.id.expiration.ms"),
        timed_out_check_interval_ms=settings.integer(
            "transaction.abort.timed.out.transaction.cleanup.interval.ms"
        ),
        expired_check_interval_ms=settings.integer(
            "transaction.remove.expired.transaction.cleanup.interval.ms"
        ),
        two_phase_enabled=settings.boolean("transaction.two.phase.commit.enable"),
    )
