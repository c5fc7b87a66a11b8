"""Claims with one of their safeguards taken out: worlds with enough seeds must notice each."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from tests.spark.sink.actors import patched

from penstock.spark import internal_topics
from penstock.spark.at_most_once import offset_claims as claims_module
from penstock.spark.at_most_once import task_claims
from penstock.spark.at_most_once.offset_claims import OffsetClaims
from penstock.spark.at_most_once.task_claims import TaskClaim
from penstock.spark.offsets import OffsetRange


def _late_claim() -> Any:
    """A batch is claimed when the next one is planned, which is how groups commit as a rule."""
    real_cut, real_claim = OffsetClaims.cut, OffsetClaims.claim

    def claim(self: OffsetClaims, tasks: Sequence[OffsetRange]) -> list[TaskClaim]:
        self.late = list(tasks)
        base, batch = (
            internal_topics.end_offset(self._cluster, internal_topics.CLAIMS_TOPIC),
            uuid.uuid4().hex,
        )
        return [TaskClaim(self._group, batch, base, number) for number in range(len(tasks))]

    def cut(self: OffsetClaims, ranges: Sequence[OffsetRange]) -> list[OffsetRange]:
        if getattr(self, "late", None):
            real_claim(self, self.late)
        return real_cut(self, ranges)

    return patched(
        mock.patch.object(OffsetClaims, "claim", claim), mock.patch.object(OffsetClaims, "cut", cut)
    )


def _no_cut() -> Any:
    """A batch that is planned again is given again."""
    return patched(
        mock.patch.object(claims_module, "split_at_claims", lambda ranges, claims: (list(ranges), []))
    )


def _no_fence() -> Any:
    """A driver that was replaced since it looked claims all the same: it takes its turn back without looking again."""
    real = OffsetClaims.claim

    def claim(self: OffsetClaims, tasks: Sequence[OffsetRange]) -> list[TaskClaim]:
        self.close()
        return real(self, tasks)

    return patched(mock.patch.object(OffsetClaims, "claim", claim))


def _no_ticket() -> Any:
    """Every attempt at a task reads."""
    return patched(mock.patch.object(task_claims, "claim_task", return_value=True))


def _no_count() -> Any:
    """What is cut away is not written down."""
    return patched(mock.patch.object(claims_module, "skipped_document", return_value={"ranges": []}))


def _no_doubt() -> Any:
    """A query without its checkpoint does not count what its last batch may have lost."""
    return patched(mock.patch.object(claims_module, "find_in_doubt", return_value=[]))


MUTATIONS: dict[str, Callable[[], Any]] = {
    "claim after planning": _late_claim,
    "no cut": _no_cut,
    "no fence": _no_fence,
    "no ticket": _no_ticket,
    "no count": _no_count,
    "no doubt": _no_doubt,
}
