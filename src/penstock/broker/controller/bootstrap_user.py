"""The first users of a new cluster, who can log in as soon as the listeners serve clients."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.environment import StartFailed
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.schemas import schema_class
from penstock.protocol.scram import SCRAM_HASHES, SCRAM_MECHANISM_IDS, SCRAM_MECHANISMS_BY_ID
from penstock.security.initial_credentials import InitialCredential, SaltedCredential

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.broker.controller.channel import ControllerChannel
    from penstock.broker.environment import ImageView, Threads

logger = logging.getLogger("penstock.node")

_ALTER_USER_SCRAM_CREDENTIALS: Final = 51


class BootstrapUser(NamedTuple):
    name: str
    password: str

    def __repr__(self) -> str:
        return f"BootstrapUser({self.name!r})"

    def credentials(self) -> tuple[InitialCredential, ...]:
        return tuple(InitialCredential(self.name, mechanism, self.password) for mechanism in SCRAM_HASHES)


async def create_first_users(
    wanted: Iterable[InitialCredential], metadata: ImageView, channel: ControllerChannel, threads: Threads
) -> None:
    """Create users, unless the cluster has others: one that was deleted must not come back. Raises StartFailed.

    Several nodes may do this at once, and each may know other users.
    """
    missing = {(each.user, each.mechanism): each for each in wanted}
    known = metadata.image.security.credentials
    if {user for user, _ in known} - {user for user, _ in missing}:
        logger.info("the cluster has users; none is created")
        return
    for user, number in known:
        missing.pop((user, SCRAM_MECHANISMS_BY_ID[number]), None)
    while missing:
        # A request names each user once. With one mechanism for each user, they are all created or none.
        by_user = {user: (user, mechanism) for user, mechanism in reversed(missing)}
        now = [missing.pop(key) for key in by_user.values()]
        await _create(
            [await threads.in_thread(each.salt_password, secrets.token_bytes) for each in now], channel
        )


async def _create(credentials: Sequence[SaltedCredential], channel: ControllerChannel) -> None:
    """Raises StartFailed."""
    path = "alter_user_scram_credentials.v0.request"
    upsertions = tuple(
        schema_class(f"{path}:ScramCredentialUpsertion")(
            name=each.user,
            mechanism=SCRAM_MECHANISM_IDS[each.mechanism],
            iterations=each.iterations,
            salt=each.salt,
            salted_password=each.salted_password,
        )
        for each in credentials
    )
    request = schema_class(f"{path}:AlterUserScramCredentialsRequest")(deletions=(), upsertions=upsertions)
    names = ", ".join(each.user for each in credentials)
    try:
        results = (await channel.call(_ALTER_USER_SCRAM_CREDENTIALS, request)).results
    except ApiError as error:
        raise StartFailed(f"user {names} cannot be created: {error}") from None
    for result in results:
        if result.error_code is not ErrorCode.none:
            raise StartFailed(f"user {result.user} cannot be created: {result.error_message}")
    logger.info("first users created", extra={"users": names})
