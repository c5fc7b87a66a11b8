"""What a node checks and loads before it serves: open files, the inter-broker listener, modules of a cluster."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.config.listeners import SecurityProtocol
from penstock.broker.environment import StartFailed
from penstock.log.segment_files import open_files_limit

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings

logger = logging.getLogger("penstock.node")

#: With fewer open files, connections and logs would constantly compete for descriptors.
_OPEN_FILES_MIN: Final = 128
#: The requests that nodes send to each other while they elect a controller, register and report: AlterPartition, Vote,
#: BeginQuorumEpoch, EndQuorumEpoch, Envelope, FetchSnapshot, BrokerRegistration and BrokerHeartbeat.
_PEER_APIS: Final = (56, 52, 53, 54, 58, 59, 62, 63)


class DescriptorBudget(NamedTuple):
    """How many segment files may be open for reading, and how many logs for writing. The rest is for connections."""

    readers: int
    writers: int


def descriptor_budget(readers_max: int) -> DescriptorBudget:
    """Raises StartFailed if the limit on the open files of the process is too low."""
    limit = open_files_limit()
    if limit < _OPEN_FILES_MIN:
        raise StartFailed(
            f"the limit of open files is {limit}, and a node needs {_OPEN_FILES_MIN}",
            hint="`ulimit -n 65536` in the shell, or LimitNOFILE=65536 in the service, raises it",
        )
    quarter = limit // 4
    return DescriptorBudget(min(readers_max, quarter), quarter)


def check_node_listener(settings: NodeSettings, *, has_peers: bool) -> None:
    """Raises StartFailed if other nodes could not reach this one; warns about a listener that lets anyone in."""
    listener = settings.inter_broker_listener
    if has_peers and listener is None:
        raise StartFailed(
            f"node {settings.node_id} belongs to a cluster of several and has no listener for the other nodes",
            hint="--listen NODES://HOST:PORT adds one, at the address that it had before",
        )
    if (
        has_peers
        and listener is not None
        and settings.protocol(listener) is SecurityProtocol.SSL
        and settings.listener_value(listener, "ssl.client.auth") != "required"
    ):
        logger.warning(
            "the inter-broker listener lets in clients without a certificate: set ssl.client.auth=required for it",
            extra={"listener": listener},
        )
    if settings.is_listener_shared and not settings.protocol(settings.listeners[0].name).uses_sasl:
        logger.warning(
            "clients share the inter-broker listener: everyone who reaches it can take over the cluster",
            extra={"listener": listener},
        )


def warn_about_open_credentials(settings: NodeSettings) -> None:
    """For a node with SASL."""
    if not settings.string("authorizer.class.name"):
        logger.warning(
            "without authorizer.class.name every client may set the password of every SCRAM user but those of nodes"
        )


def preload_cluster_modules() -> None:
    """Load what a node of a cluster needs as soon as it listens.

    Loading it on first use would block the event loop in the middle of an election: for seconds if the processor is
    busy, which is longer than the election timeout.
    """
    from penstock.broker.controller import forwarding, leader_balancer  # noqa: F401
    from penstock.broker.network.apis import route
    from penstock.broker.network.peers import load_codecs
    from penstock.broker.quorum import inbound_requests, membership, outbound_requests  # noqa: F401
    from penstock.cluster.controller import heartbeats  # noqa: F401

    for api_key, version in load_codecs(_PEER_APIS):
        route(api_key, version)
