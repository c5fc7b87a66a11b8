"""Rules of the quorum for single requests, which a script would not show well."""

from __future__ import annotations

from uuid import UUID

import pytest
from tests.unit.raft.memory_log import Entry, MemoryLog

from penstock.protocol.errors import ErrorCode
from penstock.raft import actions as act
from penstock.raft.node import RaftNode
from penstock.raft.state import CommittedRecordsLost
from penstock.raft.types import (
    EPOCH_JUMP_MAX,
    BeginEpochRequest,
    ElectionState,
    EndEpochRequest,
    FetchReply,
    FetchRequest,
    OffsetAndEpoch,
    ReplicaKey,
    Reply,
    Request,
    Role,
    Timings,
    Voter,
    VoteReply,
    VoteRequest,
    VoterHistory,
    VoterSet,
    plausible_election,
)


def key(id: int, disk: int = 1) -> ReplicaKey:
    return ReplicaKey(id, UUID(int=id * 16 + disk))


def voters(*ids: int) -> VoterSet:
    return VoterSet(tuple(Voter(key(id)) for id in ids))


def log_of(*epochs: int) -> MemoryLog:
    log = MemoryLog()
    log.append([Entry(epoch, f"{place}") for place, epoch in enumerate(epochs)])
    log.sync(log.end_offset)
    return log


def node_with(
    log: MemoryLog | None = None,
    election: ElectionState | None = None,
    voter_ids: tuple[int, ...] = (1, 2, 3),
) -> RaftNode:
    node = RaftNode(
        local=key(1),
        is_controller=True,
        addresses=(),
        log=log or log_of(1, 1, 2),
        election=election or ElectionState(2),
        voters=VoterHistory(voters(*voter_ids)),
        timings=Timings(),
        draw=lambda n: 0,
    )
    node.start(0)
    return node


def answer_to(node: RaftNode, request: Request, now_ms: int = 10) -> tuple[Reply, list[act.Action]]:
    actions = node.received(request, "token", now_ms)
    (answer,) = [action for action in actions if isinstance(action, act.SendReply)]
    return answer.reply, actions


def vote(
    *,
    epoch: int = 3,
    of: int = 2,
    offset: int = 3,
    last_epoch: int = 2,
    disk: int = 1,
    pre_vote: bool = False,
) -> VoteRequest:
    last = OffsetAndEpoch(offset, last_epoch)
    return VoteRequest(epoch=epoch, candidate=key(of), voter=key(1, disk), last=last, pre_vote=pre_vote)


def begins(epoch: int, leader: int) -> BeginEpochRequest:
    return BeginEpochRequest(epoch=epoch, leader_id=leader, voter=key(1))


def granted(node: RaftNode, request: VoteRequest) -> bool:
    reply, _ = answer_to(node, request)
    assert isinstance(reply, VoteReply)
    assert reply.error is ErrorCode.none
    return reply.granted


# Votes


def test_a_vote_is_saved_before_it_is_given() -> None:
    reply, actions = answer_to(node_with(), vote())
    assert isinstance(reply, VoteReply)
    assert reply.granted
    kinds = [type(action) for action in actions]
    assert kinds.index(act.SaveElection) < kinds.index(act.SendReply)
    assert act.SaveElection(ElectionState(3, voted=key(2))) in actions


@pytest.mark.parametrize(
    ("offset", "last_epoch", "expected"), [(3, 2, True), (2, 2, False), (9, 1, False), (1, 3, True)]
)
def test_only_a_log_that_lacks_nothing_gets_a_vote(offset: int, last_epoch: int, expected: bool) -> None:
    assert granted(node_with(), vote(epoch=4, offset=offset, last_epoch=last_epoch)) is expected
    assert (
        granted(node_with(), vote(epoch=4, offset=offset, last_epoch=last_epoch, pre_vote=True)) is expected
    )


def test_a_vote_stands_through_a_restart() -> None:
    """The same candidate may ask again, another may not."""
    node = node_with(election=ElectionState(3, voted=key(2)))
    assert granted(node, vote(epoch=3, of=2))
    assert not granted(node, vote(epoch=3, of=3))
    assert granted(node, vote(epoch=4, of=3))


def test_pre_votes_do_not_bind() -> None:
    node = node_with()
    assert granted(node, vote(epoch=2, of=2, pre_vote=True))
    assert granted(node, vote(epoch=2, of=3, pre_vote=True))
    assert (node.epoch, node.election.voted) == (2, None)


