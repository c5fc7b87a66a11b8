"""Builds the error response to any request: one error in every error field that the schema has.

The response repeats the topics, partitions, groups and other resources of the request, each with the error, as a
broker does that rejects all of them.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace, UnionType
from typing import Any, Final, NamedTuple, Union, get_args, get_origin

from kio.index import load_response_schema

from penstock.protocol.errors import ErrorCode
from penstock.protocol.steps import Steps, finish

FETCH: Final = 1
METADATA: Final = 3
_ALTER_REPLICA_LOG_DIRS: Final = 34
_ALTER_USER_SCRAM_CREDENTIALS: Final = 51

#: For an array of the response: the arrays that the request may list the same resources in; the first match is used.
_REQUEST_ARRAYS: Final = {
    "coordinators": ("coordinator_keys",),
    "groups": ("groups", "group_ids"),
    "markers": ("markers",),
    "members": ("members",),
    "partition_responses": ("partition_data",),
    "partition_result": ("partitions",),
    "partitions": ("partitions", "partition_indexes"),
    "replica_election_results": ("topic_partitions",),
    "responses": ("topic_data", "topics", "topic_names", "resources"),
    "results": ("topics", "resources", "groups_names"),
    "results_by_partition": ("partitions",),
    "results_by_topic_v3_and_below": ("v3_and_below_topics",),
    "results_by_transaction": ("transactions",),
    "topic_results": ("topics",),
    "topics": ("topics",),
    "transaction_states": ("transactional_ids",),
}
_TOPIC_NAMES: Final = ("name", "topic")
_PARTITION_NAMES: Final = ("partition_index", "index", "partition", "partition_id")
#: Fields of the response that identify a resource, and the names that these fields may have in the request.
_IDENTITY_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(_TOPIC_NAMES, _TOPIC_NAMES),
    **dict.fromkeys(_PARTITION_NAMES, _PARTITION_NAMES),
    "topic_name": ("topic_name", *_TOPIC_NAMES),
    **{
        name: (name,)
        for name in ("topic_id", "group_id", "key", "member_id", "group_instance_id", "resource_type")
    },
    **{name: (name,) for name in ("transactional_id", "producer_id")},
    "resource_name": ("resource_name",),
    "user": _TOPIC_NAMES,
}
#: In these responses the top-level error means something else (the fetch session; the whole cluster), and a client that
#: sees one ignores the rest of the response.
_TOP_LEVEL_ERROR_DIFFERS: Final = frozenset({FETCH, METADATA})
_EMPTY: Final[dict[str, Any]] = {
    "string": "",
    "bytes": b"",
    "records": b"",
    "bool": False,
    "float64": 0.0,
    "timedelta_i32": timedelta(0),
    "timedelta_i64": timedelta(0),
    "datetime_i64": datetime(1970, 1, 1, tzinfo=UTC),
}


class _Error(NamedTuple):
    code: ErrorCode
    message: str | None


class NoErrorField(Exception):
    """The response has errors only for the resources of the request, and the request names none."""


def error_response(
    api_key: int, version: int, request: Any, code: ErrorCode, message: str | None = None
) -> Any:
    """Return the error response in this version's class. Raises NoErrorField."""
    return finish(error_response_in_steps(api_key, version, request, code, message))


def error_response_in_steps(
    api_key: int, version: int, request: Any, code: ErrorCode, message: str | None = None
) -> Steps[Any]:
    """Like `error_response`, for a request that may name many resources: each is a step."""
    error = _Error(code, message)
    if api_key == _ALTER_REPLICA_LOG_DIRS:
        # The request groups topics by directory; the response does not.
        request = SimpleNamespace(topics=[topic for folder in request.dirs for topic in folder.topics])
    elif api_key == _ALTER_USER_SCRAM_CREDENTIALS:
        # The request has two lists of users; the response has one, in which each user stands once.
        users = {each.name: each for each in (*request.deletions, *request.upsertions)}
        request = SimpleNamespace(topics=tuple(users.values()))
    schema = load_response_schema(api_key, version)
    response, has_mirrored = yield from _entity_with_error(schema, request, error)
    if has_mirrored and api_key in _TOP_LEVEL_ERROR_DIFFERS:
        return _without_error(response)
    if not _has_error_field(schema, deep=False) and not has_mirrored:
        return (yield from _with_one_element(response, schema, error))
    return response


