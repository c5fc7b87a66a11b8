"""A leader's duties: begin its epoch, say so, know what is committed, and step down when a majority is silent."""

from collections.abc import Callable

from penstock.raft.actions import AppendControl, Serve
from penstock.raft.messages import BeginEpochRequest
from penstock.raft.roles import Roles
from penstock.raft.states import Leader, ParkedFetch, Progress
from penstock.raft.values import ControlRecord, KRaftVersion, LeaderChange, ReplicaKey, Role, Voters


class Leading(Roles):
    def become_leader(self, granted: set[int]) -> None:
        assert self.election.voted == self.local, "a leader has voted for itself"
        granting = tuple(key for key in self.voters.latest.keys if key.id in granted)
        self.elections_failed = 0
        self._leave_role(Role.LEADER)
        self.election = self.election._replace(leader_id=self.local.id)
        self._leader = Leader(since_ms=self.now_ms, epoch_start_offset=self.log.end_offset)
        for voter in self.other_voters:
            self._progress_of(voter)
            self._leader.announce_ms[voter.id] = self.now_ms
        self._do(AppendControl(self._first_records(granting), self.log.end_offset))
        self._announce_due()

    def _first_records(self, granting: tuple[ReplicaKey, ...]) -> tuple[ControlRecord, ...]:
        """The record that opens an epoch; a voter set that was given from outside goes into the log with it."""
        opening = LeaderChange(leader_id=self.local.id, voters=self.voters.latest.keys, granting=granting)
        if self.voters.latest_offset > self.voters.BEFORE_LOG:
            return (opening,)
        voters = self.voters.latest
        self.voters.add(self.log.end_offset + 2, voters)
        return (opening, KRaftVersion(), Voters(voters=voters))

    def _progress_of(self, key: ReplicaKey) -> Progress:
        """A voter whose disk is not known goes by its id."""
        assert self._leader
        voter = self.voters.latest.get(key.id)
        if voter and self.voters.latest.is_voter(key):
            key = voter.key
        return self._leader.progress.setdefault(key, Progress(heard_ms=self.now_ms))

    # What is committed

    def update_leader_high_watermark(self) -> None:
        """Records of this epoch commit by count, and those before them with the first of them."""
        assert self._leader
        offset = self.majority_offset()
        if self.may_commit_up_to(offset):
            self._raise_high_watermark(offset)
            self._tell_parked()

    def may_commit_up_to(self, offset: int) -> bool:
        """An earlier epoch's records may yet be replaced, however many hold them, until one of ours follows."""
        assert self._leader
        return offset > self._leader.epoch_start_offset

    def majority_offset(self) -> int:
        """What a majority of the voters will not lose."""
        offsets = sorted((self.durable_offset_of(key) for key in self.counted_replicas()), reverse=True)
        return offsets[self.voters.latest.majority - 1]

    def counted_replicas(self) -> tuple[ReplicaKey, ...]:
        """Voters and nobody else; a leader that was voted out leads without counting itself."""
        return self.voters.latest.keys

    def durable_offset_of(self, key: ReplicaKey) -> int:
        if self.voters.latest.is_voter(self.local) and key.id == self.local.id:
            return self.log.durable_offset
        return self._progress_of(key).offset

    # Fetches that wait

    def _serve_grown_log(self) -> None:
        """The log grew: who waits at its old end gets the rest."""
        for parked in self._unpark(lambda parked: parked.request.offset < self.log.end_offset):
            self._do(Serve(parked.token, self._fetch_reply(), parked.request.offset))

    def _tell_parked(self) -> None:
        """The high watermark rose: who does not know it yet is told."""
        for parked in self._unpark(lambda parked: parked.request.high_watermark < (self.high_watermark or 0)):
            self._answer(parked.token, self._fetch_reply())

    def _answer_overdue(self) -> None:
        for parked in self._unpark(lambda parked: parked.deadline_ms <= self.now_ms):
            self._answer(parked.token, self._fetch_reply())

    def _unpark(self, is_over: Callable[[ParkedFetch], bool]) -> list[ParkedFetch]:
        assert self._leader
        over = [key for key, parked in self._leader.parked.items() if is_over(parked)]
        return [self._leader.parked.pop(key) for key in over]

    # Who leads, told to those who do not fetch

    def _announce_due(self) -> None:
        assert self._leader
        for voter in self.other_voters:
            if self._leader.announce_ms.get(voter.id, self.now_ms) <= self.now_ms:
                self._announce_later(voter.id)
                request = BeginEpochRequest(
                    epoch=self.epoch, leader_id=self.local.id, voter=voter, addresses=self.addresses
                )
                self._send(voter.id, request)

    def _announce_later(self, voter_id: int) -> None:
        assert self._leader
        self._leader.announce_ms[voter_id] = self.now_ms + max(1, self.timings.fetch_timeout_ms // 2)

    # Whether anyone still listens

    def quorum_deadline_ms(self) -> int | None:
        """When a majority will have been silent for too long; None for one who needs nobody else."""
        others_needed = self.voters.latest.majority - self.voters.latest.is_voter(self.local)
        if others_needed <= 0:
            return None
        heard = sorted((self._progress_of(key).heard_ms for key in self.other_voters), reverse=True)
        return heard[others_needed - 1] + self.fetch_timeout_ms

    def has_lost_quorum(self) -> bool:
        deadline_ms = self.quorum_deadline_ms()
        return deadline_ms is not None and deadline_ms <= self.now_ms

    def resign_when_alone(self) -> None:
        if self.has_lost_quorum():
            self.become_resigned()

    def _tick_leader(self) -> None:
        self._answer_overdue()
        self._announce_due()
        self.resign_when_alone()

    def _leader_deadlines_ms(self) -> list[int]:
        assert self._leader
        deadlines = [parked.deadline_ms for parked in self._leader.parked.values()]
        deadlines += [self._leader.announce_ms.get(voter.id, self.now_ms) for voter in self.other_voters]
        quorum = self.quorum_deadline_ms()
        return deadlines if quorum is None else [*deadlines, quorum]
