"""Exactly once, whatever dies: the short campaign, and whether its judge would notice.

`make chaos ARGS="--campaign copier"` copies 100,000 messages through 50 kills.
"""

from collections import Counter
from pathlib import Path

import pytest
from tests.brokers import external_bootstrap
from tests.chaos.checks.checker import Findings
from tests.chaos.copier import judge
from tests.chaos.copier.campaign import BROKER, CLIENT, Campaign, Plan
from tests.chaos.copier.judge import Row
from tests.chaos.copier.worker import KEYS

needs_nodes = pytest.mark.skipif(external_bootstrap() is not None, reason="needs nodes that it may kill")


def assert_clean(folder: Path, plan: Plan) -> None:
    outcome = Campaign(folder, plan).run()
    outcome.print_table()  # shown when the test fails
    assert outcome.problems == []
    assert outcome.examples == {}
    assert outcome.fired == Counter({BROKER: plan.broker_kills, CLIENT: plan.client_kills})
    assert outcome.figures["messages"] == plan.messages
    assert outcome.least_work > 0


@needs_nodes
def test_every_message_is_copied_once(tmp_path: Path) -> None:
    plan = Plan(messages=1200, broker_kills=1, client_kills=1, copiers=2, seed=1)
    assert_clean(tmp_path, plan)


@needs_nodes
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("library", "protocol"),
    [("confluent", "classic"), ("confluent", "consumer"), ("kafka-python", "classic")],
)
def test_every_message_is_copied_once_for_longer(tmp_path: Path, library: str, protocol: str) -> None:
    plan = Plan(messages=20_000, broker_kills=10, client_kills=10, library=library, protocol=protocol, seed=2)
    assert_clean(tmp_path, plan)


def found(rows: list[Row], total: int) -> dict[str, int]:
    findings = Findings()
    judge.judge(rows, total, findings)
    return dict(findings.counts)


def copied(*values: int) -> list[Row]:
    return [Row(0, offset, value) for offset, value in enumerate(values)]


def test_the_judge_is_content_with_each_message_once() -> None:
    assert found(copied(*range(200)), 200) == {}
    assert found(copied(1, 0, 2), 3) == {}, "messages of different keys have no order"


def test_the_judge_notices_what_is_lost_doubled_swapped_or_made_up() -> None:
    assert found(copied(0, 2), 3) == {judge.LOST: 1}
    assert found(copied(0, 1, 2, 1), 3) == {judge.DOUBLED: 1}
    assert found(copied(0, 1, -1), 2) == {judge.UNEXPECTED: 1}
    in_order = list(range(KEYS + 1))
    assert found(copied(KEYS, *in_order[:-1]), KEYS + 1) == {judge.ORDER: 1}


def test_the_judge_notices_readers_that_disagree() -> None:
    findings = Findings()
    judge.compare(copied(1, 2, 3), copied(1, 2), findings)
    assert findings.counts == {}
    judge.compare(copied(1, 2, 3), copied(1, 3), findings)
    assert findings.counts == {judge.INCONSISTENT: 1}
