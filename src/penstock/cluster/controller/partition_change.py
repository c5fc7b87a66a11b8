"""Changes of a partition: its replicas, in-sync replicas, eligible leader replicas and leader.

Every such change is built here. The functions at the end look up the partitions and brokers that a decision about
leaders concerns.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar
from uuid import UUID

from penstock.cluster.controller.decision import ControllerConfig, Decision, UncleanElection
from penstock.cluster.controller.election import Elected, Election, ElectionInput, elect
from penstock.cluster.image import BrokerState, ClusterImage, PartitionState, TopicState
from penstock.cluster.metadata_records import (
    NO_LEADER_CHANGE,
    UNASSIGNED_DIRECTORY,
    MetadataRecord,
    PartitionChangeRecord,
)
from penstock.cluster.topic_settings import capped_isr_min
from penstock.protocol.errors import ApiError, ErrorCode

Replicas = tuple[int, ...]
IsActive = Callable[[int], bool]
Answer = TypeVar("Answer")


def default_directory(image: ClusterImage, broker: int) -> UUID:
    directories = image.brokers[broker].log_dirs if broker in image.brokers else ()
    return directories[0] if len(directories) == 1 else UNASSIGNED_DIRECTORY


class PartitionChangeBuilder:
    """Builds the record of one partition's change. Set the wanted state, then call `build`."""

    __slots__ = (
        "_guarantees",
        "_image",
        "_index",
        "_is_active",
        "_lost",
        "_topic",
        "_uncertain",
        "adding",
        "directories",
        "elected",
        "election",
        "elr",
        "isr",
        "last_known_elr",
        "leader_recovering",
        "new_epoch",
        "old",
        "removing",
        "replicas",
    )

    def __init__(
        self,
        image: ClusterImage,
        topic: TopicState,
        index: int,
        *,
        rules: ControllerConfig,
        is_active: IsActive,
    ) -> None:
        self._image, self._topic, self._index, self._is_active = image, topic, index, is_active
        self._guarantees = rules.guarantees(image, topic.name)
        self._lost: set[int] = set()
        self._uncertain: set[int] = set()
        self.old = old = topic.partitions[index]
        self.replicas, self.isr, self.elr = old.replicas, old.isr, old.elr
        self.adding, self.removing = old.adding_replicas, old.removing_replicas
        self.last_known_elr = old.last_known_elr
        self.leader_recovering = old.leader_recovering
        self.directories = dict(zip(old.replicas, old.directories, strict=True))
        self.election = Election.UNCLEAN if self._guarantees.unclean_allowed else Election.ONLINE
        self.elected: Elected | None = None
        self.new_epoch = False  # start a leader epoch even if nothing else requires it

    # --- requested changes ---

    def leave_isr(self, gone: Collection[int]) -> None:
        self.isr = tuple(replica for replica in self.isr if replica not in gone)

    def doubt(self, broker: int) -> None:
        """For a broker that stopped uncleanly: it may lack acknowledged records, unless it syncs before the ack."""
        if self._guarantees.syncs_before_ack or self.replicas == (broker,):
            return
        self._uncertain.add(broker)
        self.leave_isr((broker,))

    def mark_lost(self, broker: int) -> None:
        """For a broker whose copy is gone or damaged."""
        self._lost.add(broker)
        self.leave_isr((broker,))

    def drop_eligible(self) -> None:
        """For when the high watermark has advanced, or may advance, without the eligible replicas."""
        self._uncertain.update(self.old.elr)

    # --- the resulting record ---

    def build(self) -> PartitionChangeRecord | None:
        """Returns None if nothing would change. Called once."""
        assert self.elected is None, "a change is built once"
        self._complete_reassignment()
        self.elr = self._eligible() if self._below_min_isr() else ()
        self._elect()
        if not self._below_min_isr():
            self.elr = ()
        self.last_known_elr = () if self.isr else self._last_known()
        return self._record()

    def unclean_election(self) -> UncleanElection | None:
        assert self.elected is not None, "build first"
        if not self.elected.unclean:
            return None
        return UncleanElection(
            self._topic.name, self._index, self.old.leader, self.elected.leader, self.old.leader_epoch + 1
        )

    def _complete_reassignment(self) -> None:
        if not (self.adding or self.removing) or not self._reassignment_is_complete():
            return
        self.isr = tuple(replica for replica in self.isr if replica not in self.removing)
        self.replicas = self._target_replicas()
        self.adding = self.removing = ()

    def _reassignment_is_complete(self) -> bool:
        """Whether all added replicas are in sync, and the ISR that remains satisfies min.insync.replicas."""
        staying = set(self.isr) - set(self.removing)
        target = self._target_replicas()
        enough = capped_isr_min(self._guarantees.isr_min, len(target), 0)
        return set(self.adding) <= staying and len(staying) >= enough

    def _target_replicas(self) -> Replicas:
        return tuple(replica for replica in self.replicas if replica not in self.removing)

    def isr_min(self) -> int:
        return capped_isr_min(self._guarantees.isr_min, len(self.replicas), len(self.adding))

    def _below_min_isr(self) -> bool:
        return len(self.isr) < self.isr_min()

    def _eligible(self) -> Replicas:
        """Below min.insync.replicas the high watermark does not advance, so replicas that leave still have all
        records."""
        known = {*self.old.elr, *self.old.isr} - set(self.isr) - self._uncertain - self._lost
        return tuple(replica for replica in self.replicas if replica in known)

    def _elect(self) -> None:
        self.elected = elected = elect(self._candidates(), self.election)
        if elected.unclean:
            # The new leader's log may differ from all others, so no other replica is known to be in sync.
            self.isr, self.elr, self.leader_recovering = (elected.leader,), (), True
        elif elected.leader in self.elr:
            self.isr = (elected.leader,)
            self.elr = tuple(replica for replica in self.elr if replica != elected.leader)

    def _candidates(self) -> ElectionInput:
        return ElectionInput(
            replicas=self.replicas,
            leader=self.old.leader,
            isr=self.isr,
            elr=self.elr,
            last_known_elr=self._last_known(),
            is_active=self._is_active,
            trusts_last_leader=not self._guarantees.syncs_before_ack or len(self.replicas) == 1,
        )

    def _last_known(self) -> Replicas:
        """The last leader, or else an uncertain replica. A lost copy is left out, unless it is the only replica."""
        if len(self.replicas) == 1:
            return self.replicas
        before = (self.old.leader,) if self.old.has_leader else self.old.last_known_elr
        known = self._able_to_return(before)
        return known or self._able_to_return(tuple(sorted(self._uncertain)))[:1]

    def _able_to_return(self, brokers: Replicas) -> Replicas:
        return tuple(broker for broker in brokers if broker in self.replicas and broker not in self._lost)

    def _starts_epoch(self) -> bool:
        """Whether a leader epoch starts. A new epoch also fences a removed replica, as it fences a deposed leader."""
        assert self.elected is not None
        changed = self.elected.leader != self.old.leader or self.elected.unclean
        return changed or self.new_epoch or not set(self.old.replicas) <= set(self.replicas)

    def _record(self) -> PartitionChangeRecord | None:
        assert self.elected is not None
        old = self.old
        changes: dict[str, Any] = {
            name: new
            for name, new, before in (
                ("isr", self.isr, old.isr),
                ("replicas", self.replicas, old.replicas),
                ("removing_replicas", self.removing, old.removing_replicas),
                ("adding_replicas", self.adding, old.adding_replicas),
                ("eligible_leader_replicas", self.elr, old.elr),
                ("last_known_elr", self.last_known_elr, old.last_known_elr),
                ("directories", self._directories(), old.directories),
            )
            if new != before
        }
        if self.leader_recovering != old.leader_recovering:
            changes["leader_recovery_state"] = int(self.leader_recovering)
        if self._starts_epoch():
            changes["leader"] = self.elected.leader
        if not changes:
            return None
        assert changes.get("leader") != NO_LEADER_CHANGE
        return PartitionChangeRecord(partition_id=self._index, topic_id=self._topic.id, **changes)

    def _directories(self) -> tuple[UUID | None, ...]:
        return tuple(
            self.directories[replica]
            if replica in self.directories
            else default_directory(self._image, replica)
            for replica in self.replicas
        )


