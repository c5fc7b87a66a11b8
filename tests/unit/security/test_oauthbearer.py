"""OAUTHBEARER: the tokens that are accepted, and every way to make one that must not be."""

import base64
import hashlib
import hmac
import json
from random import Random
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, get_default_algorithms
from tests import tokens
from tests.tokens import AUDIENCE, ISSUER, key_set, new_key, rsa_key, unsigned, web_key

from penstock.protocol.errors import ErrorCode
from penstock.protocol.sasl_client import OauthBearerExchange
from penstock.security.authentication import Authentications, BearerIdentity, BearerRefusal
from penstock.security.oauthbearer import TokenRules, TokenVerifier, parse_bearer
from penstock.security.principal import Principal
from penstock.security.scram import AuthenticationError
from penstock.security.web_keys import ALGORITHMS, InvalidKeySet, KeyRefresh, WebKeySet

NOW_S = 1_700_000_000
NOW_MS = NOW_S * 1000
KEY, OTHER_KEY = new_key(), new_key()
RULES = TokenRules(audiences=(AUDIENCE, "other"), issuer=ISSUER)


def verifier(document: bytes | None = None, rules: TokenRules = RULES) -> TokenVerifier:
    return TokenVerifier(rules, WebKeySet.parse(document or key_set(one=KEY)))


def token(key: Any = KEY, **options: Any) -> str:
    return tokens.token(key, **({"now_s": NOW_S} | options))


def verify(given: str, server: TokenVerifier | None = None) -> BearerIdentity | BearerRefusal:
    return (server or verifier()).verify(OauthBearerExchange(given).first(), NOW_MS)


def refusal(given: str, server: TokenVerifier | None = None) -> str:
    found = verify(given, server)
    assert isinstance(found, BearerRefusal), found
    assert json.loads(found.challenge) == {"status": "invalid_token"}
    assert given.rpartition(".")[2][:8] not in found.reason or not given.rpartition(".")[2]
    return found.reason


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm(algorithm: str) -> None:
    key = new_key(algorithm)
    server = verifier(key_set(one=key))
    assert verify(token(key, algorithm=algorithm), server) == BearerIdentity("alice", NOW_MS + 300_000)
    wrong = new_key(algorithm) if algorithm[:2] in ("ES", "Ed") else rsa_key(3072)
    assert refusal(token(wrong, algorithm=algorithm), server) == "its signature is wrong"


def test_tokens_without_a_signature() -> None:
    for algorithm in ("none", "None", "NONE", "", None, 7, ["ES256"], {"ES256": 1}):
        for header in ({"alg": algorithm, "kid": "one"}, {"alg": algorithm}, {}):
            assert "is not accepted" in refusal(unsigned(header, tokens.claims(NOW_S)))
    assert refusal(unsigned({"alg": "ES256", "kid": "one"}, tokens.claims(NOW_S))) == "its signature is wrong"


