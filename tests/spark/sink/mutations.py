"""The sink with one of its safeguards taken out: worlds with enough seeds must notice each."""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from penstock.client.producing import RawProducer
from penstock.spark import concluding, decisions, writing
from penstock.spark.decisions import Ledger, driver_name


@contextmanager
def _patched(*patches: Any):
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def _no_lookup() -> Any:
    """A driver does not ask whether the batch was decided before."""
    real = Ledger.take

    def take(self: Ledger) -> None:
        real(self)

    return _patched(mock.patch.object(Ledger, "take", take))


def _no_fencing() -> Any:
    """A driver that was replaced after it looked can still decide: it takes the turn back without looking again."""
    real = Ledger.decide

    def decide(self: Ledger, decision: Any) -> None:
        self._producer = RawProducer(self.cluster, transactional_id=driver_name(self.query))
        self._producer.init()
        real(self, decision)

    return _patched(mock.patch.object(Ledger, "decide", decide))


def _no_sweep() -> Any:
    """Attempts that lost, and what dead drivers left behind, stay open."""
    return _patched(mock.patch.object(concluding, "sweep", return_value=None))


def _no_question() -> Any:
    """A late attempt does not ask whether its batch is decided."""
    return _patched(mock.patch.object(writing, "last_mark", return_value=None))


def _idle_ids_live() -> Any:
    """Attempts that have taken an id and written nothing yet are not stopped."""
    return _patched(mock.patch.object(concluding, "_EMPTY", "Dead"))


def _early_abort() -> Any:
    """What others have prepared is aborted before there is a decision."""
    real = concluding.conclude

    def conclude(ledger: Ledger, batch: Any, prepared: Any, **kwargs: Any) -> bool:
        keep = frozenset(each.transactional_id for each in prepared)
        for name in concluding._begun(ledger.cluster, concluding.attempts_prefix(batch), keep):
            concluding.fence(ledger.cluster, name)
        return real(ledger, batch, prepared, **kwargs)

    from tests.spark.sink import world

    return _patched(mock.patch.object(world, "conclude", conclude))


def _one_name() -> Any:
    """The ids of a batch are used again in the next one."""
    return _patched(mock.patch.object(concluding, "_SLOTS", 1))


def _decides_outside() -> Any:
    """The decision is not found by the next driver: nobody is told where it is."""
    return _patched(
        mock.patch.object(RawProducer, "commit_offsets", return_value=None),
        mock.patch.object(decisions.Ledger, "_search", return_value=None),
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
