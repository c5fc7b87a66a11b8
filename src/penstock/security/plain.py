"""The server side of PLAIN (RFC 4616), with users from settings and, if wanted, with SCRAM credentials."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from penstock.protocol.jaas import parse_jaas
from penstock.security.scram import (
    AuthenticationError,
    ScramCredential,
    fake_credential,
    password_matches,
)

_MODULE: Final = "PlainLoginModule"
_USER_OPTION: Final = "user_"
#: The mechanism whose work is done for an unknown user.
_FAKE_MECHANISM: Final = "SCRAM-SHA-256"

#: Returns the mechanism and the credential of a user, or None.
FindAnyCredential = Callable[[str], tuple[str, ScramCredential] | None]


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
    message: PlainMessage, users: PlainUsers, find: FindAnyCredential | None, secret: bytes
) -> None:
    """Raises AuthenticationError. With `find` this takes milliseconds, as long for unknown users as for others."""
    is_right = users.matches(message.name, message.password, secret)
    if find is not None:
        found = find(message.name)
        fake = fake_credential(_FAKE_MECHANISM, message.name, secret)
        mechanism, credential = found or (_FAKE_MECHANISM, fake)
        is_right |= password_matches(mechanism, message.password, credential) and found is not None
    if not is_right:
        raise AuthenticationError("unknown user or wrong password")
