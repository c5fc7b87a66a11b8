"""`penstock context`: the file, who may read it, and what is shown of it."""

import json
import os
import stat
from pathlib import Path

import pytest

from penstock.cli import main

SECRET = 'hunter2-"quoted"\\back-\x7f-ü'


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "penstock" / "contexts.toml"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["context", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_context_is_made_used_changed_and_removed(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    password = tmp_path / "password"
    password.write_text(SECRET + "\n")
    login = ["-X", "sasl.username=alice", "-X", "sasl.mechanism=PLAIN", "-X", "security.protocol=SASL_SSL"]
    assert main(["context", "set", "prod", "-b", "a:1,b:2", *login, "--password-file", str(password)]) == 0
    assert main(["context", "set", "dev", "-b", "dev:1"]) == 0
    assert main(["context", "use", "prod"]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert shown(capsys, "list") == [
        {"context": "dev", "current": False, "bootstrap": "dev:1", "protocol": "PLAINTEXT", "user": None},
        {"context": "prod", "current": True, "bootstrap": "a:1,b:2", "protocol": "SASL_SSL", "user": "alice"},
    ]
    assert shown(capsys, "show") == {
        "context": "prod",
        "current": True,
        "settings": {
            "bootstrap.servers": "a:1,b:2",
            "sasl.mechanism": "PLAIN",
            "sasl.password": "[hidden]",
            "sasl.username": "alice",
            "security.protocol": "SASL_SSL",
        },
    }
    from penstock.cli.connection import ConnectionOptions

    found = ConnectionOptions().connection_settings()
    assert found.sasl is not None
    assert found.sasl.password == SECRET

    assert main(["context", "set", "prod", "-X", "sasl.username=bob", "-d", "security.protocol"]) == 0
    assert shown(capsys, "show", "prod")["settings"]["sasl.username"] == "bob"  # type: ignore[index]
    assert main(["context", "remove", "prod"]) == 2  # without a terminal it needs --yes
    assert main(["context", "remove", "prod", "--yes"]) == 0
    assert [row["context"] for row in shown(capsys, "list")] == ["dev"]  # type: ignore[index]
    assert "hunter2" not in path.read_text()


def test_a_file_of_client_settings_is_copied_with_its_secrets(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "client.properties"
    file.write_text(
        "bootstrap.servers=a:1\nsecurity.protocol=SASL_SSL\nsasl.mechanism=PLAIN\n"
        'sasl.jaas.config=a.PlainLoginModule required username="u" password="hunter2";\n'
        "ssl.keystore.key=-----BEGIN PRIVATE KEY-----\\nhunter2\\n\n"
        "ssl.keystore.certificate.chain=x\n"
    )
    assert main(["context", "set", "a", "--command-config", str(file)]) == 0
    assert main(["context", "show", "a"]) == 0
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
    assert path.read_text().count("hunter2") == 2


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_is_refused(
    mode: int, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["context", "set", "a", "-b", "a:1"]) == 0
    path.chmod(mode)
    for words in (["context", "list"], ["context", "use", "a"], ["topic", "list", "--context", "a"]):
        capsys.readouterr()
        assert main(words) == 2
        assert f"chmod 600 {path}" in capsys.readouterr().err
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["set", "a"], "needs the addresses"),
        (["set", "a", "-b", "x:1", "-X", "sasl.password=hunter2"], "other users can see the arguments"),
        (["set", "a", "-b", "x:1", "-X", "no.such=1"], "no client setting no.such"),
        (["set", "a", "-b", "x:1", "-X", "security.protocol=TLS"], "security.protocol=TLS"),
        (["set", "../a", "-b", "x:1"], "cannot be the name"),
        (["set", "a", "-b", "x:1", "-d", "client.id"], "no setting client.id"),
        (["set", "a", "-b", "x:1", "--password-file", "/absent"], "cannot read the password"),
        (["use", "a"], "there is no context a"),
        (["remove", "a", "--yes"], "there is no context a"),
        (["show"], "no context is in use"),
    ],
)
def test_what_is_refused_changes_nothing(
    words: list[str], complaint: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["context", *words]) in (1, 2)
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert "hunter2" not in printed.err
    assert not path.exists() or "contexts" not in path.read_text()


@pytest.mark.parametrize(
    "text", ["not toml", "other = 1", "contexts = 1", "[contexts.a]\nb = 1", "current = 1", "\xff\xfe"]
)
def test_a_damaged_file_is_named_and_not_replaced(
    text: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    assert main(["context", "set", "a", "-b", "a:1"]) == 2
    assert f"cannot read {path}" in capsys.readouterr().err
    assert path.read_bytes() == text.encode("latin-1")
