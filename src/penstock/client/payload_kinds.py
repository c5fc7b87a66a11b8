"""The codecs of payloads: bytes, text, and JSON by whichever library knows the annotation."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, get_args, get_type_hints, is_typeddict

__all__ = ["BytesCodec", "Codec", "PayloadError", "TextCodec", "json_codec", "json_encoder"]

_FLAWS_TOLD: Final = 3


class PayloadError(ValueError):
    """A value that is not what was declared; the sentence says what does not fit."""


class Codec(Protocol):
    def encode(self, value: Any) -> bytes:
        """Raises PayloadError."""

    def decode(self, data: bytes | None) -> Any:
        """None is a tombstone, which fits an annotation with `| None`, or none at all. Raises PayloadError."""


# Bytes and text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BytesCodec:
    """`Codec` of what goes as it is."""

    takes_none: bool

    def encode(self, value: bytes) -> bytes:
        if not isinstance(value, bytes):
            raise PayloadError(f"a {type(value).__qualname__} is no bytes")
        return value

    def decode(self, data: bytes | None) -> bytes | None:
        if data is None and not self.takes_none:
            raise _tombstone("bytes")
        return data


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextCodec:
    """`Codec` of text, which is UTF-8 and no JSON."""

    takes_none: bool

    def encode(self, value: str) -> bytes:
        try:
            return value.encode()
        except UnicodeEncodeError as flaw:
            raise PayloadError(f"the text cannot be sent as UTF-8: {flaw.reason}") from flaw

    def decode(self, data: bytes | None) -> str | None:
        if data is None:
            if not self.takes_none:
                raise _tombstone("str")
            return None
        try:
            return data.decode()
        except UnicodeDecodeError as flaw:
            raise PayloadError(f"the value is no UTF-8 text: {flaw.reason} at byte {flaw.start}") from flaw


def _tombstone(name: str) -> PayloadError:
    return PayloadError(f"the message has no value, where {name} is declared; {name} | None takes tombstones")


# JSON


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JsonCodec:
    """`Codec` of JSON that fits `name`."""

    name: str
    takes_none: bool
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]
    #: A sentence about what the library raised.
    told: Callable[[str, Exception], str]

    def encode(self, value: Any) -> bytes:
        try:
            return self.write(value)
        except (TypeError, ValueError, RecursionError) as flaw:
            raise PayloadError(f"a {type(value).__qualname__} cannot be sent: {flaw}") from flaw

    def decode(self, data: bytes | None) -> Any:
        if data is None:
            if not self.takes_none:
                raise _tombstone(self.name)
            return None
        try:
            return self.read(data)
        except MemoryError:
            raise  # which tells nothing about the value
        except Exception as flaw:  # a class may check itself, and raise whatever it likes
            raise PayloadError(self.told(self.name, flaw)) from flaw


def json_codec(annotation: Any, *, takes_none: bool) -> Codec:
    """Raises TypeError for what JSON cannot be read into."""
    name = name_of(annotation)
    try:
        read, write, told = _kind(annotation)
    except NameError as flaw:
        raise TypeError(f"{name}: its annotations cannot be resolved: {flaw}") from flaw
    return JsonCodec(name=name, takes_none=takes_none, read=read, write=write, told=told)


_Kind = tuple[Callable[[bytes], Any], Callable[[Any], bytes], Callable[[str, Exception], str]]


def _kind(annotation: Any) -> _Kind:
    if _is_of_pydantic(annotation):
        return _by_pydantic(annotation)
    if _installed("msgspec"):
        return _by_msgspec(annotation)
    return _by_ourselves(annotation)


def name_of(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _misfit(name: str, flaw: str) -> str:
    return f"the value does not fit {name}: {flaw}"


def _raised(name: str, flaw: Exception) -> str:
    """By a check of the class itself."""
    return _misfit(name, f"{type(flaw).__qualname__}: {flaw}")


# By pydantic


def _is_of_pydantic(annotation: Any) -> bool:
    """Whether one of its models is anywhere in there."""
    return any(hasattr(each, "__pydantic_validator__") for each in _reached(annotation, set()))


def _reached(annotation: Any, seen: set[int]) -> Iterator[Any]:
    if id(annotation) in seen:
        return
    seen.add(id(annotation))
    yield annotation
    for inner in (*get_args(annotation), *_field_types(annotation)):
        yield from _reached(inner, seen)


def _field_types(annotation: Any) -> tuple[Any, ...]:
    if not isinstance(annotation, type) or hasattr(annotation, "__pydantic_validator__"):
        return ()
    if dataclasses.is_dataclass(annotation) or is_typeddict(annotation):
        return tuple(get_type_hints(annotation, include_extras=True).values())
    return ()


def _by_pydantic(annotation: Any) -> _Kind:
    pydantic = importlib.import_module("pydantic")
    try:
        adapter = pydantic.TypeAdapter(annotation)
    except pydantic.errors.PydanticUserError as flaw:
        raise TypeError(f"{name_of(annotation)}: {flaw.message}") from flaw

    def told(name: str, flaw: Exception) -> str:
        if not isinstance(flaw, pydantic.ValidationError):
            return _raised(name, flaw)
        flaws = flaw.errors(include_url=False, include_context=False, include_input=False)
        if flaws[0]["type"] == "json_invalid":
            return f"the value is no JSON: {flaws[0]['msg'].removeprefix('Invalid JSON: ')}"
        parts = [_pydantic_flaw(each) for each in flaws[:_FLAWS_TOLD]]
        more = [f"and {len(flaws) - _FLAWS_TOLD} more"] if len(flaws) > _FLAWS_TOLD else []
        return _misfit(name, "; ".join(parts + more))

    return adapter.validate_json, lambda value: adapter.dump_json(value, by_alias=True), told


def _pydantic_flaw(flaw: Any) -> str:
    place = ".".join(str(each) for each in flaw["loc"])
    return f"{place}: {flaw['msg']}" if place else str(flaw["msg"])


# By msgspec


def _by_msgspec(annotation: Any) -> _Kind:
    import msgspec

    _refuse_unknown(annotation)
    try:
        decoder = msgspec.json.Decoder(annotation)
    except TypeError as flaw:
        raise TypeError(f"{name_of(annotation)} cannot be read from JSON: {flaw}") from flaw

    def told(name: str, flaw: Exception) -> str:
        if isinstance(flaw, msgspec.ValidationError):
            text = str(flaw)
            return _misfit(name, text[:1].lower() + text[1:])
        is_json = not isinstance(flaw, msgspec.DecodeError | RecursionError | UnicodeDecodeError)
        return _raised(name, flaw) if is_json else f"the value is no JSON: {flaw}"

    return decoder.decode, json_encoder(), told


def _refuse_unknown(annotation: Any) -> None:
    """msgspec would say of a class that it does not know only that no value ever fits it."""
    import msgspec

    try:
        info = msgspec.inspect.type_info(annotation)
    except TypeError as flaw:
        raise TypeError(f"{name_of(annotation)} cannot be read from JSON: {flaw}") from flaw
    for each in _nodes(info, set()):
        if isinstance(each, msgspec.inspect.CustomType):
            raise TypeError(
                f"{name_of(annotation)}: nothing is known of how JSON becomes a {name_of(each.cls)}"
            )


def _nodes(info: Any, seen: set[int]) -> Iterator[Any]:
    if id(info) in seen:
        return
    seen.add(id(info))
    yield info
    for name in getattr(info, "__struct_fields__", ()):
        inner = getattr(info, name)
        for each in inner if isinstance(inner, tuple) else (inner,):
            if hasattr(each, "__struct_fields__"):
                yield from _nodes(each, seen)


# Without any library


def _by_ourselves(annotation: Any) -> _Kind:
    from penstock.client.payload_checks import Misfit, reader

    def told(name: str, flaw: Exception) -> str:
        if isinstance(flaw, Misfit):
            return _misfit(name, str(flaw))
        return f"the value is no JSON: {flaw}" if _is_of_json(flaw) else _raised(name, flaw)

    return reader(annotation), json_encoder(), told


def _is_of_json(flaw: Exception) -> bool:
    import json

    return isinstance(flaw, json.JSONDecodeError | RecursionError | UnicodeDecodeError)


# What becomes JSON


def json_encoder() -> Callable[[object], bytes]:
    """Of any value; raises TypeError or ValueError for one that has no JSON."""
    if not _installed("msgspec"):
        from penstock.client.payload_checks import written

        return written
    import msgspec

    return msgspec.json.Encoder(enc_hook=_of_others).encode


def _of_others(value: Any) -> Any:
    own = getattr(type(value), "__pydantic_serializer__", None)
    if own is None:
        raise TypeError(f"{type(value).__qualname__} has no form in JSON")
    return own.to_python(value, mode="json", by_alias=True)
