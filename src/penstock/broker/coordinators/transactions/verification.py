"""Verification of transactional appends on the leader of a partition (KIP-890).

Before a producer's first append of a transaction, the leader asks the transaction coordinator. A producer of the
older protocol has added its partitions itself: the coordinator verifies that it has, so that a late batch does not
begin a transaction that is never ended. For a producer of the newer protocol the coordinator adds the partition
now. Batches wait for the coordinator per producer: batches of other producers do not wait with them, and the
batches of one producer stay in the order in which they arrived.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from penstock.broker.coordinators.requests import group_by_topic
from penstock.broker.coordinators.transactions.request_queue import (
    BrokerRequestQueue,
    ErrorsByKey,
    PartitionErrors,
)
from penstock.broker.coordinators.transactions.requests import protocol_version
from penstock.log.producer_state import VerificationGuard
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import AddPartitionsRequest, TopicPartition

if TYPE_CHECKING:
    from penstock.broker.config.effective_settings import DynamicSettings
    from penstock.broker.coordinators.transactions.coordinator import TransactionCoordinator
    from penstock.broker.environment import Tasks
    from penstock.broker.network.requests import BrokerCalls
    from penstock.broker.partition.partition import Partition


logger = logging.getLogger("penstock.transactions")


class VerificationRequest(NamedTuple):
    transactional_id: str
    producer_id: int
    epoch: int
    #: True: add the partitions to the transaction, which begins it if necessary. False: verify that they are in it.
    adds: bool


class _PendingVerification(NamedTuple):
    question: VerificationRequest
    partitions: tuple[TopicPartition, ...]
    outcomes: asyncio.Future[PartitionErrors]

    @property
    def key(self) -> str:
        return self.question.transactional_id


class AddPartitionsToTxnManager:
    def __init__(
        self, coordinator: TransactionCoordinator, *, node_id: int, brokers: BrokerCalls, tasks: Tasks
    ) -> None:
        self._coordinator = coordinator
        self._node_id = node_id
        self._brokers = brokers
        self._tasks = tasks
        self._queues: dict[int, _VerificationQueue] = {}  # by broker

    async def ask(
        self, question: VerificationRequest, partitions: tuple[TopicPartition, ...]
    ) -> PartitionErrors:
        """Returns the coordinator's error code for each partition; NETWORK_EXCEPTION if it did not reply."""
        try:
            broker_id = self._coordinator.leader_of(question.transactional_id)
            if broker_id is None:
                raise ApiError(ErrorCode.coordinator_not_available)
            if broker_id == self._node_id:
                return await self._request_local(question, partitions)
            outcomes: asyncio.Future[PartitionErrors] = asyncio.get_running_loop().create_future()
            return await self._queue_to(broker_id).ask(_PendingVerification(question, partitions, outcomes))
        except ApiError as error:
            return dict.fromkeys(partitions, error.code)

    async def _request_local(
        self, question: VerificationRequest, partitions: tuple[TopicPartition, ...]
    ) -> PartitionErrors:
        transactional_id, producer_id, epoch, adds = question
        request = AddPartitionsRequest(
            transactional_id, producer_id, epoch, partitions, protocol_version(adds)
        )
        try:
            return await self._coordinator.join(request, verify_only=not adds)
        except Exception:
            # A batch waits for the outcome, and so do all later batches of its producer.
            logger.exception("cannot verify the transaction of %s", transactional_id)
            return dict.fromkeys(partitions, ErrorCode.unknown_server_error)

    def _queue_to(self, broker_id: int) -> _VerificationQueue:
        queue = self._queues.get(broker_id)
        if queue is None:
            queue = self._queues[broker_id] = _VerificationQueue(broker_id, self._brokers, self._tasks)
        return queue


