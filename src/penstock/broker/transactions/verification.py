"""What a leader asks of the coordinator before a producer's first append of a transaction.

Producers of the older protocol have added their partitions themselves: it is verified that they have, so that a batch
that comes late does not begin a transaction that nobody ends. For producers of the newer protocol the partition is
added now.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.broker.group_requests import by_topic
from penstock.broker.transactions.outbox import Outbox, Outcomes, Told
from penstock.broker.transactions.requests import protocol_version
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import AddRequest, TopicPartition

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.transactions.coordinator import TransactionCoordinator


logger = logging.getLogger("penstock.transactions")


class Question(NamedTuple):
    transactional_id: str
    producer_id: int
    epoch: int
    #: Add the partitions to the transaction, beginning it if need be; or find out whether they are in it.
    adds: bool


class _Asked(NamedTuple):
    question: Question
    partitions: tuple[TopicPartition, ...]
    outcomes: asyncio.Future[Outcomes]

    @property
    def key(self) -> str:
        return self.question.transactional_id


class Verification:
    def __init__(self, node: Node, coordinator: TransactionCoordinator) -> None:
        self._node = node
        self._coordinator = coordinator
        self._questions: dict[int, _Questions] = {}  # by broker

    async def ask(self, question: Question, partitions: tuple[TopicPartition, ...]) -> Outcomes:
        """The coordinator's word on each partition; NETWORK_EXCEPTION where none came."""
        try:
            broker_id = self._coordinator.leader_of(question.transactional_id)
            if broker_id is None:
                raise ApiError(ErrorCode.coordinator_not_available)
            if broker_id == self._node.node_id:
                return await self._ask_here(question, partitions)
            outcomes: asyncio.Future[Outcomes] = asyncio.get_running_loop().create_future()
            return await self._questions_to(broker_id).ask(_Asked(question, partitions, outcomes))
        except ApiError as error:
            return dict.fromkeys(partitions, error.code)

    async def _ask_here(self, question: Question, partitions: tuple[TopicPartition, ...]) -> Outcomes:
        transactional_id, producer_id, epoch, adds = question
        request = AddRequest(transactional_id, producer_id, epoch, partitions, protocol_version(adds))
        try:
            return await self._coordinator.join(request, verify_only=not adds)
        except Exception:
            # A batch waits for it, and with it all that its producer sends after it.
            logger.exception("no word about the transaction of %s", transactional_id)
            return dict.fromkeys(partitions, ErrorCode.unknown_server_error)

    def _questions_to(self, broker_id: int) -> _Questions:
        questions = self._questions.get(broker_id)
        if questions is None:
            questions = self._questions[broker_id] = _Questions(self._node, broker_id)
        return questions


class _Questions(Outbox[_Asked]):
    """On their way to one coordinator."""

    _API_KEY = 24
    _PURPOSE = "transactions"
    _TIMEOUT_S = 5.0  # shorter than producers wait, so that they hear of it and try again

    def _take(self) -> list[_Asked]:
        """A request has each transactional id only once: other questions about it wait for the next."""
        questions: dict[str, Question] = {}
        taken: list[_Asked] = []
        later: list[_Asked] = []
        for asked in self._waiting:
            is_same = questions.setdefault(asked.key, asked.question) == asked.question
            (taken if is_same else later).append(asked)
        self._waiting = later
        return taken

    def _request(self, entries: list[_Asked]) -> Any:
        from kio.schema.add_partitions_to_txn.v5 import request as schema

        partitions: dict[Question, set[TopicPartition]] = {}
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
                        for topic, indexes in by_topic(sorted(asked))
                    ),
                )
                for question, asked in partitions.items()
            )
        )

    def _told(self, response: Any) -> Told:
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
