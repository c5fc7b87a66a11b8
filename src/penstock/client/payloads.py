"""Payloads: the values that applications publish and handlers take, as bytes and back; and what a handler takes.

`bytes` go as they are and `str` as UTF-8. Everything else is JSON: pydantic reads it where the annotation contains one
of its models, else msgspec where it is installed, else `penstock.client.json_decoder`. Neither library is required, or
imported unless it is used. A value that does not fit the annotation raises PayloadError, whose message names the
field.

A handler takes `(payload)`, `(payload, message)` or `(message)`; a batch handler takes lists of them. The first
parameter is the payload unless it is annotated as a Message, or is called `message` and has no annotation. A database
handle goes by name: `connection`, `session` or `tx`. Other parameters with defaults belong to the handler itself.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import importlib
import inspect
import json
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Final, Protocol, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

__all__ = (
    "DATABASE_PARAMETERS",
    "BytesCodec",
    "Codec",
    "HandlerSignature",
    "PayloadError",
    "TextCodec",
    "codec_for",
    "encode",
    "inspect_handler",
    "json_codec",
    "json_encoder",
)


DATABASE_PARAMETERS: Final = ("connection", "session", "tx")
_MESSAGE_PARAMETERS: Final = ("message", "messages", "msg", "msgs")
_ALLOWED_SIGNATURES: Final = "a handler takes (payload), (payload, message) or (message)"
_LIST_TYPES: Final = (
    list,
    collections.abc.Sequence,
    collections.abc.Collection,
    collections.abc.Iterable,
)
_POSITIONAL_KINDS: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NO_ANNOTATION: Final = inspect.Parameter.empty
_NO_DEFAULT: Final = inspect.Parameter.empty


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSignature:
    #: The annotation of one payload, Any if it has none; None if the handler takes no payload.
    payload: Any
    takes_message: bool
    #: Whether the handler takes lists of payloads and messages.
    is_batch: bool
    is_async: bool
    #: Database handles that are passed by name.
    extras: tuple[str, ...]


def inspect_handler(handler: Callable[..., Any], *, batch: bool = False) -> HandlerSignature:
    """Raises TypeError for a signature that a handler cannot have."""
    function = _underlying_function(handler)
    name = getattr(function, "__qualname__", repr(handler))
    parameters = [_resolve_annotation(each, function, name) for each in _handler_parameters(handler, name)]
    positional = [each for each in parameters if each.kind in _POSITIONAL_KINDS]
    if not positional:
        raise TypeError(f"{name} takes neither payload nor message: {_ALLOWED_SIGNATURES}")
    taken, payload, takes_message = _payload_and_message(positional, name, batch=batch)
    others = [each for each in parameters if each not in taken]
    return HandlerSignature(
        payload=payload,
        takes_message=takes_message,
        is_batch=batch,
        is_async=_is_async(handler, name),
        extras=_database_parameters(others, name),
    )


# The function


def _underlying_function(handler: Any) -> Any:
    """Returns the function behind a partial, a callable object, a method or a decorator."""
    if inspect.isclass(handler) or not callable(handler):
        raise TypeError(f"{handler!r} is not a handler: {_ALLOWED_SIGNATURES}")
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not inspect.isroutine(handler):
        handler = type(handler).__call__
    return inspect.unwrap(getattr(handler, "__func__", handler))


def _is_async(handler: Any, name: str) -> bool:
    while isinstance(handler, functools.partial):
        handler = handler.func
    called = handler if inspect.isroutine(handler) else type(handler).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise TypeError(f"{name} is a generator function: a handler must return, not yield")
    return inspect.iscoroutinefunction(called)


def _handler_parameters(handler: Any, name: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(handler).parameters.values())
    except ValueError as flaw:
        raise TypeError(f"{name}: {flaw}") from flaw


def _resolve_annotation(parameter: inspect.Parameter, function: Any, name: str) -> inspect.Parameter:
    """Returns the parameter with its annotation resolved, which may be a string."""
    if parameter.annotation is _NO_ANNOTATION or parameter.kind not in _SINGLE_KINDS:
        return parameter
    alone = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        hints = get_type_hints(alone, getattr(function, "__globals__", {}), _nonlocals(function), True)
    except Exception as flaw:
        raise TypeError(
            f"{name}: the annotation {parameter.annotation!r} of {parameter.name} cannot be resolved ({flaw}): "
            "define its class at the top of a module, or remove 'from __future__ import annotations'"
        ) from flaw
    return parameter.replace(annotation=hints[parameter.name])


_SINGLE_KINDS: Final = (*_POSITIONAL_KINDS, inspect.Parameter.KEYWORD_ONLY)


def _nonlocals(function: Any) -> dict[str, Any]:
    """Returns the variables of enclosing functions that the function uses."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    names = code.co_freevars if code is not None else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=False) if _has_value(cell)}


