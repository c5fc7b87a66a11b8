"""Clients that log in with tokens: each way in which each of them gets one, refusals, sessions that end."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import AbstractTokenProvider as AioTokenProvider
from aiokafka.errors import KafkaError as AioKafkaError
from confluent_kafka import Consumer, KafkaError, Producer
from kafka import KafkaConsumer, KafkaProducer
from kafka.net.sasl.oauth import AbstractTokenProvider
from tests import tokens
from tests.brokers import BrokerProcess, environment, executable
from tests.tokens import AUDIENCE, CLIENT_ID, CLIENT_SECRET, ISSUER, Issuer
from tests.waiting import eventually

from penstock.client import Penstock
from penstock.client.errors import AuthenticationFailed
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.client.wire.settings import ConnectionSettings

URL = "sasl.oauthbearer.token.endpoint.url"
#: Short, so that sessions end while tests run.
SESSION_MS = 3_000
LIFETIME_S = 4


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with tokens.serve(Issuer()) as serving:
        yield serving


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, issuer: Issuer) -> Iterator[BrokerProcess]:
    settings = {
        "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.jwks.endpoint.url": f"{issuer.url}/keys",
        "sasl.oauthbearer.expected.audience": AUDIENCE,
        "sasl.oauthbearer.expected.issuer": ISSUER,
        "connections.max.reauth.ms": str(SESSION_MS),
    }
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"), settings).start()
    yield broker
    assert broker.stop() == 0
    assert "eyJ" not in "".join(broker.output)  # how each token begins


@pytest.fixture
def token_file(tmp_path: Path, issuer: Issuer) -> Path:
    path = tmp_path / "token"
    path.write_text(issuer.token())
    return path


def common(broker: BrokerProcess) -> dict[str, Any]:
    return {
        "bootstrap.servers": broker.bootstrap_servers,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
    }


def with_endpoint(broker: BrokerProcess, issuer: Issuer, secret: str = CLIENT_SECRET) -> dict[str, Any]:
    """As in Kafka's Java clients."""
    return common(broker) | {
        URL: f"{issuer.url}/token",
        "sasl.jaas.config": (
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
            f'clientId="{CLIENT_ID}" clientSecret="{secret}" scope="kafka" extension_tenant="acme";'
        ),
    }


def oidc(broker: BrokerProcess, issuer: Issuer) -> dict[str, Any]:
    return common(broker) | {
        "sasl.oauthbearer.method": "oidc",
        URL: f"{issuer.url}/token",
        "sasl.oauthbearer.client.id": CLIENT_ID,
        "sasl.oauthbearer.client.secret": CLIENT_SECRET,
        "sasl.oauthbearer.extensions": "tenant=acme",
        "log_level": 0,
    }


def callback(broker: BrokerProcess, issuer: Issuer) -> dict[str, Any]:
    def token(config: str) -> tuple[str, float]:
        return issuer.token(), time.time() + issuer.lifetime_s

    return common(broker) | {"oauth_cb": token, "log_level": 0}


