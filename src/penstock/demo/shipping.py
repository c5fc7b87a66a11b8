"""The subscriber that is an application with contracts: orders are packed exactly once, and parcels retried until they
are delivered or given up.
"""

from __future__ import annotations

from typing import Final

from penstock.client import Message
from penstock.demo.names import ORDERS, PACKING, PARCELS, SHIPPING
from penstock.demo.parcels import Parcel, Roads, deliver, packed
from penstock.demo.parts import Part

_LOOK_S: Final = 0.2
#: After a crash the next start gets the partitions within this time.
_SETTINGS: Final = {"session.timeout.ms": 6_000}


class Shipping(Part):
    def __init__(self, bootstrap: str, roads: Roads) -> None:
        super().__init__(SHIPPING)
        self._bootstrap = bootstrap
        self._roads = roads
        #: Parcels that it has delivered since it was started.
        self.handled = 0

    def work(self) -> None:
        from penstock.client import Backoff, Penstock

        app = Penstock(self._bootstrap, name="demo-shipping", settings=_SETTINGS)

        @app.subscribe(ORDERS, group=PACKING, delivery="exactly-once", to=PARCELS)
        def pack(message: Message) -> Parcel | None:
            return packed(message.value)

        @app.subscribe(PARCELS, group=SHIPPING, retry=Backoff(base="500ms", cap="5s", attempts=3))
        def ship(parcel: Parcel, message: Message) -> None:
            deliver(parcel, attempt=message.attempt, roads=self._roads)

        with app:
            app.start()
            before, figures = self.handled, app.figures()[ship.__qualname__]
            while not self.stopping.wait(_LOOK_S) and app.is_running:
                if before + figures.handled > self.handled:
                    self.handled, self.trouble = before + figures.handled, None
