"""The machines of one world, what connects them, and the hands that start, stop and break them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from penstock.cluster.controller.decision import ControllerConfig
from penstock.raft.types import ReplicaKey, Voter, VoterSet
from simulation.clock import Clock
from simulation.disk import Disk
from simulation.invariants import Invariants
from simulation.metadata import Images
from simulation.network import Network, Weather
from simulation.node import CLEAN_FILE, Machine, Node
from simulation.quorum import METADATA, founding_batch
from simulation.replica import Key
from simulation.simlog import SimLog
from simulation.timings import WorldTimings
from simulation.world import Life, World

_DIRECTORIES: Final = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`voters` of the controllers found the quorum; the others may be added. Ids count from 1."""

    controllers: int = 3
    voters: int = 3
    #: Brokers beside the controllers, which are brokers too unless they are `dedicated`.
    brokers: int = 0
    dedicated: bool = False
    racks: int = 3
    clock_drift: float = 0.0


class Cluster:
    def __init__(self, world: World, shape: Shape, timings: WorldTimings) -> None:
        self.world = world
        self.shape = shape
        self.timings = timings
        self.network = Network(world, Weather())
        self.rules = ControllerConfig(heartbeat_interval_ms=timings.heartbeat_ms)
        self.images = Images()
        self.controllers = tuple(range(1, shape.controllers + 1))
        self.machines = {id: self._machine(id) for id in range(1, shape.controllers + shape.brokers + 1)}
        self.invariants = Invariants(self)
        self._replaced: set[int] = set()
        self.supervisor = Life("supervisor")
        #: The level of the feature that says how transactions run.
        self.transaction_version = 2
        #: What every process of this world has besides: called with each that starts.
        self.on_start: list[Callable[[Node], None]] = []
        #: How much one fetch brings; small worlds see what happens between two parts of a log.
        self.served_batches_max = 1 + world.draw(6)
        self._found()

    def _machine(self, id: int) -> Machine:
        shape, world = self.shape, self.world
        drift = (world.random.random() * 2 - 1) * shape.clock_drift
        skew_ms = world.between(-5_000, 5_000) if shape.clock_drift else 0
        return Machine(
            id,
            rack=f"rack{id % shape.racks}",
            disk=Disk(world, self.fresh_directory()),
            clock=Clock(world, rate=1 + drift, skew_ms=skew_ms),
            is_controller=id <= shape.controllers,
            is_broker=not (shape.dedicated and id <= shape.controllers),
        )

    def _found(self) -> None:
        founders = self.controllers[: self.shape.voters]
        voters = VoterSet(tuple(Voter(self.replica_key(id)) for id in founders))
        batch = founding_batch(voters)
        for id in founders:
            log = self.machines[id].disk.logs[METADATA] = SimLog((id, METADATA))
            log.append(batch)
            log.sync_begins()
            log.sync_ends()

    def fresh_directory(self) -> UUID:
        return UUID(int=_DIRECTORIES + self.world.serial())

    def replica_key(self, id: int) -> ReplicaKey:
        return ReplicaKey(id, self.machines[id].disk.directory)

    # --- looking ---

    @property
    def brokers(self) -> list[int]:
        return [machine.id for machine in self.machines.values() if machine.is_broker]

    def running(self) -> list[Node]:
        return [machine.node for machine in self.machines.values() if machine.node is not None]

    def active_controller(self) -> Node | None:
        active = [node for node in self.running() if node.metadata.is_active and not node.life.is_frozen]
        return max(active, key=lambda node: node.quorum.core.epoch, default=None)

    def leader_hint(self, key: Key) -> int:
        """What some node believes, as a client's metadata would."""
        nodes = self.running()
        if not nodes:
            return -1
        image = nodes[self.world.draw(len(nodes))].image
        topic = image.topics_by_id.get(key.topic_id)
        return (
            -1
            if topic is None or key.partition not in topic.partitions
            else topic.partitions[key.partition].leader
        )

    def leader_epoch(self, key: Key) -> int:
        """The newest; -1 where there is no such partition."""
        topic = self.invariants.image.topics_by_id.get(key.topic_id)
        return -1 if topic is None else topic.partitions[key.partition].leader_epoch

    def partitions(self, topic: str) -> list[Key]:
        found = self.invariants.image.topics.get(topic)
        return [] if found is None else [Key(found.id, index) for index in found.partitions]

    def is_replaced(self, id: int) -> bool:
        """Whether a machine has another disk than it began with."""
        return id in self._replaced

    # --- handling ---

    def start(self, machine: Machine) -> None:
        if machine.node is not None:
            return
        machine.has_power = True
        self.network.silent.discard(machine.id)
        machine.node = node = Node(self, machine)
        self.network.processes[machine.id] = node
        self.invariants.started(node)
        self.world.note("starts", machine.id)
        node.start()

    def restart_later(self, machine: Machine) -> None:
        """A supervisor starts what has ended itself."""
        self.world.after(self.world.between(20, 100), self.supervisor, self.start, machine)

    def end_process(self, machine: Machine) -> None:
        """kill -9: the page cache stays, peers see their connections close."""
        node, machine.node = machine.node, None
        if node is None:
            return
        node.life.is_over = True
        del self.network.processes[machine.id]
        machine.disk.process_died()
        self.network.ended(node.life)

    def lose_power(self, machine: Machine) -> None:
        """What was not synced may be gone; nobody is there even to close connections."""
        node, machine.node = machine.node, None
        if node is not None:
            node.life.is_over = True
            del self.network.processes[machine.id]
        machine.has_power = False
        self.network.silent.add(machine.id)
        self._excuse_unsynced(machine)
        machine.disk.power_lost()

    def _excuse_unsynced(self, machine: Machine) -> None:
        """Topics that do not sync before they acknowledge may lose what this machine held."""
        for name, log in machine.disk.logs.items():
            if isinstance(name, Key) and not log.is_synced_to_count and log.synced_offset < log.end_offset:
                self.invariants.excuse(name, machine.id)

    def lose_disk(self, machine: Machine) -> None:
        self.lose_power(machine)
        for name in machine.disk.logs:
            if isinstance(name, Key):
                self.invariants.excuse(name, machine.id)
        machine.disk.lost(self.fresh_directory())
        self._replaced.add(machine.id)

    def stop_cleanly(self, machine: Machine) -> None:
        """The end of a controlled shutdown: everything is synced, and the marker says so."""
        node = machine.node
        assert node is not None
        node.checkpoint()
        for log in machine.disk.logs.values():
            log.sync_begins()
            log.synced_offset = log.end_offset
        if not machine.disk.is_full:
            machine.disk.files[CLEAN_FILE] = True
        self.world.note("stopped cleanly", machine.id)
        self.end_process(machine)
