"""A command's connection to a cluster through the raw client of `penstock.client`. It takes settings from flags and
reports errors as sentences.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.cli.cluster_client import check_reachable
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import parse_pairs
from penstock.client.errors import ClientError
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings

API_TIMEOUT_MS = 10_000


@contextmanager
def open_cluster(bootstrap: str, properties: Sequence[str] | None = None) -> Iterator[Cluster]:
    """Raises every client error as a CommandError."""
    settings = {
        "client.id": "penstock-cli",
        "default.api.timeout.ms": str(API_TIMEOUT_MS),
        **parse_pairs(properties or (), "--property"),
        "bootstrap.servers": bootstrap,
    }
    check_reachable(bootstrap)
    try:
        parsed = ConnectionSettings.parse(settings)
    except ClientError as error:
        raise CommandError(f"--property {error}", exit_code=EXIT_USAGE) from None
    try:
        with Cluster(parsed) as cluster:
            yield cluster
    except ClientError as error:
        raise CommandError(str(error)) from None