def _entity_with_error(schema: type[Any], asked: Any, error: _Error) -> Steps[tuple[Any, bool]]:
    """Return the entity, and whether it repeats any resource of the request."""
    values: dict[str, Any] = {}
    has_mirrored = False
    for field in fields(schema):
        element = _entity_of_array(field)
        if element is not None and _has_error_field(element):
            values[field.name] = yield from _mirrored_elements(field.name, element, asked, error)
            has_mirrored = has_mirrored or bool(values[field.name])
        else:
            values[field.name] = _value(field, asked, error)
    return schema(**values), has_mirrored


def _mirrored_elements(name: str, element: Any, asked: Any, error: _Error) -> Steps[tuple[Any, ...]]:
    counterparts = (getattr(asked, other, None) for other in _REQUEST_ARRAYS.get(name, ()))
    items = next((found for found in counterparts if found), ())
    mirrored = []
    for item in items:
        if _can_identify(element, item):
            mirrored.append((yield from _entity_with_error(element, item, error))[0])
        yield
    return tuple(mirrored)


def _can_identify(element: Any, item: Any) -> bool:
    """Whether an element of the response has a field that identifies this item of the request."""
    known = (field.name for field in fields(element) if field.name in _IDENTITY_FIELDS)
    return any(
        isinstance(item, str | int) or any(hasattr(item, n) for n in _IDENTITY_FIELDS[own]) for own in known
    )


def _value(field: Field[Any], asked: Any, error: _Error) -> Any:
    if _is_error(field):
        return error.code
    if field.name == "error_message":
        return error.message
    identity = _identity(field, asked)
    return _empty(field) if identity is None else identity


def _identity(field: Field[Any], asked: Any) -> Any:
    """Return the value that the request has for this field. An item of the request may be a bare name or number."""
    if field.name not in _IDENTITY_FIELDS:
        return None
    if isinstance(asked, str | int):
        is_text = field.metadata.get("kafka_type") == "string"
        return asked if isinstance(asked, str) == is_text else None
    for name in _IDENTITY_FIELDS[field.name]:
        value = getattr(asked, name, None)
        if value is not None:
            return value
    return None


def _empty(field: Field[Any]) -> Any:
    """Return the value for a field that is unknown: an offset, an id or an epoch is then -1, never 0."""
    if field.default is not MISSING:
        return field.default
    if _element_of_array(field) is not None:
        return ()
    kafka_type = field.metadata.get("kafka_type")
    if kafka_type == "records":
        return b""
    if get_origin(field.type) in (UnionType, Union):
        return None
    if is_dataclass(field.type):
        return field.type(**{below.name: _empty(below) for below in fields(field.type)})  # type: ignore[operator]
    return _EMPTY.get(str(kafka_type), -1)


def _without_error(response: Any) -> Any:
    changed = {field.name: ErrorCode.none for field in fields(response) if _is_error(field)}
    return replace(response, **changed)


def _with_one_element(response: Any, schema: type[Any], error: _Error) -> Steps[Any]:
    """Put the error into an element that identifies no resource, such as a data directory. Raises NoErrorField."""
    for field in fields(schema):
        element = _entity_of_array(field)
        if element is not None and _has_error_field(element) and not _has_identity_field(element):
            only, _ = yield from _entity_with_error(element, None, error)
            return replace(response, **{field.name: (only,)})
    raise NoErrorField(schema.__name__)


def _has_identity_field(element: Any) -> bool:
    return any(field.name in _IDENTITY_FIELDS for field in fields(element))


def _has_error_field(schema: type[Any], deep: bool = True) -> bool:
    if any(_is_error(field) for field in fields(schema)):
        return True
    below = filter(None, map(_entity_of_array, fields(schema)))
    return deep and any(_has_error_field(element) for element in below)


def _is_error(field: Field[Any]) -> bool:
    return field.metadata.get("kafka_type") == "error_code"


def _element_of_array(field: Field[Any]) -> Any:
    """Return the type of the elements, or None if the field is not an array."""
    annotation = field.type
    if get_origin(annotation) in (UnionType, Union):
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    return get_args(annotation)[0] if get_origin(annotation) is tuple else None


def _entity_of_array(field: Field[Any]) -> type[Any] | None:
    element = _element_of_array(field)
    return element if isinstance(element, type) and is_dataclass(element) else None
