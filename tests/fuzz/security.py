"""Requests about access rules, quotas, SCRAM credentials and delegation tokens, with hostile values.

`Denied` sends them, and every other request, as a client that no rule allows anything: it names what belongs to others.
`Confined` sends them as an operator who may change security, and damages only what belongs to its prey.
"""

import datetime
import struct
import uuid
from dataclasses import replace
from typing import Any

from tests.fuzz.hostile import INT8, INT32, INT64, INTERNAL, TABLE, HostileRequests, Knowledge

from penstock.broker.network.apis import Api

DESCRIBE_ACLS, CREATE_ACLS, DELETE_ACLS = 29, 30, 31
TOKEN_APIS = (38, 39, 40, 41)
QUOTA_APIS = (48, 49)
SCRAM_APIS = (50, 51)
SECURITY_APIS = (DESCRIBE_ACLS, CREATE_ACLS, DELETE_ACLS, *QUOTA_APIS, *SCRAM_APIS, *TOKEN_APIS)
SECURITY_SHARE = 0.5
#: Of the requests that select rules, how many select all of a principal.
BROAD_SHARE = 0.4
#: Requests that are made before earlier ones are sent again: making one costs more than serving it.
POOL = 3_000

PREY_USERS = ("prey-user", "prey-ü,=", "prey " + "u" * 300, "prey-\0", "prey-*")
RESOURCES = ("prey-a", "prey-", "prey-new-1", "*", "", "r" * 300, "kafka-cluster", "prey-\0")
HOSTS = ("*", "127.0.0.1", "", "192.0.2.0/24", "::1", "h" * 300)
ITERATIONS = (4_096, 4_096, 16_384, 4_095, 16_385, 1, 0, -1, INT32, -INT32 - 1)


