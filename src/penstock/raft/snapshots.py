"""Catching up by snapshot: fetch it piece by piece, then let it take the log's place."""

from penstock.protocol.errors import ErrorCode
from penstock.raft.actions import InstallSnapshot, Send, WriteSnapshot
from penstock.raft.follower import Following
from penstock.raft.messages import FetchSnapshotReply
from penstock.raft.states import Download


class CatchingUp(Following):
    def _snapshot_answered(self, sent: Send, reply: FetchSnapshotReply | None, *, is_refused: bool) -> None:
        if not self._is_answer_awaited(sent, is_refused=is_refused, has_failed=reply is None):
            return
        assert self._follower
        assert reply
        download = self._follower.download
        if self.is_denial(self._follower, sent, reply):
            self._leader_denied()
        elif reply.epoch != self.epoch or download is None:
            self._question_failed()
        elif reply.error is not ErrorCode.none or not self._is_next_piece(download, reply):
            # The leader has a newer snapshot by now, or lost this one: a fetch will tell.
            self._follower.download = None
            self._question_failed()
        else:
            self._heard_leader(self._follower)
            self._take_piece(download, reply)

    def _is_next_piece(self, download: Download, reply: FetchSnapshotReply) -> bool:
        if (reply.id, reply.position) != (download.id, download.position):
            return False
        return bool(reply.data) or reply.position == reply.size

    def _take_piece(self, download: Download, reply: FetchSnapshotReply) -> None:
        self._do(WriteSnapshot(download.id, download.position, reply.data))
        download.position += len(reply.data)
        if download.position >= reply.size:
            self.is_settling = True
            self._do(InstallSnapshot(download.id))

    def _snapshot_is_installed(self) -> None:
        """It holds committed records only, and the log begins at its end."""
        assert self.log.snapshot
        if self._follower:
            self._follower.download = None
        self.is_settling = False
        self.voters.truncate(self.log.snapshot.offset)
        self._raise_high_watermark(self.log.snapshot.offset)
