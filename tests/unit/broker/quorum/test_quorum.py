"""Quorums of real members on loopback: founding, elections, kills, restarts, new voters, snapshots."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.describe_quorum.v2.request import DescribeQuorumRequest, PartitionData, TopicData
from tests.unit.broker.quorum.quorum_harness import Cluster, Member, until, within

from penstock.broker.quorum import membership
from penstock.broker.quorum.outbound_requests import send_request
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.actions import SendRequest
from penstock.raft.types import EndEpochRequest, OffsetAndEpoch, Voter, VoteRequest

_ELSEWHERE = 99


@asynccontextmanager
async def cluster_of(folder: Path, size: int = 3, **settings: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(folder, size, **settings)
    try:
        yield cluster
    finally:
        await cluster.close()


async def test_founders_form_one_cluster_and_all_vote(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        await cluster.start()
        assert len({member.cluster_id for member in cluster.running}) == 1
        await cluster.set("a", "1")
        await cluster.all_have("a", "1")
        active = await cluster.active()
        view = active.quorum.describe()
        assert {voter.key.id for voter in view.voters} == {1, 2, 3}


async def test_no_cluster_is_founded_before_all_founders_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster_of(tmp_path) as cluster:
        first, second = cluster.member(1), cluster.member(2)
        asked = count_calls(monkeypatch, first)
        starting = [asyncio.create_task(first.start()), asyncio.create_task(second.start())]
        await until(lambda: len(asked) > 10, "it asks again and again")
        assert not first.quorum.has_cluster
        await within(asyncio.gather(*starting, cluster.member(3).start()))
        await cluster.all_vote()


def count_calls(monkeypatch: pytest.MonkeyPatch, member: Member) -> list[object]:
    """What a member asks others, as it does."""
    asked: list[object] = []
    call = member.peers.call

    async def noted(where: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(where)
        return await call(where, *args, **kwargs)

    monkeypatch.setattr(member.peers, "call", noted)
    return asked


async def test_a_killed_leader_is_replaced_and_nothing_committed_is_lost(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        await cluster.start()
        for number in range(3):
            await cluster.set("last", str(number))
            leader = await cluster.active()
            await leader.kill()
            assert await cluster.active() is not leader
            await cluster.set("after", str(number))
            assert (await cluster.active()).get("last") == str(number)
            await within(cluster.member(leader.node_id).start())
            await cluster.all_have("after", str(number))


async def test_a_leader_that_stops_hands_over_at_once(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, controller_quorum_fetch_timeout_ms="60000") as cluster:
        await cluster.start()
        leader = await cluster.active()
        await within(leader.quorum.stop())  # its sockets stay open, so that connections are not refused
        assert leader.controller.events[-1] == "inactive"
        assert await cluster.active() is not leader


async def test_a_leader_cut_off_from_the_majority_decides_nothing(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        await cluster.start()
        leader = await cluster.active()
        await cluster.kill(*(id for id in cluster.members if id != leader.node_id))
        with pytest.raises(ApiError) as refused:
            await within(leader.set("lonely", "1"))
        assert refused.value.code is ErrorCode.not_controller
        await until(lambda: not leader.metadata.is_active, "the leader gives up")
        assert leader.get("lonely") is None


async def test_all_members_restart_with_what_was_committed(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        await cluster.start()
        await cluster.set("a", "1")
        cluster_id = cluster.members[1].cluster_id
        await cluster.kill(1, 2, 3)
        await cluster.start()
        await cluster.all_have("a", "1")
        assert {member.cluster_id for member in cluster.running} == {cluster_id}


async def test_a_member_that_fell_behind_catches_up_from_a_snapshot(tmp_path: Path) -> None:
    small = {"metadata_log_max_record_bytes_between_snapshots": "2000"}
    async with cluster_of(tmp_path, **small) as cluster:
        await cluster.start()
        behind = next(m for m in cluster.running if not m.quorum.is_leader)
        end_offset = behind.quorum.state.log.end_offset
        await behind.kill()
        for number in range(60):
            await cluster.set(f"key-{number}", "x" * 100)
        leader = await cluster.active()
        await until(
            lambda: leader.quorum.state.log.start_offset > end_offset, "the log has let go of its start"
        )
        returned = cluster.member(behind.node_id)
        await within(returned.start())
        assert returned.quorum.state.log.start_offset > end_offset
        assert all(returned.get(f"key-{number}") == "x" * 100 for number in range(60))
        await cluster.set("after", "1")
        await cluster.all_have("after", "1")
        await cluster.kill(*(m.node_id for m in cluster.running))
        await cluster.start()
        await cluster.all_have("key-59", "x" * 100)
        await cluster.all_have("after", "1")


async def test_one_node_grows_into_three(tmp_path: Path) -> None:
    first = Member(tmp_path / "1", 1, 0, {})
    await within(first.start())
    others: list[Member] = []
    try:
        await first.set("a", "1")
        bootstrap = {"controller.quorum.bootstrap.servers": f"127.0.0.1:{first.listeners[0].port}"}
        others = [Member(tmp_path / str(id), id, 0, bootstrap) for id in (2, 3)]
        await within(asyncio.gather(*(member.start() for member in others)))
        # A leader counts voters from the append on: killed right after it, it would leave two without a majority.
        await until(
            lambda: all(member.quorum.voters.ids == (1, 2, 3) for member in (first, *others)), "three voters"
        )
        assert [m.get("a") for m in others] == ["1", "1"]
        await first.kill()
        await until(lambda: any(m.metadata.is_active for m in others), "another leads")
    finally:
        for member in (first, *others):
            if member.state != "stopped":
                await member.kill()


async def test_a_member_with_a_lost_disk_joins_as_a_new_voter(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        await cluster.start()
        await cluster.set("a", "1")
        lost = cluster.members[1]  # the lowest id, which founds the cluster if there is none
        before, cluster_id = lost.quorum.local, lost.cluster_id
        await lost.kill()
        shutil.rmtree(lost.folder)
        await within(cluster.member(1).start())
        renewed = cluster.members[1]
        assert renewed.cluster_id == cluster_id
        await until(lambda: renewed.get("a") == "1", "it has what was committed")
        await until(
            lambda: all(m.quorum.voters.is_voter(renewed.quorum.local) for m in cluster.running),
            "it votes",
        )
        assert not renewed.quorum.voters.is_voter(before)


async def test_a_second_process_with_the_id_of_a_living_voter_gets_no_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silences: list[int | None] = []
    silent_ms = membership.QuorumMembership._silent_ms

    async def noted(*asked: Any) -> int | None:
        silences.append(await silent_ms(*asked))
        return silences[-1]

    async def shortened(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.1))

    monkeypatch.setattr(membership.QuorumMembership, "_silent_ms", noted)
    # A fetch timeout that no slow machine exceeds; the second process still need not wait that long.
    monkeypatch.setattr(
        membership,
        "asyncio",
        SimpleNamespace(gather=asyncio.gather, sleep=shortened, timeout=asyncio.timeout),
    )
    async with cluster_of(tmp_path, controller_quorum_fetch_timeout_ms="60000") as cluster:
        await cluster.start()
        before = cluster.members[3].quorum.voters
        leader = await cluster.active()
        await until(
            lambda: all(voter.last_fetch_ms >= 0 for voter in leader.quorum.describe().voters),
            "the leader has heard of every voter",
        )
        node_id = 2 if leader.node_id != 2 else 3
        settings = {"controller.quorum.voters": cluster.voters, **cluster.settings}
        impostor = Member(tmp_path / "impostor", node_id, 0, settings)
        await within(impostor.start())
        await until(lambda: len(silences) >= 2, "it tries, and tries again")
        assert [member.quorum.voters for member in cluster.running] == [before] * 3
        await cluster.set("a", "1")
        await impostor.kill()


async def test_a_member_that_moves_tells_the_others(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        await cluster.start()
        moved = next(m for m in cluster.running if not m.quorum.is_leader)
        await moved.kill()
        moved = cluster.member(moved.node_id, listeners="127.0.0.1:0")
        await within(moved.start())
        port = moved.listeners[0].port

        def is_known() -> bool:
            known = [m.quorum.voters.get(moved.node_id) for m in cluster.running]
            return all(voter is not None and voter.addresses[0].port == port for voter in known)

        await until(is_known, "all know the new address")


async def test_a_node_of_another_cluster_is_not_heard(tmp_path: Path) -> None:
    first, second = Member(tmp_path / "1", 1, 0, {}), Member(tmp_path / "2", 2, 0, {})
    await within(asyncio.gather(first.start(), second.start()))
    request = VoteRequest(
        epoch=100,
        candidate=second.quorum.local,
        voter=first.quorum.local,
        last=OffsetAndEpoch(1000, 99),
        pre_vote=False,
    )
    address = ("127.0.0.1", first.listeners[0].port)
    with pytest.raises(ApiError) as refused:
        await within(send_request(second.peers, address, request, cluster_id=second.cluster_id, timeout_s=60))
    assert refused.value.code is ErrorCode.inconsistent_cluster_id
    assert (first.quorum.epoch, first.metadata.is_active) == (1, True)
    await first.kill()
    await second.kill()


async def ask_quorum(member: Member, at: Member) -> Any:
    partition = PartitionData(partition_index=0)
    topic = TopicData(topic_name="__cluster_metadata", partitions=(partition,))
    address = ("127.0.0.1", at.listeners[0].port)
    return await within(member.peers.call(address, 55, DescribeQuorumRequest(topics=(topic,)), timeout_s=60))


async def test_the_quorum_describes_itself(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        await cluster.start()
        observer = Member(
            tmp_path / "9", 9, 0, {"process.roles": "broker", "controller.quorum.voters": cluster.voters}
        )
        await within(observer.start())
        await cluster.set("a", "1")
        leader = await cluster.active()
        await until(lambda: observer.get("a") == "1", "the observer has it")
        await until(lambda: leader.quorum.describe().observers, "the leader knows the observer")
        response = await ask_quorum(observer, leader)
        (partition,) = response.topics[0].partitions
        assert (int(partition.leader_id), int(partition.leader_epoch)) == (
            leader.node_id,
            leader.quorum.epoch,
        )
        assert partition.high_watermark == leader.quorum.high_watermark
        voters = {int(v.replica_id): v for v in partition.current_voters}
        assert {id: v.replica_directory_id for id, v in voters.items()} == {
            m.node_id: m.store.directory_id for m in cluster.running
        }
        assert [int(o.replica_id) for o in partition.observers] == [9]
        now_ms = leader.now_ms()
        for replica in (*partition.current_voters, *partition.observers):
            assert 0 <= now_ms - replica.last_caught_up_timestamp < 60_000
        ports = {int(node.node_id): int(node.listeners[0].port) for node in response.nodes}
        assert ports == cluster.ports
        assert observer.quorum.voters.ids == (1, 2, 3)
        await observer.kill()


async def test_a_node_without_a_cluster_says_so(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        waiting, other = cluster.member(2), Member(tmp_path / "9", 9, 0, {})
        starting = asyncio.create_task(waiting.start())
        await within(other.start())
        await until(lambda: waiting.listeners, "it listens")
        response = await ask_quorum(other, waiting)
        assert response.error_code is ErrorCode.unknown_topic_or_partition
        assert response.topics == ()
        starting.cancel()
        await other.kill()


async def test_voters_are_removed_on_request_and_the_last_one_stays(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, controller_quorum_auto_join_enable="false") as cluster:
        await within(asyncio.gather(*(cluster.member(id).start() for id in (1, 2, 3))))
        first, second = cluster.members[1], cluster.members[2]
        assert first.quorum.voters.ids == (1,)
        await until(lambda: len(first.quorum.describe().observers) == 2, "both others watch")
        await within(first.quorum.add_voter(Voter(second.quorum.local, second.quorum.addresses)))
        assert first.quorum.voters.ids == (1, 2)
        with pytest.raises(ApiError) as twice:
            await within(first.quorum.add_voter(Voter(second.quorum.local, second.quorum.addresses)))
        assert twice.value.code is ErrorCode.duplicate_voter
        await within(first.quorum.remove_voter(second.quorum.local))
        assert first.quorum.voters.ids == (1,)
        with pytest.raises(ApiError) as unknown:
            await within(first.quorum.remove_voter(second.quorum.local))
        assert unknown.value.code is ErrorCode.voter_not_found
        await first.set("a", "1")
        await cluster.all_have("a", "1")


async def test_an_end_between_founding_and_naming_the_cluster_founds_no_second(tmp_path: Path) -> None:
    async with cluster_of(tmp_path) as cluster:
        first = cluster.member(1)
        others = [asyncio.create_task(cluster.member(id).start()) for id in (2, 3)]

        async def die(*_: object) -> None:
            raise ConnectionAbortedError

        in_thread = first.in_thread
        first.in_thread = lambda call, *args, **kwargs: (  # type: ignore[method-assign]
            asyncio.ensure_future(die())
            if call == first.store.join_cluster
            else in_thread(call, *args, **kwargs)
        )
        with pytest.raises(ConnectionAbortedError):
            await within(first.start())
        assert first.cluster_id == ""
        voters = first.quorum.voters
        await first.kill()
        await within(asyncio.gather(cluster.member(1).start(), *others))
        await cluster.all_vote()
        assert cluster.members[1].quorum.voters.get(1) == voters.get(1)
        assert len({member.cluster_id for member in cluster.running}) == 1


async def test_a_leader_with_nothing_to_say_keeps_its_place(tmp_path: Path) -> None:
    """A member that waits for news must not take the silence for a death, however short its patience is."""
    async with cluster_of(tmp_path, controller_quorum_fetch_timeout_ms="450") as cluster:
        await cluster.start()
        timings = cluster.members[1].quorum.driver.core.timings
        assert timings.fetch_wait_ms * 2 < timings.fetch_timeout_ms


async def test_a_member_that_stood_still_reads_what_has_arrived_before_it_misses_anyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster_of(tmp_path) as cluster:
        await cluster.start()
        driver, loop = (await cluster.active()).quorum.driver, asyncio.get_running_loop()
        driver._disarm()
        driver._arm()
        posted: list[object] = []
        monkeypatch.setattr(driver, "post", posted.append)
        now = loop.time()
        driver._tick(now - 0.2)
        assert not posted
        assert driver._timer is not None
        assert driver._timer.when() >= now + 0.2, "others get the time that this node stood still"
        driver._tick(now - 5.0)
        assert posted == [driver.core.tick], "but only once"


async def test_who_does_not_answer_in_time_gets_more_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patiences: list[float] = []

    async def slow(peers: Any, where: Any, request: Any, *, cluster_id: str, timeout_s: float) -> Any:
        if where != _ELSEWHERE:
            return await send_request(peers, where, request, cluster_id=cluster_id, timeout_s=timeout_s)
        patiences.append(timeout_s)
        if len(patiences) < 5:
            raise TimeoutError
        return None

    monkeypatch.setattr("penstock.broker.quorum.outbound_requests.send_request", slow)
    async with cluster_of(tmp_path) as cluster:
        await cluster.start()
        driver = (await cluster.active()).quorum.driver
        for _ in range(6):
            await driver._ask(SendRequest(_ELSEWHERE, EndEpochRequest(epoch=1, leader_id=1, successors=())))
    assert [seconds / patiences[0] for seconds in patiences] == [1, 2, 4, 4, 4, 1]
