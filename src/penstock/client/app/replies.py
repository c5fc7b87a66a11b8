"""What a handler returns, published: `to=` names the topic. The reply has the key of the message."""

from __future__ import annotations

from typing import Any, Final

from penstock.client.app.exactly import Draft, drafts
from penstock.client.app.handling import Call
from penstock.client.app.resources import Resources
from penstock.client.payloads import encode

__all__ = ["replying", "replying_async"]

_PUBLISH_S: Final = 300.0


def replying(call: Call, topic: str, resources: Resources) -> Call:
    def handle(raw: Any, **handles: Any) -> Any:
        _reply(call(raw, **handles), raw, topic, resources)

    return handle


def replying_async(call: Call, topic: str, resources: Resources) -> Call:
    import asyncio

    async def handle(raw: Any, **handles: Any) -> Any:
        result = await call(raw, **handles)
        if drafts.get() is not None:
            _reply(result, raw, topic, resources)
        else:
            await asyncio.get_running_loop().run_in_executor(None, _reply, result, raw, topic, resources)

    return handle


def _reply(result: Any, raw: Any, topic: str, resources: Resources) -> None:
    """None is no reply. Outside of transactions it is there before the message counts as handled."""
    if result is None:
        return
    value = encode(result)
    held = drafts.get()
    with resources.spans.publish(topic, [], key=raw.key()) as headers:
        if held is not None:
            held.append(Draft(topic, value, raw.key(), headers, None, None))
        else:
            sent = resources.publisher().send(topic, value, key=raw.key(), headers=headers)
            resources.await_published(sent, _PUBLISH_S)
