"""Private keys in settings: OpenSSL loads them from files only, and they must not stay on a disk."""

from __future__ import annotations

import os
import tempfile
from typing import Self


class SecretFile:
    """A file for text that OpenSSL loads from files only; it is in memory where the system can do that."""

    def __init__(self, text: str) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("penstock-key")
            self.path = f"/proc/self/fd/{self._descriptor}"
            self._on_disk = False
        else:
            self._descriptor, self.path = tempfile.mkstemp(prefix="penstock-key")
            self._on_disk = True
        with os.fdopen(os.dup(self._descriptor), "w") as file:
            file.write(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)
        if self._on_disk:
            os.unlink(self.path)
