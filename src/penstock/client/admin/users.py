"""Users with SCRAM credentials: lists them, sets passwords, removes users.

A password is salted here, so that it never leaves this process.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from penstock.client.errors import raise_for_error
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class
from penstock.protocol.scram import (
    ITERATIONS_MIN,
    SALT_RANDOM_BYTES,
    SCRAM_HASHES,
    SCRAM_MECHANISM_IDS,
    SCRAM_MECHANISMS_BY_ID,
    salt_text,
    salted_password,
)

#: No user can log in with these names, though nodes store credentials for them, as in Apache Kafka.
RESERVED_NAMES: Final = frozenset({"*", "ANONYMOUS"})


class User(NamedTuple):
    """`iterations` by mechanism."""

    name: str
    iterations: dict[str, int]


def list_users(cluster: Cluster, names: Sequence[str] = ()) -> list[User]:
    """Return these users, or all; one that does not exist is left out. Raises Refused, Unavailable."""
    path = "describe_user_scram_credentials.v0.request"
    user_name = schema_class(f"{path}:UserName")
    request = schema_class(f"{path}:DescribeUserScramCredentialsRequest")(
        users=tuple(user_name(name=name) for name in dict.fromkeys(names)) or None
    )

    def ask(connection: Connection) -> list[User]:
        response = connection.call(request)
        raise_for_error(response.error_code, "users", response.error_message)
        found = []
        for result in response.results:
            if result.error_code is ErrorCode.resource_not_found:
                continue
            raise_for_error(result.error_code, result.user, result.error_message)
            iterations = {
                SCRAM_MECHANISMS_BY_ID.get(info.mechanism, str(info.mechanism)): info.iterations
                for info in result.credential_infos
            }
            found.append(User(result.user, iterations))
        return sorted(found)

    return cluster.call_any(ask)


def set_password(
    cluster: Cluster,
    name: str,
    password: str,
    *,
    mechanisms: Sequence[str] = tuple(SCRAM_HASHES),
    iterations: int = ITERATIONS_MIN,
) -> None:
    """Set the password of a user, who may be new. Raises Refused, Unavailable."""
    for mechanism in mechanisms:
        salt = salt_text(secrets.token_bytes(SALT_RANDOM_BYTES))
        upsertion = schema_class("alter_user_scram_credentials.v0.request:ScramCredentialUpsertion")(
            name=name,
            mechanism=SCRAM_MECHANISM_IDS[mechanism],
            iterations=iterations,
            salt=salt,
            salted_password=salted_password(SCRAM_HASHES[mechanism], password, salt, iterations),
        )
        # A request can change a user only once.
        _alter(cluster, deletions=(), upsertions=(upsertion,))


def delete_user(cluster: Cluster, user: User) -> None:
    """Remove all credentials of a user. Raises Refused, Unavailable."""
    for mechanism in user.iterations:
        deletion = schema_class("alter_user_scram_credentials.v0.request:ScramCredentialDeletion")(
            name=user.name, mechanism=SCRAM_MECHANISM_IDS[mechanism]
        )
        _alter(cluster, deletions=(deletion,), upsertions=())


def _alter(cluster: Cluster, **changes: Any) -> None:
    request = schema_class("alter_user_scram_credentials.v0.request:AlterUserScramCredentialsRequest")(
        **changes
    )

    def ask(connection: Connection) -> None:
        (result,) = connection.call(request).results
        raise_for_error(result.error_code, result.user, result.error_message)

    cluster.call_controller(ask)
