"""One simulated machine, and the process on it: quorum member, metadata follower, controller and broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from penstock.cluster.image import ClusterImage, ImageDelta, PartitionState
from penstock.cluster.topic_settings import effective_isr_min
from penstock.protocol.errors import ApiError, ErrorCode
from simulation.clock import Clock
from simulation.controller import Controller
from simulation.coordinator import Coordinator
from simulation.disk import Disk, DiskFull
from simulation.fetching import Fetcher, Fetches, followed_leaders
from simulation.isr import propose_isr
from simulation.kinds import KINDS
from simulation.lifecycle import Lifecycle
from simulation.metadata import Metadata
from simulation.network import IN_ORDER, OnReply, Respond
from simulation.quorum import METADATA, SNAPSHOT_FILE, Quorum
from simulation.replica import Key, Replica
from simulation.simlog import SimLog
from simulation.world import Life

if TYPE_CHECKING:
    from simulation.cluster import Cluster

HIGH_WATERMARKS: Final = "replication-offset-checkpoint"
BOOT_FILE: Final = "boot"
CLEAN_FILE: Final = "clean"


class Machine:
    """What outlives a process: an id, a rack, a disk and a clock."""

    def __init__(
        self, id: int, *, rack: str, disk: Disk, clock: Clock, is_controller: bool, is_broker: bool
    ) -> None:
        self.id = id
        self.rack = rack
        self.disk = disk
        self.clock = clock
        self.is_controller = is_controller
        self.is_broker = is_broker
        self.node: Node | None = None
        self.has_power = True

    def __repr__(self) -> str:
        return f"<Machine {self.id} {self.disk}>"


class Node:
    def __init__(self, cluster: Cluster, machine: Machine) -> None:
        self.cluster = cluster
        self.machine = machine
        self.id = machine.id
        self.world = cluster.world
        self.timings = cluster.timings
        self.invariants = cluster.invariants
        self.incarnation = UUID(int=self.world.random.getrandbits(100) + 1)
        self.life = Life(f"node {self.id}")
        disk = machine.disk
        self.was_clean = self.find_clean(disk)
        disk.logs.setdefault(METADATA, SimLog((self.id, METADATA)))
        self.replicas: dict[Key, Replica] = {}
        self._fetchers: dict[int, tuple[Fetcher, Any]] = {}
        self.fetches = Fetches(self)
        self.metadata = Metadata(self, disk.files.get(SNAPSHOT_FILE))
        self.controller = Controller(self)
        self.lifecycle = Lifecycle(self)
        #: What else this process answers, by the kind of the question.
        self.services: dict[str, Callable[[Any, Respond], None]] = {}
        #: Called with each replica that begins to lead.
        self.on_lead: list[Callable[[Replica], None]] = []
        for extend in cluster.on_start:
            extend(self)
        self.quorum = Quorum(self, is_controller=machine.is_controller, bootstrap=cluster.controllers)

    def __repr__(self) -> str:
        return f"<Node {self.id} {self.lifecycle} {list(self.replicas.values())}>"

    def start(self) -> None:
        self.quorum.start()
        if self.machine.is_broker:
            self.lifecycle.start()
            self.after(self.world.between(1, self.timings.care_ms), self._care)
            self.after(self.timings.checkpoint_ms, self._checkpoint_sometimes)

    # --- the world ---

    def now_ms(self) -> int:
        return self.machine.clock.monotonic_ms()

    def after(self, delay_ms: int, call: Callable[..., None], *args: Any) -> None:
        self.world.after(delay_ms, self.life, call, *args)

    def call(
        self, target: int, kind: str, request: Any, on_reply: OnReply, timeout_ms: int | None = None
    ) -> None:
        timeout_ms = self.timings.request_ms if timeout_ms is None else timeout_ms
        self.cluster.network.call(self.id, self.life, target, kind, request, on_reply, timeout_ms)

    def call_controller(self, kind: str, request: Any, on_reply: Callable[[Any], None]) -> None:
        """None when there was no answer, or nobody to ask."""
        if self.metadata.leader_id < 0:
            self.after(1, on_reply, None)
        else:
            self.call(self.metadata.leader_id, kind, request, lambda reply, _: on_reply(reply))

    def sync(self, log: SimLog, then: Callable[[], None]) -> None:
        if not self.life.is_over:
            self.machine.disk.sync(self.life, log, then, lambda: self.fail("fsync failed", power_lost=True))

    def fail(self, why: str, *, power_lost: bool = False) -> None:
        """The process ends itself. After a failed fsync nothing unsynced can be trusted to be anywhere."""
        if self.life.is_over:
            return
        self.world.note("process ends", self.id, why)
        self.cluster.end_process(self.machine)
        self.mark_stop(self.machine.disk)
        if power_lost:
            self.cluster.lose_power(self.machine)
        self.cluster.restart_later(self.machine)

    def find_clean(self, disk: Disk) -> bool:
        """Whether nothing that the last run wrote can be lost: it stopped cleanly, or the machine ran on."""
        return disk.files.pop(CLEAN_FILE, None) is not None or disk.files.get(BOOT_FILE) == disk.boot

    def note_boot(self) -> None:
        """Not before the cluster has been told of a doubt: a start that got no further must leave it standing."""
        self.machine.disk.files[BOOT_FILE] = self.machine.disk.boot

    def mark_stop(self, disk: Disk) -> None:
        """A process that gives up leaves no clean-shutdown marker."""
        disk.files.pop(CLEAN_FILE, None)

    def receive(self, kind: str, request: Any, respond: Respond) -> None:
        match kind:
            case "raft":
                self.quorum.received(request, respond)
            case "fetch":
                self.fetches.received(request, respond)
            case "produce" | "consume" | "latest" | "group" | "group_read":
                self._serve_client(kind, request, respond)
            case _ if kind.endswith(IN_ORDER):
                self.receive(kind.removesuffix(IN_ORDER).rstrip(), request, respond)
            case _ if kind in self.services:
                self.services[kind](request, respond)
            case _:
                self.controller.receive(kind, request, respond)

    # --- clients ---

    def _serve_client(self, kind: str, request: Any, respond: Respond) -> None:
        try:
            replica = self.replica(request[0])
            match kind:
                case "produce":
                    replica.produce(request, lambda error, base: respond((error, base)))
                case "consume":
                    respond((ErrorCode.none, replica.consume(request[1])))
                case "latest":
                    respond((ErrorCode.none, replica.latest_offset()))
                case "group":
                    self.coordinator(replica).submit(request[1], respond)
                case "group_read":
                    self.coordinator(replica).read(request[1], respond)
        except ApiError as error:
            respond(error.code if kind.startswith("group") else (error.code, None))
        except DiskFull:
            respond((ErrorCode.kafka_storage_error, None))

    def replica(self, key: Key) -> Replica:
        """Raises ApiError."""
        replica = self.replicas.get(key)
        if replica is None:
            raise ApiError(ErrorCode.not_leader_or_follower)
        return replica

    def coordinator(self, replica: Replica) -> Coordinator:
        """The one that lives on this partition, loaded if need be. Raises ApiError."""
        replica.require_leader()
        if replica.coordinator is None or replica.coordinator.is_closed:
            kind = KINDS[replica.topic]
            replica.coordinator = kind.runtime(replica, kind.new_shard)
            if kind.serve is not None:
                # A moment later: one that cannot write is loaded again at once, and fails again at its first step.
                self.after(self.world.between(1, 15), kind.serve, replica.coordinator)
        return replica.coordinator

    def coordinate(self, key: Key) -> Coordinator:
        """Raises ApiError."""
        return self.coordinator(self.replica(key))

    def leads(self, replica: Replica) -> None:
        """Some coordinators have work that nobody asks for: what the last one left undone."""
        kind = KINDS.get(replica.topic)
        if kind is not None and kind.serve is not None:
            self.after(1, self._begin_coordinating, replica, replica.leading)
        for begin in self.on_lead:
            begin(replica)

    def _begin_coordinating(self, replica: Replica, rules: Any) -> None:
        if replica.leading is rules:
            self.coordinator(replica)

    # --- partitions ---

    @property
    def image(self) -> ClusterImage:
        return self.metadata.image

    def image_changed(self, delta: ImageDelta) -> None:
        """Partitions follow the image once this incarnation is registered in it."""
        if not self.lifecycle.follows_image():
            return
        for topic in delta.topics_deleted:
            for index in topic.partitions:
                self._drop(Key(topic.id, index))
        for name, index in delta.partitions_changed:
            topic_id = self.image.topics[name].id
            self._follow(name, Key(topic_id, index), self.image.topics[name].partitions[index])
        if delta.partitions_changed or delta.topics_deleted:
            self._refresh_fetchers()

    def open_partitions(self) -> None:
        """All that the image gives to this broker, the first time that it may act on it."""
        for topic in self.image.topics.values():
            for index, state in topic.partitions.items():
                self._follow(topic.name, Key(topic.id, index), state, is_start=True)
        self._refresh_fetchers()

    def _follow(self, topic: str, key: Key, state: PartitionState, *, is_start: bool = False) -> None:
        replica = self.replicas.get(key)
        if self.id not in state.replicas:
            if replica is not None or key in self.machine.disk.logs:
                self._drop(key)
            return
        if replica is None:
            replica = self.replicas[key] = self._open(topic, key, state, is_start)
        if replica.is_damaged and self.id not in (*state.isr, *state.elr):
            self._start_over(replica)
        replica.assume(state)

    def _open(self, topic: str, key: Key, state: PartitionState, is_start: bool) -> Replica:
        logs = self.machine.disk.logs
        is_missing = key not in logs
        if is_missing:
            syncs = self.cluster.rules.syncs_before_ack(self.image, topic)
            logs[key] = SimLog((self.id, key), is_synced_to_count=syncs)
        logs[key].reopened()
        replica = Replica(self, key, topic, logs[key])
        checkpoint = self.machine.disk.files.get(HIGH_WATERMARKS, {})
        replica.log.high_watermark = min(checkpoint.get(key, 0), replica.log.end_offset)
        was_in_sync = self.id in (*state.isr, *state.elr)
        # What was made for us before we could see it is empty everywhere; what we had and lost is not.
        if replica.log.damaged or (is_missing and is_start and was_in_sync and state.partition_epoch > 0):
            self.found_damage(replica)
        return replica

    def _drop(self, key: Key) -> None:
        replica = self.replicas.pop(key, None)
        if replica is not None:
            replica.give_up()
            self.fetches.wake(key)
        self.machine.disk.logs.pop(key, None)

    def _refresh_fetchers(self) -> None:
        followed = followed_leaders(self.replicas)
        for leader_id, what in followed.items():
            fetcher, known = self._fetchers.get(leader_id, (None, None))
            if fetcher is None:
                fetcher = Fetcher(self, leader_id)
            if known != what:
                self._fetchers[leader_id] = (fetcher, what)
                fetcher.changed()
        for leader_id in [leader_id for leader_id in self._fetchers if leader_id not in followed]:
            fetcher, _ = self._fetchers.pop(leader_id)
            fetcher.changed()

    def found_damage(self, replica: Replica) -> None:
        """It neither leads nor follows until the controller has taken it out of the in-sync set."""
        if not replica.is_damaged:
            self.world.note("damage found", self.id, replica)
            replica.is_damaged = True
            replica.give_up()
            self.lifecycle.report_lost(replica.key)

    def _start_over(self, replica: Replica) -> None:
        self.world.note("starts over", self.id, replica.key)
        replica.log.restart(0, 0)
        replica.log.high_watermark = 0
        replica.is_damaged = False
        replica.state = None

    # --- care ---

    def isr_min(self, topic: str, state: PartitionState) -> int:
        return effective_isr_min(self.cluster.rules.isr_min(self.image, topic), state)

    def is_eligible(self, broker_id: int, broker_epoch: int) -> bool:
        broker = self.image.brokers.get(broker_id)
        return broker is not None and broker.is_active and broker.epoch == broker_epoch

    def broker_epoch(self, broker_id: int) -> int | None:
        broker = self.image.brokers.get(broker_id)
        return None if broker is None else broker.epoch

    def propose_isr(self, replica: Replica) -> None:
        propose_isr(self, replica)

    def _care(self) -> None:
        for replica in tuple(self.replicas.values()):
            if replica.leading is not None:
                propose_isr(self, replica)
        self.after(self.timings.care_ms, self._care)

    def _checkpoint_sometimes(self) -> None:
        self.checkpoint()
        self.after(self.timings.checkpoint_ms, self._checkpoint_sometimes)

    def checkpoint(self) -> None:
        if not self.lifecycle.is_open:
            return  # what an earlier process wrote down is better than nothing
        self.machine.disk.files[HIGH_WATERMARKS] = {
            key: replica.log.high_watermark for key, replica in self.replicas.items()
        }
