"""The judge itself: every anomaly in a small history made by hand is found, and nothing else is."""

from typing import Any

import pytest
from tests.chaos.checks import checker
from tests.chaos.checks.history import UNKNOWN, History, Op, parse, read


def send(*rows: list[int], by: str = "p1", topic: str = "t") -> list[Op]:
    """Sends of [partition, offset, value] that were acknowledged."""
    began = [[partition, value] for partition, _, value in rows]
    return [Op(by, "invoke", "send", topic, began), Op(by, "ok", "send", topic, list(rows))]


def unsure(*rows: list[int], by: str = "p1", outcome: Any = "info") -> list[Op]:
    return [Op(by, "invoke", "send", "t", list(rows)), Op(by, outcome, "send", "t", list(rows))]


def poll(*rows: list[int], by: str = "c1", topic: str = "t") -> list[Op]:
    return [Op(by, "ok", "poll", topic, list(rows))]


def seek(*rows: list[int], by: str = "c1", topic: str = "t") -> list[Op]:
    return [Op(by, "ok", "seek", topic, list(rows))]


def commit(*rows: list[int], by: str = "m1") -> list[Op]:
    return [Op(by, "invoke", "commit", "t", list(rows)), Op(by, "ok", "commit", "t", list(rows))]


def committed(*rows: list[int], by: str = "m1") -> list[Op]:
    return [Op(by, "invoke", "committed", "t", []), Op(by, "ok", "committed", "t", list(rows))]


GOOD: dict[str, list[Op]] = {
    "nothing at all": [],
    "two partitions, two producers": [
        *seek([0, 0], [1, 0]),
        *send([0, 0, 1], [1, 0, 2]),
        *send([0, 1, 11], by="p2"),
        *poll([0, 0, 1], [0, 1, 11], [1, 0, 2]),
    ],
    "an unsure send that is there": [*unsure([0, 1]), *seek([0, 0]), *poll([0, 0, 1])],
    "an unsure send that is not there": [*unsure([0, 1]), *send([0, 0, 2]), *seek([0, 0]), *poll([0, 0, 2])],
    "a failed send that is not there": [*unsure([0, 1], outcome="fail"), *send([0, 0, 2]), *poll([0, 0, 2])],
    "an offset that nothing was ever written at": [
        *send([0, 0, 1], [0, 2, 2]),
        *seek([0, 0]),
        *poll([0, 0, 1], [0, 2, 2]),
    ],
    "a reader that goes back by its own will": [
        *send([0, 0, 1], [0, 1, 2]),
        *seek([0, 0]),
        *poll([0, 0, 1], [0, 1, 2]),
        *seek([0, 0]),
        *poll([0, 0, 1], [0, 1, 2]),
    ],
    "a reader that does not know where it begins": [
        *send([0, 0, 1], [0, 1, 2]),
        *seek([0, 0], by="c2"),
        *poll([0, 0, 1], [0, 1, 2], by="c2"),
        *seek([0, -1]),
        *poll([0, 1, 2]),
    ],
    "read to the end": [
        *send([0, 0, 1], [0, 1, 2]),
        *seek([0, 0], by="final-0"),
        *poll([0, 0, 1], [0, 1, 2], by="final-0"),
    ],
    "delivered before it was acknowledged": [
        Op("p1", "invoke", "send", "t", [[0, 1]]),
        *poll([0, 0, 1]),
        Op("p1", "ok", "send", "t", [[0, 0, 1]]),
    ],
    "acknowledged without an offset": [*send([0, UNKNOWN, 1]), *seek([0, 0]), *poll([0, 0, 1])],
    "commits that grow": [*commit([0, 5]), *committed([0, 5]), *commit([0, 9]), *committed([0, 9], by="m2")],
    "a commit that overtakes the question": [
        Op("m2", "invoke", "committed", "t", []),
        *commit([0, 5]),
        Op("m2", "ok", "committed", "t", [[0, -1]]),
    ],
    "a commit of unknown outcome": [
        *commit([0, 5]),
        Op("m1", "invoke", "commit", "t", [[0, 9]]),
        Op("m1", "info", "commit", "t", [[0, 9]]),
        *committed([0, 5]),
    ],
    "a commit of unknown outcome that comes late": [
        Op("m1", "invoke", "commit", "t", [[0, 5]]),
        Op("m1", "info", "commit", "t", [[0, 5]]),
        *commit([0, 9]),
        *committed([0, 5]),
    ],
}

