"""Never two unfenced owners of a partition: the short campaign, and whether its judge would notice.

`make chaos ARGS="--campaign rebalance"` goes through 1,000 rebalances.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.brokers import external_bootstrap
from tests.chaos.checks.checker import Findings
from tests.chaos.rebalance import judge
from tests.chaos.rebalance.campaign import Campaign, Plan
from tests.chaos.rebalance.diaries import Entry, Freeze, Told, digest
from tests.chaos.rebalance.judge import Around, Owns, Stores

needs_nodes = pytest.mark.skipif(external_bootstrap() is not None, reason="needs nodes that it may kill")

QUIET = Around((), session_s=3.0, heartbeat_s=0.3)


def run(folder: Path, plan: Plan) -> None:
    outcome = Campaign(folder, plan).run()
    outcome.print_table()  # shown when the test fails
    assert outcome.problems == []
    assert outcome.examples == {}
    assert outcome.figures["rebalances"] >= plan.rebalances
    assert outcome.least_work > 0


@needs_nodes
def test_no_partition_has_two_owners(tmp_path: Path) -> None:
    run(tmp_path, Plan(rebalances=8, coordinator_kills=1, hosts=3, seed=1))


@needs_nodes
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_partition_has_two_owners_for_longer(tmp_path: Path) -> None:
    run(tmp_path, Plan(rebalances=300, coordinator_kills=6, seed=2))


def in_log(*events: Owns | Stores) -> dict[str, int]:
    findings = Findings()
    judge.judge_log(events, findings)
    return dict(findings.counts)


def owns(member: str, *partitions: int) -> Owns:
    return Owns(member, frozenset(partitions))


def test_the_log_of_a_handover() -> None:
    assert in_log(owns("a", 0, 1), Stores("a", 1, 5), owns("a", 0), owns("b", 1), Stores("b", 1, 6)) == {}
    assert in_log(owns("a", 0), owns("a"), owns("b", 0), owns("b"), owns("a", 0)) == {}


def test_the_log_shows_two_owners_and_positions_of_the_fenced() -> None:
    assert in_log(owns("a", 0), owns("b", 0)) == {judge.TWO_OWNERS: 1}
    assert in_log(owns("a", 0), owns("a"), owns("b", 0), Stores("a", 0, 5)) == {judge.FENCED_COMMIT: 1}
    assert in_log(owns("a", 0), owns("a"), Stores("a", 0, 5)) == {judge.FENCED_COMMIT: 1}
    assert in_log(owns("a", 0), Stores("a", 0, 5), Stores("a", 0, 4)) == {judge.COMMIT_BACK: 1}


def entry(time_s: float, member: str, event: str, detail: Any) -> Entry:
    return Entry(time_s, ord(member), member, event, detail)  # each member is a process of its own


def told(*entries: Entry, killed_s: dict[str, float] | None = None) -> Told:
    return digest(entries, {ord(member): time_s for member, time_s in (killed_s or {}).items()})


def among_members(said: Told, around: Around = QUIET) -> dict[str, int]:
    findings = Findings()
    judge.judge_members(said, around, findings)
    return dict(findings.counts)


GIVEN_TO_A = entry(1.0, "a", "assigned", [0])
GIVEN_TO_B = entry(5.0, "b", "assigned", [0])
FROZEN_A = Around((Freeze(ord("a"), 1.5, 5.5),), session_s=3.0, heartbeat_s=0.3)


def test_members_that_hand_over_or_die_first() -> None:
    assert among_members(told(GIVEN_TO_A, entry(4.0, "a", "revoked", [0]), GIVEN_TO_B)) == {}
    assert among_members(told(GIVEN_TO_A, GIVEN_TO_B, killed_s={"a": 2.0})) == {}


def test_members_may_overlap_only_where_one_was_fenced() -> None:
    late = entry(6.0, "a", "revoked", [0])
    assert among_members(told(GIVEN_TO_A, GIVEN_TO_B, late)) == {judge.TWO_UNFENCED: 1}
    assert among_members(told(GIVEN_TO_A, GIVEN_TO_B)) == {judge.TWO_UNFENCED: 1}
    assert among_members(told(GIVEN_TO_A, GIVEN_TO_B, entry(6.0, "a", "lost", [0]))) == {}
    assert among_members(told(GIVEN_TO_A, GIVEN_TO_B, late), FROZEN_A) == {}
    too_short = FROZEN_A._replace(freezes=(Freeze(ord("a"), 1.5, 2.5),))
    assert among_members(told(GIVEN_TO_A, GIVEN_TO_B, late), too_short) == {judge.TWO_UNFENCED: 1}


def test_a_fenced_member_that_could_commit_is_noticed() -> None:
    zombie = [
        entry(5.6, "a", "commit", [[0, 9]]),
        entry(5.7, "a", "committed", [[0, 9]]),
        entry(6.0, "a", "lost", [0]),
    ]
    assert among_members(told(GIVEN_TO_A, GIVEN_TO_B, *zombie), FROZEN_A) == {judge.LATE_COMMIT: 1}
    refused = [zombie[0], entry(5.7, "a", "refused", [[[0, 9]], "UNKNOWN_MEMBER_ID"]), zombie[2]]
    assert among_members(told(GIVEN_TO_A, GIVEN_TO_B, *refused), FROZEN_A) == {}


def test_a_position_that_is_not_respected_is_noticed() -> None:
    before = [
        GIVEN_TO_A,
        entry(2.0, "a", "commit", [[0, 9]]),
        entry(2.1, "a", "committed", [[0, 9]]),
        entry(4.0, "a", "revoked", [0]),
        GIVEN_TO_B,
    ]
    assert among_members(told(*before, entry(6.0, "b", "read", [[0, 9]]))) == {}
    assert among_members(told(*before, entry(6.0, "b", "read", [[0, 8]]))) == {judge.READ_AGAIN: 1}


def test_unread_records_are_noticed() -> None:
    findings = Findings()
    said = told(GIVEN_TO_A, entry(2.0, "a", "read", [[0, 0], [0, 2]]))
    judge.judge_completeness(said, {0: 3}, findings)
    assert findings.counts == {judge.NEVER_READ: 1}
