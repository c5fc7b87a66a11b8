"""Logins that an attacker tries: every mechanism, with forged, damaged, replayed, oversized and misplaced messages.

Each is a generator: it yields the requests of the exchange and is sent the answers. Passwords of others are never used,
so a login as anyone but the attacker's own user is a bypass; `may_succeed` marks the honest ones.
"""

import base64
import hmac
import json
import random
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import serialization
from tests import tokens

from penstock.protocol import scram
from penstock.protocol.sasl_client import OauthBearerExchange, PlainExchange, SaslError, ScramExchange
from penstock.protocol.scram import SCRAM_HASHES

HANDSHAKE, AUTHENTICATE = 17, 36
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
OTHER_MECHANISMS = ("", "GSSAPI", "plain", "ANONYMOUS", "EXTERNAL", "SCRAM-SHA-1", "PLAIN\0", "x" * 3000)
#: More than a connection may send before it has authenticated.
OVERSIZED_BYTES = 600_000
_VERSIONS = (0, 1, 2)
_DAMAGES_MAX = 4


class Ask(NamedTuple):
    """A request without its header."""

    api_key: int
    version: int
    body: bytes


class Answer(NamedTuple):
    error: int
    auth_bytes: bytes = b""


Exchange = Generator[Ask, Answer, None]


class Login(NamedTuple):
    kind: str
    exchange: Exchange
    may_succeed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the attacker knows: its own user, names of others, what it overheard, and the issuer's public key."""

    name: str
    password: str
    token_id: str
    token_hmac: str
    #: Of a token of its own that it may spoil.
    spare_hmac: bytes
    others: tuple[str, ...]
    other_token_ids: tuple[str, ...]
    #: The messages with which others have logged in over SCRAM, by mechanism.
    overheard: dict[str, tuple[bytes, bytes]]
    #: The key of the issuer; used for its public part, and for what the issuer signs for the attacker.
    issuer_key: Any


def handshake(mechanism: str, version: int = 1) -> Ask:
    name = mechanism.encode()
    return Ask(HANDSHAKE, version, struct.pack(">h", len(name)) + name)


def authenticate(message: bytes, version: int = 1) -> Ask:
    if version < 2:
        return Ask(AUTHENTICATE, version, struct.pack(">i", len(message)) + message)
    length, left = b"", len(message) + 1
    while left > 0x7F:
        length, left = length + bytes((left & 0x7F | 0x80,)), left >> 7
    return Ask(AUTHENTICATE, version, length + bytes((left,)) + message + b"\0")


def honest(known: Known, mechanism: str, nonce: str, *, by_token: bool = False) -> Exchange:
    """The attacker logs in as itself."""
    exchange: Any
    if mechanism == "PLAIN":
        exchange = PlainExchange(known.name, known.password)
    elif mechanism == "OAUTHBEARER":
        exchange = OauthBearerExchange(_own_token(known))
    else:
        name, password = (known.token_id, known.token_hmac) if by_token else (known.name, known.password)
        exchange = ScramExchange(SCRAM_HASHES[mechanism], name, password, nonce=nonce, is_token=by_token)
    if (yield handshake(mechanism)).error:
        return
    message: bytes | None = exchange.first()
    while message is not None:
        answer = yield authenticate(message)
        if answer.error:
            return
        try:
            message = exchange.next(answer.auth_bytes)
        except SaslError:
            return