BAD: dict[str, tuple[str, list[Op]]] = {
    "an acknowledged value is missing between others": (
        checker.LOST,
        [*send([0, 0, 1], [0, 1, 2], [0, 2, 3]), *poll([0, 0, 1], [0, 2, 3])],
    ),
    "a delivered value is gone at the end": (
        checker.LOST,
        [
            *unsure([0, 1], [0, 2]),
            *poll([0, 0, 1], [0, 1, 2]),
            *seek([0, 0], by="final-0"),
            *poll([0, 0, 1], by="final-0"),
        ],
    ),
    "all is gone at the end": (
        checker.LOST,
        [*send([0, 0, 1]), *poll([0, 0, 1]), *seek([0, 0], by="final-0")],
    ),
    "a value that was acknowledged without an offset is nowhere": (
        checker.LOST,
        [*send([0, 0, 1], [0, UNKNOWN, 2]), *poll([0, 0, 1])],
    ),
    "an acknowledged value at the end is never delivered": (
        checker.UNSEEN,
        [*send([0, 0, 1], [0, 1, 2]), *poll([0, 0, 1])],
    ),
    "a value is delivered at two offsets": (
        checker.DUPLICATE,
        [*send([0, 0, 1]), *poll([0, 0, 1], [0, 1, 1])],
    ),
    "a value is delivered elsewhere than acknowledged": (
        checker.DUPLICATE,
        [*send([0, 0, 1]), *poll([0, 1, 1])],
    ),
    "two readers disagree about an offset": (
        checker.INCONSISTENT,
        [*unsure([0, 1], [0, 2]), *poll([0, 0, 1]), *poll([0, 0, 2], by="c2")],
    ),
    "producer and reader disagree about an offset": (
        checker.INCONSISTENT,
        [*send([0, 0, 1]), *unsure([0, 2], by="p2"), *poll([0, 0, 2], [0, 1, 1])],
    ),
    "two acknowledgements name one offset": (
        checker.INCONSISTENT,
        [*send([0, 0, 1]), *send([0, 0, 2], by="p2"), *poll([0, 0, 1])],
    ),
    "a reader goes back within a poll": (
        checker.POLL_BACK,
        [*send([0, 0, 1], [0, 1, 2]), *seek([0, 0]), *poll([0, 0, 1], [0, 1, 2], [0, 0, 1])],
    ),
    "a reader goes back between polls": (
        checker.POLL_BACK,
        [*send([0, 0, 1], [0, 1, 2]), *seek([0, 0]), *poll([0, 0, 1], [0, 1, 2]), *poll([0, 1, 2])],
    ),
    "a reader is led past a value that others get": (
        checker.POLL_SKIP,
        [
            *send([0, 0, 1], [0, 1, 2], [0, 2, 3]),
            *seek([0, 0], [0, 0], by="c2"),
            *poll([0, 0, 1], [0, 1, 2], [0, 2, 3], by="c2"),
            *seek([0, 0]),
            *poll([0, 0, 1], [0, 2, 3]),
        ],
    ),
    "a reader is led past the first value": (
        checker.POLL_SKIP,
        [*send([0, 0, 1], [0, 1, 2]), *poll([0, 0, 1], by="c2"), *seek([0, 0]), *poll([0, 1, 2])],
    ),
    "a producer's values change places": (
        checker.SEND_ORDER,
        [*send([0, 1, 1], [0, 0, 2]), *poll([0, 0, 2], [0, 1, 1])],
    ),
    "an earlier send is never answered": (
        checker.SEND_SKIP,
        [
            Op("p1", "invoke", "send", "t", [[0, 1], [0, 2]]),
            Op("p1", "ok", "send", "t", [[0, 0, 2]]),
            *poll([0, 0, 2]),
        ],
    ),
    "a value that was never sent": (checker.UNEXPECTED, poll([0, 0, 1])),
    "a value in another partition": (checker.UNEXPECTED, [*unsure([1, 1]), *poll([0, 0, 1])]),
    "a value whose send certainly failed": (
        checker.UNEXPECTED,
        [*unsure([0, 1], outcome="fail"), *poll([0, 0, 1])],
    ),
    "a group is told an older offset": (checker.COMMIT_BACK, [*commit([0, 5]), *committed([0, 4], by="m2")]),
    "a group is told that it has none": (
        checker.COMMIT_BACK,
        [*commit([0, 5]), *committed([0, -1], by="m2")],
    ),
    "a late commit of an old member counts": (
        checker.COMMIT_BACK,
        [*commit([0, 9]), *commit([0, 5], by="m2"), *committed([0, 5])],
    ),
}