@pytest.mark.parametrize("digest", ["256", "384", "512"])
def test_an_hmac_with_the_public_key(digest: str) -> None:
    """The public key is known to all, in each of the forms that a library may take for a secret."""
    key = rsa_key()
    public = key.public_key()
    secrets = [
        public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        public.public_bytes(Encoding.PEM, PublicFormat.PKCS1),
        public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        json.dumps(web_key(key, kid="one")).encode(),
    ]
    for name in (f"HS{digest}", f"RS{digest}"):
        body = unsigned({"alg": name, "kid": "one"}, tokens.claims(NOW_S)).rpartition(".")[0]
        for secret in secrets:
            signature = hmac.digest(secret, body.encode(), f"sha{digest}")
            forged = f"{body}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"
            assert isinstance(verify(forged, verifier(key_set(one=key))), BearerRefusal)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"aud": "payments"}, "its audience 'payments' is not in sasl.oauthbearer.expected.audience"),
        ({"aud": ["payments", "billing"]}, "audience"),
        ({"aud": None}, "audience"),
        ({"aud": []}, "audience"),
        ({"aud": [AUDIENCE, 7]}, "audience"),
        ({"aud": {AUDIENCE: 1}}, "audience"),
        ({"iss": "https://evil.example"}, "issuer"),
        ({"iss": None}, "issuer"),
        ({"iss": [ISSUER]}, "issuer"),
        ({"iss": ISSUER + "/"}, "issuer"),
        ({"exp": NOW_S - 30}, "it has expired"),
        ({"exp": None}, "exp or iat is missing"),
        ({"exp": "1900000000"}, "exp is no time"),
        ({"exp": True}, "exp is no time"),
        ({"exp": -1}, "exp is no time"),
        ({"exp": 10**30}, "exp is no time"),
        ({"exp": 10**400}, "exp is no time"),
        ({"exp": float("inf")}, "exp is no time"),
        ({"exp": float("nan")}, "exp is no time"),
        ({"exp": [NOW_S + 300]}, "exp is no time"),
        ({"iat": None}, "exp or iat is missing"),
        ({"nbf": NOW_S + 31}, "it is not valid yet"),
        ({"nbf": "now"}, "nbf is no time"),
        ({"sub": None}, "sub is missing or empty"),
        ({"sub": ""}, "sub is missing or empty"),
        ({"sub": " "}, "sub is missing or empty"),
        ({"sub": 7}, "sub is missing or empty"),
        ({"sub": ["alice"]}, "sub is missing or empty"),
        ({"sub": " alice"}, "blanks"),
        ({"sub": "alice\n"}, "blanks"),
        ({"sub": "al\x00ice"}, "control"),
        ({"sub": "al\u2028ice"}, "control"),
        ({"sub": "\ud800"}, "control"),
        ({"scope": 7}, "scope"),
        ({"scope": ["read", 7]}, "scope"),
    ],
)
def test_claims_that_are_refused(others: dict[str, Any], reason: str) -> None:
    body = {name: value for name, value in (tokens.claims(NOW_S) | others).items() if value is not None}
    signer = json.dumps(body).encode()
    header = unsigned({"alg": "ES256", "kid": "one"}, signer).rpartition(".")[0]
    assert reason in refusal(signed(header))


def signed(unsigned_part: str) -> str:
    signature = get_default_algorithms()["ES256"].sign(unsigned_part.encode(), KEY)
    return f"{unsigned_part}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def test_clocks_that_differ() -> None:
    for others in ({"exp": NOW_S - 29}, {"nbf": NOW_S + 30}, {"iat": NOW_S + 3600}):
        assert isinstance(verify(token(**others)), BearerIdentity)
    strict = verifier(rules=TokenRules(audiences=(AUDIENCE,), clock_skew_ms=0))
    assert refusal(token(exp=NOW_S), strict) == "it has expired"
    assert refusal(token(nbf=NOW_S + 1), strict) == "it is not valid yet"
    # The session ends with the token; one that is accepted late still has the skew.
    assert verify(token(exp=NOW_S + 10)) == BearerIdentity("alice", NOW_MS + 10_000)
    assert verify(token(exp=NOW_S - 10)) == BearerIdentity("alice", NOW_MS + 20_000)


def test_what_the_settings_leave_open() -> None:
    server = verifier(rules=TokenRules(subject_claim="client_id", scope_claim="scp"))
    assert "audience" in refusal(token(client_id="app"), server)  # it is for another service
    found = verify(token(aud=None, iss=None, sub=None, client_id="app", scp=["a", "b"]), server)
    assert found == BearerIdentity("app", NOW_MS + 300_000)
    assert "client_id" in refusal(token(aud=None), server)
    assert "scp" in refusal(token(aud=None, client_id="app", scp=1), server)


def test_a_replaced_payload() -> None:
    header, _, signature = token().split(".")
    _, payload, _ = token(sub="admin").split(".")
    assert refusal(f"{header}.{payload}.{signature}") == "its signature is wrong"
    changed = token()[:-4] + ("AAAA" if not token().endswith("AAAA") else "BBBB")
    assert isinstance(verify(changed), BearerRefusal)


