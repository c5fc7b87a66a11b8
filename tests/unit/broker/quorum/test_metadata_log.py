"""The metadata log of one node: decisions are committed together, replayed after a restart, and kept in snapshots."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import pytest
from tests.unit.broker.quorum.quorum_harness import Member, until, within

from penstock.broker.quorum import snapshots, storage
from penstock.broker.quorum.control_records import (
    ControlType,
    SnapshotFooter,
    control_type,
    encode_control_batch,
)
from penstock.broker.quorum.storage import METADATA_CONFIG, METADATA_TOPIC_ID
from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage, ResourceType
from penstock.cluster.metadata_records import ConfigRecord, PartitionRecord, TopicRecord, encode_records
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.log.log_manager import LogManager
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import Record, decode_records, encode_batch, iter_batches
from penstock.protocol.steps import Steps
from penstock.raft.types import ElectionState, OffsetAndEpoch, ReplicaKey, VoterSet

T = TypeVar("T")


def one(folder: Path, **settings: str) -> Member:
    return Member(folder, 1, 0, {name.replace("_", "."): value for name, value in settings.items()})


def setting(name: str, value: str) -> ConfigRecord:
    return ConfigRecord(resource_type=ResourceType.BROKER, resource_name="", name=name, value=value)


def log_batches(member: Member) -> list[tuple[int, bool, int]]:
    """(base offset, is control, records) of each batch."""
    log = member.quorum.state.log
    piece = log.read(log.start_offset, 1 << 30, log.end)
    return [(h.base_offset, h.is_control, h.record_count) for h, _ in iter_batches(piece.data)]


async def test_a_node_alone_is_a_quorum_of_one_with_few_syncs(tmp_path: Path) -> None:
    member = await within(one(tmp_path).start())
    assert (member.quorum.is_only_voter, member.metadata.is_active, member.quorum.epoch) == (True, True, 1)
    assert member.controller.events == ["active"]
    assert log_batches(member) == [(0, True, 3)]  # who leads, which protocol, who votes
    await member.stop()
    member = await within(one(tmp_path).start())
    assert member.syncs == 1
    assert (member.quorum.epoch, log_batches(member)[-1]) == (2, (3, True, 1))
    await member.kill()


async def test_decisions_made_at_once_share_a_commit_and_see_each_other(tmp_path: Path) -> None:
    member = await within(one(tmp_path).start())
    seen: list[tuple[int, int]] = []

    def decide(image: ClusterImage) -> Decision[int]:
        count = len(image.config(ResourceType.BROKER, ""))
        seen.append((count, member.metadata.next_offset))
        return Decision((setting(f"key-{count}", "1"),), count)

    before = member.syncs
    replies = await within(asyncio.gather(*(member.metadata.propose(decide) for _ in range(20))))
    assert list(replies) == list(range(20))
    assert seen == [(count, 3 + count) for count in range(20)]
    assert member.syncs - before <= 2
    assert member.metadata.applied_offset == member.metadata.committed_offset == 22
    await member.kill()


async def test_a_decision_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    member = await within(one(tmp_path).start())

    def refuse(image: ClusterImage) -> Decision[None]:
        raise ApiError(ErrorCode.topic_already_exists)

    results = await within(
        asyncio.gather(
            member.set("a", "1"),
            member.metadata.propose(refuse),
            member.set("b", "2"),
            return_exceptions=True,
        )
    )
    assert [type(result) for result in results] == [type(None), ApiError, type(None)]
    assert (member.get("a"), member.get("b")) == ("1", "2")
    await member.kill()


async def test_half_of_a_decision_that_contradicts_the_image_misleads_no_other(tmp_path: Path) -> None:
    member = await within(one(tmp_path).start())
    first, second = UUID(int=5), UUID(int=6)

    def wrong(image: ClusterImage) -> Decision[None]:
        topic = TopicRecord(name="t", topic_id=first)
        return Decision((topic, topic), None)

    def right(image: ClusterImage) -> Decision[bool]:
        partition = PartitionRecord(
            partition_id=0,
            topic_id=second,
            replicas=(1,),
            isr=(1,),
            leader=1,
            leader_epoch=0,
            partition_epoch=0,
            directories=(UUID(int=200),),
        )
        return Decision((TopicRecord(name="t", topic_id=second), partition), "t" in image.topics)

    failed, saw_half = await within(
        asyncio.gather(member.metadata.propose(wrong), member.metadata.propose(right), return_exceptions=True)
    )
    assert isinstance(failed, AssertionError)
    assert saw_half is False
    assert member.metadata.image.topics["t"].id == second
    await member.kill()


async def test_a_decision_without_records_writes_nothing(tmp_path: Path) -> None:
    member = await within(one(tmp_path).start())
    end_offset = member.quorum.state.log.end_offset
    assert (
        await within(member.metadata.propose(lambda image: Decision((), "nothing to do"))) == "nothing to do"
    )
    assert member.quorum.state.log.end_offset == end_offset
    await member.kill()


async def test_a_decision_is_visible_only_after_it_is_applied(tmp_path: Path) -> None:
    member = await within(one(tmp_path).start())
    gate, followed = asyncio.Event(), asyncio.Event()

    async def follow(delta: object, image: ClusterImage) -> None:
        followed.set()
        await gate.wait()

    member.metadata._follow = follow
    proposed = asyncio.create_task(member.set("a", "1"))
    await within(followed.wait())
    assert member.get("a") is None
    assert not proposed.done()
    gate.set()
    await within(proposed)
    assert member.get("a") == "1"
    await member.kill()


async def test_a_node_that_does_not_lead_decides_nothing(tmp_path: Path) -> None:
    member = await within(one(tmp_path).start())
    await member.quorum.stop()
    with pytest.raises(ApiError) as error:
        await within(member.set("a", "1"))
    assert error.value.code is ErrorCode.not_controller
    assert member.controller.events == ["active", "inactive"]
    await member.kill()


async def test_a_full_disk_refuses_a_decision_and_the_next_one_is_made(tmp_path: Path) -> None:
    member = await within(one(tmp_path).start())
    log = member.quorum.state.log
    tail, write = log._tail, type(log._tail).write

    def full(*_: object) -> None:
        raise ApiError(ErrorCode.kafka_storage_error, "No space left on device")

    type(tail).write = full  # type: ignore[method-assign]
    try:
        with pytest.raises(ApiError, match="No space left"):
            await within(member.set("a", "1"))
    finally:
        type(tail).write = write  # type: ignore[method-assign]
    await within(member.set("b", "2"))
    assert (member.get("a"), member.get("b")) == (None, "2")
    await member.kill()


async def test_what_was_decided_is_there_after_a_restart_and_followed_all_at_once(tmp_path: Path) -> None:
    member = await within(one(tmp_path).start())
    topic = TopicRecord(name="t", topic_id=UUID(int=77))
    partition = PartitionRecord(
        partition_id=0,
        topic_id=UUID(int=77),
        replicas=(1,),
        isr=(1,),
        leader=1,
        leader_epoch=0,
        partition_epoch=0,
        directories=(UUID(int=100),),
    )
    await within(member.metadata.propose(lambda image: Decision((topic, partition), None)))
    await member.set("a", "1")
    image = member.image
    await member.kill()
    member = await within(one(tmp_path).start())
    assert (member.image.topics, member.get("a")) == (image.topics, "1")
    (delta,) = [delta for delta in member.followed if delta]
    assert [topic.name for topic in delta.topics_created] == ["t"]
    await member.kill()


async def test_what_is_in_the_log_but_not_committed_is_not_shown(tmp_path: Path) -> None:
    member = await within(one(tmp_path).start())
    await member.set("committed", "1")
    await member.set("who knows", "2")
    await member.kill()
    member = one(tmp_path)
    await member.open()
    member.quorum.committed(4)  # the first of them
    await within(member.metadata.caught_up())
    assert (member.metadata.applied_offset, member.get("committed"), member.get("who knows")) == (
        3,
        "1",
        None,
    )
    member.quorum.committed(5)
    await within(member.metadata.reached(4))
    assert member.get("who knows") == "2"
    await member.kill()


async def test_data_of_the_release_before_quorums_becomes_a_quorum_of_one(tmp_path: Path) -> None:
    store = LogManager.open(tmp_path, node_id=1)
    log = store.open_or_create(CLUSTER_METADATA, 0, METADATA_TOPIC_ID, METADATA_CONFIG, now_ms=1)
    (value,) = encode_records([setting("old", "1")])
    batch = encode_batch([Record(0, 1, None, value)])
    log.append(memoryview(batch), leader_epoch=1, now_ms=1, internal=True)
    store.close()
    initial_voters = "1@127.0.0.1:1,2@127.0.0.1:2,3@127.0.0.1:3"  # who need not be there: the data is here
    member = await within(one(tmp_path, controller_quorum_voters=initial_voters).start())
    assert (member.get("old"), member.quorum.voters.ids, member.quorum.epoch) == ("1", (1,), 2)
    assert member.cluster_id == store.cluster_id
    await member.set("new", "2")
    await member.kill()
    member = await within(one(tmp_path).start())
    assert (member.get("old"), member.get("new")) == ("1", "2")
    await member.kill()


async def test_snapshots_hold_everything_and_let_the_log_go(tmp_path: Path) -> None:
    every = {"metadata_log_max_record_bytes_between_snapshots": "3000"}
    member = await within(one(tmp_path, **every).start())
    for number in range(100):
        await member.set(f"key-{number % 10}", f"{number}" + "x" * 100)
    folder = member.quorum.state.folder
    await until(lambda: len(snapshots.stored(folder)) == 2, "two snapshots are kept")
    await until(lambda: not member.metadata._is_taking_snapshot, "no more is being taken")
    previous, newest = snapshots.stored(folder)
    assert member.quorum.state.log.start_offset == previous.offset
    assert snapshots.load(folder, newest).voters == member.quorum.voters
    config = member.image.configs
    await member.kill()
    member = await within(one(tmp_path).start())
    assert (member.image.configs, member.quorum.driver.view.snapshot) == (config, newest)
    await member.kill()
    path = snapshots.path_of(folder, newest)
    path.write_bytes(path.read_bytes()[:-1])
    member = await within(one(tmp_path).start())  # the one before, and the log since then, say the same
    assert (member.image.configs, member.quorum.driver.view.snapshot) == (config, previous)
    await member.set("more", "1")
    await member.kill()
    member = await within(one(tmp_path).start())
    assert (member.get("more"), member.quorum.voters.ids) == ("1", (1,))
    await member.kill()
    path = snapshots.path_of(folder, previous)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(snapshots.DamagedSnapshot):  # and without it that is unknown
        await within(one(tmp_path).start())


def test_a_snapshot_is_what_kafka_writes(tmp_path: Path) -> None:
    image = ClusterImage()
    image.apply([setting("a", "1")])
    id = OffsetAndEpoch(42, 7)
    snapshots.write(tmp_path, id, image, VoterSet(), last_timestamp_ms=5, now_ms=6)
    (name,) = os.listdir(tmp_path)
    assert name == "00000000000000000042-0000000007.checkpoint"
    batches = list(iter_batches((tmp_path / name).read_bytes()))
    assert [header.leader_epoch for header, _ in batches] == [7] * len(batches)
    kinds = [
        control_type(record) if header.is_control else None
        for header, batch in batches
        for record in decode_records(batch, 1 << 20)
    ]
    assert kinds == [ControlType.SNAPSHOT_HEADER, None, ControlType.SNAPSHOT_FOOTER]
    assert snapshots.load(tmp_path, id).image.configs == image.configs


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_snapshot_is_not_used(tmp_path: Path, damage: str) -> None:
    image = ClusterImage()
    image.apply([setting("a", "1")])
    id = OffsetAndEpoch(42, 7)
    snapshots.write(tmp_path, id, image, VoterSet(), last_timestamp_ms=5, now_ms=6)
    path = snapshots.path_of(tmp_path, id)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-1]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(snapshots.DamagedSnapshot):
        snapshots.load(tmp_path, id)


@pytest.mark.parametrize(
    "election",
    [
        ElectionState(3, -1, ReplicaKey(2, UUID(int=12345678901234567890))),
        ElectionState(4, 2, None),
        ElectionState(5, -1, ReplicaKey(2, None)),
    ],
)
def test_a_vote_is_remembered(tmp_path: Path, election: ElectionState) -> None:
    assert storage.load_election(tmp_path) is None
    storage.save_election(tmp_path, election)
    assert storage.load_election(tmp_path) == election


def test_kafkas_own_vote_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "quorum-state").write_text(
        '{"leaderId":-1,"leaderEpoch":2,"votedId":1,"votedDirectoryId":"J8aAPcfLQt2bqs1JT_rMgQ","data_version":1}'
    )
    election = storage.load_election(tmp_path)
    assert election is not None
    assert (election.epoch, election.voted and election.voted.id) == (2, 1)
    (tmp_path / "quorum-state").write_text(
        '{"clusterId":"","leaderId":1,"leaderEpoch":2,"votedId":-1,"appliedOffset":0,"currentVoters":[],"data_version":0}'
    )
    assert storage.load_election(tmp_path) == ElectionState(2, 1, None)


def test_a_vote_that_cannot_be_read_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "quorum-state").write_text('{"leaderId":')
    with pytest.raises(storage.DamagedElection):
        storage.load_election(tmp_path)


class StepByStep:
    """Runs work in steps with a turn of the event loop after each, as a node does with many of them."""

    def __init__(self) -> None:
        self.steps = 0
        self.at: dict[int, Callable[[], Any]] = {}

    def __call__(self, steps: Steps[T]) -> Awaitable[T]:
        return self._run(steps)

    async def _run(self, steps: Steps[T]) -> T:
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            self.steps += 1
            if (happens := self.at.pop(self.steps, None)) is not None:
                happens()
            await asyncio.sleep(0)


def in_steps(count: int, seen: list[int]) -> Callable[[ClusterImage], Steps[Decision[int]]]:
    """Decides on one setting after the other, depending on how many there are."""

    def decide(image: ClusterImage) -> Steps[Decision[int]]:
        there = len(image.config(ResourceType.BROKER, ""))
        records = []
        for number in range(count):
            records.append(setting(f"key-{there + number}", "1"))
            yield
        seen.append(there)
        return Decision(tuple(records), there)

    return decide


async def stepwise(tmp_path: Path) -> tuple[Member, StepByStep]:
    member = await within(one(tmp_path).start())
    run_steps = member.metadata._run_steps = StepByStep()
    return member, run_steps


async def test_decisions_in_steps_see_each_other_and_take_effect_as_a_whole(tmp_path: Path) -> None:
    member, _ = await stepwise(tmp_path)
    seen: list[int] = []
    proposals = [asyncio.ensure_future(member.metadata.propose(in_steps(50, seen))) for _ in range(3)]
    sizes: set[int] = set()
    while not all(proposal.done() for proposal in proposals):
        sizes.add(len(member.metadata.image.config(ResourceType.BROKER, "")))
        await asyncio.sleep(0)
    assert [await proposal for proposal in proposals] == seen == [0, 50, 100]
    assert sizes <= {0, 50, 100, 150}
    await member.kill()
    again = await within(one(tmp_path).start())
    assert len(again.metadata.image.config(ResourceType.BROKER, "")) == 150
    await again.kill()


async def test_a_decision_is_made_again_if_the_log_has_grown_meanwhile(tmp_path: Path) -> None:
    """The quorum's own records take offsets too, and a broker's epoch is the offset of its record."""
    member, run_steps = await stepwise(tmp_path)
    offsets: list[int] = []

    def decide(image: ClusterImage) -> Decision[int]:
        offsets.append(member.metadata.next_offset)
        return Decision((setting("a", "1"), setting("b", "2")), offsets[-1])

    driver = member.quorum.driver
    control = encode_control_batch((SnapshotFooter(),), epoch=member.quorum.epoch, now_ms=1)
    run_steps.at[2] = lambda: driver.append(control)
    reply = await within(member.metadata.propose(decide))
    assert offsets == [3, 4]
    assert reply == 4
    assert [base for base, is_control, _ in log_batches(member) if not is_control] == [4]
    assert (member.get("a"), member.get("b")) == ("1", "2")
    await member.kill()


async def test_a_decision_that_outlasts_the_leadership_is_not_appended(tmp_path: Path) -> None:
    member, run_steps = await stepwise(tmp_path)
    end_offset = member.quorum.state.log.end_offset
    run_steps.at[5] = lambda: member.metadata.leader_changed(2, member.quorum.epoch + 1)
    with pytest.raises(ApiError) as caught:
        await within(member.metadata.propose(in_steps(10, [])))
    assert caught.value.code is ErrorCode.not_controller
    assert member.quorum.state.log.end_offset == end_offset
    await member.kill()
