"""The sink with one of its safeguards taken out: worlds with enough seeds must notice each."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.spark.sink.actors import patched

from penstock.client.wire.producer import RawProducer
from penstock.spark.exactly_once import decisions, two_phase_commit
from penstock.spark.exactly_once.decisions import DecisionLog, sink_transactional_id
from penstock.spark.sink import writers


def _no_lookup() -> Any:
    """A driver does not ask whether the batch was decided before."""
    real = DecisionLog.take

    def take(self: DecisionLog) -> None:
        real(self)

    return patched(mock.patch.object(DecisionLog, "take", take))


def _no_fencing() -> Any:
    """A driver that was replaced after it looked can still decide: it takes the turn back without looking again."""
    real = DecisionLog.decide

    def decide(self: DecisionLog, decision: Any) -> None:
        self._producer = RawProducer(self.cluster, transactional_id=sink_transactional_id(self.query))
        self._producer.init()
        real(self, decision)

    return patched(mock.patch.object(DecisionLog, "decide", decide))


def _no_sweep() -> Any:
    """Attempts that lost, and what dead drivers left behind, stay open."""
    return patched(mock.patch.object(two_phase_commit, "abort_undecided", return_value=None))


def _no_question() -> Any:
    """A late attempt does not ask whether its batch is decided."""
    return patched(mock.patch.object(writers, "last_decided_batch", return_value=None))


def _idle_ids_live() -> Any:
    """Attempts that have taken an id and written nothing yet are not stopped."""
    return patched(mock.patch.object(two_phase_commit, "_EMPTY", "Dead"))


def _early_abort() -> Any:
    """What others have prepared is aborted before there is a decision."""
    real = two_phase_commit.commit_batch

    def conclude(decision_log: DecisionLog, batch: Any, prepared: Any, **kwargs: Any) -> bool:
        keep = frozenset(each.transactional_id for each in prepared)
        for name in two_phase_commit._begun_ids(
            decision_log.cluster, two_phase_commit.attempt_id_prefix(batch), keep
        ):
            two_phase_commit.fence_producer(decision_log.cluster, name)
        return real(decision_log, batch, prepared, **kwargs)

    from tests.spark.sink import world

    return patched(mock.patch.object(world, "commit_batch", conclude))


def _one_name() -> Any:
    """The ids of a batch are used again in the next one."""
    return patched(mock.patch.object(two_phase_commit, "_SLOTS", 1))


def _decides_outside() -> Any:
    """The next driver does not find the decision."""
    return patched(
        mock.patch.object(RawProducer, "commit_offsets", return_value=None),
        mock.patch.object(decisions.DecisionLog, "_search", return_value=None),
    )


MUTATIONS: dict[str, Callable[[], Any]] = {
    "no look-up": _no_lookup,
    "no fencing": _no_fencing,
    "no sweep": _no_sweep,
    "no question": _no_question,
    "idle ids live": _idle_ids_live,
    "early abort": _early_abort,
    "one name": _one_name,
    "decides outside": _decides_outside,
}
