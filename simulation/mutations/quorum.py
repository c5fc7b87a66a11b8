"""Bugs of the metadata quorum: of its rules, of the driver that carries them out, and of the metadata log."""

from __future__ import annotations

import asyncio
import heapq
from typing import Any

from penstock.broker.quorum import driver as quorum_driver
from penstock.broker.quorum.driver import QuorumDriver
from penstock.broker.quorum.metadata_log import MetadataLog
from penstock.broker.quorum.quorum import Quorum
from penstock.broker.quorum.storage import MetadataLogView
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft import actions as work
from penstock.raft import election as raft_election
from penstock.raft import follower as raft_follower
from penstock.raft import leader as raft_leader
from penstock.raft.state import RaftState
from simulation.mutation import Mutation, Patch, Traps

# -- the rules -----------------------------------------------------------------------------------------


def _majority_of_anyone(raft: RaftState) -> int:
    assert raft.leader
    others = [key for key in raft.leader.progress if key.id != raft.local.id]
    offsets = sorted(
        (raft_leader.durable_offset_of(raft, key) for key in (raft.local, *others)), reverse=True
    )
    return offsets[min(len(offsets), raft.voters.latest.majority) - 1]


def _own_end_counts(raft: RaftState, key: Any) -> int:
    return raft.log.end_offset if key.id == raft.local.id else raft_leader.progress_of(raft, key).offset


def _divergence_in_own_epoch(raft: RaftState, request: Any) -> Any:
    return _divergence(raft, request) if request.epoch == raft.epoch else None


def _no_refusal(raft: RaftState) -> Any:
    return None if raft.leader is not None else _change_refusal(raft)


def _lead_with_less(raft: RaftState, campaign: Any) -> bool:
    if len(campaign.granted) + 1 >= campaign.voters.majority and not campaign.is_won:
        campaign.granted.update(campaign.voters.ids)
    return _conclude_campaign(raft, campaign)


def _any_leader_serves(raft: RaftState, request: Any) -> ErrorCode:
    return ErrorCode.none if raft.leader is not None else ErrorCode.not_leader_or_follower


_divergence = raft_leader.divergence
_change_refusal = raft_leader.change_refusal
_conclude_campaign = raft_election.conclude_campaign

# -- the driver ----------------------------------------------------------------------------------------


async def _save_nothing(self: QuorumDriver, election: Any) -> None: ...


async def _save_in_the_background(self: QuorumDriver, election: Any) -> None:
    self._environment.spawn(_save(self, election))


async def _replies_first(self: QuorumDriver, event: Any) -> None:
    self._after.append(event)
    while self._after:
        actions = self._after.popleft()(self.now_ms())
        for action in sorted(
            actions, key=lambda each: not isinstance(each, work.SendReply | work.SendRequest)
        ):
            await self._carry_out(action)


async def _report_then_sync(self: QuorumDriver) -> None:
    try:
        while self._wants_sync:
            self._wants_sync = False
            self.post(self.core.synced)
            await self._environment.sync(self.log)
    finally:
        self._is_syncing = False


def _wake_if_idle(self: QuorumDriver, event: Any) -> None:
    self._inbox.append(event)
    if not self._sending:
        self._wake.set()


async def _append_at_once(self: Quorum, build: Any) -> int | None:
    batch = build()
    offset = None if batch is None else self.driver.append(batch)
    self.driver.post(lambda now_ms: [])
    return offset


async def _ask_without_timeout(self: QuorumDriver, send: Any) -> tuple[Any, bool]:
    reply, refused = await _ask(self, send)
    if reply is None and not refused:
        await asyncio.get_running_loop().create_future()
    return reply, refused


_save = QuorumDriver._save
_ask = QuorumDriver._ask

# -- the metadata log ----------------------------------------------------------------------------------


def _active_at_once(self: MetadataLog) -> None:
    if self._epoch >= 0 and not self.is_active and self._has_caught_up and self._quorum.is_leader:
        self.is_active = True
        self._active_changed(True)


