"""An error response exists for every request in every version."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from typing import Any, get_args, get_origin
from uuid import UUID

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from penstock.broker.network.apis import API_VERSIONS, APIS, FETCH, PRODUCE, Api
from penstock.broker.network.error_responses import METADATA, NoErrorField, error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import request_reader, upgrader

ERROR = ErrorCode.not_coordinator
TOPIC_ID = UUID(int=5)
DESCRIBE_LOG_DIRS = 35
SERVED = [
    (api.name, api.key, v) for api in APIS.values() for v in range(api.min_version, api.max_version + 1)
]


_SCALARS = {
    "string": "some name",
    "uuid": TOPIC_ID,
    "bytes": b"x",
    "records": b"x",
    "bool": True,
    "timedelta_i32": timedelta(seconds=1),
    "timedelta_i64": timedelta(seconds=1),
}


@dataclass
class _Nothing:
    """A request that says nothing; what it lacks takes its default."""


def _sample(schema: type[Any]) -> Any:
    """A request in which every array has one element, and everything has a value."""
    return schema(**{field.name: _sample_value(field) for field in fields(schema)})


def _sample_value(field: Any) -> Any:
    annotation = field.type
    if get_origin(annotation) not in (tuple, None):
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    is_array = get_origin(annotation) is tuple
    element = get_args(annotation)[0] if is_array else annotation
    value = _sample(element) if is_dataclass(element) else _scalar(field)
    return (value,) if is_array else value


def _scalar(field: Any) -> Any:
    return _SCALARS.get(field.metadata["kafka_type"], 7)


def _errors(entity: Any) -> Iterator[ErrorCode]:
    for field in fields(entity):
        value = getattr(entity, field.name)
        if field.metadata.get("kafka_type") == "error_code":
            yield value
        elif isinstance(value, tuple):
            for element in value:
                if is_dataclass(element):
                    yield from _errors(element)


def _sent(api_key: int, version: int, request: Any) -> Any:
    """Through the bytes that a client would send."""
    out = io.BytesIO()
    entity_writer(load_request_schema(api_key, version))(out, request)
    return request_reader(api_key, version)(memoryview(out.getvalue()), 0)


def _received(api_key: int, version: int, response: Any) -> Any:
    out = io.BytesIO()
    schema = load_response_schema(api_key, version)
    entity_writer(schema)(out, response)
    return entity_reader(schema)(memoryview(out.getvalue()), 0)[0]


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_every_request_can_be_refused(api: Api) -> None:
    for version in range(api.min_version, api.max_version + 1):
        request = _sent(api.key, version, _sample(load_request_schema(api.key, version)))
        response = error_response(api.key, version, request, ERROR)
        assert _received(api.key, version, response) == response
        errors = set(_errors(response))
        # Their top level speaks of something else; see the tests below.
        expected = {ERROR, ErrorCode.none} if api.key in (FETCH, METADATA) else {ERROR}
        assert ERROR in errors <= expected, version


def test_what_was_asked_is_mirrored() -> None:
    request = _sent(PRODUCE, 9, _sample(load_request_schema(PRODUCE, 9)))
    (topic,) = error_response(PRODUCE, 9, request, ERROR, "for a reason").responses
    (partition,) = topic.partition_responses
    assert (topic.name, partition.index, partition.error_code) == ("some name", 7, ERROR)
    assert partition.base_offset == -1
    assert partition.error_message == "for a reason"


def test_topics_are_mirrored_by_id() -> None:
    request = _sent(PRODUCE, 13, _sample(load_request_schema(PRODUCE, 13)))
    (topic,) = error_response(PRODUCE, 13, request, ERROR).responses
    assert topic.topic_id == TOPIC_ID


@pytest.mark.parametrize(
    ("api_key", "version", "array", "name"),
    [(10, 4, "coordinators", "key"), (15, 5, "groups", "group_id"), (42, 2, "results", "group_id")],
)
def test_bare_names_are_mirrored(api_key: int, version: int, array: str, name: str) -> None:
    request = _sent(api_key, version, _sample(load_request_schema(api_key, version)))
    (element,) = getattr(error_response(api_key, version, request, ERROR), array)
    assert getattr(element, name) == "some name"


def test_a_refused_fetch_leaves_the_session_alone() -> None:
    request = _sent(FETCH, 11, _sample(load_request_schema(FETCH, 11)))
    response = error_response(FETCH, 11, request, ERROR)
    assert (response.error_code, response.session_id) == (ErrorCode.none, 0)
    assert response.responses[0].partitions[0].error_code == ERROR


def test_a_fetch_in_a_session_names_nothing_and_ends_the_session() -> None:
    request = upgrader(_Nothing, load_request_schema(FETCH, 11))(_Nothing())
    assert error_response(FETCH, 11, request, ERROR).error_code == ERROR


def test_an_element_without_a_counterpart_in_the_request_carries_the_error() -> None:
    request = upgrader(_Nothing, load_request_schema(DESCRIBE_LOG_DIRS, 1))(_Nothing())
    (result,) = error_response(DESCRIBE_LOG_DIRS, 1, request, ERROR).results
    assert result.error_code == ERROR


def test_asking_for_nothing_leaves_no_place_for_an_error() -> None:
    request = upgrader(_Nothing, load_request_schema(PRODUCE, 9))(_Nothing())
    with pytest.raises(NoErrorField):
        error_response(PRODUCE, 9, request, ERROR)


def test_api_versions_say_only_the_error() -> None:
    request = _sent(API_VERSIONS, 3, _sample(load_request_schema(API_VERSIONS, 3)))
    response = error_response(API_VERSIONS, 3, request, ERROR)
    assert (response.error_code, response.api_keys) == (ERROR, ())
