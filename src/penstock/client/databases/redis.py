"""Marks in Redis: fast, shared by all machines, and never one transaction with a result that is kept elsewhere.

What Redis may lose, and with it the knowledge that a message was handled: the last second or more of marks when it
crashes (`appendfsync everysec`, snapshots) or when a replica takes over, since replication does not wait; and any mark
at any time when memory is short and `maxmemory-policy` lets it evict keys. A lost mark means that a message may be
handled again if it comes again; no message is lost.
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

from penstock.client.stores.base import StoreError, StoreUnavailable
from penstock.client.stores.locating import Location
from penstock.client.stores.naming import stored, stored_ids

__all__ = ["RedisStore"]

_PREFIX: Final = "penstock:seen"
_KEYS_MAX: Final = 1000
#: One command for many ids, which would each need one of their own, since no other sets a key with its end. An error
#: is handed back as the server said it.
_MARK: Final = """\
for _, key in ipairs(KEYS) do
    local done = redis.pcall('SET', key, '1', 'PX', ARGV[1])
    if done.err then return done end
end"""
#: URLs may say otherwise: redis://host/0?socket_timeout=2
_DEFAULTS: Final = {"socket_timeout": 10.0, "socket_connect_timeout": 10.0}
#: Refusals that pass: the disk fails, a script runs, memory is short, replicas are missing, another server leads. Of
#: a script, servers before Redis 7 say them behind its name and line: "@user_script: 2: -OOM command not allowed".
_PASSING: Final = re.compile(r"(@user_script: ?\d+: -?)*(MISCONF|BUSY|NOREPLICAS|OOM|READONLY)\b")
_LOGGER: Final = logging.getLogger("penstock.client.stores")


class RedisStore:
    """Time is the server's."""

    shares_transactions = False

    def __init__(self, location: Location) -> None:
        self._shown = location.shown
        self._client = self._made(location.address)
        try:
            self._check_server()
        except StoreError:
            self.close()
            raise

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        found: set[str] = set()
        prefix = _prefix(scope)
        for names in _in_parts(stored_ids(ids)):
            with self._errors_told():
                values = self._client.mget([prefix + name for name in names])
            found.update(id for id, value in zip(names.values(), values, strict=True) if value is not None)
        return found

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        prefix, ttl_ms = _prefix(scope), _milliseconds(ttl_s)
        for names in _in_parts(stored_ids(ids)):
            keys = [prefix + name for name in names]
            with self._errors_told():
                self._client.eval(_MARK, len(keys), *keys, ttl_ms)

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        """The value tells whether it was our own claim whose answer got lost before it was sent again."""
        key, ours = _prefix(scope) + stored(id), uuid.uuid4().hex.encode()
        with self._errors_told():
            is_first = self._client.set(key, ours, nx=True, px=_milliseconds(ttl_s))
            return bool(is_first) or self._client.get(key) == ours

    def transaction(self) -> Any:
        raise StoreError(
            f"{self._shown}: Redis shares no transaction with a result: use SQLite or PostgreSQL for that"
        )

    def joined(self, connection: Any) -> Any:
        return self.transaction()

    def expire(self, now: float | None = None) -> int:
        """Redis does that by itself."""
        return 0

    def close(self) -> None:
        self._client.close()

    def _made(self, url: str) -> Any:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        try:
            return redis.Redis.from_url(url, **{"retry": Retry(NoBackoff(), 1), **_DEFAULTS})
        except ValueError as error:
            raise StoreError(f"{self._shown}: {error}") from None

    def _check_server(self) -> None:
        """Once for each store: marks that are evicted are duplicates that nobody counts."""
        try:
            with self._errors_told():
                self._client.ping()
        except TypeError as error:  # an option that redis-py does not know
            raise StoreError(f"{self._shown}: {error}") from None
        try:
            with self._errors_told():
                told = {**self._client.info("cluster"), **self._client.info("memory")}
        except StoreError:
            return  # not everyone may look at it
        if told.get("cluster_enabled"):
            raise StoreError(
                f"{self._shown} is a node of a Redis Cluster: marks need a single server, with replicas or not"
            )
        policy = told.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            _LOGGER.warning(
                "%s has maxmemory-policy %s: it may forget marks when memory is short, "
                "and messages may be handled twice; noeviction is right for a dedupe store",
                self._shown,
                policy,
            )

    @contextmanager
    def _errors_told(self) -> Iterator[None]:
        import redis

        try:
            yield
        except redis.AuthenticationError as error:
            raise StoreError(f"{self._shown} does not let us in: {error}") from error
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            raise StoreUnavailable(f"{self._shown} does not answer: {error}") from error
        except redis.RedisError as error:
            passing = (redis.ReadOnlyError, redis.OutOfMemoryError)  # whose names redis-py cuts off
            is_passing = isinstance(error, passing) or _PASSING.match(str(error))
            kind = StoreUnavailable if is_passing else StoreError
            raise kind(f"{self._shown}: {error}") from error


def _prefix(scope: str) -> str:
    """Of the keys of a scope, which has no colon here, so that no two scopes share a key."""
    return f"{_PREFIX}:{quote(stored(scope), safe='')}:"


def _in_parts(names: dict[str, str]) -> Iterator[dict[str, str]]:
    items = list(names.items())
    for start in range(0, len(items), _KEYS_MAX):
        yield dict(items[start : start + _KEYS_MAX])


def _milliseconds(ttl_s: float) -> int:
    return max(1, math.ceil(ttl_s * 1000))
