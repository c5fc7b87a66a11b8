"""Payloads: the values that applications publish and handlers take, as bytes and back.

`bytes` go as they are and `str` as UTF-8; everything else is JSON, read by pydantic where the annotation has to do
with it, else by msgspec where that is installed, else by `payload_checks`. Neither library is needed or imported
unless it is used. What does not fit the annotation raises PayloadError, whose sentence names the field.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any, Union, cast, get_args, get_origin

from penstock.client.handler_shapes import HandlerShape, wants
from penstock.client.payload_kinds import (
    BytesCodec,
    Codec,
    PayloadError,
    TextCodec,
    json_codec,
    json_encoder,
)

__all__ = ["Codec", "HandlerShape", "PayloadError", "codec_for", "encode", "wants"]

_ANYTHING = (None, Any, object, inspect.Parameter.empty)


def codec_for(annotation: Any) -> Codec:
    """For the values that an annotation stands for; none stands for any JSON. Raises TypeError for what cannot be."""
    try:
        return _cached(annotation)
    except TypeError:
        # Unhashable annotations are rare, and a refusal may be worded again.
        return _built(annotation)


def encode(value: object) -> bytes:
    """As its own type says. Raises PayloadError for what cannot be sent, None included: that is a tombstone."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if value is None:
        raise PayloadError("None has no bytes: a message without a value is a tombstone")
    if isinstance(value, str) and not isinstance(value, Enum):
        return TextCodec(takes_none=False).encode(value)
    return _json(value)


def _json(value: object) -> bytes:
    own = getattr(type(value), "__pydantic_serializer__", None)
    try:
        if own is not None:
            return cast(bytes, own.to_json(value, by_alias=True))
        return _encoder()(value)
    except (TypeError, ValueError, RecursionError) as flaw:
        raise PayloadError(f"a {type(value).__qualname__} cannot be sent: {flaw}") from flaw


@lru_cache(maxsize=1)
def _encoder() -> Callable[[object], bytes]:
    return json_encoder()


@lru_cache(maxsize=512)
def _cached(annotation: Any) -> Codec:
    return _built(annotation)


def _built(annotation: Any) -> Codec:
    if any(annotation is each for each in _ANYTHING):
        annotation = Any
    bare, takes_none = _without_none(annotation)
    if bare is bytes:
        return BytesCodec(takes_none=takes_none)
    if bare is str:
        return TextCodec(takes_none=takes_none)
    return json_codec(annotation, takes_none=takes_none or annotation is Any)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """`X | None` is X, and takes a tombstone."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, annotation is types.NoneType
    others = [each for each in get_args(annotation) if each is not types.NoneType]
    takes_none = len(others) < len(get_args(annotation))
    return (others[0] if len(others) == 1 else annotation), takes_none
