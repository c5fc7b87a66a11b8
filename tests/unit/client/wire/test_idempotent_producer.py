"""An idempotent producer with every kind of failure: each batch once and in order."""

from typing import Any, cast

import pytest
from tests.unit.client.wire.producer_world import FakeConnection, World

from penstock.client.errors import Fenced, Refused, Unavailable
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.in_flight import IN_FLIGHT_MAX, InFlightBatches, ProducerIdAndEpoch
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import Record, encode_batch


def batch(*values: bytes) -> bytearray:
    return encode_batch([Record(index, 0, None, value) for index, value in enumerate(values)])


def pipeline(world: World) -> InFlightBatches:
    made = InFlightBatches(cast(Cluster, world))
    made.reset(ProducerIdAndEpoch(1, 0))
    return made


def written(world: World, partition: int) -> list[bytes]:
    return [value for _, _, values in world.logs[partition].batches for value in values]


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_each_batch_is_there_once_and_in_order_whatever_goes_wrong(start: int) -> None:
    struck = 0
    for seed in range(start, start + 100):
        world = World(seed, troubles=60)
        sender = pipeline(world)
        sent: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
        for number in range(60):
            partition = world.chance.randrange(3)
            values = [b"%d-%d" % (number, each) for each in range(world.chance.randint(1, 3))]
            sent[partition] += values
            sender.submit("orders", partition, batch(*values))
        sender.drain()
        assert {place: written(world, place) for place in sent} == sent, f"seed {seed}"
        struck += 60 - world.troubles_left
    assert struck > 2000, "hardly anything went wrong"


def test_no_more_than_five_are_under_way_on_a_connection() -> None:
    world = World(1, troubles=0)
    sender = pipeline(world)
    for number in range(100):
        sender.submit("orders", number % 10, batch(b"x"))
    sender.drain()
    assert max(each.longest for each in world.connections) == IN_FLIGHT_MAX


def test_offsets_are_told() -> None:
    sender = pipeline(World(1, troubles=0))
    deliveries = [sender.submit("orders", 0, batch(b"x")) for _ in range(12)]
    sender.drain()
    assert [each.offset for each in deliveries] == list(range(12))
    assert all(each.is_acknowledged for each in deliveries)


def refusing(world: World, code: ErrorCode, monkeypatch: pytest.MonkeyPatch, times: int = 1000) -> None:
    """The next answers are this refusal."""
    left = [times]
    serve = world.serve

    def refuse(node_id: int, frame: bytes) -> Any:
        partition, _, _ = answer = serve(node_id, frame)
        if left[0] > 0:
            left[0] -= 1
            return partition, code, -1
        return answer

    monkeypatch.setattr(world, "serve", refuse)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.message_too_large, Refused),
        (ErrorCode.invalid_producer_epoch, Fenced),
        (ErrorCode.out_of_order_sequence_number, Refused),
        (ErrorCode.transaction_abortable, Refused),
    ],
)
def test_what_does_not_pass_ends_the_producer(
    code: ErrorCode, kind: type[Refused], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(1, troubles=0)
    sender = pipeline(world)
    refusing(world, code, monkeypatch)
    sender.submit("orders", 0, batch(b"x"))
    with pytest.raises(kind) as caught:
        sender.drain()
    assert caught.value.code is code
    with pytest.raises(kind):
        sender.submit("orders", 1, batch(b"y"))
    assert not sender.settle()
    sender.reset(ProducerIdAndEpoch(1, 1))
    monkeypatch.undo()
    world.logs.clear()
    sender.submit("orders", 0, batch(b"z"))
    sender.drain()
    assert written(world, 0) == [b"z"]


def test_a_repeat_that_the_broker_remembers_is_success(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, troubles=0)
    sender = pipeline(world)
    refusing(world, ErrorCode.duplicate_sequence_number, monkeypatch, times=1)
    delivery = sender.submit("orders", 0, batch(b"x"))
    sender.drain()
    assert (delivery.is_acknowledged, delivery.offset) == (True, None)


def test_it_gives_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, troubles=0)
    object.__setattr__(world.settings, "retry_deadline_ms", 50)
    sender = pipeline(world)
    refusing(world, ErrorCode.not_enough_replicas, monkeypatch)
    sender.submit("orders", 0, batch(b"x"))
    with pytest.raises(Unavailable, match=r"accepted no batch within 0\.05 s: .*not enough replicas"):
        sender.drain()


def test_a_frozen_leader_is_left_when_its_answer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, troubles=0)
    sender = pipeline(world)
    sender.submit("orders", 0, batch(b"x"))
    sender.drain()
    frozen = world.connections[-1]

    def late(pending: Any, *, timeout_ms: float) -> Any:
        raise FakeConnection.broken(frozen)

    monkeypatch.setattr(frozen, "finish", late)
    sender.submit("orders", 0, batch(b"y"))
    world.elect(0)
    sender.drain()
    assert written(world, 0) == [b"x", b"y"]
    assert not frozen.is_usable
