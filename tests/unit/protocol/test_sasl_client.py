"""SASL: the test vectors of the RFCs, and servers that cheat."""

import base64
import hashlib
import hmac

import pytest

from penstock.protocol.sasl_client import OauthBearerExchange, PlainExchange, SaslError, ScramExchange
from penstock.protocol.scram import SCRAM_HASHES

# RFC 7677, section 3
NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
CLIENT_FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def scram() -> ScramExchange:
    return ScramExchange("sha256", "user", "pencil", nonce=NONCE)


def test_the_vector_of_the_rfc() -> None:
    talk = scram()
    assert talk.first() == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    assert talk.next(SERVER_FIRST) == CLIENT_FINAL
    assert talk.next(SERVER_FINAL) is None


def test_plain() -> None:
    talk = PlainExchange("us\u00e9r", "pass")
    assert talk.first() == b"\0us\xc3\xa9r\0pass"
    assert talk.next(b"") is None


@pytest.mark.parametrize(
    "first",
    [
        SERVER_FIRST.replace(b"rOprNG", b"xOprNG"),
        b"r=rOprNGfwEbeRWgbNEkqO,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        SERVER_FIRST.replace(b"4096", b"1"),
        SERVER_FIRST.replace(b"4096", b"999999999999"),
        SERVER_FIRST.replace(b"W22ZaJ0SNY7soEsUEjb6gQ==", b"???"),
        b"",
        b"\xff\xfe",
    ],
)
def test_a_server_that_begins_wrongly(first: bytes) -> None:
    talk = scram()
    talk.first()
    with pytest.raises(SaslError):
        talk.next(first)


@pytest.mark.parametrize("final", [b"e=other-error", b"v=AAAA", b"", SERVER_FINAL.replace(b"6rr", b"6rs")])
def test_a_server_that_does_not_know_the_password(final: bytes) -> None:
    talk = scram()
    talk.next(SERVER_FIRST)
    with pytest.raises(SaslError):
        talk.next(final)


@pytest.mark.parametrize("mechanism", SCRAM_HASHES)
def test_a_server_of_our_own(mechanism: str) -> None:
    """The other half, written from the RFC, with a name that has to be escaped."""
    name, password, salt, rounds = "a=b,c", "p\u00e4ss", b"salt", 5000
    talk = ScramExchange(SCRAM_HASHES[mechanism], name, password, nonce="abc")
    first = talk.first().decode()
    assert first == "n,,n=a=3Db=2Cc,r=abc"
    told = f"r=abcdef,s={base64.b64encode(salt).decode()},i={rounds}"
    final = (talk.next(told.encode()) or b"").decode()
    unproven, _, proof = final.rpartition(",p=")
    digest = SCRAM_HASHES[mechanism]
    salted = hashlib.pbkdf2_hmac(digest, password.encode(), salt, rounds)
    signed = f"{first[3:]},{told},{unproven}".encode()
    stored = hashlib.new(digest, hmac.digest(salted, b"Client Key", digest)).digest()
    signature = hmac.digest(stored, signed, digest)
    key = bytes(a ^ b for a, b in zip(base64.b64decode(proof), signature, strict=True))
    assert hashlib.new(digest, key).digest() == stored
    server = hmac.digest(hmac.digest(salted, b"Server Key", digest), signed, digest)
    assert talk.next(b"v=" + base64.b64encode(server)) is None


def test_a_delegation_token_says_that_it_is_one() -> None:
    assert ScramExchange("sha256", "id", "hmac", nonce="abc", is_token=True).first() == (
        b"n,,n=id,r=abc,tokenauth=true"
    )


def test_a_bearer_token_and_its_extensions() -> None:
    """RFC 7628, section 4.1, without host and port."""
    talk = OauthBearerExchange("vF9dft4qmTc2Nvb3RlckBhbHRhdmlzdGEuY29tCg==", {"tenant": "acme"})
    assert talk.first() == (
        b"n,,\x01auth=Bearer vF9dft4qmTc2Nvb3RlckBhbHRhdmlzdGEuY29tCg==\x01tenant=acme\x01\x01"
    )
    assert talk.next(b"") is None


def test_a_bearer_token_that_is_refused() -> None:
    talk = OauthBearerExchange("token")
    assert talk.next(b'{"status":"invalid_token"}') == b"\x01"
    with pytest.raises(SaslError, match="invalid_token"):
        talk.next(b"")


@pytest.mark.parametrize(
    ("token", "extensions"),
    [("", {}), ("a\x01b", {}), ("a", {"auth": "b"}), ("a", {"n1": "b"}), ("a", {"n": "b\x01"})],
)
def test_a_bearer_token_that_would_break_its_message(token: str, extensions: dict[str, str]) -> None:
    with pytest.raises(SaslError):
        OauthBearerExchange(token, extensions)
