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
    """A store that cannot work as it is: a sentence for whoever set it up."""


class StoreUnavailable(StoreError):
    """The store does not answer, or not now. What was asked for may have been done, or not; ask again later."""


class TransactionSpoiled(StoreError):
    """The code inside has ended the transaction or tried to, or went on after a statement failed: nothing is kept.

    The only StoreError that is the fault of that code.
    """


class Transaction(Protocol):
    """Open until its block ends. What is done through `connection` and the claims are kept together, or not at all."""

    @property
    def connection(self) -> Any:
        """Of the driver: `sqlite3` or `psycopg`. Its transaction is not the user's to end."""

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        """Mark it; False if it is marked already. Whoever asks while another's claim is open waits for its end."""

    def claim_all(self, scope: str, ids: Sequence[str], ttl_s: float) -> set[str]:
        """Those of a batch that were not marked, and now are."""


class DedupeStore(Protocol):
    """Any number of threads may use one store. Every method raises StoreUnavailable, StoreError."""

    #: Whether result and mark can be one transaction.
    shares_transactions: bool

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        """Those that are marked and not too old. A scope is a group."""

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        """From now on they are seen, for so long; if they were marked before, the new time counts."""

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        """Mark it alone, in no transaction. Of all who claim an id at a time, one is told True."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Committed when the block ends, rolled back when it raises.

        Raises StoreUnavailable when the database went away, whatever the block made of that: nobody knows then whether
        it was committed, and the claim tells when it is tried again. Raises TransactionSpoiled, and rolls back, where
        a commit would not have kept what the block did.
        """

    def joined(self, connection: Any) -> Transaction:
        """The transaction that is open on a connection to the same database, of a ledger for instance."""

    def expire(self, now: float | None = None) -> int:
        """Forget what is too old by the store's own clock, or at `now`; how many that were."""

    def close(self) -> None:
        """Nothing is open afterwards."""


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
    #: A path for SQLite, a URL for the driver otherwise. It may hold a password.
    address: str
    #: The same for people: without password and options.
    shown: str
    #: Whether to make the tables if they are missing.
    may_create: bool = True
    #: How long to wait for another writer of a SQLite file.
    busy_timeout_s: float = _BUSY_TIMEOUT_S


def parse_database_url(url: str) -> DatabaseLocation:
    """Raises StoreError with what is wrong about it."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreError(f"not a URL of a store ({error}): give {_URL_EXAMPLES}") from None
    driverless, _, driver = parts.scheme.partition("+")
    kind = _SCHEMES.get(driverless)
    if kind is None or "://" not in url:
        raise StoreError(
            f"{parts.scheme + '://' if parts.scheme else 'this'} is no URL of a store: give {_URL_EXAMPLES}"
        )
    if parts.fragment:
        raise StoreError(f"a {kind} URL has no part after #: write it as %23")
    if driver:
        raise StoreError(f"{_display_url(parts)}: leave out +{driver}, the driver is not chosen here")
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
            "SQLite in memory forgets everything when the process ends: give a file, sqlite:///file.db"
        )
    if parts.netloc:
        raise StoreError(
            f"{_display_url(parts)}: a path begins after three slashes, sqlite:///{parts.netloc}{parts.path}"
        )
    may_create = _parse_boolean(options.pop("create", "true"), parts)
    timeout_s = _parse_seconds(options.pop("timeout", str(_BUSY_TIMEOUT_S)), parts)
    if options:
        raise StoreError(
            f"{_display_url(parts)}: there is no option {next(iter(options))}, only create and timeout"
        )
    return DatabaseLocation(
        kind=DatabaseKind.SQLITE,
        address=path,
        shown=_display_url(parts),
        may_create=may_create,
        busy_timeout_s=timeout_s,
    )


def _postgresql_location(parts: SplitResult) -> DatabaseLocation:
    """What is not ours goes to libpq letter by letter."""
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
    """Without what may be a password, also one with signs in it that should have been written as %40 or the like."""
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


#: An entry of a PostgreSQL index has room for two of these.
INDEX_KEY_BYTES_MAX: Final = 1024
_HASH_PREFIX: Final = "sha256:"


def index_key(text: str) -> str:
    """Two texts never have the same stored form: what looks like a hash is hashed too."""
    if text.isascii():  # the usual case, and its bytes need no counting
        is_kept = len(text) <= INDEX_KEY_BYTES_MAX
    else:
        is_kept = len(text) <= INDEX_KEY_BYTES_MAX and _fits_index(text)
    if is_kept and "\0" not in text and not text.startswith(_HASH_PREFIX):
        return text
    return _HASH_PREFIX + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def index_keys(ids: Iterable[str]) -> dict[str, str]:
    """The stored form of each id, once, with the id itself; sorted, so that all lock rows in the same order."""
    return dict(sorted((index_key(id), id) for id in ids))


def _fits_index(text: str) -> bool:
    try:
        return len(text.encode()) <= INDEX_KEY_BYTES_MAX
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    name: str
    #: Where the statements for it are to be had, for error messages.
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
    """The statements that make a dedupe store's table in "sqlite" or "postgresql"."""
    return table_statements(SEEN_TABLE, dialect)


def table_statements(table: Table, dialect: str) -> tuple[str, ...]:
    """Raises StoreError for a dialect that has none."""
    for kind, found in table.statements.items():
        if kind == dialect:
            return found
    raise StoreError(f"there is no SQL for {dialect!r}: the dialects are {', '.join(table.statements)}")
