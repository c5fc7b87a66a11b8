"""How to reach a cluster: addresses, trust, credentials and patience, as values that can be sent to other machines.

The names are those that Java clients and librdkafka give the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

Address = tuple[str, int]

#: Fields that are one number each, and what they are called; the first name is the one we write.
NUMBERS: Final = {
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
    """Files, or PEM text. Without an authority the system's own are trusted."""

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


#: Which setting holds which field of TlsSettings.
_TLS_NAMES: Final = {
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
    #: How long an operation looks for someone who can do it.
    retry_deadline_ms: int = 60_000
    #: Of one partition, in one answer; a single batch may be larger.
    fetch_bytes_max: int = 16 * 1024 * 1024
    answer_bytes_max: int = 100 * 1024 * 1024
    metadata_age_ms_max: int = 300_000
    #: How long a topic that brokers do not know may be one that they have not heard of yet.
    unknown_topic_ms_max: int = 5_000
    #: Names that `parse` was given and does not know.
    unknown: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, mapping: Mapping[str, str]) -> ConnectionSettings:
        """Raises ClientError, which names the setting."""
        from penstock.client.settings_parsing import parse

        return parse(mapping)

    @property
    def security_protocol(self) -> str:
        names = ("PLAINTEXT", "SSL") if self.sasl is None else ("SASL_PLAINTEXT", "SASL_SSL")
        return names[self.security is not None]

    def to_mapping(self) -> dict[str, str]:
        """What `parse` makes the same settings of. It holds passwords."""
        mapping = {
            "bootstrap.servers": ",".join(_address_text(address) for address in self.bootstrap),
            "security.protocol": self.security_protocol,
            "client.id": self.client_id,
        }
        mapping |= {names[0]: str(getattr(self, name)) for name, names in NUMBERS.items()}
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
    mapping = {setting: values[name] for name, setting in _TLS_NAMES.items() if values[name] is not None}
    return mapping | {
        "ssl.endpoint.identification.algorithm": "https" if tls.checks_hostname else "none",
        "enable.ssl.certificate.verification": "true" if tls.verifies else "false",
    }


def _address_text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
