"""Nothing acknowledged with acks=all is lost, doubled or moved, whatever happens to the nodes: the short campaign.

`make chaos` runs as many faults as one likes; see `python -m tests.chaos --help`.
"""

import json
from pathlib import Path

import pytest
from tests.brokers import external_bootstrap
from tests.chaos import checker, report
from tests.chaos.campaign import Campaign, Plan, Result

pytestmark = pytest.mark.skipif(external_bootstrap() is not None, reason="needs nodes that it may kill")


def run(folder: Path, plan: Plan) -> Result:
    result = Campaign(folder, plan).run()
    report.print_table(result)  # shown when the test fails
    (folder / "result.json").write_text(json.dumps(report.as_document(result)))
    return result


def judge(result: Result, plan: Plan) -> None:
    assert result.problems == []
    assert result.verdict.examples == {}
    assert result.fired.total() == plan.kills + plan.freezes + plan.cuts + plan.powers
    assert result.least_work["acknowledged"] >= plan.work
    assert result.least_work["delivered"] >= plan.work
    assert result.least_work["committed"] > 0


def test_one_node_keeps_its_word(tmp_path: Path) -> None:
    plan = Plan(nodes=1, kills=1, freezes=1, cuts=1, powers=2, rolling=1, work=300, seed=1)
    judge(run(tmp_path, plan), plan)


def test_a_node_that_never_syncs_is_found_out(tmp_path: Path) -> None:
    """The instrument itself: where acknowledged is not safe, a power loss must show, or the rest proves nothing."""
    plan = Plan(nodes=1, powers=4, work=300, seed=1, settings={"penstock.flush": "never"})
    found = run(tmp_path, plan).verdict.anomalies
    assert found.keys() & {checker.LOST, checker.UNSEEN, checker.INCONSISTENT}


def test_a_cluster_keeps_its_word(tmp_path: Path) -> None:
    plan = Plan(kills=2, freezes=1, cuts=2, powers=2, rolling=1, reassign=1, seed=1)
    judge(run(tmp_path, plan), plan)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 5))
def test_a_cluster_keeps_its_word_for_longer(tmp_path: Path, seed: int) -> None:
    plan = Plan(kills=20, freezes=10, cuts=10, powers=10, rolling=2, reassign=5, seed=seed)
    judge(run(tmp_path, plan), plan)
