"""Mutations that remove one safeguard of claims each. Worlds with enough seeds must detect every one."""

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
    """A batch is claimed when the next one is planned, as consumers usually commit."""
    real_without_claimed, real_claim = OffsetClaims.without_claimed, OffsetClaims.claim

    def claim(self: OffsetClaims, tasks: Sequence[OffsetRange]) -> list[TaskClaim]:
        self.late = list(tasks)
        base, batch = (
            internal_topics.end_offset(self._cluster, internal_topics.CLAIMS_TOPIC),
            uuid.uuid4().hex,
        )
        return [TaskClaim(self._group, batch, base, number) for number in range(len(tasks))]

    def without_claimed(self: OffsetClaims, ranges: Sequence[OffsetRange]) -> list[OffsetRange]:
        if getattr(self, "late", None):
            real_claim(self, self.late)
        return real_without_claimed(self, ranges)

    return patched(
        mock.patch.object(OffsetClaims, "claim", claim),
        mock.patch.object(OffsetClaims, "without_claimed", without_claimed),
    )


def _plan_claimed_again() -> Any:
    """A batch that is planned again is delivered again."""
    return patched(
        mock.patch.object(claims_module, "split_at_claims", lambda ranges, claims: (list(ranges), []))
    )


def _no_fence() -> Any:
    """A driver that was fenced after its look-up can still claim: it fences back, and does not look again."""
    real = OffsetClaims.claim

    def claim(self: OffsetClaims, tasks: Sequence[OffsetRange]) -> list[TaskClaim]:
        self.close()
        return real(self, tasks)

    return patched(mock.patch.object(OffsetClaims, "claim", claim))


def _every_attempt_reads() -> Any:
    """Every attempt at a task reads."""
    return patched(mock.patch.object(task_claims, "claim_task", return_value=True))


def _no_count() -> Any:
    """Skipped offsets are not recorded."""
    return patched(mock.patch.object(claims_module, "skipped_document", return_value={"ranges": []}))


def _no_doubt() -> Any:
    """A query without its checkpoint does not count what its last batch may have lost."""
    return patched(mock.patch.object(claims_module, "find_in_doubt", return_value=[]))


MUTATIONS: dict[str, Callable[[], Any]] = {
    "claim after planning": _late_claim,
    "claimed ranges are planned again": _plan_claimed_again,
    "no fence": _no_fence,
    "every attempt reads": _every_attempt_reads,
    "no count": _no_count,
    "no doubt": _no_doubt,
}
