"""What all rules share: the node's state, and the pad on which they write their work down."""

from collections.abc import Callable
from typing import Final

from penstock.protocol.errors import ErrorCode
from penstock.raft.actions import Action, Answer, HighWatermark, LeaderChanged, SaveElection, Send, Token
from penstock.raft.log_view import LogView
from penstock.raft.messages import (
    BeginEpochReply,
    BeginEpochRequest,
    EndEpochReply,
    EndEpochRequest,
    FetchReply,
    FetchRequest,
    FetchSnapshotReply,
    PeerReply,
    Reply,
    Request,
    VoteReply,
    VoteRequest,
)
from penstock.raft.states import Campaign, Follower, Leader, Question
from penstock.raft.values import (
    EPOCH_JUMP_MAX,
    EPOCH_MAX,
    EPOCH_TOLD_MAX,
    NOBODY,
    UNKNOWN_OFFSET,
    Address,
    Election,
    OffsetAndEpoch,
    ReplicaKey,
    Role,
    Timings,
    VoterHistory,
    VoterSet,
)

#: Each election that nobody wins doubles the time until the next, up to this often: where answers take longer than a
#: campaign lasts, no campaign would ever end.
ELECTION_DOUBLINGS_MAX: Final = 3
#: So many epochs may follow each other before timeouts are taken for too short. Each one more doubles them: on machines
#: without a processor to spare, leaders would otherwise be deposed faster than they can do anything.
EPOCHS_IN_A_ROW: Final = 2
TIMEOUT_DOUBLINGS_MAX: Final = 2
#: A leader ends the row when it is heard for this many timeouts without a silence as long as one of them.
STEADY_TIMEOUTS: Final = 10


class HistoryLost(Exception):
    """The leader's history lacks what was committed here: this node must not go on with it."""