class SecurityRequests(HostileRequests):
    def __init__(self, seed: int, knows: Knowledge, own_hmac: bytes = b"") -> None:
        super().__init__(seed, knows)
        self._own_hmac = own_hmac
        self._pool: list[tuple[int, int, bytes]] = []

    @property
    def users(self) -> tuple[str, ...]:
        return PREY_USERS

    @property
    def principal_filters(self) -> tuple[str | None, ...]:
        """Of rules that are to be deleted or described."""
        return tuple(f"User:{name}" for name in self.users)

    def frame(self) -> tuple[int, int, bytes]:  # type: ignore[override]
        if len(self._pool) == POOL:
            api, version, frame = self.chance.choice(self._pool)
            # Another correlation id, by which answers are recognised.
            id = struct.pack(">i", self.chance.getrandbits(31))
            return api, version, frame[:8] + id + frame[12:]
        self._pool.append(super().frame())
        return self._pool[-1]

    def _chosen_api(self) -> Api:
        return TABLE[self.chance.choice(SECURITY_APIS)]

    def _integer_of(self, *usual: int) -> int:
        return (
            self.chance.choice(usual)
            if self.chance.random() < 0.9
            else self.chance.choice((INT8, -1, -INT8 - 1))
        )

    def _entity(self, schema: type[Any]) -> Any:
        entity, chance = super()._entity(schema), self.chance
        changes: dict[str, Any] = {}
        for name, value in (
            (
                "principal",
                lambda: f"{chance.choice(('User', 'User', 'Group', ''))}:{chance.choice(self.users)}",
            ),
            ("principal_filter", lambda: chance.choice(self.principal_filters)),
            ("host", lambda: chance.choice(HOSTS)),
            ("host_filter", lambda: chance.choice((None, *HOSTS))),
            ("resource_name_filter", lambda: chance.choice((None, *self._resources()))),
            ("resource_type_filter", lambda: self._integer_of(0, 1, 2, 3, 4, 5, 6, 7)),
            ("resource_pattern_type", lambda: self._integer_of(0, 1, 2, 3, 4)),
            ("pattern_type_filter", lambda: self._integer_of(0, 1, 2, 3, 4)),
            ("operation", lambda: self._integer_of(*range(16))),
            ("permission_type", lambda: self._integer_of(0, 1, 2, 3)),
            ("iterations", lambda: chance.choice(ITERATIONS)),
            ("salt", lambda: chance.randbytes(chance.choice((0, 1, 24, 24, 5_000)))),
            ("salted_password", lambda: chance.randbytes(chance.choice((0, 1, 32, 64, 5_000)))),
            ("principal_type", lambda: chance.choice(("User", "User", "Group", ""))),
            ("principal_name", lambda: chance.choice(self.users)),
            ("owner_principal_type", lambda: chance.choice((None, "User", "Group", ""))),
            ("owner_principal_name", lambda: chance.choice((None, *self.users))),
            (
                "hmac",
                lambda: chance.choice((self._own_hmac, b"", chance.randbytes(64), chance.randbytes(5_000))),
            ),
        ):
            if hasattr(entity, name):
                changes[name] = value()
        if "principal_filter" in changes and chance.random() < BROAD_SHARE:
            changes |= dict.fromkeys(
                ("resource_type_filter", "pattern_type_filter", "operation", "permission_type"), 1
            )
            changes |= dict.fromkeys(("resource_name_filter", "host_filter"))
        if "principal" in changes:  # of a rule
            changes["resource_type"] = self._integer_of(0, 1, 2, 3, 4, 5, 6, 7)
            changes["resource_name"] = chance.choice(self._resources())
        if "iterations" in changes or schema.__name__ == "ScramCredentialDeletion":
            changes["name"] = chance.choice(self.users)
            changes["mechanism"] = self._integer_of(0, 1, 2, 3)
        return replace(entity, **changes) if changes else entity

    def _resources(self) -> tuple[str, ...]:
        return RESOURCES

    def _primitive(self, name: str, kafka_type: str) -> Any:
        if kafka_type == "timedelta_i64":
            # What no duration of Python holds ends the connection, so it is rare.
            values = (
                (INT64 // 2, -INT64 - 1) if self.chance.random() < 0.02 else (-1, 0, 1, 1_000, 86_400_000)
            )
            return _milliseconds(self.chance.choice(values))
        return super()._primitive(name, kafka_type)


class Confined(SecurityRequests):
    """All that it changes names its prey, so that the rules, users and quotas of others must stay as they were."""


class Denied(SecurityRequests):
    def __init__(
        self,
        seed: int,
        knows: Knowledge,
        own_hmac: bytes,
        *,
        users: tuple[str, ...],
        topics: tuple[str, ...],
        groups: tuple[str, ...],
    ) -> None:
        super().__init__(seed, knows, own_hmac)
        self._others = users
        self._target_topics = topics
        self._target_groups = groups

    @property
    def users(self) -> tuple[str, ...]:
        return (*self._others, *self._others, "*", *PREY_USERS)

    @property
    def principal_filters(self) -> tuple[str | None, ...]:
        return (None, "User:*", *super().principal_filters)

    def _chosen_api(self) -> Api:
        if self.chance.random() < SECURITY_SHARE:
            return super()._chosen_api()
        return self.chance.choice(list(TABLE.values()))

    def _aim(self, api: Api) -> None:
        super()._aim(api)
        self._topics = (*self._target_topics, *self._target_topics, *self._topics, *INTERNAL)
        self._topic_ids = (*self.knows.topic_ids, *self.knows.topic_ids, uuid.UUID(int=1))

    def _resources(self) -> tuple[str, ...]:
        return (*self._target_topics, *self._target_groups, *RESOURCES)

    def _resource_name(self, kind: int) -> str:
        if self.chance.random() < 0.5:
            return self.chance.choice((*self._target_topics, *self._target_groups))
        return super()._resource_name(kind)

    def _string(self, name: str) -> str:
        if ("group" in name or "transactional" in name or "key" in name) and self.chance.random() < 0.6:
            return self.chance.choice(self._target_groups)
        return super()._string(name)


def _milliseconds(value: int) -> datetime.timedelta:
    """As much as a duration of Python can be, on both sides."""
    limit = 86_400_000 * 999_999_999 - 1
    return datetime.timedelta(milliseconds=max(-limit, min(limit, value)))
