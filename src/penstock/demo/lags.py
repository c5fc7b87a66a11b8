"""How many records each group has not read yet, asked of the broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.settings import ConnectionSettings
from penstock.demo.parts import Part
from penstock.spark.pipelines.lag import lag_of

_LOOK_EVERY_S: Final = 1.0
#: The view does not wait longer than this for an answer.
_PATIENCE_MS: Final = "5000"


class Lags(Part):
    def __init__(self, bootstrap: str, groups: Sequence[str]) -> None:
        super().__init__("lags")
        self._settings = ConnectionSettings.parse(
            {"bootstrap.servers": bootstrap, "default.api.timeout.ms": _PATIENCE_MS}
        )
        self._groups = tuple(groups)
        #: By group; None while it has no positions.
        self.records: dict[str, int | None] = dict.fromkeys(groups)

    def work(self) -> None:
        with Cluster(self._settings) as cluster:
            while not self.stopping.wait(_LOOK_EVERY_S):
                for group in self._groups:
                    self.records[group] = lag_of(cluster, group)
                self.trouble = None
