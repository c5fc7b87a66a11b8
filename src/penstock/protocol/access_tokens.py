"""Tokens with which clients and nodes log in by OAUTHBEARER: from an endpoint for client credentials, or from a file.

Calls block. Tokens and secrets are never shown: neither in errors nor in the `repr` of values.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from penstock.protocol.sasl_client import OauthBearerExchange, SaslError

URL_SETTING: Final = "sasl.oauthbearer.token.endpoint.url"
#: All settings about tokens of a client, with the names of Kafka's clients and those of librdkafka.
TOKEN_SETTINGS: Final = (
    URL_SETTING,
    "sasl.oauthbearer.client.credentials.client.id",
    "sasl.oauthbearer.client.credentials.client.secret",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.scope",
    "sasl.oauthbearer.extensions",
    "https.ca.location",
)
_EXTENSION_OPTION: Final = "extension_"
_ANSWER_BYTES_MAX: Final = 256 * 1024
_TIMEOUT_S: Final = 10.0
#: The part of a token's lifetime after which it is replaced, as in Kafka's clients (sasl.login.refresh.window.factor).
_REFRESH_FACTOR: Final = 0.8
_ERROR_CHARS: Final = frozenset("abcdefghijklmnopqrstuvwxyz_")
#: For tokens that do not say when they expire.
_UNKNOWN_LIFETIME_MS: Final = 60_000
_ENDPOINTS_MAX: Final = 64
#: Thirty years: a longer lifetime is a mistake.
_LIFETIME_S_MAX: Final = 1e9


class TokenUnavailable(SaslError):
    """`is_refused`: the endpoint refuses the client, so that the same request would fail again."""

    def __init__(self, reason: str, *, is_refused: bool) -> None:
        super().__init__(f"no token from {URL_SETTING}: {reason}")
        self.is_refused = is_refused


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEndpoint:
    url: str
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    scope: str = ""
    #: Extensions of the SASL message (KIP-342).
    extensions: tuple[tuple[str, str], ...] = ()
    ca_location: str | None = None

    @property
    def is_file(self) -> bool:
        return self.url.startswith("file:")

    def to_mapping(self) -> dict[str, str]:
        """Return the settings, with the names of librdkafka, that `token_endpoint` reads. They contain the secret."""
        given = {
            URL_SETTING: self.url,
            "sasl.oauthbearer.method": "" if self.is_file else "oidc",
            "sasl.oauthbearer.client.id": self.client_id,
            "sasl.oauthbearer.client.secret": self.client_secret,
            "sasl.oauthbearer.scope": self.scope,
            "sasl.oauthbearer.extensions": ",".join(f"{name}={value}" for name, value in self.extensions),
            "https.ca.location": self.ca_location or "",
        }
        return {name: value for name, value in given.items() if value}


def token_endpoint(find: Callable[[str], str | None], options: Mapping[str, str]) -> TokenEndpoint:
    """Return the endpoint that settings name. Raises ValueError, without secrets.

    `find` returns the value of one of TOKEN_SETTINGS, and `options` are those of `sasl.jaas.config`.
    """
    from penstock.protocol.url_reader import url_flaw  # takes 10 ms, which clients without tokens save

    url = find(URL_SETTING)
    if not url:
        raise ValueError(f"{URL_SETTING} must name the endpoint that issues tokens, or a file with a token")
    if (flaw := url_flaw(url)) is not None:
        raise ValueError(f"{URL_SETTING} {flaw}")
    endpoint = TokenEndpoint(
        url=url,
        client_id=_first(find, options, "client.credentials.client.id", "client.id", "clientId"),
        client_secret=_first(
            find, options, "client.credentials.client.secret", "client.secret", "clientSecret"
        ),
        scope=_first(find, options, "scope", "scope", "scope"),
        extensions=_extensions(find("sasl.oauthbearer.extensions") or "", options),
        ca_location=find("https.ca.location"),
    )
    if not endpoint.is_file and not (endpoint.client_id and endpoint.client_secret):
        raise ValueError(
            "OAUTHBEARER needs the client's id and secret: sasl.oauthbearer.client.credentials.client.id and "
            "sasl.oauthbearer.client.credentials.client.secret, or clientId and clientSecret in sasl.jaas.config"
        )
    try:
        OauthBearerExchange("x", dict(endpoint.extensions))
    except SaslError as error:
        raise ValueError(str(error)) from None
    return endpoint


def _first(
    find: Callable[[str], str | None], options: Mapping[str, str], name: str, short: str, option: str
) -> str:
    """Return the value of the first that is given: Kafka's setting, librdkafka's, the option."""
    return find(f"sasl.oauthbearer.{name}") or find(f"sasl.oauthbearer.{short}") or options.get(option, "")


def _extensions(text: str, options: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Raises ValueError."""
    given = dict(part.strip().partition("=")[::2] for part in text.split(",") if part.strip())
    for name, value in options.items():
        if name.startswith(_EXTENSION_OPTION):
            given[name.removeprefix(_EXTENSION_OPTION)] = value
    if any("," in value for value in given.values()):
        raise ValueError("values of extensions cannot contain commas, which librdkafka takes for separators")
    return tuple(sorted(given.items()))


