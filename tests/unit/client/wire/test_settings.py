"""Settings with the names of Java clients and librdkafka, and the errors for invalid ones."""

import pickle
from pathlib import Path

import pytest

from penstock.client.errors import ClientError
from penstock.client.wire.settings import ConnectionSettings, SaslSettings, TlsSettings, librdkafka_names

BOOTSTRAP = {"bootstrap.servers": "a:1"}
PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


def parse(**named: str) -> ConnectionSettings:
    return ConnectionSettings.parse({**BOOTSTRAP, **{k.replace("_", "."): v for k, v in named.items()}})


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:1", (("a", 1),)),
        (" a:1 , b ,", (("a", 1), ("b", 9092))),
        ("[::1]:9092", (("::1", 9092),)),
        ("PLAINTEXT://host-1.example:9093", (("host-1.example", 9093),)),
    ],
)
def test_addresses(text: str, addresses: tuple[tuple[str, int], ...]) -> None:
    assert ConnectionSettings.parse({"bootstrap.servers": text}).bootstrap == addresses


@pytest.mark.parametrize("text", ["", ",", "a:b", "a:0", "a:65536", "::1:9092", "a b:1"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ClientError, match=r"bootstrap\.servers"):
        ConnectionSettings.parse({"bootstrap.servers": text})


def test_defaults() -> None:
    made = parse()
    assert (made.security, made.sasl, made.client_id, made.unknown) == (None, None, "penstock", ())
    assert (made.request_timeout_ms, made.retry_deadline_ms) == (30_000, 60_000)


def test_numbers_and_names() -> None:
    made = parse(
        client_id="me", request_timeout_ms="100", default_api_timeout_ms="200", metadata_max_age_ms="300"
    )
    assert (made.client_id, made.request_timeout_ms) == ("me", 100)
    assert (made.retry_deadline_ms, made.metadata_age_ms_max) == (200, 300)
    assert parse(socket_timeout_ms="7").request_timeout_ms == 7


def test_what_is_not_known_is_told() -> None:
    assert parse(group_id="g", acks="all").unknown == ("acks", "group.id")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"request.timeout.ms": "soon"}, "request.timeout.ms"),
        ({"request.timeout.ms": "0"}, "request.timeout.ms"),
        ({"security.protocol": "TLS"}, "security.protocol"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI"}, "sasl.mechanism"),
        (
            {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"},
            "sasl.oauthbearer.token.endpoint.url",
        ),
        ({"security.protocol": "SASL_SSL"}, "sasl.mechanism"),
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}, "sasl.username"),
        ({"ssl.truststore.location": "/a.jks"}, "ssl.truststore.type=JKS .* PEM"),
        (
            {"ssl.keystore.location": "/a.p12", "ssl.keystore.type": "PKCS12"},
            "ssl.keystore.type=PKCS12 .* PEM",
        ),
        ({"ssl.endpoint.identification.algorithm": "ldap"}, "ssl.endpoint.identification.algorithm"),
        ({"enable.ssl.certificate.verification": "maybe"}, "enable.ssl.certificate.verification"),
    ],
)
def test_a_wrong_value_is_named(given: dict[str, str], named: str) -> None:
    with pytest.raises(ClientError, match=named):
        ConnectionSettings.parse({**BOOTSTRAP, **given})


@pytest.mark.parametrize(
    ("jaas", "mechanism", "password"),
    [
        (f'{PLAIN_MODULE} required username="u" password="p w";', "PLAIN", "p w"),
        (f"{PLAIN_MODULE} required\n username=u\n password=p;", "PLAIN", "p"),
        (f"{SCRAM_MODULE} required username='u' password='it\\'s';", "SCRAM-SHA-512", "it's"),
        (
            f'{SCRAM_MODULE} required username="u" password="a\\"b\\\\c;=" tokenauth="false";',
            "SCRAM-SHA-256",
            'a"b\\c;=',
        ),
    ],
)
def test_java_credentials(jaas: str, mechanism: str, password: str) -> None:
    made = parse(security_protocol="sasl_plaintext", sasl_mechanism=mechanism, sasl_jaas_config=jaas)
    assert made.sasl == SaslSettings(mechanism=mechanism, username="u", password=password)


@pytest.mark.parametrize(
    "jaas",
    [
        "secret",
        f'{PLAIN_MODULE} required username="u" password="secret";',
        'com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true keyTab="secret";',
    ],
)
def test_wrong_java_credentials_are_not_shown(jaas: str) -> None:
    with pytest.raises(ClientError, match=r"sasl\.jaas\.config") as caught:
        parse(security_protocol="SASL_SSL", sasl_mechanism="SCRAM-SHA-256", sasl_jaas_config=jaas)
    assert "secret" not in str(caught.value)


