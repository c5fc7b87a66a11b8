"""The raw client for commands: its settings from flags, and its errors as sentences."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.cli.client import reach
from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.options import pairs
from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError
from penstock.client.settings import ConnectionSettings

PATIENCE_MS = 10_000


@contextmanager
def open_cluster(bootstrap: str, properties: Sequence[str] | None = None) -> Iterator[Cluster]:
    """Whatever goes wrong with it is a Failure."""
    settings = {
        "client.id": "penstock-cli",
        "default.api.timeout.ms": str(PATIENCE_MS),
        **pairs(properties or (), "--property"),
        "bootstrap.servers": bootstrap,
    }
    reach(bootstrap)
    try:
        parsed = ConnectionSettings.parse(settings)
    except ClientError as error:
        raise Failure(f"--property {error}", exit_code=WRONG_USAGE) from None
    try:
        with Cluster(parsed) as cluster:
            yield cluster
    except ClientError as error:
        raise Failure(str(error)) from None