class Core:
    """State and plumbing. The rules are the classes built on it, one topic each, up to RaftNode."""

    def __init__(
        self,
        *,
        local: ReplicaKey,
        is_controller: bool,
        addresses: tuple[Address, ...],
        log: LogView,
        election: Election,
        voters: VoterHistory,
        timings: Timings,
        draw: Callable[[int], int],
    ) -> None:
        """`draw(n)` gives a random number from 0 to n - 1."""
        self.local = local
        self.is_controller = is_controller
        self.addresses = addresses
        self.log = log
        # Who led before this run does not lead now because of it.
        self.election = Election(max(election.epoch, log.last_epoch), NOBODY, election.voted)
        if self.election.epoch != election.epoch:
            self.election = Election(self.election.epoch)
        self.voters = voters
        self.timings = timings
        self.draw = draw
        self.role = Role.UNATTACHED
        self.high_watermark: int | None = log.snapshot.offset if log.snapshot else None
        self.now_ms = 0
        self.deadline_ms: int | None = None
        self.question = Question()
        #: Campaigns that ran out of time since a leader was last heard.
        self.elections_failed = 0
        #: Epochs that have begun since there was a steady leader.
        self.unsteady_epochs = 0
        #: The last epoch of which its leader itself said that it is over.
        self.ended_epoch = -1
        #: A change of the log was handed out, and the log view has not moved yet.
        self.is_settling = False
        self._follower: Follower | None = None
        self._campaign: Campaign | None = None
        self._leader: Leader | None = None
        self._actions: list[Action] = []
        #: Requests that a leader had not answered when it ceased to be one.
        self._abandoned: list[tuple[Request, Token]] = []
        self._saved = election
        self._told = (NOBODY, -1)
        self._last_known_leader = election.leader_id

    def __repr__(self) -> str:
        leader = f" of {self.leader_id}" if self._follower else ""
        return (
            f"<RaftNode {self.local.id} {self.role.value}{leader} epoch={self.epoch} "
            f"log={self.log.start_offset}..{self.log.end_offset} high_watermark={self.high_watermark} "
            f"{self.voters.latest}>"
        )

    # What others may ask

    @property
    def epoch(self) -> int:
        return self.election.epoch

    @property
    def leader_id(self) -> int:
        if self._leader:
            return self.local.id
        return self._follower.leader_id if self._follower else NOBODY

    @property
    def leader_addresses(self) -> tuple[Address, ...]:
        if self._leader:
            return self.addresses
        return self._follower.leader_addresses if self._follower else ()

    @property
    def epoch_start_offset(self) -> int:
        assert self._leader, "only a leader's epoch has a known start"
        return self._leader.epoch_start_offset

    @property
    def is_voter(self) -> bool:
        return self.voters.latest.is_voter(self.local)

    @property
    def is_electable(self) -> bool:
        if self.epoch >= EPOCH_MAX and self.voters.latest.keys != (self.local,):
            return False
        return self.is_controller and (self.is_voter or self.may_be_needed_yet())

    def may_be_true(self, epoch: int) -> bool:
        """Whether an epoch that another node brings up unasked is one that a voter could have."""
        return 0 <= epoch < EPOCH_MAX and epoch <= self.epoch + EPOCH_JUMP_MAX

    def may_believe(self, reply: PeerReply) -> bool:
        """Whether the answer of a peer that was asked names an epoch that elections could have reached."""
        return reply.epoch <= max(EPOCH_TOLD_MAX, self.epoch + EPOCH_JUMP_MAX) and reply.epoch < EPOCH_MAX

    def may_be_needed_yet(self) -> bool:
        """Voted out, but the others may lack that record, and then cannot elect anyone against our longer log."""
        return any(voters.is_voter(self.local) for voters in self.voter_sets_in_question()[1:])

    def voter_sets_in_question(self) -> tuple[VoterSet, ...]:
        """The latest voter set, and the one before it for as long as the latest may still be lost."""
        latest, offset = self.voters.latest, self.voters.latest_offset
        return (latest,) if self._is_committed(offset) else (latest, self.voters.as_of(offset))

    def _is_committed(self, offset: int) -> bool:
        return self.high_watermark is not None and offset < self.high_watermark

    @property
    def other_voters(self) -> tuple[ReplicaKey, ...]:
        return tuple(key for key in self.voters.latest.keys if key.id != self.local.id)

    @property
    def last(self) -> OffsetAndEpoch:
        return OffsetAndEpoch(self.log.end_offset, self.log.last_epoch)

    # The pad

    def _begin(self, now_ms: int) -> None:
        self.now_ms = max(now_ms, self.now_ms)
        assert not self._actions

    def _finish(self) -> list[Action]:
        """All work of one event; who leads now is told last, when the rest of it has been done."""
        self.save_before_telling()
        for request, token in self._abandoned:
            self._answer_plainly(request, token, ErrorCode.not_leader_or_follower)
        self._abandoned.clear()
        told = (self.leader_id, self.epoch)
        if told != self._told:
            self._told = told
            self._actions.append(LeaderChanged(*told))
        actions, self._actions = self._actions, []
        return actions

    def _do(self, action: Action) -> None:
        self.save_before_telling()
        self._actions.append(action)

    def save_before_telling(self) -> None:
        """Nothing leaves before the epoch and the vote that it rests on are durable."""
        if (self.election.epoch, self.election.voted) != (self._saved.epoch, self._saved.voted):
            self._saved = self.election
            self._actions.append(SaveElection(self.election))

    def _send(self, to: int | None, request: Request) -> Send:
        send = Send(to, request)
        self._do(send)
        return send

    def _answer(self, token: Token, reply: Reply) -> None:
        self._do(Answer(token, reply))

    def _answer_plainly(self, request: Request, token: Token, error: ErrorCode) -> None:
        self._answer(token, self._reply_to(request, error))

    def _reply_to(self, request: Request, error: ErrorCode = ErrorCode.none) -> PeerReply:
        """A reply that says who leads, and nothing else."""
        leader_id, addresses, epoch = self.leader_id, self.leader_addresses, self.epoch
        if isinstance(request, VoteRequest):
            return VoteReply(error=error, epoch=epoch, leader_id=leader_id, leader_addresses=addresses)
        if isinstance(request, BeginEpochRequest):
            return BeginEpochReply(error=error, epoch=epoch, leader_id=leader_id, leader_addresses=addresses)
        if isinstance(request, EndEpochRequest):
            return EndEpochReply(error=error, epoch=epoch, leader_id=leader_id, leader_addresses=addresses)
        if isinstance(request, FetchRequest):
            return self._fetch_reply(error)
        return FetchSnapshotReply(
            error=error,
            epoch=epoch,
            leader_id=leader_id,
            leader_addresses=addresses,
            id=request.id,
            position=request.position,
        )

    def _fetch_reply(
        self,
        error: ErrorCode = ErrorCode.none,
        *,
        diverging: OffsetAndEpoch | None = None,
        snapshot: OffsetAndEpoch | None = None,
    ) -> FetchReply:
        return FetchReply(
            error=error,
            epoch=self.epoch,
            leader_id=self.leader_id,
            leader_addresses=self.leader_addresses,
            high_watermark=UNKNOWN_OFFSET if self.high_watermark is None else self.high_watermark,
            log_start=self.log.start_offset,
            diverging=diverging,
            snapshot=snapshot,
        )

    # Times

    def _random_election_timeout_ms(self) -> int:
        doublings = min(max(self.elections_failed, self._timeout_doublings), ELECTION_DOUBLINGS_MAX)
        timeout_ms = self.timings.election_timeout_ms << doublings
        return timeout_ms + self.draw(timeout_ms)

    @property
    def fetch_timeout_ms(self) -> int:
        """How long a leader, or a leader's majority, may be silent."""
        return self.timings.fetch_timeout_ms << self._timeout_doublings

    @property
    def _timeout_doublings(self) -> int:
        return min(max(self.unsteady_epochs - EPOCHS_IN_A_ROW, 0), TIMEOUT_DOUBLINGS_MAX)

    def _steady_since(self, since_ms: int, heard_ms: int) -> int:
        """Since when there has been no silence, now that a peer is heard which was last heard at `heard_ms`."""
        timeout_ms = self.timings.fetch_timeout_ms
        if self.now_ms - heard_ms >= timeout_ms:
            return self.now_ms
        if self.now_ms - since_ms >= STEADY_TIMEOUTS * timeout_ms:
            self.unsteady_epochs = 0
        return since_ms

    def _follower_deadline_ms(self) -> int:
        """Followers that lost their leader at the same moment do not all stand at the same moment."""
        timeout_ms = self.fetch_timeout_ms
        return self.now_ms + timeout_ms + self.draw(max(1, timeout_ms // 10))

    def _soon_ms(self, doubts: int = 0) -> int:
        """Little enough to matter to nobody, random enough that two do not stand at once."""
        delay_ms = 1 + self.draw(max(1, self.timings.election_timeout_ms // 10))
        return self.now_ms + delay_ms + doubts * (self.timings.retry_ms << min(doubts, 4))

    # The high watermark, which only ever rises

    def _raise_high_watermark(self, offset: int) -> None:
        if self.high_watermark is None or offset > self.high_watermark:
            self.high_watermark = offset
            self._do(HighWatermark(offset))
