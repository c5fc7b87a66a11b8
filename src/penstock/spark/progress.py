"""The query as a consumer group: who looks at the group sees how far the query has come.

The checkpoint is what the query itself goes by; the group is for those who watch. So a group that cannot be reached
is told of in the log, and never stops a query.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError
from penstock.client.positions import commit
from penstock.client.retrying import Deadline
from penstock.client.settings import ConnectionSettings
from penstock.spark.offsets import Position

#: Written next to every position, so that whoever would move one learns that a checkpoint decides.
METADATA: Final = "penstock-spark"
_LOG: Final = logging.getLogger("penstock.spark")
#: A batch does not wait longer than this for its group.
_COMMIT_MS_MAX: Final = 5_000
#: Brokers forget groups that have not been heard of for long, and the query may have nothing to read for weeks.
REPEAT_MS: Final = 600_000
#: After a failure; every trigger in between would wait for the same one.
REST_MS: Final = 10_000


class Progress:
    """Of one query, on its driver."""

    def __init__(
        self,
        settings: ConnectionSettings,
        group: str | None,
        *,
        deadline: Callable[[float], Deadline] = Deadline,
    ) -> None:
        patience_ms = min(settings.retry_deadline_ms, _COMMIT_MS_MAX)
        self._cluster = Cluster(replace(settings, retry_deadline_ms=patience_ms))
        self._group = group
        self._deadline = deadline
        self._told: Position | None = None
        self._rest = deadline(0)

    def tell(self, finished: Position) -> None:
        """The end of the last finished batch. Does nothing while that is what was told lately."""
        if self._group is None or not finished.topics:
            return
        if not self._rest.is_over and self._told in (finished, None):
            return
        try:
            commit(self._cluster, self._group, finished.offsets, metadata=METADATA)
        except ClientError as trouble:
            _LOG.warning("group %s does not show how far the query has come: %s", self._group, trouble)
            self._told, self._rest = None, self._deadline(REST_MS)
        else:
            self._told, self._rest = finished, self._deadline(REPEAT_MS)

    def close(self) -> None:
        self._cluster.close()