async def _publish_then_follow(self: MetadataLog, image: Any, delta: Any, offset: int) -> None:
    self.image, self.applied_offset = image, offset
    if delta and self._is_following:
        await self._follow(delta, image)
        self._image_changed(delta)
    self._become_active_if_due()
    self._answer_waiting()
    self._consider_snapshot()


async def _publish_without_following(self: MetadataLog, image: Any, delta: Any, offset: int) -> None:
    if delta and self._is_following:
        self._environment.spawn(self._follow(delta, image))  # type: ignore[arg-type]
    self.image, self.applied_offset = image, offset
    if delta and self._is_following:
        self._image_changed(delta)
    self._become_active_if_due()
    self._answer_waiting()
    self._consider_snapshot()


async def _only_committed(self: MetadataLog, offset: int, epoch: int) -> None:
    while self._committed_offset <= offset and self._epoch == epoch:
        await asyncio.sleep(0.000_5)
    if self._committed_offset <= offset:
        raise ApiError(ErrorCode.not_controller)


async def _only_appended(self: MetadataLog, offset: int, epoch: int) -> None: ...


def _keep_own(self: MetadataLog) -> None:
    own = self._own
    _lose_leadership(self)
    self._own = own


async def _commit_and_keep_own(self: MetadataLog, group: Any) -> None:
    kept: Any = None
    committed_and_published = self._committed_and_published

    async def wait(offset: int, epoch: int) -> None:
        nonlocal kept
        try:
            await committed_and_published(offset, epoch)
        except Exception:
            kept = self._own
            raise

    self._committed_and_published = wait  # type: ignore[method-assign]
    try:
        await _commit(self, group)
    finally:
        del self._committed_and_published
        self._own = self._own or kept


def _keep_in_flight(self: MetadataLog) -> None:
    self._in_flight = None
    _lose_leadership(self)


def _stay_active(self: MetadataLog) -> None:
    was_active, self.is_active = self.is_active, False
    epoch = self._epoch
    _lose_leadership(self)
    self.is_active, self._epoch = was_active, epoch


async def _name_snapshot_late(self: MetadataLog, image: Any, offset: int) -> None:
    await asyncio.sleep(0.01)
    await _take_snapshot(self, image, self.applied_offset)


async def _keep_image(self: MetadataLog) -> None:
    assert self._replacement is not None
    _, id = self._replacement
    self._replacement = (self.image, id)
    await _replace_image(self)


async def _follow_what_is_known(self: MetadataLog, offset: int) -> None:
    async with self.turn:
        await self._follow_first_image()


def _forget_waiting(self: MetadataLog) -> None:
    if self._waiting and self._waiting[0][0] <= self.applied_offset:
        heapq.heappop(self._waiting)[2].set_result(None)


_lose_leadership = MetadataLog._lose_leadership
_commit = MetadataLog._commit
_take_snapshot = MetadataLog._take_snapshot
_replace_image = MetadataLog._replace_image

