"""The answer to any request that says one error wherever its schema has a place for it.

The request's topics, partitions, groups and so on are mirrored in the answer, each with the error, as a broker
that refuses all of them would do.
"""

from dataclasses import MISSING, Field, fields, is_dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace, UnionType
from typing import Any, Final, NamedTuple, Union, get_args, get_origin

from kio.index import load_response_schema

from penstock.protocol.errors import ErrorCode

FETCH: Final = 1
METADATA: Final = 3
_ALTER_REPLICA_LOG_DIRS: Final = 34

#: The array of a request that an array of the answer speaks of, first match first.
_COUNTERPARTS: Final = {
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
#: Fields of the answer that say what it speaks of, and what the request may call the same.
_IDENTITIES: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(_TOPIC_NAMES, _TOPIC_NAMES),
    **dict.fromkeys(_PARTITION_NAMES, _PARTITION_NAMES),
    "topic_name": _TOPIC_NAMES,
    **{
        name: (name,)
        for name in ("topic_id", "group_id", "key", "member_id", "group_instance_id", "resource_type")
    },
    **{name: (name,) for name in ("transactional_id", "producer_id")},
    "resource_name": ("resource_name",),
}
#: Here the error at the top means something else (the fetch session; the whole cluster), and clients that see
#: it look no further.
_TOP_IS_APART: Final = frozenset({FETCH, METADATA})
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


class _Said(NamedTuple):
    code: ErrorCode
    message: str | None


class NoPlaceForError(Exception):
    """The request asks for nothing, and the answer has errors only for what was asked."""


def refusal(api_key: int, version: int, request: Any, code: ErrorCode, message: str | None = None) -> Any:
    """The response of this version. Raises NoPlaceForError."""
    error = _Said(code, message)
    if api_key == _ALTER_REPLICA_LOG_DIRS:
        # Asked by folder, answered by topic.
        request = SimpleNamespace(topics=[topic for folder in request.dirs for topic in folder.topics])
    schema = load_response_schema(api_key, version)
    response, has_mirrored = _refused(schema, request, error)
    if has_mirrored and api_key in _TOP_IS_APART:
        return _without_error(response)
    if not _carries_error(schema, deep=False) and not has_mirrored:
        return _with_one_element(response, schema, error)
    return response


def _refused(schema: type[Any], asked: Any, error: _Said) -> tuple[Any, bool]:
    """The entity, and whether anything below it was mirrored."""
    values: dict[str, Any] = {}
    has_mirrored = False
    for field in fields(schema):
        element = _entity_of_array(field)
        if element is not None and _carries_error(element):
            values[field.name] = _mirrored(field.name, element, asked, error)
            has_mirrored = has_mirrored or bool(values[field.name])
        else:
            values[field.name] = _value(field, asked, error)
    return schema(**values), has_mirrored


def _mirrored(name: str, element: Any, asked: Any, error: _Said) -> tuple[Any, ...]:
    counterparts = (getattr(asked, other, None) for other in _COUNTERPARTS.get(name, ()))
    items = next((found for found in counterparts if found), ())
    return tuple(_refused(element, item, error)[0] for item in items if _speaks_of(element, item))


def _speaks_of(element: Any, item: Any) -> bool:
    """Whether the answer's element can name what was asked for."""
    known = (field.name for field in fields(element) if field.name in _IDENTITIES)
    return any(
        isinstance(item, str | int) or any(hasattr(item, n) for n in _IDENTITIES[own]) for own in known
    )


def _value(field: Field[Any], asked: Any, error: _Said) -> Any:
    if _is_error(field):
        return error.code
    if field.name == "error_message":
        return error.message
    identity = _identity(field, asked)
    return _empty(field) if identity is None else identity


def _identity(field: Field[Any], asked: Any) -> Any:
    """What the request says for this field; a bare name or number is all there is to know of an element."""
    if field.name not in _IDENTITIES:
        return None
    if isinstance(asked, str | int):
        is_text = field.metadata.get("kafka_type") == "string"
        return asked if isinstance(asked, str) == is_text else None
    for name in _IDENTITIES[field.name]:
        value = getattr(asked, name, None)
        if value is not None:
            return value
    return None


def _empty(field: Field[Any]) -> Any:
    """What stands where there is nothing to say: an offset, an id or an epoch that is unknown is -1, never 0."""
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


def _with_one_element(response: Any, schema: type[Any], error: _Said) -> Any:
    """The error goes into an element that speaks of nothing in particular, such as a data folder."""
    for field in fields(schema):
        element = _entity_of_array(field)
        if element is not None and _carries_error(element) and not _names_something(element):
            return replace(response, **{field.name: (_refused(element, None, error)[0],)})
    raise NoPlaceForError(schema.__name__)


def _names_something(element: Any) -> bool:
    return any(field.name in _IDENTITIES for field in fields(element))


def _carries_error(schema: type[Any], deep: bool = True) -> bool:
    if any(_is_error(field) for field in fields(schema)):
        return True
    below = filter(None, map(_entity_of_array, fields(schema)))
    return deep and any(_carries_error(element) for element in below)


def _is_error(field: Field[Any]) -> bool:
    return field.metadata.get("kafka_type") == "error_code"


def _element_of_array(field: Field[Any]) -> Any:
    """The type of the elements, or None for what is no array."""
    annotation = field.type
    if get_origin(annotation) in (UnionType, Union):
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    return get_args(annotation)[0] if get_origin(annotation) is tuple else None


def _entity_of_array(field: Field[Any]) -> type[Any] | None:
    element = _element_of_array(field)
    return element if isinstance(element, type) and is_dataclass(element) else None
