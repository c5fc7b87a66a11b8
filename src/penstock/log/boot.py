"""Whether anything that was written into a data folder can have been lost since: `.boot`.

A process that is killed leaves what it wrote to the operating system; only a machine that goes down takes it along.
So each run notes in which boot of the machine it ran, and under which broker epoch. It does so only after the
cluster has been told what the note before it said: a start that gets no further than half leaves the doubt standing.
"""

import json
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log.checkpoints import replace_durably

BOOT: Final = ".boot"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
UNKNOWN_EPOCH: Final = -1


class Run(NamedTuple):
    """`boot_id` is None where the system has none: then nothing is known of the next run's boot either."""

    boot_id: str | None
    broker_epoch: int


def current_boot_id(source: Path = _BOOT_ID) -> str | None:
    try:
        return source.read_bytes().decode("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def safe_epoch(directory: Path, *, stopped_cleanly: bool, boot_id: str | None) -> int:
    """The broker epoch of the last run if nothing it wrote can be lost, else -1."""
    last = _read(directory)
    if last is None:
        return UNKNOWN_EPOCH
    same_boot = is_same_boot(directory, boot_id)
    return last.broker_epoch if stopped_cleanly or same_boot else UNKNOWN_EPOCH


def is_same_boot(directory: Path, boot_id: str | None) -> bool:
    """Whether the machine has been up ever since the last run: then whatever that run wrote is still there."""
    last = _read(directory)
    return last is not None and boot_id is not None and last.boot_id == boot_id


def note_run(directory: Path, run: Run) -> None:
    """Blocking. Durable when it returns."""
    text = json.dumps({"version": 0, "bootId": run.boot_id, "brokerEpoch": run.broker_epoch})
    replace_durably(directory / BOOT, text.encode())


def _read(directory: Path) -> Run | None:
    try:
        values = json.loads((directory / BOOT).read_bytes())
        return Run(values["bootId"], int(values["brokerEpoch"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or torn: nothing is known