_RULES = (
    Mutation(
        name="two-votes-in-one-epoch",
        sentence="A voter forgets in the same epoch whom it voted for.",
        trap=Traps.QUORUM,
        patches=(
            Patch(
                raft_election, "grants_vote", lambda raft, request: raft_election.is_up_to_date(raft, request)
            ),
        ),
    ),
    Mutation(
        name="vote-for-anyone",
        sentence="A voter does not compare logs with the candidate.",
        trap=Traps.QUORUM,
        patches=(Patch(raft_election, "is_up_to_date", lambda raft, request: True),),
    ),
    Mutation(
        name="earlier-epoch-committed-by-count",
        sentence="A leader commits records of an earlier epoch by counting who holds them.",
        trap=Traps.QUORUM,
        patches=(Patch(raft_leader, "may_commit_up_to", lambda raft, offset: offset >= 0),),
    ),
    Mutation(
        name="observers-counted",
        sentence="The quorum's high watermark counts observers as well as voters.",
        trap=Traps.QUORUM,
        faults=("voter change", "suspend", "slow disk", "kill"),
        patches=(Patch(raft_leader, "majority_offset", _majority_of_anyone),),
    ),
    Mutation(
        name="quorum-counts-unsynced",
        sentence="The quorum's leader counts what it has not synced.",
        trap=Traps.DURABLE,
        patches=(Patch(raft_leader, "durable_offset_of", _own_end_counts),),
    ),
    Mutation(
        name="quorum-follower-confirms-unsynced",
        sentence="A voter fetches on before it has synced what it got.",
        trap=Traps.DURABLE,
        patches=(Patch(raft_follower, "is_ready_to_fetch", lambda raft: not raft.is_append_pending),),
    ),
    Mutation(
        name="quorum-does-not-reconcile",
        sentence="The quorum's leader does not compare epochs with who fetches.",
        trap=Traps.TRUNCATE_FIRST,
        patches=(Patch(raft_leader, "divergence", lambda raft, request: None),),
    ),
    Mutation(
        name="quorum-truncates-one-record",
        sentence="A voter that parts from its leader cuts off its last record only, and goes on.",
        trap=Traps.TRUNCATE,
        patches=(
            Patch(raft_follower, "truncation_offset", lambda raft, diverging: raft.log.end_offset - 1),
            Patch(raft_leader, "divergence", lambda raft, request: None),
        ),
    ),
    Mutation(
        name="quorum-fetch-not-fenced",
        sentence="The quorum's leader counts fetches of other epochs as if they were of its own.",
        trap=Traps.FENCE,
        patches=(
            Patch(raft_leader, "fetch_error", _any_leader_serves),
            Patch(raft_leader, "divergence", _divergence_in_own_epoch),
        ),
    ),
    Mutation(
        name="two-voter-changes",
        sentence="A voter change begins while another is not committed.",
        trap=Traps.QUORUM,
        faults=("voter change", "suspend", "slow disk", "cut"),
        patches=(Patch(raft_leader, "change_refusal", _no_refusal),),
    ),
    Mutation(
        name="minority-elects",
        sentence="A candidate leads with one vote less than a majority.",
        trap=Traps.QUORUM,
        patches=(Patch(raft_election, "conclude_campaign", _lead_with_less),),
    ),
)

_DRIVER = (
    Mutation(
        name="vote-not-saved",
        sentence="A vote is given before it is on disk.",
        trap=Traps.DURABLE,
        patches=(Patch(QuorumDriver, "_save", _save_nothing),),
    ),
    Mutation(
        name="vote-sent-while-it-is-saved",
        sentence="The driver sends a vote while a thread still writes it.",
        trap=Traps.DURABLE,
        patches=(Patch(QuorumDriver, "_save", _save_in_the_background),),
    ),
    Mutation(
        name="quorum-replies-first",
        sentence="The driver sends the requests and replies of an event before it carries out the other actions.",
        trap=Traps.DURABLE,
        patches=(Patch(QuorumDriver, "_work", _replies_first),),
    ),
    Mutation(
        name="quorum-sync-reported-early",
        sentence="The driver reports a sync to the rules when it begins, and not when it ends.",
        trap=Traps.LOST_DECISION,
        patches=(Patch(QuorumDriver, "_sync", _report_then_sync),),
    ),
    Mutation(
        name="quorum-append-counts-as-synced",
        sentence="The rules take the end of the log for what is synced.",
        trap=Traps.DURABLE,
        patches=(Patch(MetadataLogView, "durable_offset", property(lambda self: self._log.end_offset)),),
    ),
    Mutation(
        name="appended-voters-not-learned",
        sentence="A node does not learn the voters in the records that it appends.",
        trap=Traps.QUORUM,
        patches=(Patch(quorum_driver, "voters_in", lambda batch: iter(())),),
    ),
    Mutation(
        name="quorum-event-does-not-wake",
        sentence="An event that comes while a request is under way does not wake the driver.",
        trap=Traps.LOST_DECISION,
        patches=(Patch(QuorumDriver, "post", _wake_if_idle),),
    ),
    Mutation(
        name="quorum-request-never-fails",
        sentence="A quorum request that times out is never reported to the rules, which wait for its reply.",
        trap=Traps.LOST_DECISION,
        patches=(Patch(QuorumDriver, "_ask", _ask_without_timeout),),
    ),
    Mutation(
        name="append-out-of-turn",
        sentence="A controller appends while its rules have already moved to another epoch.",
        trap=Traps.FENCE,
        faults=("cut", "one-way cut", "cut from the controller", "slow disk", "suspend"),
        patches=(Patch(Quorum, "append", _append_at_once),),
    ),
)

