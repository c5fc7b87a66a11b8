"""Faults drawn from the seed: crashes, power losses, freezes, cuts, bad weather, full disks, damage, clock jumps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from simulation.clients import Sleeper
from simulation.cluster import Cluster
from simulation.node import Machine
from simulation.replica import Key
from simulation.workload import Workload
from simulation.world import Life

_BAD_DROP: Final = 0.08
_BAD_DUPLICATE: Final = 0.1
_SLOW_MS: Final = (10, 60)
_STORM_SLOW_MS: Final = (10, 250)


class Faults:
    def __init__(self, cluster: Cluster, workload: Workload, only: tuple[str, ...] = ()) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.workload = workload
        self.fired: Counter[str] = Counter()
        self.life = Life("faults")
        self._pace_ms = 100
        #: Every kind with its weight.
        self._kinds: tuple[tuple[Callable[[], bool], int, str], ...] = (
            (self.kill, 5, "kill"),
            (self.lose_power, 4, "power loss"),
            (self.lose_power_everywhere, 2, "power loss everywhere"),
            (self.freeze, 4, "freeze"),
            (self.cut_off, 4, "cut"),
            (self.cut_one_way, 3, "one-way cut"),
            (self.blind, 3, "cut from controllers"),
            (self.storm, 3, "storm"),
            (self.fill_disk, 1, "disk full"),
            (self.slow_disk, 2, "slow disk"),
            (self.fail_sync, 1, "fsync error"),
            (self.flip_bit, 2, "bit flip"),
            (self.jump_clock, 1, "clock jump"),
            (self.replace_disk, 3, "disk lost"),
            (self.restart_cleanly, 2, "clean restart"),
            (self.freeze_client, 2, "client freeze"),
            (self.impersonate, 1, "second broker with one id"),
            (self.reassign, 2, "reassignment"),
            (self.elect, 1, "preferred election"),
            (self.change_voters, 1, "voter change"),
        )
        # A run has some kinds of faults, not all: so each has runs to itself.
        chosen = [each for each in self._kinds if self.world.chance(0.5)] or [self._kinds[0]]
        self._chosen = [each for each in self._kinds if each[2] in only] if only else chosen
        assert len(self._chosen) >= len(only), f"no such faults: {only}"

    def start(self, pace_ms: int) -> None:
        self._pace_ms = pace_ms
        self.world.after(self.world.between(1, pace_ms), self.life, self._strike)

    def stop(self) -> None:
        self.life.is_over = True

    def heal(self) -> None:
        """Everything that can be mended is mended, and every machine runs."""
        self.stop()
        cluster = self.cluster
        cluster.network.heal()
        self._calm()
        for client in self.workload.sleepers:
            self._wake_client(client)
        for machine in cluster.machines.values():
            machine.disk.is_full = machine.disk.fails_next_sync = machine.disk.is_slow = False
            if machine.node is not None and machine.node.life.is_frozen:
                self.world.thaw(machine.node.life)
            if machine.node is not None and machine.node.lifecycle.is_leaving:
                cluster.end_process(machine)
            cluster.start(machine)

    def _strike(self) -> None:
        self.world.after(self.world.between(1, 2 * self._pace_ms), self.life, self._strike)
        weights = sum(weight for _, weight, _ in self._chosen)
        left = self.world.draw(weights)
        for strike, weight, name in self._chosen:
            left -= weight
            if left < 0:
                if strike():
                    self.fired[name] += 1
                return

    def _later(self, least_ms: int, most_ms: int, call: Callable[..., None], *args: object) -> None:
        self.world.after(self.world.between(least_ms, most_ms), self.life, call, *args)

    # --- choosing ---

    def _any_machine(self) -> Machine | None:
        """Often one that matters: the leader of a partition, or of the quorum."""
        running = [machine for machine in self.cluster.machines.values() if machine.node is not None]
        if not running:
            return None
        if self.world.chance(0.5):
            leaders = [machine for machine in running if self._matters(machine)]
            running = leaders or running
        return running[self.world.draw(len(running))]

    def _matters(self, machine: Machine) -> bool:
        node = machine.node
        assert node is not None
        return node.quorum.is_leader or any(replica.leading is not None for replica in node.replicas.values())

    # --- processes and machines ---

    def kill(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        self.world.note("FAULT kill", machine.id)
        self.cluster.end_process(machine)
        self._later(5, 300, self.cluster.start, machine)
        return True

    def lose_power(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        self.world.note("FAULT power loss", machine.id)
        self.cluster.lose_power(machine)
        self._later(5, 300, self.cluster.start, machine)
        return True

    def lose_power_everywhere(self) -> bool:
        self.world.note("FAULT power loss everywhere")
        for machine in self.cluster.machines.values():
            self.cluster.lose_power(machine)
            self._later(5, 200, self.cluster.start, machine)
        return True

    def freeze(self) -> bool:
        machine = self._any_machine()
        if machine is None or machine.node is None:
            return False
        life = machine.node.life
        self.world.note("FAULT freeze", machine.id)
        self.world.freeze(life)
        self._later(30, 700, self._thaw, life)
        return True

    def _thaw(self, life: Life) -> None:
        if not life.is_over:
            self.world.thaw(life)

    def freeze_client(self) -> bool:
        """A client stops for longer than its session, and goes on as if nothing had been."""
        busy = [client for client in self.workload.sleepers if client.is_busy]
        if not busy:
            return False
        client = busy[self.world.draw(len(busy))]
        self.world.note("FAULT client freeze", client.id)
        client.is_asleep = True
        self.world.freeze(client.life)
        self._later(300, 1_500, self._wake_client, client)
        return True

    def _wake_client(self, client: Sleeper) -> None:
        if client.is_asleep:
            client.is_asleep = False
            self.world.thaw(client.life)
            client.awoken()

    def restart_cleanly(self) -> bool:
        machine = self._any_machine()
        if machine is None or machine.node is None or not machine.is_broker:
            return False
        node = machine.node
        self.world.note("FAULT clean restart", machine.id)
        node.lifecycle.leave()
        node.quorum.resign()
        self._later(300, 600, self._restart, machine)
        return True

    def impersonate(self) -> bool:
        """Somebody starts a copy of a broker's folder elsewhere: it asks to be registered under the same id."""
        machine = self._any_machine()
        if machine is None or machine.node is None or not machine.is_broker:
            return False
        self.world.note("FAULT second broker", machine.id)
        self.workload.register_copy(machine.node.lifecycle.registration(), self.world.random.getrandbits(100))
        return True

    def _restart(self, machine: Machine) -> None:
        """One that did not come to its clean end in time is killed."""
        self.cluster.end_process(machine)
        self.cluster.start(machine)

    # --- the network ---

    def cut_off(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        others = [id for id in self.cluster.machines if id != machine.id]
        if self.world.chance(0.4):
            others = others[: 1 + self.world.draw(len(others))]
        self.world.note("FAULT cut", machine.id, "from", others)
        for other in others:
            self.cluster.network.cut_both_ways(machine.id, other)
        if self.world.chance(0.3):
            for client in range(-45, 0):
                self.cluster.network.cut_both_ways(machine.id, client)
        self._later(50, 600, self.cluster.network.heal)
        return True

    def cut_one_way(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        others = [id for id in self.cluster.machines if id != machine.id]
        is_deaf = self.world.chance(0.5)
        self.world.note("FAULT one-way cut", machine.id, "deaf" if is_deaf else "mute")
        for other in others:
            source, target = (other, machine.id) if is_deaf else (machine.id, other)
            self.cluster.network.cut_one_way(source, target)
        self._later(50, 600, self.cluster.network.heal)
        return True

    def blind(self) -> bool:
        """It goes on serving what it believes to be its own, while the others may already have moved on."""
        machine = self._any_machine()
        if machine is None:
            return False
        self.world.note("FAULT cut from controllers", machine.id)
        self.cluster.network.blind.add(machine.id)
        self._later(100, 1_500, self._see, machine.id)
        return True

    def _see(self, id: int) -> None:
        self.cluster.network.blind.discard(id)

    def storm(self) -> bool:
        weather = self.cluster.network.weather
        self.world.note("FAULT storm")
        weather.drop_chance, weather.duplicate_chance, weather.slow_chance = _BAD_DROP, _BAD_DUPLICATE, 0.15
        weather.slow_ms = _STORM_SLOW_MS
        self._later(100, 600, self._calm)
        return True

    def _calm(self) -> None:
        weather = self.cluster.network.weather
        weather.drop_chance, weather.duplicate_chance, weather.slow_chance = 0.0, 0.0, 0.02
        weather.slow_ms = _SLOW_MS

    # --- disks and clocks ---

    def fill_disk(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        self.world.note("FAULT disk full", machine.id)
        machine.disk.is_full = True
        self._later(50, 400, self._free_disk, machine)
        return True

    def _free_disk(self, machine: Machine) -> None:
        machine.disk.is_full = False
        self.cluster.start(machine)

    def slow_disk(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        self.world.note("FAULT slow disk", machine.id)
        machine.disk.is_slow = True
        self._later(100, 600, self._speed_up, machine)
        return True

    def _speed_up(self, machine: Machine) -> None:
        machine.disk.is_slow = False

    def fail_sync(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        self.world.note("FAULT fsync error", machine.id)
        machine.disk.fails_next_sync = True
        self._later(100, 400, self._mend_sync, machine)
        return True

    def _mend_sync(self, machine: Machine) -> None:
        machine.disk.fails_next_sync = False
        self.cluster.start(machine)

    def flip_bit(self) -> bool:
        """In a batch that is committed, or in one that is not, of a partition that has other good copies."""
        machine = self._any_machine()
        if machine is None:
            return False
        logs = [
            (name, log)
            for name, log in machine.disk.logs.items()
            if isinstance(name, Key) and log.batches and self._has_other_copies(name, machine.id)
        ]
        if not logs:
            return False
        key, log = logs[self.world.draw(len(logs))]
        batch = log.batches[self.world.draw(len(log.batches))]
        self.world.note("FAULT bit flip", machine.id, key, batch)
        log.damaged[batch.base_offset] = None
        self.cluster.invariants.excuse(key, machine.id, is_damaged=True)
        return True

    def replace_disk(self) -> bool:
        machine = self._any_machine()
        if machine is None or not self._can_spare(machine):
            return False
        self.world.note("FAULT disk lost", machine.id)
        self.workload.keeps_voters |= machine.is_controller
        self.cluster.lose_disk(machine)
        self._later(5, 300, self.cluster.start, machine)
        return True

    def _can_spare(self, machine: Machine) -> bool:
        """Nothing may be lost for good: others have every partition, and most voters keep their disks."""
        if not all(
            self._has_other_copies(name, machine.id) for name in machine.disk.logs if isinstance(name, Key)
        ):
            return False
        if not machine.is_controller:
            return True
        active = self.cluster.active_controller()
        if active is None or self.workload.counts["voter changes asked"]:
            return False
        voters = active.quorum.core.voters.latest
        return len(voters) >= 3 and all(key == self.cluster.replica_key(key.id) for key in voters.keys)

    def _has_other_copies(self, key: Key, broker: int) -> bool:
        """min.insync.replicas promises that one copy less than that may be lost, if copies are synced."""
        invariants = self.cluster.invariants
        topic = invariants.image.topics_by_id.get(key.topic_id)
        if topic is None or key.partition not in topic.partitions:
            return True
        state = topic.partitions[key.partition]
        lost = {each for each in state.replicas if (key, each) in invariants.excused} | {broker}
        spare = min(self.cluster.rules.isr_min(invariants.image, topic.name), len(state.replicas)) - 1
        return len(lost) <= spare and self.cluster.rules.syncs_before_ack(invariants.image, topic.name)

    def jump_clock(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        by_ms = self.world.between(-20_000, 20_000)
        self.world.note("FAULT clock jump", machine.id, by_ms)
        machine.clock.jump(by_ms)
        return True

    # --- operators ---

    def reassign(self) -> bool:
        self.world.note("FAULT reassignment")
        self.workload.reassign()
        return True

    def elect(self) -> bool:
        self.world.note("FAULT preferred election")
        self.workload.elect_preferred()
        return True

    def change_voters(self) -> bool:
        self.world.note("FAULT voter change")
        self.workload.change_voters()
        return True