class AccessToken(NamedTuple):
    value: str
    expires_ms: int | None

    def __repr__(self) -> str:
        return f"AccessToken(expires_ms={self.expires_ms})"


def retrieve_token(endpoint: TokenEndpoint, now_ms: int) -> AccessToken:
    """Raises TokenUnavailable."""
    from penstock.protocol.url_reader import (  # takes 10 ms, which clients without tokens save
        UrlUnreadable,
        read_url,
    )

    try:
        if endpoint.is_file:
            document = read_url(endpoint.url, bytes_max=_ANSWER_BYTES_MAX, timeout_s=_TIMEOUT_S)
            return _checked_token(document.decode(errors="replace").strip(), None)
        answer = read_url(
            endpoint.url,
            bytes_max=_ANSWER_BYTES_MAX,
            timeout_s=_TIMEOUT_S,
            form=_form(endpoint),
            headers={"Authorization": _basic(endpoint), "Content-Type": "application/x-www-form-urlencoded"},
            ca_location=endpoint.ca_location,
        )
    except UrlUnreadable as error:
        is_refused = error.status is not None and 400 <= error.status < 500 and error.status != 429
        raise TokenUnavailable(f"{error}{_error_code(error.document)}", is_refused=is_refused) from None
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise TokenUnavailable("its answer is no JSON object", is_refused=False)
    lifetime_s = parsed.get("expires_in")
    expires_ms = None
    if isinstance(lifetime_s, (int, float)) and 0 < lifetime_s < _LIFETIME_S_MAX:
        expires_ms = now_ms + int(lifetime_s * 1000)
    return _checked_token(parsed.get("access_token"), expires_ms)


def _checked_token(token: Any, expires_ms: int | None) -> AccessToken:
    try:
        OauthBearerExchange(token if isinstance(token, str) else "")
    except SaslError:
        raise TokenUnavailable("what it has is no token", is_refused=False) from None
    return AccessToken(token, _claimed_expiry_ms(token) or expires_ms)


def _claimed_expiry_ms(token: str) -> int | None:
    """Return when a token says that it expires. Only the server can verify it; here it decides when to get another."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return int(claims["exp"]) * 1000
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _form(endpoint: TokenEndpoint) -> bytes:
    fields = {"grant_type": "client_credentials"}
    if endpoint.scope:
        fields["scope"] = endpoint.scope
    return urlencode(fields).encode()


def _basic(endpoint: TokenEndpoint) -> str:
    pair = f"{endpoint.client_id}:{endpoint.client_secret}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _error_code(document: bytes) -> str:
    """Return the code of an error of RFC 6749. Its description is not shown: it may repeat what was sent."""
    try:
        code = json.loads(document)["error"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return f" ({code})" if isinstance(code, str) and set(code) <= _ERROR_CHARS and len(code) < 60 else ""


class TokenSource:
    """The token of one endpoint, shared by all connections of this process and replaced before it expires."""

    def __init__(
        self,
        endpoint: TokenEndpoint,
        *,
        retrieve: Callable[[TokenEndpoint, int], AccessToken] = retrieve_token,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.endpoint = endpoint
        self._retrieve = retrieve
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._token: AccessToken | None = None
        self._refresh_ms = 0.0

    def __repr__(self) -> str:
        return f"<TokenSource {self.endpoint.url}>"

    def token(self) -> AccessToken:
        """Raises TokenUnavailable."""
        with self._lock:
            now_ms = self._now_ms()
            if self._token is not None and now_ms < self._refresh_ms:
                return self._token
            try:
                token = self._retrieve(self.endpoint, now_ms)
            except TokenUnavailable:
                if self._token is None or (self._token.expires_ms or 0) <= now_ms:
                    raise
                return self._token  # it is still good, and the next connection tries again
            self._token, self._refresh_ms = token, 0.0
            if token.expires_ms is not None and not self.endpoint.is_file:
                self._refresh_ms = now_ms + (token.expires_ms - now_ms) * _REFRESH_FACTOR
            return token

    def librdkafka_token(self, config: str | None) -> tuple[str, float, str, dict[str, str]]:
        """Serve as `oauth_cb` of confluent-kafka, which asks again later after TokenUnavailable."""
        token = self.token()
        # Without a known end librdkafka would ask at once; it refreshes at 80 % of this.
        expires_ms = token.expires_ms or self._now_ms() + _UNKNOWN_LIFETIME_MS
        return token.value, expires_ms / 1000, "", dict(self.endpoint.extensions)

    def new_exchange(self) -> OauthBearerExchange:
        """Raises TokenUnavailable."""
        return OauthBearerExchange(self.token().value, dict(self.endpoint.extensions))


def token_source(endpoint: TokenEndpoint) -> TokenSource:
    """Return the source that all connections of this process share."""
    return _source_of(endpoint, os.getpid())


@lru_cache(maxsize=_ENDPOINTS_MAX)
def _source_of(endpoint: TokenEndpoint, process_id: int) -> TokenSource:
    """A process that was forked has sources of its own: its parent's lock may have been held."""
    return TokenSource(endpoint)
