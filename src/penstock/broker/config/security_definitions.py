"""The settings of listeners that concern security: protocols, TLS, SASL, and the bounds before authentication.

`LISTENER_SETTINGS` are those that may differ between listeners, as `listener.name.NAME.SETTING`; settings of SASL may
also differ between mechanisms, as `listener.name.NAME.MECHANISM.SETTING`. `LISTENER_LIMITS` are limits of the node that
a listener may have of its own too. Secrets have the type PASSWORD, so they are never shown.
"""

from penstock.broker.config.listeners import parse_protocol_map
from penstock.broker.config.oauthbearer_definitions import OAUTHBEARER_SETTINGS
from penstock.protocol.config_def import Setting, SettingType, SettingValue, static_setting
from penstock.security.principal import DistinguishedNameRules

_INT, _LONG, _STRING, _LIST = SettingType.INT, SettingType.LONG, SettingType.STRING, SettingType.LIST
_PASSWORD = SettingType.PASSWORD
INT_MAX = (1 << 31) - 1

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
TLS_VERSIONS = ("TLSv1.2", "TLSv1.3")
_NODE_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
CLIENT_AUTH_REQUIRED, CLIENT_AUTH_REQUESTED, CLIENT_AUTH_NONE = "required", "requested", "none"


def _protocol_map(value: SettingValue) -> str | None:
    try:
        parse_protocol_map(str(value or ""))
    except ValueError as error:
        return str(error)
    return None


def _mapping_rules(value: SettingValue) -> str | None:
    try:
        DistinguishedNameRules(str(value))
    except ValueError as error:
        return str(error)
    return None


_TLS = (
    static_setting(
        "ssl.keystore.type",
        _STRING,
        "PEM",
        "The form of keys and certificates. Apache Kafka's default is JKS.",
        choices=("PEM",),
    ),
    static_setting(
        "ssl.keystore.location",
        _STRING,
        None,
        "PEM file with the private key and the certificate chain of this node. It is read again when it changes, for "
        "new connections.",
    ),
    static_setting(
        "ssl.keystore.certificate.chain", _PASSWORD, None, "The certificate chain itself, as PEM text."
    ),
    static_setting("ssl.keystore.key", _PASSWORD, None, "The private key itself, as PEM text."),
    static_setting("ssl.key.password", _PASSWORD, None, "Decrypts the private key."),
    static_setting(
        "ssl.truststore.type",
        _STRING,
        "PEM",
        "The form of trusted certificates. Apache Kafka's default is JKS.",
        choices=("PEM",),
    ),
    static_setting(
        "ssl.truststore.location",
        _STRING,
        None,
        "PEM file with the authorities that sign the certificates of clients and other nodes. It is read again when it "
        "changes, for new connections.",
    ),
    static_setting(
        "ssl.truststore.certificates", _PASSWORD, None, "These authorities themselves, as PEM text."
    ),
    static_setting(
        "ssl.client.auth",
        _STRING,
        CLIENT_AUTH_NONE,
        "Whether clients must have a certificate (required), may have one (requested), or are not asked (none).",
        choices=(CLIENT_AUTH_REQUIRED, CLIENT_AUTH_REQUESTED, CLIENT_AUTH_NONE),
    ),
    static_setting(
        "ssl.enabled.protocols",
        _LIST,
        TLS_VERSIONS,
        "The versions of TLS that are spoken.",
        choices=TLS_VERSIONS,
    ),
    static_setting(
        "ssl.cipher.suites",
        _LIST,
        (),
        "Cipher suites of TLS 1.2, by their names in OpenSSL; empty: those that OpenSSL recommends. TLS 1.3 always "
        "uses its own.",
    ),
    static_setting(
        "ssl.endpoint.identification.algorithm",
        _STRING,
        "https",
        "Whether this node checks that the certificate of another node is for the host that it connected to (https), "
        "or not (empty).",
        choices=("https", ""),
    ),
    Setting(
        name="ssl.principal.mapping.rules",
        type=_STRING,
        default="DEFAULT",
        doc="How the subject of a client's certificate becomes its principal: RULE:pattern/replacement/ with an "
        "optional L or U, or DEFAULT for the whole subject; the first that matches applies.",
        check=_mapping_rules,
        read_only=True,
    ),
)

