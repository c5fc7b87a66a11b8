"""A subscription at work: a thread that joins the group, takes messages and has them handled until it is stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

from penstock.client.app.assembly import Machine, assemble
from penstock.client.app.membership import Membership
from penstock.client.app.places import Place
from penstock.client.app.resources import Resources
from penstock.client.app.settings import ApplicationError
from penstock.client.app.subscription import Subscription
from penstock.client.errors import ClientError
from penstock.client.retrying import Backoff as Rests

__all__ = ["Consumption"]

_LOG: Final = logging.getLogger("penstock.client")
_TAKE_S: Final = 0.2
_HELD_S: Final = 0.02
_ROOM_S: Final = 0.1
_RESTS: Final = Rests(base_ms=200, cap_ms=10_000)


class Consumption:
    """Starts anew after whatever may pass; what cannot pass ends it, and `error` says why."""

    def __init__(self, subscription: Subscription, resources: Resources) -> None:
        self.subscription = subscription
        self._resources = resources
        self._stopping = threading.Event()
        self._machine: Machine | None = None
        self._chance = Random()
        self.figures = resources.figures_of(subscription)
        self.error: BaseException | None = None
        self.is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"penstock-{subscription.group}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more; `join` waits for what is in hand."""
        self._stopping.set()
        machine = self._machine
        if machine is not None and machine.session.membership is not None:
            machine.contract.stop()

    def join(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        attempt = 0
        while not self._stopping.is_set():
            try:
                attempt = 0 if self._work() else attempt + 1
            except ApplicationError as error:
                self.error = error
                _LOG.error("%s: %s", self.subscription.name, error)
                return
            except ClientError as error:
                attempt += 1
                self.figures.restarts += 1
                _LOG.warning("%s starts anew: %s", self.subscription.name, error)
            except Exception as error:
                self.error = error
                _LOG.exception("%s has ended", self.subscription.name)
                return
            except BaseException as error:
                self.error = error
                _LOG.error("%s raised %r, which ends the application", self.subscription.name, error)
                return
            self._stopping.wait(_RESTS.delay_ms(attempt, self._chance) / 1000)

    def _work(self) -> bool:
        """One membership, from joining to leaving. Returns whether anything was handled."""
        before = self.figures.handled
        machine = assemble(self.subscription, self._resources, self.figures, self._stopping)
        membership = Membership(
            machine.settings, machine.topics, start=self.subscription.start, work=_Callbacks(machine)
        )
        machine.session.membership = membership
        self._machine = machine
        try:
            self.is_ready.set()
            while not self._stopping.is_set():
                self._turn(machine, membership)
            machine.contract.finish()
        finally:
            self._machine = None
            membership.close()
            machine.close()
        return self.figures.handled > before

    def _turn(self, machine: Machine, membership: Membership) -> None:
        room = self._room(machine)
        if self._is_held(machine, membership, room):
            # Whoever does not ask for messages is taken for dead.
            membership.put_back(membership.take(1, _HELD_S))
            machine.contract.tick()
            return
        machine.retries.resume(membership)
        batch = membership.take(min(self.subscription.taken_max, room), machine.retries.wait_s(_TAKE_S))
        ready = machine.retries.ready(batch, membership) if batch else batch
        if ready:
            machine.contract.process(ready)
        else:
            machine.contract.tick()

    def _room(self, machine: Machine) -> int:
        """What is nearly done is waited for: to pause a partition is to fetch again what was fetched before."""
        runner = machine.session.runner
        room = runner.room
        return room if room > 0 or machine.is_held else runner.await_room(_ROOM_S)

    def _is_held(self, machine: Machine, membership: Membership, room: int) -> bool:
        """While too much is in hand partitions are paused, and until half of it is done: pausing has its price."""
        if room <= 0 or (machine.is_held and 2 * room < self.subscription.in_flight_max):
            membership.pause(membership.places)
            machine.is_held = True
        elif machine.is_held:
            membership.resume(membership.places - machine.retries.held)
            machine.is_held = False
        return machine.is_held


class _Callbacks:
    """Of rebalances: for the contract, and for whoever remembers something about partitions."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        return self._machine.contract.assigned(places)

    def begun(self, positions: Mapping[Place, int]) -> None:
        self._machine.begun(positions)

    def revoked(self, places: Sequence[Place]) -> None:
        try:
            self._machine.contract.revoked(places)
        finally:
            self._machine.forget(places)

    def lost(self, places: Sequence[Place]) -> None:
        try:
            self._machine.contract.lost(places)
        finally:
            self._machine.forget(places)
