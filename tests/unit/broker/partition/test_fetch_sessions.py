"""Which clients may have fetch sessions, and which sessions belong to a follower."""

from typing import Any

from penstock.broker.partition.fetch_sessions import CONSUMER_REPLICA_ID, FetchSession, FetchSessions
from penstock.protocol.errors import ErrorCode
from penstock.protocol.fetch import FetchPartition, FetchRequest


class Partition:
    def __init__(self) -> None:
        self.followers: set[Any] = set()

    def add_follower(self, waiter: Any) -> None:
        self.followers.add(waiter)

    def remove_follower(self, waiter: Any) -> None:
        self.followers.discard(waiter)


def asked(replica: int, *, offset: int, session: int = 0, epoch: int = 0) -> FetchRequest:
    topics = [(b"t", [FetchPartition(0, 1, offset, 1, 0, 1000)])]
    return FetchRequest(replica, 0, 1, 1000, 0, session, epoch, topics, [], 7)


def opened(sessions: FetchSessions, request: FetchRequest) -> FetchSession:
    session = sessions.open(request, by_id=True, now_ms=0).session
    assert session is not None
    return session


def fresh() -> FetchSessions:
    return FetchSessions(10, iter(range(1, 100)).__next__)


def test_a_follower_that_lost_its_connection_is_heard_through_its_new_session_only() -> None:
    """Otherwise an older request, on a connection that is still open, would undo the newer one."""
    sessions, partition = fresh(), Partition()
    old = opened(sessions, asked(2, offset=5))
    old.wanted[b"t", 0].attach(partition)  # type: ignore[arg-type]
    new = opened(sessions, asked(2, offset=9))
    new.wanted[b"t", 0].attach(partition)  # type: ignore[arg-type]
    assert partition.followers == {new.wanted[b"t", 0]}
    late = sessions.open(asked(2, offset=6, session=old.id, epoch=1), by_id=True, now_ms=0)
    assert late.error is ErrorCode.fetch_session_id_not_found


def test_others_keep_their_sessions() -> None:
    sessions = fresh()
    kept = [
        opened(sessions, asked(3, offset=1)),
        *(opened(sessions, asked(CONSUMER_REPLICA_ID, offset=1)) for _ in "ab"),
    ]
    opened(sessions, asked(2, offset=1))
    for session in kept:
        following = asked(session.replica_id, offset=2, session=session.id, epoch=1)
        assert sessions.open(following, by_id=True, now_ms=0).error is ErrorCode.none


def test_only_followers_take_the_place_of_consumers_at_once() -> None:
    """A client may send any negative replica id."""
    sessions = FetchSessions(1, iter(range(1, 100)).__next__)
    consumer = opened(sessions, asked(CONSUMER_REPLICA_ID, offset=1))
    assert sessions.open(asked(-2, offset=1), by_id=True, now_ms=0).session is None
    following = asked(CONSUMER_REPLICA_ID, offset=2, session=consumer.id, epoch=1)
    assert sessions.open(following, by_id=True, now_ms=0).error is ErrorCode.none
    opened(sessions, asked(2, offset=1))


def wide(
    partitions: range, *, replica: int = CONSUMER_REPLICA_ID, session: int = 0, epoch: int = 0
) -> FetchRequest:
    topics = [(b"t", [FetchPartition(index, 1, 0, 1, 0, 1000) for index in partitions])]
    return FetchRequest(replica, 0, 1, 1000, 0, session, epoch, topics, [], 7)


def test_partitions_in_sessions_of_consumers_are_bounded() -> None:
    """A client may name partitions without end; beyond the bound it is served without a session."""
    sessions = FetchSessions(10, iter(range(1, 100)).__next__, partitions_max=10)
    first, second = opened(sessions, wide(range(6))), opened(sessions, wide(range(4)))
    beyond = sessions.open(wide(range(1)), by_id=True, now_ms=0)
    assert (beyond.session, len(beyond.wanted), beyond.error) == (None, 1, ErrorCode.none)
    grown = sessions.open(wide(range(6, 8), session=first.id, epoch=1), by_id=True, now_ms=0)
    assert (grown.session, grown.error) == (None, ErrorCode.fetch_session_id_not_found)
    # The others go on, and there is room again.
    assert sessions.open(wide(range(4), session=second.id, epoch=1), by_id=True, now_ms=0).session is second
    opened(sessions, wide(range(6)))
    assert sessions.open(wide(range(1)), by_id=True, now_ms=0).session is None
    opened(sessions, wide(range(10), replica=2))


def test_partitions_in_sessions_of_followers_have_a_bound_of_their_own() -> None:
    """Followers are let in although consumers use up what they may, and have no bottomless memory either."""
    sessions = FetchSessions(10, iter(range(1, 100)).__next__, partitions_max=10)
    opened(sessions, wide(range(10)))
    first = opened(sessions, wide(range(6), replica=2))
    beyond = sessions.open(wide(range(5), replica=3), by_id=True, now_ms=0)
    assert (beyond.session, len(beyond.wanted), beyond.error) == (None, 5, ErrorCode.none)
    opened(sessions, wide(range(4), replica=3))
    grown = sessions.open(wide(range(6, 8), replica=2, session=first.id, epoch=1), by_id=True, now_ms=0)
    assert (grown.session, grown.error) == (None, ErrorCode.fetch_session_id_not_found)
    opened(sessions, wide(range(6), replica=2))
