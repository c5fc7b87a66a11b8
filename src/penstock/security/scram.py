"""The server side of SCRAM (RFC 5802, RFC 7677), with Kafka's logins by delegation token (KIP-48).

An unknown user gets a salt that follows from the cluster's secret, so that the first answer, the second answer and the
work for them are those of a known user with a wrong password.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.protocol import scram
from penstock.protocol.scram import ITERATIONS_MIN, SALT_RANDOM_BYTES, SCRAM_HASHES

#: Attributes of RFC 5802 that a client may not use as names of extensions.
_RESERVED: Final = frozenset("anmrcspiev")
_CLIENT_NONCE_CHARS_MAX: Final = 1024
#: "I support channel binding, but think that the server does not" is as good as "no channel binding" here.
_BINDING_FLAGS: Final = frozenset({"n", "y"})
TOKEN_EXTENSION: Final = "tokenauth"


class AuthenticationError(Exception):
    """A login is refused. The text is for this node's log; the client learns only that it was refused."""


class ScramCredential(NamedTuple):
    """What a server stores of a password."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:
        return f"ScramCredential({self.iterations} iterations)"


def new_credential(mechanism: str, password: str, *, salt: bytes, iterations: int) -> ScramCredential:
    digest = SCRAM_HASHES[mechanism]
    keys = scram.scram_keys(digest, scram.salted_password(digest, password, salt, iterations))
    return ScramCredential(salt, keys.stored_key, keys.server_key, iterations)


def fake_credential(
    mechanism: str, name: str, secret: bytes, iterations: int = ITERATIONS_MIN
) -> ScramCredential:
    """Return the credential of a user that does not exist: always the same, and no password matches it."""
    digest = SCRAM_HASHES[mechanism]
    random = hmac.digest(secret, f"salt {mechanism} {name}".encode(), "sha512")
    stored = hmac.digest(secret, f"stored key {mechanism} {name}".encode(), digest)
    server = hmac.digest(secret, f"server key {mechanism} {name}".encode(), digest)
    return ScramCredential(scram.salt_text(random[:SALT_RANDOM_BYTES]), stored, server, iterations)


def password_matches(mechanism: str, password: str, credential: ScramCredential) -> bool:
    """Takes milliseconds, by design."""
    digest = SCRAM_HASHES[mechanism]
    salted = scram.salted_password(digest, password, credential.salt, credential.iterations)
    return hmac.compare_digest(scram.scram_keys(digest, salted).stored_key, credential.stored_key)


def spend_iterations(mechanism: str, password: str, iterations: int) -> None:
    """Take as long as a password takes that has so many more iterations."""
    if iterations > 0:
        scram.salted_password(SCRAM_HASHES[mechanism], password, b"", iterations)


class ScramLogin(NamedTuple):
    """Who wants to log in: a user, or the bearer of the delegation token with this id."""

    name: str
    is_token: bool
    #: The name that the client wants to act as, if it says so.
    authorization_id: str | None


#: Returns the credential of a user or token, or None.
FindCredential = Callable[[ScramLogin], ScramCredential | None]


class ScramServerExchange:
    """`nonce` is printable and used once."""

    def __init__(self, mechanism: str, find: FindCredential, *, nonce: str, secret: bytes) -> None:
        self._mechanism = mechanism
        self._digest = SCRAM_HASHES[mechanism]
        self._find = find
        self._nonce = nonce
        self._secret = secret
        self._binding = b""
        self._client_first_bare = b""
        self._server_first = b""
        self._credential: ScramCredential | None = None
        self._is_known = False
        self.login: ScramLogin | None = None

    def first(self, message: bytes) -> bytes:
        """Return the challenge to the client's first message. Raises AuthenticationError."""
        login, client_nonce = self._parse_first(message)
        self.login = login
        # Computed for known users too, so that the time of a reply does not reveal which users exist.
        fake = fake_credential(self._mechanism, login.name, self._secret)
        credential = self._find(login)
        self._is_known = credential is not None and credential.iterations >= ITERATIONS_MIN
        self._credential = credential if credential is not None and self._is_known else fake
        self._nonce = client_nonce + self._nonce
        salt = scram.encode_base64(self._credential.salt)
        self._server_first = f"r={self._nonce},s={salt},i={self._credential.iterations}".encode()
        return self._server_first

    def final(self, message: bytes) -> bytes:
        """Return the server's signature. Raises AuthenticationError."""
        assert self._credential is not None
        unproven, separator, proof_text = message.rpartition(b",p=")
        attributes = scram.parse_attributes(unproven)
        if not separator or attributes is None or list(attributes)[:2] != ["c", "r"]:
            raise AuthenticationError("the client's final message is malformed")
        if not _RESERVED.isdisjoint(list(attributes)[2:]):
            raise AuthenticationError("the client's final message names an attribute out of order")
        if not hmac.compare_digest(scram.decode_base64(attributes["c"]), self._binding):
            raise AuthenticationError("the client's channel binding changed")
        if not hmac.compare_digest(attributes["r"].encode(), self._nonce.encode()):
            raise AuthenticationError("the client's nonce is not that of this exchange")
        signed = scram.auth_message(self._client_first_bare, self._server_first, unproven)
        signature = hmac.digest(self._credential.stored_key, signed, self._digest)
        proof = scram.decode_base64(proof_text.decode("ascii", "replace")).ljust(len(signature), b"\0")
        client_key = scram.xor(proof[: len(signature)], signature)
        stored_key = hashlib.new(self._digest, client_key).digest()
        is_proven = hmac.compare_digest(stored_key, self._credential.stored_key)
        answer = hmac.digest(self._credential.server_key, signed, self._digest)
        if not (is_proven and self._is_known and len(proof) == len(signature)):
            raise AuthenticationError("unknown user or wrong password")
        return f"v={scram.encode_base64(answer)}".encode()

    def _parse_first(self, message: bytes) -> tuple[ScramLogin, str]:
        flag, _, rest = message.partition(b",")
        authorization, separator, bare = rest.partition(b",")
        if flag.decode("ascii", "replace") not in _BINDING_FLAGS or not separator:
            raise AuthenticationError("the client's first message is malformed, or wants a channel binding")
        authorization_id = None
        if authorization:
            if not authorization.startswith(b"a="):
                raise AuthenticationError("the client's first message is malformed")
            authorization_id = _name(authorization[2:])
        attributes = scram.parse_attributes(bare)
        if attributes is None or list(attributes)[:2] != ["n", "r"]:
            raise AuthenticationError("the client's first message is malformed")
        if not _RESERVED.isdisjoint(list(attributes)[2:]):
            raise AuthenticationError("the client wants an extension that this server does not have")
        nonce = attributes["r"]
        if not 0 < len(nonce) <= _CLIENT_NONCE_CHARS_MAX or not all("!" <= char <= "~" for char in nonce):
            raise AuthenticationError("the client's nonce is not printable, or too long")
        self._binding = flag + b"," + authorization + b","
        self._client_first_bare = bare
        is_token = attributes.get(TOKEN_EXTENSION, "").lower() == "true"
        return ScramLogin(_name(attributes["n"].encode()), is_token, authorization_id), nonce


def _name(text: bytes) -> str:
    try:
        name = scram.unescape_name(text.decode())
    except UnicodeDecodeError:
        name = None
    if name is None:
        raise AuthenticationError("the client's first message has a malformed name")
    return name
