"""Where a store or ledger is, by its URL. Pure: nothing is opened here.

    sqlite:///file.db                       in the working folder
    sqlite:////var/lib/app/file.db          absolute
    postgresql://user@host/database         whatever libpq takes, ?host=/run/postgresql for a Unix socket
    redis://host:6379/0, rediss://...       whatever redis-py takes; unix:///run/redis.sock for a Unix socket

SQLite and PostgreSQL take `create=false` for users who may not create tables; SQLite `timeout=SECONDS` for how long to
wait for another writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from penstock.client.stores.base import StoreError

__all__ = ["Kind", "Location", "locate"]

_TRUTH: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_BUSY_TIMEOUT_S: Final = 30.0


class Kind(StrEnum):
    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"
    REDIS = "redis"


_SCHEMES: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "sqlite": Kind.SQLITE,
        "postgresql": Kind.POSTGRESQL,
        "postgres": Kind.POSTGRESQL,
        "redis": Kind.REDIS,
        "rediss": Kind.REDIS,
        "unix": Kind.REDIS,
    }
)
_KNOWN: Final = "sqlite:///file.db, postgresql://user@host/database or redis://host:6379/0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    kind: Kind
    #: A path for SQLite, a URL for the driver otherwise. It may hold a password.
    address: str
    #: The same for people: without password and options.
    shown: str
    #: Whether to make the tables if they are missing.
    may_create: bool = True
    #: How long to wait for another writer of a SQLite file.
    busy_timeout_s: float = _BUSY_TIMEOUT_S


def locate(url: str) -> Location:
    """Raises StoreError with what is wrong about it."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreError(f"not a URL of a store ({error}): give {_KNOWN}") from None
    driverless, _, driver = parts.scheme.partition("+")
    kind = _SCHEMES.get(driverless)
    if kind is None or "://" not in url:
        raise StoreError(
            f"{parts.scheme + '://' if parts.scheme else 'this'} is no URL of a store: give {_KNOWN}"
        )
    if parts.fragment:
        raise StoreError(f"a {kind} URL has no part after #: write it as %23")
    if driver:
        raise StoreError(f"{_shown(parts)}: leave out +{driver}, the driver is not chosen here")
    match kind:
        case Kind.SQLITE:
            return _sqlite(parts)
        case Kind.POSTGRESQL:
            return _postgresql(parts)
        case Kind.REDIS:
            return Location(kind=kind, address=url, shown=_shown(parts))


def _sqlite(parts: SplitResult) -> Location:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = unquote(parts.path[1:])
    if parts.netloc == ":memory:" or (path in ("", ":memory:") and not parts.netloc):
        raise StoreError(
            "SQLite in memory forgets everything when the process ends: give a file, sqlite:///file.db"
        )
    if parts.netloc:
        raise StoreError(
            f"{_shown(parts)}: a path begins after three slashes, sqlite:///{parts.netloc}{parts.path}"
        )
    may_create = _truth(options.pop("create", "true"), parts)
    timeout_s = _seconds(options.pop("timeout", str(_BUSY_TIMEOUT_S)), parts)
    if options:
        raise StoreError(
            f"{_shown(parts)}: there is no option {next(iter(options))}, only create and timeout"
        )
    return Location(
        kind=Kind.SQLITE,
        address=path,
        shown=_shown(parts),
        may_create=may_create,
        busy_timeout_s=timeout_s,
    )


def _postgresql(parts: SplitResult) -> Location:
    """What is not ours goes to libpq letter by letter."""
    options = [(option, *option.partition("=")) for option in parts.query.split("&") if option]
    ours = [value for _, name, _, value in options if name == "create"]
    query = "&".join(option for option, name, _, _ in options if name != "create")
    return Location(
        kind=Kind.POSTGRESQL,
        address=f"{parts.scheme}://{parts.netloc}{parts.path}" + (f"?{query}" if query else ""),
        shown=_shown(parts),
        may_create=_truth(ours[-1], parts) if ours else True,
    )


def _shown(parts: SplitResult) -> str:
    """Without what may be a password, also one with signs in it that should have been written as %40 or the like."""
    if parts.scheme == Kind.SQLITE:
        return f"sqlite://{parts.netloc}{parts.path}"
    place = f"{parts.netloc}{parts.path}".rpartition("@")[2]
    port = place.partition("/")[0].rpartition("]")[2].partition(":")[2]
    return f"{parts.scheme}://" + (place if not port or port.isdigit() else "...")


def _truth(text: str, parts: SplitResult) -> bool:
    if text.lower() not in _TRUTH:
        raise StoreError(f"{_shown(parts)}: create is true or false, not {text!r}")
    return _TRUTH[text.lower()]


def _seconds(text: str, parts: SplitResult) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 86_400:
        raise StoreError(f"{_shown(parts)}: timeout is a number of seconds, not {text!r}")
    return seconds
