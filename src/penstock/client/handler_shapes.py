"""Which parameters a handler takes, by its annotations.

`(payload)`, `(payload, message)` or `(message)`; a handler of batches takes lists of them. The first parameter is the
payload unless it is annotated as a Message, or is called `message` and has no annotation. A database handle goes by
name: `connection`, `session` or `tx`. Parameters with defaults that are none of these are the handler's own.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, get_args, get_origin, get_type_hints

__all__ = ["EXTRAS", "HandlerShape", "wants"]

EXTRAS: Final = ("connection", "session", "tx")
_MESSAGE_NAMES: Final = ("message", "messages", "msg", "msgs")
_SHAPES: Final = "a handler takes (payload), (payload, message) or (message)"
_LISTS: Final = (
    list,
    collections.abc.Sequence,
    collections.abc.Collection,
    collections.abc.Iterable,
)
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NO_ANNOTATION: Final = inspect.Parameter.empty
_NO_DEFAULT: Final = inspect.Parameter.empty


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerShape:
    #: The annotation of one payload, Any where there is none; None where the handler takes no payload.
    payload: Any
    #: After the payload, or alone.
    takes_message: bool
    #: Lists of payloads and messages.
    is_batch: bool
    is_async: bool
    #: Given by name.
    extras: tuple[str, ...]


def wants(handler: Callable[..., Any], *, batch: bool = False) -> HandlerShape:
    """Raises TypeError, with a sentence about what no handler can have."""
    function = _function(handler)
    name = getattr(function, "__qualname__", repr(handler))
    parameters = [_resolved(each, function, name) for each in _parameters(handler, name)]
    positional = [each for each in parameters if each.kind in _POSITIONAL]
    if not positional:
        raise TypeError(f"{name} takes neither payload nor message: {_SHAPES}")
    taken, payload, takes_message = _leading(positional, name, batch=batch)
    rest = [each for each in parameters if each not in taken]
    return HandlerShape(
        payload=payload,
        takes_message=takes_message,
        is_batch=batch,
        is_async=_is_async(handler, name),
        extras=_extras(rest, name),
    )


# The function itself


def _function(handler: Any) -> Any:
    """Where its code and its globals are: of a partial, an object that can be called, a method, a decorated one."""
    if inspect.isclass(handler) or not callable(handler):
        raise TypeError(f"{handler!r} is no handler: {_SHAPES}")
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
        raise TypeError(
            f"{name} is a generator, and nobody would run it: a handler returns, and does not yield"
        )
    return inspect.iscoroutinefunction(called)


def _parameters(handler: Any, name: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(handler).parameters.values())
    except ValueError as flaw:
        raise TypeError(f"{name}: {flaw}") from flaw


def _resolved(parameter: inspect.Parameter, function: Any, name: str) -> inspect.Parameter:
    """With what its annotation stands for, which may be written as text."""
    if parameter.annotation is _NO_ANNOTATION or parameter.kind not in _TAKING:
        return parameter
    alone = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        hints = get_type_hints(alone, getattr(function, "__globals__", {}), _nonlocals(function), True)
    except Exception as flaw:
        raise TypeError(
            f"{name}: the annotation {parameter.annotation!r} of {parameter.name} cannot be resolved ({flaw}): "
            "define its class at the top of a module, or do without 'from __future__ import annotations'"
        ) from flaw
    return parameter.replace(annotation=hints[parameter.name])


_TAKING: Final = (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)


def _nonlocals(function: Any) -> dict[str, Any]:
    """Names of the functions around it that it uses."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    names = code.co_freevars if code is not None else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=False) if _is_filled(cell)}


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


# Its parameters


def _leading(
    positional: list[inspect.Parameter], name: str, *, batch: bool
) -> tuple[list[inspect.Parameter], Any, bool]:
    """Those that are payload and message, the payload's annotation, and whether there is a message."""
    first = positional[0]
    if _is_message(first, name, batch=batch, by_name=True):
        return [first], None, True
    payload = _payload(first, name, batch=batch)
    second = positional[1] if len(positional) > 1 else None
    if second is None or second.name in EXTRAS:
        return [first], payload, False
    if not _is_message(second, name, batch=batch, by_name=second.default is not _NO_DEFAULT):
        return [first], payload, False
    return [first, second], payload, True


def _payload(parameter: inspect.Parameter, name: str, *, batch: bool) -> Any:
    annotation = Any if parameter.annotation is _NO_ANNOTATION else parameter.annotation
    if not batch or annotation is Any:
        return annotation
    items = _items(annotation)
    if items is None:
        raise TypeError(
            f"{name} handles batches: {parameter.name} is a list of payloads, as in "
            f"{parameter.name}: list[{getattr(annotation, '__name__', annotation)}]"
        )
    return items


def _is_message(parameter: inspect.Parameter, name: str, *, batch: bool, by_name: bool) -> bool:
    """One without annotation is a message by its name; where only a message can be, by any name."""
    annotation = parameter.annotation
    if annotation is _NO_ANNOTATION:
        return not by_name or parameter.name in _MESSAGE_NAMES
    items = _items(annotation)
    if _is_message_class(annotation) and batch:
        raise TypeError(f"{name} handles batches: write {parameter.name}: list[Message]")
    if _is_message_class(items) and not batch:
        raise TypeError(
            f"{name} handles one message at a time: write {parameter.name}: Message, or give batch="
        )
    return _is_message_class(items if batch else annotation)


def _items(annotation: Any) -> Any:
    """What a list is of; None for what is no list."""
    if annotation not in _LISTS and get_origin(annotation) not in _LISTS:
        return None
    arguments = get_args(annotation)
    return arguments[0] if arguments else Any


def _is_message_class(annotation: Any) -> bool:
    from penstock.client.app.message import Message

    return isinstance(annotation, type) and issubclass(annotation, Message)


def _extras(rest: list[inspect.Parameter], name: str) -> tuple[str, ...]:
    found = []
    for each in rest:
        if each.kind not in _TAKING:
            continue  # *args and **kwargs take whatever comes, and nothing comes
        if each.name in EXTRAS and each.kind is not inspect.Parameter.POSITIONAL_ONLY:
            found.append(each.name)
        elif each.default is _NO_DEFAULT:
            raise TypeError(
                f"{name}: nothing is known for its parameter {each.name}: {_SHAPES}, "
                f"and by name {', '.join(EXTRAS)}"
            )
    return tuple(found)
