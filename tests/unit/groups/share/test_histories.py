"""Invariants of share groups: members join, leave, crash and miss replies, topics change, coordinators reload."""

from typing import Any
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.groups.share.world import SESSION_MS, Member, World

from penstock.groups.modern_group import JOIN_GROUP_MEMBER_EPOCH
from penstock.groups.share.share_group_offsets import current_state_changes
from penstock.protocol.errors import ErrorCode

NAMES = ["a", "b", "c"]
TOPICS = ["t", "s", "u"]
_names = st.sampled_from(NAMES)
_topics = st.lists(st.sampled_from(TOPICS), unique=True, min_size=1).map(tuple)


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.put_topic("t", 2)
        self.world.put_topic("s", 1)
        self.members: dict[str, Member] = {}
        #: What the share coordinator has, and with which epoch it was begun.
        self.states: dict[tuple[UUID, int], int] = {}
        self.epoch_seen = 0

    # Members

    @rule(name=_names, topics=_topics)
    def join(self, name: str, topics: tuple[str, ...]) -> None:
        member = self.members.setdefault(name, Member(self.world, name))
        assert member.join(*topics).error is ErrorCode.none

    @rule(name=_names, is_heard=st.booleans(), topics=st.none() | _topics)
    def beat(self, name: str, is_heard: bool, topics: tuple[str, ...] | None) -> None:
        member = self.members.get(name)
        if member is None or member.epoch == JOIN_GROUP_MEMBER_EPOCH:
            return
        before = self._known(name)
        reply = member.beat(topics, is_heard=is_heard)
        if before is None:
            assert reply.error in (ErrorCode.unknown_member_id, ErrorCode.group_id_not_found)
        elif member.epoch == before:
            assert reply.error is ErrorCode.none
        if reply.error is not ErrorCode.none:
            member.epoch = JOIN_GROUP_MEMBER_EPOCH
        elif is_heard:
            # Whatever it has missed before.
            assert self.world.group is not None
            assert member.assigned == self.world.group.members[name].current.assigned

    @rule(name=_names)
    def miss_a_reply(self, name: str) -> None:
        self.beat(name, False, None)
        self.beat(name, True, None)

    @rule(name=_names, epoch=st.integers(1, 40))
    def beat_with_any_epoch(self, name: str, epoch: int) -> None:
        group = self.world.group
        known = None if group is None else group.members.get(name)
        reply = self.world.beat(name, epoch, None)
        if known is None:
            assert reply.error in (ErrorCode.unknown_member_id, ErrorCode.group_id_not_found)
        elif epoch in (known.current.epoch, known.current.previous_epoch):
            assert reply.error is ErrorCode.none
        else:
            assert reply.error is ErrorCode.fenced_member_epoch

    @rule(name=_names)
    def leave(self, name: str) -> None:
        if name in self.members:
            known = self._known(name)
            reply = self.members[name].leave()
            assert (reply.error is ErrorCode.none) == (known is not None)

    @rule(ms=st.integers(1, SESSION_MS // 2))
    def pass_time(self, ms: int) -> None:
        self.world.pass_time(ms)

    # Topics and coordinators

    @rule(name=st.sampled_from(TOPICS), partitions=st.integers(0, 4))
    def change_topic(self, name: str, partitions: int) -> None:
        self.world.put_topic(name, partitions)
        self.states = {key: epoch for key, epoch in self.states.items() if self.world.by_id(key[0])}

    @rule()
    def load(self) -> None:
        before = self.world.shard.stored()
        self.world.load()
        assert self.world.shard.stored() == before

    @rule(data=st.data())
    def look_after(self, data: Any) -> None:
        """As much of what is to be done as a coordinator gets done before something happens to it."""
        self._do(lambda todo: data.draw(st.lists(st.sampled_from(todo), unique=True)) if todo else [])

    @rule()
    def look_after_all(self) -> None:
        self._do(lambda todo: todo)

    # Administrators

    @rule(name=st.sampled_from(TOPICS), index=st.integers(0, 4), start=st.integers(0, 100))
    def alter(self, name: str, index: int, start: int) -> None:
        group = self.world.group
        is_used = group is not None and bool(group.members)
        reply = self.world.alter({name: {index: start}})
        assert (reply.error is ErrorCode.non_empty_group) == is_used
        for topic_id, indexes in reply.partitions.items():
            assert indexes == {index}
            # The holder of the old state is fenced.
            assert reply.epoch > self.states.get((topic_id, index), 0)
            self.states[topic_id, index] = reply.epoch
            self.world.initialized({topic_id: indexes})

    @rule(names=st.none() | _topics)
    def delete(self, names: tuple[str, ...] | None) -> None:
        reply = self.world.delete(names)
        group = self.world.group
        if reply.error is not ErrorCode.none:
            assert group is None or group.members
            return
        assert group is not None
        for place in list(self.states):
            if names is None or self.world.name_of(place[0]) in names:
                assert place[1] in reply.partitions[place[0]]
                assert place[0] in group.states.deleting

    @rule(names=st.none() | _topics, name=_names, topics=_topics)
    def delete_when_all_have_left(
        self, names: tuple[str, ...] | None, name: str, topics: tuple[str, ...]
    ) -> None:
        """And somebody is back before that is done."""
        group = self.world.group
        for member_id in () if group is None else list(group.members):
            self.leave(member_id)
        self.delete(names)
        self.join(name, topics)

    @rule()
    def delete_group(self) -> None:
        group = self.world.group
        error = self.world.delete_group()
        assert (error is ErrorCode.none) == (
            group is not None and not group.members and group.states.is_empty
        )
        if error is ErrorCode.none:
            assert not self.states
            self.epoch_seen = 0

    # What is always true

    @invariant()
    def epochs_grow(self) -> None:
        group = self.world.group
        if group is not None:
            assert group.epoch >= self.epoch_seen
            assert group.target_epoch <= group.epoch
            assert all(member.current.epoch <= group.target_epoch for member in group.members.values())
            self.epoch_seen = group.epoch

    @invariant()
    def only_what_has_a_state_is_read(self) -> None:
        group = self.world.group
        if group is None:
            return
        for topic_id, indexes in group.states.initialized.items():
            if self.world.by_id(topic_id) is not None:
                assert all((topic_id, index) in self.states for index in indexes)
        if group.target_epoch == group.epoch:
            for target in group.targets.values():
                for topic_id, indexes in target.items():
                    assert indexes <= group.states.initialized.get(topic_id, frozenset())

    def teardown(self) -> None:
        """When all is quiet, all that is subscribed to is read, by its subscribers, and they know it."""
        group = self.world.group
        if group is None or not group.members:
            return
        for member_id, stored in list(group.members.items()):
            member = self.members[member_id]
            if member.epoch not in (stored.current.epoch, stored.current.previous_epoch):
                member.join(*stored.subscription.topic_names)
        for _ in range(4):
            self._do(lambda todo: todo)
            for member_id in group.members:
                assert self.members[member_id].beat().error is ErrorCode.none
        records = len(self.world.log)
        assert all(self.members[member_id].beat().upkeep is None for member_id in group.members)
        assert len(self.world.log) == records, "it does not come to rest"
        self._check_all_is_read()

    def _check_all_is_read(self) -> None:
        group = self.world.group
        assert group is not None
        read: dict[UUID, set[int]] = {}
        for member_id, stored in group.members.items():
            assert self.members[member_id].assigned == stored.current.assigned
            for topic_id, indexes in stored.current.assigned.items():
                assert self.world.name_of(topic_id) in stored.subscription.topic_names
                read.setdefault(topic_id, set()).update(indexes)
        topics = [topic for name in sorted(group.subscribed) if (topic := self.world.get(name)) is not None]
        assert read == {topic.id: set(topic.every_partition) for topic in topics}

    # Inside

    def _known(self, name: str) -> int | None:
        group = self.world.group
        member = None if group is None else group.members.get(name)
        return None if member is None else member.current.epoch

    def _do(self, choose: Any) -> None:
        upkeep = current_state_changes(self.world.shard, "g")
        if upkeep is None:
            return
        for topic_id in choose(sorted(upkeep.delete)):
            self.states = {key: epoch for key, epoch in self.states.items() if key[0] != topic_id}
            self.world.deleted(topic_id)
        places = [(topic_id, index) for topic_id, indexes in upkeep.initialize.items() for index in indexes]
        for topic_id, index in choose(sorted(places)):
            if self.world.by_id(topic_id) is not None:
                self.states.setdefault((topic_id, index), upkeep.epoch)
                self.world.initialized({topic_id: frozenset({index})})


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
