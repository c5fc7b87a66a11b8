"""`penstock cluster start --secure`: certificates, the first user and a context of a local cluster, for trying out."""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple, Self

from penstock.broker.config.listeners import NODES_LISTENER, parse_address
from penstock.cli.cluster.local_cluster import ClusterDirectory, LocalCluster, LocalNode
from penstock.cli.connection.contexts import BOOTSTRAP_SETTING, CONTEXT_VARIABLE, changed_contexts
from penstock.cli.connection.options import CONFIG_VARIABLE
from penstock.cli.errors import CommandError
from penstock.cli.output import note
from penstock.cli.serve import BOOTSTRAP_USER_FLAG, PASSWORD_FILE_FLAG
from penstock.client.wire.properties import CONFIG_FILE_SETTING
from penstock.testing.credentials import ADMIN, Credentials, NoCryptography

DIRECTORY: Final = "security"
_FIRST_NODE: Final = 1


class Access(NamedTuple):
    """How the user reaches the cluster: a variable for commands, and what to give to other clients."""

    variable: str
    clients: str


class ClusterSecurity:
    def __init__(self, directory: ClusterDirectory) -> None:
        """Raises CommandError."""
        self._directory = directory
        try:
            self._credentials = Credentials(directory.path / DIRECTORY)
        except NoCryptography as error:
            raise CommandError(str(error)) from None
        except (OSError, ValueError) as error:
            raise CommandError(f"--secure: {error}") from None

    @classmethod
    def of(cls, directory: ClusterDirectory, cluster: LocalCluster) -> Self | None:
        """None if the cluster is not secure. Raises CommandError."""
        if not cluster.secure:
            return None
        if cluster.shares_listeners:
            raise CommandError(
                "clients and nodes of this cluster share their listeners, as in earlier releases",
                hint="only a new cluster can be made secure with --secure",
            )
        return cls(directory)

    @property
    def client_settings(self) -> Mapping[str, str]:
        """The client settings of admin, without addresses."""
        return self._credentials.client_settings()

    def node_settings(self, node: LocalNode, cluster: LocalCluster) -> dict[str, str]:
        """The settings of a node, with secrets."""
        addresses = [node.address] if node.peer_address is None else [node.address, node.peer_address]
        hosts = {"localhost", *(parse_address(address)[0] for address in addresses)}
        listener = NODES_LISTENER if len(cluster.nodes) > 1 else None
        settings = self._credentials.node_settings(
            f"node-{node.id}", sorted(hosts), inter_broker_listener=listener
        )
        return {**settings, **self._credentials.node_secrets()}

    def first_user_flags(self, node: LocalNode) -> list[str]:
        """One node makes the user admin, at the first start of the cluster."""
        if node.id != _FIRST_NODE:
            return []
        return [BOOTSTRAP_USER_FLAG, ADMIN, PASSWORD_FILE_FLAG, str(self._credentials.password_file)]

    def announce(self, bootstrap: str) -> Access:
        """Write `client.properties` and the context."""
        properties = self._credentials.write_properties(bootstrap)
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", self._directory.path.name).lstrip("._-")[:100] or "penstock"
        settings = {BOOTSTRAP_SETTING: bootstrap, CONFIG_FILE_SETTING: str(properties)}
        clients = f"the settings in {properties}"
        try:
            with changed_contexts() as contexts:
                known = contexts.settings.get(name, settings)
                is_ours = known.get(CONFIG_FILE_SETTING) == str(properties)
                if is_ours:
                    contexts.settings[name] = settings
        except CommandError as error:
            note(f"no context was made: {error.message}")
            is_ours = False
        else:
            if not is_ours:
                note(f"no context was made: {name} is the context of another cluster")
        return Access(f"{CONTEXT_VARIABLE}={name}" if is_ours else f"{CONFIG_VARIABLE}={properties}", clients)