def test_keys_that_a_token_brings() -> None:
    """The token is signed by the key that it names or contains, which is not in the operator's key set."""
    own = {
        "jwk": web_key(OTHER_KEY, kid="one"),
        "jku": "https://evil.example/keys",
        "x5u": "https://evil.example/certificate",
        "x5c": ["MIIB"],
    }
    for header in (own, *({name: value} for name, value in own.items())):
        forged = jwt.encode(
            tokens.claims(NOW_S), OTHER_KEY, algorithm="ES256", headers={"kid": "one", **header}
        )
        assert refusal(forged) == "its signature is wrong"


def test_header_extensions() -> None:
    for header in ({"crit": ["b64"], "b64": False}, {"crit": ["exp"]}, {"b64": True}, {"crit": []}):
        given = signed(
            unsigned({"alg": "ES256", "kid": "one"} | header, tokens.claims(NOW_S)).rpartition(".")[0]
        )
        assert isinstance(verify(given), BearerRefusal)


def test_ids_of_keys() -> None:
    server = verifier(key_set(one=KEY, two=OTHER_KEY))
    assert isinstance(verify(token(OTHER_KEY, kid="two"), server), BearerIdentity)
    assert refusal(token(KEY, kid="two"), server) == "its signature is wrong"
    assert "no single key 'three' for ES256" in refusal(token(KEY, kid="three"), server)
    assert "no single key (NoneType) for ES256" in refusal(token(KEY, kid=None), server)
    assert isinstance(verify(token(KEY, kid=None)), BearerIdentity)  # there is only one
    rsa = token(rsa_key(), algorithm="RS256")
    assert "for RS256" in refusal(rsa)  # the key with this id is for ES256
    for key_id in (7, ["one"], None, {}):
        given = unsigned({"alg": "ES256", "kid": key_id}, tokens.claims(NOW_S), b"x" * 64)
        assert isinstance(verify(given), BearerRefusal)


def test_when_newer_keys_may_help() -> None:
    server = verifier()

    def lacks(given: str) -> bool:
        return server.lacks_key(OauthBearerExchange(given).first())

    assert lacks(token(OTHER_KEY, kid="two"))
    assert not lacks(token())
    assert not lacks(token(kid=None))
    assert not lacks(unsigned({"alg": "none", "kid": "two"}, {}))
    assert not lacks(unsigned({"alg": "ES256", "kid": "two"}, {"x": "y" * 20_000}))
    assert not server.lacks_key(b"n,,\x01\x01")
    server.keys = None
    assert lacks(token())
    assert refusal(token(), server) == "the key set could not be read yet"
    server.keys = WebKeySet.parse(key_set(two=OTHER_KEY))
    assert isinstance(verify(token(OTHER_KEY, kid="two"), server), BearerIdentity)
    assert isinstance(verify(token(), server), BearerRefusal)  # its key was withdrawn


def test_tokens_that_are_no_tokens() -> None:
    deep = b"[" * 9_000
    cases = [
        "x",
        "a.b",
        "a.b.c",
        "....",
        token() + ".x",
        token().replace(".", ""),
        "." + token(),
        unsigned(b"not json", {}),
        unsigned([], {}),
        unsigned(deep, {}),
        unsigned(b'{"alg":' + deep, {}),
        signed(unsigned({"alg": "ES256", "kid": "one"}, [1]).rpartition(".")[0]),
        signed(unsigned({"alg": "ES256", "kid": "one"}, b"\xff").rpartition(".")[0]),
        signed(unsigned({"alg": "ES256", "kid": "one"}, deep).rpartition(".")[0]),
        unsigned({"alg": "ES256", "kid": "one"}, {}, b"x"),
    ]
    for case in cases:
        assert isinstance(verify(case), BearerRefusal)


def test_a_token_that_is_too_large() -> None:
    large = token(padding="x" * 16_384)
    assert refusal(large) == "the token has more than 16384 bytes"
    roomy = verifier(rules=TokenRules(audiences=(AUDIENCE,), token_bytes_max=100_000))
    assert isinstance(verify(large, roomy), BearerIdentity)


# The message


