"""A subscription at work: a thread that joins the group, takes messages and has them handled until it is stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Final

from penstock.client.app.assembly import Machine, assemble
from penstock.client.app.contracts import note_unfinished
from penstock.client.app.membership import Membership
from penstock.client.app.places import Place
from penstock.client.app.resources import Resources
from penstock.client.app.settings import ApplicationError
from penstock.client.app.subscription import Subscription
from penstock.client.app.waits import Phase, Stage
from penstock.client.errors import ClientError
from penstock.client.retrying import Backoff as Rests

__all__ = ["Consumption"]

_LOG: Final = logging.getLogger("penstock.client")
_TAKE_S: Final = 0.2
_HELD_S: Final = 0.02
_ROOM_S: Final = 0.1
_RESTS: Final = Rests(base_ms=200, cap_ms=10_000)
#: How soon it is said what is finished before the application ends, and again.
_NAME_AFTER_S, _NAME_AGAIN_S = 0.5, 5.0
#: What a member that has nothing in hand waits for at most, where a broker answers and the group does not let it go.
_LEAVE_S: Final = 10.0
_LOOK_S: Final = 0.2
_NAMED_MAX: Final = 3


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
        self.stage = Stage(Phase.CONNECTING, time.monotonic())
        self._thread = threading.Thread(target=self._run, name=f"penstock-{subscription.group}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more; `join` waits for what is in hand."""
        self._stopping.set()
        machine = self._machine
        if machine is not None and machine.session.membership is not None:
            # Aside, since it waits for a member that may be waiting for its brokers.
            threading.Thread(target=machine.contract.stop, name="penstock-stopping", daemon=True).start()

    def join(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def end(self) -> None:
        """After `stop`: waits for what is in hand, and says what that is; brokers that are not there are given up."""
        began_s = time.monotonic()
        say_s = began_s + _NAME_AFTER_S
        while not self.join(_LOOK_S):
            now_s = time.monotonic()
            begun = self.begun()
            if not begun:
                reason = self._resources.unreachable()
                if reason is None and now_s - began_s > _LEAVE_S:
                    reason = f"no answer for {_LEAVE_S:g} s"
                if reason is not None:
                    _LOG.warning(
                        "%s ends without its brokers (%s); what was not committed is read again",
                        self.subscription.name,
                        reason,
                    )
                    return
            if now_s >= say_s:
                say_s = now_s + _NAME_AGAIN_S
                self._name(begun)

    def _name(self, begun: Sequence[Any]) -> None:
        if not begun:
            _LOG.warning(
                "%s is ending: it commits its positions and leaves its group", self.subscription.name
            )
            return
        named = ", ".join(f"{raw.topic()}[{raw.partition()}]@{raw.offset()}" for raw in begun[:_NAMED_MAX])
        more = f" and {len(begun) - _NAMED_MAX} more" if len(begun) > _NAMED_MAX else ""
        _LOG.warning("%s is ending: it finishes %s%s", self.subscription.name, named, more)

    def begun(self) -> Sequence[Any]:
        """Messages that handlers have now."""
        machine = self._machine
        return machine.session.runner.begun() if machine is not None else ()

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
            self.stage = Stage(Phase.RESTING, time.monotonic())
            self._stopping.wait(_RESTS.delay_ms(attempt, self._chance) / 1000)

    def _work(self) -> bool:
        """One membership, from joining to leaving. Returns whether anything was handled."""
        before = self.figures.handled
        self.stage = Stage(Phase.CONNECTING, time.monotonic())
        machine = assemble(self.subscription, self._resources, self.figures, self._stopping)
        membership = Membership(
            machine.settings,
            machine.topics,
            start=self.subscription.start,
            work=_Callbacks(machine, self._note_assigned),
            contract=self.subscription.delivery,
            unfinished=partial(note_unfinished, self.figures),
        )
        machine.session.membership = membership
        self._machine = machine
        try:
            self.is_ready.set()
            while not self._stopping.is_set():
                if self.stage.phase is not Phase.RUNNING:
                    self._note_stage(machine, membership)
                self._turn(machine, membership)
            machine.contract.finish()
        finally:
            self._machine = None
            membership.close()
            machine.close()
        return self.figures.handled > before

    def _note_assigned(self) -> None:
        """At once: the first message may keep its handler busy for long."""
        self.stage = Stage(Phase.RUNNING, time.monotonic())

    def _note_stage(self, machine: Machine, membership: Membership) -> None:
        if membership.is_assigned:
            self._note_assigned()
            return
        is_new = self.stage.phase is Phase.CONNECTING
        since_s = time.monotonic() if is_new else self.stage.since_s
        self.stage = Stage(Phase.JOINING, since_s, machine.settings, membership.member_id)

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

    def __init__(self, machine: Machine, note_assigned: Callable[[], None]) -> None:
        self._machine = machine
        self._note_assigned = note_assigned

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        self._note_assigned()
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
