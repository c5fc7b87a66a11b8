"""kcat behind the few verbs that the tests share."""

import json
import shutil
import subprocess
from typing import Any

TIMEOUT_S = 60.0


def installed() -> bool:
    return shutil.which("kcat") is not None


def kcat(bootstrap: str, *arguments: str, stdin: bytes = b"") -> bytes:
    command = ["kcat", "-b", bootstrap, *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.decode()}"
    return done.stdout


def read(bootstrap: str, topic: str, *arguments: str) -> list[dict[str, Any]]:
    """Every message of a topic up to its present end, as kcat's JSON describes them."""
    lines = kcat(bootstrap, "-C", "-t", topic, "-o", "beginning", "-e", "-q", "-J", *arguments).splitlines()
    # kcat copies raw bytes into its JSON, so that binary headers make it invalid UTF-8.
    return [json.loads(line.decode(errors="replace")) for line in lines]


def metadata(bootstrap: str, *arguments: str) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(kcat(bootstrap, "-L", "-J", *arguments))
    return described
