"""Shrinks and expands the ISR of partitions: requests the changes from the controller with AlterPartition.

One request carries the changes of many partitions; each partition has at most one change in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from penstock.broker.partition.leader_replica import LeaderReplica, monotonic_ms
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.replication.leader import IsrProposal

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import ImageView, Tasks
    from penstock.broker.partition.partition import Partition

logger = logging.getLogger("penstock.replication")

ALTER_PARTITION: Final = 56
_CHECK_INTERVAL_S_MAX: Final = 0.5
#: Followers that catch up at the same time share a request.
_GATHER_S: Final = 0.01
_CALL_TIMEOUT_S_MAX: Final = 5.0
#: The controller has the same state as this leader, and rejects the change.
_DECLINED: Final = frozenset({ErrorCode.ineligible_replica, ErrorCode.invalid_request})
#: The controller has a different state, which arrives with the image.
_OUTDATED: Final = frozenset(
    {
        ErrorCode.fenced_leader_epoch,
        ErrorCode.invalid_update_version,
        ErrorCode.new_leader_elected,
        ErrorCode.not_leader_or_follower,
        ErrorCode.unknown_topic_id,
        ErrorCode.unknown_topic_or_partition,
    }
)


#: Sends a request to the active controller: gets the API key, the request and the timeout in seconds. Raises ApiError.
CallController = Callable[[int, Any, float], Awaitable[Any]]


class IsrChange(NamedTuple):
    partition: Partition
    leading: LeaderReplica
    proposal: IsrProposal

    @property
    def is_current(self) -> bool:
        """Whether the replica still leads in the same epoch; a reply to an earlier leadership does not apply."""
        return self.partition.leading is self.leading


class AlterPartitionManager:
    def __init__(
        self,
        tasks: Tasks,
        settings: NodeSettings,
        metadata: ImageView,
        *,
        partitions: Iterable[Partition],
        call_controller: CallController,
        broker_epoch: Callable[[], int],
    ) -> None:
        self._tasks = tasks
        self._node_id = settings.node_id
        self._metadata = metadata
        self._partitions = partitions
        self._call_controller = call_controller
        self._broker_epoch = broker_epoch
        lag_s = settings.integer("replica.lag.time.max.ms") / 1000
        self._look_s = min(lag_s / 4, _CHECK_INTERVAL_S_MAX)
        self._call_timeout_s = min(lag_s, _CALL_TIMEOUT_S_MAX)
        self._catching_up: dict[Partition, None] = {}
        self._woken = asyncio.Event()

    def start(self) -> None:
        self._tasks.spawn(self._run())

    def wake(self, partition: Partition) -> None:
        """Check the partition soon: a follower has caught up and may join the ISR."""
        self._catching_up[partition] = None
        self._woken.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_look = loop.time() + self._look_s
        while True:
            try:
                async with asyncio.timeout_at(next_look):
                    await self._woken.wait()
                    await asyncio.sleep(_GATHER_S)
            except TimeoutError:
                next_look = loop.time() + self._look_s
                self._catching_up.update(dict.fromkeys(self._partitions))
            self._woken.clear()
            looked_at, self._catching_up = self._catching_up, {}
            self.look_at(looked_at)

    def look_at(self, partitions: Iterable[Partition]) -> None:
        """Request the ISR changes that the leader rules of these partitions propose."""
        now_ms = monotonic_ms()
        changes: list[IsrChange] = []
        for partition in partitions:
            try:
                change = self._wanted_by(partition, now_ms)
            except Exception:
                # One failure must not keep the other partitions from requesting their changes.
                logger.exception("cannot look after an in-sync set", extra={"partition": str(partition)})
            else:
                changes += () if change is None else (change,)
        if changes:
            self._tasks.spawn(self._ask_for(changes))

    def _wanted_by(self, partition: Partition, now_ms: int) -> IsrChange | None:
        leading = partition.leading
        proposal = None if leading is None else leading.wanted_isr(now_ms, self._is_eligible)
        if leading is None or proposal is None:
            return None
        leading.rules.proposed_isr(proposal)
        return IsrChange(partition, leading, proposal)

    def _is_eligible(self, broker_id: int, broker_epoch: int) -> bool:
        broker = self._metadata.image.brokers.get(broker_id)
        return broker is not None and broker.is_active and broker.epoch == broker_epoch

    async def _ask_for(self, changes: list[IsrChange]) -> None:
        answers: dict[tuple[UUID, int], Any] = {}
        try:
            response = await self._call_controller(
                ALTER_PARTITION, self._request(changes), self._call_timeout_s
            )
        except ApiError as error:
            logger.warning("no answer to a change of in-sync sets", extra={"reason": str(error)})
        else:
            if response.error_code is not ErrorCode.none:
                reason = response.error_code.name
                logger.warning("change of in-sync sets refused", extra={"reason": reason})
            answers = {
                (topic.topic_id, part.partition_index): part
                for topic in response.topics
                for part in topic.partitions
            }
        finally:
            for change in changes:
                answer = answers.get((change.partition.topic_id, change.partition.index))
                if change.is_current:
                    self._take_answer(change, answer)

    def _epoch_of(self, broker_id: int) -> int | None:
        broker = self._metadata.image.brokers.get(broker_id)
        return None if broker is None else broker.epoch

    def _take_answer(self, change: IsrChange, answer: Any) -> None:
        """Handle the controller's reply for one change; None if it is unknown whether the change was made.

        The leader takes the new ISR from the image, not from the reply: the image also has the min.insync.replicas
        under which it was decided.
        """
        rules, proposal = change.leading.rules, change.proposal
        if rules.partition_epoch != proposal.partition_epoch:
            return  # the image has already delivered the outcome
        error = ErrorCode.request_timed_out if answer is None else answer.error_code
        is_same = error is ErrorCode.none and answer.partition_epoch == proposal.partition_epoch
        if error in _DECLINED or is_same:
            rules.isr_declined(self._epoch_of)
        else:
            rules.isr_refused(final=error is ErrorCode.none or error in _OUTDATED)

    def _request(self, changes: list[IsrChange]) -> Any:
        from kio.schema.alter_partition.v3 import request as schema

        topics: dict[UUID, list[Any]] = {}
        for partition, _, proposal in changes:
            topics.setdefault(partition.topic_id, []).append(
                schema.PartitionData(
                    partition_index=partition.index,
                    leader_epoch=proposal.leader_epoch,
                    new_isr_with_epochs=tuple(
                        schema.BrokerState(broker_id=broker, broker_epoch=epoch)
                        for broker, epoch in proposal.isr
                    ),
                    partition_epoch=proposal.partition_epoch,
                )
            )
        return schema.AlterPartitionRequest(
            broker_id=self._node_id,
            broker_epoch=self._broker_epoch(),
            topics=tuple(
                schema.TopicData(topic_id=topic_id, partitions=tuple(parts))
                for topic_id, parts in topics.items()
            ),
        )
