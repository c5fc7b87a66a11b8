"""`penstock apply` against a broker with TLS, SCRAM and access rules: planned, applied, checked, pruned, resumed."""

import json
import os
import pty
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer
from tests import outcomes as delivery
from tests.brokers import environment, executable

from penstock.client.admin.acls import list_acls
from penstock.client.admin.quotas import describe_quotas
from penstock.client.admin.users import list_users, set_password
from penstock.client.errors import AuthenticationFailed
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.acls import AclFilter
from penstock.testing import EmbeddedBroker

EXAMPLE = Path(__file__).parents[3] / "examples" / "access.toml"
PASSWORDS = {"ACME_APP_PASSWORD": "of-app", "ACME_REPORTS_PASSWORD": "of-reports", "BILLING_PASSWORD": "of-b"}
#: An exit code of --check.
DIFFERENT = 3
TIMEOUT_S = 60


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(secure=True, data_dir=tmp_path / "data") as broker:
        yield broker


@pytest.fixture
def apply(broker: EmbeddedBroker, penstock: Any, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """`apply(text, *options)` writes the file and runs the command as the user `admin`."""
    properties = tmp_path / "client.properties"

    def call(text: str, *words: str, user: str = "admin", code: int = 0) -> tuple[str, str]:
        settings = broker.client_settings(user) | {"default.api.timeout.ms": "3000"}
        properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        file = tmp_path / "access.toml"
        file.write_text(text)
        file.chmod(0o600)
        outcome: tuple[str, str] = penstock(
            "apply", "-f", str(file), "--command-config", str(properties), *words, code=code
        )
        return outcome

    return call


@pytest.fixture
def document(apply: Any) -> Callable[..., Any]:
    return lambda *words, **how: json.loads(apply(*words, "--json", **how)[0])


def logs_in(broker: EmbeddedBroker, user: str, password: str) -> bool:
    settings = broker.client_settings() | {"sasl.username": user, "sasl.password": password}
    try:
        with Cluster(ConnectionSettings.parse(settings)) as cluster:
            return cluster.cluster_id is not None
    except AuthenticationFailed:
        return False


def test_the_example_is_applied_once_and_then_nothing_is_left_to_change(
    apply: Any, document: Any, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PASSWORDS.items():
        monkeypatch.setenv(name, value)
    text = EXAMPLE.read_text()
    shown, notes = apply(text, "--check", code=DIFFERENT)
    assert "15 to create, 0 to change, 0 to remove" in notes
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    for start in (
        "+ tenant acme users acme-app, acme-reports;",
        "+ user billing",
        "+ quota client-id default",
    ):
        assert any(row.startswith(start) for row in rows), shown
    assert "deny User:* Write on Topic archive.*" in shown
    assert not logs_in(broker, "billing", "of-b"), "--check has changed something"
    applied = document(text, "--yes")
    assert (applied["applied"], applied["error"]) == (len(applied["changes"]), None)
    assert [change["kind"] for change in applied["changes"][:1]] == ["tenant"]
    for user, password in (("acme-app", "of-app"), ("billing", "of-b")):
        assert logs_in(broker, user, password)
    again = document(text, "--yes")
    assert (again["changes"], again["kept"]) == ([], [])
    assert document(text, "--check", "--prune")["changes"] == []
    assert "nothing to change" in apply(text)[1]
    # What the file says holds: the tenant's users have its namespace, the others have their rules.
    settings = broker.client_settings() | {"sasl.username": "acme-app", "sasl.password": "of-app"}
    outcomes: list[Any] = []
    for topic in ("acme.orders", "archive.orders"):
        broker.create_topic(topic)
        producer = Producer({**settings, "log_level": 0})
        delivery.produce(producer, topic, b"x", outcomes.append)
        assert producer.flush(TIMEOUT_S) == 0
    assert outcomes[0] is None
    assert outcomes[1].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED


BEFORE = """
[tenants.acme]
users = ["app"]
prefix = "acme."
groups = 7
in = "1MB/s"
[users.ann]
password = "first-of-ann"
[users.bob]
password = "first-of-bob"
mechanisms = ["SCRAM-SHA-512"]
[[rules]]
allow = ["User:ann", "User:bob"]
operation = "Read"
topic = "orders"
[[quotas]]
user = "ann"
produce = "1MB"
requests = 20
[[quotas]]
user = "bob"
produce = "1MB"
"""
AFTER = """
[tenants.acme]
users = ["app", "new"]
prefix = "acme."
in = "2MB/s"
[users.ann]
password = "second-of-ann"
[[rules]]
allow = "User:ann"
operation = "Read"
topic = "orders"
[[rules]]
deny = "User:ann"
operation = "Write"
topic = "orders"
[[quotas]]
user = "ann"
produce = "2MB"
"""


def test_changes_and_removals(apply: Any, document: Any, broker: EmbeddedBroker) -> None:
    assert document(BEFORE, "--yes")["error"] is None
    shown = apply(AFTER, "--check", code=DIFFERENT)[0]
    assert "users +new; groups 7 -> none; in 1,000,000 -> 2,000,000" in shown
    assert "producer_byte_rate 1,000,000 -> 2,000,000; request_percentage 20 -> none" in shown
    assert "bob" not in shown, "without --prune, what the file does not name stays"
    apply(AFTER, "--yes")
    assert apply(AFTER, "--check")[1].strip() == "nothing to change"
    assert logs_in(broker, "ann", "first-of-ann"), "a user that exists keeps its password"
    assert logs_in(broker, "bob", "first-of-bob")
    apply(AFTER, "--yes", "--rotate", "ann")
    assert logs_in(broker, "ann", "second-of-ann")
    assert not logs_in(broker, "ann", "first-of-ann")
    pruned = document(AFTER, "--prune", "--yes")
    assert [(change["action"], change["kind"]) for change in pruned["changes"]] == [
        ("remove", "user"),
        ("remove", "rule"),
        ("remove", "quota"),
    ]
    assert pruned["kept"] == [{"user": "admin", "reason": "it is you"}]
    assert not logs_in(broker, "bob", "first-of-bob")
    # Sections that a file does not have are left alone.
    emptied = document("rules = []\n[tenants]", "--prune", "--yes")
    assert [change["kind"] for change in emptied["changes"]] == ["rule", "rule", "tenant"]
    assert logs_in(broker, "ann", "second-of-ann")


def test_who_applies_a_file_keeps_its_own_access(apply: Any, broker: EmbeddedBroker) -> None:
    """Also where it is no super user, and the file names nobody."""
    broker.create_user("ops")
    broker.allow("ops", "alter", "describe", "describe_configs", "alter_configs", cluster=True)
    broker.create_user("gone")
    broker.allow("gone", "alter", cluster=True)
    shown, notes = apply("rules = []\n[users]", "--prune", "--yes", user="ops")
    assert "user ops: it is you" in notes
    assert "user admin: it is one of super.users" in notes
    assert "allow User:ops Alter on Cluster: it is about you" in notes
    assert {line.split()[2] for line in shown.splitlines() if line.startswith("-")} == {"gone", "allow"}
    with Cluster(ConnectionSettings.parse(broker.client_settings("ops"))) as cluster:
        assert {user.name for user in list_users(cluster)} == {"admin", "ops"}
        assert {rule.principal for rule in list_acls(cluster, AclFilter())} == {"User:ops"}
    locked = '[[rules]]\ndeny = "User:*"\noperation = "All"\ncluster = true\n'
    refused = apply(locked, "--yes", user="ops", code=2)[1]
    assert "denies User:*, and so you, the administration of the cluster" in refused


@pytest.mark.parametrize("is_named", [True, False])
def test_prune_keeps_the_users_of_nodes(is_named: bool, penstock: Any, tmp_path: Path) -> None:
    """Or refuses, where nodes log in with SCRAM and nothing says as which user."""
    settings = {
        "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
        "penstock.node.principals": "User:node" if is_named else "",
    }
    file = tmp_path / "access.toml"
    file.write_text("[users]")
    with EmbeddedBroker(settings=settings) as broker:
        address = {"bootstrap.servers": broker.bootstrap_servers}
        with Cluster(ConnectionSettings.parse(address)) as cluster:
            for name in ("node", "gone"):
                set_password(cluster, name, "password")
            words = ("apply", "-f", str(file), "--prune", "--yes", "-b", broker.bootstrap_servers)
            notes = penstock(*words, code=0 if is_named else 2)[1]
            left = {user.name for user in list_users(cluster)}
    if is_named:
        assert "user node: it is that of a node" in notes
        assert left == {"node"}
    else:
        assert "the nodes log in with SCRAM, and it cannot be seen as which user" in notes
        assert left == {"node", "gone"}


def test_a_node_that_goes_away_in_the_middle(apply: Any, document: Any, broker: EmbeddedBroker) -> None:
    """What was done is reported, and a second run finishes."""
    names = ("ann", "bob", "cy", "dee")
    text = "".join(f"[users.{name}]\npassword = 'password-of-{name}'\n" for name in names)
    text += "[[rules]]\nallow = 'User:cy'\nrole = 'producer'\ntopic = 'orders'\n"
    reached = threading.Event()

    def is_cy(request: Any) -> bool:
        if request.body.upsertions[0].name == "cy":
            reached.set()
            return True
        return False

    broker.faults.drop("alter_user_scram_credentials", when=is_cy)
    killer = threading.Thread(target=lambda: (reached.wait(TIMEOUT_S), broker.kill()))
    killer.start()
    notes = apply(text, "--yes", code=1)[1]
    killer.join(TIMEOUT_S)
    assert "2 of 7 changes applied; failed at: create user cy: " in notes
    assert "apply the file again" in notes
    assert "Traceback" not in notes
    broker.faults.clear()
    broker.start()
    rest = document(text, "--yes")
    assert [change.get("name") for change in rest["changes"]] == ["cy", "dee", None, None, None]
    assert rest["error"] is None
    assert all(logs_in(broker, name, f"password-of-{name}") for name in names)
    assert document(text, "--check")["changes"] == []


def test_at_a_terminal_the_plan_is_in_colour_and_a_question_follows(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    properties, file = tmp_path / "client.properties", tmp_path / "access.toml"
    properties.write_text("".join(f"{key}={text}\n" for key, text in broker.client_settings().items()))
    file.write_text('[[quotas]]\nuser = "ann"\nproduce = "1MB"\n')

    def answered(reply: bytes) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        command = [*executable(), "apply", "-f", str(file), "--command-config", str(properties)]
        variables = {**environment(), "TERM": "xterm-256color", "COLUMNS": "120"}
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables) as process:
            os.close(theirs)
            seen = b""
            is_answered = False
            while part := read_terminal(ours):
                seen += part
                if b"[y/N]" in seen and not is_answered:
                    os.write(ours, reply)
                    is_answered = True
            code = process.wait(TIMEOUT_S)
        os.close(ours)
        return code, seen.decode()

    code, seen = answered(b"n\n")
    assert (code, "nothing was changed" in seen) == (1, True)
    assert "\x1b[32m+" in seen, "what is made is green"
    assert "Apply 1 change?" in seen
    with Cluster(ConnectionSettings.parse(broker.client_settings())) as cluster:
        assert describe_quotas(cluster, {}) == []
        code, seen = answered(b"y\n")
        assert (code, "1 change applied" in seen) == (0, True)
        assert describe_quotas(cluster, {}) != []


def read_terminal(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how a terminal reports that the other end is closed
        return b""


def test_a_refusal_is_reported_in_json_too(document: Any, broker: EmbeddedBroker, apply: Any) -> None:
    """The server refuses a super user in a tenant, which the file cannot know."""
    text = "[tenants.a]\nusers=['x']\nprefix='a.'\n[tenants.b]\nusers=['admin']\nprefix='b.'\n"
    refused = document(text, "--yes", code=1)
    assert refused["applied"] == 1
    assert "admin is one of super.users" in refused["error"]


def test_passwords_come_from_files_variables_or_the_private_file_itself(
    apply: Any, broker: EmbeddedBroker, tmp_path: Path, penstock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ann.password").write_text("of-ann\n")
    monkeypatch.setenv("BOB", "of-bob")
    text = "[users.ann]\npassword_file = 'ann.password'\n[users.bob]\npassword_env = 'BOB'\n"
    apply(text, "--yes")
    assert logs_in(broker, "ann", "of-ann")
    assert logs_in(broker, "bob", "of-bob")
    for name, source, problem in (
        ("cy", "", "users.cy: the plan sets a password, and the file names none"),
        ("cy", "password_env = 'UNSET'", "users.cy.password_env: the variable UNSET is not set, or empty"),
        ("cy", "password_file = 'missing'", "users.cy.password_file: cannot read missing: No such file"),
    ):
        refused = apply(f"[users.aaa]\npassword = 'x'\n[users.{name}]\n{source}\n", "--yes", code=2)[1]
        assert problem in refused
    with Cluster(ConnectionSettings.parse(broker.client_settings())) as cluster:
        assert "aaa" not in {user.name for user in list_users(cluster)}, (
            "nothing is changed before all is known"
        )
    open_to_all = tmp_path / "open.toml"
    open_to_all.write_text("[users.cy]\npassword = 'of-cy-of-cy'\n")
    open_to_all.chmod(0o644)
    refused = penstock("apply", "-f", str(open_to_all), code=2)[1]
    assert "contains passwords, and others can read or change it" in refused
    assert "of-cy" not in refused


def test_mistakes_are_said_in_a_sentence(penstock: Any, apply: Any, tmp_path: Path) -> None:
    assert "cannot read nowhere.toml: No such file" in penstock("apply", "-f", "nowhere.toml", code=2)[1]
    assert "access.toml: Expected" in apply("[users", code=2)[1]
    file = tmp_path / "access.toml"
    assert f"{file}: quotas[1].produce: " in apply("[[quotas]]\nuser='a'\nproduce=0", code=2)[1]
    assert "--caller: 'ops' is no principal" in apply("", "--caller", "ops", code=2)[1]
    assert "this needs a confirmation" in apply("[users.a]\npassword='x'", code=2)[1]
    assert "--rotate: the file has no user b" in apply("[users.a]\npassword='x'", "--rotate", "b", code=2)[1]


def test_who_comes_with_a_token_says_who_that_is_before_pruning(penstock: Any, tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text("rules = []")
    refused = penstock(
        *("apply", "-f", str(file), "--prune"),
        *("-X", "security.protocol=SASL_SSL", "-X", "sasl.mechanism=SCRAM-SHA-512"),
        *("-X", "sasl.username=id", "-X", "sasl.password=hmac", "-X", "penstock.sasl.tokenauth=true"),
        code=2,
    )[1]
    assert "cannot tell from a certificate or a token who you are" in refused


def test_without_an_authorizer_rules_are_refused(penstock: Any, tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text("[[rules]]\nallow = 'User:a'\noperation = 'Read'\ntopic = 't'\n")
    with EmbeddedBroker() as plain:
        refused = penstock("apply", "-f", str(file), "--yes", "-b", plain.bootstrap_servers, code=1)[1]
    assert "access rules need authorizer.class.name on all nodes" in refused