class Logins:
    def __init__(self, chance: random.Random, known: Known) -> None:
        self.chance = chance
        self.known = known
        self._tokens = _forged_tokens(chance, known)

    def honest(self) -> Login:
        mechanism = self.chance.choice(MECHANISMS)
        by_token = mechanism.startswith("SCRAM") and self.chance.random() < 0.3
        return Login(
            f"honest {mechanism}",
            honest(self.known, mechanism, self._nonce(), by_token=by_token),
            may_succeed=True,
        )

    def hostile(self) -> Login:
        make: Callable[[], Login] = self.chance.choice(
            (
                self._plain,
                self._scram,
                self._scram,
                self._bearer,
                self._delegation,
                self._replayed,
                self._disorder,
            )
        )
        return make()

    def _nonce(self) -> str:
        return base64.b64encode(self.chance.randbytes(18)).decode()

    def _victim(self) -> str:
        return self.chance.choice(self.known.others)

    def _damaged(self, message: bytes) -> bytes:
        damaged = bytearray(message)
        for _ in range(self.chance.randint(1, _DAMAGES_MAX)):
            place = self.chance.randrange(len(damaged) + 1)
            match self.chance.randrange(4):
                case 0 if place < len(damaged):
                    damaged[place] = self.chance.getrandbits(8)
                case 1:
                    del damaged[place:]
                case 2:
                    damaged[place:place] = self.chance.choice(
                        (b"\0", b",", b"=", b"\x01", b"\xff", b"n=", b"a=admin,", b",p=", b"\r\n")
                    )
                case _:
                    damaged[place:place] = damaged[: self.chance.randrange(40)]
        return bytes(damaged)

    # Each of PLAIN, SCRAM, OAUTHBEARER and delegation tokens: one message or two that no honest client sends.

    def _plain(self) -> Login:
        chance, known = self.chance, self.known
        own, victim = f"{known.name}\0{known.password}", self._victim()
        messages = (
            f"\0{victim}\0{known.password}",
            f"{victim}\0{own}",
            f"\0{victim}\0",
            f"\0\0{known.password}",
            f"\0User:{victim}\0{known.password}",
            f"\0{own}\0{victim}",
            f"\0{victim}\0{own}",
            f"\0*\0{known.password}",
            "\0ANONYMOUS\0",
            "\0" * chance.randint(0, 50),
            f"\0{victim}\0" + "p" * chance.choice((1_000, 60_000, OVERSIZED_BYTES)),
            "",
        )
        message = chance.choice(messages).encode()
        if chance.random() < 0.3:
            message = self._damaged(f"\0{victim}\0{known.password}".encode())
        return Login("PLAIN", self._sequence("PLAIN", message))

    def _sequence(self, mechanism: str, *messages: bytes) -> Exchange:
        """Sends them whatever is answered."""
        yield handshake(mechanism, self.chance.choice((1, 1, 1, 0)))
        for message in messages:
            yield authenticate(message, self.chance.choice(_VERSIONS))

    def _scram(self) -> Login:
        mechanism = self.chance.choice(tuple(SCRAM_HASHES))
        kind = self.chance.choice(("proof", "proof", "first", "final"))
        return Login(f"SCRAM {kind}", getattr(self, f"_scram_{kind}")(mechanism))

    def _scram_first(self, mechanism: str) -> Exchange:
        victim, nonce = self._victim(), self._nonce()
        message = self.chance.choice(
            (
                f"n,,n={victim},r={nonce}",
                f"p=tls-unique,,n={victim},r={nonce}",
                f"y,a={victim},n={self.known.name},r={nonce}",
                f"n,,m=ext,n={victim},r={nonce}",
                f"n,,n={victim},r={nonce},tokenauth=true",
                f"n,,n={victim},n={self.known.name},r={nonce}",
                f"n,,r={nonce},n={victim}",
                f"n,,n={victim},r=",
                f"n,,n=={victim},r={nonce}",
                f"n,,n={victim},r={nonce * 500}",
                f"n,,n={victim * 20_000},r={nonce}",
                f"n,,n={victim},r={nonce},i=1",
            )
        ).encode()
        if self.chance.random() < 0.4:
            message = self._damaged(message)
        yield handshake(mechanism)
        answer = yield authenticate(message, self.chance.choice(_VERSIONS))
        yield authenticate(answer.auth_bytes or b"c=biws,r=x,p=AAAA")

    def _scram_proof(self, mechanism: str) -> Exchange:
        """As another user, with the attacker's password, with fewer iterations, or with a proof of nothing."""
        chance, digest = self.chance, SCRAM_HASHES[mechanism]
        bare = f"n={self._victim()},r={self._nonce()}"
        yield handshake(mechanism)
        answer = yield authenticate(f"n,,{bare}".encode(), chance.choice(_VERSIONS))
        challenge = scram.parse_attributes(answer.auth_bytes)
        if challenge is None or "r" not in challenge:
            return
        iterations = chance.choice((1, 2, 4_095, 4_096))
        keys = _keys(digest, chance.choice((self.known.password, "")), challenge["s"], iterations)
        unproven = f"c=biws,r={challenge['r']}".encode()
        signed = scram.auth_message(bare.encode(), answer.auth_bytes, unproven)
        proof = scram.xor(keys.client_key, hmac.digest(keys.stored_key, signed, digest))
        proof = chance.choice(
            (proof, proof, b"", proof[:-1], proof + b"\0", bytes(len(proof)), keys.stored_key)
        )
        yield authenticate(unproven + b",p=" + base64.b64encode(proof), chance.choice(_VERSIONS))

    def _scram_final(self, mechanism: str) -> Exchange:
        """As the attacker itself, with a last message that is not what was agreed on."""
        chance, nonce = self.chance, self._nonce()
        exchange = ScramExchange(SCRAM_HASHES[mechanism], self.known.name, self.known.password, nonce=nonce)
        yield handshake(mechanism)
        answer = yield authenticate(exchange.first())
        if answer.error:
            return
        final = exchange.next(answer.auth_bytes)
        assert final is not None
        own = nonce.encode()
        yield authenticate(
            chance.choice(
                (
                    final.replace(b"c=biws", b"c=eSws"),
                    final.replace(b"c=biws", b"c="),
                    final.replace(b"r=" + own, b"r=" + own[::-1]),
                    final.replace(b",p=", b"x,p="),
                    final.replace(b",p=", b",m=1,p="),
                    final.partition(b",p=")[0],
                    final.replace(b"r=" + own, b"r=" + own + b",r=" + own),
                    exchange.first(),
                    b"\x01",
                )
            ),
            chance.choice(_VERSIONS),
        )

    def _bearer(self) -> Login:
        chance, victim = self.chance, self._victim()
        token = chance.choice(self._tokens)
        message = chance.choice(
            (
                f"n,,\x01auth=Bearer {token}\x01\x01",
                f"n,,\x01auth=Bearer {token}\x01\x01",
                f"n,a={victim},\x01auth=Bearer {_own_token(self.known)}\x01\x01",
                f"n,,\x01auth=Bearer {token}\x01auth=Bearer {_own_token(self.known)}\x01\x01",
                f"n,,\x01auth=bearer\x01principal={victim}\x01\x01",
                f"n,,\x01auth=Basic {token}\x01\x01",
                f"p=tls-unique,,\x01auth=Bearer {token}\x01\x01",
                f"n,,\x01auth=Bearer {'e' * OVERSIZED_BYTES}\x01\x01",
            )
        ).encode()
        if chance.random() < 0.3:
            message = self._damaged(f"n,,\x01auth=Bearer {token}\x01\x01".encode())
        return Login("OAUTHBEARER", self._sequence("OAUTHBEARER", message, b"\x01"))

    def _delegation(self) -> Login:
        """The id of a token that is another's or unknown, with a guessed HMAC; or without saying that it is one."""
        chance, known = self.chance, self.known
        mechanism = chance.choice(tuple(SCRAM_HASHES))
        unknown = base64.urlsafe_b64encode(chance.randbytes(16)).decode().rstrip("=")
        name, password, is_token = chance.choice(
            (
                (chance.choice(known.other_token_ids), known.token_hmac, True),
                (unknown, known.token_hmac, True),
                (self._victim(), known.password, True),
                (known.token_id, known.token_hmac, False),
                (known.token_id, "", True),
                (known.name, known.password, True),
            )
        )
        exchange = ScramExchange(
            SCRAM_HASHES[mechanism], name, password, nonce=self._nonce(), is_token=is_token
        )

        def ask() -> Exchange:
            yield handshake(mechanism)
            answer = yield authenticate(exchange.first())
            try:
                final = exchange.next(answer.auth_bytes)
            except SaslError:
                final = b"c=biws,r=x,p="
            yield authenticate(final or b"")

        return Login("delegation token", ask())

    def _replayed(self) -> Login:
        """What another client has sent when it logged in."""
        mechanism = self.chance.choice(tuple(self.known.overheard))
        first, final = self.known.overheard[mechanism]
        messages = self.chance.choice(
            ((first, final), (final,), (first, first, final), (first, self._damaged(final)))
        )
        return Login("replayed", self._sequence(mechanism, *messages))

    def _disorder(self) -> Login:
        chance = self.chance
        message = f"\0{self._victim()}\0{self.known.password}".encode()
        steps = [
            chance.choice(
                (
                    handshake(chance.choice(MECHANISMS), chance.choice((0, 1))),
                    handshake(chance.choice(OTHER_MECHANISMS)),
                    authenticate(message, chance.choice(_VERSIONS)),
                    authenticate(chance.randbytes(chance.randint(0, 300))),
                    authenticate(b""),
                )
            )
            for _ in range(chance.randint(1, 5))
        ]

        def ask() -> Exchange:
            for step in steps:  # noqa: UP028 - a list takes no answers
                yield step

        return Login("disorder", ask())


