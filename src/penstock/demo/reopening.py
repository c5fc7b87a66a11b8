"""Somebody who opens closed roads, and sends the parcels that were given up because of them to shipping once more.

`penstock dlq replay parcels.dlq --to group --error RoadClosed` does the same by hand.
"""

from __future__ import annotations

import time
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.settings import ConnectionSettings
from penstock.demo.journal import Journal
from penstock.demo.names import PARCEL_LETTERS, PARCELS_REPLAYED, SHIPPING
from penstock.demo.parcels import RoadClosed, Roads
from penstock.demo.parts import Part
from penstock.demo.tally import Tally

#: So many must wait, and so much time must have passed since the last time.
_LETTERS_MIN: Final = 5
_PAUSE_S: Final = 12.0
_LOOK_EVERY_S: Final = 0.5


class Reopening(Part):
    def __init__(
        self, bootstrap: str, tally: Tally, roads: Roads, journal: Journal, *, pause_s: float = _PAUSE_S
    ) -> None:
        super().__init__("roads")
        self._settings = ConnectionSettings.parse({"bootstrap.servers": bootstrap})
        self._tally = tally
        self._roads = roads
        self._journal = journal
        self._pause_s = pause_s

    @property
    def waiting(self) -> int:
        """Parcels that were given up because of a road, and are not sent again yet."""
        return self._tally.errors[RoadClosed.__name__] - self._tally.records[PARCELS_REPLAYED]

    def work(self) -> None:
        rested_from = time.monotonic()
        while not self.stopping.wait(_LOOK_EVERY_S):
            is_time = time.monotonic() - rested_from >= self._pause_s
            if is_time and self._tally.is_current and self.waiting >= _LETTERS_MIN:
                district = self._roads.open()
                count = self._replay()
                self._journal.say(
                    f"the road to district {district} is open: {count} parcels go to shipping again"
                )
                rested_from, self.trouble = time.monotonic(), None

    def _replay(self) -> int:
        """To the group that gave them up, and to nobody else who reads parcels. Returns how many."""
        from penstock.client.deadletters.filters import Filter
        from penstock.client.deadletters.replaying import Replay, Request, survey
        from penstock.client.deadletters.routing import Aim, Destination
        from penstock.spark.replay.turns import LettersTurn

        with Cluster(self._settings) as cluster:
            request = Request(
                topic=cluster.await_topic(PARCEL_LETTERS),
                id=f"demo-{time.time_ns()}",
                wanted=Filter(errors=(RoadClosed.__name__,), groups=(SHIPPING,)),
                destination=Destination(aim=Aim.GROUP),
            )
            replay = Replay(cluster, request, survey(cluster, request), should_stop=self.stopping.is_set)
            return replay.run(LettersTurn(cluster, PARCEL_LETTERS)).replayed
