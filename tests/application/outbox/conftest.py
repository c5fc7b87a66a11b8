"""Databases for tests of the outbox, empty at first."""

import itertools
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from tests.servers import PostgresServer

SQLITE, POSTGRESQL = "sqlite", "postgresql"


@pytest.fixture(scope="session")
def new_schema(postgres_server: PostgresServer) -> Callable[[], str]:
    """The URL of an empty schema: much faster to make than a database."""
    database = postgres_server.new_database()
    numbers = itertools.count()

    def make() -> str:
        name = f"shop_{next(numbers)}"
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"{database}?options=-csearch_path%3D{name}"

    return make


@pytest.fixture
def postgres_url(new_schema: Callable[[], str]) -> str:
    return new_schema()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}"


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def url(request: pytest.FixtureRequest) -> str:
    """Of either kind."""
    return str(request.getfixturevalue(f"{request.param if request.param == SQLITE else 'postgres'}_url"))
