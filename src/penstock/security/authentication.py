"""The SASL exchange of a connection, from the client's handshake to its session's end (KIP-43, KIP-152, KIP-368).

`Authentications` knows what a listener offers and makes one `Authentication` for each of its connections. Requests come
in, replies come out; a client that is refused learns nothing but that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from penstock.protocol.errors import ErrorCode
from penstock.protocol.sasl_client import OAUTHBEARER, PLAIN
from penstock.protocol.scram import ITERATIONS_MIN, SCRAM_HASHES, encode_base64
from penstock.security.plain import PlainUsers, check_plain, parse_plain
from penstock.security.principal import ANONYMOUS, RESERVED_NAMES, USER, Principal
from penstock.security.scram import (
    TOKEN_EXTENSION,
    AuthenticationError,
    ScramCredential,
    ScramLogin,
    ScramServerExchange,
    fake_credential,
    new_credential,
)

_NONCE_BYTES: Final = 24
#: A client that begins its re-authentication earlier than this after the last re-authentication is refused.
_REAUTHENTICATION_MS_MIN: Final = 1_000
#: Credentials of delegation tokens that are kept, because each takes milliseconds to compute.
_TOKEN_CREDENTIALS_MAX: Final = 1_000


class TokenLogin(NamedTuple):
    """What a login needs of a delegation token: its HMAC, in base 64, is the password."""

    owner: Principal
    hmac: bytes
    expires_ms: int

    def __repr__(self) -> str:
        return f"TokenLogin({self.owner})"


class Credentials(Protocol):
    """What the cluster's metadata holds."""

    def scram(self, mechanism: str, user: str) -> ScramCredential | None: ...

    def iterations_max(self) -> Mapping[str, int]:
        """Return the most iterations of any user, by mechanism. Of a user's mechanisms only the first counts."""

    def token(self, token_id: str, now_ms: int) -> TokenLogin | None:
        """Return a delegation token that has not expired."""


class BearerIdentity(NamedTuple):
    """What a token that was verified says."""

    name: str
    expires_ms: int


class BearerRefusal(NamedTuple):
    """A token is refused: the challenge for the client, and the reason for this node's log."""

    challenge: bytes
    reason: str


class BearerVerifier(Protocol):
    def verify(self, message: bytes, now_ms: int) -> BearerIdentity | BearerRefusal:
        """Return who the client is. Raises AuthenticationError for a message that is malformed."""

    def lacks_key(self, message: bytes) -> bool:
        """Whether a newer set of keys may have the key of the token in the message."""


class Handshake(NamedTuple):
    error: ErrorCode
    mechanisms: tuple[str, ...]


class Step(NamedTuple):
    """`principal` is set by the last step of a login. With an error the connection ends after the reply."""

    reply: bytes = b""
    principal: Principal | None = None
    error: ErrorCode = ErrorCode.none
    #: For the client.
    message: str | None = None
    #: For this node's log; None without an error, or if it was told with an earlier step.
    reason: str | None = None
    session_lifetime_ms: int = 0


class _State(Enum):
    HANDSHAKE = auto()
    EXCHANGE = auto()
    COMPLETE = auto()
    FAILED = auto()


