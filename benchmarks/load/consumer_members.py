"""A member of a consumer group by KIP-848: one kind of request, and the broker decides who gets what."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from kio.schema.consumer_group_heartbeat.v1 import request as heartbeat
from kio.schema.consumer_group_heartbeat.v1 import response as heartbeat_response

from benchmarks.load.group_members import RETRIABLE, RETRY_S, Link
from benchmarks.wire.raw_client import Address, BrokerError

_REBALANCE_TIMEOUT = timedelta(seconds=60)
_LEAVES = -1


_RESPONSE: type[Any] = heartbeat_response.ConsumerGroupHeartbeatResponse


def response_class(_: Any) -> type[Any]:
    return _RESPONSE


class ConsumerMember:
    """Heartbeats every `interval_s`, or as often as it is told to, and at once when it holds something else."""

    def __init__(
        self, address: Address, group: str, topic: str, due_s: float, interval_s: float | None
    ) -> None:
        self.link = Link(address)
        self.due_s = due_s
        self.epoch = 0
        self.owned: dict[UUID, frozenset[int]] = {}
        self.heard_s = due_s
        self._group, self._topic = group, topic
        self._id = str(uuid4())
        self._interval_s = interval_s
        self._says_owned = True

    def request(self) -> Any:
        is_joining = self.epoch == 0
        owned = None
        if self._says_owned:
            owned = tuple(
                heartbeat.TopicPartitions(topic_id=topic, partitions=tuple(sorted(partitions)))
                for topic, partitions in self.owned.items()
            )
        return self._request(
            rebalance_timeout=_REBALANCE_TIMEOUT if is_joining else timedelta(milliseconds=-1),
            subscribed_topic_names=(self._topic,) if is_joining else None,
            topic_partitions=owned,
        )

    def farewell(self) -> Any:
        self.epoch = _LEAVES
        return self._request(topic_partitions=None)

    def _request(self, **fields: Any) -> Any:
        return heartbeat.ConsumerGroupHeartbeatRequest(
            group_id=self._group, member_id=self._id, member_epoch=self.epoch, **fields
        )

    def receive(self, response: Any, now_s: float) -> bool:
        if response.error_code.value:
            if response.error_code.value not in RETRIABLE:
                raise BrokerError(
                    f"heartbeat: {response.error_code.name} {response.error_message} "
                    f"Last heard {now_s - self.heard_s:.2f} s ago, epoch {self.epoch}."
                )
            self.due_s = now_s + RETRY_S
            return False
        self.heard_s = now_s
        before = self.epoch, self.owned
        self.epoch = response.member_epoch
        if response.assignment is not None:
            self.owned = {
                topic.topic_id: frozenset(topic.partitions) for topic in response.assignment.topic_partitions
            }
        self._says_owned = before[1] != self.owned
        interval_s = self._interval_s or response.heartbeat_interval.total_seconds()
        self.due_s = now_s if self._says_owned else now_s + interval_s
        return before != (self.epoch, self.owned)


def is_settled(members: Iterable[ConsumerMember], partitions: int, after_epoch: int) -> bool:
    """All are in one epoch that came after the event, and every partition has one owner."""
    members = list(members)
    epochs = {member.epoch for member in members}
    if len(epochs) != 1 or epochs.pop() <= after_epoch:
        return False
    owned = [(topic, index) for m in members for topic, indexes in m.owned.items() for index in indexes]
    return len(owned) == len(set(owned)) == partitions
