"""A node with TLS and access rules, and the settings with which each client library logs in to it."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.brokers import BrokerProcess, environment
from tests.certificates import Authority

#: Of alice, and of the super user admin.
PASSWORD, ADMIN_PASSWORD = "of=alice,", "of-admin"
SCRAM_MODULE: Final = "org.apache.kafka.common.security.scram.ScramLoginModule"


class SecureNode(BrokerProcess):
    """A node whose clients log in with SCRAM over TLS, or with a certificate."""

    def __init__(
        self, folder: Path, *, with_certificates: bool = False, settings: Mapping[str, str] | None = None
    ) -> None:
        self.authority = Authority(folder / "certificates")
        self.with_certificates = with_certificates
        self.certificates = {name: self.authority.issue(name) for name in ("admin", "alice")}
        security = {
            "listener.security.protocol.map": f"PLAINTEXT:{'SSL' if with_certificates else 'SASL_SSL'}",
            "ssl.keystore.location": str(self.authority.issue("node")),
            "ssl.truststore.location": str(self.authority.certificate),
            "ssl.client.auth": "required" if with_certificates else "none",
            "ssl.principal.mapping.rules": "RULE:^CN=(.*?),.*$/$1/",
            "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
            "authorizer.class.name": "StandardAuthorizer",
            "super.users": "User:admin",
            **(settings or {}),
        }
        super().__init__(folder / "data", security)

    def librdkafka(self, user: str = "alice", **others: Any) -> dict[str, Any]:
        common = {
            "bootstrap.servers": self.bootstrap_servers,
            "ssl.ca.location": str(self.authority.certificate),
            **others,
        }
        if self.with_certificates:
            own = str(self.certificates[user])
            files = {"ssl.certificate.location": own, "ssl.key.location": own}
            return {**common, "security.protocol": "SSL", **files}
        return {
            **common,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": ADMIN_PASSWORD if user == "admin" else PASSWORD,
        }

    def java(self, user: str = "alice") -> dict[str, str]:
        """The settings of `client.properties`, with SCRAM."""
        password = ADMIN_PASSWORD if user == "admin" else PASSWORD
        return {
            "security.protocol": "SASL_SSL",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authority.certificate),
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.jaas.config": f'{SCRAM_MODULE} required username="{user}" password="{password}";',
        }

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        if self.with_certificates:
            context.load_cert_chain(self.certificates["alice"])
        return context

    def in_python(self) -> dict[str, Any]:
        common = {"bootstrap_servers": self.bootstrap_servers, "ssl_context": self.context()}
        if self.with_certificates:
            return {**common, "security_protocol": "SSL"}
        return {
            **common,
            "security_protocol": "SASL_SSL",
            "sasl_mechanism": "SCRAM-SHA-256",
            "sasl_plain_username": "alice",
            "sasl_plain_password": PASSWORD,
        }

    def _command(self) -> list[str]:
        return super()._command() + ([] if self.with_certificates else ["--bootstrap-user", "admin"])

    def _environment(self) -> dict[str, str]:
        return {**environment(), "PENSTOCK_BOOTSTRAP_PASSWORD": ADMIN_PASSWORD}
