"""Passwords of delegation tokens (KIP-48): the HMAC of a token's id, in base 64."""

from __future__ import annotations

import hmac
from collections.abc import KeysView


class TokenHmacs:
    """Computes the HMACs of tokens, and finds the token that has one.

    The key is `delegation.token.secret.key`; without it, tokens are disabled. The HMAC of an id never changes.
    """

    def __init__(self, secret: str | None) -> None:
        self._secret = (secret or "").encode()
        self._by_id: dict[str, bytes] = {}
        self._ids: dict[bytes, str] = {}

    def __repr__(self) -> str:
        return f"<TokenHmacs, {'enabled' if self.is_enabled else 'disabled'}>"

    @property
    def is_enabled(self) -> bool:
        return bool(self._secret)

    def of(self, token_id: str) -> bytes:
        """Return the HMAC of a token as Apache Kafka computes it."""
        assert self.is_enabled
        return hmac.digest(self._secret, token_id.encode(), "sha512")

    def find(self, token_ids: KeysView[str], wanted: bytes) -> str | None:
        """Return which of these tokens has the HMAC; `token_ids` are all that exist now."""
        if self._by_id.keys() != token_ids:
            known, self._by_id = self._by_id, {}
            for token_id in token_ids:
                self._by_id[token_id] = known.get(token_id) or self.of(token_id)
            self._ids = {value: token_id for token_id, value in self._by_id.items()}
        return self._ids.get(wanted)
