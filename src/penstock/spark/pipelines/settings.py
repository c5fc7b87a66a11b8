"""Where and how a pipeline runs: what its declaration leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.client.cluster import Cluster
from penstock.client.settings import ConnectionSettings
from penstock.spark.option_values import CONNECTION_PREFIX
from penstock.spark.session import LOCAL


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    bootstrap: str
    #: Folder or URI of this pipeline in this generation.
    checkpoint: str
    #: All other settings of clients, without `kafka.` before them.
    connection: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: In place of what the declaration says, where there is no checkpoint yet: as `Source.starting`.
    starting: str | None = None
    master: str = LOCAL
    #: Read what is there now and end, whatever the declaration says.
    once: bool = False

    def options(self) -> dict[str, str]:
        """For sources and sinks."""
        settings = {"bootstrap.servers": self.bootstrap, **self.connection}
        return {CONNECTION_PREFIX + name: value for name, value in settings.items()}

    def cluster(self) -> Cluster:
        """Raises ClientError, which names the setting that is wrong."""
        settings = {"client.id": "penstock-pipeline", **self.connection, "bootstrap.servers": self.bootstrap}
        return Cluster(ConnectionSettings.parse(settings))
