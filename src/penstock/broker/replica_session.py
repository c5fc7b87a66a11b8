"""A follower's fetch session with one leader (KIP-227): each request tells only what has changed since the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from penstock.broker.following import Following, error_of
from penstock.protocol.errors import ErrorCode
from penstock.protocol.fetch import FetchPartition
from penstock.protocol.replica_fetch import NO_SESSION, SESSION_BEGINS, FetchedAnswer
from penstock.replication.follower import FetchPosition

_EPOCH_MAX: Final = 2**31 - 1

#: Topic id and partition.
Key = tuple[bytes, int]


class Question(NamedTuple):
    """What the leader was last told of a partition."""

    following: Following
    position: FetchPosition


class SessionRequest(NamedTuple):
    session_id: int
    session_epoch: int
    topics: list[tuple[bytes, list[FetchPartition]]]
    forgotten: list[tuple[bytes, list[int]]]


class ReplicaSession:
    def __init__(self) -> None:
        self.asked: dict[Key, Question] = {}
        self._id = NO_SESSION
        self._epoch = SESSION_BEGINS
        self._changed: dict[Key, Following] = {}
        self._dropped: dict[Key, None] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self.asked or key in self._changed

    @property
    def is_empty(self) -> bool:
        """The next request would ask for nothing."""
        return not self.asked and not self._changed

    def ask(self, following: Following) -> None:
        """The partition is new, or its position has moved."""
        self._changed[following.key] = following
        self._dropped.pop(following.key, None)

    def drop(self, key: Key) -> None:
        self._changed.pop(key, None)
        if self.asked.pop(key, None) is not None:
            self._dropped[key] = None

    def begin_anew(self) -> None:
        """The leader may not know what we think it knows: the next request tells everything."""
        self._epoch = SESSION_BEGINS

    def request(self, bytes_max: Mapping[Key, int], default_bytes_max: int) -> SessionRequest:
        """The next request; from here on the leader is taken to know what it says."""
        if self._epoch == SESSION_BEGINS:
            for key, question in self.asked.items():
                self._changed.setdefault(key, question.following)
            self._dropped.clear()
        topics: dict[bytes, list[FetchPartition]] = {}
        for key, following in self._changed.items():
            position = following.position()
            self.asked[key] = Question(following, position)
            asked = _as_asked(key[1], position, bytes_max.get(key, default_bytes_max))
            topics.setdefault(key[0], []).append(asked)
        forgotten: dict[bytes, list[int]] = {}
        for topic_id, index in self._dropped:
            forgotten.setdefault(topic_id, []).append(index)
        request = SessionRequest(self._id, self._epoch, list(topics.items()), list(forgotten.items()))
        self._changed.clear()
        self._dropped.clear()
        return request

    def answered(self, answer: FetchedAnswer) -> ErrorCode | None:
        """None: the session goes on. An error: it begins anew, and the answer is worth nothing."""
        if answer.error != ErrorCode.none.value:
            self.begin_anew()
            return error_of(answer.error)
        if self._epoch != SESSION_BEGINS and answer.session_id != self._id:
            self.begin_anew()
            return ErrorCode.fetch_session_id_not_found
        self._id = answer.session_id
        if self._id == NO_SESSION:
            self.begin_anew()  # the leader has no room for sessions
        else:
            self._count_request()
        return None

    def given_up(self) -> None:
        """An answer will not be seen. The leader has most likely counted the request; else it will say so."""
        if self._epoch != SESSION_BEGINS:
            self._count_request()

    def _count_request(self) -> None:
        self._epoch = 1 if self._epoch == _EPOCH_MAX else self._epoch + 1


def _as_asked(index: int, position: FetchPosition, bytes_max: int) -> FetchPartition:
    return FetchPartition(
        index,
        position.leader_epoch,
        position.offset,
        position.last_fetched_epoch,
        position.log_start,
        bytes_max,
    )
