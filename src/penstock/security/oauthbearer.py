"""The server side of OAUTHBEARER (RFC 7628, KIP-255, KIP-768): the client's message, and the check of its token.

A token is a JSON Web Token (RFC 7519) with a signature. Nothing that it says is used before a key of the operator's key
set has verified it, apart from the names of its algorithm and its key. Reasons of refusals show nothing of the token.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

import jwt

from penstock.security.authentication import BearerIdentity, BearerRefusal
from penstock.security.scram import AuthenticationError
from penstock.security.web_keys import ALGORITHMS, WebKeySet

_HEADER: Final = re.compile(r"n,(?:a=((?:[^=,\x00\x01]|=2C|=3D)+))?,\x01")
_END: Final = "\x01\x01"
_NAME: Final = re.compile(r"[A-Za-z]+")
_VALUE: Final = re.compile(r"[\x21-\x7e \t\r\n]+")
_CREDENTIALS: Final = re.compile(r"bearer +([-A-Za-z0-9._~+/]+=*)", re.IGNORECASE)
#: Header fields that change what is signed or how; none is supported (RFC 7515, 4.1.11; RFC 7797).
_CRITICAL_FIELDS: Final = ("crit", "b64")
#: As Apache Kafka answers; which check has failed stands in this node's log.
_CHALLENGE: Final = b'{"status":"invalid_token"}'
_QUOTED_CHARS_MAX: Final = 100
#: Control characters, surrogates, separators of lines and paragraphs.
_ODD_CATEGORIES: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
#: 9999-12-31; times after it are mistakes, and would exceed the range of timestamps.
_SECONDS_MAX: Final = 253_402_300_799


class BearerMessage(NamedTuple):
    """The extensions are for servers that want to know more than the token says; this one does not."""

    token: str
    authorization_id: str | None
    extensions: Mapping[str, str]

    def __repr__(self) -> str:
        return f"BearerMessage({self.authorization_id!r}, {sorted(self.extensions)})"


def parse_bearer(message: bytes) -> BearerMessage:
    """Raises AuthenticationError."""
    try:
        text = message.decode()
    except UnicodeDecodeError:
        raise AuthenticationError("the message is not UTF-8") from None
    header = _HEADER.match(text)
    if header is None or not text.endswith(_END) or header.end() + len(_END) > len(text):
        raise AuthenticationError("the message is not in the form of RFC 7628")
    pairs: dict[str, str] = {}
    for pair in text[header.end() : -len(_END)].split("\x01"):
        name, _, value = pair.partition("=")
        if name in pairs or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise AuthenticationError("the message has a malformed or a repeated field")
        pairs[name] = value
    credentials = _CREDENTIALS.fullmatch(pairs.pop("auth", ""))
    if credentials is None:
        raise AuthenticationError("the message has no bearer token")
    wanted = header[1]
    if wanted is not None:
        wanted = wanted.replace("=2C", ",").replace("=3D", "=")
    return BearerMessage(credentials[1], wanted, pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What a token must say. Without `audiences`, it must not be for any: it could be for another service."""

    audiences: tuple[str, ...] = ()
    issuer: str | None = None
    clock_skew_ms: int = 30_000
    scope_claim: str = "scope"
    subject_claim: str = "sub"
    token_bytes_max: int = 16_384


class _Refused(Exception):
    """The token is not accepted; the message is for this node's log."""


class _TokenHeader(NamedTuple):
    algorithm: str
    key_id: str | None


