"""Every message is encoded to the bytes that kio writes, and read as kio reads it: at once, or in steps."""

import io
import sys
from dataclasses import fields
from typing import Any, get_args

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.schema.find_coordinator.v6.response import Coordinator
from kio.serial import entity_writer
from tests.fuzz.messages import Requests

from penstock.broker.network.apis import APIS
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.schemas import (
    MessageWriter,
    message_writer,
    request_decoder,
    stepwise_request_decoder,
    stepwise_writer,
)
from penstock.protocol.steps import Steps

NO_LIMIT = sys.maxsize


def finished(steps: Steps[Any]) -> tuple[Any, int]:
    """The result, and after how many steps."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


def written(write: MessageWriter, message: Any) -> bytes:
    out = io.BytesIO()
    write(out, message)
    return out.getvalue()


@pytest.mark.parametrize("key", sorted(APIS))
def test_messages_of_every_version_are_kios(key: int) -> None:
    messages = Requests(seed=key)
    for version in range(APIS[key].min_version, APIS[key].max_version + 1):
        for schema in (load_request_schema(key, version), load_response_schema(key, version)):
            for _ in range(20):
                message = messages._entity(schema)
                expected = written(entity_writer(schema), message)
                assert written(message_writer(schema), message) == expected
                if (write := stepwise_writer(schema)) is not None:
                    finished(write(out := io.BytesIO(), message))
                    assert out.getvalue() == expected


@pytest.mark.parametrize("key", sorted(APIS))
def test_requests_of_every_version_are_read_in_steps_as_at_once(key: int) -> None:
    messages = Requests(seed=key)
    for version in range(APIS[key].min_version, APIS[key].max_version + 1):
        decode, decode_in_steps = request_decoder(key, version), stepwise_request_decoder(key, version)
        for _ in range(20):
            body = memoryview(messages._body(key, version))
            expected = decode(body, 0)
            assert finished(decode_in_steps(body, 0, NO_LIMIT))[0] == expected
            for cut in {0, 1, len(body) // 2, len(body) - 1} & set(range(len(body))):
                with pytest.raises(MalformedFrame):
                    finished(decode_in_steps(body[:cut], 0, NO_LIMIT))


def test_a_large_array_takes_a_step_for_each_element() -> None:
    request = load_request_schema(3, 12)
    (topics,) = (field for field in fields(request) if field.name == "topics")
    topic = get_args(get_args(topics.type)[0])[0]
    message = request(
        topics=tuple(topic(topic_id=None, name=f"t{number}") for number in range(1000)),
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=False,
    )
    write = stepwise_writer(request)
    assert write is not None
    _, steps = finished(write(out := io.BytesIO(), message))
    assert steps == 1000
    read, steps = finished(stepwise_request_decoder(3, 12)(memoryview(out.getvalue()), 0, NO_LIMIT))
    assert steps >= 1000
    assert [each.name for each in read.topics] == [each.name for each in message.topics]


def test_nothing_is_written_for_what_may_not_be_null() -> None:
    coordinator = Coordinator(
        key=None,
        node_id=1,
        host="a",
        port=1,
        error_code=ErrorCode.none,
        error_message=None,
    )
    with pytest.raises(TypeError):
        written(message_writer(Coordinator), coordinator)
