"""Transactions at the leaders of partitions: verified before they are appended (KIP-890), and read as committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cluster.topic_names import CONSUMER_OFFSETS, TRANSACTION_STATE
from penstock.groups.group import CommitRequest, TransactionProducer
from penstock.log.producer_state import VerificationGuard
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import AddPartitionsReply, AddPartitionsRequest, TopicPartition
from simulation.disk import DiskFull
from simulation.markers import MarkerWriting
from simulation.replica import Key, Produce
from simulation.script import Call, Steps, play

if TYPE_CHECKING:
    from simulation.network import Respond
    from simulation.node import Node
    from simulation.replica import Replica

_EPOCH_PER_TRANSACTION: Final = 2
_NO_ONE: Final = -1


class TxnCommit(NamedTuple):
    """TxnOffsetCommit, to the coordinator of the group."""

    key: Key
    commit: CommitRequest
    transactional_id: str
    producer: TransactionProducer
    adds: bool


class Admission:
    def __init__(self, node: Node) -> None:
        self.node = node
        node.services["txn_produce"] = lambda request, respond: self._serve(self._produce, request, respond)
        node.services["txn_commit"] = lambda request, respond: self._serve(self._commit, request, respond)
        node.services["read_committed"] = self._read_committed

    def _serve(self, script: Any, request: Any, respond: Respond) -> None:
        play(self.node, self._guarded(script, request, respond))

    def _guarded(self, script: Any, request: Any, respond: Respond) -> Steps:
        try:
            yield from script(request, respond)
        except ApiError as error:
            respond((error.code, None))
        except DiskFull:
            respond((ErrorCode.kafka_storage_error, None))

    def _produce(self, request: Produce, respond: Respond) -> Steps:
        replica = self.node.replica(request.key)
        replica.require_leader()
        guard = yield from self.verified(
            replica, request.transactional_id, request.producer_id, request.producer_epoch, request.adds
        )
        replica.produce(request, lambda error, base: respond((error, base)), guard)

    def _commit(self, request: TxnCommit, respond: Respond) -> Steps:
        replica = self.node.replica(request.key)
        replica.require_leader()
        guard = yield from self.verified(replica, request.transactional_id, *request.producer, request.adds)
        self.node.coordinator(replica).submit(
            lambda shard, token, now_ms: shard.commit_in_transaction(
                request.commit, request.producer, token, now_ms=now_ms
            ),
            respond,
            guard,
        )

    def verified(
        self, replica: Replica, transactional_id: str, producer_id: int, epoch: int, adds: bool
    ) -> Steps:
        """The guard to append with, once the coordinator has said that the partition is in the transaction."""
        producers, rules = replica.log.producers, replica.leading
        if not producers.needs_verification(producer_id, epoch):
            return None
        guard: VerificationGuard = producers.begin_verification(producer_id, epoch)
        place = TopicPartition(replica.topic, replica.key.partition)
        reply = yield self._question(transactional_id, producer_id, epoch, place, adds)
        error = self._outcome(place, reply)
        if error is not ErrorCode.none:
            raise ApiError(error)
        if replica.leading is not rules or self.node.replicas.get(replica.key) is not replica:
            raise ApiError(ErrorCode.not_leader_or_follower)
        return guard

    def _question(
        self, transactional_id: str, producer_id: int, epoch: int, place: TopicPartition, adds: bool
    ) -> Call:
        version = _EPOCH_PER_TRANSACTION if adds else 1
        request = AddPartitionsRequest(transactional_id, producer_id, epoch, (place,), version)

        def add(shard: Any, token: Any, now_ms: int) -> Any:
            if adds:
                return shard.add_partitions(request, token, now_ms=now_ms)
            return shard.verify_partitions(request, token)

        topic = self.node.image.topics.get(TRANSACTION_STATE)
        leader = _NO_ONE if topic is None else topic.partitions[0].leader
        key = None if topic is None else Key(topic.id, 0)
        return Call(leader, "group", (key, add))

    def _outcome(self, place: TopicPartition, reply: Any) -> ErrorCode:
        """Whatever keeps the coordinator from its word will pass."""
        if not isinstance(reply, AddPartitionsReply):
            return ErrorCode.not_enough_replicas
        return dict(reply.partitions).get(place, reply.error)

    def _read_committed(self, request: tuple[Key, int], respond: Respond) -> None:
        try:
            replica = self.node.replica(request[0])
            respond((ErrorCode.none, replica.consume_committed(request[1])))
        except ApiError as error:
            respond((error.code, None))


def with_transactions(node: Node) -> None:
    """What every process of a world with transactions has."""
    Admission(node)
    MarkerWriting(node)


def offsets_place() -> TopicPartition:
    return TopicPartition(CONSUMER_OFFSETS, 0)
