"""The query as a group: told when something has changed, and again before brokers forget it."""

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
    """Notes what is committed, and fails on demand."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.is_away = False

    def commit(self, cluster, group, committed, *, metadata) -> None:
        assert metadata == offsets.GROUP_METADATA
        if self.is_away:
            raise Unavailable("nobody is there")
        self.told += committed.values()


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


def test_it_is_told_what_changes_and_only_that(group, clock):
    query = made(clock)
    for offset in (3, 3, 5, 5, 5, 8):
        query.tell(at(offset))
    assert group.told == [3, 5, 8]


def test_an_idle_query_is_not_forgotten(group, clock):
    query = made(clock)
    for _ in range(3):
        query.tell(at(3))
        clock.now_ms += 700_000
    assert group.told == [3, 3, 3]


def test_a_group_that_is_away_is_left_alone_for_a_while(group, clock, caplog):
    query = made(clock)
    query.tell(at(1))
    group.is_away = True
    query.tell(at(2))
    group.is_away = False
    query.tell(at(3))
    assert group.told == [1]
    clock.now_ms += 10_000
    query.tell(at(3))
    assert group.told == [1, 3]
    assert "group g does not show how far the query has come: nobody is there" in caplog.text


def test_a_query_without_a_group_commits_nothing(group, clock):
    made(clock, None).tell(at(3))
    made(clock).tell(Position({}))
    assert group.told == []
