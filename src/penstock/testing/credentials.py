"""What secures a cluster for tests and for trying out: an authority, certificates of its nodes, and a first user.

All of it is in one folder that only its owner can read, and is made once. A certificate is made again when it is about
to expire or lacks a host. An operator of a real cluster has an authority and a store of secrets, and uses those.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.protocol.durable_files import replace_private

if TYPE_CHECKING:
    from penstock.testing.certificates import Authority

#: The user who may do everything, and the principal of every node of the cluster.
ADMIN: Final = "admin"
NODE_PRINCIPAL: Final = "penstock-node"
MECHANISM: Final = "SCRAM-SHA-512"
#: The listener of clients and its protocol.
CLIENT_LISTENER: Final = "SASL_SSL"

_PASSWORD_BYTES: Final = 24
_SCRAM_MODULE: Final = "org.apache.kafka.common.security.scram.ScramLoginModule"


class NoCryptography(ImportError):
    """Certificates cannot be made."""


class Credentials:
    """`ca.pem`, `ca.key`, `NODE.pem`, `client.properties`, and the files of the secrets, in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Raises NoCryptography, OSError, and ValueError for files that cannot be used."""
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._authority = _open_authority(folder)
        self.password = self._secret("admin.password")

    @property
    def authority_file(self) -> Path:
        """The certificate that clients trust."""
        return self._authority.certificate_file

    @property
    def password_file(self) -> Path:
        """The password of `admin`."""
        return self.folder / "admin.password"

    @property
    def properties_file(self) -> Path:
        return self.folder / "client.properties"

    def node_settings(
        self, node: str, hosts: Sequence[str], *, inter_broker_listener: str | None = None
    ) -> dict[str, str]:
        """Return the settings of a node whose clients connect to a listener named SASL_SSL, without secrets.

        Nodes show each other their certificates at `inter_broker_listener`.
        """
        settings = {
            "ssl.keystore.location": str(self._authority.issue(node, hosts)),
            "ssl.truststore.location": str(self.authority_file),
            "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
            "authorizer.class.name": "StandardAuthorizer",
            "super.users": f"User:{ADMIN};User:{NODE_PRINCIPAL}",
        }
        if inter_broker_listener is None:
            return settings
        prefix = f"listener.name.{inter_broker_listener.lower()}."
        return {
            **settings,
            "listener.security.protocol.map": f"{CLIENT_LISTENER}:SASL_SSL,{inter_broker_listener}:SSL",
            f"{prefix}ssl.client.auth": "required",
            f"{prefix}ssl.principal.mapping.rules": (f"RULE:^CN=[^,]*,O=Penstock$/{NODE_PRINCIPAL}/"),
        }

    def node_secrets(self) -> dict[str, str]:
        """Return the secret settings that all nodes share."""
        return {"penstock.sasl.secret": self._secret("sasl.secret")}

    def client_settings(self, user: str = ADMIN, password: str | None = None) -> dict[str, str]:
        """Return the client settings of a user, without addresses; of `admin` by default."""
        return {
            "security.protocol": CLIENT_LISTENER,
            "ssl.ca.location": str(self.authority_file),
            "sasl.mechanism": MECHANISM,
            "sasl.username": user,
            "sasl.password": self.password if password is None else password,
        }

    def write_properties(self, bootstrap: str) -> Path:
        """Write `client.properties` of `admin`, which Kafka's tools and Penstock's commands read; return the file."""
        settings = {
            "bootstrap.servers": bootstrap,
            "security.protocol": CLIENT_LISTENER,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authority_file),
            "sasl.mechanism": MECHANISM,
            "sasl.jaas.config": f'{_SCRAM_MODULE} required username="{ADMIN}" password="{self.password}";',
        }
        replace_private(self.properties_file, _properties_text(settings).encode())
        return self.properties_file

    def _secret(self, name: str) -> str:
        path = self.folder / name
        if not path.exists():
            replace_private(path, secrets.token_urlsafe(_PASSWORD_BYTES).encode())
        return path.read_text().strip()


def _properties_text(settings: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n".replace("\\", "\\\\") for name, value in settings.items())


def _open_authority(folder: Path) -> Authority:
    try:
        from penstock.testing.certificates import Authority  # cryptography is an optional dependency
    except ImportError:
        raise NoCryptography(
            "certificates are made with the package cryptography: pip install 'penstock[security]'"
        ) from None
    return Authority(folder)
