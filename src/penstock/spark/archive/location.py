"""Where a table is: a folder or a URI, as Delta, Arrow and Spark each want to hear it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

_FILE: Final = "file"
#: Hadoop's name for a store where it has one of its own.
_OF_HADOOP: Final = {"s3": "s3a"}
_OF_PATTERNS: Final = re.compile(r"[\[\]{}*?\\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Sent to tasks, so all of them need to reach it under the same name."""

    uri: str
    #: Credentials and the like, by the names of `deltalake`; what is not here is taken from the environment.
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, text: str, options: Mapping[str, str] | None = None) -> Location:
        """A relative path is meant from here, wherever it is used."""
        is_uri = "://" in text
        return cls(
            uri=text.rstrip("/") if is_uri else str(Path(text).absolute()), options=dict(options or {})
        )

    def __str__(self) -> str:
        return self.uri

    @property
    def folder(self) -> Path | None:
        """Where it is a folder of a file system."""
        parts = urlsplit(self.uri)
        if "://" not in self.uri:
            return Path(self.uri)
        return Path(unquote(parts.path)) if parts.scheme == _FILE else None

    def filesystem(self) -> Any:
        """For Arrow, with paths relative to the table."""
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        return PyFileSystem(DeltaStorageHandler(self.uri, dict(self.options)))

    def for_spark(self, path: str = "") -> str:
        """The table, or one file of it: Spark takes names of files for patterns, but not that of the table."""
        scheme, _, rest = self.uri.partition("://")
        if self.folder is not None:
            scheme, rest = _FILE, str(self.folder)
        base = f"{_OF_HADOOP.get(scheme, scheme)}://{rest}"
        return _OF_PATTERNS.sub(r"\\\g<0>", f"{base}/{path}") if path else base

    def make_durable(self, paths: Iterable[str]) -> None:
        """See that these files outlive a loss of power. Stores of objects see to that themselves."""
        if self.folder is None:
            return
        files = [self.folder / path for path in paths]
        for path in [*files, *sorted({each.parent for each in files})]:
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