@pytest.mark.parametrize("history", GOOD.values(), ids=GOOD)
def test_good_histories_pass(history: list[Op]) -> None:
    assert checker.check(history).examples == {}


@pytest.mark.parametrize(("kind", "history"), BAD.values(), ids=BAD)
def test_bad_histories_are_found(kind: str, history: list[Op]) -> None:
    assert set(checker.check(history).anomalies) == {kind}


def test_every_anomaly_has_a_history() -> None:
    assert {kind for kind, _ in BAD.values()} == set(checker.ANOMALIES)


class TestAcksOne:
    """What acks=1 may cost is counted; what consumers are shown is judged as anywhere."""

    def test_losses_and_repeats_are_counted(self) -> None:
        history = [*send([0, 0, 1], [0, 1, 2], [0, 2, 3]), *poll([0, 0, 1], [0, 1, 3], [0, 2, 3])]
        verdict = checker.check(history, weak_topics=["t"])
        assert verdict.is_clean
        assert verdict.reported == {"acks=1 acknowledged": 3, "acks=1 lost": 1, "acks=1 duplicated": 1}

    def test_a_lost_offset_may_be_given_again(self) -> None:
        history = [*send([0, 0, 1]), *send([0, 0, 2]), *poll([0, 0, 2])]
        verdict = checker.check(history, weak_topics=["t"])
        assert verdict.is_clean
        assert verdict.reported["acks=1 lost"] == 1

    def test_readers_may_not_disagree(self) -> None:
        history = [*unsure([0, 1], [0, 2]), *poll([0, 0, 1]), *poll([0, 0, 2], by="c2")]
        assert set(checker.check(history, weak_topics=["t"]).anomalies) == {checker.INCONSISTENT}

    def test_what_was_delivered_stays(self) -> None:
        history = [*unsure([0, 1]), *poll([0, 0, 1]), *seek([0, 0], by="final-0")]
        assert set(checker.check(history, weak_topics=["t"]).anomalies) == {checker.LOST}


def test_operations_are_counted() -> None:
    history = [*send([0, 0, 1], [0, 1, 2]), *unsure([0, 3]), *poll([0, 0, 1], [0, 1, 2]), *commit([0, 2])]
    expected = {"sends ok": 2, "sends info": 1, "sends of unknown outcome": 1, "deliveries": 2}
    assert checker.check(history).operations == {**expected, "commits invoke": 1, "commits ok": 1}


def test_a_history_is_read_as_it_was_written(tmp_path: Any) -> None:
    history = History(tmp_path / "history.jsonl")
    history.add("p1", "invoke", "send", "t", [[0, 1]])
    history.add("p1", "ok", "send", "t", [[0, 7, 1]])
    history.close()
    first, second = read(history.path)
    assert first[:5] == ("p1", "invoke", "send", "t", [[0, 1]])
    assert second[:5] == ("p1", "ok", "send", "t", [[0, 7, 1]])
    assert second.time_s >= first.time_s
    assert list(parse(history.path.read_text().splitlines())) == [first, second]
