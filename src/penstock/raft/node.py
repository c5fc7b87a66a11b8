"""One member of the quorum, voter or observer: takes events, hands back the work to do."""

from collections.abc import Callable

from penstock.raft.actions import Action, Send, Token
from penstock.raft.log_view import LogView
from penstock.raft.messages import PeerReply, Request
from penstock.raft.values import (
    NOBODY,
    Address,
    Election,
    QuorumView,
    ReplicaKey,
    Role,
    Timings,
    Voter,
    VoterHistory,
    VoterSet,
)


class RaftNode:
    """Every method that returns actions expects them to be carried out before the next call; see actions.py."""

    role: Role
    epoch: int
    leader_id: int
    leader_addresses: tuple[Address, ...]
    high_watermark: int | None
    epoch_start_offset: int  # of the leader: where its epoch began
    voters: VoterHistory

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
        self.leader_id = NOBODY

    def start(self, now_ms: int) -> list[Action]:
        """Begin; a sole voter leads at once."""
        return []

    def tick(self, now_ms: int) -> list[Action]:
        """Time has passed; due at `next_deadline_ms`."""
        return []

    def next_deadline_ms(self) -> int | None:
        return None

    def received(self, request: Request, token: Token, now_ms: int) -> list[Action]:
        return []

    def answered(
        self, sent: Send, reply: PeerReply | None, now_ms: int, *, refused: bool = False
    ) -> list[Action]:
        """None: there was no answer; refused: the peer's host closed or refused the connection."""
        return []

    def appended(self, now_ms: int) -> list[Action]:
        """The log's end has moved."""
        return []

    def synced(self, now_ms: int) -> list[Action]:
        """The log's durable offset has moved."""
        return []

    def voters_appended(self, offset: int, voters: VoterSet) -> None:
        """A Voters record was found in what was appended, or in the snapshot that was installed."""

    def add_voter(self, voter: Voter, token: Token, now_ms: int) -> list[Action]:
        return []

    def remove_voter(self, key: ReplicaKey, token: Token, now_ms: int) -> list[Action]:
        return []

    def update_voter(self, voter: Voter, token: Token, now_ms: int) -> list[Action]:
        return []

    def resign(self, now_ms: int) -> list[Action]:
        """A leader that is about to stop hands over; anyone else has nothing to do."""
        return []

    def snapshot_taken(self, now_ms: int) -> list[Action]:
        """The log view has a newer snapshot of its own making."""
        return []

    def snapshot_installed(self, now_ms: int) -> list[Action]:
        return []

    def describe(self, now_ms: int) -> QuorumView:
        raise NotImplementedError
