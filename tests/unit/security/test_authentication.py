"""SASL exchanges: the vectors of the RFCs, clients of ours, clients that cheat, sessions that end."""

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol import scram as formulas
from penstock.protocol.errors import ErrorCode
from penstock.protocol.sasl_client import MECHANISMS, PlainExchange, SaslError, SaslExchange, ScramExchange
from penstock.protocol.scram import SCRAM_HASHES
from penstock.security import scram
from penstock.security.authentication import (
    Authentication,
    Authentications,
    BearerIdentity,
    BearerRefusal,
    Step,
    TokenLogin,
)
from penstock.security.plain import PlainUsers
from penstock.security.principal import Principal
from penstock.security.scram import (
    AuthenticationError,
    ScramCredential,
    ScramServerExchange,
    fake_credential,
    new_credential,
)

SECRET = b"the secret of the cluster"
ALICE = Principal("User", "alice")
SHA_256, SHA_512 = SCRAM_HASHES
SALT = b"0123456789abcdef"


class Stored:
    """Credentials by mechanism and user, and delegation tokens by id."""

    def __init__(self, **passwords: str) -> None:
        self.users: dict[tuple[str, str], ScramCredential] = {}
        self.tokens: dict[str, TokenLogin] = {}
        for name, password in passwords.items():
            self.set(name, password)

    def set(self, name: str, password: str, iterations: int = 4096) -> None:
        for mechanism in SCRAM_HASHES:
            self.users[mechanism, name] = new_credential(
                mechanism, password, salt=SALT, iterations=iterations
            )

    def scram(self, mechanism: str, user: str) -> ScramCredential | None:
        return self.users.get((mechanism, user))

    def iterations_max(self) -> dict[str, int]:
        most: dict[str, int] = {}
        for mechanism, name in self.users:
            if mechanism == SHA_256 or (SHA_256, name) not in self.users:
                most[mechanism] = max(most.get(mechanism, 0), self.users[mechanism, name].iterations)
        return most

    def token(self, token_id: str, now_ms: int) -> TokenLogin | None:
        token = self.tokens.get(token_id)
        return token if token is not None and token.expires_ms > now_ms else None


class Verifier:
    """Takes the message `good:NAME`, which is valid until 10,000 ms."""

    def lacks_key(self, message: bytes) -> bool:
        return message == b"new key"

    def verify(self, message: bytes, now_ms: int) -> BearerIdentity | BearerRefusal:
        kind, _, name = message.decode().partition(":")
        if kind == "malformed":
            raise AuthenticationError("malformed")
        if kind == "good":
            return BearerIdentity(name, 10_000)
        return BearerRefusal(b'{"status":"invalid_token"}', "not good")


def listener(stored: Stored | None = None, **options: Any) -> Authentications:
    numbers = iter(range(1_000_000))
    made: dict[str, Any] = {
        "secret": lambda: SECRET,
        "random": lambda size: next(numbers).to_bytes(size, "big"),
        "bearer": Verifier(),
        **options,
    }
    return Authentications(made.pop("mechanisms", MECHANISMS), stored or Stored(alice="pw"), **made)


def log_in(server: Authentication, mechanism: str, client: SaslExchange, now_ms: int = 0) -> Step:
    """Run a whole exchange; return its last step. Raises SaslError if the client refuses the server."""
    assert server.handshake(mechanism, now_ms).error is ErrorCode.none
    message: bytes | None = client.first()
    while True:
        assert message is not None
        step = server.authenticate(message, now_ms)
        if step.error is not ErrorCode.none:
            return step
        message = client.next(step.reply)
        if message is None:
            return step


def scram_client(mechanism: str, name: str, password: str, **options: Any) -> ScramExchange:
    return ScramExchange(SCRAM_HASHES[mechanism], name, password, nonce="client", **options)


def is_refused(server: Authentication, step: Step) -> bool:
    return step.error is ErrorCode.sasl_authentication_failed and server.is_failed and not step.reply


# SCRAM


