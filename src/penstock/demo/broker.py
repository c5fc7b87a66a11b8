"""The broker of the demo: `penstock serve` as anybody would run it, in a process of its own."""

from __future__ import annotations

import re
import sys
import threading
from typing import Final

from penstock.demo.children import Child
from penstock.demo.names import Folders

_READY: Final = re.compile(r"listening on (?:\w+://)?(?P<address>\S+:\d+)")
#: Nobody else is about to join a group of one member.
_SETTINGS: Final = {"group.initial.rebalance.delay.ms": "0"}


class Broker(Child):
    def __init__(self, folders: Folders, *, listen: str, http: str | None) -> None:
        super().__init__("broker", folders.logs / "broker.log")
        self._folders = folders
        self._listen = listen
        self._http = http
        #: It takes requests, or it has ended without.
        self.decided = threading.Event()
        #: None until it has been up once.
        self.address: str | None = None

    def command(self) -> list[str]:
        settings = [word for name, value in _SETTINGS.items() for word in ("--set", f"{name}={value}")]
        http = ["--http", self._http] if self._http else []
        return [
            *(sys.executable, "-m", "penstock", "serve", "--stop-with-stdin"),
            *("--listen", self.address or self._listen, "--data-dir", str(self._folders.broker)),
            *http,
            *settings,
        ]

    def heard(self, line: str) -> None:
        if match := _READY.match(line):
            self.address = match["address"]
            self.trouble = None
            self.decided.set()

    def work(self) -> None:
        try:
            super().work()
        finally:
            self.decided.set()
