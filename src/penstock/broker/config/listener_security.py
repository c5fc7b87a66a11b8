"""The security protocol of each listener, the settings that a listener may override, and what is missing in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.broker.config.listeners import NODES_LISTENER, SecurityProtocol, parse_protocol_map
from penstock.broker.config.security_definitions import (
    CLIENT_AUTH_NONE,
    LISTENER_LIMITS,
    LISTENER_SETTINGS,
    MECHANISM_SETTINGS,
)
from penstock.protocol.config_def import InvalidSetting, SettingValue
from penstock.protocol.jaas import parse_jaas

if TYPE_CHECKING:
    from penstock.protocol.access_tokens import TokenEndpoint

PREFIX = "listener.name."
_OAUTHBEARER: Final = "OAUTHBEARER"


class OverrideKey(NamedTuple):
    """A setting of one listener and, if `mechanism` is given, of one SASL mechanism."""

    listener: str
    mechanism: str | None
    setting: str

    @property
    def name(self) -> str:
        """The name of the setting, with the listener and the mechanism in small letters as Kafka writes them."""
        mechanism = f"{self.mechanism.lower()}." if self.mechanism else ""
        return f"{PREFIX}{self.listener.lower()}.{mechanism}{self.setting}"


def override_keys(listeners: Sequence[str]) -> Iterator[OverrideKey]:
    for listener in listeners:
        for setting in (*LISTENER_SETTINGS, *LISTENER_LIMITS):
            yield OverrideKey(listener, None, setting)
            for mechanism in MECHANISM_SETTINGS.get(setting, ()):
                yield OverrideKey(listener, mechanism.upper(), setting)


def listener_protocols(
    values: Mapping[str, SettingValue], listeners: Sequence[str]
) -> dict[str, SecurityProtocol]:
    """Raises InvalidSetting if a listener has no protocol although others are secured."""
    mapped = parse_protocol_map(str(values["listener.security.protocol.map"]))
    between_nodes = values["security.inter.broker.protocol"]
    protocols: dict[str, SecurityProtocol] = {}
    for name in listeners:
        if name in mapped:
            protocols[name] = mapped[name]
        elif name in SecurityProtocol.__members__:
            protocols[name] = SecurityProtocol[name]
        elif name == NODES_LISTENER and between_nodes is not None:
            protocols[name] = SecurityProtocol[str(between_nodes)]
    for name in listeners:
        if name not in protocols and (mapped or any(protocols.values())):
            raise InvalidSetting(
                f"Listener {name} has no security protocol: add {name}:SSL (or PLAINTEXT, SASL_PLAINTEXT, SASL_SSL) to "
                "listener.security.protocol.map"
            )
        protocols.setdefault(name, SecurityProtocol.PLAINTEXT)
    return protocols


class ListenerValue(Protocol):
    def __call__(self, name: str, mechanism: str | None = None, /) -> SettingValue: ...


def listener_flaw(
    listener: str,
    protocol: SecurityProtocol,
    value: ListenerValue,
    login: str | None,
    *,
    is_for_nodes: bool,
    is_served: bool = True,
) -> str | None:
    """Return what is missing in the settings of a listener.

    `login` is the SASL mechanism with which nodes log in there, `is_for_nodes` whether this node connects to such
    listeners, and `is_served` whether it has one itself.
    """
    if protocol.uses_tls and (flaw := _tls_flaw(value, is_for_nodes=is_for_nodes)) is not None:
        return flaw
    if not protocol.uses_sasl:
        return None
    if is_served and (flaw := _mechanisms_flaw(value)) is not None:
        return flaw
    if not is_for_nodes:
        return None
    if login is None:
        return "sasl.mechanism.inter.broker.protocol must name the mechanism with which nodes log in to each other"
    if login == _OAUTHBEARER and not value("penstock.node.principals") and not value("authorizer.class.name"):
        return (
            "nodes log in to each other with OAUTHBEARER: penstock.node.principals must name their principals, as in "
            "User:broker, because a token says only to others who a node is"
        )
    return _login_flaw(listener, login, value)


def _mechanisms_flaw(value: ListenerValue) -> str | None:
    mechanisms = value("sasl.enabled.mechanisms")
    if not isinstance(mechanisms, tuple) or not mechanisms:
        return "sasl.enabled.mechanisms must name the mechanisms of SASL that it offers, as in SCRAM-SHA-512"
    if _OAUTHBEARER in mechanisms and value("sasl.oauthbearer.jwks.endpoint.url", _OAUTHBEARER) is None:
        return (
            "OAUTHBEARER needs the keys with which tokens are signed: sasl.oauthbearer.jwks.endpoint.url names their "
            "key set, as in https://HOST/PATH or file:///PATH"
        )
    return None


def _login_flaw(listener: str, mechanism: str, value: ListenerValue) -> str | None:
    """Return what is missing in the settings with which this node logs in to others."""
    if mechanism == _OAUTHBEARER:
        try:
            node_token_endpoint(value)
        except ValueError as error:
            return f"nodes log in to each other with OAUTHBEARER: {error}"
        return None
    try:
        options = parse_jaas(str(value("sasl.jaas.config", mechanism) or "")).options
    except ValueError:
        options = {}
    if not options.get("username") or not options.get("password"):
        name = OverrideKey(listener, mechanism, "sasl.jaas.config").name
        return f"{name} must have the user name and the password with which nodes log in to each other"
    return None


def node_token_endpoint(value: ListenerValue) -> TokenEndpoint:
    """Return where this node gets the tokens with which it logs in to others. Raises ValueError."""
    # Imported here, because it takes 10 ms, which a node without OAUTHBEARER saves.
    from penstock.protocol.access_tokens import token_endpoint

    def find(name: str) -> str | None:
        found = value(name, _OAUTHBEARER) if name in LISTENER_SETTINGS else None
        return None if found is None else str(found)

    jaas = find("sasl.jaas.config")
    return token_endpoint(find, parse_jaas(jaas).options if jaas else {})


def key_flaw(value: Callable[[str], SettingValue]) -> str | None:
    """Return what is missing in the settings of the private key and the certificate."""
    key, chain = value("ssl.keystore.key"), value("ssl.keystore.certificate.chain")
    if (key is None) != (chain is None):
        return "ssl.keystore.key and ssl.keystore.certificate.chain must be set together"
    if value("ssl.keystore.location") is None:
        if key is None:
            return (
                "TLS needs a private key and a certificate: ssl.keystore.location names a PEM file with both, "
                "or ssl.keystore.key and ssl.keystore.certificate.chain contain them"
            )
    elif key is not None:
        return "ssl.keystore.location and ssl.keystore.key must not both be set"
    return None


def _tls_flaw(value: Callable[[str], SettingValue], *, is_for_nodes: bool) -> str | None:
    if (flaw := key_flaw(value)) is not None:
        return flaw
    location, certificates = value("ssl.truststore.location"), value("ssl.truststore.certificates")
    if location is not None and certificates is not None:
        return "ssl.truststore.location and ssl.truststore.certificates must not both be set"
    if location is None and certificates is None:
        client_auth = value("ssl.client.auth")
        if client_auth != CLIENT_AUTH_NONE:
            return (
                f"ssl.client.auth={client_auth} needs the authorities that sign certificates of clients: "
                "ssl.truststore.location names a PEM file with them"
            )
        if is_for_nodes:
            return (
                "nodes check each other's certificates: ssl.truststore.location names a PEM file with the authorities "
                "that sign them"
            )
    return None