class _VerificationQueue(BrokerRequestQueue[_PendingVerification]):
    """Verifications on their way to one coordinator."""

    _API_KEY = 24
    _PURPOSE = "transactions"
    _TIMEOUT_S = 5.0  # shorter than the timeout of producers, so that they get the error and retry

    def _take(self) -> list[_PendingVerification]:
        """A request may contain each transactional id only once; different requests for it wait for the next."""
        questions: dict[str, VerificationRequest] = {}
        taken: list[_PendingVerification] = []
        later: list[_PendingVerification] = []
        for asked in self._waiting:
            is_same = questions.setdefault(asked.key, asked.question) == asked.question
            (taken if is_same else later).append(asked)
        self._waiting = later
        return taken

    def _request(self, entries: list[_PendingVerification]) -> Any:
        from kio.schema.add_partitions_to_txn.v5 import request as schema

        partitions: dict[VerificationRequest, set[TopicPartition]] = {}
        for asked in entries:
            partitions.setdefault(asked.question, set()).update(asked.partitions)
        return schema.AddPartitionsToTxnRequest(
            transactions=tuple(
                schema.AddPartitionsToTxnTransaction(
                    transactional_id=question.transactional_id,
                    producer_id=question.producer_id,
                    producer_epoch=question.epoch,
                    verify_only=not question.adds,
                    topics=tuple(
                        schema.AddPartitionsToTxnTopic(name=topic, partitions=tuple(indexes))
                        for topic, indexes in group_by_topic(sorted(asked))
                    ),
                )
                for question, asked in partitions.items()
            )
        )

    def _errors_in(self, response: Any) -> ErrorsByKey:
        if response.error_code is not ErrorCode.none:
            raise ApiError(response.error_code)
        return {
            (
                result.transactional_id,
                TopicPartition(topic.name, partition.partition_index),
            ): partition.partition_error_code
            for result in response.results_by_transaction
            for topic in result.topic_results
            for partition in topic.results_by_partition
        }


#: From this version of Produce on, the leader adds the partition to the transaction (KIP-890).
ADDS_PARTITION_FROM_VERSION: Final = 12
#: From this version of Produce on, producers know TRANSACTION_ABORTABLE.
_ABORTABLE_FROM_VERSION: Final = 11
#: The coordinator could not decide. Becomes NOT_ENOUGH_REPLICAS, after which all clients send the batch again.
_RETRIABLE_CODES: Final = frozenset(
    {
        ErrorCode.network_exception,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.unknown_topic_or_partition,  # this node leads it, so the coordinator will know it soon
        ErrorCode.unknown_server_error,
    }
)
#: A producer has at most one earlier transaction whose marker can void the guard, so two attempts suffice.
_VERIFICATIONS_MAX: Final = 2


class TransactionalWriter(NamedTuple):
    """The producer of a transactional batch, and the version of its request."""

    transactional_id: str
    producer_id: int
    epoch: int
    produce_version: int

    @property
    def adds(self) -> bool:
        return self.produce_version >= ADDS_PARTITION_FROM_VERSION


_VERIFICATION_SETTING: Final = "transaction.partition.verification.enable"
_WriterKey = tuple[UUID, int, int]  # topic id, partition, producer id
#: The guard to append with; None if no verification is needed, an error if the batch must not be appended.
VerificationResult = VerificationGuard | ApiError | None


