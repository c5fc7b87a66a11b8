"""Which parameters a handler may have: every documented signature, and an error for every other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from penstock.client.app.message import Message
from penstock.client.payloads import HandlerSignature, inspect_handler

if TYPE_CHECKING:
    from penstock.nowhere import Absent


@dataclass
class Order:
    total: int


def shape(payload: Any = None, **more: Any) -> HandlerSignature:
    plain = {"takes_message": False, "is_batch": False, "is_async": False, "extras": ()}
    return HandlerSignature(payload=payload, **(plain | more))


def of_payload(order: Order) -> None: ...
def of_both(order: Order, message: Message) -> None: ...
def of_message(message: Message) -> None: ...
def of_message_by_name(message) -> None: ...  # type: ignore[no-untyped-def]
def of_anything(order) -> None: ...  # type: ignore[no-untyped-def]
def of_two_unannotated(order, m) -> None: ...  # type: ignore[no-untyped-def]
def of_payload_called_message(message: Order) -> None: ...
def with_own_default(order: Order, limit: int = 5, *, loud: bool = False) -> None: ...
def with_connection(order: Order, connection: Any) -> None: ...
def with_all(order: Order, message: Message, *, tx: Any, session: Any = None) -> None: ...
def of_session(session: Order) -> None: ...
def with_the_rest(order: Order, *args: Any, **kwargs: Any) -> None: ...
def of_list(orders: list[Order]) -> None: ...
def absent_result(order: Order) -> Absent: ...
async def waiting(order: Order) -> None: ...


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (of_payload, shape(Order)),
        (of_both, shape(Order, takes_message=True)),
        (of_message, shape(takes_message=True)),
        (of_message_by_name, shape(takes_message=True)),
        (of_anything, shape(Any)),
        (of_two_unannotated, shape(Any, takes_message=True)),
        (of_payload_called_message, shape(Order)),
        (with_own_default, shape(Order)),
        (with_connection, shape(Order, extras=("connection",))),
        (with_all, shape(Order, takes_message=True, extras=("tx", "session"))),
        (of_session, shape(Order)),
        (with_the_rest, shape(Order)),
        (of_list, shape(list[Order])),
        (absent_result, shape(Order)),
        (waiting, shape(Order, is_async=True)),
        (lambda order: None, shape(Any)),
    ],
)
def test_every_shape(handler: Callable[..., Any], expected: HandlerSignature) -> None:
    assert inspect_handler(handler) == expected


def of_batch(orders: list[Order]) -> None: ...
def of_sequence(orders: Sequence[Order]) -> None: ...
def of_batch_and_messages(orders: list[Order], messages: list[Message]) -> None: ...
def of_messages(messages: list[Message]) -> None: ...
def of_any_batch(orders) -> None: ...  # type: ignore[no-untyped-def]
def of_bare_list(orders: list) -> None: ...  # type: ignore[type-arg]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (of_batch, shape(Order, is_batch=True)),
        (of_sequence, shape(Order, is_batch=True)),
        (of_batch_and_messages, shape(Order, takes_message=True, is_batch=True)),
        (of_messages, shape(takes_message=True, is_batch=True)),
        (of_any_batch, shape(Any, is_batch=True)),
        (of_bare_list, shape(Any, is_batch=True)),
    ],
)
def test_every_shape_of_batches(handler: Callable[..., Any], expected: HandlerSignature) -> None:
    assert inspect_handler(handler, batch=True) == expected


class Billing:
    def bill(self, order: Order) -> None: ...

    async def __call__(self, order: Order, message: Message) -> None: ...


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return outer


def with_rate(order: Order, rate: float) -> None: ...
async def rate_first(rate: float, order: Order) -> None: ...


def test_methods_objects_partials_and_decorated_functions() -> None:
    assert inspect_handler(Billing().bill) == shape(Order)
    assert inspect_handler(Billing()) == shape(Order, takes_message=True, is_async=True)
    assert inspect_handler(functools.partial(with_rate, rate=2.0)) == shape(Order)
    assert inspect_handler(functools.partial(rate_first, 2.0)) == shape(Order, is_async=True)
    assert inspect_handler(functools.partial(Billing())) == shape(Order, takes_message=True, is_async=True)
    assert inspect_handler(decorated(of_both)) == shape(Order, takes_message=True)


def test_a_local_class_that_the_handler_uses_is_found() -> None:
    @dataclass
    class Local:
        total: int

    def uses(order: Local) -> None:
        assert isinstance(order, Local)

    assert inspect_handler(uses) == shape(Local)


def test_a_local_class_that_it_does_not_use_is_told() -> None:
    @dataclass
    class Local:
        total: int

    def only_names(order: Local) -> None: ...

    with pytest.raises(TypeError, match=r"'Local' of order cannot be resolved .* at the top of a module"):
        inspect_handler(only_names)


def nothing() -> None: ...
def only_args(*args: Any) -> None: ...
def only_keywords(*, order: Order) -> None: ...
def one_too_many(order: Order, message: Message, rate: float) -> None: ...
def second_is_no_message(order: Order, rate: float) -> None: ...
def wrong_way_round(message: Message, order: Order) -> None: ...
def message_by_keyword(order: Order, *, message: Message) -> None: ...
def handle_by_place(order: Order, message: Message, tx: Any, /) -> None: ...
def absent_payload(order: Absent) -> None: ...


def yields(order: Order) -> Any:
    yield order


async def yields_later(order: Order) -> Any:
    yield order


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        (nothing, "nothing takes neither payload nor message: a handler takes"),
        (only_args, "takes neither payload nor message"),
        (only_keywords, "takes neither payload nor message"),
        (one_too_many, "unknown parameter rate"),
        (second_is_no_message, "unknown parameter rate"),
        (wrong_way_round, "unknown parameter order"),
        (message_by_keyword, "unknown parameter message"),
        (handle_by_place, "unknown parameter tx"),
        (absent_payload, "the annotation 'Absent' of order cannot be resolved"),
        (yields, "yields is a generator"),
        (yields_later, "yields_later is a generator"),
        (of_messages, "handles one message at a time"),
        (Order, "is not a handler"),
        (5, "is not a handler"),
    ],
)
def test_what_no_handler_can_be(handler: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        inspect_handler(handler)


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        (of_payload, r"order must be a list of payloads, as in order: list\[Order\]"),
        (of_message, r"write message: list\[Message\]"),
    ],
)
def test_what_no_handler_of_batches_can_be(handler: Callable[..., Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        inspect_handler(handler, batch=True)
