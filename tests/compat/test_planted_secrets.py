"""No secret of a node, a user, a client or a token is in a log, an answer, a metric, an error or a list of processes.

The node logs at level debug. After each test its log, its metrics, its data folder and all command lines are searched.
"""

import json
import logging
import os
import re
import ssl
import subprocess
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType
from tests import tokens
from tests.brokers import BrokerProcess, environment, executable, external_bootstrap
from tests.certificates import Authority
from tests.planted import PlantedSecrets, command_lines
from tests.tokens import AUDIENCE, CLIENT_ID, CLIENT_SECRET, ISSUER, Issuer

from penstock.broker.config.node_settings import load_settings
from penstock.client import Penstock
from penstock.client.admin.tokens import create_token, list_tokens
from penstock.client.admin.users import list_users, set_password
from penstock.client.errors import ClientError, Refused
from penstock.client.outbox.relay import Relay
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
TIMEOUT_S = 120
#: The settings of a node that are secrets; each gets one of its own.
NODE_SECRETS = ("penstock.sasl.secret", "delegation.token.secret.key", "penstock.http.token")


class RecordingIssuer(Issuer):
    """Plants the tokens that it issues, and the secret of its client."""

    def __init__(self, planted: PlantedSecrets) -> None:
        super().__init__()
        self._planted = planted
        planted.add("client_secret", CLIENT_SECRET)

    def token(self, **others: Any) -> str:
        made = super().token(**others)
        signature = made.rpartition(".")[2]
        self._planted.add(f"token_{signature[:8]}", signature)
        return made


class SecretNode(BrokerProcess):
    """A node whose secrets are in a file, as documented, and whose first user is in its environment."""

    def __init__(self, folder: Path, planted: PlantedSecrets, issuer: Issuer) -> None:
        settings = {
            "listener.security.protocol.map": "PLAINTEXT:SASL_SSL",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
            "sasl.oauthbearer.jwks.endpoint.url": f"{issuer.url}/keys",
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "sasl.oauthbearer.expected.issuer": ISSUER,
            "penstock.sasl.plain.scram.credentials": "true",
            "connection.failed.authentication.delay.ms": "1",
            "authorizer.class.name": "StandardAuthorizer",
            "super.users": "User:admin",
            "penstock.http.listen": "127.0.0.1:0",
            "penstock.http.tls": "true",
            "penstock.log.level": "debug",
        }
        folder.mkdir(parents=True)
        super().__init__(folder / "data", settings, log=folder / "log")
        self.authority = Authority(folder / "certificates")
        self._admin_password = planted.new("admin_password")
        key_password = planted.new("key_password")
        pem = self.authority.issue("node", password=key_password)
        planted.add_key("node_key", pem)
        end = "-----END ENCRYPTED PRIVATE KEY-----\n"
        key, chain = pem.read_text().split(end)
        carol = planted.new("carol_password")
        secrets = {
            **{name: planted.new(name.replace(".", "_")) for name in NODE_SECRETS},
            "ssl.keystore.key": key + end,
            "ssl.keystore.certificate.chain": chain,
            "ssl.key.password": key_password,
            "listener.name.plaintext.plain.sasl.jaas.config": (
                f'{PLAIN_MODULE} required user_carol="{carol}";'
            ),
        }
        self.secrets = secrets
        self._config = folder / "node.toml"
        self._config.write_text("".join(f'"{name}" = {json.dumps(text)}\n' for name, text in secrets.items()))
        self.passwords = {"admin": self._admin_password, "carol": carol}

    def login(self, user: str = "admin", mechanism: str = "SCRAM-SHA-512", **others: str) -> dict[str, str]:
        return {
            "bootstrap.servers": self.bootstrap_servers,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.authority.certificate),
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": self.passwords[user],
            **others,
        }

    def metrics(self) -> str:
        assert self.log is not None
        (url,) = re.findall(r"metrics on (https://\S+)", self.log.read_text())
        request = urllib.request.Request(
            url, headers={"Authorization": f"Bearer {self.secrets['penstock.http.token']}"}
        )
        trusted = ssl.create_default_context(cafile=self.authority.certificate)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trusted) as answer:
            text: str = answer.read().decode()
        return text

    def _command(self) -> list[str]:
        return [*super()._command(), "--config", str(self._config), "--bootstrap-user", "admin"]

    def _environment(self) -> dict[str, str]:
        return {**environment(), "PENSTOCK_BOOTSTRAP_PASSWORD": self._admin_password}


