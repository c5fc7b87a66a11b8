"""What may become of a commit (kept, refused, or nobody knows), and the note that is kept with a position.

The note names the contract under which the position was committed, so that an application notices when a group is
used under another one. At most once it also says up to where messages were finished: positions are ahead of that.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from penstock.client.errors import ClientError

__all__ = ["CommitLost", "CommitRefused", "Note", "commit_error", "read_note"]

_NOTE: Final = re.compile(r"penstock (?P<contract>[a-z-]+)(?: done=(?P<done>\d{1,19}))?")


class Note(NamedTuple):
    contract: str
    #: The first offset that is not known to be finished; None where the contract does not say.
    done: int | None = None

    def __str__(self) -> str:
        return f"penstock {self.contract}" + ("" if self.done is None else f" done={self.done}")


def read_note(text: str | None) -> Note | None:
    """None for what no application of ours has committed."""
    match = _NOTE.fullmatch(text or "")
    if match is None:
        return None
    return Note(match["contract"], None if match["done"] is None else int(match["done"]))


class CommitRefused(ClientError):
    """The group knows nothing of this member any more: nothing was committed."""


class CommitLost(ClientError):
    """Nobody knows whether the position was committed."""


def commit_error(error: Any) -> ClientError:
    """What an error of the client library says of it."""
    from confluent_kafka import KafkaError

    definite = {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError._NO_OFFSET,
    }
    kind = CommitRefused if error.code() in definite else CommitLost
    return kind(f"the position was not committed: {error.str()}")
