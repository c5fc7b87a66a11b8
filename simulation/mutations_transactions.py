"""Bugs of transactions: coordinators, markers, verification, and what readers of committed records are told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.groups import offsets as offset_rules
from penstock.groups.group import FetchedOffset
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.log.producer_state import PartitionTransactions
from penstock.protocol.errors import ErrorCode
from penstock.transactions import producer_requests as end_rules
from penstock.transactions import producer_requests as init_rules
from penstock.transactions.messages import MarkersReply, TopicPartition
from penstock.transactions.producer_requests import TransactionDecision
from penstock.transactions.transaction import TransactionMetadata
from penstock.transactions.transaction_shard import PendingMarkers
from simulation.admission import Admission
from simulation.coordinator import Coordinator
from simulation.markers import MarkerWriting
from simulation.mutation import Mutation, Patch, Traps
from simulation.replica import Replica
from simulation.script import Call, Steps, play

_WORLD = "transactions"


def _decided_in_one_epoch(self: TransactionMetadata, **fields: Any) -> TransactionMetadata:
    return _decided(self, **(fields | {"transaction_version": 1}))


_decided = TransactionMetadata.decided


def _markers_at_once(self: Coordinator, replies: Any) -> None:
    for token, reply in replies:
        if isinstance(reply, MarkersReply):
            token.answer(reply)
    _release_later(self, tuple(each for each in replies if not isinstance(each[1], MarkersReply)))


_release_later = Coordinator._release_later


def _aborted_a_moment_ago(self: Replica, offset: int, next_offset: int) -> Any:
    known = self.__dict__.setdefault("aborted_before", ())
    self.__dict__["aborted_before"] = self.log.aborted_in(0, self.log.end_offset)
    return tuple(each for each in self.log.aborted_in(offset, next_offset) if each in known)


def _add_after_append(
    self: Admission, replica: Replica, transactional_id: str, producer_id: int, epoch: int, adds: bool
) -> Steps:
    replica.log.producers.check_epoch(producer_id, epoch)
    place = TopicPartition(replica.topic, replica.key.partition)
    play(self.node, _ask(self._question(transactional_id, producer_id, epoch, place, adds)))
    return None
    yield 0


def _ask(question: Call) -> Steps:
    yield question


def _loads_without_pending(self: Coordinator, batches: Any) -> None:
    for batch in batches:
        if not batch.is_transactional or batch.marker is not None:
            self.replay_batch(batch)


def _marker_confirmed_at_once(self: MarkerWriting, ask: Any, respond: Any) -> None:
    _received(self, ask, lambda _: None)
    respond(ErrorCode.none)


_received = MarkerWriting.received


def _knows_id_only(current: TransactionMetadata, producer_id: int, epoch: int) -> ErrorCode:
    is_known = producer_id in (current.client.id, current.producer.id)
    return ErrorCode.none if is_known else ErrorCode.invalid_producer_id_mapping


def _hands_out_what_it_decided(self: PendingMarkers, after: Any, token: Any) -> Iterable[Any]:
    self._waiting = token
    return ()


def _any_verdict_will_do(current: TransactionMetadata, request: Any, **fields: Any) -> Any:
    decision = _answer_again(current, request, **fields)
    is_refused = getattr(decision.reply, "error", None) is ErrorCode.invalid_txn_state
    return (
        TransactionDecision(end_rules._end_reply(current))
        if is_refused and current.state.is_complete
        else decision
    )


_answer_again = end_rules._answer_again


def _unstable_is_none(store: Any, group: str, topic: str, partition: int, *others: Any) -> FetchedOffset:
    found = _fetch_one(store, group, topic, partition, *others)
    return FetchedOffset(topic=topic, partition=partition, committed=found.committed)


_fetch_one = offset_rules._fetch_one

TRANSACTION_MUTATIONS = (
    Mutation(
        name="no-epoch-per-transaction",
        sentence="The epoch stays the same from one transaction to the next.",
        trap=Traps.LATE_END,
        world=_WORLD,
        patches=(Patch(TransactionMetadata, "decided", _decided_in_one_epoch),),
    ),
    Mutation(
        name="stale-epoch-may-end",
        sentence="EndTxn is taken from any epoch of the producer.",
        trap=Traps.LATE_END,
        world=_WORLD,
        patches=(Patch(end_rules, "check_producer", _knows_id_only),),
    ),
    Mutation(
        name="markers-before-prepared",
        sentence="Markers are written before the decision is committed.",
        trap=Traps.ALL_OR_NOTHING,
        world=_WORLD,
        faults=("one-way cut", "slow disk", "power loss"),
        patches=(Patch(Coordinator, "_release_later", _markers_at_once),),
    ),
    Mutation(
        name="markers-forgotten-at-failover",
        sentence="A new coordinator does not hand out what the last one had prepared.",
        trap=Traps.ALL_OR_NOTHING,
        world=_WORLD,
        patches=(Patch(PendingMarkers, "ask", _hands_out_what_it_decided),),
    ),
    Mutation(
        name="marker-confirmed-uncommitted",
        sentence="A leader confirms a marker before it is committed.",
        trap=Traps.ALL_OR_NOTHING,
        world=_WORLD,
        patches=(Patch(MarkerWriting, "received", _marker_confirmed_at_once),),
    ),
    Mutation(
        name="unreplicated-markers-counted",
        sentence="The last stable offset passes a transaction whose marker is not committed.",
        trap=Traps.ONE_SNAPSHOT,
        world=_WORLD,
        faults=("kill", "power loss"),
        patches=(
            Patch(
                PartitionTransactions,
                "first_unstable_offset",
                lambda self, high_watermark: self.first_open_offset,
            ),
        ),
    ),
    Mutation(
        name="aborted-list-of-another-moment",
        sentence="The list of aborted transactions is older than the last stable offset.",
        trap=Traps.ONE_SNAPSHOT,
        world=_WORLD,
        patches=(Patch(Replica, "aborted_in", _aborted_a_moment_ago),),
    ),
    Mutation(
        name="append-before-verification",
        sentence="A leader appends first, and adds the partition to the transaction afterwards.",
        trap=Traps.VERIFY,
        world=_WORLD,
        patches=(Patch(Admission, "verified", _add_after_append),),
    ),
    Mutation(
        name="pending-offsets-shown",
        sentence="Offsets of a transaction count before it is committed.",
        trap=Traps.ALL_OR_NOTHING,
        world=_WORLD,
        patches=(
            Patch(
                GroupCoordinatorShard,
                "replay_pending",
                lambda self, producer_id, key, value: self.replay(key, value),
            ),
        ),
    ),
    Mutation(
        name="pending-offsets-lost-at-failover",
        sentence="A new group coordinator leaves out the offsets of open transactions.",
        trap=Traps.ALL_OR_NOTHING,
        world=_WORLD,
        patches=(Patch(Coordinator, "replay_log", _loads_without_pending),),
    ),
    Mutation(
        name="unstable-offset-defaults",
        sentence="An offset that a transaction may still change is told as none.",
        trap=Traps.NO_DEFAULT_OFFSET,
        world=_WORLD,
        patches=(Patch(offset_rules, "_fetch_one", _unstable_is_none),),
    ),
    Mutation(
        name="timeout-told-as-success",
        sentence="A commit after the transaction has timed out is answered like one that was done.",
        trap=Traps.TIMEOUT,
        world=_WORLD,
        patches=(Patch(end_rules, "_answer_again", _any_verdict_will_do),),
    ),
    Mutation(
        name="two-phase-times-out",
        sentence="A prepared two-phase transaction is aborted when its time is over.",
        trap=Traps.TWO_PHASE,
        world=_WORLD,
        patches=(Patch(init_rules, "_timeout_ms", lambda request: request.timeout_ms),),
    ),
)