_METADATA_LOG = (
    Mutation(
        name="controller-acts-too-early",
        sentence="A new controller decides before its image has all that was committed.",
        trap=Traps.QUORUM,
        faults=("kill", "cut", "suspend"),
        patches=(Patch(MetadataLog, "_become_active_if_due", _active_at_once),),
    ),
    Mutation(
        name="image-published-before-followed",
        sentence="A node publishes an image before its partitions follow it.",
        trap=Traps.FENCE,
        patches=(Patch(MetadataLog, "_publish", _publish_then_follow),),
    ),
    Mutation(
        name="images-followed-out-of-turn",
        sentence="A node follows an image in the background, while the next one comes.",
        trap=Traps.FENCE,
        patches=(Patch(MetadataLog, "_publish", _publish_without_following),),
    ),
    Mutation(
        name="decision-answered-when-committed",
        sentence="A decision is answered once it is committed, and not once its image is published.",
        trap=Traps.QUORUM,
        patches=(Patch(MetadataLog, "_committed_and_published", _only_committed),),
    ),
    Mutation(
        name="decision-answered-when-appended",
        sentence="A decision is answered once it is appended, and not once it is committed.",
        trap=Traps.QUORUM,
        patches=(Patch(MetadataLog, "_committed_and_published", _only_appended),),
    ),
    Mutation(
        name="own-batch-kept",
        sentence="A deposed controller replays the batch that it appended, and not the one that was committed.",
        trap=Traps.QUORUM,
        faults=("cut", "one-way cut", "suspend", "slow disk", "kill"),
        patches=(
            Patch(MetadataLog, "_lose_leadership", _keep_own),
            Patch(MetadataLog, "_commit", _commit_and_keep_own),
        ),
    ),
    Mutation(
        name="decision-kept-over-loss-of-leadership",
        sentence="A deposed controller answers a decision once any record is committed at its offset.",
        trap=Traps.QUORUM,
        faults=("cut", "one-way cut", "suspend", "slow disk", "kill"),
        patches=(Patch(MetadataLog, "_lose_leadership", _keep_in_flight),),
    ),
    Mutation(
        name="deposed-controller-stays-active",
        sentence="A controller that lost its leadership goes on as the active one.",
        trap=Traps.FENCE,
        patches=(Patch(MetadataLog, "_lose_leadership", _stay_active),),
    ),
    Mutation(
        name="snapshot-named-late",
        sentence="A snapshot has the offset that was applied when it was written, not when its image was taken.",
        trap=Traps.QUORUM,
        patches=(Patch(MetadataLog, "_take_snapshot", _name_snapshot_late),),
    ),
    Mutation(
        name="installed-snapshot-not-applied",
        sentence="A node that installs a snapshot goes on with its old image.",
        trap=Traps.QUORUM,
        faults=("disk lost", "suspend"),
        patches=(Patch(MetadataLog, "_replace_image", _keep_image),),
    ),
    Mutation(
        name="followed-before-registration",
        sentence="A node that starts takes the roles of an image that does not have its registration yet.",
        trap=Traps.UNCLEAN_RESTART,
        patches=(Patch(MetadataLog, "follow", _follow_what_is_known),),
    ),
    Mutation(
        name="waiters-for-images-forgotten",
        sentence="An image wakes only the first of those who wait for it.",
        trap=Traps.LOST_DECISION,
        faults=("reassignment", "late requests"),
        apis=(1,),
        patches=(Patch(MetadataLog, "_answer_waiting", _forget_waiting),),
    ),
)

MUTATIONS: tuple[Mutation, ...] = _RULES + _DRIVER + _METADATA_LOG
