"""What the world is made of does what it says: time, networks that fail, disks that forget."""

from random import Random
from typing import Any
from uuid import UUID

import pytest
from simulation.clock import Clock
from simulation.disk import Disk, DiskFull
from simulation.ledger import Ledger, Violation
from simulation.network import Network, Weather
from simulation.simlog import Batch, SimLog
from simulation.world import Life, World


def batch(serial: int, base: int, epoch: int = 0, **fields: Any) -> Batch:
    return Batch(serial, base, base + 2, epoch, ("a", "b"), **fields)


def log_of(*batches: Batch) -> SimLog:
    log = SimLog("log")
    for each in batches:
        log.append(each)
    return log


class Echo:
    """A process that answers at once."""

    def __init__(self, name: str) -> None:
        self.life = Life(name)
        self.received: list[Any] = []

    def receive(self, kind: str, request: Any, respond: Any) -> None:
        self.received.append(request)
        respond(("echo", request))


# --- time and lives ---


def test_events_happen_in_order_and_an_ended_life_has_none() -> None:
    world, life, dead = World(0), Life("a"), Life("b")
    seen: list[str] = []
    world.after(5, life, seen.append, "later")
    world.after(1, life, seen.append, "first")
    world.after(2, dead, seen.append, "never")
    dead.is_over = True
    world.run(10)
    assert seen == ["first", "later"]
    assert world.now_ms == 10


def test_a_frozen_life_goes_on_where_it_stopped() -> None:
    world, life = World(0), Life("a")
    seen: list[int] = []
    for number in range(3):
        world.after(number, life, seen.append, number)
    world.freeze(life)
    world.run(10)
    assert seen == []
    world.thaw(life)
    world.run(10)
    assert seen == [0, 1, 2]


def test_a_wall_clock_jumps_and_a_monotonic_one_does_not() -> None:
    world = World(0)
    clock = Clock(world, rate=1.1)
    world.run(1000)
    before = clock.wall_ms()
    clock.jump(-5000)
    assert clock.monotonic_ms() == 1100
    assert clock.wall_ms() == before - 5000


# --- the network ---


def call(network: Network, target: int, answers: list[Any], timeout_ms: int = 50) -> None:
    network.call(
        2, Life("caller"), target, "kind", "hello", lambda *answer: answers.append(answer), timeout_ms
    )


def network_with(process: Echo | None) -> tuple[World, Network]:
    world = World(0)
    network = Network(world, Weather(slow_chance=0))
    if process is not None:
        network.processes[1] = process
    return world, network


def test_a_call_is_answered_once_even_when_messages_are_doubled() -> None:
    process, answers = Echo("a"), []
    world, network = network_with(process)
    network.weather.duplicate_chance = 1.0
    call(network, 1, answers, timeout_ms=2000)
    world.run(3000)
    assert answers == [(("echo", "hello"), False)]
    assert process.received == ["hello", "hello"]


def test_a_dead_process_refuses_and_a_dead_machine_is_silent() -> None:
    world, network = network_with(None)
    answers: list[Any] = []
    call(network, 1, answers)
    world.run(20)
    assert answers == [(None, True)]
    network.silent.add(1)
    call(network, 1, answers)
    world.run(40)
    assert len(answers) == 1
    world.run(100)
    assert answers[1] == (None, False)


def test_a_one_way_cut_loses_the_answer_but_not_the_question() -> None:
    process, answers = Echo("a"), []
    world, network = network_with(process)
    network.cut_one_way(1, 2)
    call(network, 1, answers)
    world.run(100)
    assert process.received == ["hello"]
    assert answers == [(None, False)]


def test_who_dies_with_a_question_open_closes_the_connection() -> None:
    class Silent(Echo):
        def receive(self, kind: str, request: Any, respond: Any) -> None:
            self.received.append(request)

    process, answers = Silent("a"), []
    world, network = network_with(process)
    call(network, 1, answers)
    world.run(20)
    process.life.is_over = True
    network.ended(process.life)
    world.run(40)
    assert answers == [(None, True)]


# --- logs and disks ---


