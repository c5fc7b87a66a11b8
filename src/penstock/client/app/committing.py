"""What may become of a commit: kept, refused, or nobody knows."""

from __future__ import annotations

from typing import Any

from penstock.client.errors import ClientError

__all__ = ["CommitLost", "CommitRefused", "commit_error"]


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
