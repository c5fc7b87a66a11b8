"""Threads that run one at a time, in an order that a seed determines. Any of them can die at any step.

The requests of the sink to brokers go through gates. At a gate an actor waits until it is chosen again, if ever. A dead
actor runs none of its code any more, not even its cleanup.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from penstock.client.wire.producer import RawProducer
from penstock.spark.exactly_once import decisions, two_phase_commit
from penstock.spark.sink import writers

TURN_TIMEOUT_S = 300.0
#: Some actors are so slow that others have finished long before.
PACES = (1, 1, 1, 0.1, 0.02)
Gates = tuple[tuple[Any, str], ...]
#: Other actors may run before each of these steps: steps that others can see, and steps that read what others wrote.
SWITCHING = (
    (RawProducer, "init"),
    (RawProducer, "prepare"),
    (decisions.DecisionLog, "take"),
    (decisions.DecisionLog, "decide"),
    (decisions.DecisionLog, "last"),
    (decisions.DecisionLog, "last_batch"),
    (two_phase_commit, "last_decided_batch"),
    (two_phase_commit, "end_prepared_transaction"),
    (two_phase_commit, "list_transactions"),
    (two_phase_commit, "current_producer"),
    (two_phase_commit, "end_transaction"),
    (two_phase_commit, "abort_undecided"),
    (writers, "last_decided_batch"),
    (writers, "_send"),
)
#: An actor may die here, but no other may run: it would wait for the unfinished request.
DEADLY = ((RawProducer, "commit_offsets"), (RawProducer, "end"))


@contextmanager
def patched(*patches: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


class Died(BaseException):
    """Ends a thread at the gate where its actor died."""


class Actor:
    def __init__(self, stage: "Stage", name: str, act: Callable[[], Any]) -> None:
        self.stage, self.name = stage, name
        self.pace = stage.chance.choice(PACES)
        self.is_dead = self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.waits_for: Callable[[], bool] = lambda: True
        self._turn = threading.Semaphore(0)
        self._rest = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(act,), name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else "done" if self.is_done else "alive"
        return f"<{self.name} {state}>"

    def _run(self, act: Callable[[], Any]) -> None:
        self.stage.local.actor = self
        try:
            self.rest()
            self.result = act()
        except Died:
            pass
        except Exception as error:
            self.error = error
        self.is_done = True
        self._rest.release()

    @property
    def is_ready(self) -> bool:
        return not self.is_done and (self.is_dead or self.waits_for())

    def rest(self) -> None:
        """Let another actor run. Called by the actor."""
        self._turn.acquire()
        if self.is_dead:
            raise Died

    def act(self) -> None:
        """Run one step of the actor. Called by the stage."""
        self._turn.release()
        assert self._rest.acquire(timeout=TURN_TIMEOUT_S), f"{self} does not reach its next step"

    def pause(self) -> None:
        if self.is_dead:
            raise Died
        self._rest.release()
        self.rest()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        self.waits_for = condition
        self.pause()
        self.waits_for = lambda: True


class Stage:
    """Chooses which actor runs next, and which one dies."""

    def __init__(
        self,
        chance: random.Random,
        *,
        deaths: float,
        switching: Gates = SWITCHING,
        deadly: Gates = DEADLY,
    ) -> None:
        self.chance = chance
        self.switching, self.deadly = switching, deadly
        self.deaths = deaths
        self.actors: list[Actor] = []
        self.local = threading.local()
        self.gates: list[str] = []

    def enter(self, name: str, act: Callable[[], Any]) -> Actor:
        self.actors.append(Actor(self, name, act))
        return self.actors[-1]

    def run_drivers(self, number: int, driver: Callable[[], Any]) -> None:
        """One driver, sometimes with a second one, for some steps."""
        self.enter(f"driver {number}", driver)
        if self.chance.random() < 0.3:
            self.enter(f"second driver {number}", driver)
        for _ in range(self.chance.randint(1, 80)):
            self.step()

    def kill(self, actor: Actor) -> None:
        actor.is_dead = True
        actor.act()
        assert actor.is_done

    def kill_drivers(self) -> None:
        """Kill the drivers, and some of their tasks: tasks may live longer than the driver that started them."""
        for actor in list(self.actors):
            if not actor.is_done and ("driver" in actor.name or self.chance.random() < 0.5):
                self.kill(actor)

    def step(self) -> bool:
        """Return False if no actor can run any more."""
        ready = [actor for actor in self.actors if actor.is_ready]
        if not ready:
            return False
        self.chance.choices(ready, [actor.pace for actor in ready])[0].act()
        self.actors = [actor for actor in self.actors if not actor.is_done]
        return True

    def gate(self, name: str, *, switches: bool) -> None:
        actor: Actor | None = getattr(self.local, "actor", None)
        if actor is None:
            return
        if actor.is_dead:
            raise Died
        self.gates.append(f"{actor.name}: {name}")
        if self.chance.random() < self.deaths:
            actor.is_dead = True
            self.gates.append(f"{actor.name} dies")
            raise Died
        if switches:
            actor.pause()

    @contextmanager
    def gated(self) -> Iterator["Stage"]:
        patches = [self._patch(*each, switches=True) for each in self.switching]
        patches += [self._patch(*each, switches=False) for each in self.deadly]
        with patched(*patches):
            yield self

    def _patch(self, owner: Any, name: str, *, switches: bool) -> Any:
        real = getattr(owner, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.gate(name, switches=switches)
            return real(*args, **kwargs)

        return mock.patch.object(owner, name, guarded)
