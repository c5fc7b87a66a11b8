"""The metadata log as a state machine: committed batches become images, decisions become batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cluster.controller.decision import Decision
from penstock.cluster.image import ClusterImage, ImageDelta, diff_images
from penstock.protocol.errors import ApiError, ErrorCode
from simulation.snapshots import Snapshot

if TYPE_CHECKING:
    from simulation.node import Node

#: A snapshot is due when the log has grown by this many records since the last.
_SNAPSHOT_RECORDS: Final = 60

Decide = Callable[[ClusterImage, int], "Decision[Any]"]
Respond = Callable[[Any], None]


class _Proposal(NamedTuple):
    decide: Decide
    respond: Respond


class Images:
    """Every image there was, by the chain number of the history it was made from: nodes share equal ones."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ClusterImage, ImageDelta]] = {}

    def after(
        self, image: ClusterImage, chain: int, records: tuple[Any, ...]
    ) -> tuple[ClusterImage, ImageDelta]:
        found = self._known.get(chain)
        if found is None:
            following = image.fork()
            delta = following.apply(records)
            found = self._known[chain] = (following, delta)
        return found


class Metadata:
    def __init__(self, node: Node, snapshot: Snapshot | None) -> None:
        self.node = node
        self.image = ClusterImage() if snapshot is None else snapshot.image()
        self.applied = 0 if snapshot is None else snapshot.id.offset
        self.leader_id = -1
        #: This node may decide: it leads, and its image has all that earlier leaders committed.
        self.is_active = False
        self._snapshot_offset = self.applied
        self._queue: deque[_Proposal] = deque()
        self._under_way: tuple[int, list[tuple[Respond, Any]]] | None = None

    # --- deciding ---

    def propose(self, decide: Decide, respond: Respond) -> None:
        """Answered with the decision's reply once it is committed and applied, or with an error code."""
        if not self.is_active:
            respond(ErrorCode.not_controller)
            return
        self._queue.append(_Proposal(decide, respond))
        self.node.quorum.in_turn(self._decide)

    def _decide(self) -> None:
        """Everything that waits, one after the other, as one batch."""
        if self._under_way is not None or not self._queue or not self.is_active:
            return
        fork, end = self.image.fork(), self.node.quorum.log.end_offset
        records: list[Any] = []
        replies: list[tuple[Respond, Any]] = []
        while self._queue:
            decide, respond = self._queue.popleft()
            try:
                decision = decide(fork, end + len(records))
            except ApiError as error:
                replies.append((respond, error.code))
                continue
            fork.apply(decision.records)
            records += decision.records
            replies.append((respond, decision.reply))
            for election in decision.unclean:
                self.node.invariants.unclean_decided(election)
        if records:
            self._under_way = (end + len(records), replies)
            self.node.quorum.append(tuple(records))
        else:
            self._reply(replies)

    def _reply(self, replies: list[tuple[Respond, Any]]) -> None:
        for respond, reply in replies:
            respond(reply)

    def _lost(self) -> None:
        """Nobody knows what became of the decisions under way."""
        self.is_active = False
        waiting = [proposal.respond for proposal in self._queue]
        if self._under_way is not None:
            waiting += [respond for respond, _ in self._under_way[1]]
        self._queue.clear()
        self._under_way = None
        for respond in waiting:
            respond(ErrorCode.not_controller)
        self.node.controller.became_inactive()

    # --- following ---

    def leader_changed(self, leader_id: int, epoch: int) -> None:
        deposed, self.leader_id = self.leader_id, leader_id
        if self.is_active or self._under_way is not None:
            self._lost()
        if leader_id == self.node.id:
            self.node.controller.deposed = deposed if deposed != leader_id else None
            self._maybe_activate()

    def committed(self, offset: int) -> None:
        log = self.node.quorum.log
        for batch in log.read(self.applied, offset):
            if not batch.is_control:
                chain = log.chain_at(batch.next_offset)
                assert chain is not None
                self.image, delta = self.node.cluster.images.after(self.image, chain, batch.payload)
                self.applied = batch.next_offset
                self.node.invariants.image_published(self.image, delta, batch.next_offset)
                self.node.image_changed(delta)
            self.applied = batch.next_offset
        if self._under_way is not None and self._under_way[0] <= self.applied:
            replies, self._under_way = self._under_way[1], None
            self._reply(replies)
        self._maybe_activate()
        if self.is_active and self._queue:
            self.node.quorum.in_turn(self._decide)
        if self.applied - self._snapshot_offset >= _SNAPSHOT_RECORDS:
            self._snapshot_offset = self.applied
            self.node.quorum.snapshot_at(self.applied, self.image)

    def installed(self, snapshot: Snapshot) -> None:
        before, self.image = self.image, snapshot.image()
        self.applied = self._snapshot_offset = snapshot.id.offset
        self.node.invariants.snapshot_installed(self.image, self.applied)
        self.node.image_changed(diff_images(before, self.image))

    def _maybe_activate(self) -> None:
        core = self.node.quorum.core
        if not self.is_active and self.node.quorum.is_leader and self.is_caught_up(core.epoch_start_offset):
            self.is_active = True
            self.node.controller.became_active()

    def is_caught_up(self, epoch_start_offset: int) -> bool:
        return self.applied > epoch_start_offset