def _has_value(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# Parameters


def _payload_and_message(
    positional: list[inspect.Parameter], name: str, *, batch: bool
) -> tuple[list[inspect.Parameter], Any, bool]:
    """Returns the parameters for payload and message, the payload's annotation, and whether there is a message."""
    first = positional[0]
    if _is_message(first, name, batch=batch, by_name=True):
        return [first], None, True
    payload = _payload_annotation(first, name, batch=batch)
    second = positional[1] if len(positional) > 1 else None
    if second is None or second.name in DATABASE_PARAMETERS:
        return [first], payload, False
    if not _is_message(second, name, batch=batch, by_name=second.default is not _NO_DEFAULT):
        return [first], payload, False
    return [first, second], payload, True


def _payload_annotation(parameter: inspect.Parameter, name: str, *, batch: bool) -> Any:
    annotation = Any if parameter.annotation is _NO_ANNOTATION else parameter.annotation
    if not batch or annotation is Any:
        return annotation
    items = _item_type(annotation)
    if items is None:
        raise TypeError(
            f"{name} handles batches: {parameter.name} must be a list of payloads, as in "
            f"{parameter.name}: list[{getattr(annotation, '__name__', annotation)}]"
        )
    return items


def _is_message(parameter: inspect.Parameter, name: str, *, batch: bool, by_name: bool) -> bool:
    """Whether the parameter takes a message: by its annotation, else by its name, or any name if not `by_name`."""
    annotation = parameter.annotation
    if annotation is _NO_ANNOTATION:
        return not by_name or parameter.name in _MESSAGE_PARAMETERS
    items = _item_type(annotation)
    if _is_message_class(annotation) and batch:
        raise TypeError(f"{name} handles batches: write {parameter.name}: list[Message]")
    if _is_message_class(items) and not batch:
        raise TypeError(
            f"{name} handles one message at a time: write {parameter.name}: Message, or pass batch="
        )
    return _is_message_class(items if batch else annotation)


def _item_type(annotation: Any) -> Any:
    """Returns the item type of a list; None for other annotations."""
    if annotation not in _LIST_TYPES and get_origin(annotation) not in _LIST_TYPES:
        return None
    arguments = get_args(annotation)
    return arguments[0] if arguments else Any


def _is_message_class(annotation: Any) -> bool:
    from penstock.client.app.message import Message  # it imports this module

    return isinstance(annotation, type) and issubclass(annotation, Message)


def _database_parameters(parameters: list[inspect.Parameter], name: str) -> tuple[str, ...]:
    found = []
    for each in parameters:
        if each.kind not in _SINGLE_KINDS:
            continue  # *args and **kwargs get no arguments
        if each.name in DATABASE_PARAMETERS and each.kind is not inspect.Parameter.POSITIONAL_ONLY:
            found.append(each.name)
        elif each.default is _NO_DEFAULT:
            raise TypeError(
                f"{name}: unknown parameter {each.name}: {_ALLOWED_SIGNATURES}, "
                f"and by name {', '.join(DATABASE_PARAMETERS)}"
            )
    return tuple(found)


_FLAWS_SHOWN_MAX: Final = 3


class PayloadError(ValueError):
    """A value does not match the declared type; the message says where."""


class Codec(Protocol):
    def encode(self, value: Any) -> bytes:
        """Raises PayloadError."""

    def decode(self, data: bytes | None) -> Any:
        """None is a tombstone: it matches an annotation with `| None`, or no annotation. Raises PayloadError."""


# Bytes and text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BytesCodec:
    """`Codec` that does not change the bytes."""

    takes_none: bool

    def encode(self, value: bytes) -> bytes:
        if not isinstance(value, bytes):
            raise PayloadError(f"expected bytes, not {type(value).__qualname__}")
        return value

    def decode(self, data: bytes | None) -> bytes | None:
        if data is None and not self.takes_none:
            raise _tombstone_error("bytes")
        return data


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextCodec:
    """`Codec` of text as UTF-8, without JSON."""

    takes_none: bool

    def encode(self, value: str) -> bytes:
        try:
            return value.encode()
        except UnicodeEncodeError as flaw:
            raise PayloadError(f"the text cannot be sent as UTF-8: {flaw.reason}") from flaw

    def decode(self, data: bytes | None) -> str | None:
        if data is None:
            if not self.takes_none:
                raise _tombstone_error("str")
            return None
        try:
            return data.decode()
        except UnicodeDecodeError as flaw:
            raise PayloadError(f"the value is not UTF-8 text: {flaw.reason} at byte {flaw.start}") from flaw


def _tombstone_error(name: str) -> PayloadError:
    return PayloadError(f"the message has no value, but {name} is declared; {name} | None accepts tombstones")


# JSON


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JsonCodec:
    """`Codec` of JSON that matches the annotation `name`."""

    name: str
    takes_none: bool
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]
    #: Describes an error of the library in a sentence.
    describe_error: Callable[[str, Exception], str]

    def encode(self, value: Any) -> bytes:
        try:
            return self.write(value)
        except (TypeError, ValueError, RecursionError) as flaw:
            raise PayloadError(f"a {type(value).__qualname__} cannot be sent: {flaw}") from flaw

    def decode(self, data: bytes | None) -> Any:
        if data is None:
            if not self.takes_none:
                raise _tombstone_error(self.name)
            return None
        try:
            return self.read(data)
        except MemoryError:
            raise  # the value did not cause it
        except Exception as flaw:  # a class may validate itself and raise any exception
            raise PayloadError(self.describe_error(self.name, flaw)) from flaw


