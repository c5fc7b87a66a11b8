"""Several relays in one process, a thread for each: all of them go on, or none."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.client.outbox.relay import Relay

__all__ = ["run_together"]


def run_together(relays: Sequence[Relay], stopping: threading.Event, *, once: bool = False) -> None:
    """Returns when all have ended. Raises what the first of them has raised; the others then stop too."""
    failures: list[BaseException] = []

    def run(relay: Relay) -> None:
        try:
            relay.run(stopping, once=once)
        except BaseException as error:
            failures.append(error)
            stopping.set()

    threads = [
        threading.Thread(target=run, args=(relay,), name=f"outbox-{relay.shard}", daemon=True)
        for relay in relays
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
