"""Servers that stores and ledgers are kept in: those of the tests, but with the durability that they ship with."""

from typing import Any

from tests.servers import PostgresServer, RedisServer


class DurablePostgres(PostgresServer):
    """Commits are on the disk when they are answered, which the tests do without."""

    def command(self) -> list[str]:
        return [*super().command(), "-c", "fsync=on", "-c", "full_page_writes=on"]


def durable_redis() -> RedisServer:
    """What was answered in the last second may be lost with the machine."""
    return RedisServer(appendonly="yes", appendfsync="everysec")


STARTED: dict[str, Any] = {"postgres": DurablePostgres, "redis": durable_redis}


def emptied(server: PostgresServer | RedisServer) -> str:
    """The URL of a place with nothing in it."""
    if isinstance(server, PostgresServer):
        return server.new_database()
    server.call("FLUSHALL")
    return server.url()
