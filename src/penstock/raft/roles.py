"""Changes of role that anyone may have to make: to no leader, to another's lead, out of office."""

from penstock.protocol.errors import ErrorCode
from penstock.raft.core import Core
from penstock.raft.messages import EndEpochRequest, PeerReply, VoteReply, VoterReply
from penstock.raft.states import Follower, Leader, Question
from penstock.raft.values import NOBODY, Address, Election, ReplicaKey, Role


class Roles(Core):
    def become_unattached(self, epoch: int, *, deadline_ms: int | None = None) -> None:
        """Nobody is known to lead. A voter stands when its patience ends; everyone asks around meanwhile."""
        self._enter_epoch(epoch)
        self._leave_role(Role.UNATTACHED)
        self.deadline_ms = deadline_ms or self.now_ms + self._random_election_timeout_ms()

    def become_follower(
        self, epoch: int, leader_id: int, addresses: tuple[Address, ...], *, is_heard: bool
    ) -> None:
        assert leader_id not in (NOBODY, self.local.id), leader_id
        self._enter_epoch(epoch)
        self.election = self.election._replace(leader_id=leader_id)
        self._leave_role(Role.FOLLOWER)
        self._follower = Follower(
            leader_id=leader_id, leader_addresses=addresses, since_ms=self.now_ms, is_heard=is_heard
        )
        self.deadline_ms = self._follower_deadline_ms()

    def become_resigned(self) -> None:
        """Out of office for the rest of this epoch; those furthest ahead are asked to take over."""
        assert self._leader
        successors = self.successors(self._leader)
        self.ended_epoch = self.epoch
        self._leave_role(Role.RESIGNED)
        for voter in self.other_voters:
            request = EndEpochRequest(epoch=self.epoch, leader_id=self.local.id, successors=successors)
            self._send(voter.id, request)
        self.deadline_ms = self.now_ms + self._random_election_timeout_ms()

    def successors(self, leader: Leader) -> tuple[ReplicaKey, ...]:
        def behind(key: ReplicaKey) -> int:
            progress = leader.progress.get(key)
            return -progress.offset if progress else 1

        return tuple(sorted(self.other_voters, key=behind))

    def _enter_epoch(self, epoch: int) -> None:
        assert epoch >= self.epoch, f"epochs never go back: {epoch} after {self.epoch}"
        if epoch > self.epoch:
            self.unsteady_epochs += 1
            self.election = Election(epoch)

    def _leave_role(self, role: Role) -> None:
        leader, self._leader = self._leader, None
        self.role, self._follower, self._campaign, self.deadline_ms = role, None, None, None
        self.question = Question(turn=self.question.turn)
        if leader:
            self._leave_office(leader)

    def _leave_office(self, leader: Leader) -> None:
        """Whoever waits for this leader is told that it is none; what they asked for may still come true."""
        self._abandoned += [(parked.request, parked.token) for parked in leader.parked.values()]
        if leader.change:
            reply = VoterReply(error=ErrorCode.not_leader_or_follower, message="leadership was lost")
            self._answer(leader.change.token, reply)

    def _is_news_to_campaign(self, reply: VoteReply) -> bool:
        """Who stands because it lost its leader, and who would let it, need not be told of that leader."""
        left = self._campaign.fallback if self._campaign else None
        return not reply.granted and (left is None or left.leader_id != reply.leader_id)

    # What every message may teach: a newer epoch, or its leader

    def _learn(self, reply: PeerReply) -> None:
        if reply.epoch > self.epoch:
            self._learn_epoch(reply)
        elif not isinstance(reply, VoteReply) or self._is_news_to_campaign(reply):
            self._learn_leader(reply)

    def _learn_leader(self, reply: PeerReply) -> None:
        """The word of a third party."""
        if reply.epoch == self.epoch and self._seeks_leader and self._can_follow(reply.leader_id):
            self.become_follower(reply.epoch, reply.leader_id, reply.leader_addresses, is_heard=False)

    def _learn_epoch(self, reply: PeerReply) -> None:
        if self._can_follow(reply.leader_id):
            self.become_follower(reply.epoch, reply.leader_id, reply.leader_addresses, is_heard=False)
        else:
            self.become_unattached(reply.epoch)

    def _can_follow(self, leader_id: int) -> bool:
        """An earlier life of this node, with another disk, may have led: nobody follows itself."""
        return leader_id > NOBODY and leader_id != self.local.id

    @property
    def _seeks_leader(self) -> bool:
        """Not one of an epoch that is over, though some may not have heard of that yet."""
        is_free = self.role in (Role.UNATTACHED, Role.PROSPECTIVE, Role.CANDIDATE)
        return is_free and self.epoch != self.ended_epoch
