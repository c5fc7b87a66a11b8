"""The connection options of the command line reach both client libraries, and unknown settings are refused by name."""

from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cli.commands import VERBS
from penstock.cli.connection import ConnectionOptions, librdkafka_settings
from penstock.cli.errors import CommandError

SECURE = [
    "security.protocol=SASL_SSL",
    "sasl.mechanism=SCRAM-SHA-256",
    "sasl.username=alice",
    "sasl.password=a=b",
    "ssl.ca.location=/etc/ca.pem",
    "ssl.endpoint.identification.algorithm=none",
    "request.timeout.ms=7000",
]


def test_security_settings_reach_both_clients() -> None:
    options = ConnectionOptions(bootstrap="a:1,b:2", properties=SECURE)
    settings = options.connection_settings()
    assert settings.bootstrap == (("a", 1), ("b", 2))
    assert settings.security is not None
    assert settings.sasl is not None
    assert (settings.security.ca_location, settings.security.checks_hostname) == ("/etc/ca.pem", False)
    assert (settings.sasl.username, settings.sasl.password) == ("alice", "a=b")
    assert settings.request_timeout_ms == 7000

    others = librdkafka_settings(options, group_id="g")
    del others["logger"]
    assert others == {
        "bootstrap.servers": "a:1,b:2",
        "client.id": "penstock-cli",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "alice",
        "sasl.password": "a=b",
        "ssl.ca.location": "/etc/ca.pem",
        "ssl.endpoint.identification.algorithm": "none",
        "enable.ssl.certificate.verification": "true",
        "socket.timeout.ms": "7000",
        "group.id": "g",
    }


def test_librdkafka_accepts_every_translated_setting() -> None:
    from confluent_kafka import Consumer

    plain = [text for text in SECURE if not text.startswith("ssl.ca")]
    consumer = Consumer(librdkafka_settings(ConnectionOptions(properties=plain), group_id="g"))
    consumer.close()


def test_an_option_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("# for tests\n\nclient.id = from-file\n! also a comment\nrequest.timeout.ms=1000\n")
    options = ConnectionOptions(config_file=file, properties=["client.id=from-option"])
    settings = options.connection_settings()
    assert (settings.client_id, settings.request_timeout_ms) == ("from-option", 1000)


@pytest.mark.parametrize(
    ("properties", "complaint"),
    [
        (["ssl.cipher.suites=x", "linger.ms=5"], "no client setting linger.ms, ssl.cipher.suites"),
        (["security.protocol=TLS"], "security.protocol=TLS"),
        (["security.protocol=SASL_SSL", "sasl.mechanism=GSSAPI"], "sasl.mechanism=GSSAPI"),
        (["nonsense"], "--property takes NAME=VALUE"),
    ],
)
def test_settings_that_cannot_be_applied_are_refused_by_name(properties: list[str], complaint: str) -> None:
    with pytest.raises(CommandError, match=complaint) as caught:
        ConnectionOptions(properties=properties).connection_settings()
    assert caught.value.exit_code == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"cannot read .*absent: No such file"):
        ConnectionOptions(config_file=tmp_path / "absent").connection_settings()


@pytest.mark.parametrize(
    "words",
    [
        ["topic", "list"],
        ["produce", "t", "v"],
        ["consume", "t"],
        ["group", "list"],
        ["transaction", "list"],
        ["dlq", "list"],
        ["pipeline", "list"],
        ["cluster", "status"],
        ["cluster", "voters", "list"],
    ],
)
def test_every_verb_applies_the_connection_options(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "-b", "localhost:1", "-X", "no.such.setting=1"]) == 2
    assert "penstock has no client setting no.such.setting" in capsys.readouterr().err


def test_no_verb_opens_a_socket_or_an_admin_client_of_its_own() -> None:
    import penstock.cli

    found = {
        path.relative_to(Path(penstock.cli.__path__[0])).as_posix()
        for path in Path(penstock.cli.__path__[0]).rglob("*.py")
        if "AdminClient" in (text := path.read_text()) or "create_connection" in text
    }
    assert not found
    assert len(VERBS) == 14