class Authentications:
    """What one listener offers.

    `secret` is the same on all nodes, so that all of them answer alike for unknown users.
    """

    def __init__(
        self,
        mechanisms: Sequence[str],
        credentials: Credentials,
        *,
        secret: Callable[[], bytes],
        random: Callable[[int], bytes],
        plain_users: PlainUsers | None = None,
        plain_uses_scram: bool = False,
        bearer: BearerVerifier | None = None,
        session_ms_max: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        assert OAUTHBEARER not in mechanisms or bearer is not None, "OAUTHBEARER needs a token verifier"
        self.mechanisms = tuple(mechanisms)
        self.credentials = credentials
        self.secret = secret
        self.random = random
        self.plain_users = plain_users or PlainUsers({})
        self.plain_uses_scram = plain_uses_scram
        self.bearer = bearer
        self.session_ms_max = session_ms_max
        self._token_credentials: dict[tuple[str, bytes], ScramCredential] = {}

    def new(self) -> Authentication:
        return Authentication(self)

    def token_credential(self, mechanism: str, token_id: str, hmac: bytes) -> ScramCredential:
        """Return the credential of a token. Its salt is the one that an unknown token of this id would have.

        With a salt of its own, two nodes would show two salts for a token that exists, and one for any other.
        """
        key = (mechanism, hmac)
        known = self._token_credentials.pop(key, None)
        if known is None:
            if len(self._token_credentials) >= _TOKEN_CREDENTIALS_MAX:
                del self._token_credentials[next(iter(self._token_credentials))]  # used longest ago
            salt = fake_credential(mechanism, token_id, self.secret()).salt
            known = new_credential(mechanism, encode_base64(hmac), salt=salt, iterations=ITERATIONS_MIN)
        self._token_credentials[key] = known
        return known

    def iterations_max(self) -> Mapping[str, int]:
        return self.credentials.iterations_max()

    def any_scram(self, name: str) -> tuple[str, ScramCredential] | None:
        """Return one of a user's credentials: all of them are for the password that was set last."""
        for mechanism in SCRAM_HASHES:
            credential = self.credentials.scram(mechanism, name)
            if credential is not None:
                return mechanism, credential
        return None


class Authentication:
    """One connection's. Times are milliseconds since 1970."""

    __slots__ = (
        "_bearer_challenge",
        "_exchange",
        "_is_reauthentication",
        "_listener",
        "_reauthenticated_ms",
        "_session_end_ms",
        "_state",
        "_token",
        "is_by_token",
        "mechanism",
        "name",
        "principal",
    )

    def __init__(self, listener: Authentications) -> None:
        self._listener = listener
        self._state = _State.HANDSHAKE
        self._exchange: ScramServerExchange | None = None
        self._token: TokenLogin | None = None  # of the login in progress
        self._bearer_challenge: bytes | None = None  # which the client has to acknowledge
        self._reauthenticated_ms: int | None = None
        self._is_reauthentication = False
        self._session_end_ms: int | None = None
        self.mechanism = ""
        #: Whether the last login was by a delegation token; such a client cannot manage tokens, not even while it logs
        #: in again.
        self.is_by_token = False
        #: The user that the last message named, whether or not it is one; for the audit trail.
        self.name = ""
        self.principal = ANONYMOUS

    def __repr__(self) -> str:
        return f"<Authentication {self._state.name} {self.mechanism} {self.principal}>"

    def is_complete(self, now_ms: int) -> bool:
        return self._state is _State.COMPLETE and not self.must_reauthenticate(now_ms)

    def must_reauthenticate(self, now_ms: int) -> bool:
        """Whether the session is over, so that only a new login keeps the connection."""
        return self._session_end_ms is not None and now_ms >= self._session_end_ms

    def session_left_ms(self, now_ms: int) -> float:
        """Return how long the session of a client that has authenticated still lasts."""
        return math.inf if self._session_end_ms is None else self._session_end_ms - now_ms

    @property
    def is_failed(self) -> bool:
        return self._state is _State.FAILED

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return self._listener.mechanisms

    def takes_long(self, message: bytes) -> bool:
        """Whether `authenticate` takes milliseconds for this message, and should not run on the event loop."""
        if self._state is not _State.EXCHANGE:
            return False
        if self.mechanism == PLAIN:
            return self._listener.plain_uses_scram
        return self._exchange is None and TOKEN_EXTENSION.encode() in message

    def lacks_key(self, message: bytes) -> bool:
        """Whether newer keys may be needed to verify the token in this message."""
        if self._state is not _State.EXCHANGE or self.mechanism != OAUTHBEARER or self._bearer_challenge:
            return False
        assert self._listener.bearer is not None
        return self._listener.bearer.lacks_key(message)

    def handshake(self, mechanism: str, now_ms: int) -> Handshake:
        is_again = self._state is _State.COMPLETE
        last_ms = self._reauthenticated_ms
        if is_again and last_ms is not None and now_ms - last_ms < _REAUTHENTICATION_MS_MIN:
            return Handshake(ErrorCode.illegal_sasl_state, ())  # this login stays
        if self._state not in (_State.HANDSHAKE, _State.COMPLETE):
            self._state = _State.FAILED
            return Handshake(ErrorCode.illegal_sasl_state, ())
        if mechanism not in self._listener.mechanisms or (is_again and mechanism != self.mechanism):
            self._state = _State.FAILED
            return Handshake(ErrorCode.unsupported_sasl_mechanism, self._listener.mechanisms)
        self.mechanism, self._is_reauthentication = mechanism, is_again
        self._state = _State.EXCHANGE
        self._exchange, self._token, self._bearer_challenge = None, None, None
        return Handshake(ErrorCode.none, self._listener.mechanisms)

    def authenticate(self, message: bytes, now_ms: int) -> Step:
        if self._state is not _State.EXCHANGE:
            before = "SaslHandshake" if self._state is _State.HANDSHAKE else "a new SaslHandshake"
            self._state = _State.FAILED if self._state is not _State.COMPLETE else self._state
            text = f"SaslAuthenticate request received before {before}"
            return Step(error=ErrorCode.illegal_sasl_state, message=text, reason=text)
        try:
            if self.mechanism == PLAIN:
                return self._plain(message, now_ms)
            if self.mechanism == OAUTHBEARER:
                return self._bearer(message, now_ms)
            return self._scram(message, now_ms)
        except AuthenticationError as error:
            return self._refused(str(error))

    def _plain(self, message: bytes, now_ms: int) -> Step:
        parsed = parse_plain(message)
        self.name = parsed.name
        listener = self._listener
        scram_users = listener if listener.plain_uses_scram else None
        check_plain(parsed, listener.plain_users, scram_users, listener.secret())
        return self._logged_in(Principal(USER, parsed.name), b"", None, now_ms)

    def _scram(self, message: bytes, now_ms: int) -> Step:
        exchange = self._exchange
        if exchange is None:
            nonce = encode_base64(self._listener.random(_NONCE_BYTES))
            exchange = self._exchange = ScramServerExchange(
                self.mechanism,
                lambda login: self._find(login, now_ms),
                nonce=nonce,
                secret=self._listener.secret(),
            )
            reply = exchange.first(message)
            assert exchange.login is not None
            self.name = exchange.login.name
            return Step(reply)
        reply = exchange.final(message)
        assert exchange.login is not None
        principal = Principal(USER, self.name) if self._token is None else self._token.owner
        if exchange.login.authorization_id not in (None, principal.name):
            raise AuthenticationError("the client wants to act as another user")
        expires_ms = None if self._token is None else self._token.expires_ms
        return self._logged_in(principal, reply, expires_ms, now_ms)

    def _find(self, login: ScramLogin, now_ms: int) -> ScramCredential | None:
        if not login.is_token:
            return self._listener.credentials.scram(self.mechanism, login.name)
        self._token = self._listener.credentials.token(login.name, now_ms)
        if self._token is None:
            return None
        return self._listener.token_credential(self.mechanism, login.name, self._token.hmac)

    def _bearer(self, message: bytes, now_ms: int) -> Step:
        if self._bearer_challenge is not None:
            return self._refused(None, self._bearer_challenge.decode())
        assert self._listener.bearer is not None
        identity = self._listener.bearer.verify(message, now_ms)
        if isinstance(identity, BearerRefusal):
            # The client has to acknowledge the challenge (RFC 7628, 3.2.3) before the login ends.
            self._bearer_challenge = identity.challenge
            return Step(identity.challenge, reason=identity.reason)
        self.name = identity.name
        return self._logged_in(Principal(USER, identity.name), b"", identity.expires_ms, now_ms)

    def _logged_in(self, principal: Principal, reply: bytes, expires_ms: int | None, now_ms: int) -> Step:
        if principal.name in RESERVED_NAMES:
            raise AuthenticationError(f"no user can be named {principal.name}")
        if self._is_reauthentication and principal != self.principal:
            text = f"Cannot change principals during re-authentication from {self.principal} to {principal}"
            self._state = _State.FAILED
            return Step(error=ErrorCode.sasl_authentication_failed, message=text, reason=text)
        bounds = []
        if expires_ms is not None:
            if expires_ms <= now_ms:
                raise AuthenticationError("the token has expired")
            bounds.append(expires_ms - now_ms)
        session_ms_max = self._listener.session_ms_max.get(self.mechanism, 0)
        if session_ms_max > 0:
            bounds.append(session_ms_max)
        self._session_end_ms = now_ms + min(bounds) if bounds else None
        self._state, self._exchange = _State.COMPLETE, None
        self.is_by_token = self._token is not None
        if self._is_reauthentication:
            self._reauthenticated_ms = now_ms
        self.principal = principal
        return Step(reply, principal, session_lifetime_ms=min(bounds, default=0))

    def _refused(self, reason: str | None, message: str | None = None) -> Step:
        self._state = _State.FAILED
        what = "re-authentication" if self._is_reauthentication else "authentication"
        return Step(
            error=ErrorCode.sasl_authentication_failed,
            message=message
            or (
                f"Authentication failed during {what} due to invalid credentials "
                f"with SASL mechanism {self.mechanism}"
            ),
            reason=reason,
        )