@pytest.mark.parametrize("settings_of", [oidc, callback])
def test_confluent_kafka(settings_of: Any, broker: BrokerProcess, issuer: Issuer) -> None:
    topic = f"confluent-{settings_of.__name__}"
    producer = Producer(settings_of(broker, issuer))
    producer.produce(topic, b"hello")
    assert producer.flush(60) == 0
    consumer = Consumer(settings_of(broker, issuer) | {"group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    message = eventually(lambda: consumer.poll(1))
    assert message.value() == b"hello"
    consumer.close()


def test_sessions_of_librdkafka(broker: BrokerProcess, issuer: Issuer) -> None:
    errors: list[KafkaError] = []
    producer = Producer(callback(broker, issuer) | {"error_cb": errors.append})
    end = time.monotonic() + 1.5 * SESSION_MS / 1000

    def produce_one() -> bool:
        producer.produce("long-session", b"x")
        assert producer.flush(60) == 0
        return time.monotonic() > end

    assert eventually(produce_one)
    assert not [error for error in errors if error.code() == KafkaError._AUTHENTICATION]


def test_a_token_that_librdkafka_is_refused_for(broker: BrokerProcess, issuer: Issuer) -> None:
    def token(config: str) -> tuple[str, float]:
        return issuer.token(aud="payments"), time.time() + 300

    errors: list[KafkaError] = []
    producer = Producer(callback(broker, issuer) | {"oauth_cb": token, "error_cb": errors.append})
    eventually(lambda: producer.poll(0.1) or any("invalid_token" in error.str() for error in errors))


class Tokens(AbstractTokenProvider):
    def __init__(self, issuer: Issuer, **others: Any) -> None:
        self.issuer, self.others = issuer, others

    def token(self) -> str:
        return self.issuer.token(**self.others)


class AioTokens(AioTokenProvider):
    def __init__(self, issuer: Issuer, **others: Any) -> None:
        self.issuer, self.others = issuer, others

    async def token(self) -> str:
        return self.issuer.token(**self.others)


def in_python(broker: BrokerProcess, provider: Any) -> dict[str, Any]:
    return {
        "bootstrap_servers": broker.bootstrap_servers,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_provider": provider,
    }


def test_kafka_python(broker: BrokerProcess, issuer: Issuer) -> None:
    producer = KafkaProducer(**in_python(broker, Tokens(issuer)))
    producer.send("python", b"hello").get(60)
    producer.close()
    consumer = KafkaConsumer("python", **in_python(broker, Tokens(issuer)), auto_offset_reset="earliest")
    assert next(consumer).value == b"hello"
    consumer.close()


async def test_aiokafka(broker: BrokerProcess, issuer: Issuer) -> None:
    async with AIOKafkaProducer(**in_python(broker, AioTokens(issuer))) as producer:
        await producer.send_and_wait("aio", b"hello")
    given = in_python(broker, AioTokens(issuer)) | {"auto_offset_reset": "earliest"}
    async with AIOKafkaConsumer("aio", **given) as consumer:
        assert (await consumer.getone()).value == b"hello"
    with pytest.raises(AioKafkaError):
        await AIOKafkaProducer(**in_python(broker, AioTokens(issuer, aud="payments"))).start()


# Ours


def test_our_client_and_its_session(broker: BrokerProcess, issuer: Issuer) -> None:
    """The connections of a client are replaced before their session ends, each with a newer token."""
    issuer.lifetime_s = LIFETIME_S
    # Another scope than in other tests, because connections of a process share the token of an endpoint.
    given = oidc(broker, issuer) | {"sasl.oauthbearer.scope": "sessions"}
    before = len(issuer.token_requests)
    end = time.monotonic() + 1.5 * LIFETIME_S
    try:
        with Cluster(ConnectionSettings.parse({**given, "client.id": "ours"})) as cluster:

            def list_topics() -> bool:
                cluster.topics()
                return time.monotonic() > end

            assert eventually(list_topics)
    finally:
        issuer.lifetime_s = 300
    requests = issuer.token_requests[before:]
    assert {"grant_type": "client_credentials", "scope": "sessions"} in requests
    assert 2 <= len(requests) <= 8


def test_who_is_refused(broker: BrokerProcess, issuer: Issuer, tmp_path: Path) -> None:
    settings = ConnectionSettings.parse(with_endpoint(broker, issuer, "planted"))
    with pytest.raises(AuthenticationFailed, match="invalid_client") as raised:
        Connection(settings.bootstrap[0], settings)
    assert "planted" not in str(raised.value) + repr(settings)
    path = tmp_path / "token"
    path.write_text(issuer.token(aud="payments"))
    settings = ConnectionSettings.parse(common(broker) | {URL: path.as_uri()})
    with pytest.raises(AuthenticationFailed, match="refuse"):
        Connection(settings.bootstrap[0], settings)


@pytest.mark.parametrize("source", ["endpoint", "file"])
def test_an_application(source: str, broker: BrokerProcess, issuer: Issuer, token_file: Path) -> None:
    given = (
        with_endpoint(broker, issuer) if source == "endpoint" else common(broker) | {URL: token_file.as_uri()}
    )
    del given["bootstrap.servers"]
    with Penstock(broker.bootstrap_servers, name=f"app-{source}", settings=given) as app:
        app.publish(f"app-{source}", b"hello")


@pytest.mark.parametrize("source", ["endpoint", "file"])
def test_commands(
    source: str, broker: BrokerProcess, issuer: Issuer, token_file: Path, tmp_path: Path
) -> None:
    given = (
        with_endpoint(broker, issuer) if source == "endpoint" else common(broker) | {URL: token_file.as_uri()}
    )
    path = tmp_path / "client.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in given.items()))

    def penstock(*words: str, stdin: str = "") -> str:
        done = subprocess.run(
            [*executable(), *words, "--command-config", str(path)],
            input=stdin,
            capture_output=True,
            text=True,
            env=environment(),
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert CLIENT_SECRET not in done.stdout + done.stderr
        return done.stdout

    topic = f"commands-{source}"
    penstock("topic", "create", topic)
    penstock("produce", topic, stdin="hello\n")
    assert topic in penstock("topic", "list")
