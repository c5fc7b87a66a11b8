"""Replays that are killed and run again: each letter is in the target once. The campaign does it for longer."""

from collections.abc import Iterator

import pytest
from tests.application.dlq.campaign import Broken, Campaign
from tests.application.dlq.dead_letters import Office
from tests.application.dlq.killed import MUTATIONS, Executioner


@pytest.fixture(scope="module")
def executioner() -> Iterator[Executioner]:
    with Executioner() as made:
        yield made


def test_each_letter_once_wherever_the_tool_is_killed(office: Office, executioner: Executioner) -> None:
    tally = Campaign(office, executioner, seed=7).run(kills=8)
    assert tally["killed"] >= 8
    assert tally["two at a time"] >= 2
    assert len([name for name in tally if name.startswith("killed: ")]) >= 3


@pytest.mark.parametrize("mutation", [name for name in MUTATIONS if name])
def test_the_judge_knows_a_tool_that_keeps_its_list_wrongly(
    office: Office, executioner: Executioner, mutation: str
) -> None:
    """Killed after a transaction: what it published is on the list only if both were one."""
    with pytest.raises(Broken):
        Campaign(office, executioner, seed=7, mutation=mutation).run_scripted(["after the end:1"])


def test_the_same_kill_harms_no_tool_that_keeps_it_right(office: Office, executioner: Executioner) -> None:
    Campaign(office, executioner, seed=7).run_scripted(["after the end:1"])