_SASL = (
    static_setting(
        "sasl.enabled.mechanisms",
        _LIST,
        (),
        "The mechanisms that a listener with SASL offers. Apache Kafka's default is GSSAPI, which is not supported.",
    ),
    static_setting(
        "sasl.jaas.config",
        _PASSWORD,
        None,
        "Login module, user name and password. On the inter-broker listener also how this node logs in to others.",
    ),
    static_setting(
        "sasl.server.max.receive.size", _INT, 524_288, "Largest request before a client has authenticated.", 8
    ),
    static_setting(
        "connections.max.reauth.ms",
        _LONG,
        0,
        "How long a client that has authenticated with SASL may use its connection before it must authenticate again; "
        "0 is no limit.",
        0,
    ),
)

#: As they stand in the name of a setting.
MECHANISMS = ("plain", "scram-sha-256", "scram-sha-512", "oauthbearer")
#: Settings of SASL may have values for one mechanism.
MECHANISM_SETTINGS = {
    **dict.fromkeys(
        ("sasl.jaas.config", "connections.max.reauth.ms", "sasl.server.max.receive.size"), MECHANISMS
    ),
    **{setting.name: ("oauthbearer",) for setting in OAUTHBEARER_SETTINGS},
}

_ALL_LISTENERS = (
    Setting(
        name="listener.security.protocol.map",
        type=_STRING,
        default="",
        doc="The protocol of each listener: NAME:PROTOCOL, comma separated, with PLAINTEXT, SSL, SASL_PLAINTEXT or "
        "SASL_SSL. A listener that is named like a protocol has that protocol. If no setting asks for security, all "
        "others are PLAINTEXT; Apache Kafka refuses listeners without a protocol.",
        check=_protocol_map,
        read_only=True,
    ),
    static_setting(
        "security.inter.broker.protocol",
        _STRING,
        None,
        "The protocol of the listener NODES; without such a listener, nodes use the listener that is named like it. "
        "Apache Kafka chooses a listener by its protocol.",
        choices=PROTOCOLS,
    ),
    static_setting(
        "sasl.mechanism.inter.broker.protocol",
        _STRING,
        None,
        "The mechanism with which this node logs in to other nodes. Apache Kafka's default is GSSAPI, which is not "
        "supported.",
        choices=_NODE_MECHANISMS,
    ),
    static_setting(
        "sasl.mechanism.controller.protocol",
        _STRING,
        None,
        "The mechanism with which this node logs in to controllers, if controller.listener.names is set; by default "
        "that of sasl.mechanism.inter.broker.protocol. Apache Kafka's default is GSSAPI.",
        choices=_NODE_MECHANISMS,
    ),
)

_BEFORE_AUTHENTICATION = (
    static_setting(
        "connection.failed.authentication.delay.ms",
        _INT,
        100,
        "How long the connection of a client that failed to authenticate stays open, which slows down guessing.",
        0,
    ),
    static_setting(
        "penstock.authentication.timeout.ms",
        _INT,
        10_000,
        "A connection that has not finished its TLS handshake and SASL exchange within this time is closed.",
        1,
    ),
    static_setting(
        "penstock.unauthenticated.connections.max",
        _INT,
        1000,
        "Connections of one listener that may be in their TLS handshake or SASL exchange. Above it, one is closed: the "
        "first whose login has failed, or else the one that has been silent for longest, of the address with the most.",
        1,
    ),
)

LISTENER_SETTINGS = {
    setting.name: setting for setting in (*_TLS, *_SASL, *_BEFORE_AUTHENTICATION, *OAUTHBEARER_SETTINGS)
}
#: Limits of the whole node that a listener may have of its own too. Both apply.
LISTENER_LIMITS = ("max.connections", "max.connection.creation.rate")
SECURITY_SETTINGS = (*_ALL_LISTENERS, *LISTENER_SETTINGS.values())
