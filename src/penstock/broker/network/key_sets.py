"""Reads the key sets of OAUTHBEARER from where settings say, and keeps them current beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.broker.environment import StartFailed, in_daemon_thread
from penstock.protocol.sasl_client import OAUTHBEARER
from penstock.protocol.url_reader import UrlUnreadable, read_url
from penstock.security.oauthbearer import TokenRules, TokenVerifier
from penstock.security.web_keys import KEY_SET_BYTES_MAX, InvalidKeySet, KeyRefresh, WebKeySet

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Tasks

logger = logging.getLogger("penstock.server")

_URL: Final = "sasl.oauthbearer.jwks.endpoint.url"
_READ_SECONDS_MAX: Final = 10.0
#: How long a login waits for newer keys; less than a client has to authenticate.
_LOGIN_SECONDS_MAX: Final = 5.0


class KeySetReader:
    """Keeps the keys of a listener's verifier current."""

    def __init__(self, url: str, verifier: TokenVerifier, refresh: KeyRefresh) -> None:
        self._url = url
        self.verifier = verifier
        self._refresh = refresh
        self._tasks: Tasks | None = None
        self._reading: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<KeySetReader {self._url}>"

    def start(self, tasks: Tasks) -> None:
        """Raises StartFailed if a file cannot be used. An endpoint may be out of reach: all tokens are refused then."""
        self._tasks = tasks
        if not self._url.startswith("file:"):
            self._begin()
            return
        try:
            self._accept(self._read())
        except (UrlUnreadable, InvalidKeySet) as error:
            raise StartFailed(f"{_URL}={self._url}: {error}") from None
        self._schedule(self._refresh.after_success())

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    async def wait_for_newer(self) -> None:
        """Read the keys again for a login whose token has an unknown key, if that was not done just now."""
        if self._reading is None and self._refresh.may_begin(self._now_ms()):
            self._begin()
        if self._reading is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOGIN_SECONDS_MAX):
                    await asyncio.shield(self._reading)

    @staticmethod
    def _now_ms() -> float:
        return asyncio.get_running_loop().time() * 1000

    def _schedule(self, pause_ms: float) -> None:
        if not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(pause_ms / 1000, self._begin)

    def _begin(self) -> None:
        assert self._tasks is not None
        if self._reading is None and not self._is_closed:
            if self._timer is not None:
                self._timer.cancel()
            self._refresh.begin(self._now_ms())
            self._reading = self._tasks.spawn(self._read_and_schedule())

    async def _read_and_schedule(self) -> None:
        try:
            self._accept(await in_daemon_thread(self._read, "penstock-key-set"))
            pause_ms = self._refresh.after_success()
        except (UrlUnreadable, InvalidKeySet) as error:
            # The keys stay as they were: an issuer that is down must not lock everybody out.
            logger.error("key set not read", extra={"url": self._url, "reason": str(error)})
            pause_ms = self._refresh.after_failure()
        finally:
            self._reading = None
        self._schedule(pause_ms)

    def _read(self) -> WebKeySet:
        return WebKeySet.parse(read_url(self._url, bytes_max=KEY_SET_BYTES_MAX, timeout_s=_READ_SECONDS_MAX))

    def _accept(self, keys: WebKeySet) -> None:
        known = self.verifier.keys
        self.verifier.keys = keys
        if known is None or known.key_ids != keys.key_ids:
            extra: dict[str, object] = {"url": self._url, "keys": keys.key_ids}
            if keys.left_out:
                extra["left_out"] = keys.left_out
            logger.info("keys of tokens", extra=extra)


def key_set_reader(settings: NodeSettings, listener: str) -> KeySetReader:
    def text(name: str) -> str:
        return str(settings.listener_value(listener, name, OAUTHBEARER))

    audiences = settings.listener_value(listener, "sasl.oauthbearer.expected.audience", OAUTHBEARER)
    issuer = settings.listener_value(listener, "sasl.oauthbearer.expected.issuer", OAUTHBEARER)
    assert isinstance(audiences, tuple)
    rules = TokenRules(
        audiences=audiences,
        issuer=None if issuer is None else str(issuer),
        clock_skew_ms=int(text("sasl.oauthbearer.clock.skew.seconds")) * 1000,
        scope_claim=text("sasl.oauthbearer.scope.claim.name"),
        subject_claim=text("sasl.oauthbearer.sub.claim.name"),
        token_bytes_max=int(text("penstock.sasl.oauthbearer.token.bytes.max")),
    )
    refresh = KeyRefresh(
        refresh_ms=int(text("sasl.oauthbearer.jwks.endpoint.refresh.ms")),
        retry_ms=int(text("sasl.oauthbearer.jwks.endpoint.retry.backoff.ms")),
        retry_ms_max=int(text("sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms")),
        chance=random,
    )
    return KeySetReader(text(_URL), TokenVerifier(rules), refresh)
