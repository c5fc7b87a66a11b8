"""Streams groups (KIP-1071) on a real broker, by requests as Kafka Streams sends them, and by `penstock group`."""

import contextlib
import datetime
from collections.abc import Callable
from typing import Any

from confluent_kafka.admin import AdminClient
from tests.compat.raw import RawConnection, connected, schema
from tests.waiting import eventually

MISSING_INTERNAL_TOPICS = 3
NO_TIMEOUT, TIMEOUT = datetime.timedelta(milliseconds=-1), datetime.timedelta(minutes=5)


def _request(name: str) -> Any:
    return schema("streams_group_heartbeat", 0, name)


class Member:
    """One thread of an application that counts the records of a topic by key."""

    def __init__(self, connection: RawConnection, group: str, topic: str, member_id: str) -> None:
        self._connection, self._group, self._id = connection, group, member_id
        info = _request("TopicInfo")
        self._topology = _request("Topology")(
            epoch=0,
            subtopologies=(
                _request("Subtopology")(
                    subtopology_id="0",
                    source_topics=(topic,),
                    source_topic_regex=(),
                    state_changelog_topics=(
                        info(
                            name=f"{group}-changelog",
                            partitions=0,
                            replication_factor=1,
                            topic_configs=(_request("KeyValue")(key="cleanup.policy", value="compact"),),
                        ),
                    ),
                    repartition_sink_topics=(),
                    repartition_source_topics=(),
                    copartition_groups=(),
                ),
            ),
        )
        self.epoch = 0
        self.active: Any = ()

    def beat(self, epoch: int | None = None) -> Any:
        sent = self.epoch if epoch is None else epoch
        joins = sent == 0
        reply = self._connection.call(
            _request("StreamsGroupHeartbeatRequest")(
                group_id=self._group,
                member_id=self._id,
                member_epoch=sent,
                endpoint_information_epoch=0,
                rebalance_timeout=TIMEOUT if joins else NO_TIMEOUT,
                topology=self._topology if joins else None,
                active_tasks=() if joins else self.active,
                standby_tasks=(),
                warmup_tasks=(),
                process_id=self._id if joins else None,
                user_endpoint=None,
                client_tags=() if joins else None,
                task_offsets=None,
                task_end_offsets=None,
                shutdown_application=False,
            )
        )
        assert reply.error_code.value == 0, reply
        self.epoch = reply.member_epoch
        if reply.active_tasks is not None:
            ids = _request("TaskIds")
            self.active = tuple(
                ids(subtopology_id=part.subtopology_id, partitions=part.partitions)
                for part in reply.active_tasks
            )
        return reply


def test_a_streams_group_creates_its_topics_shares_its_tasks_and_is_shown(
    broker: Any,
    admin: AdminClient,
    penstock: Any,
    answer: Any,
    group: str,
    new_topic: Callable[..., str],
    closing: contextlib.ExitStack,
) -> None:
    topic = new_topic(partitions=4)
    penstock("group", "alter", group, "-c", "streams.initial.rebalance.delay.ms=0")
    penstock("group", "alter", group, "-c", "streams.assignment.interval.ms=0")
    connection = closing.enter_context(connected(broker.address))
    one, two = (Member(connection, group, topic, name) for name in ("one", "two"))
    first = one.beat()
    assert [status.status_code for status in first.status] == [MISSING_INTERNAL_TOPICS]

    def shared() -> bool:
        one.beat()
        two.beat()
        owned = [number for member in (one, two) for part in member.active for number in part.partitions]
        return sorted(owned) == [0, 1, 2, 3] and len(one.active) == len(two.active) == 1

    eventually(shared, what="both members have tasks")
    changelog = admin.list_topics(f"{group}-changelog", timeout=20).topics[f"{group}-changelog"]
    assert len(changelog.partitions) == 4
    assert answer("topic", "describe", f"{group}-changelog")[0]["settings"]["cleanup.policy"] == "compact"

    [described] = answer("group", "describe", group)
    assert (described["type"], described["state"]) == ("streams", "stable")
    assert sorted(member["member"] for member in described["members"]) == ["one", "two"]
    assert {part["topic"] for part in described["partitions"]} == {topic}
    assert all(part["member"] in ("one", "two") for part in described["partitions"])
    listed = {row["group"]: row for row in answer("group", "list")}[group]
    assert (listed["type"], listed["members"]) == ("streams", 2)
    assert "has members" in penstock("group", "delete", group, "--yes", code=1)[1]

    two.beat(epoch=-1)
    eventually(lambda: one.beat() and sum(len(part.partitions) for part in one.active) == 4)
    one.beat(epoch=-1)
    penstock("group", "delete", group, "--yes")
    assert group not in {row["group"] for row in answer("group", "list")}