def test_the_message_of_a_client() -> None:
    parsed = parse_bearer(b"n,a=al=2Cic=3De,\x01auth=Bearer abc.def\x01tenant=acme x\x01\x01")
    assert parsed == ("abc.def", "al,ic=e", {"tenant": "acme x"})
    assert "abc.def" not in repr(parsed)
    assert parse_bearer(b"n,,\x01a=b\x01auth=bearer  t\x01\x01").token == "t"


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x01",
        b"n,,",
        b"n,,\x01",
        b"n,,\x01\x01",
        b"n,,\x01\x01\x01",
        b"y,,\x01auth=Bearer t\x01\x01",
        b"p=tls-unique,,\x01auth=Bearer t\x01\x01",
        b"n,a=x\x01auth=Bearer t\x01\x01",
        b"n,a=,\x01auth=Bearer t\x01\x01",
        b"n,,\x01auth=Bearer t\x01",
        b"n,,\x01auth=Bearer \x01\x01",
        b"n,,\x01auth=Basic t\x01\x01",
        b"n,,\x01auth=Bearer t t\x01\x01",
        b"n,,\x01auth=Bearer t\x00\x01\x01",
        b"n,,\x01auth=Bearer t\x01auth=Bearer u\x01\x01",
        b"n,,\x01auth=Bearer t\x01\x01\x01",
        b"n,,\x01auth=Bearer t\x01=x\x01\x01",
        b"n,,\x01auth=Bearer t\x01x\x01\x01",
        b"n,,\x01auth=Bearer t\x01x=\x01\x01",
        b"n,,\x01auth=Bearer t\x01a1=x\x01\x01",
        b"n,,\x01tenant=acme\x01\x01",
        b"n,,\x01auth=Bearer \xff\x01\x01",
        b"\0alice\0password",
    ],
)
def test_messages_that_are_refused(message: bytes) -> None:
    with pytest.raises(AuthenticationError):
        parse_bearer(message)
    assert not verifier().lacks_key(message)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_no_message_breaks_the_node_or_gets_in(message: bytes, position: int, byte: int) -> None:
    good = bytearray(OauthBearerExchange(token()).first())
    changed = bytes(good[: position % len(good)]) + bytes([byte]) + bytes(good[position % len(good) + 1 :])
    for tried in (message, b"n,,\x01auth=Bearer " + message + b"\x01\x01", changed):
        try:
            found = verifier().verify(tried, NOW_MS)
        except AuthenticationError:
            continue
        assert isinstance(found, BearerRefusal) or tried.lower() == bytes(good).lower()


# The whole login


class NoCredentials:
    def scram(self, mechanism: str, user: str) -> None:
        return None

    def token(self, token_id: str, now_ms: int) -> None:
        return None


def listener() -> Authentications:
    return Authentications(
        ("OAUTHBEARER",),
        NoCredentials(),
        secret=lambda: b"secret",
        random=lambda size: bytes(size),
        bearer=verifier(),
        session_ms_max={"OAUTHBEARER": 60_000},
    )


def log_in(given: str, authorization: str = "") -> Any:
    server = listener().new()
    server.handshake("OAUTHBEARER", NOW_MS)
    message = OauthBearerExchange(given).first().replace(b"n,,", f"n,{authorization},".encode())
    return server, server.authenticate(message, NOW_MS)


def test_a_login_with_its_session() -> None:
    _, step = log_in(token(exp=NOW_S + 40), "a=alice")
    assert (step.principal, step.session_lifetime_ms) == (Principal("User", "alice"), 40_000)
    _, step = log_in(token(exp=NOW_S + 90))
    assert step.session_lifetime_ms == 60_000


def test_a_refused_token_is_acknowledged_first() -> None:
    server, step = log_in(token(aud="payments"))
    assert (step.error, step.reply) == (ErrorCode.none, b'{"status":"invalid_token"}')
    assert not server.is_complete(NOW_MS)
    step = server.authenticate(b"\x01", NOW_MS)
    assert step.error is ErrorCode.sasl_authentication_failed
    assert server.is_failed


@pytest.mark.parametrize("name", ["*", "ANONYMOUS"])
def test_names_that_mean_something_else(name: str) -> None:
    server, step = log_in(token(sub=name))
    assert step.error is ErrorCode.sasl_authentication_failed
    assert server.is_failed


