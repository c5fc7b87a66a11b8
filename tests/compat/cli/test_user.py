"""`penstock user`: passwords come from a file or the environment, and nothing shows them."""

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)


@pytest.fixture
def password_file(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text("planted secret\n")
    return str(path)


def test_users_are_created_altered_and_deleted(
    penstock: Any, answer: Any, password_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = penstock("user", "create", "a=l,i", "--password-file", password_file)
    assert "planted" not in "".join(shown)
    both = {"user": "a=l,i", "iterations": {"SCRAM-SHA-256": 4096, "SCRAM-SHA-512": 4096}}
    assert both in answer("user", "list")
    assert "exists" in penstock("user", "create", "a=l,i", "--password-file", password_file, code=1)[1]
    monkeypatch.setenv("PENSTOCK_USER_PASSWORD", "another")
    words = ("user", "alter", "a=l,i", "--iterations", "8192", "--mechanism", "scram-sha-512")
    assert "stays valid for SCRAM-SHA-256" in penstock(*words)[1]
    both["iterations"] = {"SCRAM-SHA-256": 4096, "SCRAM-SHA-512": 8192}
    assert both in answer("user", "list")
    assert "8,192" in penstock("user", "list")[0]
    penstock("user", "delete", "a=l,i", "--yes")
    assert both not in answer("user", "list")
    assert "does not exist" in penstock("user", "delete", "a=l,i", "--yes", code=1)[1]
    assert "does not exist" in penstock("user", "alter", "a=l,i", code=1)[1]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("create", "ann"), 2, "no password for ann"),
        (("create", "ann", "--password-file", "/nowhere"), 1, "cannot read the password"),
        (("create", "ann", "--password-file", "-"), 2, "the password is empty"),
        (("create", "*"), 2, "no user can log in as '*'"),
        (("create", "ANONYMOUS"), 2, "no user can log in as 'ANONYMOUS'"),
        (("create", ""), 2, "no user can log in as ''"),
        (("create", "ann", "--mechanism", "PLAIN"), 2, "PLAIN has no credentials"),
        (("create", "ann", "--iterations", "1000"), 2, "4096"),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...], code: int, message: str, penstock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_USER_PASSWORD", raising=False)
    assert message in penstock("user", *words, code=code)[1]


def test_the_admin_client_of_librdkafka(bootstrap: str, answer: Any) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 5000)
    upsertion = UserScramCredentialUpsertion("rd", info, b"planted secret", b"salt")
    for done in admin.alter_user_scram_credentials([upsertion]).values():
        done.result()
    described = admin.describe_user_scram_credentials(["rd"])["rd"].result()
    assert [(each.mechanism, each.iterations) for each in described.scram_credential_infos] == [
        (ScramMechanism.SCRAM_SHA_256, 5000)
    ]
    assert {"user": "rd", "iterations": {"SCRAM-SHA-256": 5000}} in answer("user", "list")
