"""The work that the rules hand back, to be carried out in order.

The contract of whoever carries it out:

- All actions of one call are done before the next call is made.
- A SaveElection, Truncate or InstallSnapshot is durable before any later action leaves.
- Every Send is followed by exactly one `answered`: with its reply, or with None after a failure or a timeout.
- After AppendControl: `appended`. After AppendRecords: `voters_appended` for every Voters record found in them,
  then `appended`. After Truncate: `appended`. Whenever `durable_offset` has moved: `synced`.
- After InstallSnapshot: `voters_appended(id.offset - 1, its voters)`, then `snapshot_installed`.
- A leader's own records are appended only after its LeaderChanged was carried out, in the current epoch,
  followed by `appended`.
"""

from typing import NamedTuple

from penstock.raft.messages import FetchReply, FetchSnapshotReply, FetchSnapshotRequest, Reply, Request
from penstock.raft.values import ControlRecord, Election, OffsetAndEpoch

#: Whatever the caller wants back with the answer.
Token = object


class SaveElection(NamedTuple):
    election: Election


class Send:
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


class AppendControl(NamedTuple):
    """Append these as one control batch of the current epoch; it must land at `offset`, the log's end."""

    records: tuple[ControlRecord, ...]
    offset: int


class Answer(NamedTuple):
    token: Token
    reply: Reply


class Serve(NamedTuple):
    """Read whole batches from `offset` on, put them into the reply's records, and answer with it."""

    token: Token
    reply: FetchReply
    offset: int


class ServeSnapshot(NamedTuple):
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


class HighWatermark(NamedTuple):
    """Everything below `offset` is committed."""

    offset: int


class LeaderChanged(NamedTuple):
    """-1: nobody is known to lead."""

    leader_id: int
    epoch: int


Action = (
    SaveElection
    | Send
    | Truncate
    | AppendRecords
    | AppendControl
    | Answer
    | Serve
    | ServeSnapshot
    | WriteSnapshot
    | InstallSnapshot
    | HighWatermark
    | LeaderChanged
)
