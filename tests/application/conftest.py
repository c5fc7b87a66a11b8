"""Fixtures for applications: a topic, and real PostgreSQL and Redis servers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.application.apps import QUICK
from tests.servers import PostgresServer, RedisServer

from penstock.client import Penstock


@pytest.fixture
def app(bootstrap: str) -> Iterator[Penstock]:
    with Penstock(bootstrap, settings=QUICK) as made:
        yield made


@pytest.fixture
def topic(app: Penstock, unique: Callable[[str], str]) -> str:
    name = unique("orders")
    app.create_topic(name, partitions=2)
    return name


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """For all tests that do not stop it."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """An empty database; tests of one process have it one after the other."""
    return postgres_server.empty_database()


@pytest.fixture(scope="session")
def second_postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def restartable_postgres(second_postgres: PostgresServer) -> PostgresServer:
    """To stop, kill and restart; take its `empty_database()`."""
    return second_postgres if second_postgres.is_running else second_postgres.start()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """For all tests that do not stop it."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """An empty database; other processes of tests have servers of their own."""
    redis_server.call("FLUSHALL")
    return redis_server.url()


@pytest.fixture
def fresh_redis() -> Iterator[RedisServer]:
    """A server of one's own, to stop, kill and restart; what it has answered is on disk."""
    with RedisServer(appendonly="yes", appendfsync="always") as server:
        yield server


@pytest.fixture(params=["sqlite", "redis", "postgresql"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return _url(request, tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def sql_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return _url(request, tmp_path)


def _url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    fixtures = {"redis": "redis_url", "postgresql": "postgres_url"}
    if request.param in fixtures:
        return str(request.getfixturevalue(fixtures[request.param]))
    return f"sqlite:///{tmp_path}/seen.db"
