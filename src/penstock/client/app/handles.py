"""The database handle that a handler asks for by name: the driver's connection, or a session of SQLAlchemy on it.

Either way the transaction is the contract's: what the handler commits through a session is a savepoint of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

from penstock.client.app.settings import ApplicationError

__all__ = ["check_handle", "handle_named"]

SESSION: Final = "session"


def check_handle(name: str) -> None:
    """Raises ApplicationError where it cannot be given."""
    if name == SESSION:
        try:
            import sqlalchemy  # noqa: F401
        except ImportError:
            raise ApplicationError(
                "a handler's `session` is SQLAlchemy's: pip install 'penstock[outbox]', or take a `connection`"
            ) from None


@contextmanager
def handle_named(name: str, connection: Any) -> Iterator[Any]:
    if name != SESSION:
        yield connection
        return
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session
    from sqlalchemy.pool import StaticPool

    engine = create_engine(
        _dialect(type(connection).__module__),
        creator=lambda: connection,
        poolclass=StaticPool,
        pool_reset_on_return=None,
    )
    for end in ("do_commit", "do_rollback"):
        setattr(engine.dialect, end, _leave_to_the_contract)
    with (
        engine.connect() as bound,
        bound.begin(),
        Session(bound, join_transaction_mode="create_savepoint") as session,
    ):
        yield session
        session.commit()


def _leave_to_the_contract(connection: Any) -> None:
    pass


@lru_cache
def _dialect(module: str) -> str:
    return "postgresql+psycopg://" if module.startswith("psycopg") else "sqlite://"
