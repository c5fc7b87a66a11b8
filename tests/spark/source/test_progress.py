"""The progress of a query is committed to its group when it changes, and again before brokers expire it."""

from uuid import UUID

import pytest

from penstock.client.errors import Unavailable
from penstock.client.wire.settings import ConnectionSettings
from penstock.spark import offsets
from penstock.spark.offsets import GroupProgress, Position


class Clock:
    def __init__(self) -> None:
        self.now_ms = 0.0

    def deadline(self, timeout_ms: float):
        end, clock = self.now_ms + timeout_ms, self
        return type("At", (), {"is_over": property(lambda _: clock.now_ms >= end)})()


class Group:
    """Records what is committed, and fails on demand."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.is_away = False

    def commit(self, cluster, group, committed, *, metadata) -> None:
        assert metadata == offsets.GROUP_METADATA
        if self.is_away:
            raise Unavailable("no broker answers")
        self.committed += committed.values()


@pytest.fixture
def group(monkeypatch) -> Group:
    made = Group()
    monkeypatch.setattr(offsets, "commit_offsets", made.commit)
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(clock: Clock, name: str | None = "g") -> GroupProgress:
    return GroupProgress(ConnectionSettings(bootstrap=(("h", 1),)), name, deadline=clock.deadline)


def at(offset: int) -> Position:
    return Position.of({("t", 0): offset}, {"t": UUID(int=1)})


def test_only_changes_are_committed(group, clock):
    query = made(clock)
    for offset in (3, 3, 5, 5, 5, 8):
        query.commit(at(offset))
    assert group.committed == [3, 5, 8]


def test_the_offsets_of_an_idle_query_are_committed_again(group, clock):
    query = made(clock)
    for _ in range(3):
        query.commit(at(3))
        clock.now_ms += 700_000
    assert group.committed == [3, 3, 3]


def test_after_a_failure_there_is_a_pause(group, clock, caplog):
    query = made(clock)
    query.commit(at(1))
    group.is_away = True
    query.commit(at(2))
    group.is_away = False
    query.commit(at(3))
    assert group.committed == [1]
    clock.now_ms += 10_000
    query.commit(at(3))
    assert group.committed == [1, 3]
    assert "group g: the progress of the query could not be committed: no broker answers" in caplog.text


def test_a_query_without_a_group_commits_nothing(group, clock):
    made(clock, None).commit(at(3))
    made(clock).commit(Position({}))
    assert group.committed == []
