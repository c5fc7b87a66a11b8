"""Faults drawn from the seed: kills, power losses, suspended processes, cuts, bad disks, clock jumps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.cluster.image import ResourceType
from penstock.cluster.topic_names import CLUSTER_METADATA, is_internal
from penstock.protocol.record_batch import iter_batches
from penstock.raft.types import ReplicaKey, Voter
from simulation.checks.committed import CommittedLogs
from simulation.client import Client, message
from simulation.cluster import Cluster
from simulation.engine.loop import OUTSIDE, Process
from simulation.engine.machine import NODE_PORT, Machine

_STORM_RESET_CHANCE: Final = 0.01
_CALM_SLOW_CHANCE: Final = 0.02
_CALM_SLOW_S: Final = (0.01, 0.06)
_STORM_SLOW_S: Final = (0.01, 0.25)
#: Damage to a topic of a coordinator shows when it is loaded; other topics have more partitions.
_INTERNAL_CHANCE: Final = 0.4
#: A batch begins with its base offset.
_OFFSET_BYTES: Final = 8


class Faults:
    def __init__(
        self,
        cluster: Cluster,
        committed: CommittedLogs,
        operator: Operator,
        clients: Callable[[], list[Client]],
        only: tuple[str, ...] = (),
        apis: tuple[int, ...] = (),
    ) -> None:
        """`only` names the kinds to use, `apis` the requests that may be late; empty: any."""
        self.cluster = cluster
        self.loop = cluster.loop
        self.committed = committed
        self.operator = operator
        self.clients = clients
        self.fired: Counter[str] = Counter()
        self._is_over = False
        #: A voter that was removed and one that lost its disk are two of three, so a run has one or the other.
        self._changes_voters = self._loses_disks = False
        self._pace_s = 0.2
        # Each run draws some of the kinds, so that every kind has runs with few others.
        chosen = [name for name in KINDS if self.loop.chance(0.5)] or ["kill"]
        self._chosen = only or chosen
        self._apis = apis
        assert set(only) <= set(KINDS), f"unknown faults: {only}"

    def start(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._later((0, pace_s), self._strike)

    def heal(self) -> None:
        """Repair everything that can be repaired, and start every machine."""
        self._is_over = True
        self.cluster.network.heal()
        self.cluster.network.troubled.clear()
        self._calm()
        for client in self.clients():
            self.loop.resume(client.process)
        for machine in self.cluster.machines.values():
            machine.disk.is_full = machine.disk.fails_next_sync = machine.disk.is_slow = False
            if machine.process is not None:
                self.loop.resume(machine.process)
            machine.restarts = True
            machine.start()

    def _strike(self) -> None:
        if self._is_over:
            return
        self._later((0, 2 * self._pace_s), self._strike)
        left = self.loop.draw(sum(KINDS[name].weight for name in self._chosen))
        for name in self._chosen:
            left -= KINDS[name].weight
            if left < 0:
                if KINDS[name].strike(self):
                    self.fired[name] += 1
                return

    def _later(self, seconds: tuple[float, float], call: Callable[..., None], *args: object) -> None:
        self.loop.call_later(self.loop.between(*seconds), call, *args, context=OUTSIDE)

    def _any_machine(self) -> Machine | None:
        """Often the machine of a leader."""
        running = [machine for machine in self.cluster.machines.values() if machine.is_running]
        if running and self.loop.chance(0.5):
            running = [machine for machine in running if self._leads(machine)] or running
        return running[self.loop.draw(len(running))] if running else None

    def _leads(self, machine: Machine) -> bool:
        node = machine.serving
        if node is None:
            return False
        return node.metadata.is_active or any(partition.is_leader for partition in node.partitions)

    # -- processes and machines ------------------------------------------------------------------------

    def kill(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        self.loop.note("FAULT kill", machine.node_id)
        machine.kill()
        self._later((0.01, 0.6), self._start, machine)
        return True

    def _start(self, machine: Machine) -> None:
        machine.start()

    def lose_power(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        self.loop.note("FAULT power loss", machine.node_id)
        machine.lose_power()
        self._later((0.01, 0.6), self._start, machine)
        return True

    def lose_power_everywhere(self) -> bool:
        self.loop.note("FAULT power loss everywhere")
        for machine in self.cluster.machines.values():
            machine.lose_power()
            self._later((0.01, 0.4), self._start, machine)
        return True

    def suspend(self) -> bool:
        machine = self._any_machine()
        if machine is None or machine.process is None:
            return False
        self.loop.note("FAULT suspend", machine.node_id)
        self.loop.suspend(machine.process)
        self._later((0.05, 1.4), self._resume, machine.process)
        return True

    def _resume(self, process: Process) -> None:
        if not process.is_over:
            self.loop.resume(process)

    def suspend_client(self) -> bool:
        clients = [client for client in self.clients() if not client.process.is_suspended]
        if not clients:
            return False
        client = clients[self.loop.draw(len(clients))]
        self.loop.note("FAULT client suspended", client.number)
        self.loop.suspend(client.process)
        self._later((0.3, 2.0), self._resume, client.process)
        return True

    def restart_cleanly(self) -> bool:
        machine = self._any_machine()
        if machine is None or machine.stop() is None:
            return False
        self.loop.note("FAULT clean restart", machine.node_id)
        self._later((0.8, 1.4), self._restart, machine)
        return True

    def _restart(self, machine: Machine) -> None:
        """Kill a node that has not stopped in time."""
        machine.kill()
        machine.start()

    # -- the network -----------------------------------------------------------------------------------

    def cut_off(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        others = [host for host in self.cluster.hosts if host != machine.host]
        if self.loop.chance(0.4):
            others = others[: 1 + self.loop.draw(len(others))]
        if self.loop.chance(0.3):
            others += [client.host for client in self.clients()]
        self.loop.note("FAULT cut", machine.node_id, "from", others)
        self.cluster.network.cut((machine.host,), others)
        self._later((0.1, 1.2), self.cluster.network.heal)
        return True

    def cut_one_way(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        hears, others = self.loop.chance(0.5), self.cluster.hosts
        self.loop.note("FAULT one-way cut", machine.node_id, "mute" if hears else "deaf")
        own = (machine.host,)
        self.cluster.network.cut(own if hears else others, others if hears else own, both_ways=False)
        self._later((0.1, 1.2), self.cluster.network.heal)
        return True

    def cut_from_controller(self) -> bool:
        """The node goes on serving clients and followers, while the controller elects other leaders."""
        machine, controller = self._any_machine(), self.cluster.active_controller()
        if machine is None or controller is None or controller.node_id == machine.node_id:
            return False
        self.loop.note("FAULT cut from the controller", machine.node_id)
        self.cluster.network.cut((machine.host,), (f"10.0.0.{controller.node_id}",))
        self._later((0.3, 2.0), self.cluster.network.heal)
        return True

    def storm(self) -> bool:
        network = self.cluster.network
        self.loop.note("FAULT storm")
        network.reset_chance, network.slow_chance, network.slow_s = _STORM_RESET_CHANCE, 0.15, _STORM_SLOW_S
        self._later((0.2, 1.0), self._calm)
        return True

    def _calm(self) -> None:
        network = self.cluster.network
        network.reset_chance, network.slow_chance, network.slow_s = 0.0, _CALM_SLOW_CHANCE, _CALM_SLOW_S

    def delay_requests(self) -> bool:
        """Requests of one API from one host come late or are lost, or their responses are."""
        network = self.cluster.network
        known = [
            (host, api_key)
            for host, api_keys in network.requests.items()
            for api_key in api_keys
            if not self._apis or api_key in self._apis
        ]
        if not known:
            return False
        host, api_key = known[self.loop.draw(len(known))]
        self.loop.note("FAULT late requests", host, "API", api_key)
        network.troubled.add((host, api_key))
        self._later((0.2, 1.5), network.troubled.discard, (host, api_key))
        return True

    # -- disks and clocks ------------------------------------------------------------------------------

    def fill_disk(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        self.loop.note("FAULT disk full", machine.node_id)
        machine.disk.is_full = True
        self._later((0.1, 0.8), self._free_disk, machine)
        return True

    def _free_disk(self, machine: Machine) -> None:
        machine.disk.is_full = False

    def slow_disk(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        self.loop.note("FAULT slow disk", machine.node_id)
        machine.disk.is_slow = True
        self._later((0.2, 1.2), self._speed_up, machine)
        return True

    def _speed_up(self, machine: Machine) -> None:
        machine.disk.is_slow = False

    def fail_sync(self) -> bool:
        """A failed sync ends the process; the next start finds what a power loss would have left."""
        machine = self._any_machine()
        if machine is None:
            return False
        self.loop.note("FAULT sync error", machine.node_id)
        machine.disk.fails_next_sync = True
        return True

    def flip_bit(self) -> bool:
        """Damage a batch of a partition that has other good copies."""
        machine = self._any_machine()
        node = None if machine is None else machine.serving
        if machine is None or node is None:
            return False
        candidates = [
            partition
            for partition in node.partitions
            if partition.log.end_offset > 0
            and partition.topic != CLUSTER_METADATA
            and self._has_other_copies(partition.topic, partition.index, machine.node_id)
        ]
        if not candidates:
            return False
        internal = [partition for partition in candidates if is_internal(partition.topic)]
        if internal and self.loop.chance(_INTERNAL_CHANCE):
            candidates = internal
        partition = candidates[self.loop.draw(len(candidates))]
        path = sorted(partition.log.directory.glob("*.log"))[0]
        size = path.stat().st_size
        if size == 0:
            return False
        self.loop.note("FAULT bit flip", machine.node_id, f"{partition.topic}-{partition.index}")
        self.committed.damaged.add((partition.topic_id, partition.index, machine.node_id))
        position = self.loop.draw(size)
        is_offset = _is_offset(path.read_bytes(), position)
        machine.disk.flip_bit(path, position)
        if is_offset:
            # No checksum covers it, so a running node cannot find the damage. Recovery can.
            machine.kill()
            self._later((0.01, 0.6), self._start, machine)
        return True

    def replace_disk(self) -> bool:
        machine = self._any_machine()
        if machine is None or self._changes_voters or not self._can_spare(machine):
            return False
        self._loses_disks = True
        self.loop.note("FAULT disk lost", machine.node_id)
        for topic in self.cluster.image.topics.values():
            for index in topic.partitions:
                self.committed.replaces_disk(topic.id, index, machine.node_id)
        machine.lose_disk()
        self._later((0.01, 0.6), self._start, machine)
        if self.loop.chance(0.5):
            # Another one fails before the first has come back: nothing more is lost, but too few are in sync.
            others = [each for each in self.cluster.machines.values() if each is not machine]
            self._later((0.0, 0.6), self._kill_for_long, others[self.loop.draw(len(others))])
        return True

    def _kill_for_long(self, machine: Machine) -> None:
        if machine.is_running and not self._is_over:
            self.loop.note("FAULT kill", machine.node_id)
            machine.kill()
            self._later((0.5, 1.2), self._start, machine)

    def _can_spare(self, machine: Machine) -> bool:
        """Whether other replicas hold everything that this machine holds."""
        if self.cluster.unhealthy() is not None or self.committed.excused:
            return False
        image = self.cluster.image
        if any(
            image.config(ResourceType.TOPIC, name).get("penstock.flush", "ack") != "ack"
            for name in image.topics
        ):
            return False  # with a power loss of the others, an operator has to decide
        return all(
            self._has_other_copies(topic, index, machine.node_id)
            for topic, index, state in self.cluster.partitions()
            if machine.node_id in state.replicas
        )

    def _has_other_copies(self, topic: str, index: int, node_id: int) -> bool:
        """min.insync.replicas promises that one replica fewer than that may be lost."""
        info = self.cluster.image.topics.get(topic)
        if info is None:
            return False
        state = info.partitions[index]
        lost = {each for each in state.replicas if (info.id, index, each) in self.committed.excused}
        return lost <= {node_id} and len(state.replicas) > 2 and len(state.isr) == len(state.replicas)

    def jump_clock(self) -> bool:
        machine = self._any_machine()
        if machine is None:
            return False
        machine.clock_skew_s = self.loop.between(-20, 20)
        self.loop.note("FAULT clock jump", machine.node_id, f"{machine.clock_skew_s:.3f}")
        return True

    # -- operators -------------------------------------------------------------------------------------

    def reassign(self) -> bool:
        self.loop.note("FAULT reassignment")
        return self.operator.reassign()

    def elect(self) -> bool:
        self.loop.note("FAULT preferred election")
        return self.operator.elect_preferred()

    def change_voters(self) -> bool:
        if self._loses_disks or self.cluster.unhealthy() is not None or not self.operator.change_voters():
            return False
        self._changes_voters = True
        return True

    def unregister(self) -> bool:
        """An operator takes a broker for gone that is not."""
        machine = self._any_machine()
        if machine is None:
            return False
        self.loop.note("FAULT broker unregistered", machine.node_id)
        self.operator.unregister(machine.node_id)
        return True

    def register_twice(self) -> bool:
        """A copy of a broker's data folder is started elsewhere, with the same node id."""
        machine = self._any_machine()
        if machine is None or machine.process is None:
            return False
        if self.loop.chance(0.5):
            # The first one only seems to have ended.
            self.loop.suspend(machine.process)
            self._later((0.25, 1.2), self._resume, machine.process)
        if not self.operator.register_copy(machine.node_id):
            return False
        self.loop.note("FAULT second broker with one id", machine.node_id)
        return True


