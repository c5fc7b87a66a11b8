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

#: Identifies the request that a reply belongs to. Only the driver knows what it is.
Token = object


class SaveElection(NamedTuple):
    election: ElectionState


class SendRequest:
    """`to` is a node id, or None for the next bootstrap server. Compared by identity: equal requests stay distinct."""

    __slots__ = ("request", "to")

    def __init__(self, to: int | None, request: Request) -> None:
        self.to = to
        self.request = request

    def __repr__(self) -> str:
        return f"Send(to={self.to}, request={self.request})"


class Truncate(NamedTuple):
    """Truncate the log so that it ends at `offset`."""

    offset: int


class AppendRecords(NamedTuple):
    """Append the leader's records at the end of the log and sync them in the background."""

    records: bytes


class AppendControlRecords(NamedTuple):
    """Append one control batch of the current epoch at `offset`, the end of the log."""

    records: tuple[ControlRecord, ...]
    offset: int


class SendReply(NamedTuple):
    token: Token
    reply: Reply


class SendRecords(NamedTuple):
    """Read whole batches from `offset` on into the reply's records, and send the reply."""

    token: Token
    reply: FetchReply
    offset: int


class SendSnapshot(NamedTuple):
    """Read the requested part into the reply's size and data, or reply with SNAPSHOT_NOT_FOUND."""

    token: Token
    request: FetchSnapshotRequest
    reply: FetchSnapshotReply


class WriteSnapshot(NamedTuple):
    """Position 0 starts a new file and deletes an unfinished one."""

    id: OffsetAndEpoch
    position: int
    data: bytes


class InstallSnapshot(NamedTuple):
    """The snapshot is complete: it replaces the log, which is then empty and starts at the snapshot's end."""

    id: OffsetAndEpoch


class HighWatermarkAdvanced(NamedTuple):
    """Everything below `offset` is committed."""

    offset: int


class LeaderChanged(NamedTuple):
    """`leader_id` is -1 if the leader is not known."""

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