def test_a_token_is_for_its_subject_only() -> None:
    server, step = log_in(token(), "a=admin")
    assert step.error is ErrorCode.sasl_authentication_failed
    assert step.reason == "the client wants to act as another user"
    assert server.is_failed


# Key sets


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no key set"),
        (b'{"keys": {}}', "no key set"),
        (b'{"keys": []}', "no key"),
        (b'{"keys": [7]}', "no object"),
        (json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}).encode(), "its kind"),
        (json.dumps({"keys": [{"kty": "EC", "crv": "secp256k1"}]}).encode(), "its kind"),
        (json.dumps({"keys": [{"kty": ["EC"], "crv": {}}]}).encode(), "its kind"),
        (json.dumps({"keys": [{"kty": "RSA"}]}).encode(), "damaged"),
        (json.dumps({"keys": [{"kty": "RSA", "n": "AQAB", "e": 3}]}).encode(), "damaged"),
        (json.dumps({"keys": [web_key(KEY, alg="RS256")]}).encode(), "its alg"),
        (json.dumps({"keys": [web_key(KEY, alg="HS256")]}).encode(), "its alg"),
        (json.dumps({"keys": [web_key(KEY, alg=["ES256"])]}).encode(), "its alg"),
        (json.dumps({"keys": [web_key(KEY, use="enc")]}).encode(), "not for signatures"),
        (json.dumps({"keys": [web_key(KEY, key_ops=["sign"])]}).encode(), "not for signatures"),
        (json.dumps({"keys": [web_key(KEY, kid=7)]}).encode(), "kid"),
        (json.dumps({"keys": [web_key(KEY, kid="x" * 1001)]}).encode(), "kid"),
        (json.dumps({"keys": [web_key(rsa_key(1024))]}).encode(), "2048 bits"),
        (json.dumps({"keys": [{}] * 101}).encode(), "100 keys"),
        (b" " * (1024 * 1024 + 1), "bytes"),
    ],
)
def test_key_sets_that_are_refused(document: bytes, reason: str) -> None:
    with pytest.raises(InvalidKeySet, match=reason):
        WebKeySet.parse(document)


def test_a_key_set_keeps_what_it_can_use() -> None:
    keys = [{"kty": "oct", "k": "x", "kid": "hmac"}, web_key(KEY, kid="one", use="sig", alg="ES256")]
    found = WebKeySet.parse(json.dumps({"keys": keys}).encode())
    assert found.key_ids == ["one"]
    assert found.left_out == ("key 1: its kind signs with none of the algorithms that are accepted",)
    assert isinstance(verify(token(), TokenVerifier(RULES, found)), BearerIdentity)


def test_a_private_key_in_a_key_set_is_not_kept() -> None:
    private = json.loads(str(ECAlgorithm.to_jwk(KEY)))
    found = WebKeySet.parse(json.dumps({"keys": [{**private, "kid": "one"}]}).encode())
    assert not hasattr(found.find("one", "ES256"), "private_numbers")
    assert private["d"] not in repr(vars(found))
    assert isinstance(verify(token(), TokenVerifier(RULES, found)), BearerIdentity)


def test_when_keys_are_read() -> None:
    refresh = KeyRefresh(refresh_ms=3_600_000, retry_ms=100, retry_ms_max=10_000, chance=Random(1))
    assert refresh.may_begin(0)
    refresh.begin(0)
    assert not refresh.may_begin(9_999)
    assert refresh.may_begin(10_000)
    pauses = [refresh.after_failure() for _ in range(20)]
    assert 50 <= pauses[0] <= 150
    assert 5_000 <= pauses[-1] <= 15_000
    assert refresh.after_success() == 3_600_000
    assert refresh.after_failure() <= 150


def test_names_in_reasons_are_short() -> None:
    long = hashlib.sha256(b"x").hexdigest() * 20
    assert len(refusal(token(iss=long))) < 250
    assert len(refusal(unsigned({"alg": long}, {}))) < 350
