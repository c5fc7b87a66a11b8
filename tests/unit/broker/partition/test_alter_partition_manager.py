"""Changes of the in-sync set: one request for many partitions, sent once, and safe for every reply."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from tests.unit.broker.partition.one_broker import (
    ME,
    OTHER,
    PEER,
    TOPIC_ID,
    Broker,
    alter_partition_answer,
    broker_of_three,
    registration,
    turn,
)
from tests.unit.broker.raw_client import until

from penstock.broker.partition.leader_replica import LeaderReplica, monotonic_ms
from penstock.cluster.metadata_records import ConfigRecord, PartitionChangeRecord
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.replication.leader import IMAGE_WAIT_MS_MAX


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with broker_of_three(tmp_path) as broker:
        yield broker


def _isr(broker: Broker, index: int = 0) -> set[int]:
    leading = broker.partition(index).leading
    assert leading is not None
    return set(leading.rules.isr)


async def _look(broker: Broker) -> None:
    broker.isr.look_at(broker.partitions)
    await turn()


async def test_followers_that_caught_up_join_in_one_request(broker: Broker) -> None:
    await broker.create(partitions=3, isr=(ME,))
    broker.controller.answer = alter_partition_answer
    broker.isr.start()
    for replica in (PEER, OTHER):
        broker.fetch(dict.fromkeys(range(3), 0), replica=replica)
    await until(lambda: broker.controller.requests)
    for index in range(3):
        await broker.change(index, isr=(ME, PEER, OTHER))
    (request,) = broker.controller.requests
    (topic,) = request.topics
    assert (request.broker_id, request.broker_epoch) == (ME, 101)
    assert sorted(part.partition_index for part in topic.partitions) == [0, 1, 2]
    members = [(each.broker_id, each.broker_epoch) for each in topic.partitions[0].new_isr_with_epochs]
    assert members == [(ME, -1), (PEER, 102), (OTHER, 103)]
    assert broker.metrics.isr_expands == 3
    write = broker.produce()
    assert not write.is_done, "the new members count"


async def test_a_follower_below_the_high_watermark_does_not_join(broker: Broker) -> None:
    await broker.create(isr=(ME,))
    broker.produce()
    broker.fetch({0: 0}, replica=PEER)
    await _look(broker)
    assert not broker.controller.requests


@pytest.mark.parametrize("flaw", [{"fenced": True}, {"in_controlled_shutdown": True}])
async def test_a_broker_that_may_not_lead_does_not_join(broker: Broker, flaw: dict[str, bool]) -> None:
    await broker.create(isr=(ME,))
    await broker.apply(registration(PEER, 102, **flaw))
    broker.fetch({0: 0}, replica=PEER)
    await _look(broker)
    assert not broker.controller.requests


async def test_a_follower_that_lags_leaves_and_its_absence_is_not_waited_for(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.create(isr=(ME, PEER))
    write = broker.produce()
    later = monotonic_ms() + 11_000
    monkeypatch.setattr("penstock.broker.partition.alter_partition_manager.monotonic_ms", lambda: later)
    await _look(broker)
    assert not write.is_done, "until the controller agrees, it counts"
    broker.controller.answer = alter_partition_answer
    await turn()
    assert not write.is_done, "the image may bring another min.insync.replicas, too"
    await broker.change(isr=(ME,))
    assert (write.is_done, _isr(broker), broker.metrics.isr_shrinks) == (True, {ME}, 1)


async def test_a_set_that_comes_with_a_higher_minimum_is_counted_under_it(broker: Broker) -> None:
    await broker.create(isr=(ME, PEER))
    write = broker.produce()
    minimum = ConfigRecord(resource_type=2, resource_name="t", name="min.insync.replicas", value="2")
    without_peer = PartitionChangeRecord(partition_id=0, topic_id=TOPIC_ID, isr=(ME,))
    await broker.apply(without_peer, minimum)
    assert not write.is_done, "the one that left may still lead: it was in sync when the minimum was raised"


async def test_while_one_is_asked_for_no_other_is_and_the_proposed_count(broker: Broker) -> None:
    await broker.create(isr=(ME,))
    broker.fetch({0: 0}, replica=PEER)
    await _look(broker)
    broker.fetch({0: 0}, replica=OTHER)
    await _look(broker)
    assert len(broker.controller.requests) == 1
    write = broker.produce()
    broker.fetch({0: 1}, replica=OTHER)
    assert not write.is_done, "the controller may have made it a member by now"
    broker.fetch({0: 1}, replica=PEER)
    assert write.is_done


async def test_without_an_answer_the_same_is_asked_again(broker: Broker) -> None:
    await broker.create(isr=(ME,))
    broker.fetch({0: 0}, replica=PEER)

    def no_answer(_: object) -> object:
        raise ApiError(ErrorCode.request_timed_out)

    broker.controller.answer = no_answer
    await _look(broker)
    broker.controller.answer = alter_partition_answer
    await _look(broker)
    first, second = broker.controller.requests
    assert first.topics == second.topics


async def test_an_outdated_question_waits_for_the_image(broker: Broker) -> None:
    await broker.create(isr=(ME,))
    broker.fetch({0: 0}, replica=PEER)
    broker.controller.answer = lambda request: alter_partition_answer(
        request, ErrorCode.invalid_update_version
    )
    await _look(broker)
    await _look(broker)
    assert len(broker.controller.requests) == 1
    await broker.change(isr=(ME, PEER))
    assert _isr(broker) == {ME, PEER}


async def test_a_record_that_was_cut_off_is_asked_for_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller answers by a record that it has appended, and a change of controllers cuts it off."""
    await broker.create(isr=(ME,))
    broker.fetch({0: 0}, replica=PEER)
    broker.controller.answer = lambda request: alter_partition_answer(
        request, ErrorCode.invalid_update_version
    )
    await _look(broker)
    now_ms = monotonic_ms() + IMAGE_WAIT_MS_MAX
    for module in ("alter_partition_manager", "leader_replica"):
        monkeypatch.setattr(f"penstock.broker.partition.{module}.monotonic_ms", lambda: now_ms)
    broker.fetch({0: 0}, replica=PEER)
    broker.controller.answer = alter_partition_answer
    await _look(broker)
    first, second = broker.controller.requests
    assert first.topics == second.topics
    await broker.change(isr=(ME, PEER))
    assert _isr(broker) == {ME, PEER}


