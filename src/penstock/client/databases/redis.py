"""The dedupe store in Redis: fast and shared by all machines, but never in one transaction with a result.

Redis may lose ids, and with them the knowledge that a message was handled: the last second or more when it crashes
(`appendfsync everysec`, snapshots) or when a replica takes over, because replication does not wait; and any id at any
time when memory is short and `maxmemory-policy` lets it evict keys. A lost id means that a redelivered message
may be handled again. No message is lost.
"""

from __future__ import annotations

import logging
import math
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote

from penstock.client.databases.base import (
    DatabaseLocation,
    StoreError,
    StoreUnavailable,
    index_key,
    index_keys,
)

__all__ = ["RedisStore"]

_PREFIX: Final = "penstock:seen"
_KEYS_MAX: Final = 1000
#: Sets many keys in one round trip: no command sets several keys with an expiry. Returns an error of the server
#: unchanged.
_MARK_SCRIPT: Final = """\
for _, key in ipairs(KEYS) do
    local done = redis.pcall('SET', key, '1', 'PX', ARGV[1])
    if done.err then return done end
end"""
#: Options in the URL override these: redis://host/0?socket_timeout=2
_CONNECTION_DEFAULTS: Final = {"socket_timeout": 10.0, "socket_connect_timeout": 10.0}
#: Errors that may go away: disk failure, running script, low memory, missing replicas, read-only replica. For an error
#: in a script, servers before Redis 7 prepend the name and line: "@user_script: 2: -OOM command not allowed".
_TRANSIENT_ERRORS: Final = re.compile(r"(@user_script: ?\d+: -?)*(MISCONF|BUSY|NOREPLICAS|OOM|READONLY)\b")
_LOGGER: Final = logging.getLogger("penstock.client.stores")


class RedisStore:
    """Ids expire by the server's clock."""

    shares_transactions = False

    def __init__(self, location: DatabaseLocation) -> None:
        self._shown = location.shown
        self._client = self._connect(location.address)
        try:
            self._check_server()
        except StoreError:
            self.close()
            raise

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        found: set[str] = set()
        prefix = _key_prefix(scope)
        for names in _chunks(index_keys(ids)):
            with self._translated_errors():
                values = self._client.mget([prefix + name for name in names])
            found.update(id for id, value in zip(names.values(), values, strict=True) if value is not None)
        return found

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        prefix, ttl_ms = _key_prefix(scope), _milliseconds(ttl_s)
        for names in _chunks(index_keys(ids)):
            keys = [prefix + name for name in names]
            with self._translated_errors():
                self._client.eval(_MARK_SCRIPT, len(keys), *keys, ttl_ms)

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        """The value is unique: it identifies our own claim when redis-py has sent it twice after a lost reply."""
        key, ours = _key_prefix(scope) + index_key(id), uuid.uuid4().hex.encode()
        with self._translated_errors():
            is_first = self._client.set(key, ours, nx=True, px=_milliseconds(ttl_s))
            return bool(is_first) or self._client.get(key) == ours

    def transaction(self) -> Any:
        raise StoreError(
            f"{self._shown}: Redis cannot commit an id and a result in one transaction: use SQLite or PostgreSQL"
        )

    def joined(self, connection: Any) -> Any:
        return self.transaction()

    def expire(self, now: float | None = None) -> int:
        """Does nothing: Redis deletes expired keys itself."""
        return 0

    def close(self) -> None:
        self._client.close()

    def _connect(self, url: str) -> Any:
        import redis  # optional
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        try:
            return redis.Redis.from_url(url, **{"retry": Retry(NoBackoff(), 1), **_CONNECTION_DEFAULTS})
        except ValueError as error:
            raise StoreError(f"{self._shown}: {error}") from None

    def _check_server(self) -> None:
        """Checks that the server is no cluster, and warns if it may evict ids, which causes uncounted duplicates."""
        try:
            with self._translated_errors():
                self._client.ping()
        except TypeError as error:  # an option that redis-py does not know
            raise StoreError(f"{self._shown}: {error}") from None
        try:
            with self._translated_errors():
                info = {**self._client.info("cluster"), **self._client.info("memory")}
        except StoreError:
            return  # the user may not have the right to run INFO
        if info.get("cluster_enabled"):
            raise StoreError(
                f"{self._shown} is a node of a Redis Cluster: a dedupe store needs a single server, with or without "
                "replicas"
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            _LOGGER.warning(
                "%s has maxmemory-policy %s: it may evict message ids when memory is short, and messages may then be "
                "handled twice; set it to noeviction",
                self._shown,
                policy,
            )

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        import redis

        try:
            yield
        except redis.AuthenticationError as error:
            raise StoreError(f"{self._shown} refuses the login: {error}") from error
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            raise StoreUnavailable(f"{self._shown} does not answer: {error}") from error
        except redis.RedisError as error:
            transient = (
                redis.ReadOnlyError,
                redis.OutOfMemoryError,
            )  # redis-py removes their codes from the text
            is_transient = isinstance(error, transient) or _TRANSIENT_ERRORS.match(str(error))
            kind = StoreUnavailable if is_transient else StoreError
            raise kind(f"{self._shown}: {error}") from error


def _key_prefix(scope: str) -> str:
    """Returns the prefix of a scope's keys. The quoted scope has no colon, so no two scopes share a key."""
    return f"{_PREFIX}:{quote(index_key(scope), safe='')}:"


def _chunks(names: dict[str, str]) -> Iterator[dict[str, str]]:
    items = list(names.items())
    for start in range(0, len(items), _KEYS_MAX):
        yield dict(items[start : start + _KEYS_MAX])


def _milliseconds(ttl_s: float) -> int:
    return max(1, math.ceil(ttl_s * 1000))
