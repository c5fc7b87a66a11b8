"""Dead letters: for each share coordinator, somebody who buries what its share partitions owe, a plan at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.groups.share.state.dead_letters import offsets_with_cause
from penstock.groups.share.state.share_state import SharePartitionKey as ShareKey
from penstock.groups.share.state.share_state import first_offsets
from penstock.groups.share.state.share_state_records import (
    DeadLetterPlan,
    DeadLetterProducer,
    DeadLetterTarget,
    SettledPlan,
    offset_intervals,
)
from penstock.groups.share.state.stored_share_state import DeadLetterView
from penstock.protocol.errors import ErrorCode
from simulation.replica import Key, Produce
from simulation.script import Ask, Local, Steps, play
from simulation.share_history import DeadLetter, Shared

if TYPE_CHECKING:
    from simulation.coordinator import Coordinator

_PLAN_MAX: Final = 3
_PRODUCER_IDS: Final = 20_000
#: Nothing is there by this plan, and nothing will be: another producer has to begin anew.
_REFUSED: Final = frozenset({ErrorCode.out_of_order_sequence_number, ErrorCode.invalid_producer_epoch})


def dead_letter_topic(topic: str) -> str:
    return f"{topic}.dlq"


def bury(coordinator: Coordinator) -> None:
    Undertaker(coordinator).begin()


class Undertaker:
    """For one life of a shard."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.node = coordinator.node
        self._busy: dict[ShareKey, None] = {}

    def begin(self) -> None:
        play(self.node, self._live())

    def _submitted(self, operation: Any) -> Local:
        return Local(
            lambda respond: self.coordinator.submit(lambda shard, token, _: operation(shard, token), respond)
        )

    def _live(self) -> Steps:
        while not self.coordinator.is_closed:
            reply = yield self._submitted(
                lambda shard, token: shard.next_dead_letters(tuple(self._busy), token)
            )
            if not isinstance(reply, tuple):
                return
            for key in reply:
                self._busy[key] = None
                play(self.node, self._bury(key), lambda _, key=key: self._rested(key))  # type: ignore[misc]

    def _rested(self, key: ShareKey) -> None:
        self._busy.pop(key, None)
        if not self.coordinator.is_closed:
            # Whoever asks again takes the place of who asked before.
            self.begin()

    def _bury(self, key: ShareKey) -> Steps:
        while not self.coordinator.is_closed:
            told = yield Local(
                lambda respond: self.coordinator.read(lambda shard: shard.burial(key), respond)
            )
            view: DeadLetterView | None = told[1] if isinstance(told, tuple) else None
            if view is None:
                return
            plan = view.plan
            if plan is None:
                plan = yield from self.plan(view)
            if plan is not None:
                yield from self._carry_out(view, plan)

    def plan(self, view: DeadLetterView) -> Steps:
        """Stored before anything is appended; None when it was not."""
        plan = self._planned(view)
        stored = yield self._submitted(lambda shard, token: shard.plan_dead_letters(view.key, plan, token))
        return plan if stored is True else None

    def _planned(self, view: DeadLetterView) -> DeadLetterPlan:
        name = dead_letter_topic(self.node.image.topics_by_id[view.key.topic_id].name)
        topic = self.node.image.topics[name]
        target = DeadLetterTarget(topic.id, view.key.partition % len(topic.partitions))
        producer = view.producer
        if producer is None or producer.target != target:
            producer = DeadLetterProducer(_PRODUCER_IDS + self.node.world.serial(), 0, 0, target)
        offsets = offset_intervals(first_offsets(view.pending, _PLAN_MAX))
        return DeadLetterPlan(
            producer.id, producer.epoch, producer.next_sequence, name, target, offsets, offsets
        )

    def _carry_out(self, view: DeadLetterView, plan: DeadLetterPlan) -> Steps:
        source = Key(view.key.topic_id, view.key.partition)
        values = tuple(
            DeadLetter(Shared(view.key.group, source, offset), *cause)
            for offset, cause in offsets_with_cause(view.pending, plan.offsets)
        )
        key = Key(plan.target.topic_id, plan.target.partition)
        request = Produce(key, values, True, plan.producer_id, plan.epoch, plan.sequence)
        while not self.coordinator.is_closed:
            reply = yield Ask(key, "produce", request)
            error = None if reply is None else reply[0]
            if error is ErrorCode.none or error in _REFUSED:
                yield from self._settle(view, plan, is_there=error is ErrorCode.none)
                return
            yield self.node.world.between(10, 50)

    def _settle(self, view: DeadLetterView, plan: DeadLetterPlan, *, is_there: bool) -> Steps:
        settled = SettledPlan(is_there, 0, plan.resolved if is_there else ())
        self.node.world.note("buried", self.node.id, plan, is_there)
        yield self._submitted(lambda shard, token: shard.settle_dead_letters(view.key, settled, plan, token))