async def test_partitions_are_requested_in_the_order_in_which_followers_caught_up(broker: Broker) -> None:
    await broker.create(partitions=20, isr=(ME,))
    broker.controller.answer = alter_partition_answer
    broker.isr._catching_up.clear()  # a new leader has all of its partitions checked
    order = random.Random(1).sample(range(20), 20)
    for index in order:
        broker.fetch({index: 0}, replica=PEER)
    broker.isr.start()
    await until(lambda: broker.controller.requests)
    asked = [part.partition_index for part in broker.controller.requests[0].topics[0].partitions]
    assert asked == order


async def test_one_partition_that_cannot_be_looked_after_does_not_hold_up_the_others(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.create(partitions=3, isr=(ME,))
    broker.controller.answer = alter_partition_answer
    broker.fetch(dict.fromkeys(range(3), 0), replica=PEER)
    flawed = broker.partition(1).leading
    assert flawed is not None
    monkeypatch.setattr(
        LeaderReplica,
        "wanted_isr",
        lambda self, *args: 1 // 0 if self is flawed else _wanted_isr(self, *args),
    )
    await _look(broker)
    (request,) = broker.controller.requests
    assert sorted(part.partition_index for part in request.topics[0].partitions) == [0, 2]


_wanted_isr = LeaderReplica.wanted_isr


async def test_an_answer_that_comes_after_the_image_changes_nothing(broker: Broker) -> None:
    await broker.create(isr=(ME,))
    broker.fetch({0: 0}, replica=PEER)
    await _look(broker)
    await broker.change(isr=(ME, PEER))
    await broker.change(isr=(ME,))
    broker.controller.answer = alter_partition_answer
    await turn()
    assert _isr(broker) == {ME}


async def test_an_answer_to_an_earlier_leadership_says_nothing_to_this_one(broker: Broker) -> None:
    await broker.create(isr=(ME,))
    broker.fetch({0: 0}, replica=PEER)
    await _look(broker)
    await broker.change(leader=ME)
    broker.controller.answer = alter_partition_answer
    await turn()
    assert (_isr(broker), broker.partition().isr_size) == ({ME}, 1)


async def test_a_late_answer_does_not_let_a_second_question_out(broker: Broker) -> None:
    await broker.create(isr=(ME,))
    controller = broker.controller
    broker.fetch({0: 0}, replica=PEER)
    await _look(broker)
    await broker.change(isr=(ME, PEER))
    await broker.change(isr=(ME,))
    await _look(broker)
    assert len(controller.requests) == 2
    controller.answer = lambda request: alter_partition_answer(request, ErrorCode.ineligible_replica)
    controller.is_answered = lambda request: request is controller.requests[0]
    await turn()
    await _look(broker)
    assert len(controller.requests) == 2, "the second is still under way"


async def test_what_the_controller_declines_is_dropped(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.create(isr=(ME,))
    broker.fetch({0: 0}, replica=PEER)
    broker.controller.answer = lambda request: alter_partition_answer(request, ErrorCode.ineligible_replica)
    await _look(broker)
    await broker.apply(registration(PEER, 102, fenced=True))
    write = broker.produce()
    later = monotonic_ms() + 2_000
    monkeypatch.setattr("penstock.broker.partition.alter_partition_manager.monotonic_ms", lambda: later)
    await _look(broker)
    assert (write.is_done, len(broker.controller.requests)) == (True, 1), "it is not waited for"


async def test_who_leads_followers_is_looked_after_before_any_of_them_asks(broker: Broker) -> None:
    woken: list[object] = []
    broker.isr.wake = woken.append  # type: ignore[method-assign, assignment]
    await broker.create("alone", replicas=(ME,), topic_id=UUID(int=5))
    assert not woken, "a node alone has nothing to look after"
    await broker.create()
    assert woken == [broker.partition()]


@pytest.mark.parametrize("replicas", [(ME, PEER, OTHER), (ME,)])
async def test_a_leader_elected_uncleanly_says_that_it_has_recovered(
    broker: Broker, replicas: tuple[int, ...]
) -> None:
    await broker.create(leader=-1, replicas=replicas, isr=())
    broker.controller.answer = alter_partition_answer
    broker.isr.start()
    await broker.change(leader=ME, isr=(ME,), leader_recovery_state=1)
    await until(lambda: broker.controller.requests)
    (asked,) = broker.controller.requests[0].topics[0].partitions
    members = [(each.broker_id, each.broker_epoch) for each in asked.new_isr_with_epochs]
    assert (members, asked.leader_recovery_state) == ([(ME, -1)], 0)
    assert broker.produce(acks=1).produced.error_code is ErrorCode.none
    await broker.change(leader_recovery_state=0)
    await _look(broker)
    assert len(broker.controller.requests) == 1
    assert (broker.partition().leading is None) is (replicas == (ME,))
    assert broker.produce().produced.base_offset == 1
