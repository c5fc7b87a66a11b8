"""A member of a classic consumer group: heartbeat, and on a rebalance join and sync; the leader deals out."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from kio.schema.heartbeat.v4 import request as heartbeat
from kio.schema.heartbeat.v4 import response as heartbeat_response
from kio.schema.join_group.v9 import request as join
from kio.schema.join_group.v9 import response as join_response
from kio.schema.leave_group.v5 import request as leave
from kio.schema.leave_group.v5 import response as leave_response
from kio.schema.sync_group.v5 import request as sync
from kio.schema.sync_group.v5 import response as sync_response

from benchmarks.load.group_members import RETRIABLE, RETRY_S, Link
from benchmarks.wire.raw_client import Address, BrokerError

_REBALANCE_TIMEOUT = timedelta(seconds=60)
_MEMBER_ID_REQUIRED, _REBALANCE_IN_PROGRESS, _ILLEGAL_GENERATION = 79, 27, 22
_JOIN_AGAIN = frozenset((_REBALANCE_IN_PROGRESS, _ILLEGAL_GENERATION))
_KIND = "consumer"
_ASSIGNOR = "range"
_RESPONSES: dict[type[Any], type[Any]] = {
    join.JoinGroupRequest: join_response.JoinGroupResponse,
    sync.SyncGroupRequest: sync_response.SyncGroupResponse,
    heartbeat.HeartbeatRequest: heartbeat_response.HeartbeatResponse,
    leave.LeaveGroupRequest: leave_response.LeaveGroupResponse,
}


def response_class(request: Any) -> type[Any]:
    return _RESPONSES[type(request)]


class ClassicMember:
    """What is assigned is opaque to the broker, so it is only the number of members that the leader saw."""

    def __init__(
        self, address: Address, group: str, session_timeout_s: float, due_s: float, interval_s: float
    ) -> None:
        self.link = Link(address)
        self.due_s = due_s
        self.heard_s = due_s
        self.generation = -1
        #: How many members shared the partitions of its generation; 0 while it has no assignment.
        self.sharers = 0
        self._group, self._interval_s = group, interval_s
        self._session_timeout = timedelta(seconds=session_timeout_s)
        self._id = ""
        self._next = self._join
        self._led: tuple[Any, ...] = ()

    def request(self) -> Any:
        return self._next()

    def _join(self) -> Any:
        self.sharers = 0
        return join.JoinGroupRequest(
            group_id=self._group,
            session_timeout=self._session_timeout,
            rebalance_timeout=_REBALANCE_TIMEOUT,
            member_id=self._id,
            protocol_type=_KIND,
            protocols=(join.JoinGroupRequestProtocol(name=_ASSIGNOR, metadata=b""),),
        )

    def _sync(self) -> Any:
        share = str(len(self._led)).encode()
        return sync.SyncGroupRequest(
            group_id=self._group,
            generation_id=self.generation,
            member_id=self._id,
            protocol_type=_KIND,
            protocol_name=_ASSIGNOR,
            assignments=tuple(
                sync.SyncGroupRequestAssignment(member_id=each.member_id, assignment=share)
                for each in self._led
            ),
        )

    def _beat(self) -> Any:
        return heartbeat.HeartbeatRequest(
            group_id=self._group, generation_id=self.generation, member_id=self._id
        )

    def farewell(self) -> Any:
        return leave.LeaveGroupRequest(
            group_id=self._group, members=(leave.MemberIdentity(member_id=self._id),)
        )

    def receive(self, response: Any, now_s: float) -> bool:
        self.heard_s = self.due_s = now_s
        code = response.error_code.value
        if code == _MEMBER_ID_REQUIRED:
            self._id = response.member_id
        elif code in _JOIN_AGAIN:
            self._next = self._join
        elif code in RETRIABLE:
            self.due_s = now_s + RETRY_S
        elif code:
            raise BrokerError(f"{type(response).__name__}: {response.error_code.name}")
        else:
            return self._take(response, now_s)
        return False

    def _take(self, response: Any, now_s: float) -> bool:
        match response:
            case join_response.JoinGroupResponse():
                self._id, self.generation = response.member_id, response.generation_id
                self._led = response.members if response.leader == response.member_id else ()
                self._next = self._sync
            case sync_response.SyncGroupResponse():
                self.sharers = int(response.assignment)
                self._next = self._beat
                self.due_s = now_s + self._interval_s
                return True
            case _:
                self.due_s = now_s + self._interval_s
        return False


def is_settled(members: Iterable[ClassicMember]) -> bool:
    """All have what they were given in one generation, in which there were as many as there are now."""
    members = list(members)
    return {member.sharers for member in members} == {len(members)} and len(
        {m.generation for m in members}
    ) == 1
