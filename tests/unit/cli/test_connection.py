"""The connection options of the command line reach both client libraries, and unknown settings are refused by name."""

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.cli.commands import VERBS
from penstock.cli.connection import ConnectionOptions
from penstock.cli.connection.librdkafka import librdkafka_settings
from penstock.cli.errors import CommandError


@pytest.fixture(autouse=True)
def _no_settings_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PENSTOCK_CONTEXTS", str(tmp_path / "contexts.toml"))


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


def write_contexts(text: str) -> None:
    path = Path(os.environ["PENSTOCK_CONTEXTS"])
    path.write_text(text)
    path.chmod(0o600)


CONTEXTS = """
current = "dev"
[contexts.dev]
"bootstrap.servers" = "dev:1"
"client.id" = "of-dev"
"sasl.password" = "of dev"
[contexts.prod]
"bootstrap.servers" = "prod:1"
"client.id" = "of-prod"
"""


def resolved(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], **flags: Any) -> tuple[str, str]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = ConnectionOptions(**flags)
    return options.addresses, options.connection_settings().client_id


ADDRESS, ID = {"PENSTOCK_BOOTSTRAP": "env:1"}, {"PENSTOCK_CLIENT_CLIENT_ID": "of-env"}


@pytest.mark.parametrize(
    ("environment", "flags", "expected"),
    [
        ({}, {}, ("dev:1", "of-dev")),
        ({}, {"properties": ["client.id=flag"]}, ("dev:1", "flag")),
        ({}, {"context": "prod"}, ("prod:1", "of-prod")),
        ({"PENSTOCK_CONTEXT": "prod"}, {}, ("prod:1", "of-prod")),
        ({"PENSTOCK_CONTEXT": "prod"}, {"context": "dev"}, ("dev:1", "of-dev")),
        # The settings of a context that nobody named belong to its address.
        (ADDRESS, {}, ("env:1", "penstock-cli")),
        ({}, {"bootstrap": "flag:1"}, ("flag:1", "penstock-cli")),
        ({}, {"properties": ["bootstrap.servers=flag:1"]}, ("flag:1", "penstock-cli")),
        (ADDRESS | ID, {}, ("env:1", "of-env")),
        (ID, {}, ("dev:1", "of-env")),
        (ADDRESS | {"PENSTOCK_CONTEXT": "prod"}, {}, ("env:1", "of-prod")),
        # --context is a flag, and takes the place of the environment.
        (ADDRESS | ID, {"context": "prod"}, ("prod:1", "of-prod")),
        (ADDRESS | ID, {"context": "prod", "bootstrap": "flag:1"}, ("flag:1", "of-prod")),
        (ADDRESS | ID, {"bootstrap": "flag:1", "properties": ["client.id=flag"]}, ("flag:1", "flag")),
    ],
)
def test_flags_come_before_the_environment_and_the_environment_before_contexts(
    environment: dict[str, str],
    flags: dict[str, Any],
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_contexts(CONTEXTS)
    assert resolved(monkeypatch, environment, **flags) == expected


def test_files_come_after_the_settings_beside_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    by_flag, by_variable = tmp_path / "flag.properties", tmp_path / "variable.properties"
    by_flag.write_text("client.id=file-of-flag\n")
    by_variable.write_text("client.id=file-of-variable\nbootstrap.servers=file:1\nrequest.timeout.ms=7\n")
    monkeypatch.setenv("PENSTOCK_COMMAND_CONFIG", str(by_variable))
    options = ConnectionOptions(config_file=by_flag)
    assert options.addresses == "file:1"
    assert options.connection_settings().client_id == "file-of-flag"
    assert options.connection_settings().request_timeout_ms == 7
    monkeypatch.setenv("PENSTOCK_CLIENT_REQUEST_TIMEOUT_MS", "8")
    assert options.connection_settings().request_timeout_ms == 8


def test_a_context_may_name_a_file(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("bootstrap.servers=file:1\nclient.id=of-file\n")
    write_contexts(f'[contexts.a]\n"penstock.config.file" = "{file}"\n"client.id" = "own"\n')
    options = ConnectionOptions(context="a")
    assert (options.addresses, options.connection_settings().client_id) == ("file:1", "own")
    assert options.given_settings() == {"client.id": "own"}


def test_without_any_source_the_address_is_that_of_this_machine() -> None:
    assert ConnectionOptions().addresses == "localhost:9092"


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"PENSTOCK_CLIENT_SASL_PASWORD": "hunter2"}, "no client setting sasl.pasword"),
        ({"PENSTOCK_CONTEXT": "nowhere"}, "PENSTOCK_CONTEXT: there is no context nowhere"),
        ({"PENSTOCK_COMMAND_CONFIG": "/absent"}, "PENSTOCK_COMMAND_CONFIG: cannot read /absent"),
        ({"PENSTOCK_BOOTSTRAP": "nowhere"}, "nowhere"),
    ],
)
def test_errors_name_the_source(
    environment: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommandError, match=complaint) as raised:
        ConnectionOptions().connection_settings()
    assert "hunter2" not in str(raised.value)


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
    assert VERBS