def _is_offset(data: bytes, position: int) -> bool:
    """Whether this byte of a log is in the base offset of a batch."""
    start = 0
    for header, _ in iter_batches(data):
        if start <= position < start + header.size:
            return position < start + _OFFSET_BYTES
        start += header.size
    return False


class Kind(NamedTuple):
    """A kind of fault: `strike` returns False if it cannot occur now. Kinds with more weight occur more often."""

    strike: Callable[[Faults], bool]
    weight: int


KINDS: Final[dict[str, Kind]] = {
    "kill": Kind(Faults.kill, 5),
    "power loss": Kind(Faults.lose_power, 4),
    "power loss everywhere": Kind(Faults.lose_power_everywhere, 2),
    "suspend": Kind(Faults.suspend, 4),
    "cut": Kind(Faults.cut_off, 4),
    "one-way cut": Kind(Faults.cut_one_way, 3),
    "cut from the controller": Kind(Faults.cut_from_controller, 3),
    "storm": Kind(Faults.storm, 3),
    "late requests": Kind(Faults.delay_requests, 4),
    "disk full": Kind(Faults.fill_disk, 1),
    "slow disk": Kind(Faults.slow_disk, 2),
    "sync error": Kind(Faults.fail_sync, 1),
    "bit flip": Kind(Faults.flip_bit, 2),
    "clock jump": Kind(Faults.jump_clock, 1),
    "disk lost": Kind(Faults.replace_disk, 2),
    "clean restart": Kind(Faults.restart_cleanly, 2),
    "client suspended": Kind(Faults.suspend_client, 2),
    "reassignment": Kind(Faults.reassign, 2),
    "preferred election": Kind(Faults.elect, 1),
    "voter change": Kind(Faults.change_voters, 2),
    "second broker with one id": Kind(Faults.register_twice, 1),
    "broker unregistered": Kind(Faults.unregister, 1),
}


