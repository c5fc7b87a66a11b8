"""The keys that may sign OAUTHBEARER's tokens: a JSON Web Key Set (RFC 7517), and when it is read again.

The keys come from where the operator's settings say. What a token says about keys (`jwk`, `jku`, `x5c`, `x5u`) is never
looked at, apart from the id of its key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jwt

from penstock.protocol.backoff import Chance, ExponentialBackoff

#: A larger document is no key set.
KEY_SET_BYTES_MAX: Final = 1024 * 1024
_KEYS_MAX: Final = 100
_KEY_ID_CHARS_MAX: Final = 1000
#: RFC 7518, 3.3.
_RSA_BITS_MIN: Final = 2048


class _KeyKind(NamedTuple):
    type: str
    curve: str | None = None


_RSA: Final = _KeyKind("RSA")
#: The signature algorithms that are accepted, with the only kind of key that each may be used with. All are asymmetric:
#: with `none` or an HMAC of the public key, everybody could sign.
ALGORITHMS: Final[Mapping[str, _KeyKind]] = MappingProxyType(
    {
        "RS256": _RSA,
        "RS384": _RSA,
        "RS512": _RSA,
        "PS256": _RSA,
        "PS384": _RSA,
        "PS512": _RSA,
        "ES256": _KeyKind("EC", "P-256"),
        "ES384": _KeyKind("EC", "P-384"),
        "ES512": _KeyKind("EC", "P-521"),
        "EdDSA": _KeyKind("OKP", "Ed25519"),
    }
)
#: What a public key consists of. A key set with private keys is a mistake of its owner; they are not kept.
_PUBLIC_MEMBERS: Final = frozenset({"kty", "crv", "x", "y", "n", "e"})


class InvalidKeySet(ValueError):
    """The document has no key that could sign a token. The message shows nothing of the keys."""


class _Key(NamedTuple):
    id: str | None
    kind: _KeyKind
    algorithm: str | None  # the only one that the key may be used with
    public: Any

    def __repr__(self) -> str:
        return f"<key {self.id!r}, {self.kind.type}>"

    def fits(self, algorithm: str) -> bool:
        return self.kind == ALGORITHMS[algorithm] and self.algorithm in (None, algorithm)


class WebKeySet:
    """The keys of one document. Keys that cannot sign tokens are left out; `left_out` says why."""

    def __init__(self, keys: tuple[_Key, ...], left_out: tuple[str, ...]) -> None:
        self._keys = keys
        self._ids = {key.id for key in keys}
        self.left_out = left_out

    def __repr__(self) -> str:
        return f"<WebKeySet {self.key_ids}>"

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def key_ids(self) -> list[str]:
        return sorted(key_id for key_id in self._ids if key_id is not None)

    @classmethod
    def parse(cls, document: bytes) -> WebKeySet:
        """Raises InvalidKeySet."""
        entries = _entries(document)
        keys: list[_Key] = []
        left_out: list[str] = []
        for position, entry in enumerate(entries, start=1):
            try:
                keys.append(_parse_key(entry))
            except InvalidKeySet as error:
                left_out.append(f"key {position}: {error}")
        if not keys:
            raise InvalidKeySet("; ".join(["it has no key that can sign tokens", *left_out[:3]]))
        return cls(tuple(keys), tuple(left_out))

    def has(self, key_id: str) -> bool:
        return key_id in self._ids

    def find(self, key_id: str | None, algorithm: str) -> Any:
        """Return the public key with this id for an algorithm, or None unless there is exactly one.

        A token without the id of its key is signed by the only key for its algorithm.
        """
        fitting = [key for key in self._keys if key.fits(algorithm) and key_id in (None, key.id)]
        return fitting[0].public if len(fitting) == 1 else None


def _entries(document: bytes) -> list[Any]:
    if len(document) > KEY_SET_BYTES_MAX:
        raise InvalidKeySet(f"it has more than {KEY_SET_BYTES_MAX} bytes")
    try:
        parsed = json.loads(document)
    except (ValueError, RecursionError):
        raise InvalidKeySet("it is not JSON") from None
    entries = parsed.get("keys") if isinstance(parsed, dict) else None
    if not isinstance(entries, list):
        raise InvalidKeySet('it is no key set: {"keys": [...]}')
    if len(entries) > _KEYS_MAX:
        raise InvalidKeySet(f"it has more than {_KEYS_MAX} keys")
    return entries


def _parse_key(entry: Any) -> _Key:
    if not isinstance(entry, dict):
        raise InvalidKeySet("it is no object")
    kind = _KeyKind(entry.get("kty", ""), entry.get("crv"))
    if kind not in ALGORITHMS.values():
        raise InvalidKeySet("its kind signs with none of the algorithms that are accepted")
    key_id, algorithm = entry.get("kid"), entry.get("alg")
    if key_id is not None and (not isinstance(key_id, str) or len(key_id) > _KEY_ID_CHARS_MAX):
        raise InvalidKeySet("its kid is no text, or too long")
    if algorithm is not None and (not isinstance(algorithm, str) or ALGORITHMS.get(algorithm) != kind):
        raise InvalidKeySet("its alg is not accepted, or does not fit the key")
    operations = entry.get("key_ops", ["verify"])
    if entry.get("use", "sig") != "sig" or not isinstance(operations, list) or "verify" not in operations:
        raise InvalidKeySet("it is not for signatures")
    public = _public_key(entry, kind)
    if kind == _RSA and public.key_size < _RSA_BITS_MIN:
        raise InvalidKeySet(f"RSA with less than {_RSA_BITS_MIN} bits")
    return _Key(key_id, kind, algorithm, public)


def _public_key(entry: Mapping[str, Any], kind: _KeyKind) -> Any:
    data = {name: value for name, value in entry.items() if name in _PUBLIC_MEMBERS}
    any_algorithm = next(name for name, fitting in ALGORITHMS.items() if fitting == kind)
    try:
        return jwt.PyJWK(data, algorithm=any_algorithm).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError):
        raise InvalidKeySet("it is damaged") from None


class KeyRefresh:
    """When the keys are read: regularly, again soon after a failure, and for tokens with an unknown key.

    Times are milliseconds of one clock that never goes back. Clients choose the ids of keys before they have
    authenticated, so all of them together cause at most one reading in `retry_ms_max`.
    """

    def __init__(self, *, refresh_ms: int, retry_ms: int, retry_ms_max: int, chance: Chance) -> None:
        self._refresh_ms = refresh_ms
        self._retry_ms_max = retry_ms_max
        self._backoff = ExponentialBackoff(base_ms=retry_ms, cap_ms=retry_ms_max)
        self._chance = chance
        self._failures = 0
        self._began_ms: float | None = None

    def begin(self, now_ms: float) -> None:
        self._began_ms = now_ms

    def may_begin(self, now_ms: float) -> bool:
        """Whether a token with an unknown key may cause a reading now."""
        return self._began_ms is None or now_ms - self._began_ms >= self._retry_ms_max

    def after_success(self) -> float:
        """Return in how many milliseconds the keys are read again."""
        self._failures = 0
        return float(self._refresh_ms)

    def after_failure(self) -> float:
        self._failures += 1
        return self._backoff.spread_ms(self._failures - 1, self._chance)
