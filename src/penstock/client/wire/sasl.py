"""The client side of SASL exchanges, without a socket: PLAIN (RFC 4616) and SCRAM (RFC 5802, RFC 7677)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final, Protocol

from penstock.client.errors import AuthenticationFailed

PLAIN: Final = "PLAIN"
#: The hash that each mechanism works with.
SCRAM_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MECHANISMS: Final = (PLAIN, *SCRAM_HASHES)

#: With fewer iterations, stolen verifiers are cheap to break; with more, a login takes minutes.
_ITERATIONS_MIN: Final = 4_096
_ITERATIONS_MAX: Final = 10_000_000


class SaslExchange(Protocol):
    """The client side of an exchange."""

    def first(self) -> bytes: ...

    def next(self, challenge: bytes) -> bytes | None:
        """Returns the reply to a challenge; None when the exchange is complete. Raises AuthenticationFailed."""


class PlainExchange:
    def __init__(self, username: str, password: str) -> None:
        self._message = f"\0{username}\0{password}".encode()

    def first(self) -> bytes:
        return self._message

    def next(self, challenge: bytes) -> bytes | None:
        return None


class ScramExchange:
    """`nonce` is printable and used once; `digest` names a hash of hashlib."""

    def __init__(self, digest: str, username: str, password: str, *, nonce: str) -> None:
        escaped = username.replace("=", "=3D").replace(",", "=2C")
        self._digest = digest
        self._password = password.encode()
        self._nonce = nonce
        self._bare = f"n={escaped},r={nonce}"
        self._expected: bytes | None = None

    def first(self) -> bytes:
        return f"n,,{self._bare}".encode()

    def next(self, challenge: bytes) -> bytes | None:
        if self._expected is None:
            return self._final(_parse_attributes(challenge), challenge)
        self._check_server(_parse_attributes(challenge))
        return None

    def _final(self, reply: dict[str, str], challenge: bytes) -> bytes:
        salt, iterations = self._checked(reply)
        salted = hashlib.pbkdf2_hmac(self._digest, self._password, salt, iterations)
        client_key = self._hmac(salted, b"Client Key")
        stored_key = hashlib.new(self._digest, client_key).digest()
        unproven = f"c=biws,r={reply['r']}"
        signed = b",".join((self._bare.encode(), challenge, unproven.encode()))
        self._expected = self._hmac(self._hmac(salted, b"Server Key"), signed)
        signature = self._hmac(stored_key, signed)
        proof = bytes(left ^ right for left, right in zip(client_key, signature, strict=True))
        return f"{unproven},p={base64.b64encode(proof).decode()}".encode()

    def _checked(self, reply: dict[str, str]) -> tuple[bytes, int]:
        if not reply.get("r", "").startswith(self._nonce) or reply["r"] == self._nonce:
            raise AuthenticationFailed("SCRAM: the broker's nonce does not continue the client's nonce")
        salt = _decode_base64(reply.get("s", ""))
        iterations = int(reply["i"]) if reply.get("i", "").isdecimal() else 0
        if not salt or not _ITERATIONS_MIN <= iterations <= _ITERATIONS_MAX:
            raise AuthenticationFailed(
                f"SCRAM: the broker asks for {reply.get('i')} iterations; "
                f"it should be from {_ITERATIONS_MIN} to {_ITERATIONS_MAX}, with a salt"
            )
        return salt, iterations

    def _check_server(self, reply: dict[str, str]) -> None:
        if "e" in reply:
            raise AuthenticationFailed(f"SCRAM: the broker refused: {reply['e']}")
        assert self._expected is not None
        if not hmac.compare_digest(_decode_base64(reply.get("v", "")), self._expected):
            raise AuthenticationFailed("SCRAM: the broker could not prove that it knows the password")

    def _hmac(self, key: bytes, message: bytes) -> bytes:
        return hmac.digest(key, message, self._digest)


def sasl_exchange(mechanism: str, username: str, password: str, *, nonce: str) -> SaslExchange:
    if mechanism == PLAIN:
        return PlainExchange(username, password)
    return ScramExchange(SCRAM_HASHES[mechanism], username, password, nonce=nonce)


def _parse_attributes(message: bytes) -> dict[str, str]:
    """Returns `r=...,s=...,i=...` by attribute. Raises AuthenticationFailed."""
    try:
        parts = message.decode().split(",")
    except UnicodeDecodeError:
        raise AuthenticationFailed("SCRAM: the broker's message is not UTF-8") from None
    return {part[:1]: part[2:] for part in parts if part[1:2] == "="}


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
