"""Hand-packed share requests have the bytes of kio, and responses are read as kio reads them."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from benchmarks.load.acknowledgements import Dice, Mix, check_once, final_count
from benchmarks.load.nats import _REPLY, _TAILS
from benchmarks.wire.raw_client import BrokerError
from benchmarks.wire.share_frames import (
    ACCEPT,
    REJECT,
    RELEASE,
    Acquired,
    Outcomes,
    ShareWriter,
    check_share_acknowledge,
    read_share_fetch,
)
from kio.schema.errors import ErrorCode
from kio.schema.share_acknowledge.v1 import request as acknowledge_request
from kio.schema.share_acknowledge.v1 import response as acknowledge
from kio.schema.share_fetch.v1 import request as fetch_request
from kio.schema.share_fetch.v1 import response as fetch
from tests.unit.benchmarks.kio_frames import encode_response, parse_request

TOPIC = UUID("6f1f3a52-54f5-4b0e-8f0e-0a2f6b7c8d9e")
SAID = {0: [Outcomes(10, bytes([ACCEPT, RELEASE, REJECT]))], 3: [Outcomes(7, bytes([ACCEPT]) * 300)]}


@pytest.fixture
def writer() -> ShareWriter:
    return ShareWriter("group", "member", TOPIC, records_max=500, wait_ms=250)


def check_said(topics: Any) -> None:
    (topic,) = topics
    assert topic.topic_id == TOPIC
    first, second = topic.partitions
    (batch,) = first.acknowledgement_batches
    assert (batch.first_offset, batch.last_offset) == (10, 12)
    assert batch.acknowledge_types == (ACCEPT, RELEASE, REJECT)
    (batch,) = second.acknowledgement_batches
    assert (second.partition_index, batch.first_offset, batch.last_offset) == (3, 7, 306)


def test_a_fetch_carries_outcomes_and_moves_the_session_on(writer: ShareWriter) -> None:
    opening = parse_request(writer.fetch({0: [], 3: []}), fetch_request.ShareFetchRequest)
    assert (opening.share_session_epoch, opening.group_id, opening.member_id) == (0, "group", "member")
    assert [partition.partition_index for partition in opening.topics[0].partitions] == [0, 3]
    assert opening.max_wait == timedelta(milliseconds=250)
    second = parse_request(writer.fetch(SAID), fetch_request.ShareFetchRequest)
    assert (second.share_session_epoch, second.max_records) == (1, 500)
    check_said(second.topics)
    assert parse_request(writer.fetch({}), fetch_request.ShareFetchRequest).topics == ()


def test_acknowledging_apart_and_for_the_last_time(writer: ShareWriter) -> None:
    writer.fetch({})
    apart = parse_request(writer.acknowledge(SAID), acknowledge_request.ShareAcknowledgeRequest)
    assert apart.share_session_epoch == 1
    check_said(apart.topics)
    last = parse_request(writer.acknowledge({}, is_last=True), acknowledge_request.ShareAcknowledgeRequest)
    assert last.share_session_epoch == -1


def fetched(error: ErrorCode = ErrorCode.none, said: int = 0) -> memoryview:
    rows = tuple(
        fetch.AcquiredRecords(first_offset=at, last_offset=at + 9, delivery_count=1) for at in (0, 30)
    )
    nobody = fetch.LeaderIdAndEpoch(leader_id=-1, leader_epoch=-1)
    partitions = (
        fetch.PartitionData(
            partition_index=2,
            error_code=ErrorCode.none,
            acknowledge_error_code=said,
            current_leader=nobody,
            records=b"x" * 200,
            acquired_records=rows,
        ),
        fetch.PartitionData(
            partition_index=5,
            error_code=error,
            error_message="a message" if error.value else None,
            acknowledge_error_code=0,
            current_leader=nobody,
            records=b"",
            acquired_records=(),
        ),
    )
    return encode_response(
        fetch.ShareFetchResponse(
            throttle_time=timedelta(0),
            error_code=ErrorCode.none,
            acquisition_lock_timeout=timedelta(seconds=30),
            responses=(fetch.ShareFetchableTopicResponse(topic_id=TOPIC, partitions=partitions),),
            node_endpoints=(),
        )
    )


def test_what_was_acquired_is_read() -> None:
    assert read_share_fetch(fetched()) == {2: [Acquired(0, 9), Acquired(30, 39)], 5: []}


def test_errors_of_either_kind_are_not_passed_over() -> None:
    with pytest.raises(BrokerError, match="partition 5: 6 a message"):
        read_share_fetch(fetched(error=ErrorCode.not_leader_or_follower))
    with pytest.raises(BrokerError, match="acknowledging: 121"):
        read_share_fetch(fetched(said=121))


@pytest.mark.parametrize("error", [ErrorCode.none, ErrorCode.invalid_record_state])
def test_the_answer_to_outcomes_is_checked(error: ErrorCode) -> None:
    nobody = acknowledge.LeaderIdAndEpoch(leader_id=-1, leader_epoch=-1)
    data = acknowledge.PartitionData(partition_index=1, error_code=error, current_leader=nobody)
    frame = encode_response(
        acknowledge.ShareAcknowledgeResponse(
            throttle_time=timedelta(0),
            error_code=ErrorCode.none,
            responses=(acknowledge.ShareAcknowledgeTopicResponse(topic_id=TOPIC, partitions=(data, data)),),
            node_endpoints=(),
        )
    )
    if error.value:
        with pytest.raises(BrokerError, match="partition 1"):
            check_share_acknowledge(frame)
    else:
        check_share_acknowledge(frame)


def test_a_record_may_be_done_with_once() -> None:
    first = (0, 2, bytes([ACCEPT, RELEASE, REJECT]))
    again = (0, 3, bytes([ACCEPT]))
    assert check_once([first, again], {0: 10}) == 3
    with pytest.raises(BrokerError, match="given out again"):
        check_once([first, (0, 4, bytes([RELEASE, ACCEPT])), (0, 4, bytes([REJECT]))], {0: 10})


def test_outcomes_are_the_same_for_a_seed_and_in_proportion() -> None:
    mix = Mix(released=10, rejected=20)
    thrown = Dice(mix, 1).throw(100_000)
    assert thrown == Dice(mix, 1).throw(100_000) != Dice(mix, 2).throw(100_000)
    assert 0.09 < thrown.count(RELEASE) / len(thrown) < 0.11
    assert 0.19 < thrown.count(REJECT) / len(thrown) < 0.21
    assert final_count(thrown) == len(thrown) - thrown.count(RELEASE)


def test_messages_of_jetstream_are_told_by_where_to_answer() -> None:
    subject = b"$JS.ACK.s.c.1.7.9.1700000000000000000.3"
    data = b"MSG s 1 %s 5\r\nhello\r\nMSG _INBOX.1.s 1 0\r\n\r\n" % subject
    assert _REPLY.findall(data) == [subject]
    assert _TAILS[ACCEPT] == b" 4\r\n+ACK\r\n"
    assert _TAILS[REJECT] == b" 5\r\n+TERM\r\n"
