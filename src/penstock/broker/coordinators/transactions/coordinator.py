"""Transactions on the coordinator runtime: what the handlers of producers' requests talk to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.broker.internal_topics import TRANSACTIONS
from penstock.broker.sharded_coordinator import ShardedCoordinator
from penstock.broker.transactions.admission import Admission
from penstock.broker.transactions.callers import Callers
from penstock.broker.transactions.markers import MarkerDelivery
from penstock.broker.transactions.outbox import Outcomes
from penstock.broker.transactions.requests import refuse_nameless
from penstock.broker.transactions.verification import Verification
from penstock.cluster.names import CONSUMER_OFFSETS
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import (
    AddReply,
    AddRequest,
    DescribedTransaction,
    EndReply,
    EndRequest,
    InitReply,
    InitRequest,
    ListFilters,
    ListReply,
    NeedsProducerId,
    TopicPartition,
)
from penstock.transactions.settings import TransactionSettings

if TYPE_CHECKING:
    from penstock.broker.coordinator_runtime import Token, Work
    from penstock.broker.node import Node
    from penstock.broker.settings import Settings
    from penstock.transactions.shard import TransactionShard

TRANSACTION_VERSION = "transaction.version"

#: Decides about a request, given a fresh producer id or none.
Decide = Callable[["TransactionShard", "Token", int | None], "Work"]


class TransactionCoordinator(ShardedCoordinator["TransactionShard"]):
    """`node.transactions`. What it is asked raises ApiError where this node cannot answer."""

    def __init__(self, node: Node) -> None:
        super().__init__(node, TRANSACTIONS)
        self._settings = transaction_settings(node.settings)
        self._patience_s = node.settings.integer("add.partitions.to.txn.retry.backoff.max.ms") / 1000
        self._markers = MarkerDelivery(node, self)
        #: How transactions ended that were decided on here.
        self.ended: dict[str, int] = {}
        self.verification = Verification(node, self)
        self.admission = Admission(node)
        self.callers = Callers()
        self.offset_callers = Callers()

    @property
    def transaction_version(self) -> int:
        """The level of the feature that the whole cluster has."""
        return self._node.image.features.get(TRANSACTION_VERSION, 0)

    async def init_producer_id(self, request: InitRequest) -> InitReply:
        def init(shard: TransactionShard, token: Token, fresh: int | None) -> Work:
            return shard.init_producer_id(request, token, now_ms=self.now_ms(), fresh_producer_id=fresh)

        reply: InitReply = await self._after_the_last(
            request.transactional_id, lambda: self._with_producer_id(request.transactional_id, init)
        )
        return reply

    async def add_partitions(self, request: AddRequest) -> AddReply:
        def add(shard: TransactionShard, token: Token) -> Work:
            return shard.add_partitions(request, token, now_ms=self.now_ms())

        reply: AddReply = await self._after_the_last(
            request.transactional_id, lambda: self.write(request.transactional_id, add)
        )
        return reply

    async def verify_partitions(self, request: AddRequest) -> AddReply:
        reply: AddReply = await self.write(
            request.transactional_id, lambda shard, token: shard.verify_partitions(request, token)
        )
        return reply

    async def end(self, request: EndRequest) -> EndReply:
        def end(shard: TransactionShard, token: Token, fresh: int | None) -> Work:
            return shard.end(request, token, now_ms=self.now_ms(), fresh_producer_id=fresh)

        reply: EndReply = await self._with_producer_id(request.transactional_id, end)
        return reply

    async def join(
        self, request: AddRequest, *, verify_only: bool, forbidden: Sequence[TopicPartition] = ()
    ) -> Outcomes:
        """What becomes of each partition that is to be in a transaction, or that is said to be.

        One that does not exist, or that is forbidden, keeps the others from being added too.
        """
        partition_of = self._node.image.partition
        unknown = [place for place in request.partitions if partition_of(*place) is None]
        if unknown or forbidden:
            return {
                **dict.fromkeys(request.partitions, ErrorCode.operation_not_attempted),
                **dict.fromkeys(unknown, ErrorCode.unknown_topic_or_partition),
                **dict.fromkeys(forbidden, ErrorCode.topic_authorization_failed),
            }
        try:
            refuse_nameless(request.transactional_id)
            reply = await (self.verify_partitions(request) if verify_only else self.add_partitions(request))
        except ApiError as error:
            return dict.fromkeys(request.partitions, error.code)
        return dict(reply.partitions)

    async def describe(self, transactional_id: str) -> DescribedTransaction:
        return await self.read(transactional_id, lambda shard: shard.describe(transactional_id))

    async def list_transactions(self, filters: ListFilters) -> list[ListReply]:
        """One of each shard that this node leads."""
        return [*await self.read_all(lambda shard: shard.list_transactions(filters, now_ms=self.now_ms()))]

    def offsets_partition(self, group_id: str) -> TopicPartition:
        """Where the offsets of a group are. Raises ApiError while there is no such topic."""
        return TopicPartition(CONSUMER_OFFSETS, self._node.groups.shard_of(group_id))

    def _new_shard(self) -> TransactionShard:
        from penstock.transactions.shard import ENDS, TransactionShard

        self.ended = self.ended or dict.fromkeys(ENDS, 0)
        return TransactionShard(
            self._settings, transaction_version=lambda: self.transaction_version, ended=self.ended
        )

    def _led(self, index: int) -> None:
        self._markers.serve(index)

    async def _after_the_last(self, transactional_id: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Markers of the last transaction are often still under way: who is patient for a moment need not ask again."""
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
        """Producer ids are taken when they are needed, since each one taken for nothing is lost."""
        reply = await self._decide(transactional_id, decide, None)
        while isinstance(reply, NeedsProducerId):
            reply = await self._decide(transactional_id, decide, await self._node.producer_ids.fresh())
        return reply

    async def _decide(self, transactional_id: str, decide: Decide, fresh: int | None) -> Any:
        return await self.write(transactional_id, lambda shard, token: decide(shard, token, fresh))


def transaction_settings(settings: Settings) -> TransactionSettings:
    return TransactionSettings(
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