def json_codec(annotation: Any, *, takes_none: bool) -> Codec:
    """Raises TypeError for an annotation that JSON cannot be converted to."""
    name = _annotation_name(annotation)
    try:
        read, write, describe_error = _json_library(annotation)
    except NameError as flaw:
        raise TypeError(f"{name}: its annotations cannot be resolved: {flaw}") from flaw
    return JsonCodec(name=name, takes_none=takes_none, read=read, write=write, describe_error=describe_error)


_JsonLibrary = tuple[Callable[[bytes], Any], Callable[[Any], bytes], Callable[[str, Exception], str]]


def _json_library(annotation: Any) -> _JsonLibrary:
    has_model = any(
        hasattr(each, "__pydantic_validator__") for each in _nested_annotations(annotation, set())
    )
    if has_model:
        return _pydantic_library(annotation)
    if _is_installed("msgspec"):
        return _msgspec_library(annotation)
    return _standard_library(annotation)


def _annotation_name(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _is_installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _mismatch_text(name: str, flaw: str) -> str:
    return f"the value does not match {name}: {flaw}"


def _validation_text(name: str, flaw: Exception) -> str:
    """Describes an exception that the class itself raised."""
    return _mismatch_text(name, f"{type(flaw).__qualname__}: {flaw}")


# pydantic


def _nested_annotations(annotation: Any, seen: set[int]) -> Iterator[Any]:
    if id(annotation) in seen:
        return
    seen.add(id(annotation))
    yield annotation
    for inner in (*get_args(annotation), *_field_types(annotation)):
        yield from _nested_annotations(inner, seen)


def _field_types(annotation: Any) -> tuple[Any, ...]:
    if not isinstance(annotation, type) or hasattr(annotation, "__pydantic_validator__"):
        return ()
    if dataclasses.is_dataclass(annotation) or is_typeddict(annotation):
        return tuple(get_type_hints(annotation, include_extras=True).values())
    return ()


def _pydantic_library(annotation: Any) -> _JsonLibrary:
    pydantic = importlib.import_module("pydantic")
    try:
        adapter = pydantic.TypeAdapter(annotation)
    except pydantic.errors.PydanticUserError as flaw:
        raise TypeError(f"{_annotation_name(annotation)}: {flaw.message}") from flaw

    def describe_error(name: str, flaw: Exception) -> str:
        if not isinstance(flaw, pydantic.ValidationError):
            return _validation_text(name, flaw)
        flaws = flaw.errors(include_url=False, include_context=False, include_input=False)
        if flaws[0]["type"] == "json_invalid":
            return f"the value is not JSON: {flaws[0]['msg'].removeprefix('Invalid JSON: ')}"
        parts = [_pydantic_flaw_text(each) for each in flaws[:_FLAWS_SHOWN_MAX]]
        more = [f"and {len(flaws) - _FLAWS_SHOWN_MAX} more"] if len(flaws) > _FLAWS_SHOWN_MAX else []
        return _mismatch_text(name, "; ".join(parts + more))

    return adapter.validate_json, lambda value: adapter.dump_json(value, by_alias=True), describe_error


def _pydantic_flaw_text(flaw: Any) -> str:
    path = ".".join(str(each) for each in flaw["loc"])
    return f"{path}: {flaw['msg']}" if path else str(flaw["msg"])


# msgspec


def _msgspec_library(annotation: Any) -> _JsonLibrary:
    import msgspec

    _reject_unknown_classes(annotation)
    try:
        decoder = msgspec.json.Decoder(annotation)
    except TypeError as flaw:
        raise TypeError(f"{_annotation_name(annotation)} cannot be read from JSON: {flaw}") from flaw

    def describe_error(name: str, flaw: Exception) -> str:
        if isinstance(flaw, msgspec.ValidationError):
            text = str(flaw)
            return _mismatch_text(name, text[:1].lower() + text[1:])
        is_json = not isinstance(flaw, msgspec.DecodeError | RecursionError | UnicodeDecodeError)
        return _validation_text(name, flaw) if is_json else f"the value is not JSON: {flaw}"

    return decoder.decode, json_encoder(), describe_error


def _reject_unknown_classes(annotation: Any) -> None:
    """Raises TypeError for a class that msgspec does not know; msgspec itself would refuse every value later."""
    import msgspec

    try:
        info = msgspec.inspect.type_info(annotation)
    except TypeError as flaw:
        raise TypeError(f"{_annotation_name(annotation)} cannot be read from JSON: {flaw}") from flaw
    for each in _type_nodes(info, set()):
        if isinstance(each, msgspec.inspect.CustomType):
            raise TypeError(
                f"{_annotation_name(annotation)}: cannot convert JSON to {_annotation_name(each.cls)}"
            )


def _type_nodes(info: Any, seen: set[int]) -> Iterator[Any]:
    if id(info) in seen:
        return
    seen.add(id(info))
    yield info
    for name in getattr(info, "__struct_fields__", ()):
        inner = getattr(info, name)
        for each in inner if isinstance(inner, tuple) else (inner,):
            if hasattr(each, "__struct_fields__"):
                yield from _type_nodes(each, seen)


# The standard library


def _standard_library(annotation: Any) -> _JsonLibrary:
    from penstock.client.json_decoder import JsonMismatch, json_reader

    def describe_error(name: str, flaw: Exception) -> str:
        if isinstance(flaw, JsonMismatch):
            return _mismatch_text(name, str(flaw))
        if isinstance(flaw, json.JSONDecodeError | RecursionError | UnicodeDecodeError):
            return f"the value is not JSON: {flaw}"
        return _validation_text(name, flaw)

    return json_reader(annotation), json_encoder(), describe_error


# Encoding


def json_encoder() -> Callable[[object], bytes]:
    """Returns a function that encodes any value, and raises TypeError or ValueError if that is not possible."""
    if not _is_installed("msgspec"):
        from penstock.client.json_decoder import encode_json

        return encode_json
    import msgspec

    return msgspec.json.Encoder(enc_hook=_encode_pydantic).encode


def _encode_pydantic(value: Any) -> Any:
    own = getattr(type(value), "__pydantic_serializer__", None)
    if own is None:
        raise TypeError(f"{type(value).__qualname__} cannot be converted to JSON")
    return own.to_python(value, mode="json", by_alias=True)


_NO_ANNOTATIONS = (None, Any, object, inspect.Parameter.empty)


def codec_for(annotation: Any) -> Codec:
    """Returns the codec for an annotation; no annotation means any JSON. Raises TypeError."""
    try:
        return _cached_codec(annotation)
    except TypeError:
        # The annotation is unhashable, which is rare, or not supported: then this raises again.
        return _make_codec(annotation)


def encode(value: object) -> bytes:
    """Encodes a value by its own type. Raises PayloadError, also for None, which is a tombstone."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if value is None:
        raise PayloadError("None has no bytes: a message without a value is a tombstone")
    if isinstance(value, str) and not isinstance(value, Enum):
        return TextCodec(takes_none=False).encode(value)
    return _encode_json(value)


def _encode_json(value: object) -> bytes:
    own = getattr(type(value), "__pydantic_serializer__", None)
    try:
        if own is not None:
            return cast(bytes, own.to_json(value, by_alias=True))
        return _cached_json_encoder()(value)
    except (TypeError, ValueError, RecursionError) as flaw:
        raise PayloadError(f"a {type(value).__qualname__} cannot be sent: {flaw}") from flaw


@lru_cache(maxsize=1)
def _cached_json_encoder() -> Callable[[object], bytes]:
    return json_encoder()


@lru_cache(maxsize=512)
def _cached_codec(annotation: Any) -> Codec:
    return _make_codec(annotation)


def _make_codec(annotation: Any) -> Codec:
    if any(annotation is each for each in _NO_ANNOTATIONS):
        annotation = Any
    bare, takes_none = _without_none(annotation)
    if bare is bytes:
        return BytesCodec(takes_none=takes_none)
    if bare is str:
        return TextCodec(takes_none=takes_none)
    return json_codec(annotation, takes_none=takes_none or annotation is Any)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Returns X for `X | None`, and whether None is allowed."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, annotation is types.NoneType
    others = [each for each in get_args(annotation) if each is not types.NoneType]
    takes_none = len(others) < len(get_args(annotation))
    return (others[0] if len(others) == 1 else annotation), takes_none
