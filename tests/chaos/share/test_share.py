"""Share groups while nodes and workers are killed: the short campaign, and tests of its judge.

`make chaos ARGS="--campaign share"` shares 30,000 messages through 50 kills and many crashes.
"""

from pathlib import Path

import pytest
from tests.brokers import external_bootstrap
from tests.chaos.checks.checker import Findings
from tests.chaos.share import judge
from tests.chaos.share.campaign import Campaign, Plan
from tests.chaos.share.journals import Delivery, RecordPosition
from tests.chaos.share.judge import DeadLetter, Source
from tests.chaos.share.worker import ACCEPTED, GROUP, LIMIT, REJECTED, RELEASED, TOPIC

needs_nodes = pytest.mark.skipif(external_bootstrap() is not None, reason="needs nodes that it may kill")


@needs_nodes
def test_each_record_comes_to_one_end(tmp_path: Path) -> None:
    outcome = Campaign(tmp_path, Plan(messages=300, broker_kills=1, worker_kills=1, workers=2, seed=1)).run()
    outcome.print_table()  # shown when the test fails
    assert outcome.problems == []
    assert outcome.examples == {}
    assert outcome.least_work > 0
    assert any("limit" in name for name in outcome.figures)


POSITION = RecordPosition(1, 10)
NUMBER = 100


def given(fate: str, delivery: int = 1, *, is_stored: bool = True) -> Delivery:
    return Delivery(NUMBER, delivery, fate, float(delivery), delivery + 0.5 if is_stored else None)


def dead_letter(reason: str, delivery: int = 1, **changed: str) -> DeadLetter:
    headers = {
        "__dlq.errors.topic": TOPIC,
        "__dlq.errors.group": GROUP,
        "__dlq.errors.partition": str(POSITION.partition),
        "__dlq.errors.offset": str(POSITION.offset),
        "__dlq.errors.delivery.count": str(delivery),
        "penstock.dlq.reason": reason,
        "penstock.dlq.timestamp": "5",
        "trace": str(NUMBER),
    }
    return DeadLetter(POSITION.partition, b"%d" % NUMBER, b"k", headers | changed)


def found(*story: Delivery | DeadLetter, number: int = NUMBER) -> dict[str, int]:
    findings = Findings()
    deliveries = [each for each in story if isinstance(each, Delivery)]
    dead_letters = [each for each in story if isinstance(each, DeadLetter)]
    judge.judge({POSITION: Source(number, b"k", 5)}, {POSITION: deliveries}, dead_letters, findings)
    return dict(findings.counts)


def test_the_judge_is_content_with_one_end() -> None:
    assert found(given(ACCEPTED)) == {}
    assert found(given(ACCEPTED, is_stored=False), given(ACCEPTED, 2)) == {}
    assert found(given(RELEASED), given(ACCEPTED, 2)) == {}
    assert found(given(REJECTED), dead_letter("rejected")) == {}
    assert found(given(REJECTED, is_stored=False), dead_letter("rejected")) == {}
    assert found(*(given(RELEASED, n) for n in range(1, LIMIT + 1)), dead_letter("limit", LIMIT)) == {}
    assert found(given(ACCEPTED, is_stored=False), dead_letter("lock expired", LIMIT)) == {}


def test_the_judge_notices_what_has_no_end_or_another() -> None:
    assert found() == {judge.LOST: 1}
    assert found(given(RELEASED)) == {judge.LOST: 1}
    assert found(given(REJECTED)) == {judge.NOT_DEAD_LETTERED: 1}
    assert found(given(REJECTED, is_stored=False)) == {judge.NOT_DEAD_LETTERED: 1}
    assert found(given(ACCEPTED), dead_letter("limit", LIMIT)) == {judge.DEAD_LETTERED_WRONGLY: 1}
    assert found(given(RELEASED), dead_letter("rejected")) == {judge.DEAD_LETTERED_WRONGLY: 1}
    assert found(given(RELEASED), dead_letter("limit", LIMIT - 1)) == {judge.DEAD_LETTERED_WRONGLY: 1}
    assert found(given(REJECTED), dead_letter("rejected"), dead_letter("rejected")) == {
        judge.DEAD_LETTERED_TWICE: 1
    }


def test_the_judge_notices_what_comes_again_or_too_often() -> None:
    assert found(given(ACCEPTED), given(ACCEPTED, 2)) == {judge.DELIVERED_AFTER_END: 1}
    assert found(given(ACCEPTED, LIMIT + 1)) == {judge.OVER_LIMIT: 1}
    assert found(given(ACCEPTED)._replace(number=7)) == {judge.WRONG_RECORD: 1}


def test_the_judge_notices_dead_letters_that_do_not_fit() -> None:
    rejected = given(REJECTED)
    assert found(rejected, dead_letter("rejected", trace="7")) == {judge.WRONG_DEAD_LETTER: 1}
    assert found(rejected, dead_letter("rejected")._replace(value=b"7")) == {judge.WRONG_DEAD_LETTER: 1}
    assert found(rejected, dead_letter("rejected")._replace(partition=0)) == {judge.WRONG_DEAD_LETTER: 1}
    assert found(given(ACCEPTED), dead_letter("rejected", **{"__dlq.errors.offset": "11"})) == {
        judge.WRONG_DEAD_LETTER: 1
    }
