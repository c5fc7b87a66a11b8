"""A secure embedded broker: its users and rules, and the files of its credentials."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka.admin import AdminClient
from cryptography import x509
from tests import certificates
from tests import outcomes as delivery

from penstock.client import read_properties
from penstock.client.errors import AuthenticationFailed, Refused, Unavailable
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.testing import EmbeddedBroker
from penstock.testing.credentials import Credentials

QUIET = {"log_level": 0}


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(secure=True) as broker:
        yield broker


def refused(settings: dict[str, str]) -> type[Exception]:
    parsed = ConnectionSettings.parse({**settings, "default.api.timeout.ms": "2000"})
    with pytest.raises((AuthenticationFailed, Unavailable, Refused)) as raised, Cluster(parsed) as cluster:
        _ = cluster.cluster_id
    return raised.type


def publish(settings: dict[str, str], topic: str) -> list[Any]:
    outcomes: list[Any] = []
    producer = Producer({**settings, **QUIET})
    delivery.produce(producer, topic, b"hello", outcomes.append)
    assert producer.flush(60) == 0
    return outcomes


def test_a_user_may_do_what_rules_allow(broker: EmbeddedBroker) -> None:
    for name in ("allowed", "other"):
        broker.create_topic(name)
    alice = broker.create_user("alice")
    broker.allow("alice", "write", "read", topic="allowed")
    broker.allow("alice", "read", group="alice-", prefixed=True)
    assert publish(alice, "allowed") == [None]
    assert [each.code() for each in publish(alice, "other")] == [KafkaError.TOPIC_AUTHORIZATION_FAILED]
    consumer = Consumer(
        {**broker.client_settings("alice"), **QUIET, "group.id": "alice-1", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["allowed"])
    (message,) = consumer.consume(1, 60)
    assert message.value() == b"hello"
    consumer.close()
    assert [*AdminClient({**alice, **QUIET}).list_topics(timeout=60).topics] == ["allowed"]


def test_the_super_user_may_do_everything(broker: EmbeddedBroker) -> None:
    broker.create_topic("of-admin")
    assert publish(broker.client_settings(), "of-admin") == [None]
    with Cluster(ConnectionSettings.parse(read_properties(broker.client_properties))) as cluster:
        assert "of-admin" in cluster.topics()


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_password_works_with_every_mechanism(mechanism: str, broker: EmbeddedBroker) -> None:
    settings = broker.create_user(f"user-{mechanism}", "chosen") | {"sasl.mechanism": mechanism}
    with Cluster(ConnectionSettings.parse(settings)) as cluster:
        assert cluster.cluster_id
    assert refused(settings | {"sasl.password": "wrong"}) is AuthenticationFailed


def test_who_is_not_let_in(broker: EmbeddedBroker) -> None:
    admin = broker.client_settings()
    assert refused({"bootstrap.servers": broker.bootstrap_servers}) is Unavailable
    assert refused(admin | {"security.protocol": "SSL"}) is Unavailable
    assert refused({name: value for name, value in admin.items() if name != "ssl.ca.location"}) is (
        AuthenticationFailed
    )


def test_users_and_rules_survive_a_restart_and_a_kill() -> None:
    with EmbeddedBroker(secure=True) as broker:
        broker.create_topic("t")
        bob = broker.create_user("bob")
        broker.allow("bob", topic="t")
        broker.restart()
        assert publish(bob, "t") == [None]
        broker.kill()
        broker.start()
        assert publish(bob, "t") == [None]
        assert broker.client_settings("bob") == bob


def test_settings_override_those_of_a_secure_broker() -> None:
    with EmbeddedBroker(secure=True, settings={"authorizer.class.name": ""}) as broker:
        broker.create_topic("t")
        assert publish(broker.create_user("carol"), "t") == [None]


def test_wrong_use_is_said(broker: EmbeddedBroker) -> None:
    with pytest.raises(ValueError, match="no operation 'fly'"):
        broker.allow("alice", "fly", topic="t")
    with pytest.raises(ValueError, match="name a topic"):
        broker.allow("alice", "read")
    with pytest.raises(ValueError, match="has not made 'nobody'"):
        broker.client_settings("nobody")
    with EmbeddedBroker() as plain:
        assert plain.client_settings() == {"bootstrap.servers": plain.bootstrap_servers}
        with pytest.raises(RuntimeError, match="secure=True"):
            plain.create_user("alice")


pytest_plugins = ["pytester"]


def test_the_fixtures_of_pytest_are_secure_if_told(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture(scope="session")
        def penstock_secure():
            return True
        """
    )
    pytester.makepyfile(
        """
        def test_both(penstock, penstock_session):
            for broker in (penstock, penstock_session):
                assert broker.client_settings()["security.protocol"] == "SASL_SSL"
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


# The files


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def node_file(credentials: Credentials, *hosts: str) -> Path:
    return Path(credentials.node_settings("node-1", hosts)["ssl.keystore.location"])


def test_nobody_else_can_read_the_files(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path / "security")
    node_file(credentials, "localhost")
    credentials.node_secrets()
    credentials.write_properties("a:1")
    assert stat.S_IMODE(credentials.folder.stat().st_mode) == 0o700
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in credentials.folder.iterdir()}
    assert files.keys() == {
        "admin.password", "ca.key", "ca.pem", "client.properties", "node-1.pem", "sasl.secret"
    }  # fmt: skip
    assert set(files.values()) == {0o600}


def test_they_are_made_once(tmp_path: Path) -> None:
    first = Credentials(tmp_path)
    made = {"node": node_file(first, "localhost", "127.0.0.1").read_bytes(), **first.node_secrets()}
    again = Credentials(tmp_path)
    assert {"node": node_file(again, "127.0.0.1").read_bytes(), **again.node_secrets()} == made
    assert again.password == first.password
    assert again.authority_file.read_bytes() == first.authority_file.read_bytes()


def test_a_certificate_is_renewed_when_it_does_not_fit(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    path = node_file(credentials, "localhost")
    serial = certificate(path).serial_number

    node_file(credentials, "localhost", "10.0.0.1")  # another host
    with_host = certificate(path).serial_number
    assert with_host != serial

    path.write_text("damaged")
    node_file(credentials, "localhost")
    assert certificate(path).issuer == certificate(credentials.authority_file).subject

    other = certificates.Authority(tmp_path / "other").issue(
        "node-1"
    )  # of another authority, and valid for 30 days only
    path.write_bytes(other.read_bytes())
    node_file(credentials, "localhost")
    certificate(path).verify_directly_issued_by(certificate(credentials.authority_file))


def test_a_lost_key_is_an_error(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    (credentials.folder / "ca.key").unlink()
    with pytest.raises(ValueError, match=r"ca\.key and ca\.pem are not a key and its certificate"):
        Credentials(tmp_path)