class Operator(Client):
    """Changes the cluster as an administrator would; it does not wait for the outcome."""

    def reassign(self) -> bool:
        partitions = [each for each in self.cluster.partitions() if len(each[2].replicas) > 1]
        if not partitions:
            return False
        # Several requests at once, so that one node waits for several images.
        node_id = self.any_node()
        for number in range(1 + self.loop.draw(3)):
            topic, index, state = partitions[self.loop.draw(len(partitions))]
            nodes = list(self.cluster.machines)
            self.loop.random.shuffle(nodes)
            replicas = tuple(nodes[: len(state.replicas)])
            self.spawn(self._reassign(node_id, topic, index, replicas, purpose=f"reassign {number}"))
        return True

    async def _reassign(
        self, node_id: int, topic: str, index: int, replicas: tuple[int, ...], *, purpose: str
    ) -> None:
        new = message(45, 0)
        part = new("ReassignablePartition", partition_index=index, replicas=replicas)
        request = new(
            "AlterPartitionReassignmentsRequest",
            timeout=timedelta(seconds=1),
            topics=(new("ReassignableTopic", name=topic, partitions=(part,)),),
        )
        await self.call(node_id, 45, 0, request, purpose=purpose)

    def elect_preferred(self) -> bool:
        self.spawn(self._elect())
        return True

    async def _elect(self) -> None:
        request = message(43, 2)(
            "ElectLeadersRequest", election_type=0, topic_partitions=None, timeout=timedelta(seconds=1)
        )
        await self.call(self.any_node(), 43, 2, request)

    def change_voters(self) -> bool:
        """Remove a voter of three, or two at once, of which one must wait; add a voter if there are fewer."""
        controller = self.cluster.active_controller()
        if controller is None:
            return False
        voters, nodes = controller.quorum.voters, self.cluster.serving()
        missing = [
            node.quorum for node in nodes if node.settings.is_controller and node.node_id not in voters
        ]
        cluster_id = controller.quorum.cluster_id
        if missing:
            quorum = missing[self.loop.draw(len(missing))]
            self.loop.note("FAULT voter change: add", quorum.local.id)
            self.spawn(self._add_voter(controller.node_id, cluster_id, Voter(quorum.local, quorum.addresses)))
            return True
        keys = list(voters.keys)
        if len(keys) < 3 or any(node.quorum.local not in keys for node in nodes):
            return False
        self.loop.random.shuffle(keys)
        for key in keys[: 1 + self.loop.draw(2)]:
            self.loop.note("FAULT voter change: remove", key.id)
            self.spawn(self._remove_voter(controller.node_id, cluster_id, key))
        return True

    async def _add_voter(self, node_id: int, cluster_id: str, voter: Voter) -> None:
        new = message(80, 1)
        request = new(
            "AddRaftVoterRequest",
            cluster_id=cluster_id,
            timeout=timedelta(seconds=1),
            voter_id=voter.key.id,
            voter_directory_id=voter.key.directory,
            listeners=tuple(
                new("Listener", name=at.name, host=at.host, port=at.port) for at in voter.addresses
            ),
        )
        await self.call(node_id, 80, 1, request, timeout_s=2.0, purpose="voters", port=NODE_PORT)

    async def _remove_voter(self, node_id: int, cluster_id: str, key: ReplicaKey) -> None:
        request = message(81, 0)(
            "RemoveRaftVoterRequest", cluster_id=cluster_id, voter_id=key.id, voter_directory_id=key.directory
        )
        await self.call(node_id, 81, 0, request, timeout_s=2.0, purpose=f"voters {key.id}")

    def unregister(self, broker_id: int) -> None:
        request = message(64, 0)("UnregisterBrokerRequest", broker_id=broker_id)
        self.spawn(self.call(self.any_node(), 64, 0, request))

    def register_copy(self, broker_id: int) -> bool:
        controller, known = self.cluster.active_controller(), self.cluster.image.brokers.get(broker_id)
        if controller is None or known is None:
            return False
        new = message(62, 4)
        request = new(
            "BrokerRegistrationRequest",
            broker_id=broker_id,
            cluster_id=controller.quorum.cluster_id,
            incarnation_id=UUID(int=self.loop.random.getrandbits(128), version=4),
            listeners=tuple(
                new("Listener", name=name, host="10.0.2.1", port=at.port, security_protocol=0)
                for name, at in known.endpoints.items()
            ),
            features=tuple(
                new("Feature", name=name, min_supported_version=lowest, max_supported_version=highest)
                for name, (lowest, highest) in known.features.items()
            ),
            rack=known.rack,
            log_dirs=known.log_dirs,
            previous_broker_epoch=known.epoch,
        )
        self.spawn(self._register_copy(controller.node_id, request))
        return True

    async def _register_copy(self, node_id: int, request: Any) -> None:
        for _ in range(3):
            await self.call(node_id, 62, 4, request, purpose="second broker", port=NODE_PORT)
            await asyncio.sleep(self.loop.between(0.05, 0.3))
