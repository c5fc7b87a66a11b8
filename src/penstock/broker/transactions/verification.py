"""What a leader asks of the coordinator before a producer's first append of a transaction.

Producers of the older protocol have added their partitions themselves: it is verified that they have, so that a batch
that comes late does not begin a transaction that nobody ends. For producers of the newer protocol the partition is
added now. Questions that come up while others are under way to the same coordinator go together with the next request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.broker_calls import ask_broker
from penstock.broker.group_requests import by_topic
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import TopicPartition

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.transactions.coordinator import TransactionCoordinator

_ADD_PARTITIONS_TO_TXN: Final = 24
_PURPOSE: Final = "transactions"
#: Shorter than producers wait, so that they hear of it and try again.
_TIMEOUT_S: Final = 5.0

Outcomes = dict[TopicPartition, ErrorCode]


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
            return await self._questions_to(broker_id).ask(question, partitions)
        except ApiError as error:
            return dict.fromkeys(partitions, error.code)

    def _questions_to(self, broker_id: int) -> _Questions:
        questions = self._questions.get(broker_id)
        if questions is None:
            questions = self._questions[broker_id] = _Questions(self._node, broker_id)
        return questions


class _Questions:
    """On their way to one coordinator, one request after the other."""

    def __init__(self, node: Node, broker_id: int) -> None:
        self._node = node
        self._broker_id = broker_id
        self._waiting: list[_Asked] = []
        self._asking: asyncio.Task[None] | None = None

    async def ask(self, question: Question, partitions: tuple[TopicPartition, ...]) -> Outcomes:
        outcomes: asyncio.Future[Outcomes] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(question, partitions, outcomes))
        if self._asking is None:
            self._asking = self._node.spawn(self._send())
        return await outcomes

    async def _send(self) -> None:
        try:
            while self._waiting:
                await self._send_together(self._take())
        finally:
            self._asking = None

    def _take(self) -> dict[str, list[_Asked]]:
        """By transactional id, of which a request has each only once: other questions about it wait for the next."""
        taken: dict[str, list[_Asked]] = {}
        later: list[_Asked] = []
        for asked in self._waiting:
            same = taken.setdefault(asked.question.transactional_id, [])
            if not same or same[0].question == asked.question:
                same.append(asked)
            else:
                later.append(asked)
        self._waiting = later
        return taken

    async def _send_together(self, taken: dict[str, list[_Asked]]) -> None:
        default = ErrorCode.unknown_topic_or_partition
        told: dict[tuple[str, TopicPartition], ErrorCode] = {}
        try:
            response = await ask_broker(
                self._node,
                self._broker_id,
                _ADD_PARTITIONS_TO_TXN,
                _request(taken),
                timeout_s=_TIMEOUT_S,
                purpose=_PURPOSE,
            )
            if response.error_code is ErrorCode.none:
                told = _told(response)
            else:
                default = response.error_code
        except ApiError as error:
            default = error.code
        for transactional_id, same in taken.items():
            for asked in same:
                if not asked.outcomes.done():
                    asked.outcomes.set_result(
                        {each: told.get((transactional_id, each), default) for each in asked.partitions}
                    )


def _request(taken: dict[str, list[_Asked]]) -> Any:
    from kio.schema.add_partitions_to_txn.v5 import request as schema

    return schema.AddPartitionsToTxnRequest(
        transactions=tuple(
            schema.AddPartitionsToTxnTransaction(
                transactional_id=transactional_id,
                producer_id=same[0].question.producer_id,
                producer_epoch=same[0].question.epoch,
                verify_only=not same[0].question.adds,
                topics=tuple(
                    schema.AddPartitionsToTxnTopic(name=topic, partitions=tuple(indexes))
                    for topic, indexes in by_topic(
                        sorted({partition for asked in same for partition in asked.partitions})
                    )
                ),
            )
            for transactional_id, same in taken.items()
        )
    )


def _told(response: Any) -> dict[tuple[str, TopicPartition], ErrorCode]:
    return {
        (
            result.transactional_id,
            TopicPartition(topic.name, partition.partition_index),
        ): partition.partition_error_code
        for result in response.results_by_transaction
        for topic in result.topic_results
        for partition in topic.results_by_partition
    }