@cache
def _keys(digest: str, password: str, salt: str, iterations: int) -> scram.ScramKeys:
    salted = scram.salted_password(digest, password, scram.decode_base64(salt), iterations)
    return scram.scram_keys(digest, salted)


@cache
def _signed(key: Any, name: str) -> str:
    return tokens.token(key, sub=name, exp=int(time.time()) + 86_400)


def _own_token(known: Known) -> str:
    return _signed(known.issuer_key, known.name)


def _forged_tokens(chance: random.Random, known: Known) -> list[str]:
    """What the issuer has not signed, or not for this cluster, or not for now."""
    victim, now, issuer_key = chance.choice(known.others), int(time.time()), known.issuer_key
    own_key = tokens.new_key()
    others = tokens.claims(sub=victim)
    public = issuer_key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    made = [
        tokens.token(own_key, sub=victim),
        tokens.token(own_key, sub=victim, kid=None),
        tokens.token(own_key, sub=victim, kid="../../etc/passwd"),
        tokens.token(own_key, sub=victim, kid="two"),
        tokens.token(issuer_key, sub=victim, exp=now - 3_600),
        tokens.token(issuer_key, sub=victim, exp=None),
        tokens.token(issuer_key, sub=victim, aud="another"),
        tokens.token(issuer_key, sub=victim, aud=None),
        tokens.token(issuer_key, sub=victim, iss="https://evil.example"),
        tokens.token(issuer_key, sub=victim, nbf=now + 3_600),
        tokens.token(issuer_key, sub="*"),
        tokens.token(issuer_key, sub="ANONYMOUS"),
        tokens.token(issuer_key, sub=""),
        tokens.token(issuer_key, sub=None),
    ]
    for header in (
        {"alg": "none"},
        {"alg": "None", "kid": "one"},
        {"alg": "HS256", "kid": "one"},
        {"alg": ["ES256"], "kid": "one"},
        {"alg": "ES256", "kid": {"a": 1}},
        {"alg": "ES256", "jku": "http://127.0.0.1:1/keys", "kid": "evil"},
        {"alg": "ES256", "jwk": tokens.web_key(own_key), "kid": "evil"},
        {"alg": "ES256", "kid": "one", "crit": ["exp"], "b64": False},
        [],
        b"\xff{",
        b"[" * 50_000,
    ):
        signed = tokens.unsigned(header, others).rpartition(".")[0].encode()
        signatures = (b"", hmac.digest(public, signed, "sha256"), bytes(64), chance.randbytes(64))
        made += [tokens.unsigned(header, others, signature) for signature in signatures]
    good = tokens.token(issuer_key, sub=known.name)
    header, payload, signature = good.split(".")
    changed = base64.urlsafe_b64encode(json.dumps(others).encode()).decode().rstrip("=")
    made += [
        f"{header}.{changed}.{signature}",
        f"{header}.{payload}.",
        f"{header}.{payload}",
        good + ".x",
        "a.b.c",
    ]
    return made
