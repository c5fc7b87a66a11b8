"""Security protocols of listeners, settings that a listener overrides, and what a node refuses to start without."""

import re

import pytest

from penstock.broker.config.listeners import SecurityProtocol, parse_protocol_map
from penstock.broker.config.node_settings import InvalidSetting, load_settings

KEY = {"ssl.keystore.location": "node.pem"}
MAP = "listener.security.protocol.map"


def settings(listeners: str, **more: str):
    return load_settings({"listeners": listeners, **more}, {})


def test_a_listener_named_like_a_protocol_has_that_protocol() -> None:
    found = settings("PLAINTEXT://:1,SSL://:2,SASL_SSL://:3", **KEY, **{"sasl.enabled.mechanisms": "PLAIN"})
    assert dict(found.protocols) == {
        "PLAINTEXT": SecurityProtocol.PLAINTEXT,
        "SSL": SecurityProtocol.SSL,
        "SASL_SSL": SecurityProtocol.SASL_SSL,
    }


def test_the_map_gives_other_names_their_protocol() -> None:
    found = settings("IN://:1,OUT://:2", **{MAP: " in:PLAINTEXT, OUT:ssl "}, **KEY)
    assert found.protocol("IN") is SecurityProtocol.PLAINTEXT
    assert found.protocol("OUT") is SecurityProtocol.SSL


def test_without_security_settings_every_listener_is_plaintext() -> None:
    found = settings("IN://:1,NODES://:2")
    assert set(found.protocols.values()) == {SecurityProtocol.PLAINTEXT}


def test_the_protocol_between_nodes_is_that_of_the_listener_for_nodes() -> None:
    more = {**KEY, "ssl.truststore.location": "ca.pem", "security.inter.broker.protocol": "SSL"}
    found = settings("PLAINTEXT://:1,NODES://:2", **more)
    assert found.protocol("NODES") is SecurityProtocol.SSL
    found = settings("PLAINTEXT://:1,SSL://:2", **more)
    assert found.inter_broker_listener == "SSL"


@pytest.mark.parametrize(
    ("listeners", "more", "message"),
    [
        ("IN://:1,SSL://:2", KEY, "Listener IN has no security protocol: add IN:SSL"),
        ("IN://:1", {MAP: "OUT:SSL"}, "Listener IN has no security protocol"),
        ("SSL://:1", {}, "ssl.keystore.location names a PEM file"),
        ("SSL://:1", {"ssl.keystore.key": "x"}, "must be set together"),
        (
            "SSL://:1",
            {**KEY, "ssl.keystore.key": "x", "ssl.keystore.certificate.chain": "y"},
            "not both be set",
        ),
        ("SSL://:1", {**KEY, "ssl.client.auth": "required"}, "ssl.truststore.location names a PEM file"),
        (
            "SSL://:1",
            {**KEY, "ssl.truststore.location": "a", "ssl.truststore.certificates": "b"},
            "must not both be set",
        ),
        ("SASL_PLAINTEXT://:1", {}, "sasl.enabled.mechanisms must name"),
        ("SASL_SSL://:1", KEY, "sasl.enabled.mechanisms must name"),
        (
            "PLAINTEXT://:1,NODES://:2",
            {"security.inter.broker.protocol": "SASL_PLAINTEXT", "sasl.enabled.mechanisms": "PLAIN"},
            "sasl.mechanism.inter.broker.protocol must name",
        ),
        (
            "PLAINTEXT://:1,NODES://:2",
            {**KEY, "security.inter.broker.protocol": "SSL"},
            "each other's certificates",
        ),
        (
            "PLAINTEXT://:1",
            {"inter.broker.listener.name": "PLAINTEXT", "security.inter.broker.protocol": "SSL"},
            "must not both be set",
        ),
        ("PLAINTEXT://:1", {MAP: "PLAINTEXT:TLS"}, "needs one of PLAINTEXT, SSL"),
        ("SSL://:1", {"ssl.keystore.type": "JKS"}, "must be one of PEM"),
        ("SSL://:1", {"ssl.principal.mapping.rules": "RULE:("}, "neither DEFAULT nor RULE"),
        ("SSL://:1", {"ssl.enabled.protocols": "TLSv1.1"}, "must be one of TLSv1.2, TLSv1.3"),
        ("SSL://:1", {"listener.name.ssl.listeners": "x"}, "Unknown setting listener.name.ssl.listeners"),
        (
            "SSL://:1",
            {"listener.name.sssl.ssl.client.auth": "none"},
            "did you mean listener.name.ssl.ssl.client.auth",
        ),
        ("SSL://:1", {"listener.name.ssl.ssl.client.auth": "no"}, "must be one of required, requested, none"),
    ],
)
def test_a_node_says_what_is_missing_and_does_not_start(listeners, more, message) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(message)):
        settings(listeners, **more)


