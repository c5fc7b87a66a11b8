"""Connection settings: addresses, TLS, credentials and timeouts, as values that can be sent to other machines.

The names are those that Java clients and librdkafka use, and `ConnectionSettings.parse` reads both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.client.wire.properties import with_config_file
from penstock.protocol.access_tokens import (
    TOKEN_SETTINGS,
    URL_SETTING,
    TokenEndpoint,
    token_endpoint,
    token_source,
)
from penstock.protocol.jaas import parse_jaas
from penstock.protocol.sasl_client import MECHANISMS, OAUTHBEARER, PLAIN
from penstock.protocol.scram import SCRAM_HASHES

Address = tuple[str, int]

#: Numeric fields and the names of their settings; `to_mapping` writes the first name.
NUMERIC_SETTINGS: Final = {
    "request_timeout_ms": ("request.timeout.ms", "socket.timeout.ms"),
    "connect_timeout_ms": ("socket.connection.setup.timeout.ms",),
    "retry_deadline_ms": ("default.api.timeout.ms",),
    "fetch_bytes_max": ("max.partition.fetch.bytes", "fetch.message.max.bytes"),
    "answer_bytes_max": ("receive.message.max.bytes",),
    "metadata_age_ms_max": ("metadata.max.age.ms",),
    "unknown_topic_ms_max": ("topic.metadata.propagation.max.ms",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Files or PEM text. Without a certificate authority, the system's own are trusted."""

    ca_location: str | None = None
    ca_pem: str | None = None
    certificate_location: str | None = None
    certificate_pem: str | None = None
    key_location: str | None = None
    key_pem: str | None = field(default=None, repr=False)
    key_password: str | None = field(default=None, repr=False)
    checks_hostname: bool = True
    verifies: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SaslSettings:
    """With OAUTHBEARER, `username` is the client id, and tokens come from `endpoint`."""

    mechanism: str
    username: str = ""
    password: str = field(default="", repr=False)
    #: User name and password are the id and the HMAC of a delegation token.
    is_token: bool = False
    endpoint: TokenEndpoint | None = None

    def to_mapping(self) -> dict[str, str]:
        if self.endpoint is not None:
            return {"sasl.mechanism": self.mechanism, **self.endpoint.to_mapping()}
        mapping = {
            "sasl.mechanism": self.mechanism,
            "sasl.username": self.username,
            "sasl.password": self.password,
        }
        return mapping | {"penstock.sasl.tokenauth": "true"} if self.is_token else mapping


#: The setting of each field of TlsSettings.
_TLS_SETTINGS: Final = {
    "ca_location": "ssl.ca.location",
    "ca_pem": "ssl.ca.pem",
    "certificate_location": "ssl.certificate.location",
    "certificate_pem": "ssl.certificate.pem",
    "key_location": "ssl.key.location",
    "key_pem": "ssl.key.pem",
    "key_password": "ssl.key.password",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    bootstrap: tuple[Address, ...]
    security: TlsSettings | None = None
    sasl: SaslSettings | None = None
    client_id: str = "penstock"
    request_timeout_ms: int = 30_000
    connect_timeout_ms: int = 5_000
    #: How long an operation retries.
    retry_deadline_ms: int = 60_000
    #: For one partition in one response; a single batch may be larger.
    fetch_bytes_max: int = 16 * 1024 * 1024
    answer_bytes_max: int = 100 * 1024 * 1024
    metadata_age_ms_max: int = 300_000
    #: How long a client retries an unknown topic, because brokers learn of new topics at different times.
    unknown_topic_ms_max: int = 5_000
    #: Names of settings that `parse` does not know.
    unknown: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, mapping: Mapping[str, str]) -> ConnectionSettings:
        """Raises ClientError, which names the setting."""
        return parse_settings(mapping)

    @property
    def security_protocol(self) -> str:
        names = ("PLAINTEXT", "SSL") if self.sasl is None else ("SASL_PLAINTEXT", "SASL_SSL")
        return names[self.security is not None]

    def to_mapping(self) -> dict[str, str]:
        """Returns a mapping that `parse` reads. It contains passwords."""
        mapping = {
            "bootstrap.servers": ",".join(_address_text(address) for address in self.bootstrap),
            "security.protocol": self.security_protocol,
            "client.id": self.client_id,
        }
        mapping |= {names[0]: str(getattr(self, name)) for name, names in NUMERIC_SETTINGS.items()}
        if self.security is not None:
            mapping |= _tls_mapping(self.security)
        if self.sasl is not None:
            mapping |= self.sasl.to_mapping()
        return mapping

    def librdkafka_security(self) -> dict[str, Any]:
        """Return the settings about TLS and credentials in the names of librdkafka. Raises ClientError.

        All are texts, except the callback that reads a token from a file, which librdkafka cannot do.
        """
        if self.sasl is not None and self.sasl.is_token:
            raise ClientError(
                "librdkafka cannot log in with a delegation token: give this client a user and a password"
            )
        security: dict[str, Any] = {
            name: value for name, value in self.to_mapping().items() if name.startswith(SECURITY_PREFIXES)
        }
        if self.sasl is not None and (endpoint := self.sasl.endpoint) is not None and endpoint.is_file:
            security["oauth_cb"] = token_source(endpoint).librdkafka_token
        return security


