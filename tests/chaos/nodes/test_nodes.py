"""Nothing acknowledged with acks=all is lost, doubled or moved, whatever happens to the nodes: the short campaign.

`make chaos` runs as many faults as one likes; see `python -m tests.chaos --help`.
"""

from pathlib import Path

import pytest
from tests.brokers import external_bootstrap
from tests.chaos import checker
from tests.chaos.nodes.campaign import Campaign, Plan
from tests.chaos.outcome import Outcome

pytestmark = pytest.mark.skipif(external_bootstrap() is not None, reason="needs nodes that it may kill")


NOTHING = {"kills": 0, "freezes": 0, "cuts": 0, "power": 0, "rolling": 0, "reassign": 0}


def run(folder: Path, plan: Plan) -> Outcome:
    outcome = Campaign(folder, plan).run()
    outcome.print_table()  # shown when the test fails
    return outcome


def judge(outcome: Outcome, plan: Plan) -> None:
    assert outcome.problems == []
    assert outcome.examples == {}
    assert outcome.fired.total() == plan.kills + plan.freezes + plan.cuts + plan.power
    assert outcome.least_work >= plan.work
    assert outcome.figures["least committed between two faults"] > 0


def test_one_node_keeps_its_word(tmp_path: Path) -> None:
    plan = Plan(nodes=1, kills=1, freezes=1, cuts=1, power=2, rolling=1, reassign=0, work=300, seed=1)
    judge(run(tmp_path, plan), plan)


def test_a_node_that_never_syncs_is_found_out(tmp_path: Path) -> None:
    """The instrument itself: where acknowledged is not safe, a power loss must show, or the rest proves nothing."""
    plan = Plan(**{**NOTHING, "power": 4}, nodes=1, work=300, seed=1, settings={"penstock.flush": "never"})
    found = run(tmp_path, plan).anomalies
    assert found.keys() & {checker.LOST, checker.UNSEEN, checker.INCONSISTENT}


def test_a_cluster_keeps_its_word(tmp_path: Path) -> None:
    plan = Plan(kills=2, freezes=1, cuts=2, power=2, rolling=1, reassign=1, seed=1)
    judge(run(tmp_path, plan), plan)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 5))
def test_a_cluster_keeps_its_word_for_longer(tmp_path: Path, seed: int) -> None:
    plan = Plan(kills=20, freezes=10, cuts=10, power=10, rolling=2, reassign=5, seed=seed)
    judge(run(tmp_path, plan), plan)
