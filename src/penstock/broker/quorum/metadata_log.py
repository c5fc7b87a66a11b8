"""The metadata log: the decisions of the controller, which the quorum commits before any node sees them.

The active controller takes decisions one after the other against a copy of the image and commits them in groups. Every
node replays committed records into a copy of the image, applies the changes to its partitions, and then publishes the
image to readers. So a topic that a client sees can be written to.

Decisions and replays of many records are made in steps, between which the node serves its clients.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from uuid import UUID

from penstock.broker.quorum.snapshots import encode_metadata, iter_metadata
from penstock.cluster.controller.decision import Decision, DecisionOrSteps
from penstock.cluster.image import ClusterImage, ImageDelta, diff_images
from penstock.cluster.metadata_records import MetadataRecord, RemoveTopicRecord
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import iter_batches
from penstock.protocol.steps import RunSteps, Steps, finish
from penstock.raft.types import OffsetAndEpoch

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Environment
    from penstock.broker.quorum.quorum import Quorum

logger = logging.getLogger("penstock.metadata")

Reply = TypeVar("Reply")
Result = TypeVar("Result")
OnImage = Callable[[ImageDelta, ClusterImage], Awaitable[None]]
BeforeFirstImage = Callable[[ClusterImage, set[UUID]], None]

_READ_BYTES: Final = 1 << 20
#: Limit of decisions that share one commit, so that the first of them does not wait for too many others.
_GROUP_MAX: Final = 500


class _Proposal(NamedTuple):
    decide: Callable[[ClusterImage], DecisionOrSteps[Any]]
    answer: asyncio.Future[Any]


class _ProposalResult(NamedTuple):
    proposal: _Proposal
    reply: Any
    failure: Exception | None


class _OwnBatch(NamedTuple):
    """A batch that this node appends, kept so that it need not be read back from the log."""

    base_offset: int
    records: tuple[MetadataRecord, ...]
    data: bytearray
    timestamp_ms: int


class _LogHasGrown(Exception):
    """The log has other records at the offsets for which the decisions were made."""


class MetadataLog:
    """Call `open` after the quorum's log is open, and `caught_up` once the quorum runs."""

    def __init__(
        self,
        environment: Environment,
        settings: NodeSettings,
        quorum: Quorum,
        *,
        follow: OnImage,
        begin: BeforeFirstImage | None = None,
        image_changed: Callable[[ImageDelta], None],
        active_changed: Callable[[bool], None],
        run_steps: RunSteps = finish,
    ) -> None:
        """`follow` applies a new image to this node before the image is published, `image_changed` runs after that.

        `begin` runs in a thread before the first image is applied; it gets the topics deleted before that.
        `active_changed` learns when this node becomes the active controller, and when it no longer is. `run_steps`
        returns the result of work in steps, or an awaitable of it.
        """
        self.image = ClusterImage()
        #: The last offset whose record is in the published image.
        self.applied_offset = -1
        #: Whether this node is the active controller, which makes the decisions.
        self.is_active = False
        #: Lock for changing the image and for applying it to this node.
        self.turn = asyncio.Lock()
        self._environment = environment
        self._node_id = settings.node_id
        self._quorum = quorum
        quorum.observe(self)
        self._follow = follow
        self._begin = begin
        self._image_changed = image_changed
        self._active_changed = active_changed
        self._run_steps = run_steps
        self._deleted: set[UUID] = set()  # during the start, before images are applied
        self._committed_offset = 0  # everything below is committed
        self._epoch = -1  # of this node as leader, -1 otherwise
        self._own: _OwnBatch | None = None  # appended here and not applied yet
        self._replacement: tuple[ClusterImage, OffsetAndEpoch] | None = None
        self._caught_up: asyncio.Future[None] | None = None
        self._has_caught_up = self._is_following = False
        self._failure: Exception | None = None
        self._failed = asyncio.Event()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()
        self._queue: list[_Proposal] = []
        self._next_offset: int | None = None
        self._in_flight: asyncio.Future[None] | None = None
        self._is_applying = self._is_proposing = self._is_taking_snapshot = False
        self._unsaved_bytes = self._last_timestamp_ms = 0
        self._snapshot_every_bytes = settings.integer("metadata.log.max.record.bytes.between.snapshots")

    def __repr__(self) -> str:
        return (
            f"<MetadataLog applied {self.applied_offset}{' active' if self.is_active else ''} {self.image}>"
        )

    @property
    def committed_offset(self) -> int:
        """The last offset that is committed; -1 while that is unknown."""
        return self._committed_offset - 1

    @property
    def next_offset(self) -> int:
        """Within a decision that is not made in steps: the offset that its first record gets."""
        return self._quorum.state.log.end_offset if self._next_offset is None else self._next_offset

    # -- lifecycle -------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin from the newest snapshot, if there is one."""
        state = self._quorum.state
        if state.snapshot is not None and state.snapshot_id is not None:
            self.image = state.snapshot.image
            self.applied_offset = state.snapshot_id.offset - 1
            self._committed_offset = state.snapshot_id.offset

    async def caught_up(self) -> None:
        """Wait until the image contains everything that the leader has reported as committed.

        Raises the error that kept the quorum from starting.
        """
        if self._failure is not None:
            raise self._failure
        if not self._has_caught_up:
            if self._caught_up is None:
                self._caught_up = asyncio.get_running_loop().create_future()
            self._wake()
            await asyncio.shield(self._caught_up)

    async def failure(self) -> Exception:
        """Wait until the quorum fails while this node starts, and return why it did."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    async def follow(self, offset: int) -> None:
        """Start applying images to this node, first the one that contains the record at `offset`.

        Earlier images are not applied one by one.
        """
        await self.reached(offset)
        async with self.turn:
            await self._follow_first_image()

    async def reached(self, offset: int) -> None:
        """Wait until the published image contains the record at this offset."""
        if offset <= self.applied_offset:
            return
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (offset, next(self._order), reached))
        await reached

    # -- events of the quorum --------------------------------------------------------------------------

    def committed(self, offset: int) -> None:
        self._committed_offset = max(offset, self._committed_offset)
        self._wake()

    def leader_changed(self, leader_id: int, epoch: int) -> None:
        is_leader = leader_id == self._node_id
        if self._epoch >= 0 and not (is_leader and epoch == self._epoch):
            self._lose_leadership()
        if is_leader:
            self._epoch = epoch
            self._become_active_if_due()

    def heard(self) -> None:
        """The leader has reported its high watermark: a starting node may have caught up."""
        if not self._has_caught_up:
            self._wake()

    def installed(self, image: ClusterImage, id: OffsetAndEpoch) -> None:
        self._replacement = (image, id)
        self.committed(id.offset)

    def failed(self, error: Exception) -> None:
        self._failure = error
        self._failed.set()
        if self._caught_up is not None:
            _fail(self._caught_up, error)

    def _lose_leadership(self) -> None:
        """Fail all pending proposals. Their outcome is unknown: the next leader may still commit what was appended."""
        self._epoch = -1
        self._own = None
        if self._in_flight is not None:
            _fail(self._in_flight, _not_controller())
        queue, self._queue = self._queue, []
        for proposal in queue:
            _fail(proposal.answer, _not_controller())
        if self.is_active:
            self.is_active = False
            logger.info("no longer the active controller")
            self._active_changed(False)

    def _become_active_if_due(self) -> None:
        """Become active once the image has everything that was committed before, because decisions are based on it."""
        if self._epoch < 0 or self.is_active or not self._has_caught_up:
            return
        quorum = self._quorum
        if quorum.is_leader and self.applied_offset >= quorum.driver.core.epoch_start_offset:
            self.is_active = True
            logger.info("active controller", extra={"epoch": self._epoch})
            self._active_changed(True)

    # -- replaying -------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._is_applying:
            self._is_applying = True
            self._environment.spawn(self._apply())

    async def _apply(self) -> None:
        try:
            while self._replacement is not None or self.applied_offset + 1 < self._committed_offset:
                async with self.turn:
                    await self._apply_some()
            if self._is_caught_up_due():
                self._now_caught_up()
        except Exception as error:
            # Without the record, or with half of it, the image would be wrong.
            logger.critical("metadata cannot be replayed", exc_info=error)
            self._quorum.failed(error)
        finally:
            self._is_applying = False
        self._become_active_if_due()

    async def _apply_some(self) -> None:
        if self._replacement is not None:
            await self._replace_image()
            return
        records, last_offset = await self._committed_records()
        if not self._is_following:
            self._deleted |= {r.topic_id for r in records if isinstance(r, RemoveTopicRecord)}
        if self._has_caught_up:
            image = self.image.fork()
            delta = await self._in_steps(image.apply_in_steps(records))
            await self._publish(image, delta, last_offset)
        else:
            self.image.apply(records)
            self.applied_offset = last_offset

    async def _in_steps(self, steps: Steps[Result]) -> Result:
        result = self._run_steps(steps)
        return await result if inspect.isawaitable(result) else result

    async def _replace_image(self) -> None:
        assert self._replacement is not None
        (image, id), self._replacement = self._replacement, None
        if id.offset <= self.applied_offset:
            return
        if self._has_caught_up:
            await self._publish(image, diff_images(self.image, image), id.offset - 1)
        else:
            self.image, self.applied_offset = image, id.offset - 1

    async def _publish(self, image: ClusterImage, delta: ImageDelta, offset: int) -> None:
        if delta and self._is_following:
            try:
                await self._follow(delta, image)
            except Exception:
                # The records are committed, so the image counts even if this node could not apply it.
                logger.exception("metadata not followed", extra={"offset": offset})
        self.image, self.applied_offset = image, offset
        if delta and self._is_following:
            self._image_changed(delta)
        self._become_active_if_due()
        self._answer_waiting()
        self._consider_snapshot()

    def _answer_waiting(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.applied_offset:
            _succeed(heapq.heappop(self._waiting)[2], None)

    def _is_caught_up_due(self) -> bool:
        if self._has_caught_up or self._caught_up is None or self._caught_up.done():
            return False
        return 0 <= self._quorum.leader_high_watermark <= self.applied_offset + 1

    def _now_caught_up(self) -> None:
        self._has_caught_up = True
        assert self._caught_up is not None
        _succeed(self._caught_up, None)
        self._answer_waiting()

    async def _follow_first_image(self) -> None:
        """Apply the first image as a single change, without the intermediate states of the replay."""
        assert not self._is_following
        if self._begin is not None:
            await self._environment.in_thread(self._begin, self.image, self._deleted)
        self._is_following = True
        everything = diff_images(ClusterImage(), self.image)
        await self._publish(self.image, everything, self.applied_offset)

    async def _committed_records(self) -> tuple[list[MetadataRecord], int]:
        """Return the next committed records that are not applied yet, and their last offset."""
        offset = self.applied_offset + 1
        own = self._own
        if own is not None and own.base_offset == offset:
            self._own = None
            self._note(len(own.data), own.timestamp_ms)
            return list(own.records), offset + len(own.records) - 1
        log = self._quorum.state.log
        piece = await self._environment.in_thread(log.read, offset, _READ_BYTES, log.end)
        records, last_offset = await self._in_steps(self._decode(piece.data))
        assert last_offset > self.applied_offset, f"nothing committed at {offset} in {log}"
        return records, last_offset

    def _decode(self, data: BytesLike) -> Steps[tuple[list[MetadataRecord], int]]:
        """Return the records that are committed and not applied yet, and the last offset."""
        records: list[MetadataRecord] = []
        last_offset = self.applied_offset
        for header, batch in iter_batches(data):
            if header.last_offset >= self._committed_offset:
                break
            if header.last_offset <= last_offset:
                continue
            for record in () if header.is_control else iter_metadata(batch):
                records.append(record)
                yield
            last_offset = header.last_offset
            self._note(header.size, header.max_timestamp)
        return records, last_offset

    # -- deciding --------------------------------------------------------------------------------------

    async def propose(self, decide: Callable[[ClusterImage], DecisionOrSteps[Reply]]) -> Reply:
        """Commit a decision, and wait until its image is published. Raises what `decide` raises, and ApiError.

        NOT_CONTROLLER after the append means that the outcome is unknown: the next leader may commit it or not.
        """
        if not self.is_active:
            raise _not_controller()
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._queue.append(_Proposal(decide, answer))
        if not self._is_proposing:
            self._is_proposing = True
            self._environment.spawn(self._commit_queued())
        return await answer

    async def _commit_queued(self) -> None:
        """Commit one group after the other; all proposals that arrive during a commit share the next one."""
        try:
            while self._queue:
                group, self._queue = self._queue[:_GROUP_MAX], self._queue[_GROUP_MAX:]
                await self._commit(group)
        finally:
            self._is_proposing = False

    async def _commit(self, group: list[_Proposal]) -> None:
        epoch = self._epoch
        try:
            last_offset, outcomes = await self._decide_and_append(group, epoch)
            if last_offset is not None:
                await self._committed_and_published(last_offset, epoch)
        except Exception as error:
            self._own = None
            for proposal in group:
                _fail(proposal.answer, error)
            return
        for proposal, reply, failure in outcomes:
            if failure is not None:
                _fail(proposal.answer, failure)
            else:
                _succeed(proposal.answer, reply)

    async def _decide_and_append(
        self, group: list[_Proposal], epoch: int
    ) -> tuple[int | None, list[_ProposalResult]]:
        """Return the last offset, None if there was nothing to append. Raises NOT_CONTROLLER.

        Only this appends to the log, except for the quorum's own control records: then the decisions are made again.
        """
        while True:
            self._check_is_active(epoch)
            batch, outcomes = await self._in_steps(self._decide(group))
            try:
                return await self._quorum.append(partial(self._data_of, batch, epoch)), outcomes
            except _LogHasGrown:
                continue

    def _data_of(self, batch: _OwnBatch | None, epoch: int) -> bytearray | None:
        """Runs as an event of the quorum driver, so that nothing else is appended meanwhile."""
        self._check_is_active(epoch)
        if batch is None:
            return None
        if batch.base_offset != self._quorum.state.log.end_offset:
            raise _LogHasGrown
        self._own = batch
        return batch.data

    def _check_is_active(self, epoch: int) -> None:
        if not self.is_active or self._epoch != epoch:
            raise _not_controller()

    def _decide(self, group: list[_Proposal]) -> Steps[tuple[_OwnBatch | None, list[_ProposalResult]]]:
        """Make the decisions and encode their records; None if there are none.

        The image does not change meanwhile: all that was appended before is applied, and a node that is no longer
        the active controller cannot append what was decided.
        """
        image, records = self.image.fork(), list[MetadataRecord]()
        outcomes: list[_ProposalResult] = []
        base_offset = self._quorum.state.log.end_offset
        for proposal in group:
            try:
                decision = yield from self._decision(proposal, image, base_offset + len(records))
            except Exception as error:
                outcomes.append(_ProposalResult(proposal, None, error))
                continue
            try:
                yield from image.apply_in_steps(decision.records)
            except Exception as error:
                # Half of it may be in the copy. Records decided on such a copy would stop every node.
                logger.exception("a decision contradicts the image")
                outcomes.append(_ProposalResult(proposal, None, error))
                image = self.image.fork()
                image.apply(records)
            else:
                records += decision.records
                outcomes.append(_ProposalResult(proposal, decision.reply, None))
        if not records:
            return None, outcomes
        now_ms = self._environment.now_ms()
        data = yield from encode_metadata(records, now_ms)
        return _OwnBatch(base_offset, tuple(records), data, now_ms), outcomes

    def _decision(self, proposal: _Proposal, image: ClusterImage, next_offset: int) -> Steps[Decision[Any]]:
        self._next_offset = next_offset
        try:
            decided = proposal.decide(image)
        finally:
            self._next_offset = None
        yield
        return decided if isinstance(decided, Decision) else (yield from decided)

    async def _committed_and_published(self, offset: int, epoch: int) -> None:
        """Raises NOT_CONTROLLER when leadership is lost first."""
        if self._epoch != epoch:
            raise _not_controller()
        self._in_flight = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (offset, next(self._order), self._in_flight))
        self._answer_waiting()
        await self._in_flight

    # -- snapshots -------------------------------------------------------------------------------------

    def _note(self, size_bytes: int, timestamp_ms: int) -> None:
        self._unsaved_bytes += size_bytes
        self._last_timestamp_ms = timestamp_ms

    def _consider_snapshot(self) -> None:
        """Take a snapshot once enough has been written since the last one."""
        if self._unsaved_bytes < self._snapshot_every_bytes or self._is_taking_snapshot:
            return
        self._unsaved_bytes, self._is_taking_snapshot = 0, True
        self._environment.spawn(self._take_snapshot(self.image, self.applied_offset))

    async def _take_snapshot(self, image: ClusterImage, offset: int) -> None:
        """Write a snapshot in a thread, which is safe because a published image never changes."""
        try:
            await self._quorum.take_snapshot(image, offset, last_timestamp_ms=self._last_timestamp_ms)
        except OSError as error:
            logger.error("no metadata snapshot", extra={"offset": offset, "reason": str(error)})
        finally:
            self._is_taking_snapshot = False


def _not_controller() -> ApiError:
    return ApiError(ErrorCode.not_controller, "this node is not the active controller")


def _succeed(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
