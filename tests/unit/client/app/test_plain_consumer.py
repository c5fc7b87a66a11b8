"""Plain calls: offsets are committed only up to the first message without an acknowledgement."""

from tests.unit.client.app.raw_message import RawMessage

from penstock.client.app.plain_consumer import UnacknowledgedMessages


def test_what_is_read_again_is_another_message() -> None:
    hand, old, new = UnacknowledgedMessages(), RawMessage(1), RawMessage(1)
    hand.add([old])
    hand.forget([("orders", 0)])
    hand.add([new])
    assert (hand.has(old), hand.has(new)) == (False, True)


def test_what_rests_is_not_done_by_a_commit_and_comes_in_the_order_of_its_time() -> None:
    hand, raws = UnacknowledgedMessages(), [RawMessage(offset) for offset in range(4)]
    hand.add(raws)
    hand.delay(raws[2], 20.0)
    hand.delay(raws[1], 10.0)
    assert hand.done_all() == 0
    assert hand.unacknowledged() == [raws[1], raws[2]]
    assert hand.wait_s(4.0, 60.0) == 6.0
    assert hand.take_due(15.0, 10) == [raws[1]]
    assert hand.take_due(25.0, 10) == [raws[2]]
    assert hand.earlier(raws[1]) == 1
    hand.done(raws[1])
    assert hand.unacknowledged() == [raws[2]]


def test_giving_back_untried_does_not_count() -> None:
    hand, raw = UnacknowledgedMessages(), RawMessage(0)
    hand.add([raw])
    hand.delay(raw, 0.0, counts=False)
    assert hand.take_due(0.0, 1) == [raw]
    assert hand.earlier(raw) == 0


def test_what_went_to_another_member_is_told_once() -> None:
    hand, others = UnacknowledgedMessages(), RawMessage(9, topic="payments")
    hand.add([RawMessage(0), RawMessage(1), others])
    hand.delay(others, 5.0)
    assert hand.lose([("orders", 0)]) == 2
    assert hand.unacknowledged() == [others]
    assert (hand.done_all(), hand.done_all()) == (2, 0)
    assert hand.lose([("payments", 0)]) == 1
    assert hand.take_due(10.0, 1) == []
