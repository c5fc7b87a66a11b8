"""nats-server with JetStream as the peer of share groups: Debian's package, file storage, as it ships."""

import re
import shutil
import subprocess
from collections.abc import Mapping

from benchmarks.brokers.broker import HOST, Broker
from benchmarks.brokers.kafka import PeerUnavailable


def find_nats() -> str:
    """Its version. Raises PeerUnavailable."""
    if shutil.which("nats-server") is None:
        raise PeerUnavailable("`nats-server` is not installed (apt-get install nats-server)")
    said = subprocess.run(["nats-server", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+(\.\d+)+", said)
    return found.group() if found else "of an unknown version"


class NatsServer(Broker):
    name = "nats"

    def prepare(self) -> None:
        """Nothing: it makes its folder itself."""

    def command(self) -> list[str]:
        data = self.folder / "data"
        return [
            "nats-server",
            "--addr",
            HOST,
            "--port",
            str(self.port),
            "--jetstream",
            "--store_dir",
            str(data),
        ]

    def flush_config(self, *, fsync: bool) -> Mapping[str, str]:
        assert not fsync, "version 2.9 has no setting that makes it sync before it answers"
        return {}

    def settings(self) -> Mapping[str, str]:
        return {
            "version": find_nats(),
            "settings": "defaults; streams in files, one replica, limits retention",
            "durability": "page cache, synced by a timer; outcomes are written in the background",
        }
