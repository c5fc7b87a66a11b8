"""What the databases have in common: errors, URLs, index keys, tables, and the interface of dedupe stores.

    sqlite:///file.db                       in the working directory
    sqlite:////var/lib/app/file.db          absolute
    postgresql://user@host/database         any libpq URL; ?host=/run/postgresql for a Unix socket
    redis://host:6379/0, rediss://...       any redis-py URL; unix:///run/redis.sock for a Unix socket

SQLite and PostgreSQL take `create=false` for users who may not create tables; SQLite takes `timeout=SECONDS` for how
long to wait for another writer. Parsing a URL opens nothing. An id or scope is stored as it is where possible, and as
a hash where it is too long for an index. The SQL of a table is what the store runs where the table is missing, and
what users put into their migrations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from penstock.client.errors import ClientError

__all__ = (
    "INDEX_KEY_BYTES_MAX",
    "SEEN_TABLE",
    "DatabaseKind",
    "DatabaseLocation",
    "DedupeStore",
    "StoreError",
    "StoreUnavailable",
    "Table",
    "Transaction",
    "TransactionSpoiled",
    "index_key",
    "index_keys",
    "parse_database_url",
    "schema",
    "table_statements",
)


class StoreError(ClientError):
    """The store cannot be used with its present URL, rights or tables."""


class StoreUnavailable(StoreError):
    """The store does not answer. It may or may not have done what was asked; a retry may succeed."""


class TransactionSpoiled(StoreError):
    """The code in the transaction tried to end it, or ignored a failed statement. The transaction is rolled back.

    This is the only StoreError that the handler's own code causes.
    """


class Transaction(Protocol):
    """A transaction that is open until its block ends. It commits changes through `connection` and claims together."""

    @property
    def connection(self) -> Any:
        """A connection of `sqlite3` or `psycopg`. The user must not end its transaction."""

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        """Marks the id. Returns False if it is marked already. Waits while another transaction holds a claim on it."""

    def claim_all(self, scope: str, ids: Sequence[str], ttl_s: float) -> set[str]:
        """Marks the ids, and returns those that were not marked before."""


class DedupeStore(Protocol):
    """Any number of threads may use one store. Every method raises StoreUnavailable, StoreError."""

    #: Whether a result and its mark can be one transaction.
    shares_transactions: bool

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        """Returns the ids that are marked and have not expired. A scope is a group."""

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        """Marks the ids for `ttl_s` seconds. A new mark replaces an older one of the same id."""

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        """Marks the id without a transaction. If several claim it at the same time, only one gets True."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Commits when the block ends; rolls back when it raises.

        Raises StoreUnavailable if the connection is lost, even if the block has caught the error. It is then unknown
        whether the transaction was committed; the claim of a retry shows it. Raises TransactionSpoiled, and rolls back,
        if a commit would not keep all of the block's changes.
        """

    def joined(self, connection: Any) -> Transaction:
        """Returns the transaction that is already open on a connection to the same database, such as a ledger's."""

    def expire(self, now: float | None = None) -> int:
        """Deletes the ids that have expired by the store's own clock, or at `now`; returns their number."""

    def close(self) -> None:
        """Closes all connections."""


_BOOLEANS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_BUSY_TIMEOUT_S: Final = 30.0


class DatabaseKind(StrEnum):
    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"
    REDIS = "redis"


_SCHEMES: Final[Mapping[str, DatabaseKind]] = MappingProxyType(
    {
        "sqlite": DatabaseKind.SQLITE,
        "postgresql": DatabaseKind.POSTGRESQL,
        "postgres": DatabaseKind.POSTGRESQL,
        "redis": DatabaseKind.REDIS,
        "rediss": DatabaseKind.REDIS,
        "unix": DatabaseKind.REDIS,
    }
)
_URL_EXAMPLES: Final = "sqlite:///file.db, postgresql://user@host/database or redis://host:6379/0"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseLocation:
    kind: DatabaseKind
    #: A path for SQLite, a URL for the driver otherwise. It may contain a password.
    address: str
    #: The address for messages: without password and options.
    shown: str
    #: Whether to create missing tables.
    may_create: bool = True
    #: How long to wait for another writer of a SQLite file.
    busy_timeout_s: float = _BUSY_TIMEOUT_S


