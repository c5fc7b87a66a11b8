"""Three nodes that log in to each other with tokens, which expire while they work."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests import tokens
from tests.brokers import ClusterProcesses
from tests.tokens import AUDIENCE, CLIENT_ID, CLIENT_SECRET, ISSUER, Issuer
from tests.topics import create_topics
from tests.waiting import eventually

#: Short, so that sessions end while the test runs.
LIFETIME_S = 4
MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with tokens.serve(Issuer()) as serving:
        serving.lifetime_s = LIFETIME_S
        yield serving


@pytest.fixture(scope="module")
def cluster(cluster_with: Callable[..., ClusterProcesses], issuer: Issuer) -> ClusterProcesses:
    return cluster_with(
        {
            "listener.security.protocol.map": "CLIENT:PLAINTEXT,NODES:SASL_PLAINTEXT",
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            "sasl.mechanism.inter.broker.protocol": "OAUTHBEARER",
            "penstock.node.principals": f"User:{CLIENT_ID}",
            "sasl.oauthbearer.jwks.endpoint.url": f"{issuer.url}/keys",
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "sasl.oauthbearer.expected.issuer": ISSUER,
            "sasl.oauthbearer.token.endpoint.url": f"{issuer.url}/token",
            "listener.name.nodes.oauthbearer.sasl.jaas.config": (
                f'{MODULE} required clientId="{CLIENT_ID}" clientSecret="{CLIENT_SECRET}" scope="nodes";'
            ),
        }
    )


def test_nodes_replicate_longer_than_their_tokens_last(cluster: ClusterProcesses, issuer: Issuer) -> None:
    settings: dict[str, Any] = {"bootstrap.servers": cluster.bootstrap_servers}
    admin = AdminClient(settings)
    create_topics(admin, NewTopic("replicated", 3, 3))
    producer = Producer(settings | {"acks": "all"})
    failures: list[Any] = []
    end = time.monotonic() + 1.5 * LIFETIME_S

    def produce() -> bool:
        for number in range(30):
            producer.produce("replicated", str(number), on_delivery=lambda error, _: failures.append(error))
        assert producer.flush(60) == 0
        return time.monotonic() > end

    assert eventually(produce)
    assert set(failures) == {None}
    assert {"grant_type": "client_credentials", "scope": "nodes"} in issuer.token_requests
    assert len(issuer.token_requests) > len(cluster.nodes)  # each node took a newer one
    for node in cluster.nodes.values():
        written = "".join(node.output)
        assert CLIENT_SECRET not in written
        assert "eyJ" not in written  # how each token begins
