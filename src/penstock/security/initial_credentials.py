"""SCRAM credentials from the settings of a node, for a cluster that has none yet.

They are written as for `kafka-storage format --add-scram`:
`SCRAM-SHA-512=[name=broker,password="..."];SCRAM-SHA-256=[name=alice,iterations=8192,salt="...",saltedpassword="..."]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from penstock.protocol.scram import (
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    SALT_RANDOM_BYTES,
    SCRAM_HASHES,
    decode_base64,
    salt_text,
    salted_password,
    scram_keys,
)
from penstock.security.scram import ScramCredential

_ATTRIBUTE: Final = r"""([a-z]+)=(?:"((?:\\.|[^"\\])*)"|([^",;\]\[]*))"""
_ATTRIBUTES: Final = re.compile(_ATTRIBUTE)
_ENTRY: Final = re.compile(rf"\s*([A-Z0-9-]+)\s*=\s*\[((?:{_ATTRIBUTE})(?:,(?:{_ATTRIBUTE}))*)\]\s*(;|$)")
_KNOWN: Final = frozenset({"name", "password", "iterations", "salt", "saltedpassword"})


class SaltedCredential(NamedTuple):
    """A credential as AlterUserScramCredentials takes it."""

    user: str
    mechanism: str
    iterations: int
    salt: bytes
    salted_password: bytes

    def __repr__(self) -> str:
        return f"SaltedCredential({self.user!r}, {self.mechanism})"

    @property
    def stored(self) -> ScramCredential:
        keys = scram_keys(SCRAM_HASHES[self.mechanism], self.salted_password)
        return ScramCredential(self.salt, keys.stored_key, keys.server_key, self.iterations)


class InitialCredential(NamedTuple):
    """A password, or what was made of it already: then `salt` and `salted` are not empty."""

    user: str
    mechanism: str
    password: str
    iterations: int = ITERATIONS_MIN
    salt: bytes = b""
    salted: bytes = b""

    def __repr__(self) -> str:
        return f"InitialCredential({self.user!r}, {self.mechanism})"

    def salt_password(self, random: Callable[[int], bytes]) -> SaltedCredential:
        """Takes milliseconds, by design, if there is a password."""
        salt, salted = self.salt or salt_text(random(SALT_RANDOM_BYTES)), self.salted
        if not salted:
            salted = salted_password(SCRAM_HASHES[self.mechanism], self.password, salt, self.iterations)
        return SaltedCredential(self.user, self.mechanism, self.iterations, salt, salted)


def parse_initial_credentials(text: str) -> list[InitialCredential]:
    """Raises ValueError with a message that contains no password."""
    found = list(_entries(text))
    if len({(each.user, each.mechanism) for each in found}) < len(found):
        raise ValueError("names a user twice for one mechanism")
    return found


def _entries(text: str) -> Iterator[InitialCredential]:
    position, number = 0, 0
    while text[position:].strip():
        number += 1
        entry = _ENTRY.match(text, position)
        if entry is None:
            raise ValueError(f"part {number} is not of the form MECHANISM=[name=NAME,password=PASSWORD]")
        position = entry.end()
        if entry[1] not in SCRAM_HASHES:
            raise ValueError(f"part {number} is for none of {', '.join(SCRAM_HASHES)}")
        pairs = _ATTRIBUTES.findall(entry[2])
        attributes = {
            name: re.sub(r"\\(.)", r"\1", quoted) if quoted else bare for name, quoted, bare in pairs
        }
        if len(attributes) < len(pairs) or attributes.keys() - _KNOWN:
            raise ValueError(
                f"part {number} may name each of {', '.join(sorted(_KNOWN))} once, and nothing else"
            )
        try:
            yield _credential(entry[1], attributes)
        except ValueError as error:
            raise ValueError(f"part {number} {error}") from None


def _credential(mechanism: str, attributes: dict[str, str]) -> InitialCredential:
    user, password = attributes.get("name", ""), attributes.get("password", "")
    if not user:
        raise ValueError("has no name")
    iterations = attributes.get("iterations", str(ITERATIONS_MIN))
    if not iterations.isdecimal() or not ITERATIONS_MIN <= int(iterations) <= ITERATIONS_MAX:
        raise ValueError(f"must have {ITERATIONS_MIN} to {ITERATIONS_MAX} iterations")
    salt, salted = (
        decode_base64(attributes.get("salt", "")),
        decode_base64(attributes.get("saltedpassword", "")),
    )
    if ("salt" in attributes and not salt) or ("saltedpassword" in attributes and not salted):
        raise ValueError("has a salt or saltedpassword that is not base 64")
    if bool(password) == bool(salted):
        raise ValueError("must have either a password or a saltedpassword")
    if salted and not salt:
        raise ValueError("has a saltedpassword, which needs its salt")
    return InitialCredential(user, mechanism, password, int(iterations), salt, salted)