@pytest.mark.parametrize("reply", [None, VoteReply(epoch=2, granted=True)], ids=["no answer", "a pre-vote"])
def test_a_pre_vote_asked_of_a_voter_that_has_left_counts_for_nothing(reply: VoteReply | None) -> None:
    """Asked in an earlier campaign of the same epoch. Asking it again would be due for ever."""
    node = node_with()
    begin_ms = node.next_deadline_ms()
    assert begin_ms is not None
    node.tick(begin_ms)
    asked = VoteRequest(epoch=2, candidate=key(1), voter=key(4), last=OffsetAndEpoch(3, 2), pre_vote=True)
    node.answered(act.SendRequest(4, asked), reply, begin_ms)
    assert node.role is Role.PROSPECTIVE
    later_ms = begin_ms + Timings().retry_ms
    node.tick(later_ms)
    assert node.next_deadline_ms() > later_ms  # type: ignore[operator]


def test_an_epoch_that_has_a_leader_gets_no_votes() -> None:
    node = node_with()
    answer_to(node, begins(3, 3))
    assert not granted(node, vote(epoch=3))


def test_a_leader_that_is_heard_is_protected_from_pre_votes_for_the_fetch_timeout() -> None:
    node = node_with()
    answer_to(node, begins(3, 3), now_ms=10)
    early, _ = answer_to(node, vote(epoch=3, pre_vote=True), now_ms=2009)
    late, _ = answer_to(node, vote(epoch=3, pre_vote=True), now_ms=2010)
    assert isinstance(early, VoteReply)
    assert isinstance(late, VoteReply)
    assert (early.granted, late.granted) == (False, True)


def test_votes_of_another_disk_or_an_earlier_epoch_are_not_given() -> None:
    assert answer_to(node_with(), vote(disk=2))[0].error is ErrorCode.invalid_voter_key
    assert answer_to(node_with(), vote(epoch=1))[0].error is ErrorCode.fenced_leader_epoch
    assert answer_to(node_with(), vote(epoch=1))[0].epoch == 2


def test_the_epoch_of_the_log_counts_when_it_is_newer_than_the_saved_one() -> None:
    """A vote of an epoch before it is void, not moved into it."""
    node = node_with(log_of(1, 5), ElectionState(3, voted=key(2)))
    assert (node.epoch, node.election.voted) == (5, None)


# Fetches


def led(log: MemoryLog) -> RaftNode:
    """A leader of epoch 3, with its first record appended."""
    node = node_with(log, voter_ids=(1,))
    assert node.role is Role.LEADER
    log.append([Entry(3, "LeaderChange"), Entry(3, "KRaftVersion"), Entry(3, "voters")])
    log.sync(log.end_offset)
    node.appended(1)
    return node


def fetch(offset: int, last_epoch: int, epoch: int = 3) -> FetchRequest:
    return FetchRequest(epoch=epoch, replica=key(2), offset=offset, last_epoch=last_epoch, max_wait_ms=0)


@pytest.mark.parametrize(
    ("offset", "last_epoch", "expected"),
    [
        (3, 1, OffsetAndEpoch(2, 1)),  # too much of epoch 1
        (9, 2, OffsetAndEpoch(3, 2)),
        (9, 3, OffsetAndEpoch(6, 3)),
        (4, 4, OffsetAndEpoch(6, 3)),  # an epoch that the leader never saw
    ],
)
def test_partings_are_found_by_epoch(offset: int, last_epoch: int, expected: OffsetAndEpoch) -> None:
    reply, _ = answer_to(led(log_of(1, 1, 2)), fetch(offset, last_epoch))
    assert isinstance(reply, FetchReply)
    assert reply.diverging == expected


@pytest.mark.parametrize(("offset", "last_epoch"), [(0, -1), (1, 1), (2, 1), (3, 2), (4, 3)])
def test_who_has_a_beginning_of_the_log_gets_the_rest(offset: int, last_epoch: int) -> None:
    actions = led(log_of(1, 1, 2)).received(fetch(offset, last_epoch), "token", 10)
    assert [action.offset for action in actions if isinstance(action, act.SendRecords)] == [offset]


@pytest.mark.parametrize(("offset", "last_epoch"), [(0, -1), (1, 1), (2, 0), (2, 2)])
def test_before_or_at_the_start_of_the_log_only_its_snapshot_helps(offset: int, last_epoch: int) -> None:
    """(2, 1) would be the snapshot's own end."""
    log = log_of(1, 1, 2)
    log.take_snapshot(2, 2)
    reply, _ = answer_to(led(log), fetch(offset, last_epoch))
    assert isinstance(reply, FetchReply)
    assert reply.snapshot == OffsetAndEpoch(2, 1)
    assert led(log).received(fetch(2, 1), "token", 10)


