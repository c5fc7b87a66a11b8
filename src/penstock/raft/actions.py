"""The actions that the Raft rules return. The driver carries them out in order.

The driver keeps this contract:

- It carries out all actions of one call before it makes the next call.
- A SaveElection, Truncate or InstallSnapshot is durable before any later action leaves the node.
- It calls `answered` exactly once for every SendRequest: with the reply, or with None after a failure or a timeout.
- After AppendControlRecords it calls `appended`. After AppendRecords it calls `voters_appended` for every Voters
  record in them, then `appended`. After Truncate it calls `appended`. Whenever `durable_offset` has moved it calls
  `synced`.
- After InstallSnapshot it calls `voters_appended(id.offset - 1, voters)` with the voters of the snapshot, then
  `snapshot_installed`.
- A leader appends its own records only after its LeaderChanged was carried out, in the current epoch, and then calls
  `appended`.
"""

from typing import NamedTuple

from penstock.raft.types import (
    ControlRecord,
    ElectionState,
    FetchReply,
    FetchSnapshotReply,
    FetchSnapshotRequest,
    OffsetAndEpoch,
    Reply,
    Request,
)

#: Whatever the caller wants back with the answer.
Token = object


class SaveElection(NamedTuple):
    election: ElectionState


class SendRequest:
    """To a voter or leader by its id; to None: to any bootstrap server, in rotation. Two alike are still two."""

    __slots__ = ("request", "to")

    def __init__(self, to: int | None, request: Request) -> None:
        self.to = to
        self.request = request

    def __repr__(self) -> str:
        return f"Send(to={self.to}, request={self.request})"


class Truncate(NamedTuple):
    """The log shall end at `offset`."""

    offset: int


class AppendRecords(NamedTuple):
    """Append what the leader sent, at the log's end, and sync it in the background."""

    records: bytes


class AppendControlRecords(NamedTuple):
    """Append these as one control batch of the current epoch; it must land at `offset`, the log's end."""

    records: tuple[ControlRecord, ...]
    offset: int


class SendReply(NamedTuple):
    token: Token
    reply: Reply


class SendRecords(NamedTuple):
    """Read whole batches from `offset` on, put them into the reply's records, and answer with it."""

    token: Token
    reply: FetchReply
    offset: int


class SendSnapshot(NamedTuple):
    """Read the part that was asked for into the reply's size and data, or answer SNAPSHOT_NOT_FOUND."""

    token: Token
    request: FetchSnapshotRequest
    reply: FetchSnapshotReply


class WriteSnapshot(NamedTuple):
    """Position 0 begins a new file, and throws an unfinished one away."""

    id: OffsetAndEpoch
    position: int
    data: bytes


class InstallSnapshot(NamedTuple):
    """The whole of it is there: it takes the log's place, which goes on empty from its end."""

    id: OffsetAndEpoch


class HighWatermarkAdvanced(NamedTuple):
    """Everything below `offset` is committed."""

    offset: int


class LeaderChanged(NamedTuple):
    """-1: nobody is known to lead."""

    leader_id: int
    epoch: int


Action = (
    SaveElection
    | SendRequest
    | Truncate
    | AppendRecords
    | AppendControlRecords
    | SendReply
    | SendRecords
    | SendSnapshot
    | WriteSnapshot
    | InstallSnapshot
    | HighWatermarkAdvanced
    | LeaderChanged
)
