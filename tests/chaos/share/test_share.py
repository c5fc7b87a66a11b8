"""Share groups, whatever dies: the short campaign, and whether its judge would notice.

`make chaos ARGS="--campaign share"` shares 30,000 messages through 50 kills and many crashes.
"""

from pathlib import Path

import pytest
from tests.brokers import external_bootstrap
from tests.chaos.checker import Findings
from tests.chaos.share import judge
from tests.chaos.share.campaign import Campaign, Plan
from tests.chaos.share.journals import Delivery, Place
from tests.chaos.share.judge import Letter, Source
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


PLACE = Place(1, 10)
NUMBER = 100


def given(fate: str, delivery: int = 1, *, is_stored: bool = True) -> Delivery:
    return Delivery(NUMBER, delivery, fate, float(delivery), delivery + 0.5 if is_stored else None)


def buried(reason: str, delivery: int = 1, **changed: str) -> Letter:
    headers = {
        "__dlq.errors.topic": TOPIC,
        "__dlq.errors.group": GROUP,
        "__dlq.errors.partition": str(PLACE.partition),
        "__dlq.errors.offset": str(PLACE.offset),
        "__dlq.errors.delivery.count": str(delivery),
        "penstock.dlq.reason": reason,
        "penstock.dlq.timestamp": "5",
        "trace": str(NUMBER),
    }
    return Letter(PLACE.partition, b"%d" % NUMBER, b"k", headers | changed)


def found(*story: Delivery | Letter, number: int = NUMBER) -> dict[str, int]:
    findings = Findings()
    deliveries = [each for each in story if isinstance(each, Delivery)]
    letters = [each for each in story if isinstance(each, Letter)]
    judge.judge({PLACE: Source(number, b"k", 5)}, {PLACE: deliveries}, letters, findings)
    return dict(findings.counts)


def test_the_judge_is_content_with_one_end() -> None:
    assert found(given(ACCEPTED)) == {}
    assert found(given(ACCEPTED, is_stored=False), given(ACCEPTED, 2)) == {}
    assert found(given(RELEASED), given(ACCEPTED, 2)) == {}
    assert found(given(REJECTED), buried("rejected")) == {}
    assert found(given(REJECTED, is_stored=False), buried("rejected")) == {}
    assert found(*(given(RELEASED, n) for n in range(1, LIMIT + 1)), buried("limit", LIMIT)) == {}
    assert found(given(ACCEPTED, is_stored=False), buried("lock expired", LIMIT)) == {}


def test_the_judge_notices_what_has_no_end_or_another() -> None:
    assert found() == {judge.LOST: 1}
    assert found(given(RELEASED)) == {judge.LOST: 1}
    assert found(given(REJECTED)) == {judge.UNBURIED: 1}
    assert found(given(REJECTED, is_stored=False)) == {judge.UNBURIED: 1}
    assert found(given(ACCEPTED), buried("limit", LIMIT)) == {judge.BURIED_WRONGLY: 1}
    assert found(given(RELEASED), buried("rejected")) == {judge.BURIED_WRONGLY: 1}
    assert found(given(RELEASED), buried("limit", LIMIT - 1)) == {judge.BURIED_WRONGLY: 1}
    assert found(given(REJECTED), buried("rejected"), buried("rejected")) == {judge.BURIED_TWICE: 1}


def test_the_judge_notices_what_comes_again_or_too_often() -> None:
    assert found(given(ACCEPTED), given(ACCEPTED, 2)) == {judge.AGAIN: 1}
    assert found(given(ACCEPTED, LIMIT + 1)) == {judge.OVER_LIMIT: 1}
    assert found(given(ACCEPTED)._replace(number=7)) == {judge.CHANGED: 1}


def test_the_judge_notices_dead_letters_that_do_not_fit() -> None:
    rejected = given(REJECTED)
    assert found(rejected, buried("rejected", trace="7")) == {judge.LETTER: 1}
    assert found(rejected, buried("rejected")._replace(value=b"7")) == {judge.LETTER: 1}
    assert found(rejected, buried("rejected")._replace(partition=0)) == {judge.LETTER: 1}
    assert found(given(ACCEPTED), buried("rejected", **{"__dlq.errors.offset": "11"})) == {judge.LETTER: 1}
