"""The server side of PLAIN (RFC 4616), with users from settings and, if wanted, with SCRAM credentials."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from penstock.protocol.jaas import parse_jaas
from penstock.security.scram import (
    AuthenticationError,
    ScramCredential,
    fake_credential,
    password_matches,
    spend_iterations,
)

_MODULE: Final = "PlainLoginModule"
_USER_OPTION: Final = "user_"


class ScramUsers(Protocol):
    """The users with a SCRAM credential, who may log in with PLAIN, too."""

    def any_scram(self, name: str) -> tuple[str, ScramCredential] | None:
        """Return the mechanism and the credential of a user with which a password is compared."""

    def iterations_max(self) -> Mapping[str, int]:
        """Return the most iterations that `any_scram` returns of any user, by mechanism."""


class PlainUsers:
    """The users of a listener's `plain.sasl.jaas.config`: an option `user_NAME="PASSWORD"` for each."""

    def __init__(self, passwords: Mapping[str, str]) -> None:
        self._passwords = dict(passwords)

    def __repr__(self) -> str:
        return f"<PlainUsers {sorted(self._passwords)}>"

    def __len__(self) -> int:
        return len(self._passwords)

    @classmethod
    def parse(cls, text: str) -> PlainUsers:
        """Raises ValueError, whose message never shows the text."""
        jaas = parse_jaas(text)
        if jaas.module != _MODULE:
            raise ValueError(f"needs {_MODULE}, and names {jaas.module}")
        return cls(
            {
                name.removeprefix(_USER_OPTION): password
                for name, password in jaas.options.items()
                if name.startswith(_USER_OPTION)
            }
        )

    def matches(self, name: str, password: str, secret: bytes) -> bool:
        """Compare digests, which are all of one length, so that time tells nothing about a password."""
        known = self._passwords.get(name)
        expected = hmac.digest(secret, (known or "").encode(), "sha256")
        given = hmac.digest(secret, password.encode(), "sha256")
        return hmac.compare_digest(expected, given) and known is not None and bool(known)


class PlainMessage(NamedTuple):
    authorization_id: str
    name: str
    password: str

    def __repr__(self) -> str:
        return f"PlainMessage({self.name!r})"


def parse_plain(message: bytes) -> PlainMessage:
    """Raises AuthenticationError."""
    try:
        parts = message.decode().split("\0")
    except UnicodeDecodeError:
        raise AuthenticationError("the message is not UTF-8") from None
    if len(parts) != 3:
        raise AuthenticationError(f"expected 3 parts in the message, got {len(parts)}")
    parsed = PlainMessage(*parts)
    if not parsed.name:
        raise AuthenticationError("user name not specified")
    if not parsed.password:
        raise AuthenticationError("password not specified")
    if parsed.authorization_id not in ("", parsed.name):
        raise AuthenticationError("the client wants to act as another user")
    return parsed


def check_plain(
    message: PlainMessage, users: PlainUsers, scram_users: ScramUsers | None, secret: bytes
) -> None:
    """Raises AuthenticationError. With `scram_users` this takes milliseconds, as long for every name.

    Users have different mechanisms and iterations, so each login computes all mechanisms that are in use, with the
    iterations of the user who has most.
    """
    is_right = users.matches(message.name, message.password, secret)
    if scram_users is not None:
        found = scram_users.any_scram(message.name)
        work = dict(scram_users.iterations_max())
        if found is not None:
            # The user may have been stored since.
            work[found[0]] = max(work.get(found[0], 0), found[1].iterations)
        for mechanism, iterations in work.items():
            credential = fake_credential(mechanism, message.name, secret, iterations)
            is_known = found is not None and found[0] == mechanism
            if found is not None and is_known:
                credential = found[1]
            is_right |= password_matches(mechanism, message.password, credential) and is_known
            spend_iterations(mechanism, message.password, iterations - credential.iterations)
    if not is_right:
        raise AuthenticationError("unknown user or wrong password")
