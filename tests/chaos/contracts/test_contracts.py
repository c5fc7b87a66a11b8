"""Delivery contracts of applications, whatever dies: a short campaign, contracts broken on purpose, and the judge.

`make chaos ARGS="--campaign contracts --delivery at-least-once --points 2000"` has thousands of points.
"""

from pathlib import Path

import pytest
from tests.brokers import external_bootstrap
from tests.chaos.checks.checker import Findings
from tests.chaos.contracts import journal as diary
from tests.chaos.contracts import judge
from tests.chaos.contracts.campaign import BROKER, Campaign, Plan
from tests.chaos.contracts.jobs import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    CLAIMED,
    CONTRACTS,
    EFFECTIVELY_ONCE,
    EXACTLY_ONCE,
    FREEZE,
    INLINE,
    KILL,
    LEDGERED,
    ORDERED,
    id_of,
)
from tests.chaos.contracts.journal import Line
from tests.chaos.contracts.judge import Case
from tests.chaos.contracts.mutations import MUTATIONS
from tests.chaos.contracts.story import Story

needs_nodes = pytest.mark.skipif(external_bootstrap() is not None, reason="needs nodes that it may kill")


@needs_nodes
def test_every_contract_keeps_what_it_promises(tmp_path: Path) -> None:
    plan = Plan(points=12, lanes=3, broker_kills=1, calm_rounds=1, seed=1)
    outcome = Campaign(tmp_path, plan).run()
    outcome.print_table()  # shown when the test fails
    assert outcome.problems == []
    assert outcome.examples == {}
    assert outcome.fired[BROKER] == 1
    assert outcome.least_work > 0
    for contract in CONTRACTS:
        assert outcome.fired[f"{contract}: {KILL}"] + outcome.fired[f"{contract}: {FREEZE}"] >= plan.points
        assert outcome.figures[f"{contract}: handled"] > plan.points


@needs_nodes
def test_contracts_that_are_broken_on_purpose_are_noticed(tmp_path: Path) -> None:
    outcome = Campaign(tmp_path, Plan(mutations=tuple(MUTATIONS), controls=False, seed=1)).run()
    outcome.print_table()
    assert outcome.problems == []
    assert outcome.examples == {}


# The judge, on stories of a few lines

TOPIC = "orders"
STARTED = (diary.STARTED, 1, None, None)
KILLED: tuple[str, ...] = ()
LEFT = (diary.LEFT, {})