class AppendVerifier:
    def __init__(
        self, verification: AddPartitionsToTxnManager, dynamic: DynamicSettings, tasks: Tasks
    ) -> None:
        self._verification = verification
        self._dynamic = dynamic
        self._tasks = tasks
        self._verifies = True
        dynamic.watch((_VERIFICATION_SETTING,), self._configure)
        self._configure()
        self._last: dict[_WriterKey, asyncio.Task[None]] = {}

    def _configure(self) -> None:
        self._verifies = self._dynamic.boolean(_VERIFICATION_SETTING)

    def must_wait(self, partition: Partition, writer: TransactionalWriter) -> bool:
        """Whether the writer's batch has to go through `queue_append`."""
        if self._last and _writer_key(partition, writer) in self._last:
            return True
        return self._needs_verification(partition, writer)

    def _needs_verification(self, partition: Partition, writer: TransactionalWriter) -> bool:
        if not (self._verifies or writer.adds):
            return False
        return partition.log.producers.needs_verification(writer.producer_id, writer.epoch)

    def queue_append(
        self,
        partitions: Iterable[Partition],
        writer: TransactionalWriter,
        work: Callable[[set[asyncio.Task[None]]], Coroutine[Any, Any, None]],
    ) -> asyncio.Task[None]:
        """Run `work(previous)`; it must wait for `previous`, the writer's earlier batches to these partitions."""
        keys = [_writer_key(partition, writer) for partition in partitions]
        task = self._tasks.spawn(work({self._last[key] for key in keys if key in self._last}))
        self._last.update(dict.fromkeys(keys, task))
        task.add_done_callback(partial(self._left, keys))
        return task

    def _left(self, keys: list[_WriterKey], task: asyncio.Task[None]) -> None:
        for key in keys:
            if self._last.get(key) is task:
                del self._last[key]

    async def guard(self, partition: Partition, writer: TransactionalWriter) -> VerificationGuard | None:
        """Like `verifications`, for one partition. Raises ApiError."""
        word = (await self.verifications((partition,), writer))[partition]
        if isinstance(word, ApiError):
            raise word
        return word

    async def verifications(
        self, partitions: Sequence[Partition], writer: TransactionalWriter
    ) -> dict[Partition, VerificationResult]:
        """Ask the coordinator whether each partition is in the transaction. Returns the guards to append with."""
        verifications: dict[Partition, VerificationResult] = {}
        left = partitions
        for _ in range(_VERIFICATIONS_MAX):
            left = await self._ask(left, writer, verifications)
            if not left:
                break
        return verifications

    async def _ask(
        self,
        partitions: Sequence[Partition],
        writer: TransactionalWriter,
        verifications: dict[Partition, VerificationResult],
    ) -> list[Partition]:
        """Returns the partitions that must be verified again.

        A producer of the newer protocol may send a batch before the marker of its last transaction is written. That
        marker then voids the guard.
        """
        asked = []
        for partition in partitions:
            verifications[partition] = guard = self._begin(partition, writer)
            if isinstance(guard, VerificationGuard):
                tp = TopicPartition(partition.topic, partition.index)
                asked.append((partition, tp, partition.leader_epoch, guard))
        if not asked:
            return []
        question = VerificationRequest(writer.transactional_id, writer.producer_id, writer.epoch, writer.adds)
        tps = tuple(tp for _, tp, _, _ in asked)
        outcomes = await self._verification.ask(question, tps)
        again = []
        for partition, tp, leader_epoch, guard in asked:
            if outcomes[tp] is not ErrorCode.none:
                verifications[partition] = _producer_error(outcomes[tp], writer)
            elif partition.leader_epoch != leader_epoch:
                verifications[partition] = ApiError(ErrorCode.not_leader_or_follower)
            elif writer.adds and not partition.log.producers.is_guard_valid(guard):
                again.append(partition)
        return again

    def _begin(self, partition: Partition, writer: TransactionalWriter) -> VerificationResult:
        if not self._needs_verification(partition, writer):
            return None
        try:
            return partition.log.producers.begin_verification(writer.producer_id, writer.epoch)
        except ApiError as error:
            return error

    def check_open(self, partition: Partition, writer: TransactionalWriter) -> None:
        """Check a batch that needed no guard when it arrived but is appended later. Raises ApiError."""
        if self._needs_verification(partition, writer):
            raise ApiError(ErrorCode.invalid_txn_state, "the transaction has ended meanwhile")


def _writer_key(partition: Partition, writer: TransactionalWriter) -> _WriterKey:
    return partition.topic_id, partition.index, writer.producer_id


def _producer_error(code: ErrorCode, writer: TransactionalWriter) -> ApiError:
    """The error in the form that a producer of this version understands."""
    if code in _RETRIABLE_CODES or (code is ErrorCode.concurrent_transactions and not writer.adds):
        return ApiError(
            ErrorCode.not_enough_replicas,
            f"unable to verify that the partition is in the transaction: {code.name}",
        )
    if code is ErrorCode.producer_fenced:
        return ApiError(ErrorCode.invalid_producer_epoch)
    if code is ErrorCode.transaction_abortable and writer.produce_version < _ABORTABLE_FROM_VERSION:
        code = ErrorCode.invalid_txn_state
    return ApiError(code, "the partition is not in the transaction")
