"""The client side of SASL exchanges, without a socket.

PLAIN (RFC 4616), SCRAM (RFC 5802, RFC 7677) and OAUTHBEARER (RFC 7628). Nodes that connect to each other use it too.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from penstock.protocol import scram
from penstock.protocol.scram import ITERATIONS_MIN, SCRAM_HASHES

PLAIN: Final = "PLAIN"
OAUTHBEARER: Final = "OAUTHBEARER"
MECHANISMS: Final = (PLAIN, *SCRAM_HASHES, OAUTHBEARER)

#: With more, a login takes minutes.
_ITERATIONS_MAX: Final = 10_000_000
_EXTENSION_NAME: Final = re.compile(r"[A-Za-z]+")
_EXTENSION_VALUE: Final = re.compile(r"[\x21-\x7e \t\r\n]+")
_TOKEN: Final = re.compile(r"[-A-Za-z0-9._~+/]+=*")
#: What a client says after it was refused.
_ABORT: Final = b"\x01"


class SaslError(Exception):
    """The exchange failed: the server refuses, or cannot be trusted. The message contains no secret."""


class SaslExchange(Protocol):
    """The client side of an exchange."""

    def first(self) -> bytes: ...

    def next(self, challenge: bytes) -> bytes | None:
        """Return the reply to a challenge; None when the exchange is complete. Raises SaslError."""


class PlainExchange:
    def __init__(self, username: str, password: str) -> None:
        self._message = f"\0{username}\0{password}".encode()

    def first(self) -> bytes:
        return self._message

    def next(self, challenge: bytes) -> bytes | None:
        return None


class ScramExchange:
    """`nonce` is printable and used once; `digest` names a hash of hashlib.

    With `is_token`, user name and password are the id and the HMAC of a delegation token.
    """

    def __init__(
        self, digest: str, username: str, password: str, *, nonce: str, is_token: bool = False
    ) -> None:
        self._digest = digest
        self._password = password
        self._nonce = nonce
        extensions = ",tokenauth=true" if is_token else ""
        self._bare = f"n={scram.escape_name(username)},r={nonce}{extensions}"
        self._expected: bytes | None = None

    def first(self) -> bytes:
        return f"n,,{self._bare}".encode()

    def next(self, challenge: bytes) -> bytes | None:
        attributes = scram.parse_attributes(challenge)
        if attributes is None:
            raise SaslError("SCRAM: the broker's message is malformed")
        if "e" in attributes:
            raise SaslError(f"SCRAM: the broker refused: {attributes['e']}")
        if self._expected is None:
            return self._final(attributes, challenge)
        if not hmac.compare_digest(scram.decode_base64(attributes.get("v", "")), self._expected):
            raise SaslError("SCRAM: the broker could not prove that it knows the password")
        return None

    def _final(self, reply: dict[str, str], challenge: bytes) -> bytes:
        salt, iterations = self._checked(reply)
        keys = scram.scram_keys(
            self._digest, scram.salted_password(self._digest, self._password, salt, iterations)
        )
        unproven = f"c=biws,r={reply['r']}"
        signed = scram.auth_message(self._bare.encode(), challenge, unproven.encode())
        self._expected = hmac.digest(keys.server_key, signed, self._digest)
        proof = scram.xor(keys.client_key, hmac.digest(keys.stored_key, signed, self._digest))
        return f"{unproven},p={scram.encode_base64(proof)}".encode()

    def _checked(self, reply: dict[str, str]) -> tuple[bytes, int]:
        if not reply.get("r", "").startswith(self._nonce) or reply["r"] == self._nonce:
            raise SaslError("SCRAM: the broker's nonce does not continue the client's nonce")
        salt = scram.decode_base64(reply.get("s", ""))
        count = reply.get("i", "")
        iterations = int(count) if count.isascii() and count.isdecimal() and len(count) < 10 else 0
        if not salt or not ITERATIONS_MIN <= iterations <= _ITERATIONS_MAX:
            raise SaslError(
                f"SCRAM: the broker asks for {count[:10]} iterations; "
                f"it should be from {ITERATIONS_MIN} to {_ITERATIONS_MAX}, with a salt"
            )
        return salt, iterations


class OauthBearerExchange:
    """Sends a token, and the extensions of RFC 7628 that the server may want."""

    def __init__(self, token: str, extensions: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raises SaslError."""
        if not _TOKEN.fullmatch(token):
            raise SaslError("OAUTHBEARER: the token is not in the form of RFC 6750")
        for name, value in extensions.items():
            if name == "auth" or not _EXTENSION_NAME.fullmatch(name) or not _EXTENSION_VALUE.fullmatch(value):
                raise SaslError(f"OAUTHBEARER: {name[:40]!r} is no extension of RFC 7628")
        pairs = "".join(f"\x01{name}={value}" for name, value in extensions.items())
        self._message = f"n,,\x01auth=Bearer {token}{pairs}\x01\x01".encode()
        self._refusal: str | None = None

    def first(self) -> bytes:
        return self._message

    def next(self, challenge: bytes) -> bytes | None:
        if self._refusal is not None:
            raise SaslError(f"OAUTHBEARER: the broker refused the token: {self._refusal}")
        if not challenge:
            return None
        self._refusal = _refusal(challenge)
        return _ABORT


def _refusal(challenge: bytes) -> str:
    try:
        answer: Any = json.loads(challenge)
    except ValueError:
        return "it did not say why"
    return str(answer.get("status"))[:200] if isinstance(answer, dict) else "it did not say why"
