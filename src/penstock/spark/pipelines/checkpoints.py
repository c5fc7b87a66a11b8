"""Where a pipeline keeps what it must not forget: a folder for each generation, and a log next to them."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Final

from penstock.client.errors import ClientError
from penstock.spark.pipelines.status import Status

_URI: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class CheckpointMoved(ClientError):
    """The pipeline has a checkpoint, and it is not this one."""


def is_uri(checkpoints: str) -> bool:
    return _URI.match(checkpoints) is not None


def checkpoint_of(checkpoints: str, name: str, generation: int) -> str:
    """A folder by its full path, or an address that Spark knows how to reach."""
    if is_uri(checkpoints):
        return f"{checkpoints.rstrip('/')}/{name}/{generation}"
    return str(Path(checkpoints).resolve() / name / str(generation))


def log_of(checkpoints: str, name: str) -> Path:
    """What Spark prints is always kept on this machine."""
    folder = Path(tempfile.gettempdir()) if is_uri(checkpoints) else Path(checkpoints).resolve()
    return folder / name / "spark.log"


def refuse_moved(before: Status | None, mine: Status) -> None:
    """Raises CheckpointMoved for a pipeline that would begin anew without anybody having asked for that."""
    if before is None or before.checkpoint is None or mine.checkpoint is None:
        return
    is_same = before.generation == mine.generation and before.checkpoint != mine.checkpoint
    if is_same and before.batch is not None:
        raise CheckpointMoved(
            f"the checkpoint of {mine.name} is {before.checkpoint} on {before.host}; with {mine.checkpoint} it would "
            f"begin anew. Name the folder with --checkpoints, or begin anew with `penstock pipeline reset {mine.name}`"
        )