class PartitionChanges:
    """The partition changes of one decision. `coming` and `going` are brokers that it makes active or inactive."""

    __slots__ = ("_coming", "_going", "image", "records", "rules", "unclean")

    def __init__(
        self,
        image: ClusterImage,
        rules: ControllerConfig,
        *,
        coming: Collection[int] = (),
        going: Collection[int] = (),
    ) -> None:
        self.image, self.rules = image, rules
        self._coming, self._going = coming, going
        self.records: list[MetadataRecord] = []
        self.unclean: list[UncleanElection] = []

    def is_active(self, broker: int) -> bool:
        if broker in self._going:
            return False
        known = self.image.brokers.get(broker)
        return broker in self._coming or (known is not None and known.is_active)

    def of(self, topic: TopicState, index: int) -> PartitionChangeBuilder:
        return PartitionChangeBuilder(self.image, topic, index, rules=self.rules, is_active=self.is_active)

    def add(self, change: PartitionChangeBuilder) -> PartitionChangeRecord | None:
        record = change.build()
        if record is None:
            return None
        self.records.append(record)
        unclean = change.unclean_election()
        if unclean is not None:
            self.unclean.append(unclean)
        return record

    def decision(self, reply: Answer, *, first: Iterable[MetadataRecord] = ()) -> Decision[Answer]:
        return Decision((*first, *self.records), reply, tuple(self.unclean))