def taken(*numbers: int) -> tuple[str, list[list[object]]]:
    return diary.TAKEN, [[TOPIC, number % 2, number // 2, number] for number in numbers]


def handled(*numbers: int) -> list[tuple[object, ...]]:
    return [line for number in numbers for line in ((diary.ENTERED, number, 1), (diary.DONE, number))]


def story(*lines: tuple[object, ...]) -> Story:
    told = Story()
    for at_s, (event, *rest) in enumerate(line for line in lines if line):
        told.add("a", [Line(str(event), float(at_s), tuple(rest))])
    return told


def found(
    contract: str, sent: int, *lines: tuple[object, ...], shape: str = INLINE, **more: object
) -> dict[str, int]:
    findings = Findings()
    case = Case(
        contract=contract,
        shape=shape,
        fails=bool(more.pop("fails", False)),
        topic=TOPIC,
        sent=sent,
        story=story(*lines),
        **more,  # type: ignore[arg-type]
    )
    judge.judge(case, findings)
    return dict(findings.counts)


def test_at_most_once_may_lose_what_was_in_hand_and_nothing_else() -> None:
    counted = (diary.UNFINISHED, TOPIC, 1, 0, 1)
    lives = (STARTED, taken(0, 1), *handled(0), KILLED, STARTED, counted, taken(2), *handled(2), LEFT)
    assert found(AT_MOST_ONCE, 3, *lives) == {}
    assert found(AT_MOST_ONCE, 4, *lives) == {judge.LOST: 1}
    early = (STARTED, taken(0), taken(1), *handled(1), KILLED)
    assert found(AT_MOST_ONCE, 2, *early) == {judge.LOST: 1}
    assert found(AT_MOST_ONCE, 1, STARTED, taken(0), LEFT) == {judge.LOST: 1}
    assert found(AT_MOST_ONCE, 1, STARTED, taken(0), (diary.DROPPED, [0]), LEFT) == {}


def test_at_most_once_what_may_be_lost_is_counted() -> None:
    killed = (STARTED, taken(0, 1), *handled(0), KILLED)
    assert found(AT_MOST_ONCE, 2, *killed, STARTED, LEFT) == {judge.UNCOUNTED: 1}
    assert found(AT_MOST_ONCE, 2, *killed, STARTED, (diary.UNFINISHED, TOPIC, 0, 0, 1), LEFT) == {
        judge.UNCOUNTED: 1
    }
    assert found(AT_MOST_ONCE, 2, *killed, STARTED, (diary.UNFINISHED, TOPIC, 1, 0, 1), LEFT) == {}


def test_at_most_once_nothing_may_begin_twice() -> None:
    begun = (STARTED, taken(0), (diary.ENTERED, 0, 1), KILLED, STARTED, taken(0), *handled(0), LEFT)
    assert found(AT_MOST_ONCE, 1, *begun) == {judge.DOUBLED: 1}


def test_at_least_once_may_repeat_what_was_not_known_to_be_committed() -> None:
    first = (STARTED, taken(0, 2), *handled(0, 2), (diary.COMMITTED, [[TOPIC, 0, 1]]), KILLED)
    again = (STARTED, (diary.BEGUN, 50.0, [[TOPIC, 0, 1]]), taken(2), *handled(2), LEFT)
    back = (STARTED, (diary.BEGUN, 50.0, [[TOPIC, 0, 0]]), taken(0, 2), *handled(0, 2), LEFT)
    only = (*first, *again)
    assert found(AT_LEAST_ONCE, 1, *only) == {}
    assert found(AT_LEAST_ONCE, 1, *first, *back) == {judge.BACK: 1}
    assert found(AT_LEAST_ONCE, 2, *only) == {judge.LOST: 1}


def test_effectively_once_handles_nothing_that_is_known_to_be_marked() -> None:
    first = (STARTED, taken(0), *handled(0))
    again = (STARTED, taken(0), *handled(0), LEFT)
    assert found(EFFECTIVELY_ONCE, 1, *first, *again) == {}
    assert found(EFFECTIVELY_ONCE, 1, *first, (diary.MARKED, [id_of(0, TOPIC)]), *again) == {judge.AGAIN: 1}


@pytest.mark.parametrize("contract", [CLAIMED, LEDGERED, EXACTLY_ONCE])
def test_results_count_and_not_what_handlers_did(contract: str) -> None:
    lives = (STARTED, taken(0), *handled(0), KILLED, STARTED, taken(0), *handled(0), LEFT)
    results = "published" if contract == EXACTLY_ONCE else "rows"
    assert found(contract, 1, *lives, **{results: {0: 1}}) == {}
    assert found(contract, 1, *lives, **{results: {}}) == {judge.LOST: 1}
    assert found(contract, 1, *lives, **{results: {0: 2}}) == {judge.DOUBLED: 1}


def test_dead_letters_are_of_what_failed() -> None:
    dead = {"fails": True, "letters": {11: 1}, "published": dict.fromkeys(range(11), 1)}
    assert found(EXACTLY_ONCE, 12, **dead) == {}
    assert found(EXACTLY_ONCE, 12, **{**dead, "letters": {}}) == {judge.LOST: 1}
    assert found(EXACTLY_ONCE, 12, **{**dead, "letters": {11: 2}}) == {judge.DOUBLED: 1}
    assert found(EXACTLY_ONCE, 12, **{**dead, "letters": {10: 1, 11: 1}}) == {judge.WRONG_LETTER: 1}


def test_nothing_is_lost_or_doubled_in_the_calm() -> None:
    twice = (STARTED, taken(0), *handled(0), LEFT, STARTED, taken(0), *handled(0), LEFT)
    assert found(AT_LEAST_ONCE, 1, *twice) == {}
    assert found(AT_LEAST_ONCE, 1, *twice, calm=(0,)) == {judge.IN_CALM: 1}


def test_keys_are_handled_in_their_order() -> None:
    assert found(AT_LEAST_ONCE, 0, STARTED, taken(0, 16), *handled(0, 16, 0), LEFT, shape=ORDERED) == {}
    wrong = found(AT_LEAST_ONCE, 0, STARTED, taken(0, 16), *handled(16, 0), LEFT, shape=ORDERED)
    assert wrong == {judge.DISORDER: 1}
