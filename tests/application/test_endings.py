"""How an application ends: what a handler raises to end the process, and what is waited for or still being finished."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.application.apps import QUICK, committed

from penstock.client import Penstock


class Halt(BaseException):
    """As libraries raise them to get past `except Exception`."""


LAST = 5


def _plain(raised: BaseException, seen: list[int]) -> Callable[..., Any]:
    def handle(value: int) -> None:
        if value == LAST:
            raise raised
        seen.append(value)

    return handle


def _async(raised: BaseException, seen: list[int]) -> Callable[..., Any]:
    async def handle(value: int) -> None:
        await asyncio.sleep(0)
        if value == LAST:
            raise raised
        seen.append(value)

    return handle


def _subtask(raised: BaseException, seen: list[int]) -> Callable[..., Any]:
    async def fails() -> None:
        raise raised

    async def handle(value: int) -> None:
        if value == LAST:
            await asyncio.create_task(fails())
        seen.append(value)

    return handle


def _batch(raised: BaseException, seen: list[int]) -> Callable[..., Any]:
    def handle(values: list[int]) -> None:
        if LAST in values:
            raise raised
        seen.extend(values)

    return handle


SHAPES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "inline": (_plain, {}),
    "threads": (_plain, {"concurrency": 3}),
    "async": (_async, {"concurrency": 2}),
    "subtask": (_subtask, {"concurrency": 2}),
    "batches": (_batch, {"batch": 4}),
    "exactly-once": (_plain, {"delivery": "exactly-once"}),
    "exactly-once threads": (_plain, {"delivery": "exactly-once", "concurrency": 2}),
    "shared": (_plain, {"share": True}),
    "shared async": (_async, {"share": True}),
}


CASES = [(shape, SystemExit(0)) for shape in SHAPES] + [
    ("inline", KeyboardInterrupt()),
    ("threads", Halt()),
    ("async", asyncio.CancelledError()),
]


@pytest.mark.parametrize(
    ("shape", "raised"), CASES, ids=lambda each: each if isinstance(each, str) else repr(each)
)
def test_what_a_handler_raises_to_end_the_process_ends_it(
    bootstrap: str, unique: Callable[[str], str], shape: str, raised: BaseException
) -> None:
    topic, group = unique("orders"), unique("billing")
    make, more = SHAPES[shape]
    with Penstock(bootstrap, settings=QUICK) as app:
        app.create_topic(topic, partitions=1)
        for number in range(8):
            app.publish(topic, number, key="one key")
        app.subscribe(topic, group=group, dead_letters=False, **more)(make(raised, []))
        with pytest.raises(type(raised)) as ended:
            app.run()
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 1
    if "share" in more:
        assert LAST in _shared_again(bootstrap, topic, group)
    else:
        assert committed(bootstrap, group, topic)[0] <= LAST


def _shared_again(bootstrap: str, topic: str, group: str) -> list[int]:
    """What the next member of the share group gets, up to the last message."""
    with Penstock(bootstrap, settings=QUICK) as app, app.consumer(topic, group=group, share=True) as consumer:
        seen: list[int] = []
        while 7 not in seen:
            for message in consumer.poll(timeout="10s"):
                seen.append(message.payload(int))
                consumer.ack(message)
        return seen