def is_secret(name: str) -> bool:
    """Whether the value of a setting must not be shown."""
    return _SECRET.search(name.lower()) is not None


def librdkafka_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for librdkafka: those that only Java clients have, under the names of librdkafka.

    Settings that librdkafka knows stay as they are, also those that this client does not know. Raises ClientError.
    """
    security = {name: value for name, value in settings.items() if name.startswith(SECURITY_PREFIXES)}
    has_java_names = any(
        name.startswith(_JAVA_NAMES) or (name, value) in _JAVA_VALUES for name, value in security.items()
    )
    if not has_java_names and not _is_token_url_of_java(security):
        return dict(settings)
    parsed = parse_settings({**security, "bootstrap.servers": "unused:9092"})
    rest = {name: value for name, value in settings.items() if name not in security or name in parsed.unknown}
    return {**rest, **parsed.librdkafka_security()}


def _is_token_url_of_java(security: Mapping[str, Any]) -> bool:
    """Whether librdkafka would not use the URL: it takes no files, and others only with a setting that Java lacks."""
    url, method = security.get(URL_SETTING), security.get("sasl.oauthbearer.method")
    return url is not None and (method != "oidc" or str(url).startswith("file:"))


def _tls_mapping(tls: TlsSettings) -> dict[str, str]:
    values: dict[str, Any] = {each.name: getattr(tls, each.name) for each in fields(tls)}
    mapping = {setting: values[name] for name, setting in _TLS_SETTINGS.items() if values[name] is not None}
    return mapping | {
        "ssl.endpoint.identification.algorithm": "https" if tls.checks_hostname else "none",
        "enable.ssl.certificate.verification": "true" if tls.verifies else "false",
    }


def _address_text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


#: All settings about TLS and credentials begin with one of these.
SECURITY_PREFIXES: Final = ("security.", "ssl.", "sasl.", "enable.ssl.", "https.", "penstock.sasl.")
#: Settings that librdkafka does not have.
_JAVA_NAMES: Final = (
    "sasl.jaas.config",
    "ssl.truststore.",
    "ssl.keystore.type",
    "ssl.keystore.key",
    "ssl.keystore.certificate.chain",
    "sasl.oauthbearer.client.credentials.",
    "penstock.sasl.",
)
#: What Java clients need in order to get tokens; here the URL says enough.
_TOKEN_CLASSES: Final = ("sasl.login.callback.handler.class", "sasl.oauthbearer.jwt.retriever.class")
#: Settings with a secret, or with a text that contains one.
_SECRET: Final = re.compile(r"password|secret|jaas|credential|token(?!\.endpoint)|(?:^|\.)key(?:\.pem)?$")
_JAVA_VALUES: Final = (("ssl.endpoint.identification.algorithm", ""),)
_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_NUMBER_MAX: Final = 2**31 - 1
_DEFAULT_PORT: Final = 9092
_BOOLEANS: Final = {"true": True, "false": False}
_JAVA_STORES: Final = ("ssl.truststore", "ssl.keystore")
_JAAS_MECHANISMS: Final = {
    "PlainLoginModule": (PLAIN,),
    "ScramLoginModule": tuple(SCRAM_HASHES),
    "OAuthBearerLoginModule": (OAUTHBEARER,),
}


def parse_settings(mapping: Mapping[str, str]) -> ConnectionSettings:
    """Raises ClientError, which names the setting."""
    given = _UnreadSettings(with_config_file(mapping))
    protocol = given.take("security.protocol", default="PLAINTEXT").upper()
    if protocol not in _PROTOCOLS:
        raise _invalid_setting("security.protocol", protocol, f"must be one of {', '.join(_PROTOCOLS)}")
    numbers = {
        name: value
        for name, names in NUMERIC_SETTINGS.items()
        if (value := _number(given, names)) is not None
    }
    tls, sasl = _tls(given), _sasl(given, wanted=protocol.startswith("SASL_"))
    return ConnectionSettings(
        bootstrap=_addresses(given),
        security=tls if protocol.endswith("SSL") else None,
        sasl=sasl,
        client_id=given.take("client.id", default="penstock"),
        unknown=given.unread(),
        **numbers,
    )


class _UnreadSettings:
    """The user's settings that were not read yet."""

    def __init__(self, mapping: Mapping[str, str]) -> None:
        self._left = {str(name).strip(): str(value) for name, value in mapping.items() if value is not None}

    def find(self, *names: str) -> str | None:
        """Returns the first of these settings that is set; marks all of them as read."""
        values = [self._left.pop(name, None) for name in names]
        return next((value for value in values if value is not None and value != ""), None)

    def has(self, name: str) -> bool:
        return bool(self._left.get(name))

    def is_empty(self, name: str) -> bool:
        return self._left.get(name) == ""

    def take(self, *names: str, default: str) -> str:
        value = self.find(*names)
        return default if value is None else value.strip()

    def unread(self) -> tuple[str, ...]:
        return tuple(sorted(self._left))


