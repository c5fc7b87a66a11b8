"""`penstock pipeline run` on a secure broker: it writes and shows no password, client secret or token.

Its settings come from a context, from the environment, and from a file. Searched are its output, the arguments of all
processes while it runs, Spark's event log, the checkpoints, and the topics that the pipeline writes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from tests import tokens
from tests.planted import PlantedSecrets, command_lines
from tests.tokens import AUDIENCE, CLIENT_ID, CLIENT_SECRET, ISSUER, Issuer

from penstock.testing import EmbeddedBroker

EXAMPLE = Path(__file__).parents[3] / "examples" / "orders_pipeline.py"
MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"
TIMEOUT_S = 800
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ORDER = {"id": "1", "customer": "ann", "quantity": 2, "price": 1.5}


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with tokens.serve(Issuer()) as serving:
        yield serving


@pytest.fixture(scope="module")
def broker(issuer: Issuer) -> Iterator[EmbeddedBroker]:
    settings = {
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512,OAUTHBEARER",
        "sasl.oauthbearer.jwks.endpoint.url": f"{issuer.url}/keys",
        "sasl.oauthbearer.expected.audience": AUDIENCE,
        "sasl.oauthbearer.expected.issuer": ISSUER,
        "super.users": f"User:admin;User:penstock-node;User:runner;User:{CLIENT_ID}",
    }
    with EmbeddedBroker(secure=True, settings=settings) as broker:
        for name in ("orders", "orders.clean"):
            broker.create_topic(name)
        yield broker


class Place:
    """Where a run writes, and the search in it."""

    def __init__(self, folder: Path, broker: EmbeddedBroker, planted: PlantedSecrets) -> None:
        self.folder, self.broker, self.planted = folder, broker, planted
        self.written = folder / "written"
        (self.written / "events").mkdir(parents=True)

    def run(self, variables: dict[str, str], *flags: str, code: int = 0) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        command = [
            *(sys.executable, "-m", "penstock", "pipeline", "run", str(EXAMPLE), "--once", *flags),
            *("--master", "local[2]", "--checkpoints", str(self.written / "checkpoints")),
            *("-c", "spark.driver.memory=512m", "-c", "spark.eventLog.enabled=true"),
            *("-c", f"spark.eventLog.dir={(self.written / 'events').as_uri()}"),
        ]
        log = self.folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=kept | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                while process.poll() is None:
                    self.planted.check(command_lines(), "the list of processes")
                    try:
                        process.wait(0.5)
                    except subprocess.TimeoutExpired:
                        continue
            finally:
                process.kill()
        text = log.read_text()
        assert process.returncode == code, text
        self.planted.check(text, "the output of the pipeline")
        self.planted.check_files(self.written)
        self.planted.check_files(self.broker.data_dir, but=frozenset({"admin.password", "client.properties"}))
        return text


@pytest.fixture
def planted() -> PlantedSecrets:
    planted = PlantedSecrets()
    planted.add("client_secret", CLIENT_SECRET)
    return planted


@pytest.fixture
def place(tmp_path: Path, broker: EmbeddedBroker, planted: PlantedSecrets) -> Place:
    return Place(tmp_path, broker, planted)


def publish_orders(broker: EmbeddedBroker) -> None:
    producer = Producer({**broker.client_settings(), "log_level": 0})
    for value in (json.dumps(ORDER), "no order", json.dumps({**ORDER, "quantity": 0})):
        producer.produce("orders", value)
    assert producer.flush(60) == 0


def clean_orders(broker: EmbeddedBroker, count: int) -> list[Any]:
    consumer = Consumer({**broker.client_settings(), "group.id": "check", "auto.offset.reset": "earliest"})
    consumer.subscribe(["orders.clean"])
    found = [json.loads(message.value() or b"") for message in consumer.consume(count, 60)]
    consumer.close()
    return found


def test_a_run_with_a_password_from_a_context(place: Place, broker: EmbeddedBroker) -> None:
    password = place.planted.new("password")
    broker.create_user("runner", password)
    login = broker.client_settings("runner")
    del login["sasl.username"], login["sasl.password"]
    contexts = place.folder / "contexts.toml"
    jaas = f'{MODULE} required username="runner" password="{password}";'
    settings = {**login, "sasl.jaas.config": jaas}
    lines = [
        "[contexts.prod]",
        *(f"{json.dumps(key)} = {json.dumps(text)}" for key, text in settings.items()),
    ]
    contexts.write_text("\n".join(lines) + "\n")
    contexts.chmod(0o600)
    publish_orders(broker)
    place.run({"PENSTOCK_CONTEXTS": str(contexts)}, "--context", "prod")
    assert clean_orders(broker, 1) == [{"id": "1", "customer": "ann", "total": 3.0}]
    assert list((place.written / "events").iterdir())


def test_a_run_with_tokens_whose_secret_is_in_the_environment(
    place: Place, broker: EmbeddedBroker, issuer: Issuer
) -> None:
    publish_orders(broker)
    login = broker.client_settings()
    variables = {
        "bootstrap": login["bootstrap.servers"],
        "client.security.protocol": "SASL_SSL",
        "client.ssl.ca.location": login["ssl.ca.location"],
        "client.sasl.mechanism": "OAUTHBEARER",
        "client.sasl.oauthbearer.token.endpoint.url": f"{issuer.url}/token",
        "client.sasl.oauthbearer.method": "oidc",
        "client.sasl.oauthbearer.client.id": CLIENT_ID,
        "client.sasl.oauthbearer.client.secret": CLIENT_SECRET,
    }
    asked = len(issuer.token_requests)
    place.run(
        {f"PENSTOCK_{name.upper().replace('.', '_')}": value for name, value in variables.items()},
        *("--name", "with-tokens"),
    )
    assert len(issuer.token_requests) > asked
    assert "eyJ" not in (place.folder / "log").read_text(), "this is how each token begins"
    assert list((place.written / "events").iterdir())


def test_a_run_with_a_wrong_password_in_a_file(place: Place, broker: EmbeddedBroker) -> None:
    settings = broker.client_settings() | {"sasl.password": place.planted.new("wrong_password")}
    properties = place.folder / "client.properties"
    properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    text = place.run({}, "--command-config", str(properties), code=1)
    assert "error: " in text
    assert "Traceback" not in text
