"""nats-server with JetStream as the peer of share groups: Debian's package, file storage."""

import re
import shutil
import subprocess

from benchmarks.peer_kafka import PeerUnavailable


def find_nats() -> str:
    """Its version. Raises PeerUnavailable."""
    if shutil.which("nats-server") is None:
        raise PeerUnavailable("`nats-server` is not installed (apt-get install nats-server)")
    said = subprocess.run(["nats-server", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+(\.\d+)+", said)
    return found.group() if found else "of an unknown version"
