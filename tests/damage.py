"""Damage to files, for tests of disks that change what was written."""

import os
from pathlib import Path


def flip_byte(path: Path, position: int) -> None:
    """Flip half of the bits of one byte. A negative position counts from the end of the file."""
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x55]))
