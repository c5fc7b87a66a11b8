"""How the components of the demo reach its broker, and what `--secure` puts around it.

A secure broker has TLS, SCRAM and access rules; the demo is its super user. Everything secret is in files that only
their owner can read. Components get the name of the file with their settings: no argument of a process is a secret.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.broker.config.listeners import parse_address
from penstock.broker.config.node_settings import variable_name
from penstock.client.wire.properties import CONFIG_FILE_SETTING
from penstock.client.wire.settings import ConnectionSettings
from penstock.testing.credentials import ADMIN, CLIENT_LISTENER, Credentials

_BOOTSTRAP: Final = "bootstrap.servers"
_NODE: Final = "node-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAccess:
    """`properties` is the file with the client settings of a secure broker."""

    bootstrap: str
    properties: str | None = None

    @property
    def security(self) -> dict[str, str]:
        """The client settings without the address, for clients of `penstock.client` and pipelines."""
        return {} if self.properties is None else {CONFIG_FILE_SETTING: self.properties}

    def settings(self, **others: str) -> ConnectionSettings:
        """The settings of a connection; `_` in the name of another setting stands for `.`."""
        named = {name.replace("_", "."): value for name, value in others.items()}
        return ConnectionSettings.parse({**self.security, _BOOTSTRAP: self.bootstrap, **named})

    def librdkafka(self, name: str) -> dict[str, object]:
        """Settings for librdkafka, with a logger that keeps it from writing to the terminal."""
        quiet = logging.getLogger("penstock.demo.librdkafka")
        quiet.propagate = False
        if not quiet.handlers:
            quiet.addHandler(logging.NullHandler())
        return {
            **self.settings().librdkafka_security(),
            _BOOTSTRAP: self.bootstrap,
            "client.id": f"demo-{name}",
            "logger": quiet,
        }


class BrokerSecurity:
    """The certificates, the user and the settings of a secure broker, in a folder of the demo's data."""

    def __init__(self, folder: Path, listen: str) -> None:
        """Raises NoCryptography, OSError, and ValueError for files or an address that cannot be used."""
        self._credentials = Credentials(folder)
        self._hosts = sorted({"localhost", "127.0.0.1", parse_address(listen)[0]})

    def listener(self, address: str) -> str:
        return f"{CLIENT_LISTENER}://{address}"

    def settings(self) -> dict[str, str]:
        return self._credentials.node_settings(_NODE, self._hosts)

    def flags(self) -> list[str]:
        """The first start of the broker makes the user."""
        return ["--bootstrap-user", ADMIN, "--bootstrap-password-file", str(self._credentials.password_file)]

    def environment(self) -> dict[str, str]:
        """The secrets among the settings of the broker."""
        secrets = self._credentials.node_secrets()
        return {variable_name(name): value for name, value in secrets.items()}

    def access(self, address: str) -> BrokerAccess:
        """Write `client.properties`, which Kafka's tools and Penstock's commands read as well."""
        properties = self._credentials.write_properties(address)
        return BrokerAccess(bootstrap=address, properties=str(properties.absolute()))
