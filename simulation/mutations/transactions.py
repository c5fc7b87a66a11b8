"""Bugs of transactions: the coordinator and its runtime, markers, verification, and what readers are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from penstock.broker.coordinators.runtime import active_shard
from penstock.broker.coordinators.runtime.active_shard import ActiveShard, replay_log
from penstock.broker.coordinators.runtime.runtime import CoordinatorRuntime
from penstock.broker.coordinators.transactions import markers
from penstock.broker.coordinators.transactions.markers import MarkerAppender, MarkerSender
from penstock.broker.coordinators.transactions.request_queue import BrokerRequestQueue
from penstock.broker.coordinators.transactions.verification import AppendVerifier, VerificationRequest
from penstock.groups import offsets as offset_rules
from penstock.groups.group import FetchedOffset
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.log.log import Log
from penstock.log.producer_state import PartitionTransactions, ProducerStateManager
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions import producer_requests
from penstock.transactions.messages import MarkersReply, TopicPartition, TransactionResult
from penstock.transactions.producer_requests import TransactionDecision
from penstock.transactions.transaction import TransactionMetadata
from penstock.transactions.transaction_shard import PendingMarkers, TransactionCoordinatorShard
from simulation.mutation import Mutation, Patch, Traps

# -- what the coordinator decides ------------------------------------------------------------------------


def _decided_in_one_epoch(self: TransactionMetadata, **fields: Any) -> TransactionMetadata:
    return _decided(self, **(fields | {"transaction_version": 1}))


_decided = TransactionMetadata.decided


def _knows_id_only(current: TransactionMetadata, producer_id: int, epoch: int) -> ErrorCode:
    is_known = producer_id in (current.client.id, current.producer.id)
    return ErrorCode.none if is_known else ErrorCode.invalid_producer_id_mapping


def _any_outcome_will_do(current: TransactionMetadata, request: Any, **fields: Any) -> TransactionDecision:
    decision = _answer_again(current, request, **fields)
    is_refused = getattr(decision.reply, "error", None) is ErrorCode.invalid_txn_state
    if is_refused and current.state.is_complete:
        return TransactionDecision(producer_requests._end_reply(current))
    return decision


_answer_again = producer_requests._answer_again


def _loaded_without_timeouts(self: TransactionCoordinatorShard, now_ms: int) -> TransactionResult:
    self._deadlines.clear()
    return _loaded(self, now_ms)


_loaded = TransactionCoordinatorShard.loaded


# -- the runtime -----------------------------------------------------------------------------------------


def _markers_at_once(self: ActiveShard[Any], replies: Any) -> None:
    for token, reply in replies:
        if isinstance(reply, MarkersReply) and not token.done():
            token.set_result(reply)
    _reply_when_committed(self, tuple(each for each in replies if not isinstance(each[1], MarkersReply)))


def _reply_at_once(self: ActiveShard[Any], replies: Any) -> None:
    for token, reply in replies:
        if not token.done():
            token.set_result(reply)


_reply_when_committed = ActiveShard._reply_when_committed


def _replay_without_pending(shard: Any, header: Any, batch: Any) -> None:
    if not header.is_transactional or header.is_control:
        _replay_batch(shard, header, batch)


_replay_batch = active_shard._replay_batch


async def _load_committed(self: CoordinatorRuntime[Any], index: int) -> None:
    while index not in self._active and not self._is_closed:
        partition: Any = self._find_partition(index)
        if partition is None:
            return
        shard, end, epoch = self._new_shard(), partition.high, partition.leader_epoch
        await replay_log(shard, partition.log, end, self._in_thread)
        if self._is_current(partition, index, epoch):
            self._activate(index, shard, partition, end.offset - 1)
            return


# -- markers ---------------------------------------------------------------------------------------------


def _hands_out_what_it_decided(self: PendingMarkers, after: Any, token: Any) -> Iterable[Any]:
    self._waiting = token
    return ()


async def _no_wait_for_commits(waiting: list[Any]) -> None:
    for each in waiting:
        asyncio.ensure_future(markers._commit_error(each.committed))  # noqa: RUF006


async def _report_once(self: MarkerSender, active: Any, markers: Any, written: Any) -> None:
    try:
        await active.submit(
            lambda shard, token: shard.markers_written(
                markers, written, token, now_ms=self._environment.now_ms()
            )
        )
    except ApiError:
        return


def _append_past_the_shard(self: MarkerAppender, where: Any, entry: Any) -> Any:
    partition = self._partitions.find(where.topic, where.partition)
    offset = partition.append_marker(
        entry.marker, self._clock.now_ms(), transaction_version=entry.transaction_version
    )
    return partition.committed(offset)


async def _send_once(self: BrokerRequestQueue[Any]) -> None:
    try:
        entries = self._take()
        if entries:
            self._answer(entries, *await self._ask_together(entries))
    finally:
        self._sending = None


# -- verification ----------------------------------------------------------------------------------------


async def _append_before_answer(self: AppendVerifier, partitions: Any, writer: Any) -> dict[Any, Any]:
    question = VerificationRequest(writer.transactional_id, writer.producer_id, writer.epoch, writer.adds)
    places = tuple(TopicPartition(partition.topic, partition.index) for partition in partitions)
    self._tasks.spawn(self._verification.ask(question, places))
    return dict.fromkeys(partitions)


# -- readers ---------------------------------------------------------------------------------------------


def _aborted_a_moment_ago(self: Log, start_offset: int, upto_offset: int, **fields: Any) -> Any:
    known = _aborted_before.get(self, ())
    _aborted_before[self] = _aborted_in(self, 0, self.end_offset)
    return tuple(each for each in _aborted_in(self, start_offset, upto_offset, **fields) if each in known)


_aborted_before: dict[Log, Any] = {}
_aborted_in = Log.aborted_in


def _unstable_is_none(store: Any, group: str, topic: str, partition: int, *others: Any) -> FetchedOffset:
    found = _fetch_one(store, group, topic, partition, *others)
    return FetchedOffset(topic=topic, partition=partition, committed=found.committed)


_fetch_one = offset_rules._fetch_one


def _restore_without_open(self: ProducerStateManager, states: Any, now_ms: int) -> None:
    _restore(self, states, now_ms)
    self.transactions.restore(())


_restore = ProducerStateManager.restore

_mutation = partial(Mutation, world="transactions")

MUTATIONS: tuple[Mutation, ...] = (
    _mutation(
        name="no-epoch-per-transaction",
        sentence="The epoch stays the same from one transaction to the next.",
        trap=Traps.LATE_END,
        patches=(Patch(TransactionMetadata, "decided", _decided_in_one_epoch),),
    ),
    _mutation(
        name="stale-epoch-may-end",
        sentence="The coordinator takes requests from any epoch of the producer.",
        trap=Traps.LATE_END,
        patches=(Patch(producer_requests, "check_producer", _knows_id_only),),
    ),
    _mutation(
        name="timeout-told-as-success",
        sentence="A commit after the transaction has timed out is answered like one that was done.",
        trap=Traps.TIMEOUT,
        patches=(Patch(producer_requests, "_answer_again", _any_outcome_will_do),),
    ),
    _mutation(
        name="two-phase-times-out",
        sentence="A prepared two-phase transaction is aborted when its time is over.",
        trap=Traps.TWO_PHASE,
        patches=(Patch(producer_requests, "_timeout_ms", lambda request: request.timeout_ms),),
    ),
    _mutation(
        name="timeouts-forgotten-at-failover",
        sentence="A new coordinator does not time out the transactions that were open when it was loaded.",
        trap=Traps.ALL_OR_NOTHING,
        faults=("kill", "clean restart"),
        patches=(Patch(TransactionCoordinatorShard, "loaded", _loaded_without_timeouts),),
    ),
    _mutation(
        name="coordinator-replies-uncommitted",
        sentence="A coordinator replies before its decision is committed.",
        trap=Traps.DURABLE,
        patches=(Patch(ActiveShard, "_reply_when_committed", _reply_at_once),),
    ),
    _mutation(
        name="load-stops-at-the-high-watermark",
        sentence="A new coordinator leaves out the records that are not committed yet.",
        trap=Traps.ALL_OR_NOTHING,
        patches=(Patch(CoordinatorRuntime, "_load", _load_committed),),
    ),
    _mutation(
        name="markers-before-prepared",
        sentence="Markers are written before the decision is committed.",
        trap=Traps.ALL_OR_NOTHING,
        faults=("one-way cut", "client suspended"),
        patches=(Patch(ActiveShard, "_reply_when_committed", _markers_at_once),),
    ),
    _mutation(
        name="markers-forgotten-at-failover",
        sentence="A new coordinator does not hand out the markers of what the last one had prepared.",
        trap=Traps.ALL_OR_NOTHING,
        patches=(Patch(PendingMarkers, "ask", _hands_out_what_it_decided),),
    ),
    _mutation(
        name="markers-not-announced",
        sentence="The marker sender is not woken when a transaction is prepared.",
        trap=Traps.ALL_OR_NOTHING,
        patches=(Patch(PendingMarkers, "announce", lambda self, decided: ()),),
    ),
    _mutation(
        name="marker-confirmed-uncommitted",
        sentence="A leader confirms a marker before it is committed.",
        trap=Traps.ALL_OR_NOTHING,
        patches=(Patch(markers, "_await_commits", _no_wait_for_commits),),
    ),
    _mutation(
        name="unanswered-marker-counts",
        sentence="A marker counts as written if the leader did not answer.",
        trap=Traps.ALL_OR_NOTHING,
        patches=(Patch(markers, "_WRITTEN_CODES", markers._WRITTEN_CODES | {ErrorCode.network_exception}),),
    ),
    _mutation(
        name="marker-report-not-repeated",
        sentence="If the coordinator cannot store that all markers are written, this is not reported to it again.",
        trap=Traps.LOST_DECISION,
        faults=("suspend",),
        patches=(Patch(MarkerSender, "_report", _report_once),),
    ),
    _mutation(
        name="marker-past-the-group",
        sentence="A marker goes into the log of the offsets, and the loaded group coordinator does not learn of it.",
        trap=Traps.ALL_OR_NOTHING,
        patches=(Patch(MarkerAppender, "_append", _append_past_the_shard),),
    ),
    _mutation(
        name="queued-while-sending-is-forgotten",
        sentence="What is queued for a broker while a request is in flight waits until the next is queued.",
        trap=Traps.LOST_DECISION,
        patches=(Patch(BrokerRequestQueue, "_send", _send_once),),
    ),
    _mutation(
        name="append-before-verification",
        sentence="A leader appends first, and adds the partition to the transaction afterwards.",
        trap=Traps.VERIFY,
        patches=(
            Patch(AppendVerifier, "verifications", _append_before_answer),
            Patch(AppendVerifier, "check_open", lambda self, partition, writer: None),
        ),
    ),
    _mutation(
        name="coordinator-not-asked",
        sentence="A leader appends to a transaction that the coordinator does not know of.",
        trap=Traps.VERIFY,
        patches=(Patch(AppendVerifier, "_needs_verification", lambda self, partition, writer: False),),
    ),
    _mutation(
        name="unreplicated-markers-counted",
        sentence="The last stable offset passes a transaction whose marker is not committed.",
        trap=Traps.ONE_SNAPSHOT,
        patches=(
            Patch(
                PartitionTransactions,
                "first_unstable_offset",
                lambda self, high_watermark: self.first_open_offset,
            ),
        ),
    ),
    _mutation(
        name="open-transactions-forgotten-at-restart",
        sentence="A partition does not restore its open transactions.",
        trap=Traps.PRODUCER_STATE,
        faults=("clean restart",),
        patches=(Patch(ProducerStateManager, "restore", _restore_without_open),),
    ),
    _mutation(
        name="aborted-list-of-another-moment",
        sentence="The list of aborted transactions is older than the last stable offset.",
        trap=Traps.ONE_SNAPSHOT,
        patches=(Patch(Log, "aborted_in", _aborted_a_moment_ago),),
    ),
    _mutation(
        name="pending-offsets-shown",
        sentence="Offsets of a transaction count before it is committed.",
        trap=Traps.ALL_OR_NOTHING,
        patches=(
            Patch(
                GroupCoordinatorShard,
                "replay_pending",
                lambda self, producer_id, key, value: self.replay(key, value),
            ),
        ),
    ),
    _mutation(
        name="pending-offsets-lost-at-failover",
        sentence="A new group coordinator leaves out the offsets of open transactions.",
        trap=Traps.ALL_OR_NOTHING,
        patches=(Patch(active_shard, "_replay_batch", _replay_without_pending),),
    ),
    _mutation(
        name="unstable-offset-defaults",
        sentence="An offset that a transaction may still change is returned as none.",
        trap=Traps.NO_DEFAULT_OFFSET,
        patches=(Patch(offset_rules, "_fetch_one", _unstable_is_none),),
    ),
)