@pytest.mark.parametrize("seed", range(30))
def test_a_power_loss_takes_only_what_was_not_synced(seed: int) -> None:
    log = log_of(batch(1, 0), batch(2, 2))
    log.sync_begins()
    log.append(batch(3, 4))
    log.sync_ends()
    log.append(batch(4, 6))
    assert log.durable_offset == 4
    log.power_lost(Random(seed).randrange)
    assert 4 <= log.end_offset <= 8
    assert log.durable_offset == 4
    assert [each.serial for each in log.batches] == [1, 2, 3, 4][: len(log.batches)]


def test_some_power_loss_takes_all_that_was_not_synced_and_some_none() -> None:
    ends = set()
    for seed in range(30):
        log = log_of(batch(1, 0), batch(2, 2))
        log.power_lost(Random(seed).randrange)
        ends.add(log.end_offset)
    assert ends == {0, 2, 4}


def test_a_truncation_that_was_not_synced_may_be_undone() -> None:
    ends = set()
    for seed in range(30):
        log = log_of(batch(1, 0), batch(2, 2))
        log.sync_begins()
        log.sync_ends()
        log.truncate(2)
        log.power_lost(Random(seed).randrange)
        ends.add(log.end_offset)
    assert ends == {2, 4}


def test_a_sync_says_nothing_about_what_was_cut_off_and_written_anew_meanwhile() -> None:
    log = log_of(batch(1, 0), batch(2, 2))
    log.sync_begins()
    log.truncate(2)
    log.append(batch(3, 2, epoch=1))
    log.sync_ends()
    assert log.durable_offset == 2


def test_truncation_takes_whole_batches_and_forgets_their_producers() -> None:
    known = {"producer_id": 7, "producer_epoch": 0}
    log = log_of(batch(1, 0, sequence=0, **known), batch(2, 2, sequence=2, **known))
    log.truncate(3)
    assert log.end_offset == 2
    assert log.producers.states[7].next_sequence == 2


def test_one_sync_at_a_time_and_whoever_asks_meanwhile_shares_the_next() -> None:
    world, life = World(0), Life("a")
    disk, log, done = Disk(world, UUID(int=1)), log_of(batch(1, 0)), []

    def failed() -> None:
        raise AssertionError("no fsync fails here")

    disk.sync(life, log, lambda: done.append(log.durable_offset), failed)
    log.append(batch(2, 2))
    disk.sync(life, log, lambda: done.append(log.durable_offset), failed)
    disk.sync(life, log, lambda: done.append(log.durable_offset), failed)
    world.run(500)
    assert done == [2, 4, 4]


def test_a_full_disk_takes_nothing_and_a_new_one_has_nothing() -> None:
    disk = Disk(World(0), UUID(int=1))
    disk.logs["a"], disk.is_full = log_of(batch(1, 0)), True
    with pytest.raises(DiskFull):
        disk.require_room()
    disk.lost(UUID(int=2))
    disk.require_room()
    assert (disk.logs, disk.directory) == ({}, UUID(int=2))


# --- the ledger ---


def test_what_was_committed_is_compared_in_every_replica() -> None:
    ledger = Ledger("log")
    ledger.extend(log_of(batch(1, 0), batch(2, 2)), 4)
    ledger.extend(log_of(batch(1, 0)), 2)
    assert not ledger.reaches(log_of(batch(1, 0)))
    with pytest.raises(Violation, match="committed data changed"):
        ledger.extend(log_of(batch(1, 0), batch(9, 2)), 4)
    with pytest.raises(Violation, match="committed data changed"):
        ledger.extend(log_of(batch(1, 0), batch(9, 2), batch(3, 4)), 6)


@pytest.mark.parametrize(("sequence", "broken"), [(0, "duplicated"), (3, "order")])
def test_a_producer_is_neither_doubled_nor_out_of_order(sequence: int, broken: str) -> None:
    first = batch(1, 0, producer_id=1, producer_epoch=0, sequence=0)
    second = batch(2, 2, producer_id=1, producer_epoch=0, sequence=sequence)
    with pytest.raises(Violation, match=broken):
        Ledger("log").extend(log_of(first, second), 4)
