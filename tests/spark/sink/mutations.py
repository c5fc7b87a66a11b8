"""Mutations that remove one safeguard of the sink each. Worlds with enough seeds must detect every one."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.spark.sink.actors import patched

from penstock.client.wire.producer import RawProducer
from penstock.spark.exactly_once import decisions, two_phase_commit
from penstock.spark.exactly_once.decisions import DecisionLog, sink_transactional_id
from penstock.spark.sink import writers


def _no_lookup() -> Any:
    """A driver does not look up whether the batch was decided before."""
    real = DecisionLog.take

    def take(self: DecisionLog) -> None:
        real(self)

    return patched(mock.patch.object(DecisionLog, "take", take))


def _no_fencing() -> Any:
    """A driver that was fenced after its look-up can still decide: it fences back, and does not look again."""
    real = DecisionLog.decide

    def decide(self: DecisionLog, decision: Any) -> None:
        self._producer = RawProducer(self.cluster, transactional_id=sink_transactional_id(self.query))
        self._producer.init()
        real(self, decision)

    return patched(mock.patch.object(DecisionLog, "decide", decide))


def _no_abort_of_undecided() -> Any:
    """Transactions of losing attempts and of dead drivers stay open."""
    return patched(mock.patch.object(two_phase_commit, "abort_undecided", return_value=None))


def _no_lookup_by_attempts() -> Any:
    """A late attempt does not look up whether its batch is decided."""
    return patched(mock.patch.object(writers, "last_decided_batch", return_value=None))


def _idle_ids_live() -> Any:
    """Attempts that have initialized an id but written nothing are not fenced."""
    return patched(mock.patch.object(two_phase_commit, "_EMPTY", "Dead"))


def _early_abort() -> Any:
    """Transactions that other drivers have prepared are aborted before there is a decision."""
    real = two_phase_commit.commit_batch

    def commit_batch(decision_log: DecisionLog, batch: Any, prepared: Any, **kwargs: Any) -> bool:
        keep = frozenset(each.transactional_id for each in prepared)
        for name in two_phase_commit._begun_ids(
            decision_log.cluster, two_phase_commit.attempt_id_prefix(batch), keep
        ):
            two_phase_commit.fence_producer(decision_log.cluster, name)
        return real(decision_log, batch, prepared, **kwargs)

    from tests.spark.sink import world

    return patched(mock.patch.object(world, "commit_batch", commit_batch))


def _ids_of_the_next_batch() -> Any:
    """The ids of a batch are used again in the next batch."""
    return patched(mock.patch.object(two_phase_commit, "_SLOTS", 1))


def _decision_not_found() -> Any:
    """The next driver does not find the decision, because its offset is not committed."""
    return patched(
        mock.patch.object(RawProducer, "commit_offsets", return_value=None),
        mock.patch.object(decisions.DecisionLog, "_search", return_value=None),
    )


MUTATIONS: dict[str, Callable[[], Any]] = {
    "no look-up": _no_lookup,
    "no fencing": _no_fencing,
    "undecided transactions stay open": _no_abort_of_undecided,
    "no look-up by attempts": _no_lookup_by_attempts,
    "idle ids live": _idle_ids_live,
    "early abort": _early_abort,
    "ids are reused in the next batch": _ids_of_the_next_batch,
    "the decision is not found": _decision_not_found,
}