class TokenVerifier:
    """`keys` may be replaced at any time; it is None before the first key set was read."""

    def __init__(self, rules: TokenRules, keys: WebKeySet | None = None) -> None:
        self._rules = rules
        self._signatures = jwt.PyJWS(algorithms=list(ALGORITHMS))
        self.keys = keys

    def __repr__(self) -> str:
        return f"<TokenVerifier {self.keys}>"

    def lacks_key(self, message: bytes) -> bool:
        """Whether a newer key set may have the key of the token in this message."""
        try:
            header = self._header(parse_bearer(message).token)
        except (AuthenticationError, _Refused):
            return False
        return self.keys is None or (header.key_id is not None and not self.keys.has(header.key_id))

    def verify(self, message: bytes, now_ms: int) -> BearerIdentity | BearerRefusal:
        """Raises AuthenticationError for a message that is no message of RFC 7628."""
        parsed = parse_bearer(message)
        try:
            identity = self._identity(self._claims(parsed.token), now_ms)
        except _Refused as refused:
            return BearerRefusal(_CHALLENGE, str(refused))
        if parsed.authorization_id not in (None, identity.name):
            raise AuthenticationError("the client wants to act as another user")
        return identity

    def _header(self, token: str) -> _TokenHeader:
        """Return what an unverified token says of its signature. Raises _Refused."""
        if len(token) > self._rules.token_bytes_max:
            _refuse(f"the token has more than {self._rules.token_bytes_max} bytes")
        try:
            header = self._signatures.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            _refuse("the token is no signed JSON Web Token")
        algorithm, key_id = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            _refuse(f"its algorithm {_quoted(algorithm)} is not accepted, only {', '.join(ALGORITHMS)}")
        if any(field in header for field in _CRITICAL_FIELDS):
            _refuse("its header has extensions that are not supported")
        return _TokenHeader(algorithm, key_id)

    def _claims(self, token: str) -> dict[str, Any]:
        """Return the claims of a token whose signature is good. Raises _Refused."""
        header = self._header(token)
        if self.keys is None:
            _refuse("the key set could not be read yet")
        key = self.keys.find(header.key_id, header.algorithm)
        if key is None:
            _refuse(f"the key set has no single key {_quoted(header.key_id)} for {header.algorithm}")
        try:
            payload = self._signatures.decode_complete(token, key, algorithms=[header.algorithm])["payload"]
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            _refuse("its signature is wrong")
        try:
            claims = json.loads(payload)
        except (ValueError, RecursionError):
            claims = None
        if not isinstance(claims, dict):
            _refuse("its claims are no JSON object")
        return claims

    def _identity(self, claims: Mapping[str, Any], now_ms: int) -> BearerIdentity:
        """Raises _Refused."""
        rules = self._rules
        expires_ms, not_before_ms = _time_ms(claims, "exp"), _time_ms(claims, "nbf")
        if expires_ms is None or _time_ms(claims, "iat") is None:
            _refuse("exp or iat is missing")
        if now_ms >= expires_ms + rules.clock_skew_ms:
            _refuse("it has expired")
        if not_before_ms is not None and not_before_ms > now_ms + rules.clock_skew_ms:
            _refuse("it is not valid yet")
        if rules.issuer is not None and claims.get("iss") != rules.issuer:
            _refuse(f"its issuer {_quoted(claims.get('iss'))} is not sasl.oauthbearer.expected.issuer")
        self._check_audience(claims.get("aud"))
        scope = claims.get(rules.scope_claim)
        if scope is not None and not isinstance(scope, str) and not _is_texts(scope):
            _refuse(f"its {rules.scope_claim} is neither a text nor a list of texts")
        # A clock that is ahead must not end the session of a token at once that is accepted.
        session_end_ms = expires_ms if expires_ms > now_ms else expires_ms + rules.clock_skew_ms
        return BearerIdentity(self._subject(claims), session_end_ms)

    def _check_audience(self, audience: Any) -> None:
        """Raises _Refused."""
        if audience is None and not self._rules.audiences:
            return
        given = [audience] if isinstance(audience, str) else audience
        if not _is_texts(given) or not set(given) & set(self._rules.audiences):
            _refuse(f"its audience {_quoted(audience)} is not in sasl.oauthbearer.expected.audience")

    def _subject(self, claims: Mapping[str, Any]) -> str:
        """Raises _Refused."""
        name = claims.get(self._rules.subject_claim)
        if not isinstance(name, str) or not name.strip():
            _refuse(f"{self._rules.subject_claim} is missing or empty")
        # Two names that look alike in rules and logs must not be two principals; a lone surrogate cannot be sent on.
        is_odd = any(unicodedata.category(character) in _ODD_CATEGORIES for character in name)
        if is_odd or name != name.strip():
            _refuse(f"{self._rules.subject_claim} has blanks at its ends or control characters")
        return name


def _time_ms(claims: Mapping[str, Any], name: str) -> int | None:
    """Return a claim in seconds as milliseconds. Raises _Refused."""
    seconds = claims.get(name)
    if seconds is None:
        return None
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= _SECONDS_MAX:  # also refuses NaN
        _refuse(f"{name} is no time")
    return int(seconds * 1000)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _refuse(reason: str) -> NoReturn:
    raise _Refused(reason)


def _quoted(value: Any) -> str:
    """Return a short text of a value from an unverified token."""
    return repr(value[:_QUOTED_CHARS_MAX]) if isinstance(value, str) else f"({type(value).__name__})"