def test_a_listener_overrides_settings_also_for_one_mechanism() -> None:
    found = load_settings(
        {
            "listeners": "IN://:1,SASL_SSL://:2",
            MAP: "IN:SSL,SASL_SSL:SASL_SSL",
            "ssl.keystore.location": "all.pem",
            "listener.name.in.ssl.keystore.location": "in.pem",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "listener.name.sasl_ssl.scram-sha-512.connections.max.reauth.ms": "5000",
        },
        {"PENSTOCK_LISTENER_NAME_SASL_SSL_SSL_CLIENT_AUTH": "none"},
    )
    assert found.listener_value("IN", "ssl.keystore.location") == "in.pem"
    assert found.listener_value("SASL_SSL", "ssl.keystore.location") == "all.pem"
    assert found.listener_value("SASL_SSL", "connections.max.reauth.ms", "SCRAM-SHA-512") == 5000
    assert found.listener_value("SASL_SSL", "connections.max.reauth.ms", "PLAIN") == 0


def test_secrets_are_neither_printed_nor_in_errors() -> None:
    found = settings("SSL://:1", **KEY, **{"ssl.key.password": "planted-secret"})
    assert "planted-secret" not in repr(found)
    with pytest.raises(InvalidSetting) as error:
        settings("SSL://:1", **KEY, **{"ssl.keystore.key": "planted-secret" * 30_000})
    assert "planted-secret" not in str(error.value)


@pytest.mark.parametrize("text", ["A", ":SSL", "A:", "A:TLS", "A:SSL,A:SSL"])
def test_wrong_protocol_maps_are_refused(text) -> None:
    with pytest.raises(ValueError, match=r"PROTOCOL|needs one of|two protocols"):
        parse_protocol_map(text)


def test_more_listeners_may_serve_nodes_while_the_one_between_nodes_changes() -> None:
    given = {
        "listeners": "CLIENTS://localhost:1,NODES://localhost:2,NEW://localhost:3",
        "inter.broker.listener.name": "NODES",
        "penstock.inter.broker.listeners": "new,nodes",
    }
    assert load_settings(given, {}).node_listeners == ("NODES", "NEW")
    with pytest.raises(
        InvalidSetting, match=r"penstock\.inter\.broker\.listeners: no listener is named OTHER"
    ):
        load_settings(given | {"penstock.inter.broker.listeners": "other"}, {})


APART = {
    "listeners": "CLIENTS://localhost:1,NODES://localhost:2,CONTROLLER://localhost:3",
    "controller.listener.names": "controller",
    "controller.quorum.voters": "0@localhost:3,1@localhost:4,2@localhost:5",
}


def test_controllers_may_have_a_listener_of_their_own() -> None:
    found = load_settings(APART, {})
    assert found.inter_broker_listener == "NODES"
    assert found.controller_listener == "CONTROLLER"
    assert found.controller_listeners == ("CONTROLLER",)
    assert found.node_listeners == ("NODES", "CONTROLLER")
    # As in Apache Kafka's own example, brokers may use the listener of clients among themselves.
    shared = load_settings(APART | {"inter.broker.listener.name": "CLIENTS"}, {})
    assert shared.node_listeners == ("CLIENTS", "CONTROLLER")
    # While a running cluster gets the new listener, nodes may still come through the old one.
    both = load_settings(APART | {"penstock.inter.broker.listeners": "NODES"}, {})
    assert both.controller_listeners == ("CONTROLLER", "NODES")


def test_a_controller_needs_the_listener_for_controllers_and_a_broker_only_its_protocol() -> None:
    wrong = {"listeners": "CLIENTS://localhost:1,NODES://localhost:2"}
    with pytest.raises(InvalidSetting, match=r"controller\.listener\.names: no listener is named CONTROLLER"):
        load_settings(APART | wrong, {})
    broker = {"process.roles": "broker", "node.id": "7"}
    assert load_settings(APART | wrong | broker, {}).controller_listener == "CONTROLLER"
    secured = {MAP: "CLIENTS:PLAINTEXT,NODES:PLAINTEXT"}
    with pytest.raises(InvalidSetting, match="Listener CONTROLLER has no security protocol"):
        load_settings(APART | wrong | broker | secured, {})
    with pytest.raises(InvalidSetting, match=r"Listener CONTROLLER: .*mechanism with which nodes log in"):
        load_settings(APART | wrong | broker | {MAP: secured[MAP] + ",CONTROLLER:SASL_PLAINTEXT"}, {})


def test_nodes_may_log_in_to_controllers_with_another_mechanism() -> None:
    protocols = {MAP: "CLIENTS:PLAINTEXT,NODES:SASL_PLAINTEXT,CONTROLLER:SASL_PLAINTEXT"}
    mechanisms = {
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
        "listener.name.nodes.scram-sha-512.sasl.jaas.config": 'm required username="a" password="b";',
    }
    with pytest.raises(
        InvalidSetting, match=r"listener\.name\.controller\.scram-sha-512\.sasl\.jaas\.config"
    ):
        load_settings(APART | protocols | mechanisms, {})
    plain = {
        "sasl.mechanism.controller.protocol": "PLAIN",
        "listener.name.controller.plain.sasl.jaas.config": 'm required username="c" password="d" user_c="d";',
    }
    found = load_settings(APART | protocols | mechanisms | plain, {})
    assert found.node_mechanism("CONTROLLER") == "PLAIN"
    assert found.node_mechanism("NODES") == "SCRAM-SHA-512"