def is_affected(partition: PartitionState, brokers: Collection[int]) -> bool:
    """Whether these brokers lead, or could be chosen to lead, this partition."""
    return any(
        broker in members
        for members in (partition.isr, partition.elr, partition.last_known_elr)
        for broker in brokers
    )


def all_partitions(image: ClusterImage) -> Iterator[tuple[TopicState, int, PartitionState]]:
    for topic in image.topics.values():
        for index, partition in topic.partitions.items():
            yield topic, index, partition


def replicas_by_broker(image: ClusterImage) -> Counter[int]:
    return Counter(replica for _, _, partition in all_partitions(image) for replica in partition.replicas)


def affected_partitions(image: ClusterImage, brokers: Collection[int]) -> Iterator[tuple[TopicState, int]]:
    """Yields the partitions where one of these brokers is in the ISR or ELR, or was the last leader."""
    for topic, index, partition in all_partitions(image):
        if is_affected(partition, brokers):
            yield topic, index


def leads_any_partition(image: ClusterImage, broker: int) -> bool:
    return any(partition.leader == broker for _, _, partition in all_partitions(image))


def registered_broker(image: ClusterImage, broker_id: int) -> BrokerState:
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise ApiError(
            ErrorCode.broker_id_not_registered, f"Broker ID {broker_id} is not currently registered"
        )
    return broker


def current_broker(image: ClusterImage, broker_id: int, broker_epoch: int) -> BrokerState:
    """Returns the broker that sent the request. Raises STALE_BROKER_EPOCH if it was replaced or unregistered."""
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise ApiError(
            ErrorCode.stale_broker_epoch, f"No broker registration found for broker id {broker_id}"
        )
    if broker.epoch != broker_epoch:
        raise ApiError(
            ErrorCode.stale_broker_epoch,
            f"Expected broker epoch {broker.epoch}, but got broker epoch {broker_epoch}",
        )
    return broker