def test_the_vector_of_rfc_7677() -> None:
    salt = formulas.decode_base64("W22ZaJ0SNY7soEsUEjb6gQ==")
    credential = new_credential(SHA_256, "pencil", salt=salt, iterations=4096)
    server = ScramServerExchange(
        SHA_256, lambda login: credential, nonce="%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0", secret=SECRET
    )
    assert server.first(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO") == (
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    assert server.final(
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    ) == (b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


def test_the_vector_of_rfc_5802(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for SHA-1, which this server does not offer; the formulas do not depend on the hash."""
    monkeypatch.setitem(SCRAM_HASHES, "SCRAM-SHA-1", "sha1")
    salt = formulas.decode_base64("QSXCR+Q6sek8bf92")
    credential = new_credential("SCRAM-SHA-1", "pencil", salt=salt, iterations=4096)
    server = ScramServerExchange(
        "SCRAM-SHA-1", lambda login: credential, nonce="3rfcNHYJY1ZVvWVs7j", secret=SECRET
    )
    assert server.first(b"n,,n=user,r=fyko+d2lbbFgONRv9qkxdawL") == (
        b"r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096"
    )
    assert server.final(
        b"c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts="
    ) == (b"v=rmF9pqV8S7suAoZWja4dJRkFsKQ=")


@pytest.mark.parametrize("mechanism", SCRAM_HASHES)
def test_a_login_with_scram(mechanism: str) -> None:
    server = listener().new()
    step = log_in(server, mechanism, scram_client(mechanism, "alice", "pw"))
    assert step.principal == server.principal == ALICE
    assert server.is_complete(0)
    assert step.session_lifetime_ms == 0


@pytest.mark.parametrize("name", ["a=b", "a,b", "=2C", ",=,=", "жук", "alice "])
def test_names_that_have_to_be_escaped(name: str) -> None:
    stored = Stored()
    stored.set(name, "p=,w")
    step = log_in(listener(stored).new(), SHA_256, scram_client(SHA_256, name, "p=,w"))
    assert step.principal == Principal("User", name)


@given(
    name=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    password=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    mechanism=st.sampled_from(list(SCRAM_HASHES)),
)
@settings(max_examples=25, deadline=None)
def test_any_name_and_password(name: str, password: str, mechanism: str) -> None:
    stored = Stored()
    stored.users[mechanism, name] = new_credential(mechanism, password, salt=SALT, iterations=4096)
    server = listener(stored).new()
    assert log_in(server, mechanism, scram_client(mechanism, name, password)).principal == Principal(
        "User", name
    )
    wrong = listener(stored).new()
    assert is_refused(wrong, log_in(wrong, mechanism, scram_client(mechanism, name, password + "x")))


@given(message=st.binary(max_size=200), mechanism=st.sampled_from(MECHANISMS), prefix=st.sampled_from(
    [b"", b"n,,", b"n,,n=alice,r=", b"\0alice\0", b"y,a=alice,n=alice,r=x", b"c=biws,r=", b"n,,\x01auth=Bearer "]
))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_random_bytes_never_log_in(message: bytes, mechanism: str, prefix: bytes) -> None:
    server = listener(bearer=NoToken()).new()
    server.handshake(mechanism, 0)
    for each in (prefix + message, message):
        step = server.authenticate(each, 0)
        assert step.principal is None
    assert not server.is_complete(0)


class NoToken:
    def lacks_key(self, message: bytes) -> bool:
        return False

    def verify(self, message: bytes, now_ms: int) -> BearerIdentity | BearerRefusal:
        return BearerRefusal(b"no", "no")


def test_an_unknown_user_gets_the_answers_of_a_known_one() -> None:
    made = listener()
    first: dict[str, bytes] = {}
    refusals = set()
    for name in ("alice", "bob"):
        server = made.new()
        server.handshake(SHA_256, 0)
        client = scram_client(SHA_256, name, "wrong")
        step = server.authenticate(client.first(), 0)
        assert step.error is ErrorCode.none
        first[name] = step.reply
        final = client.next(step.reply)
        assert final is not None
        refused = server.authenticate(final, 0)
        assert is_refused(server, refused)
        refusals.add(refused)
    assert len(refusals) == 1
    parsed = {name: formulas.parse_attributes(reply) or {} for name, reply in first.items()}
    assert list(parsed["alice"]) == list(parsed["bob"])
    assert parsed["alice"]["i"] == parsed["bob"]["i"]


def test_an_unknown_user_always_has_the_same_salt() -> None:
    salts = set()
    for _ in range(3):
        server = listener().new()  # as on three nodes
        server.handshake(SHA_256, 0)
        reply = server.authenticate(scram_client(SHA_256, "bob", "x").first(), 0).reply
        salts.add((formulas.parse_attributes(reply) or {})["s"])
    assert len(salts) == 1
    assert fake_credential(SHA_256, "bob", SECRET).salt != fake_credential(SHA_256, "eve", SECRET).salt
    assert fake_credential(SHA_256, "bob", SECRET) != fake_credential(SHA_256, "bob", b"other")


def test_a_salt_looks_like_those_of_kafkas_tools() -> None:
    salt = fake_credential(SHA_256, "bob", SECRET).salt
    assert salt.isalnum()
    assert 20 <= len(salt) <= 26


class CountedWork:
    """Counts what is computed, because times on a busy machine say nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        for module, name in ((scram.hmac, "digest"), (scram.hmac, "compare_digest"), (hashlib, "new")):
            monkeypatch.setattr(module, name, self._counted(name, getattr(module, name)))
        monkeypatch.setattr(hashlib, "pbkdf2_hmac", self._counted("pbkdf2", hashlib.pbkdf2_hmac))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.done.append(f"{name} {arguments[-1]}" if name == "pbkdf2" else name)
            return function(*arguments)

        return call

    def of(self, work: Callable[[], object]) -> list[str]:
        self.done = []
        work()
        return self.done


@pytest.mark.parametrize("mechanism", SCRAM_HASHES)
def test_an_unknown_user_costs_what_a_wrong_password_costs(
    mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, work = listener(), CountedWork(monkeypatch)

    def attempt(name: str) -> None:
        server = made.new()
        server.handshake(mechanism, 0)
        challenge = formulas.parse_attributes(server.authenticate(f"n,,n={name},r=x".encode(), 0).reply) or {}
        server.authenticate(f"c=biws,r={challenge['r']},p=AAAA".encode(), 0)

    attempt("alice")
    assert work.of(lambda: attempt("alice")) == work.of(lambda: attempt("nobody")) != []


def server_in_exchange() -> tuple[Authentication, dict[str, str]]:
    server = listener().new()
    server.handshake(SHA_256, 0)
    reply = server.authenticate(b"n,,n=alice,r=abc", 0).reply
    return server, formulas.parse_attributes(reply) or {}


def final_message(challenge: dict[str, str], *, binding: str = "biws", nonce: str | None = None) -> bytes:
    """The right proof for this binding and nonce."""
    salted = formulas.salted_password("sha256", "pw", SALT, 4096)
    keys = formulas.scram_keys("sha256", salted)
    unproven = f"c={binding},r={nonce or challenge['r']}".encode()
    first = f"r={challenge['r']},s={challenge['s']},i={challenge['i']}".encode()
    signed = formulas.auth_message(b"n=alice,r=abc", first, unproven)
    signature = scram.hmac.digest(keys.stored_key, signed, "sha256")
    return unproven + b",p=" + formulas.encode_base64(formulas.xor(keys.client_key, signature)).encode()


def test_the_final_message_of_this_test_is_right() -> None:
    server, challenge = server_in_exchange()
    assert server.authenticate(final_message(challenge), 0).principal == ALICE


def test_a_replayed_final_message() -> None:
    server, challenge = server_in_exchange()
    recorded = final_message(challenge)
    assert server.authenticate(recorded, 0).principal == ALICE
    made = listener()
    made.random(1)  # the server's nonce is another one now
    again = made.new()
    again.handshake(SHA_256, 0)
    again.authenticate(b"n,,n=alice,r=abc", 0)
    assert is_refused(again, again.authenticate(recorded, 0))


@pytest.mark.parametrize(
    "forged",
    [
        lambda c: final_message(c, nonce="abc"),
        lambda c: final_message(c, nonce=c["r"] + "x"),
        lambda c: final_message(c, binding="eSws"),  # y,, where the first message said n,,
        lambda c: final_message(c, binding="cD10bHMsLA=="),
        lambda c: final_message(c).replace(b",p=", b",p=AA"),
        lambda c: final_message(c)[:-4],
        lambda c: final_message(c).partition(b",p=")[0],
        lambda c: final_message(c).partition(b",p=")[0] + b",p=",
        lambda c: final_message(c).partition(b",p=")[0] + b",p=\xff\xfe",
        lambda c: final_message(c).replace(b"c=biws,", b""),
        lambda c: b"",
        lambda c: b"\xff",
    ],
)
def test_a_forged_final_message(forged: Callable[[dict[str, str]], bytes]) -> None:
    server, challenge = server_in_exchange()
    assert is_refused(server, server.authenticate(forged(challenge), 0))
    assert not server.is_complete(0)


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"n",
        b"n,,",
        b"n,,n=,r=abc",
        b"n,,n=alice",
        b"n,,n=alice,r=",
        b"n,,r=abc,n=alice",
        b"n,,n=a=lice,r=abc",
        b"n,,n=a\0lice,r=abc",
        b"n,,n=\xff,r=abc",
        b"n,,n=alice,r=a\x01bc",
        b"n,,n=alice,r=" + b"x" * 2000,
        b"n,,m=x,n=alice,r=abc",
        b"n,,n=alice,r=abc,m=x",
        b"n,,n=alice,r=abc,n=bob",
        b"n,,n=alice,r=abc,i=1",
        b"n,b=alice,n=alice,r=abc",
        b"p=tls-unique,,n=alice,r=abc",
        b"x,,n=alice,r=abc",
    ],
)
def test_a_malformed_first_message(first: bytes) -> None:
    server = listener().new()
    server.handshake(SHA_256, 0)
    assert is_refused(server, server.authenticate(first, 0))
    assert server.authenticate(b"n,,n=alice,r=abc", 0).error is ErrorCode.illegal_sasl_state


@pytest.mark.parametrize(("authorization", "is_taken"), [("alice", True), ("bob", False)])
def test_acting_as_another_user(authorization: str, is_taken: bool) -> None:
    server = listener().new()
    server.handshake(SHA_256, 0)
    gs2 = f"n,a={authorization},"
    reply = server.authenticate(f"{gs2}n=alice,r=abc".encode(), 0).reply
    challenge = formulas.parse_attributes(reply) or {}
    step = server.authenticate(final_message(challenge, binding=formulas.encode_base64(gs2.encode())), 0)
    assert step.principal == (ALICE if is_taken else None)
    assert server.is_complete(0) is is_taken


def test_a_credential_with_too_few_iterations() -> None:
    stored = Stored()
    stored.set("alice", "pw", iterations=1)
    server = listener(stored).new()
    client = ScramExchange("sha256", "alice", "pw", nonce="c")
    assert is_refused(server, log_in(server, SHA_256, client))


# PLAIN


@pytest.mark.parametrize("uses_scram", [False, True])
def test_a_login_with_plain(uses_scram: bool) -> None:
    users = PlainUsers.parse(
        'org.apache.kafka.common.security.plain.PlainLoginModule required user_alice="p;\\"w" user_b.c-d="x";'
    )
    made = listener(plain_users=users, plain_uses_scram=uses_scram)
    assert log_in(made.new(), "PLAIN", PlainExchange("alice", 'p;"w')).principal == ALICE
    assert log_in(made.new(), "PLAIN", PlainExchange("b.c-d", "x")).principal == Principal("User", "b.c-d")
    for name, password in (
        ("alice", "pw" if not uses_scram else "no"),
        ("alice", ""),
        ("", "x"),
        ("bob", "x"),
    ):
        server = made.new()
        assert is_refused(server, log_in(server, "PLAIN", PlainExchange(name, password)))


def test_plain_against_scram_credentials() -> None:
    made = listener(plain_uses_scram=True)
    assert log_in(made.new(), "PLAIN", PlainExchange("alice", "pw")).principal == ALICE
    assert log_in(made.new(), "PLAIN", PlainExchange("alice", "wrong")).principal is None
    server = made.new()
    server.handshake("PLAIN", 0)
    assert server.takes_long(b"")
    other = listener().new()
    other.handshake("PLAIN", 0)
    assert not other.takes_long(b"")
    assert log_in(listener().new(), "PLAIN", PlainExchange("alice", "pw")).principal is None


@pytest.mark.parametrize("uses_scram", [False, True])
def test_an_unknown_user_of_plain_costs_what_a_wrong_password_costs(
    uses_scram: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = listener(plain_users=PlainUsers({"carol": "x"}), plain_uses_scram=uses_scram)
    work = CountedWork(monkeypatch)

    def attempt(name: str, password: str = "wrong") -> None:
        server = made.new()
        server.handshake("PLAIN", 0)
        server.authenticate(f"\0{name}\0{password}".encode(), 0)

    known = work.of(lambda: attempt("alice"))
    assert known == work.of(lambda: attempt("carol")) == work.of(lambda: attempt("nobody")) != []


def test_every_name_costs_plain_the_same_whatever_mechanism_and_iterations_the_user_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise time tells which users exist."""
    stored = Stored(alice="pw")
    stored.set("bob", "pw", iterations=16_384)
    del stored.users[SHA_512, "bob"]
    stored.set("dora", "pw", iterations=8_192)
    del stored.users[SHA_256, "dora"]
    made = listener(stored, plain_users=PlainUsers({"carol": "pw"}), plain_uses_scram=True)
    spent: Counter[str] = Counter()

    def pbkdf2(digest: str, password: bytes, salt: bytes, iterations: int) -> bytes:
        spent[digest] += iterations
        return derive(digest, password, salt, iterations)

    derive = hashlib.pbkdf2_hmac
    monkeypatch.setattr(hashlib, "pbkdf2_hmac", pbkdf2)
    for name in ("alice", "bob", "dora", "carol", "nobody"):
        for password in ("pw", "wrong"):
            spent.clear()
            is_accepted = log_in(made.new(), "PLAIN", PlainExchange(name, password)).principal is not None
            assert is_accepted == (password == "pw" and name != "nobody")
            assert spent == {"sha256": 16_384, "sha512": 8_192}, name


@pytest.mark.parametrize(
    "message", [b"", b"\0", b"\0\0", b"alice\0pw", b"bob\0alice\0pw", b"\0alice\0pw\0", b"\0\xff\0pw"]
)
def test_malformed_plain(message: bytes) -> None:
    server = listener(plain_users=PlainUsers({"alice": "pw"})).new()
    server.handshake("PLAIN", 0)
    step = server.authenticate(message, 0)
    assert is_refused(server, step)
    assert "pw" not in f"{step}"


@pytest.mark.parametrize("text", ["user_a=secret", "x.ScramLoginModule required user_a=secret;"])
def test_wrong_settings_of_plain_are_not_shown(text: str) -> None:
    with pytest.raises(ValueError, match="LoginModule") as caught:
        PlainUsers.parse(text)
    assert "secret" not in str(caught.value)


def test_nothing_shows_passwords() -> None:
    users = PlainUsers({"alice": "secret"})
    token = TokenLogin(ALICE, b"secret", 0)
    assert (
        "secret"
        not in f"{users!r} {token!r} {new_credential(SHA_256, 'secret', salt=b'secret', iterations=1)!r}"
    )


# OAUTHBEARER


def test_a_bearer_token_bounds_the_session() -> None:
    server = listener().new()
    server.handshake("OAUTHBEARER", 0)
    step = server.authenticate(b"good:alice", 4_000)
    assert step.principal == ALICE
    assert step.session_lifetime_ms == 6_000
    assert server.is_complete(9_999)
    assert not server.is_complete(10_000)
    assert server.must_reauthenticate(10_000)


def test_a_refused_bearer_token_gets_a_challenge_first() -> None:
    server = listener().new()
    server.handshake("OAUTHBEARER", 0)
    step = server.authenticate(b"bad:alice", 0)
    assert (step.error, step.reply) == (ErrorCode.none, b'{"status":"invalid_token"}')
    assert not server.is_complete(0)
    step = server.authenticate(b"good:alice", 0)
    assert is_refused(server, step)
    assert step.message == '{"status":"invalid_token"}'  # as Apache Kafka says it


def test_a_bearer_token_that_has_just_expired() -> None:
    server = listener().new()
    server.handshake("OAUTHBEARER", 0)
    assert is_refused(server, server.authenticate(b"good:alice", 10_000))


# Delegation tokens


def with_token() -> Stored:
    stored = Stored()
    stored.tokens["id-1"] = TokenLogin(ALICE, b"hmac", 5_000)
    return stored


@pytest.mark.parametrize("mechanism", SCRAM_HASHES)
def test_a_login_with_a_delegation_token(mechanism: str) -> None:
    server = listener(with_token()).new()
    client = scram_client(mechanism, "id-1", formulas.encode_base64(b"hmac"), is_token=True)
    server.handshake(mechanism, 0)
    assert server.takes_long(client.first())
    step = log_in(listener(with_token()).new(), mechanism, client, 1_000)
    assert step.principal == ALICE
    assert step.session_lifetime_ms == 4_000


def test_tokens_and_users_are_apart() -> None:
    stored = with_token()
    stored.set("id-1", "pw")
    hmac = formulas.encode_base64(b"hmac")
    for client in (
        scram_client(SHA_256, "id-1", hmac),
        scram_client(SHA_256, "id-1", "pw", is_token=True),
        scram_client(SHA_256, "alice", hmac, is_token=True),
    ):
        server = listener(stored).new()
        assert is_refused(server, log_in(server, SHA_256, client))
    expired = listener(stored).new()
    assert is_refused(
        expired, log_in(expired, SHA_256, scram_client(SHA_256, "id-1", hmac, is_token=True), 5_000)
    )


def test_whoever_logs_in_with_a_token_is_known_by_it() -> None:
    stored = with_token()
    server = listener(stored).new()
    log_in(server, SHA_256, scram_client(SHA_256, "id-1", formulas.encode_base64(b"hmac"), is_token=True))
    assert server.is_by_token
    stored.set("bob", "pw")
    other = listener(stored).new()
    log_in(other, SHA_256, scram_client(SHA_256, "bob", "pw"))
    assert not other.is_by_token


@pytest.mark.parametrize("mechanism", SCRAM_HASHES)
def test_no_salt_tells_whether_a_token_exists(mechanism: str) -> None:
    """Every node, before and after a restart, shows the salt that it shows where there is no such token."""

    def challenge(stored: Stored) -> bytes:
        server = listener(stored, random=lambda count: b"r" * count).new()
        server.handshake(mechanism, 0)
        return server.authenticate(scram_client(mechanism, "id-1", "", is_token=True).first(), 0).reply

    assert challenge(with_token()) == challenge(Stored())


def test_a_token_costs_its_computation_once_while_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []

    def counted(mechanism: str, password: str, **options: Any) -> scram.ScramCredential:
        computed.append(password)
        return new_credential(mechanism, password, **options)

    monkeypatch.setattr("penstock.security.authentication.new_credential", counted)
    monkeypatch.setattr("penstock.security.authentication._TOKEN_CREDENTIALS_MAX", 2)
    offered = listener()
    for token in ("busy", "b", "busy", "c", "busy", "d", "busy"):
        offered.token_credential(SHA_256, token, token.encode())
    assert computed == [formulas.encode_base64(token) for token in (b"busy", b"b", b"c", b"d")]


# Order of requests, sessions


def test_the_handshake_names_what_the_listener_offers() -> None:
    server = listener(mechanisms=("PLAIN", SHA_512)).new()
    assert server.handshake("GSSAPI", 0) == (ErrorCode.unsupported_sasl_mechanism, ("PLAIN", SHA_512))
    assert server.is_failed
    assert server.handshake("PLAIN", 0).error is ErrorCode.illegal_sasl_state


def test_authenticate_before_handshake() -> None:
    server = listener().new()
    assert server.authenticate(b"\0alice\0pw", 0).error is ErrorCode.illegal_sasl_state
    assert server.is_failed


def test_a_second_handshake_within_an_exchange() -> None:
    server = listener().new()
    server.handshake(SHA_256, 0)
    assert server.handshake(SHA_256, 0).error is ErrorCode.illegal_sasl_state
    assert server.is_failed


def test_authenticate_after_the_login() -> None:
    server = listener().new()
    log_in(server, SHA_256, scram_client(SHA_256, "alice", "pw"))
    assert server.authenticate(b"n,,n=alice,r=abc", 0).error is ErrorCode.illegal_sasl_state
    assert server.is_complete(0)


def test_a_session_ends_and_a_new_login_keeps_the_connection() -> None:
    server = listener(session_ms_max={SHA_256: 3_000}).new()
    step = log_in(server, SHA_256, scram_client(SHA_256, "alice", "pw"), 1_000)
    assert step.session_lifetime_ms == 3_000
    assert server.is_complete(3_999)
    assert server.must_reauthenticate(4_000)
    log_in(server, SHA_256, scram_client(SHA_256, "alice", "pw"), 1_500)
    assert server.handshake(SHA_256, 2_400).error is ErrorCode.illegal_sasl_state  # too soon after the last
    assert server.is_complete(2_400)
    log_in(server, SHA_256, scram_client(SHA_256, "alice", "pw"), 4_500)
    assert server.is_complete(7_499)
    assert not server.is_complete(7_500)


def test_a_new_login_cannot_change_user_or_mechanism() -> None:
    stored = Stored(alice="pw", bob="pw")
    server = listener(stored).new()
    log_in(server, SHA_256, scram_client(SHA_256, "alice", "pw"), 0)
    step = log_in(server, SHA_256, scram_client(SHA_256, "bob", "pw"), 2_000)
    assert is_refused(server, step)
    assert step.message == "Cannot change principals during re-authentication from User:alice to User:bob"
    server = listener(stored).new()
    log_in(server, SHA_256, scram_client(SHA_256, "alice", "pw"), 0)
    assert server.handshake(SHA_512, 2_000).error is ErrorCode.unsupported_sasl_mechanism
    assert server.is_failed
    assert not server.is_complete(2_000)


@pytest.mark.parametrize("name", ["*", "ANONYMOUS"])
def test_names_with_a_meaning_of_their_own_cannot_log_in(name: str) -> None:
    stored = Stored(**{name: "pw"})
    stored.tokens["id-1"] = TokenLogin(Principal("User", name), b"hmac", 5_000)
    users = PlainUsers({name: "pw"})
    for mechanism, client in (
        ("PLAIN", PlainExchange(name, "pw")),
        (SHA_256, scram_client(SHA_256, name, "pw")),
        (SHA_512, scram_client(SHA_512, "id-1", formulas.encode_base64(b"hmac"), is_token=True)),
    ):
        server = listener(stored, plain_users=users).new()
        assert is_refused(server, log_in(server, mechanism, client))
        assert not server.is_complete(0)
    server = listener().new()
    server.handshake("OAUTHBEARER", 0)
    assert is_refused(server, server.authenticate(f"good:{name}".encode(), 0))
    # Its text is that of the rule for everybody, but it is a name as any other.
    assert str(Principal("User", "User:*")) != "User:*"


def test_a_server_that_lies_is_not_trusted() -> None:
    server = listener().new()
    server.handshake(SHA_256, 0)
    client = scram_client(SHA_256, "alice", "pw")
    final = client.next(server.authenticate(client.first(), 0).reply)
    assert final is not None
    with pytest.raises(SaslError):
        client.next(b"v=" + formulas.encode_base64(b"x" * 32).encode())
