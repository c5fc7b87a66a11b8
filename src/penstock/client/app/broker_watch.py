"""Reports brokers that accept connections but answer no requests, for example because their process is frozen.

librdkafka reports at once a broker that refuses connections, but waits a minute for a broker that is silent. Its
statistics show which brokers owe a response. The watch sends such a broker a request that every broker answers at
once, because a broker may delay the response to a Fetch, a JoinGroup or a Produce.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from typing import Any, Final

from penstock.client.app.librdkafka import Settings
from penstock.client.app.wait_reporter import NO_REPLY, REPEAT_S, probe_brokers
from penstock.client.wire.settings import Address

__all__ = ["BrokerWatch", "uses_tls"]

_LOG: Final = logging.getLogger("penstock.client")
_STATISTICS_MS: Final = 500
#: The default of librdkafka for `fetch.wait.max.ms`.
_FETCH_WAIT_MS: Final = 500
#: How long a response may be late before the broker is probed.
_LATE_MS: Final = 200
#: The statistics of a client that is closed are forgotten after that time.
_STATISTICS_AGE_S: Final = 10.0
_PROBE_EVERY_S: Final = 0.25
#: How long a broker that answers is not probed again: it may hold back a response for minutes.
_PROBE_PAUSE_S: Final = 3.0
_WATCHED_MAX: Final = 16
#: The statistics of partitions, which are long, stand behind those of brokers.
_STATISTICS_START: Final = re.compile(r'\{\s*"name":\s*"(?P<client>[^"]*)".*?"brokers":\s*', re.DOTALL)
_DECODER: Final = json.JSONDecoder()


class BrokerWatch:
    """Watches the brokers of one application. Threads share it."""

    def __init__(self, settings: Settings) -> None:
        self._silence_ms_max = int(settings.get("fetch.wait.max.ms", _FETCH_WAIT_MS)) + _LATE_MS
        self._uses_tls = uses_tls(settings)
        self._lock = threading.RLock()
        #: By client and broker: how many responses have arrived, if one is missing, and when that was reported.
        self._waiting: dict[tuple[str, str], tuple[int, float]] = {}
        #: Until when a broker is not probed.
        self._pauses: dict[Address, float] = {}
        self._ended = threading.Event()

    def client_settings(self) -> Settings:
        return {"statistics.interval.ms": _STATISTICS_MS, "stats_cb": self.note_statistics}

    def note_statistics(self, text: str) -> None:
        """Called by librdkafka in a thread that polls."""
        start = _STATISTICS_START.match(text)
        if start is None:
            return
        brokers, _ = _DECODER.raw_decode(text, start.end())
        now_s = time.monotonic()
        with self._lock:
            before = self._waiting
            self._waiting = {
                key: (count, at_s)
                for key, (count, at_s) in before.items()
                if key[0] != start["client"] and now_s - at_s < _STATISTICS_AGE_S
            }
            for name, broker in brokers.items():
                if not broker["waitresp_cnt"]:
                    continue
                key, responses = (start["client"], name), broker["rx"]
                self._waiting[key] = responses, now_s
                # `rxidle` is -1 before the first response.
                is_late = not 0 <= broker["rxidle"] < self._silence_ms_max * 1000
                # A broker to which the client has never connected has no name.
                if is_late and broker["nodename"] and key in before and before[key][0] == responses:
                    host, _, port = broker["nodename"].rpartition(":")
                    self.suspect((host.strip("[]"), int(port)))

    def suspect(self, address: Address) -> None:
        """Reports the broker if it does not answer."""
        now_s = time.monotonic()
        with self._lock:
            self._pauses = {each: until_s for each, until_s in self._pauses.items() if until_s > now_s}
            if address in self._pauses or len(self._pauses) >= _WATCHED_MAX or self._ended.is_set():
                return
            self._pauses[address] = math.inf
        threading.Thread(target=self._watch, args=(address,), name="penstock-watch", daemon=True).start()

    def _watch(self, address: Address) -> None:
        """Probes a broker until it answers. librdkafka reports a broker that refuses connections."""
        reported_s: float | None = None
        while not self._ended.is_set():
            reason = probe_brokers([address], uses_tls=self._uses_tls)
            if reason is None or (reported_s is None and not reason.endswith(NO_REPLY)):
                break
            now_s = time.monotonic()
            if not self._ended.is_set() and (reported_s is None or now_s - reported_s >= REPEAT_S):
                reported_s = now_s
                _LOG.warning("broker %s; trying again", reason)
            self._ended.wait(_PROBE_EVERY_S)
        if reported_s is not None and not self._ended.is_set():
            _LOG.warning("broker %s:%d answers again", *address)
        with self._lock:
            self._pauses[address] = time.monotonic() + _PROBE_PAUSE_S

    def end(self) -> None:
        self._ended.set()


def uses_tls(settings: dict[str, Any]) -> bool:
    return str(settings.get("security.protocol", "")).upper().endswith("SSL")