def _addresses(given: _UnreadSettings) -> tuple[Address, ...]:
    text = given.take("bootstrap.servers", "metadata.broker.list", default="")
    addresses = tuple(_address(part.strip()) for part in text.split(",") if part.strip())
    if not addresses:
        raise ClientError(
            "bootstrap.servers is missing: set it to host:port addresses of brokers, separated by commas"
        )
    return addresses


def _address(text: str) -> Address:
    bare = text.rpartition("://")[2]
    match = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^\s:\[\]]+))(?::(?P<port>\d{1,5}))?", bare)
    port = int(match["port"] or _DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65_536:
        raise _invalid_setting("bootstrap.servers", text, "must be host:port")
    return match["six"] or match["host"], port


def _number(given: _UnreadSettings, names: tuple[str, ...]) -> int | None:
    text = given.find(*names)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,10}", text.strip()) or not 0 < int(text) <= _NUMBER_MAX:
        raise _invalid_setting(names[0], text, f"must be a whole number from 1 to {_NUMBER_MAX}")
    return int(text)


def _boolean(given: _UnreadSettings, name: str, *, default: bool) -> bool:
    text = given.take(name, default="true" if default else "false").lower()
    if text not in _BOOLEANS:
        raise _invalid_setting(name, text, "must be true or false")
    return _BOOLEANS[text]


# TLS


def _tls(given: _UnreadSettings) -> TlsSettings:
    for store in _JAVA_STORES:
        _reject_java_store(given, store)
    keystore = given.find("ssl.keystore.location")
    algorithm = _identification_algorithm(given)
    return TlsSettings(
        ca_location=given.find("ssl.ca.location", "ssl.truststore.location"),
        ca_pem=given.find("ssl.ca.pem", "ssl.truststore.certificates"),
        certificate_location=given.find("ssl.certificate.location") or keystore,
        certificate_pem=given.find("ssl.certificate.pem", "ssl.keystore.certificate.chain"),
        key_location=given.find("ssl.key.location") or keystore,
        key_pem=given.find("ssl.key.pem", "ssl.keystore.key"),
        key_password=given.find("ssl.key.password", "ssl.keystore.password"),
        checks_hostname=algorithm == "https",
        verifies=_boolean(given, "enable.ssl.certificate.verification", default=True),
    )


