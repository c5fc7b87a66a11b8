"""A component of the demo: it works in its own thread until it is stopped. Its errors are shown, never raised."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Any, Final

from penstock.client.errors import ClientError

#: The pause before a failed component tries again.
RETRY_PAUSE_S: Final = 2.0


class Component(ABC):
    def __init__(self, name: str) -> None:
        self.name = name
        #: Why the component does not work at present.
        self.trouble: str | None = None
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()

    def join(self, timeout_s: float) -> bool:
        """Returns whether the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @abstractmethod
    def work(self) -> None:
        """Runs until `stopping` is set. If it raises, the error is shown and `work` is called again after a pause."""

    def _live(self) -> None:
        while not self.stopping.is_set():
            try:
                self.work()
            except Exception as error:
                self.trouble = error_message(error)
                if not is_expected(error):
                    logging.getLogger("penstock.demo").exception("%s", self.name)
            self.stopping.wait(RETRY_PAUSE_S)


def is_expected(error: Exception) -> bool:
    """Whether the error comes from the environment, and is not a bug in penstock."""
    from confluent_kafka import KafkaException

    return isinstance(error, (ClientError, KafkaException, OSError))


def error_message(error: Exception) -> str:
    cause: Any = error.args[0] if error.args else None
    if hasattr(cause, "str"):  # a KafkaError inside its exception
        return str(cause.str())
    return str(error).strip().partition("\n")[0] or type(error).__name__
