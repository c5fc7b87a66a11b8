"""Releases when the target partition fails: each record is released once, and other partitions do not wait."""

import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ClassVar

import pytest
from tests.compat import confluent
from tests.compat.message import Message, values

from penstock.broker.coordinators.schedule import releaser
from penstock.broker.coordinators.schedule.active_shard import ActiveScheduleShard
from penstock.broker.partition.idempotent_append import PlannedAppends
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import read_header
from penstock.testing import EmbeddedBroker

Append = Callable[..., Awaitable[int]]


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedBroker]:
    monkeypatch.setattr(releaser, "_BACKOFF", ExponentialBackoff(base_ms=50, cap_ms=30_000))
    with EmbeddedBroker(settings={"penstock.schedule.topic.num.partitions": 1}) as running:
        running.create_topic("jobs", partitions=2, penstock_schedule_enable="true")
        yield running


def instead(
    monkeypatch: pytest.MonkeyPatch, append: Callable[[Append, int, bytearray], Awaitable[int]]
) -> None:
    """`append` gets the real one, bound to its arguments, the partition and the batch."""
    real = PlannedAppends.append

    async def wrapped(
        appends: PlannedAppends, topic: str, partition: int, batch: bytearray, **more: Any
    ) -> int:
        async def proceed() -> int:
            return await real(appends, topic, partition, batch, **more)

        return await append(proceed, partition, batch)

    monkeypatch.setattr(PlannedAppends, "append", wrapped)


def publish(broker: EmbeddedBroker, count: int, partition: int = 0, delay_ms: int = 1) -> list[bytes]:
    messages = [
        Message(
            b"%d-%d" % (partition, n),
            headers=(("penstock-deliver-after", b"%d" % delay_ms),),
            partition=partition,
        )
        for n in range(count)
    ]
    confluent.publish(broker.bootstrap_servers, "jobs", messages)
    return [message.value for message in messages if message.value is not None]


def read(broker: EmbeddedBroker, count: int) -> list[bytes | None]:
    return values(confluent.read(broker.bootstrap_servers, "jobs", count, partitions=2))


def test_a_partition_that_takes_nothing_does_not_hold_up_the_others(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_blocked = True

    async def append(proceed: Append, partition: int, batch: bytearray) -> int:
        if partition == 0 and is_blocked:
            raise ApiError(ErrorCode.not_enough_replicas)
        return await proceed()

    instead(monkeypatch, append)
    stuck, free = publish(broker, 20), publish(broker, 20, partition=1)
    assert read(broker, 20) == free
    is_blocked = False
    assert sorted(read(broker, 40)) == sorted(stuck + free)


def test_what_was_appended_without_an_answer_is_there_once(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []

    async def append(proceed: Append, partition: int, batch: bytearray) -> int:
        offset = await proceed()
        if len(lost) < 3:
            lost.append(offset)
            raise TimeoutError
        return offset

    instead(monkeypatch, append)
    sent = publish(broker, 10)
    last = publish(broker, 1, partition=1, delay_ms=500)
    assert sorted(read(broker, 11)) == sorted(sent + last)
    assert len(set(lost)) < 3, "the same plan was repeated"


def test_plans_that_are_too_large_are_made_smaller(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    async def append(proceed: Append, partition: int, batch: bytearray) -> int:
        counts.append(read_header(batch).record_count)
        if counts[-1] > 7:
            raise ApiError(ErrorCode.message_too_large)
        return await proceed()

    instead(monkeypatch, append)
    sent = publish(broker, 50, delay_ms=200)
    assert read(broker, 50) == sent
    assert max(counts) > 7


def test_a_producer_that_is_not_known_any_more_is_replaced(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    producers: list[int] = []

    async def append(proceed: Append, partition: int, batch: bytearray) -> int:
        producers.append(read_header(batch).producer_id)
        if len(set(producers)) == 1:
            raise ApiError(ErrorCode.out_of_order_sequence_number)
        return await proceed()

    instead(monkeypatch, append)
    sent = publish(broker, 10)
    assert read(broker, 10) == sent
    assert len(set(producers)) == 2


@pytest.mark.parametrize(
    "failures",
    [
        [OSError("no space left"), ValueError("surprise")],  # the shard is loaded again
        [ApiError(ErrorCode.kafka_storage_error, "cannot read the log")],
    ],
)
def test_what_cannot_be_read_at_once_is_released_later(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, failures: list[Exception]
) -> None:
    coming = iter(failures)
    real = releaser.gather_due_records

    def gather(*arguments: Any) -> Any:
        for failure in coming:
            raise failure
        return real(*arguments)

    monkeypatch.setattr(releaser, "gather_due_records", gather)
    sent = publish(broker, 10)
    assert read(broker, 10) == sent


def test_a_plan_that_is_found_is_carried_out_once_it_is_committed(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be an earlier leader's, and be lost with this one: then the next one makes another plan."""
    events: list[str] = []
    real = ActiveScheduleShard.committed

    async def committed(host: ActiveScheduleShard) -> None:
        await real(host)
        events.append("committed")

    async def append(proceed: Append, partition: int, batch: bytearray) -> int:
        if "killed" not in events:
            events[:] = ["killed"]
            raise ValueError("the shard is loaded again, and finds its plan")
        events.append("appended")
        return await proceed()

    instead(monkeypatch, append)
    monkeypatch.setattr(ActiveScheduleShard, "committed", committed)
    sent = publish(broker, 10)
    assert read(broker, 10) == sent
    assert events[:3] == ["killed", "committed", "appended"]


def test_what_arrives_while_others_are_released_waits_for_no_later_time_than_theirs(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is ahead would else make all later leaders late."""
    is_gathering, goes_on = threading.Event(), threading.Event()
    real = releaser.gather_due_records

    def gather(*arguments: Any) -> Any:
        is_gathering.set()
        assert goes_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(releaser, "gather_due_records", gather)

    def publish_due(value: bytes, due_ms: int) -> None:
        message = Message(value, headers=(("penstock-deliver-at", b"%d" % due_ms),), partition=0)
        confluent.publish(broker.bootstrap_servers, "jobs", [message])

    publish_due(b"later", 2000)
    assert is_gathering.wait(30)
    publish_due(b"sooner", 1000)
    goes_on.set()
    assert read(broker, 2) == [b"later", b"sooner"]
    publish_due(b"last", 1000)
    assert read(broker, 3)[-1] == b"last"
    (host,) = broker._node().schedule().hosts.values()
    (mark,) = [state.floor_ms for source, state in host.shard.sources.items() if source.partition == 0]
    assert mark == 2000


def test_a_topic_that_this_node_has_not_heard_of_yet_is_not_taken_for_deleted(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node leads a moment before its image says so, and that may be older than what its shard holds."""
    sent = publish(broker, 10, delay_ms=1500)
    node = broker._node()
    image, looked = node.image, threading.Event()

    class Older:
        topics_by_id: ClassVar[dict[Any, Any]] = {}

        def __getattr__(self, name: str) -> Any:
            return getattr(image, name)

        def partition(self, topic: str, index: int) -> Any:
            state = image.partition(topic, index)
            assert state is not None
            looked.set()
            return state._replace(leader_epoch=state.leader_epoch - 1)

    with monkeypatch.context() as patch:
        patch.setattr(node.metadata, "image", Older())
        for host in node.schedule().hosts.values():
            broker._call(_woken(host))
        assert looked.wait(30)
    assert read(broker, 10) == sent
    assert node.schedule().counts.dropped_count == 0


async def _woken(host: ActiveScheduleShard) -> None:
    host.releaser._due()
    host.releaser.wake()