@pytest.mark.parametrize(
    ("epoch", "expected"), [(2, ErrorCode.fenced_leader_epoch), (4, ErrorCode.unknown_leader_epoch)]
)
def test_only_fetches_of_the_leaders_own_epoch_are_served(epoch: int, expected: ErrorCode) -> None:
    reply, _ = answer_to(led(log_of(1, 1, 2)), fetch(6, 3, epoch=epoch))
    assert isinstance(reply, FetchReply)
    assert (reply.error, reply.epoch, reply.leader_id) == (expected, 3, 1)


def following(log: MemoryLog) -> tuple[RaftNode, act.SendRequest]:
    node = node_with(log)
    actions = node.received(begins(3, 2), "token", 10)
    (send,) = [action for action in actions if isinstance(action, act.SendRequest)]
    return node, send


def test_a_follower_does_not_give_up_what_it_knows_to_be_committed() -> None:
    node, send = following(log_of(1, 1, 2))
    node.answered(send, FetchReply(epoch=3, leader_id=2, high_watermark=3), 20)
    assert node.high_watermark == 3
    (send,) = [
        action for action in node.received(begins(4, 3), "token", 30) if isinstance(action, act.SendRequest)
    ]
    with pytest.raises(CommittedRecordsLost):
        node.answered(send, FetchReply(epoch=4, leader_id=3, diverging=OffsetAndEpoch(2, 1)), 40)


def test_an_answer_of_an_earlier_leader_is_ignored() -> None:
    node, old = following(log_of(1, 1, 2))
    node.received(begins(4, 3), "token", 30)
    late = FetchReply(epoch=3, leader_id=2, high_watermark=3, records=b"records")
    assert node.answered(old, late, 40) == []
    assert node.high_watermark is None


def test_a_follower_asks_again_only_when_the_last_answer_is_synced() -> None:
    log = log_of(1, 1, 2)
    node, send = following(log)
    answer = FetchReply(epoch=3, leader_id=2, high_watermark=4, records=b"records")
    assert node.answered(send, answer, 20) == [act.HighWatermarkAdvanced(3), act.AppendRecords(b"records")]
    log.append([Entry(3, "x")])
    assert node.appended(21) == []
    log.sync(4)
    mark, again = node.synced(30)
    assert mark == act.HighWatermarkAdvanced(4)
    assert isinstance(again, act.SendRequest)
    assert isinstance(again.request, FetchRequest)
    assert (again.request.offset, again.request.high_watermark) == (4, 4)


# Voter sets


def test_a_voter_is_an_id_and_a_disk() -> None:
    assert voters(1, 2).is_voter(key(2))
    assert not voters(1, 2).is_voter(key(2, disk=2))
    assert VoterSet((Voter(ReplicaKey(2)),)).is_voter(key(2))
    assert [voters(*range(size)).majority for size in (1, 2, 3, 4, 5)] == [1, 2, 2, 3, 3]


def test_voter_sets_come_and_go_with_their_records() -> None:
    history = VoterHistory(voters(1))
    history.add(5, voters(1, 2))
    history.add(9, voters(1, 2, 3))
    assert (history.latest, history.latest_offset) == (voters(1, 2, 3), 9)
    assert [history.as_of(offset) for offset in (5, 6, 9, 10)] == [
        voters(1),
        voters(1, 2),
        voters(1, 2),
        voters(1, 2, 3),
    ]
    history.truncate(9)
    assert (history.latest, history.latest_offset) == (voters(1, 2), 5)
    history.truncate(0)
    assert (history.latest, history.latest_offset) == (voters(1), VoterHistory.BEFORE_LOG)


# Those who are no voters, and epochs that no voter could have


def saved(actions: list[act.Action]) -> list[ElectionState]:
    return [action.election for action in actions if isinstance(action, act.SaveElection)]


@pytest.mark.parametrize("epoch", [2**31 - 1, 2**31 - 2, 2**30, 2 + EPOCH_JUMP_MAX + 1, -1, -(2**31)])
@pytest.mark.parametrize("kind", ["vote", "pre-vote", "begin", "end"])
def test_an_epoch_that_no_voter_could_have_changes_nothing(kind: str, epoch: int) -> None:
    node = node_with()
    requests: dict[str, Request] = {
        "vote": vote(epoch=epoch, offset=100, last_epoch=max(epoch, 0)),
        "pre-vote": vote(epoch=epoch, offset=100, last_epoch=max(epoch, 0), pre_vote=True),
        "begin": begins(epoch, 2),
        "end": EndEpochRequest(epoch=epoch, leader_id=2, successors=(key(1),)),
    }
    reply, actions = answer_to(node, requests[kind])
    assert reply.error is (ErrorCode.fenced_leader_epoch if epoch < 0 else ErrorCode.invalid_request)
    assert (node.epoch, node.role, saved(actions)) == (2, Role.UNATTACHED, [])


