"""A node as a process: its event loop, its log output, and the signals that stop it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.broker.config.logging import configure_logging
from penstock.broker.config.node_settings import NodeSettings
from penstock.broker.node import Node

if TYPE_CHECKING:
    from penstock.broker.controller.bootstrap_user import BootstrapUser

logger = logging.getLogger("penstock.node")

#: How long a thread that computes (a batch with many records, compaction) may keep the event loop from running. The
#: event loop would pay Python's default of 5 ms each time that it has waited for something.
_THREAD_SWITCH_S: Final = 0.0005


def serve(
    settings: NodeSettings,
    on_ready: Callable[[Node], None] | None = None,
    bootstrap_user: BootstrapUser | None = None,
) -> int:
    """Run a node until SIGINT or SIGTERM; a second signal ends the process at once. Raises StartFailed."""
    configure_logging(settings.string("penstock.log.format"), settings.string("penstock.log.level"))
    sys.setswitchinterval(_THREAD_SWITCH_S)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(settings, on_ready, bootstrap_user))


async def _serve(
    settings: NodeSettings,
    on_ready: Callable[[Node], None] | None,
    bootstrap_user: BootstrapUser | None,
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, stop)
    node = Node(settings)
    node.bootstrap_user = bootstrap_user
    if not await _start_until_signal(stop, node):
        return 0
    logger.info("serving", extra={"node": node.node_id, "partitions": len(node.partitions)})
    if on_ready is not None:
        on_ready(node)
    gc.freeze()  # modules and schemas live as long as the process, so the garbage collector need not scan them
    await stop.wait()
    logger.info("stopping", extra={"node": node.node_id})
    await node.stop()
    return 0 if node.stopped_cleanly else 1


async def _start_until_signal(stop: asyncio.Event, node: Node) -> bool:
    """Start the node; a signal cancels the start, which may have much to recover. Return whether it has started."""
    starting = asyncio.create_task(node.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        return False
    await starting
    return True


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        logger.warning("stopping at once; the next start recovers")
        logging.shutdown()
        os._exit(1)
    stop.set()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop if uvloop is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()  # type: ignore[no-any-return]
