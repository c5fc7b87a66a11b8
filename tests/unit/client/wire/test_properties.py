"""Files of client settings: Java's format, and errors that never show what stands in the file."""

from pathlib import Path

import pytest

from penstock.client import read_properties
from penstock.client.errors import ClientError
from penstock.client.wire.properties import parse_properties
from penstock.client.wire.settings import ConnectionSettings, librdkafka_names

KEY = "-----BEGIN PRIVATE KEY-----\nMIIplantedKey+/\nplantedKey2==\n-----END PRIVATE KEY-----\n"
JAAS = 'a.b.PlainLoginModule required username="alice" password="pla\\"nted";'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=c", {"a.b": "c"}),
        ("a.b = c d ", {"a.b": "c d "}),
        ("a:b\r\nc d\re\t=f", {"a": "b", "c": "d", "e": "f"}),
        ("# comment\n! comment\n\n  a=b", {"a": "b"}),
        ("a=b=c:d", {"a": "b=c:d"}),
        ("a=", {"a": ""}),
        ("a=one\\\n   two\\\n\tthree", {"a": "onetwothree"}),
        ("a=one\\\\\nb=c", {"a": "one\\", "b": "c"}),
        ("a=x\\ny\\tz\\u00e9\\=\\q", {"a": "x\ny\tzé=q"}),
        ("a=b\\", {"a": "b"}),
        ("a=first\na=second", {"a": "second"}),
        ("# comment \\\na=b", {"a": "b"}),
        ("", {}),
    ],
)
def test_it_is_read_as_java_reads_it(text: str, expected: dict[str, str]) -> None:
    assert parse_properties(text, "file") == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a=b\nplanted", 2),
        (f"a=b\nssl.keystore.key={KEY}", 3),  # the newlines of the key have no backslash
        ("Planted==", 1),
        ("sasl password", 0),
        ("=planted", 1),
    ],
)
def test_errors_have_the_line_but_not_its_text(text: str, line: int) -> None:
    if not line:
        assert parse_properties(text, "file") == {"sasl": "password"}
        return
    with pytest.raises(ClientError) as raised:
        parse_properties(text, "some.properties")
    assert f"some.properties, line {line}: " in str(raised.value)
    assert "lanted" not in str(raised.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"cannot read .*absent: No such file"):
        read_properties(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ClientError, match="not UTF-8"):
        read_properties(tmp_path / "binary")


def test_every_client_reads_the_file_that_a_setting_names(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("bootstrap.servers=a:1\nclient.id=file\nrequest.timeout.ms=7\n")
    settings = ConnectionSettings.parse({"penstock.config.file": str(file), "client.id": "own"})
    assert settings.bootstrap == (("a", 1),)
    assert (settings.client_id, settings.request_timeout_ms) == ("own", 7)
    assert not settings.unknown
    (tmp_path / "again").write_text(f"penstock.config.file={file}\n")
    with pytest.raises(ClientError, match="cannot be set in such a file"):
        ConnectionSettings.parse({"penstock.config.file": str(tmp_path / "again")})


def test_java_settings_are_translated_for_librdkafka(tmp_path: Path) -> None:
    given = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": JAAS,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": "/ca.pem",
        "ssl.endpoint.identification.algorithm": "",
        "ssl.cipher.suites": "x",
        "linger.ms": 5,
    }
    assert librdkafka_names(given) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "alice",
        "sasl.password": 'pla"nted',
        "ssl.ca.location": "/ca.pem",
        "ssl.endpoint.identification.algorithm": "none",
        "enable.ssl.certificate.verification": "true",
        "ssl.cipher.suites": "x",
        "linger.ms": 5,
    }
    own = {
        "ssl.ca.location": "probe",
        "ssl.endpoint.identification.algorithm": "none",
        "sasl.mechanisms": "GSSAPI",
    }
    assert librdkafka_names(own) == own


def test_librdkafka_accepts_the_translated_settings(tmp_path: Path) -> None:
    from confluent_kafka import Producer

    given = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.jaas.config": JAAS}
    Producer({**librdkafka_names(given), "bootstrap.servers": "localhost:1", "log_level": 0})


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ({"ssl.truststore.location": "/t.jks"}, "keytool -list -rfc -keystore /t.jks > truststore.pem"),
        (
            {"ssl.keystore.location": "/k.jks", "ssl.keystore.password": "planted"},
            "keytool -importkeystore -srckeystore /k.jks -destkeystore keystore.p12 -deststoretype PKCS12 && "
            "openssl pkcs12 -nodes -in keystore.p12 -out keystore.pem",
        ),
        (
            {"ssl.keystore.location": "/k.p12", "ssl.keystore.type": "pkcs12"},
            "openssl pkcs12 -nodes -in /k.p12 -out keystore.pem",
        ),
    ],
)
def test_a_java_store_is_refused_with_the_command_that_converts_it(
    given: dict[str, str], command: str
) -> None:
    with pytest.raises(ClientError) as raised:
        ConnectionSettings.parse({"bootstrap.servers": "a:1", "security.protocol": "SSL", **given})
    assert command in str(raised.value)
    assert "planted" not in str(raised.value)


def test_a_delegation_token_cannot_be_used_by_librdkafka() -> None:
    given = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.jaas.config": 'a.ScramLoginModule required username="i" password="h" tokenauth="true";',
    }
    with pytest.raises(ClientError, match="delegation token"):
        librdkafka_names(given)
