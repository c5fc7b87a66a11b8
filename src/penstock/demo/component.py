"""A part of the demo: works in a thread of its own until told to stop, and its trouble is shown, never raised."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Any, Final

from penstock.client.errors import ClientError

#: Before a part that failed tries again.
PAUSE_S: Final = 2.0


class Part(ABC):
    def __init__(self, name: str) -> None:
        self.name = name
        #: What keeps it from working at present.
        self.trouble: str | None = None
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @abstractmethod
    def work(self) -> None:
        """Until `stopping` is set. What it raises is shown, and it is called again after a pause."""

    def _live(self) -> None:
        while not self.stopping.is_set():
            try:
                self.work()
            except Exception as error:
                self.trouble = sentence(error)
                if not is_expected(error):
                    logging.getLogger("penstock.demo").exception("%s", self.name)
            self.stopping.wait(PAUSE_S)


def is_expected(error: Exception) -> bool:
    """Whether it is about the world, and no mistake of ours."""
    from confluent_kafka import KafkaException

    return isinstance(error, (ClientError, KafkaException, OSError))


def sentence(error: Exception) -> str:
    cause: Any = error.args[0] if error.args else None
    if hasattr(cause, "str"):  # a KafkaError inside its exception
        return str(cause.str())
    return str(error).strip().partition("\n")[0] or type(error).__name__


def client_settings(bootstrap: str, name: str) -> dict[str, object]:
    """For librdkafka, which would write to the terminal where nobody asked it to."""
    quiet = logging.getLogger("penstock.demo.librdkafka")
    quiet.propagate = False
    if not quiet.handlers:
        quiet.addHandler(logging.NullHandler())
    return {"bootstrap.servers": bootstrap, "client.id": f"demo-{name}", "logger": quiet}