def test_a_voter_that_is_a_little_ahead_is_followed() -> None:
    node = node_with()
    assert granted(node, vote(epoch=2 + EPOCH_JUMP_MAX))
    assert node.epoch == 2 + EPOCH_JUMP_MAX


@pytest.mark.parametrize("pre_vote", [False, True])
@pytest.mark.parametrize(
    ("request_", "is_heard"),
    [
        (
            vote(of=9),
            False,
        ),  # knows this node's disk, but its log is no longer than ours: it could not be a voter
        (vote(of=9, offset=4), True),
        (vote(of=9, offset=4)._replace(voter=ReplicaKey(1)), False),
        (vote(of=2)._replace(candidate=key(2, disk=7)), False),  # another disk under a voter's id
    ],
)
def test_only_one_whose_log_is_longer_may_be_a_voter_that_we_do_not_know(
    request_: VoteRequest, is_heard: bool, pre_vote: bool
) -> None:
    node = node_with()
    reply, actions = answer_to(node, request_._replace(pre_vote=pre_vote))
    assert isinstance(reply, VoteReply)
    assert (reply.error is ErrorCode.none, reply.granted) == (is_heard, is_heard)
    if not is_heard:
        assert reply.error is ErrorCode.inconsistent_voter_set
        assert (node.epoch, saved(actions)) == (2, [])


def test_one_whom_we_do_not_know_leads_only_if_it_knows_us() -> None:
    node = node_with()
    stranger = begins(3, 9)._replace(voter=ReplicaKey(1))
    assert answer_to(node, stranger)[0].error is ErrorCode.inconsistent_voter_set
    ends = EndEpochRequest(epoch=3, leader_id=9, successors=(key(1),))
    assert answer_to(node, ends)[0].error is ErrorCode.inconsistent_voter_set
    assert (node.epoch, node.role) == (2, Role.UNATTACHED)
    assert answer_to(node, begins(3, 9))[0].error is ErrorCode.none
    assert node.leader_id == 9
    assert answer_to(node, ends)[0].error is ErrorCode.none
    assert node.role is Role.CANDIDATE


def test_a_second_leader_of_an_epoch_is_refused() -> None:
    node = node_with()
    answer_to(node, begins(3, 2))
    assert answer_to(node, begins(3, 3))[0].error is ErrorCode.invalid_request
    assert node.leader_id == 2


def test_a_node_that_was_away_learns_the_epoch_from_those_that_it_asks() -> None:
    node = node_with()
    asked, _ = [action for action in node.tick(100) if isinstance(action, act.SendRequest)]
    node.answered(asked, VoteReply(epoch=5000, leader_id=3), 200)
    assert (node.epoch, node.leader_id) == (5000, 3)


def test_the_last_possible_epoch_is_not_believed() -> None:
    node = node_with()
    asked, _ = [action for action in node.tick(100) if isinstance(action, act.SendRequest)]
    assert not saved(node.answered(asked, VoteReply(epoch=2**31 - 1, leader_id=3), 200))
    assert (node.epoch, node.role) == (2, Role.PROSPECTIVE)


def test_a_sole_voter_leads_on_in_the_last_epoch_and_one_of_several_stands_no_more() -> None:
    """Where a log holds records of the last epoch, which earlier releases could be made to write."""
    last = 2**31 - 1
    alone = node_with(log_of(1, last), ElectionState(last), voter_ids=(1,))
    assert (alone.role, alone.epoch) == (Role.LEADER, last)
    one = node_with(log_of(1, last), ElectionState(last))
    for now_ms in range(0, 10_000, 100):
        one.tick(now_ms)
    assert (one.role, one.epoch) == (Role.UNATTACHED, last)


@pytest.mark.parametrize("epoch", [2**31, 2**31 - 1, 2**31 - 2, 2**30 + 1])
def test_an_impossible_epoch_on_disk_is_replaced_by_one_without_votes(epoch: int) -> None:
    found = plausible_election(ElectionState(epoch, 2, key(2)), last_epoch=7)
    assert found == ElectionState(1_000_007)
    assert plausible_election(ElectionState(epoch), last_epoch=epoch - 1) == ElectionState(epoch)


def test_an_epoch_on_disk_that_may_be_is_kept() -> None:
    """The log of a node that was away may be far behind what it has voted in since."""
    kept = ElectionState(5000, 2, key(2))
    assert plausible_election(kept, last_epoch=7) is kept
