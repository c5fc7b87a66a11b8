"""The end of a log: the one file being written, and what keeps a failed write from leaving a trace."""

import logging
import os
from typing import Final

from penstock.log.segment import Segment
from penstock.protocol.errors import ApiError, ErrorCode

_logger = logging.getLogger("penstock.log")
_WRITE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class SharedFile:
    """A write descriptor that closes when the log and every flush under way have let go of it."""

    __slots__ = ("_users", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._users = 1

    def hold(self) -> "SharedFile":
        self._users += 1
        return self

    def drop(self) -> None:
        self._users -= 1
        if self._users == 0:
            os.close(self.fd)


class Tail:
    """The active segment opened for writing."""

    __slots__ = ("_refusal", "file", "segment")

    def __init__(self, segment: Segment, *, fresh: bool = False) -> None:
        self.segment = segment
        self.file = SharedFile(os.open(segment.path, _WRITE_FLAGS | (os.O_TRUNC if fresh else 0), 0o644))
        self._refusal: str | None = None

    def write(self, batch: memoryview | bytes | bytearray) -> None:
        """One write of the whole batch at the end, or an ApiError and the file as it was."""
        if self._refusal is not None:
            raise ApiError(ErrorCode.kafka_storage_error, self._refusal)
        try:
            written = os.pwrite(self.file.fd, batch, self.segment.size)
        except OSError as error:
            self._undo(str(error))
        else:
            if written != len(batch):
                self._undo(f"only {written} of {len(batch)} bytes were written")

    def close(self) -> None:
        """Nothing may be written through a descriptor number that could soon be another file's."""
        self._refusal = "the log is closed"
        self.file.drop()

    def _undo(self, reason: str) -> None:
        try:
            os.ftruncate(self.file.fd, self.segment.size)
        except OSError as error:
            self._refusal = (
                f"a failed write could not be undone ({error}); the log takes no more until it is reopened"
            )
            _logger.error(
                "log refuses appends", extra={"file": str(self.segment.path), "reason": self._refusal}
            )
        _logger.warning("append failed", extra={"file": str(self.segment.path), "reason": reason})
        raise ApiError(ErrorCode.kafka_storage_error, f"cannot write to the log: {reason}") from None