def _identification_algorithm(given: _UnreadSettings) -> str:
    """Java clients turn the check off with an empty value, librdkafka with `none`."""
    name = "ssl.endpoint.identification.algorithm"
    is_empty = given.is_empty(name)
    algorithm = given.take(name, default="https").lower()
    if is_empty:
        return "none"
    if algorithm not in ("https", "none"):
        raise _invalid_setting(name, algorithm, "must be https or none")
    return algorithm


def _reject_java_store(given: _UnreadSettings, store: str) -> None:
    """Raises ClientError for a Java keystore, which Python cannot read. JKS is the default type."""
    kind = (given.find(f"{store}.type") or ("JKS" if given.has(f"{store}.location") else "PEM")).strip()
    if kind.upper() != "PEM":
        location = given.find(f"{store}.location") or "FILE"
        raise ClientError(
            f"{store}.type={kind} is not supported, only PEM: convert it with "
            f"`{_conversion(store, location, kind.upper())}`, then set {store}.location to the new file and "
            f"{store}.type=PEM"
        )
    if store == "ssl.truststore":
        given.find("ssl.truststore.password")  # certificates in PEM have no password


def _conversion(store: str, location: str, kind: str) -> str:
    """Return the command that writes the content of a Java store as PEM."""
    if store == "ssl.truststore":
        return f"keytool -list -rfc -keystore {location} > truststore.pem"
    to_pem = "openssl pkcs12 -nodes -in {} -out keystore.pem"
    if kind == "PKCS12":
        return to_pem.format(location)
    p12 = "keystore.p12"
    return (
        f"keytool -importkeystore -srckeystore {location} -destkeystore {p12} -deststoretype PKCS12 && "
        + to_pem.format(p12)
    )


# Credentials


def _sasl(given: _UnreadSettings, *, wanted: bool) -> SaslSettings | None:
    mechanism = given.take("sasl.mechanism", "sasl.mechanisms", default="").upper()
    jaas = given.find("sasl.jaas.config")
    username, password = given.find("sasl.username"), given.find("sasl.password")
    is_token = _boolean(given, "penstock.sasl.tokenauth", default=False)
    tokens = {name: value for name in TOKEN_SETTINGS if (value := given.find(name)) is not None}
    given.find("sasl.oauthbearer.method", *_TOKEN_CLASSES)
    if not wanted:
        return None
    if mechanism not in MECHANISMS:
        raise _invalid_setting(
            "sasl.mechanism", mechanism or "(none)", f"must be one of {', '.join(MECHANISMS)}"
        )
    options = {} if jaas is None else _jaas_options(jaas, mechanism)
    if mechanism == OAUTHBEARER:
        return _token_settings(tokens, options)
    if jaas is not None:
        username, password = username or options.get("username"), password or options.get("password")
        is_token = is_token or options.get("tokenauth", "").lower() == "true"
    if username is None or password is None:
        raise ClientError(f"{mechanism} needs sasl.username and sasl.password, or both in sasl.jaas.config")
    if is_token and mechanism == PLAIN:
        raise ClientError("delegation tokens need sasl.mechanism=SCRAM-SHA-256 or SCRAM-SHA-512")
    return SaslSettings(mechanism=mechanism, username=username, password=password, is_token=is_token)


def _token_settings(tokens: Mapping[str, str], options: Mapping[str, str]) -> SaslSettings:
    try:
        endpoint = token_endpoint(tokens.get, options)
    except ValueError as error:
        raise ClientError(str(error)) from None
    return SaslSettings(mechanism=OAUTHBEARER, username=endpoint.client_id, endpoint=endpoint)


def _jaas_options(text: str, mechanism: str) -> Mapping[str, str]:
    """Errors never show the text, because it contains a password."""
    try:
        jaas = parse_jaas(text)
    except ValueError as error:
        raise ClientError(f"sasl.jaas.config {error}") from None
    if mechanism not in _JAAS_MECHANISMS.get(jaas.module, ()):
        raise ClientError(f"sasl.jaas.config: {jaas.module} does not work with sasl.mechanism={mechanism}")
    return jaas.options


def _invalid_setting(name: str, value: Any, wanted: str) -> ClientError:
    return ClientError(f"{name}={value}: {wanted}")
