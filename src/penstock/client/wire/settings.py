"""Connection settings: addresses, TLS, credentials and timeouts, as values that can be sent to other machines.

The names are those that Java clients and librdkafka use, and `ConnectionSettings.parse` reads both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.client.wire.sasl import MECHANISMS, PLAIN, SCRAM_HASHES

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
    mechanism: str
    username: str
    password: str = field(repr=False)


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
            mapping |= {
                "sasl.mechanism": self.sasl.mechanism,
                "sasl.username": self.sasl.username,
                "sasl.password": self.sasl.password,
            }
        return mapping


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


_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_NUMBER_MAX: Final = 2**31 - 1
_DEFAULT_PORT: Final = 9092
_BOOLEANS: Final = {"true": True, "false": False}
_JAVA_STORES: Final = ("ssl.truststore", "ssl.keystore")
#: `module.Class required name="value" other='value' third=value;`
_JAAS: Final = re.compile(
    r"\s*(?P<module>[\w.$]+)\s+(required|requisite|sufficient|optional)\b(?P<options>.*)", re.S
)
_JAAS_OPTION: Final = re.compile(
    r"""([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s;"']+))"""
)
_JAAS_MECHANISMS: Final = {"PlainLoginModule": (PLAIN,), "ScramLoginModule": tuple(SCRAM_HASHES)}


def parse_settings(mapping: Mapping[str, str]) -> ConnectionSettings:
    """Raises ClientError, which names the setting."""
    given = _UnreadSettings(mapping)
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
    algorithm = given.take("ssl.endpoint.identification.algorithm", default="https").lower()
    if algorithm not in ("https", "none"):
        raise _invalid_setting("ssl.endpoint.identification.algorithm", algorithm, "must be https or none")
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


def _reject_java_store(given: _UnreadSettings, store: str) -> None:
    """Raises ClientError for a Java keystore, which Python cannot read. JKS is the default type."""
    kind = given.find(f"{store}.type")
    if (kind or ("JKS" if given.has(f"{store}.location") else "PEM")).strip().upper() != "PEM":
        raise ClientError(
            f"{store}.type={kind or 'JKS'} is not supported: use certificates in PEM format "
            f"(convert them with `keytool -exportcert -rfc` or `openssl pkcs12`, and set {store}.type=PEM)"
        )
    if store == "ssl.truststore":
        given.find("ssl.truststore.password")  # certificates in PEM have no password


# Credentials


def _sasl(given: _UnreadSettings, *, wanted: bool) -> SaslSettings | None:
    mechanism = given.take("sasl.mechanism", "sasl.mechanisms", default="").upper()
    jaas = given.find("sasl.jaas.config")
    username, password = given.find("sasl.username"), given.find("sasl.password")
    if not wanted:
        return None
    if mechanism not in MECHANISMS:
        raise _invalid_setting(
            "sasl.mechanism", mechanism or "(none)", f"must be one of {', '.join(MECHANISMS)}"
        )
    if jaas is not None:
        options = _jaas_options(jaas, mechanism)
        username, password = username or options.get("username"), password or options.get("password")
    if username is None or password is None:
        raise ClientError(f"{mechanism} needs sasl.username and sasl.password, or both in sasl.jaas.config")
    return SaslSettings(mechanism=mechanism, username=username, password=password)


def _jaas_options(text: str, mechanism: str) -> dict[str, str]:
    """Errors never show the text, because it contains a password."""
    match = _JAAS.fullmatch(text)
    if match is None:
        raise ClientError(
            'sasl.jaas.config must look like: <LoginModule> required username="..." password="...";'
        )
    module = match["module"].rpartition(".")[2]
    if mechanism not in _JAAS_MECHANISMS.get(module, ()):
        raise ClientError(f"sasl.jaas.config: {module} does not work with sasl.mechanism={mechanism}")
    return {name: _jaas_value(*values) for name, *values in _JAAS_OPTION.findall(match["options"])}


def _jaas_value(double: str, single: str, bare: str) -> str:
    return bare or re.sub(r"\\(.)", r"\1", double or single)


def _invalid_setting(name: str, value: Any, wanted: str) -> ClientError:
    return ClientError(f"{name}={value}: {wanted}")
