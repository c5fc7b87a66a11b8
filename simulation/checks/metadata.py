"""Observes the metadata quorum: an epoch has one leader, and committed metadata stays and is the same everywhere.

The check replays committed metadata into an image of its own, record by record. It compares that image with what nodes
publish, and judges the controller's decisions by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.broker.controller.controller import Controller
from penstock.broker.partition.replica_manager import ReplicaManager
from penstock.broker.quorum.driver import QuorumDriver
from penstock.broker.quorum.metadata_log import MetadataLog
from penstock.broker.quorum.quorum import Quorum
from penstock.broker.quorum.snapshots import iter_metadata
from penstock.broker.quorum.storage import MetadataLogView, load_election
from penstock.cluster.controller import alter_partition, brokers, heartbeats
from penstock.cluster.controller.decision import Decision, DecisionOrSteps
from penstock.cluster.controller.heartbeats import BrokerSessions
from penstock.cluster.controller.partition_change import PartitionChanges, all_partitions
from penstock.cluster.image import BrokerState, ClusterImage, PartitionState, ResourceType
from penstock.cluster.metadata_records import MetadataRecord, PartitionChangeRecord
from penstock.log.log import Log
from penstock.protocol.record_batch import BatchHeader, iter_batches
from penstock.protocol.steps import Steps
from penstock.raft import leader
from penstock.raft.state import RaftState
from penstock.raft.types import ReplicaKey, VoteRequest
from simulation.checks.committed import CommittedLogs
from simulation.cluster import SETTINGS
from simulation.engine.loop import CURRENT, Process

_READ_BYTES: Final = 1 << 22
_HEARTBEAT_MS: Final = int(SETTINGS["broker.heartbeat.interval.ms"])
_TICK_MS: Final = _HEARTBEAT_MS // 4
_ROUNDING_MS: Final = 2


class _Decided(NamedTuple):
    offset: int
    record: MetadataRecord


class CommittedMetadata:
    def __init__(self, committed: CommittedLogs) -> None:
        self.cluster = committed.cluster
        self.loop = committed.cluster.loop
        self._partitions = committed
        self.end_offset = 0
        self._newest_epoch = -1  # of the last committed batch
        self.image = ClusterImage()
        self._images: dict[int, ClusterImage] = {-1: self.image}  # by the last offset of each batch
        self._batches: dict[int, tuple[int, int, int]] = {}  # by base offset
        self._records: dict[int, MetadataRecord] = {}
        self._logs: dict[ReplicaKey, Log] = {}
        self._compared: dict[Log, int] = {}
        self._leaders: dict[int, tuple[int, Process | None]] = {}  # by epoch
        self._votes: dict[tuple[ReplicaKey, int], ReplicaKey] = {}
        self._heard_ms: dict[tuple[int, int, int], int] = {}  # by controller, broker and broker epoch
        self._active_ms: dict[int, int] = {}  # by controller: since when
        self._publishing: dict[int, ClusterImage] = {}
        self._followed: dict[int, ClusterImage] = {}
        #: By the id of a record that changes a partition: the record, and the image that it was decided on.
        self._bases: dict[int, tuple[Any, ClusterImage]] = {}

    @contextmanager
    def observing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, wrapper in (
                (Quorum, "open", self._open),
                (Quorum, "leader_changed", self._leader_changed),
                (Quorum, "committed", self._committed),
                (RaftState, "raise_high_watermark", self._raise_high_watermark),
                (leader, "_append_change", self._append_change),
                (leader, "_record_fetch", self._record_fetch),
                (QuorumDriver, "received", self._received),
                (QuorumDriver, "_begin_sending", self._begin_sending),
                (MetadataLog, "propose", self._propose),
                (MetadataLog, "_publish", self._publish),
                (MetadataLog, "_follow_first_image", self._follow_first_image),
                (ReplicaManager, "apply", self._apply),
                (Controller, "_contacted", self._contacted),
                (Controller, "became_active", self._became_active),
                (BrokerSessions, "expired", self._expired),
                (brokers, "register_broker", self._register_broker),
                (heartbeats, "heartbeat", self._heartbeat),
                (alter_partition, "_alter_one", self._alter_one),
                (PartitionChanges, "decision", self._decision),
            ):
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, wrapper(original))
            yield

    # -- elections -------------------------------------------------------------------------------------

    def _open(self, original: Callable[..., None]) -> Callable[..., None]:
        def open_observed(quorum: Quorum) -> None:
            original(quorum)
            self._logs[quorum.local] = quorum.state.log

        return open_observed

    def _leader_changed(self, original: Callable[..., None]) -> Callable[..., None]:
        def leader_changed(quorum: Quorum, leader_id: int, epoch: int) -> None:
            if leader_id >= 0:
                self._leader_is(quorum, leader_id, epoch)
            original(quorum, leader_id, epoch)

        return leader_changed

    def _leader_is(self, quorum: Quorum, leader_id: int, epoch: int) -> None:
        is_own = leader_id == quorum.local.id and quorum.is_leader
        process = CURRENT.get() if is_own else None
        known_id, known_process = self._leaders.setdefault(epoch, (leader_id, process))
        if known_id != leader_id or (process is not None and known_process not in (None, process)):
            raise self.loop.fail("one quorum leader per epoch", f"epoch {epoch}: {known_id} and {leader_id}")
        if process is not None:
            self._leaders[epoch] = (leader_id, process)

    def _received(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def received(driver: QuorumDriver, request: Any) -> Any:
            token = original(driver, request)
            if isinstance(request, VoteRequest) and not request.pre_vote:
                token.add_done_callback(lambda done: self._answered(driver, request, done))
            return token

        return received

    def _answered(self, driver: QuorumDriver, request: VoteRequest, done: Any) -> None:
        if not done.cancelled() and done.result().granted:
            self._voted(driver, request.epoch, request.candidate)

    def _begin_sending(self, original: Callable[..., None]) -> Callable[..., None]:
        def begin_sending(driver: QuorumDriver, send: Any) -> None:
            request = send.request
            if isinstance(request, VoteRequest) and not request.pre_vote:
                self._voted(driver, request.epoch, driver.core.local)
            original(driver, send)

        return begin_sending

    def _voted(self, driver: QuorumDriver, epoch: int, candidate: ReplicaKey) -> None:
        """A vote leaves the node. A candidate that is no voter votes for itself too, which does not count."""
        local = driver.core.local
        known = self._votes.setdefault((local, epoch), candidate)
        if known != candidate:
            raise self.loop.fail(
                "one vote per epoch", f"{local} votes for {known} and {candidate} in {epoch}"
            )
        saved = load_election(driver.log.directory)
        if saved is None or saved.epoch < epoch or (saved.epoch == epoch and saved.voted != candidate):
            raise self.loop.fail(
                "votes are on disk", f"{local} votes for {candidate} in {epoch}, saved {saved}"
            )

    # -- the log ---------------------------------------------------------------------------------------

    def _raise_high_watermark(self, original: Callable[..., None]) -> Callable[..., None]:
        def raise_high_watermark(raft: RaftState, offset: int) -> None:
            if raft.leader is not None and offset > (raft.high_watermark or 0):
                assert isinstance(raft.log, MetadataLogView)
                self._check_majority(raft, raft.log._log, offset)
                self._compare(raft.log._log, offset, may_extend=True)
            original(raft, offset)

        return raise_high_watermark

    def _committed(self, original: Callable[..., None]) -> Callable[..., None]:
        def committed(quorum: Quorum, offset: int) -> None:
            self._compare(quorum.state.log, offset, may_extend=False)
            original(quorum, offset)

        return committed

    def _check_majority(self, raft: RaftState, log: Log, offset: int) -> None:
        """A leader commits with a record of its own epoch, which most voters have synced."""
        epoch = log.epochs.epoch_at(offset - 1)
        if epoch != raft.epoch:
            raise self.loop.fail(
                "leaders commit in their own epoch", f"{raft} commits {offset} of epoch {epoch}"
            )
        voters = raft.voters.latest
        holders = [key for key in voters.keys if self._holds(key, offset, epoch)]
        if len(holders) < voters.majority:
            raise self.loop.fail("a majority holds committed metadata", f"{raft} commits {offset}: {holders}")

    def _append_change(self, original: Callable[..., None]) -> Callable[..., None]:
        def append_change(raft: RaftState, change: Any) -> None:
            if raft.voters.latest_offset >= (raft.high_watermark or 0):
                raise self.loop.fail("one voter change at a time", f"{raft}: {raft.voters}, then {change}")
            original(raft, change)

        return append_change

    def _record_fetch(self, original: Callable[..., None]) -> Callable[..., None]:
        def record_fetch(raft: RaftState, request: Any) -> None:
            original(raft, request)
            assert isinstance(raft.log, MetadataLogView)
            self._check_counted(raft, raft.log._log, request)

        return record_fetch

    def _check_counted(self, raft: RaftState, own: Log, request: Any) -> None:
        """A leader counts what another node has synced, and the same history."""
        log, offset = self._logs.get(request.replica), request.offset
        if log is None or offset > own.end_offset or offset <= max(own.start_offset, log.start_offset):
            return
        epoch = own.epochs.epoch_at(offset - 1)
        if log.synced.offset < offset or log.epochs.epoch_at(offset - 1) != epoch:
            raise self.loop.fail(
                "quorum leaders count what others hold",
                f"{raft} counts {request}; {log} has synced {log.synced}, and {offset} is of epoch {epoch}",
            )

    def _holds(self, key: ReplicaKey, offset: int, epoch: int) -> bool:
        log = self._logs.get(key)
        if log is None:
            # The voter was added without its directory, or has not opened its log yet.
            return key.directory is None
        return log.synced.offset >= offset and (
            log.start_offset >= offset or log.epochs.epoch_at(offset - 1) == epoch
        )

    def _compare(self, log: Log, offset: int, *, may_extend: bool) -> None:
        """Compare everything that a node counts as committed."""
        if offset > self.end_offset and not may_extend:
            raise self.loop.fail(
                "only leaders commit metadata", f"{log} is committed up to {offset}, not {self.end_offset}"
            )
        position = max(self._compared.get(log, 0), log.start_offset)
        while position < offset:
            piece = log.read(position, _READ_BYTES, log.end)
            before = position
            for header, batch in iter_batches(piece.data):
                if header.base_offset >= offset:
                    break
                if header.last_offset >= position:
                    self._compare_batch(log, header, batch)
                    position = header.last_offset + 1
            if position == before:
                break
        self._compared[log] = position

    def _compare_batch(self, log: Log, header: BatchHeader, batch: memoryview) -> None:
        essence = (header.last_offset, header.leader_epoch, header.crc)
        if header.base_offset >= self.end_offset:
            self._batches[header.base_offset] = essence
            self.end_offset = header.last_offset + 1
            self._newest_epoch = header.leader_epoch
            self._replay(header, batch)
        elif self._batches.get(header.base_offset) != essence:
            raise self.loop.fail(
                "committed metadata does not change",
                f"{log} has {header} where {self._batches.get(header.base_offset)} is committed",
            )

    # -- decisions -------------------------------------------------------------------------------------

    def _replay(self, header: BatchHeader, batch: memoryview) -> None:
        image = self.image.fork()
        registered: set[int] = set()
        changed: dict[tuple[UUID, int], None] = {}
        for place, record in enumerate([] if header.is_control else iter_metadata(batch)):
            self._records[header.base_offset + place] = record
            if not isinstance(record, PartitionChangeRecord):
                known = dict(image.brokers)
                for id in image.apply((record,)).brokers_changed:
                    self._broker_changed(known.get(id), image.brokers.get(id))
                    registered.add(id)
                continue
            topic = image.topics_by_id[record.topic_id]
            old = topic.partitions[record.partition_id]
            image.apply((record,))
            new = image.topics_by_id[record.topic_id].partitions[record.partition_id]
            self._partition_changed(topic.name, topic.id, record.partition_id, old, new)
            changed[topic.id, record.partition_id] = None
        for topic, index, state in all_partitions(image):
            if (topic.id, index) in changed or registered & {*state.isr, *state.elr}:
                self._check_active(topic.name, index, state, image)
                self._partitions.may_lead(topic, index, image.brokers)
        self.image = self._images[header.last_offset] = image

    def _broker_changed(self, old: BrokerState | None, new: BrokerState | None) -> None:
        if old is None or new is None or not old.fenced or new.fenced:
            return
        node = self.cluster.machines[new.id].node
        if node is None or node.lifecycle.incarnation != new.incarnation:
            return  # it has ended since
        if not node.metadata._is_following or node.metadata.applied_offset < new.epoch:
            raise self.loop.fail("brokers are ready when they are unfenced", f"{new}: {node.metadata}")

    def _partition_changed(
        self, name: str, topic_id: Any, index: int, old: PartitionState, new: PartitionState
    ) -> None:
        is_new = new.leader != old.leader
        if new.leader_epoch < old.leader_epoch or (is_new and new.leader_epoch == old.leader_epoch):
            raise self.loop.fail("leader epochs grow", f"{name}-{index}: {old} -> {new}")
        if new.leader_recovering and not self._syncs_before_ack(name):
            self._partitions.gives_up(topic_id, index)
            return  # the last complete replica may just have reported that it lost power
        if not is_new or not new.has_leader or new.leader in (*old.isr, *old.elr):
            return
        complete = [
            replica
            for replica in (*old.isr, *old.elr)
            if (topic_id, index, replica) not in self._partitions.excused
        ]
        if complete:
            raise self.loop.fail("no unclean election without need", f"{name}-{index}: {old} -> {new}")

    def _check_active(self, name: str, index: int, state: PartitionState, image: ClusterImage) -> None:
        active = {broker.id for broker in image.brokers.values() if broker.is_active}
        inactive = {*state.isr, state.leader} - {-1} - active
        if inactive:
            raise self.loop.fail(
                "leaders and in-sync replicas are active", f"{name}-{index}: {inactive} of {state}"
            )

    def _syncs_before_ack(self, topic: str) -> bool:
        return self.image.config(ResourceType.TOPIC, topic).get("penstock.flush", "ack") == "ack"

    def _propose(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def propose(metadata: MetadataLog, decide: Callable[[ClusterImage], Any]) -> Any:
            decided: _Decided | None = None

            def note(decision: Decision[Any], image: ClusterImage, first_offset: int) -> Decision[Any]:
                nonlocal decided
                self._check_base(decision, image)
                if decision.records:
                    last = len(decision.records) - 1
                    decided = _Decided(first_offset + last, decision.records[last])
                return decision

            def note_steps(
                steps: Steps[Decision[Any]], image: ClusterImage, first_offset: int
            ) -> Steps[Decision[Any]]:
                return note((yield from steps), image, first_offset)

            def deciding(image: ClusterImage) -> DecisionOrSteps[Any]:
                first_offset, made = metadata.next_offset, decide(image)
                noting = note if isinstance(made, Decision) else note_steps
                return noting(made, image, first_offset)

            reply = await original(metadata, deciding)
            if decided is not None:
                self._check_answered(metadata, decided)
            return reply

        return propose

    def _decision(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def decision(changes: PartitionChanges, *args: Any, **rest: Any) -> Any:
            made = original(changes, *args, **rest)
            for record in changes.records:
                self._bases[id(record)] = (record, changes.image)
            return made

        return decision

    def _check_base(self, decision: Any, image: ClusterImage) -> None:
        """Every decision is made on the state that the decisions before it have left."""
        for change in decision.records:
            made_on = self._bases.get(id(change))
            if made_on is not None and made_on[1] is not image and made_on[1] != image:
                raise self.loop.fail("decisions are made on the newest state", f"{decision} on {made_on[1]}")

    def _alter_one(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def alter_one(changes: PartitionChanges, item: Any, broker_id: int) -> Any:
            before = len(changes.records)
            result = original(changes, item, broker_id)
            if len(changes.records) > before:
                old = changes.image.topics_by_id[item.topic_id].partitions[item.partition]
                known = changes.image.brokers
                if (item.leader_epoch, item.partition_epoch) != (old.leader_epoch, old.partition_epoch):
                    raise self.loop.fail("leaders change the in-sync set that they know", f"{item}: {old}")
                for member in item.isr:
                    if member.broker_epoch not in (-1, known[member.broker_id].epoch):
                        raise self.loop.fail(
                            "replicas join by fetches of their current epoch",
                            f"{item}: {known[member.broker_id]}",
                        )
            return result

        return alter_one

    def _heartbeat(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def heartbeat(image: ClusterImage, sessions: BrokerSessions, beat: Any, **rest: Any) -> Any:
            decision = original(image, sessions, beat, **rest)
            known = image.brokers[beat.broker_id]
            if known.epoch != beat.broker_epoch:
                raise self.loop.fail("heartbeats of another broker epoch are refused", f"{beat}: {known}")
            return decision

        return heartbeat

    def _check_answered(self, metadata: MetadataLog, decided: _Decided) -> None:
        if self._records.get(decided.offset) != decided.record:
            found = self._records.get(decided.offset)
            raise self.loop.fail(
                "answered decisions are committed", f"{decided} is answered, committed: {found}"
            )
        if metadata.applied_offset < decided.offset:
            raise self.loop.fail("answered decisions are published", f"{decided} is answered by {metadata}")

    def _contacted(self, original: Callable[..., None]) -> Callable[..., None]:
        def contacted(controller: Any, beat: Any, connection: Any) -> None:
            self._heard_ms[_node_id(), beat.broker_id, beat.broker_epoch] = self.loop.now_ms
            original(controller, beat, connection)

        return contacted

    def _became_active(self, original: Callable[..., None]) -> Callable[..., None]:
        def became_active(controller: Controller) -> None:
            self._active_ms[_node_id()] = self.loop.now_ms
            metadata = controller._metadata
            # What earlier leaders have committed is certain only once the new epoch has begun.
            if metadata.image != self.image or metadata._epoch != self._newest_epoch:
                raise self.loop.fail(
                    "a controller knows what was decided before it", f"{metadata}, {self.image}"
                )
            original(controller)

        return became_active

    def _expired(self, original: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def expired(sessions: BrokerSessions, image: ClusterImage, now_ms: int) -> list[int]:
            silent = original(sessions, image, now_ms)
            for broker in silent:
                heard_ms = self._heard_ms.get((_node_id(), broker, image.brokers[broker].epoch), 0)
                since_ms = max(heard_ms, self._active_ms.get(_node_id(), 0))
                silent_ms = self.loop.now_ms - since_ms - _suspended_ms(since_ms)
                if silent_ms < 2 * _HEARTBEAT_MS - _ROUNDING_MS:
                    raise self.loop.fail(
                        "only silent brokers are fenced", f"{broker} was silent for {silent_ms} ms"
                    )
            return silent

        return expired

    def _register_broker(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register_broker(image: ClusterImage, registration: Any, **rest: Any) -> Any:
            decision = original(image, registration, **rest)
            known = image.brokers.get(registration.broker_id)
            if decision.records and known is not None and not known.fenced:
                self._check_replaced(known, registration)
            return decision

        return register_broker

    def _check_replaced(self, known: Any, registration: Any) -> None:
        machine = self.cluster.machines[known.id]
        node, process = machine.node, machine.process
        if (
            node is None
            or process is None
            or process.is_suspended
            or node.lifecycle.incarnation != known.incarnation
        ):
            return
        heard_ms = self._heard_ms.get((_node_id(), known.id, known.epoch))
        if heard_ms is not None and self.loop.now_ms - heard_ms < _HEARTBEAT_MS:
            raise self.loop.fail("a live broker is not replaced", f"{known} by {registration}")

    # -- images ----------------------------------------------------------------------------------------

    def _publish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def publish(metadata: MetadataLog, image: ClusterImage, delta: Any, offset: int) -> None:
            known = self._images.get(offset)
            if known is None or known != image:
                raise self.loop.fail("images are the same", f"at {offset}: {image}, committed: {known}")
            if image is not metadata.image:
                self._publishing[_node_id()] = image
            is_followed = delta and metadata._is_following
            await original(metadata, image, delta, offset)
            self._publishing.pop(_node_id(), None)
            if metadata._waiting and metadata._waiting[0][0] <= metadata.applied_offset:
                raise self.loop.fail(
                    "all who wait for an image are woken", f"{metadata}: {metadata._waiting}"
                )
            if is_followed and self._followed.get(_node_id()) is not image:
                raise self.loop.fail("images are followed before they are published", f"{metadata}")

        return publish

    def _follow_first_image(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def follow_first_image(metadata: MetadataLog) -> None:
            node = self.cluster.machines[_node_id()].node
            # The image may also have what came after the registration: another broker with the same id, or nothing.
            if node is not None and not 0 <= node.lifecycle.broker_epoch <= metadata.applied_offset:
                raise self.loop.fail(
                    "a node follows images with its own registration", f"{metadata}: {node.lifecycle}"
                )
            await original(metadata)

        return follow_first_image

    def _apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def apply(manager: ReplicaManager, delta: Any, image: ClusterImage) -> None:
            node = self.cluster.machines[_node_id()].node
            if node is not None and self._publishing.get(node.node_id) is image is node.metadata.image:
                raise self.loop.fail("images are followed before they are published", f"{node.metadata}")
            try:
                await original(manager, delta, image)
            finally:
                self._followed[_node_id()] = image

        return apply

    # -- the end ---------------------------------------------------------------------------------------

    def check_nodes(self) -> None:
        """Once the cluster is healthy, all nodes have the whole log, and the same image."""
        for node in self.cluster.serving():
            log, metadata = node.quorum.state.log, node.metadata
            self._compared.pop(log, None)
            self._compare(log, metadata.applied_offset + 1, may_extend=False)
            if self._images.get(metadata.applied_offset) != metadata.image:
                raise self.loop.fail("images are the same", f"at the end: {metadata}")


def _node_id() -> int:
    process = CURRENT.get()
    assert process is not None
    return int(process.machine.node_id)


def _suspended_ms(since_ms: int) -> int:
    """Return for how long the running process knows that it was suspended since then: it could not hear anyone.

    Its ticks tell it, so it may miss the time from the beginning of a suspension to the next tick.
    """
    process = CURRENT.get()
    assert process is not None
    return sum(max(0, end_ms - max(begin_ms, since_ms) - _TICK_MS) for begin_ms, end_ms in process.pauses_ms)
