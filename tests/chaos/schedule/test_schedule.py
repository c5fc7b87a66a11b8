"""Scheduled delivery, whatever dies: the short campaign, and whether its judge would notice.

`make chaos ARGS="--campaign schedule"` kills 25 nodes.
"""

from pathlib import Path

import pytest
from tests.brokers import external_bootstrap
from tests.chaos.checks.checker import Findings
from tests.chaos.schedule import judge
from tests.chaos.schedule.campaign import Campaign, Plan
from tests.chaos.schedule.judge import Got, Ledger, Sent

needs_nodes = pytest.mark.skipif(external_bootstrap() is not None, reason="needs nodes that it may kill")


@needs_nodes
def test_nothing_is_early_doubled_or_lost(tmp_path: Path) -> None:
    outcome = Campaign(tmp_path, Plan(kills=1, work=60, delay_ms_max=800, seed=1)).run()
    outcome.print_table()  # shown when the test fails
    assert outcome.problems == []
    assert outcome.examples == {}
    assert outcome.least_work >= 60


def found(ledger: Ledger) -> dict[str, int]:
    findings = Findings()
    judge.judge(ledger, ["g"], findings)
    return dict(findings.counts)


def ledger_of(*rows: Got) -> Ledger:
    """Messages 0 and 1 were sent to partition 0, due at 1000 and 2000."""
    ledger = Ledger(sent={0: Sent(0, 1000), 1: Sent(0, 2000)}, acknowledged={0: None, 1: None})
    ledger.give("g", list(rows))
    return ledger


FIRST = Got(number=0, partition=0, offset=10, stamp_ms=1000, at_ms=1001)
SECOND = Got(number=1, partition=0, offset=11, stamp_ms=2001, at_ms=2002)


def test_the_judge_is_content_with_each_message_in_one_place() -> None:
    assert found(ledger_of(FIRST, SECOND)) == {}
    assert found(ledger_of(FIRST, SECOND, SECOND)) == {}, "a group may read a place again"


def test_the_judge_notices_what_is_early_doubled_lost_or_made_up() -> None:
    assert found(ledger_of(FIRST)) == {judge.LOST: 1}
    assert found(ledger_of()) == {judge.LOST: 2}
    assert found(ledger_of(FIRST, SECOND, SECOND._replace(offset=12))) == {judge.TWICE: 1}
    assert found(ledger_of(FIRST._replace(at_ms=999), SECOND)) == {judge.EARLY: 1}
    assert found(ledger_of(FIRST._replace(stamp_ms=999), SECOND)) == {judge.STAMPED_EARLY: 1}
    assert found(ledger_of(FIRST, SECOND, FIRST._replace(number=2))) == {judge.UNEXPECTED: 1}
    assert found(ledger_of(FIRST, SECOND, FIRST._replace(partition=1))) == {judge.UNEXPECTED: 1}
