"""The formulas of SCRAM (RFC 5802, RFC 7677), which both sides of an exchange compute.

As in Apache Kafka and librdkafka, names and passwords are taken as UTF-8, without SASLprep.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from typing import Final, NamedTuple

#: The hash that each mechanism works with.
SCRAM_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
#: The number of each mechanism in requests and in metadata records.
SCRAM_MECHANISM_IDS: Final = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
SCRAM_MECHANISMS_BY_ID: Final = {number: name for name, number in SCRAM_MECHANISM_IDS.items()}
#: With fewer iterations, stolen verifiers are cheap to break.
ITERATIONS_MIN: Final = 4_096
#: Kafka's limit for stored credentials, because every login computes this many iterations.
ITERATIONS_MAX: Final = 16_384
#: Kafka's tools create salts with this many random bits, written in base 36.
_SALT_BITS: Final = 130
SALT_RANDOM_BYTES: Final = 24
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_ESCAPED_NAME: Final = re.compile(r"(?:[^=,\0]|=2C|=3D)+")


class ScramKeys(NamedTuple):
    """What follows from a password. Only the client knows `client_key`; a server stores the other two."""

    client_key: bytes
    stored_key: bytes
    server_key: bytes

    def __repr__(self) -> str:
        return "ScramKeys(...)"


def salted_password(digest: str, password: str, salt: bytes, iterations: int) -> bytes:
    """Takes milliseconds, by design."""
    return hashlib.pbkdf2_hmac(digest, password.encode(), salt, iterations)


def scram_keys(digest: str, salted: bytes) -> ScramKeys:
    client_key = hmac.digest(salted, b"Client Key", digest)
    return ScramKeys(
        client_key, hashlib.new(digest, client_key).digest(), hmac.digest(salted, b"Server Key", digest)
    )


def auth_message(client_first_bare: bytes, server_first: bytes, client_final_unproven: bytes) -> bytes:
    return b",".join((client_first_bare, server_first, client_final_unproven))


def xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


def escape_name(name: str) -> str:
    return name.replace("=", "=3D").replace(",", "=2C")


def unescape_name(text: str) -> str | None:
    """Return None if the text is no escaped name."""
    if not _ESCAPED_NAME.fullmatch(text):
        return None
    return text.replace("=2C", ",").replace("=3D", "=")


def parse_attributes(message: bytes) -> dict[str, str] | None:
    """Parse `r=...,s=...,i=...`; None if the message is malformed or names an attribute twice."""
    try:
        parts = [part.partition("=") for part in message.decode().split(",")]
    except UnicodeDecodeError:
        return None
    attributes = {name: value for name, _, value in parts}
    if len(attributes) < len(parts) or not all(name.isalpha() and equals for name, equals, _ in parts):
        return None
    return attributes


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode_base64(text: str) -> bytes:
    """Return no bytes if the text is malformed."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def salt_text(random: bytes) -> bytes:
    """Return a salt as Kafka's tools write it, from at least SALT_RANDOM_BYTES bytes."""
    assert len(random) >= SALT_RANDOM_BYTES
    number = int.from_bytes(random[:SALT_RANDOM_BYTES], "big") >> (SALT_RANDOM_BYTES * 8 - _SALT_BITS)
    digits = ""
    while number:
        number, digit = divmod(number, len(_DIGITS))
        digits = _DIGITS[digit] + digits
    return (digits or "0").encode()