def parse_database_url(url: str) -> DatabaseLocation:
    """Raises StoreError."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreError(f"not a valid store URL ({error}): use {_URL_EXAMPLES}") from None
    driverless, _, driver = parts.scheme.partition("+")
    kind = _SCHEMES.get(driverless)
    if kind is None or "://" not in url:
        raise StoreError(
            f"{parts.scheme + '://' if parts.scheme else 'this'} is not a store URL: use {_URL_EXAMPLES}"
        )
    if parts.fragment:
        raise StoreError(f"a {kind} URL cannot have a fragment: write # as %23")
    if driver:
        raise StoreError(f"{_display_url(parts)}: remove +{driver}: the driver cannot be chosen")
    match kind:
        case DatabaseKind.SQLITE:
            return _sqlite_location(parts)
        case DatabaseKind.POSTGRESQL:
            return _postgresql_location(parts)
        case DatabaseKind.REDIS:
            return DatabaseLocation(kind=kind, address=url, shown=_display_url(parts))


def _sqlite_location(parts: SplitResult) -> DatabaseLocation:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = unquote(parts.path[1:])
    if parts.netloc == ":memory:" or (path in ("", ":memory:") and not parts.netloc):
        raise StoreError(
            "an in-memory SQLite database is lost when the process ends: use a file, sqlite:///file.db"
        )
    if parts.netloc:
        raise StoreError(
            f"{_display_url(parts)}: write the path after three slashes, sqlite:///{parts.netloc}{parts.path}"
        )
    may_create = _parse_boolean(options.pop("create", "true"), parts)
    timeout_s = _parse_seconds(options.pop("timeout", str(_BUSY_TIMEOUT_S)), parts)
    if options:
        raise StoreError(
            f"{_display_url(parts)}: unknown option {next(iter(options))}: the options are create and timeout"
        )
    return DatabaseLocation(
        kind=DatabaseKind.SQLITE,
        address=path,
        shown=_display_url(parts),
        may_create=may_create,
        busy_timeout_s=timeout_s,
    )


def _postgresql_location(parts: SplitResult) -> DatabaseLocation:
    """Passes all options except `create` to libpq unchanged."""
    options = [(option, *option.partition("=")) for option in parts.query.split("&") if option]
    ours = [value for _, name, _, value in options if name == "create"]
    query = "&".join(option for option, name, _, _ in options if name != "create")
    return DatabaseLocation(
        kind=DatabaseKind.POSTGRESQL,
        address=f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{query}" if query else ""),
        shown=_display_url(parts),
        may_create=_parse_boolean(ours[-1], parts) if ours else True,
    )


def _display_url(parts: SplitResult) -> str:
    """Returns the URL without user, password and options, even if a password contains characters like @ unescaped."""
    if parts.scheme == DatabaseKind.SQLITE:
        return f"sqlite://{parts.netloc}{parts.path}"
    host_and_path = f"{parts.netloc}{parts.path}".rpartition("@")[2]
    port = host_and_path.partition("/")[0].rpartition("]")[2].partition(":")[2]
    return f"{parts.scheme}://" + (host_and_path if not port or port.isdigit() else "...")


def _parse_boolean(text: str, parts: SplitResult) -> bool:
    if text.lower() not in _BOOLEANS:
        raise StoreError(f"{_display_url(parts)}: create is true or false, not {text!r}")
    return _BOOLEANS[text.lower()]


def _parse_seconds(text: str, parts: SplitResult) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 86_400:
        raise StoreError(f"{_display_url(parts)}: timeout is a number of seconds, not {text!r}")
    return seconds


#: A PostgreSQL index entry has room for two keys of this size.
INDEX_KEY_BYTES_MAX: Final = 1024
_HASH_PREFIX: Final = "sha256:"


def index_key(text: str) -> str:
    """Returns the stored form of a text, unique for each text: a text that looks like a hash is hashed too."""
    if text.isascii():  # the usual case: one byte per character
        is_kept = len(text) <= INDEX_KEY_BYTES_MAX
    else:
        is_kept = len(text) <= INDEX_KEY_BYTES_MAX and _fits_index(text)
    if is_kept and "\0" not in text and not text.startswith(_HASH_PREFIX):
        return text
    return _HASH_PREFIX + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def index_keys(ids: Iterable[str]) -> dict[str, str]:
    """Returns the ids by their stored forms, sorted, so that all transactions lock rows in the same order."""
    return dict(sorted((index_key(id), id) for id in ids))


def _fits_index(text: str) -> bool:
    try:
        return len(text.encode()) <= INDEX_KEY_BYTES_MAX
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    name: str
    #: The function that returns the statements, for error messages.
    schema_function: str
    statements: Mapping[DatabaseKind, tuple[str, ...]]


SEEN_TABLE: Final = Table(
    name="penstock_seen",
    schema_function="penstock.client.stores.schema",
    statements={
        DatabaseKind.SQLITE: (
            """\
CREATE TABLE IF NOT EXISTS penstock_seen (
    scope TEXT NOT NULL,
    id TEXT NOT NULL,
    expires_at REAL NOT NULL,
    PRIMARY KEY (scope, id)
) WITHOUT ROWID""",
            "CREATE INDEX IF NOT EXISTS penstock_seen_expires_at ON penstock_seen (expires_at)",
        ),
        DatabaseKind.POSTGRESQL: (
            """\
CREATE TABLE IF NOT EXISTS penstock_seen (
    scope text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (scope, id)
)""",
            "CREATE INDEX IF NOT EXISTS penstock_seen_expires_at ON penstock_seen (expires_at)",
        ),
    },
)


def schema(dialect: str) -> tuple[str, ...]:
    """Returns the statements that create a dedupe store's table in "sqlite" or "postgresql"."""
    return table_statements(SEEN_TABLE, dialect)


def table_statements(table: Table, dialect: str) -> tuple[str, ...]:
    """Raises StoreError for an unknown dialect."""
    for kind, found in table.statements.items():
        if kind == dialect:
            return found
    raise StoreError(f"there is no SQL for {dialect!r}: the dialects are {', '.join(table.statements)}")
