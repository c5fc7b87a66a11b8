"""Nothing acknowledged with acks=all is lost, doubled or moved, whatever happens to the nodes: the short campaign.

`make chaos` runs as many faults as one likes; see `python -m tests.chaos --help`.
"""

from pathlib import Path

import pytest
from tests.brokers import external_bootstrap
from tests.chaos.checks import checker
from tests.chaos.nodes.campaign import Campaign, Plan
from tests.chaos.nodes.upkeep import CERTIFICATES
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
    assert outcome.fired.total() == plan.kills + plan.freezes + plan.cuts + plan.power + plan.outages
    assert outcome.least_work >= plan.work
    assert outcome.figures["least committed between two faults"] > 0


def test_one_node_keeps_its_word(tmp_path: Path) -> None:
    """With TLS, SCRAM and access rules, and while its certificate is replaced."""
    faults = {"kills": 1, "freezes": 1, "cuts": 1, "power": 2, "rolling": 1, "reassign": 0}
    plan = Plan(**faults, nodes=1, work=300, seed=1, secure=True, certificates=1)
    outcome = run(tmp_path, plan)
    judge(outcome, plan)
    assert outcome.figures[CERTIFICATES] == 1


def test_a_node_that_never_syncs_is_found_out(tmp_path: Path) -> None:
    """The instrument itself: where acknowledged is not safe, a power loss must show, or the rest proves nothing."""
    plan = Plan(**{**NOTHING, "power": 4}, nodes=1, work=300, seed=1, settings={"penstock.flush": "never"})
    found = run(tmp_path, plan).anomalies
    assert found.keys() & {checker.LOST, checker.UNSEEN, checker.INCONSISTENT}


def test_a_cluster_keeps_its_word(tmp_path: Path) -> None:
    plan = Plan(kills=2, freezes=1, cuts=2, power=2, rolling=1, reassign=1, seed=1)
    judge(run(tmp_path, plan), plan)


def test_elections_converge_on_a_starved_machine(tmp_path: Path) -> None:
    """All nodes are killed while other processes want the cores: the cluster may be slow, but elects in few epochs."""
    plan = Plan(**{**NOTHING, "outages": 2}, busy=8, work=200, seed=1)
    outcome = run(tmp_path, plan)
    judge(outcome, plan)
    assert outcome.figures["epochs of the quorum meanwhile"] <= 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_secure_cluster_keeps_its_word(tmp_path: Path) -> None:
    plan = Plan(kills=25, freezes=10, cuts=13, power=12, rolling=1, reassign=2, seed=15, secure=True)
    judge(run(tmp_path, plan), plan)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 5))
def test_a_cluster_keeps_its_word_for_longer(tmp_path: Path, seed: int) -> None:
    plan = Plan(kills=20, freezes=10, cuts=10, power=10, rolling=2, reassign=5, seed=seed)
    judge(run(tmp_path, plan), plan)