def test_pem_as_java_names_it() -> None:
    made = parse(
        security_protocol="SSL",
        ssl_truststore_type="PEM",
        ssl_truststore_location="/ca.pem",
        ssl_keystore_type="PEM",
        ssl_keystore_location="/me.pem",
        ssl_key_password="secret",
        ssl_endpoint_identification_algorithm="",
    )
    assert made.security == TlsSettings(
        ca_location="/ca.pem",
        certificate_location="/me.pem",
        key_location="/me.pem",
        key_password="secret",
        checks_hostname=False,  # in Java clients the empty value turns the check off
    )
    assert made.unknown == ()


@pytest.mark.parametrize(
    "made",
    [
        parse(),
        parse(security_protocol="SSL", ssl_ca_location="/ca", enable_ssl_certificate_verification="false"),
        parse(
            security_protocol="SSL",
            ssl_truststore_certificates="-----BEGIN",
            ssl_endpoint_identification_algorithm="none",
        ),
        parse(
            security_protocol="SASL_SSL", sasl_mechanisms="PLAIN", sasl_username="u", sasl_password="secret"
        ),
        parse(
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="PLAIN",
            sasl_username="u",
            sasl_password="secret",
        ),
        parse(
            security_protocol="SASL_SSL",
            sasl_mechanism="OAUTHBEARER",
            sasl_oauthbearer_token_endpoint_url="https://issuer.example/token",
            sasl_oauthbearer_client_id="app",
            sasl_oauthbearer_client_secret="secret",
            sasl_oauthbearer_extensions="tenant=acme",
            https_ca_location="/ca",
        ),
        parse(
            security_protocol="SASL_SSL",
            sasl_mechanism="OAUTHBEARER",
            sasl_oauthbearer_token_endpoint_url="file:///run/token",
        ),
    ],
)
def test_settings_travel(made: ConnectionSettings) -> None:
    assert ConnectionSettings.parse(made.to_mapping()) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert "secret" not in repr(made)


TOKEN_MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
OF_TOKENS = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
TOKEN_URL = {"sasl.oauthbearer.token.endpoint.url": "https://issuer.example/token"}


@pytest.mark.parametrize(
    "given",
    [
        {"sasl.jaas.config": f'{TOKEN_MODULE} required clientId="app" clientSecret="secret" scope="kafka";'},
        {
            "sasl.oauthbearer.client.credentials.client.id": "app",
            "sasl.oauthbearer.client.credentials.client.secret": "secret",
            "sasl.oauthbearer.scope": "kafka",
            "sasl.login.callback.handler.class": "org.apache.kafka.OAuthBearerLoginCallbackHandler",
        },
        {
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": "app",
            "sasl.oauthbearer.client.secret": "secret",
            "sasl.oauthbearer.scope": "kafka",
        },
    ],
)
def test_names_of_token_settings(given: dict[str, str]) -> None:
    made = ConnectionSettings.parse({**BOOTSTRAP, **OF_TOKENS, **TOKEN_URL, **given})
    assert made.unknown == ()
    assert made.sasl is not None
    assert made.sasl.username == "app"
    for_librdkafka = librdkafka_names({**OF_TOKENS, **TOKEN_URL, **given, "linger.ms": "5"})
    assert {
        "linger.ms": "5",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "app",
        "sasl.oauthbearer.client.secret": "secret",
        "sasl.oauthbearer.scope": "kafka",
        **TOKEN_URL,
    }.items() <= for_librdkafka.items()
    assert not [name for name in for_librdkafka if "credentials" in name or "jaas" in name or "login" in name]


def test_librdkafka_reads_a_token_file_through_a_callback(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one")
    settings = librdkafka_names({**OF_TOKENS, "sasl.oauthbearer.token.endpoint.url": path.as_uri()})
    assert "sasl.oauthbearer.method" not in settings
    assert settings["oauth_cb"]("")[0] == "one"
    path.write_text("two")
    assert settings["oauth_cb"]("")[0] == "two"
    own = {**OF_TOKENS, "oauth_cb": settings["oauth_cb"]}
    assert librdkafka_names(own) == own  # a program may bring its own tokens


def test_a_login_module_of_another_mechanism() -> None:
    jaas = f'{TOKEN_MODULE} required clientId="a" clientSecret="planted";'
    for mechanism in ("PLAIN", "SCRAM-SHA-512"):
        with pytest.raises(ClientError, match="does not work with") as raised:
            ConnectionSettings.parse(
                {**BOOTSTRAP, **OF_TOKENS, "sasl.mechanism": mechanism, "sasl.jaas.config": jaas}
            )
        assert "planted" not in str(raised.value)