@pytest.fixture(scope="module")
def planted() -> PlantedSecrets:
    return PlantedSecrets()


@pytest.fixture(scope="module")
def issuer(planted: PlantedSecrets) -> Iterator[Issuer]:
    with tokens.serve(RecordingIssuer(planted)) as serving:
        yield serving


@pytest.fixture(scope="module")
def broker(
    tmp_path_factory: pytest.TempPathFactory, planted: PlantedSecrets, issuer: Issuer
) -> Iterator[SecretNode]:
    if external_bootstrap():
        pytest.skip("needs a broker with settings of its own; PENSTOCK_TEST_BOOTSTRAP names another")
    node = SecretNode(tmp_path_factory.mktemp("planted") / "node", planted, issuer)
    node.start()
    yield node
    node.stop()
    assert node.log is not None
    planted.check(node.log.read_text(), "the log of the node")


@pytest.fixture(autouse=True)
def _the_node_shows_none(
    broker: SecretNode, planted: PlantedSecrets, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    yield
    assert broker.log is not None
    planted.check(broker.log.read_text(), "the log of the node")
    planted.check(broker.metrics(), "/metrics")
    planted.check(command_lines(), "the list of processes")
    planted.check_files(broker.data_dir)
    for stream in capfd.readouterr():
        planted.check(stream, "the output of the test")


@pytest.fixture
def shown(penstock: Any, planted: PlantedSecrets) -> Callable[..., str]:
    """Runs the command, checks what it prints for secrets, and returns that."""

    def call(*words: str, **how: Any) -> str:
        text = "".join(penstock(*words, **how))
        planted.check(text, f"penstock {' '.join(words)}")
        return text

    return call


@pytest.fixture
def properties(broker: SecretNode, tmp_path: Path) -> str:
    path = tmp_path / "client.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in broker.login().items()))
    return str(path)


def test_commands_with_a_file_of_settings(
    shown: Any, properties: str, broker: SecretNode, planted: PlantedSecrets, tmp_path: Path
) -> None:
    """Each command that connects, and contexts, which copy the passwords."""
    config = ("--command-config", properties)
    shown("topic", "create", "orders", "-p", "2", *config)
    shown("produce", "orders", *config, given="hello\n")
    assert "hello" in shown("consume", "orders", "-n", "1", *config)
    for words in (
        ("topic", "list"),
        ("topic", "describe", "orders"),
        ("group", "list"),
        ("cluster", "info"),
        ("cluster", "status"),
        ("transaction", "list"),
        ("user", "list"),
        ("acl", "list"),
        ("quota", "list"),
        ("delegation-token", "list"),
        ("dlq", "list"),
    ):
        shown(*words, *config)
        shown(*words, "--json", *config)
    for number, words in enumerate((("create", "alice"), ("alter", "alice"))):
        password = tmp_path / "password"
        password.write_text(planted.new(f"alice_password_{number}"))
        shown("user", *words, "--password-file", str(password), *config)
    done = subprocess.run(
        [*executable(), "topic", "list", *config],
        capture_output=True,
        env=environment(),
        timeout=TIMEOUT_S,
        check=True,
    )
    planted.check(done.stdout + done.stderr, "a command of its own process")


def test_contexts_and_the_effective_settings(
    shown: Any,
    properties: str,
    broker: SecretNode,
    planted: PlantedSecrets,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PENSTOCK_CONTEXTS", str(tmp_path / "contexts.toml"))
    shown("context", "set", "prod", "--command-config", properties)
    for words in (("list",), ("show", "prod"), ("list", "--json"), ("show", "prod", "--json")):
        shown("context", *words)
    shown("topic", "list", "--context", "prod")
    assert "planted" in (tmp_path / "contexts.toml").read_text()
    for words in ((), ("--all",), ("--json",)):
        assert "[hidden]" in shown("config", "--config", str(broker._config), "--listen", "x:1", *words)


def wrong_settings(broker: SecretNode, planted: PlantedSecrets) -> dict[str, dict[str, str]]:
    """Settings with a mistake in or beside a secret."""
    secret = planted.new("wrong_password")
    login = broker.login() | {"default.api.timeout.ms": "3000"}
    return {
        "the password is wrong": login | {"sasl.password": secret},
        "the user is unknown": login | {"sasl.username": "nobody-knows", "sasl.password": secret},
        "PLAIN": login | {"sasl.mechanism": "PLAIN", "sasl.password": secret},
        "no mechanism": login | {"sasl.mechanism": secret[:3], "sasl.password": secret},
        "no module": login | {"sasl.jaas.config": f'required username="a" password="{secret}"'},
        "another module": login
        | {"sasl.jaas.config": f'a.b.Krb5LoginModule required username="a" password="{secret}";'},
        "a key that is none": login
        | {
            "ssl.key.pem": f"-----BEGIN PRIVATE KEY-----\n{secret}",
            "ssl.certificate.pem": broker.secrets["ssl.keystore.certificate.chain"],
        },
        "a key without its password": login
        | {
            "ssl.key.pem": broker.secrets["ssl.keystore.key"],
            "ssl.certificate.pem": broker.secrets["ssl.keystore.certificate.chain"],
            "ssl.key.password": secret,
        },
        "an unknown setting": login | {"sasl.pasword": secret},
        "not trusted": {name: value for name, value in login.items() if name != "ssl.ca.location"},
        "plaintext": {"bootstrap.servers": login["bootstrap.servers"], "default.api.timeout.ms": "2000"},
    }


def test_commands_with_mistakes_in_their_settings(
    shown: Any, broker: SecretNode, planted: PlantedSecrets, tmp_path: Path
) -> None:
    for name, settings in wrong_settings(broker, planted).items():
        path = tmp_path / "wrong.properties"
        path.write_text("".join(f"{key}={json.dumps(value)[1:-1]}\n" for key, value in settings.items()))
        code = 2 if name in ("no mechanism", "no module", "another module", "an unknown setting") else 1
        text = shown("topic", "list", "--command-config", str(path), code=code)
        assert "Traceback" not in text, (name, text)
    secret = planted.new("outbox_password")
    words = ("outbox", "init", "--database", f"postgresql://relay:{secret}@127.0.0.1:1/shop")
    assert "Traceback" not in shown(*words, code=1)


def test_clients_with_mistakes_in_their_settings(
    broker: SecretNode, planted: PlantedSecrets, caplog: pytest.LogCaptureFixture
) -> None:
    """What they raise, and what they print as."""
    caplog.set_level(logging.DEBUG)
    for name, settings in wrong_settings(broker, planted).items():
        shown = [name]
        try:
            parsed = ConnectionSettings.parse(settings)
            shown += [repr(parsed), str(parsed), f"{parsed.sasl!r} {parsed.security!r}"]
            with Cluster(parsed) as cluster:
                shown.append(repr(cluster))
                _ = cluster.cluster_id
                shown.append("no error")
        except ClientError as error:
            shown += [repr(error), "".join(traceback.format_exception(error))]
        assert (shown[-1] == "no error") is (name == "an unknown setting"), name
        planted.check("\n".join(shown), name)
    planted.check(caplog.text, "the log of the clients")


def test_applications(
    broker: SecretNode, planted: PlantedSecrets, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    settings = broker.login()
    address = settings.pop("bootstrap.servers")
    wrong = settings | {
        "sasl.password": planted.new("application_password"),
        "message.timeout.ms": "1000",
    }
    shown = []
    for given in (settings, wrong):
        app = Penstock(address, settings=given)
        shown.append(repr(app))
        try:
            app.publish("orders-of-app", "hello").result(TIMEOUT_S)
        except Exception as error:  # whatever it is, it is shown
            shown += [repr(error), "".join(traceback.format_exception(error))]
        app.close()
    relay = Relay(f"sqlite:///{tmp_path}/shop.db", address, settings=settings)
    shown.append(repr(relay))
    planted.check("\n".join(shown), "an application")
    planted.check(caplog.text, "the log of an application")


def test_users_and_tokens(broker: SecretNode, planted: PlantedSecrets) -> None:
    """What the metadata log gets to know of a password does not show it, and refusals quote nothing."""
    shown = []
    path = "alter_user_scram_credentials.v0.request"
    with Cluster(ConnectionSettings.parse(broker.login())) as cluster:
        set_password(cluster, "dave", planted.new("dave_password"))
        shown.append(repr(list_users(cluster)))
        salted = planted.new("salted_password")
        for change in ({"iterations": 1}, {"mechanism": 9}, {"name": ""}, {"salt": b""}):
            fields = {"name": "eve", "mechanism": 1, "iterations": 4096, "salt": b"s" * 16} | change
            upsertion = schema_class(f"{path}:ScramCredentialUpsertion")(
                **fields, salted_password=salted.encode()
            )
            request = schema_class(f"{path}:AlterUserScramCredentialsRequest")(
                deletions=(), upsertions=(upsertion, upsertion)
            )
            answer = cluster.call_controller(lambda connection, request=request: connection.call(request))
            assert all(result.error_code is not ErrorCode.none for result in answer.results)
            shown.append(repr(answer))
    token = create_with(broker, "carol")
    planted.add("token_hmac", token.hmac)
    shown += [repr(token), str(token)]
    login = broker.login("carol") | {
        "sasl.username": token.token_id,
        "sasl.password": token.hmac,
        "penstock.sasl.tokenauth": "true",
    }
    with Cluster(ConnectionSettings.parse(login)) as cluster:
        with pytest.raises(Refused) as refused:
            create_token(cluster)
        shown.append("".join(traceback.format_exception(refused.value)))
    with Cluster(ConnectionSettings.parse(broker.login())) as cluster:
        shown.append(repr(list_tokens(cluster)))
    planted.check("\n".join(shown), "an answer about users")


def token_settings(broker: SecretNode, issuer: Issuer, tmp_path: Path) -> dict[str, dict[str, str]]:
    """Each way in which a client gets its tokens, with the names of Kafka and of librdkafka."""
    url = "sasl.oauthbearer.token.endpoint.url"
    common = {
        "bootstrap.servers": broker.bootstrap_servers,
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(broker.authority.certificate),
        "sasl.mechanism": "OAUTHBEARER",
        "default.api.timeout.ms": "5000",
    }
    file = tmp_path / "token"
    file.write_text(issuer.token())
    module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
    return {
        "in JAAS text": common
        | {
            url: f"{issuer.url}/token",
            "sasl.jaas.config": f'{module} required clientId="{CLIENT_ID}" clientSecret="{CLIENT_SECRET}";',
        },
        "as settings": common
        | {
            url: f"{issuer.url}/token",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": CLIENT_ID,
            "sasl.oauthbearer.client.secret": CLIENT_SECRET,
        },
        "in a file": common | {url: file.as_uri()},
    }


def test_secrets_and_tokens_of_oauthbearer(
    shown: Any,
    broker: SecretNode,
    planted: PlantedSecrets,
    issuer: Issuer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of commands, contexts, clients and applications; where the login works and where it does not."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("PENSTOCK_CONTEXTS", str(tmp_path / "contexts.toml"))
    good = token_settings(broker, issuer, tmp_path)
    wrong_secret = planted.new("wrong_client_secret")
    stale = tmp_path / "stale"
    stale.write_text(issuer.token(exp=1, iat=0))
    wrong = {
        # The issuer repeats the header with the secret in its refusal.
        "a wrong secret": good["as settings"] | {"sasl.oauthbearer.client.secret": wrong_secret},
        "an old token": good["in a file"] | {"sasl.oauthbearer.token.endpoint.url": stale.as_uri()},
        "no client id": {
            name: value for name, value in good["as settings"].items() if not name.endswith("client.id")
        },
        "no such name": good["as settings"] | {"sasl.oauthbearer.client.secrt": wrong_secret},
    }
    for name, settings in {**good, **wrong}.items():
        path = tmp_path / "client.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        code = 0 if name in good else 2 if name.startswith("no ") else 1
        text = shown("topic", "list", "--command-config", str(path), code=code)
        assert "Traceback" not in text, (name, text)
        texts = []
        try:
            parsed = ConnectionSettings.parse(settings)
            texts += [repr(parsed), repr(parsed.sasl)]
            with Cluster(parsed) as cluster:
                texts += [repr(cluster), str(cluster.cluster_id)]
        except ClientError as error:
            texts += [repr(error), "".join(traceback.format_exception(error))]
        planted.check("\n".join(texts), name)
    for name in good:
        context = name.replace(" ", "-")
        path.write_text("".join(f"{key}={value}\n" for key, value in good[name].items()))
        shown("context", "set", context, "--command-config", str(path))
        shown("context", "show", context)
        shown("context", "show", context, "--json")
        shown("topic", "list", "--context", context)
    shown("context", "list", "--json")
    for settings in (good["as settings"], wrong["a wrong secret"] | {"message.timeout.ms": "1000"}):
        given = dict(settings)
        app = Penstock(given.pop("bootstrap.servers"), settings=given)
        texts = [repr(app)]
        try:
            app.publish("orders-of-app", "hello").result(TIMEOUT_S)
        except Exception as error:  # whatever it is, it is shown
            texts += [repr(error), "".join(traceback.format_exception(error))]
        app.close()
        planted.check("\n".join(texts), "an application")
    issuer.token_document = json.dumps({"access_token": planted.new("no_token"), "expires_in": 1}).encode()
    try:
        # Tokens are kept by their scope, so that this is a new request to the issuer.
        other = good["as settings"] | {"sasl.oauthbearer.scope": "other"}
        path.write_text("".join(f"{key}={value}\n" for key, value in other.items()))
        shown("topic", "list", "--command-config", str(path), code=1)
    finally:
        issuer.token_document = None
    planted.check(caplog.text, "the log of the clients")


def test_apply(
    shown: Any,
    properties: str,
    broker: SecretNode,
    planted: PlantedSecrets,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Passwords from the environment, from files and from the declaration itself; plans, results and mistakes."""
    config = ("--command-config", properties)
    monkeypatch.setenv("APPLIED_PASSWORD", planted.new("applied_from_variable"))
    (tmp_path / "applied.password").write_text(planted.new("applied_from_file"))
    inline = planted.new("applied_from_declaration")
    text = (
        "[users.apply-env]\npassword_env = 'APPLIED_PASSWORD'\n"
        "[users.apply-file]\npassword_file = 'applied.password'\n"
        f"[users.apply-inline]\npassword = '{inline}'\n"
    )
    file = tmp_path / "access.toml"
    given = ("apply", "-f", str(file), *config)

    def write(content: str) -> None:
        file.write_text(content)
        file.chmod(0o600)

    write(text)
    shown(*given, "--check", code=3)
    shown(*given, "--check", "--json", code=3)
    done = subprocess.Popen(
        [*executable(), *given, "--yes", "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environment(), "APPLIED_PASSWORD": os.environ["APPLIED_PASSWORD"]},
    )
    planted.check(command_lines(), "the list of processes")
    output = done.communicate(timeout=TIMEOUT_S)[0]
    assert done.returncode == 0, output
    planted.check(output, "penstock apply in a process of its own")
    assert json.loads(output)["applied"] == 3
    rotated = ("--rotate", "apply-env", "--rotate", "apply-file", "--rotate", "apply-inline")
    assert "3 changes applied" in shown(*given, "--yes", *rotated)
    shown(*given, "--prune", "--check", "--json", code=3)
    for mistake in (
        f"[users.x]\npassword = ['{inline}']",
        f"[users.x]\npassword = '{inline}'\npassword_env = 'A'",
        f"[users.x]\npasword = '{inline}'",
        f"[users.x]\npassword = '{inline}",
        f"[users.x]\niterations = '{inline}'",
        f"[users.x]\npassword_file = '{tmp_path}/missing'",
        f"users.x = '{inline}'",
        f"[users]\nx = '{inline}'\npassword = '{inline}'",
    ):
        write(mistake)
        text = shown(*given, "--yes", code=2)
        assert "error: " in text
        assert "Traceback" not in text
    write(f"[users.x]\npassword = '{inline}'")
    file.chmod(0o644)
    assert "others can read" in shown(*given, "--yes", code=2)


def create_with(broker: SecretNode, user: str) -> Any:
    with Cluster(ConnectionSettings.parse(broker.login(user, "PLAIN"))) as cluster:
        return create_token(cluster)


def test_settings_are_described_and_changed(broker: SecretNode, planted: PlantedSecrets) -> None:
    """DescribeConfigs has no secret, and a refused change does not quote its value."""
    admin = AdminClient(broker.login() | {"log_level": 0})
    resource = ConfigResource(ResourceType.BROKER, "1")
    described = admin.describe_configs([resource])[resource].result(TIMEOUT_S)
    hidden = {"ssl.keystore.key", "ssl.key.password", "penstock.sasl.secret", "penstock.http.token"}
    assert all(described[name].is_sensitive and described[name].value is None for name in hidden)
    text = [repr({name: (entry.value, entry.synonyms) for name, entry in described.items()})]
    secret = planted.new("changed_setting")
    settings = ("ssl.key.password", "sasl.jaas.config", "listener.name.plaintext.ssl.keystore.key")
    resources = ((4, "1"), (4, ""), (2, "orders"), (32, "group"))
    text += [
        repr(change(broker, *resource, setting, secret)) for resource in resources for setting in settings
    ]
    planted.check("\n".join(text), "an answer about settings")


def change(broker: SecretNode, kind: int, name: str, setting: str, value: str) -> Any:
    """Change a setting in both ways; the answers, in which everything is refused."""
    answers = []
    with Cluster(ConnectionSettings.parse(broker.login())) as cluster:
        for api in ("incremental_alter_configs.v1", "alter_configs.v2"):
            request_name = "IncrementalAlterConfigs" if api.startswith("inc") else "AlterConfigs"
            entry_class = schema_class(f"{api}.request:AlterableConfig")
            operation = {"config_operation": 0} if api.startswith("inc") else {}
            entry = entry_class(name=setting, value=value, **operation)
            resource = schema_class(f"{api}.request:AlterConfigsResource")(
                resource_type=kind, resource_name=name, configs=(entry,)
            )
            request = schema_class(f"{api}.request:{request_name}Request")(
                resources=(resource,), validate_only=False
            )
            answer = cluster.call_controller(lambda connection, request=request: connection.call(request))
            assert all(each.error_code is not ErrorCode.none for each in answer.responses), (kind, setting)
            answers.append(answer)
    return answers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ssl.key.password", "{secret}"),
        ("ssl.keystore.key", "-----BEGIN PRIVATE KEY-----\n{secret}\n-----END PRIVATE KEY-----"),
        ("listener.name.plaintext.plain.sasl.jaas.config", 'PlainLoginModule user_x="{secret}"'),
        ("listener.name.plaintext.plain.sasl.jaas.config", 'x.Krb5LoginModule required user_x="{secret}";'),
        ("listener.name.nowhere.plain.sasl.jaas.config", 'x.PlainLoginModule required user_x="{secret}";'),
        ("ssl.key.pasword", "{secret}"),
        ("penstock.http.tokn", "{secret}"),
    ],
)
@pytest.mark.parametrize("source", ["file", "environment"])
def test_a_node_that_does_not_start(
    source: str, name: str, value: str, broker: SecretNode, planted: PlantedSecrets, tmp_path: Path
) -> None:
    secret = planted.new("of_a_node_that_does_not_start")
    given = {**broker.secrets, name: value.format(secret=secret)}
    config = tmp_path / "node.toml"
    variables = {}
    if source == "environment":
        variables = {f"PENSTOCK_{name.upper().replace('.', '_')}": given.pop(name)}
    config.write_text("".join(f'"{key}" = {json.dumps(text)}\n' for key, text in given.items()))
    flags = [
        *("--listen", "SASL_SSL://127.0.0.1:0", "--data-dir", str(tmp_path / "data")),
        *("--config", str(config), "--set", "sasl.enabled.mechanisms=PLAIN"),
    ]
    if "plaintext" in name:
        flags[1] = "PLAINTEXT://127.0.0.1:0"
        flags += ["--set", "listener.security.protocol.map=PLAINTEXT:SASL_SSL"]
    done = subprocess.run(
        [*executable(), "serve", *flags],
        capture_output=True,
        env={**environment(), **variables},
        timeout=TIMEOUT_S,
    )
    assert done.returncode in (1, 2), done.stdout
    text = (done.stdout + done.stderr).decode()
    assert "Traceback" not in text
    planted.check(text, "a node that does not start")


def test_settings_of_a_node_print_as_no_value(broker: SecretNode, planted: PlantedSecrets) -> None:
    settings = load_settings({"listeners": "PLAINTEXT://x:1"}, {}, str(broker._config))
    planted.check(f"{settings} {settings!r} {settings.origins!r}", "NodeSettings")
