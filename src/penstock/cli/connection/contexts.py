"""Contexts: clusters that have a name in the user's own file, each with its address and its client settings.

The file is TOML. It contains passwords, so only its owner may be able to read it; a file that others can read is
refused. Changes replace the whole file, one process at a time, and drop comments.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.protocol.durable_files import replace_private

CONTEXTS_VARIABLE: Final = "PENSTOCK_CONTEXTS"
CONTEXT_VARIABLE: Final = "PENSTOCK_CONTEXT"
BOOTSTRAP_SETTING: Final = "bootstrap.servers"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_OF_OTHERS: Final = 0o077


@dataclass(slots=True, kw_only=True)
class Contexts:
    """`current` is the context of commands that name none."""

    current: str | None = None
    settings: dict[str, dict[str, str]] = field(default_factory=dict)

    def find(self, name: str, source: str) -> Mapping[str, str]:
        """Raises CommandError; `source` says who named it."""
        if name not in self.settings:
            known = ", ".join(sorted(self.settings)) or "none"
            raise CommandError(
                f"{source}: there is no context {name}", hint=f"known: {known}", exit_code=EXIT_USAGE
            )
        return self.settings[name]


def contexts_path() -> Path:
    if named := os.environ.get(CONTEXTS_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "penstock" / "contexts.toml"


def check_context_name(name: str) -> None:
    """Raises CommandError."""
    if not _NAME.fullmatch(name):
        raise CommandError(
            f"{name!r} cannot be the name of a context: use letters, digits, dots, dashes and underscores",
            exit_code=EXIT_USAGE,
        )


def read_contexts() -> Contexts:
    """Raises CommandError for a file that others can read, or that is not a file of contexts."""
    path = contexts_path()
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & _OF_OTHERS:
                raise CommandError(
                    f"{path} may contain passwords, and others can read or change it",
                    hint=f"chmod 600 {path}",
                    exit_code=EXIT_USAGE,
                )
            content = file.read()
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}", exit_code=EXIT_USAGE) from None
    import tomllib  # most commands have no file of contexts, and start faster without it

    try:
        return _decode(tomllib.loads(content.decode()))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, TypeError) as error:
        # A message of the TOML parser contains the position, and at most one character of the text.
        reason = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "it is not a file of contexts"
        raise CommandError(f"cannot read {path}: {reason}", exit_code=EXIT_USAGE) from None


def _decode(document: dict[str, Any]) -> Contexts:
    """Raises TypeError."""
    found, current = document.pop("contexts", {}), document.pop("current", None)
    is_valid = not document and isinstance(found, dict) and isinstance(current, str | None)
    if not is_valid or not all(isinstance(settings, dict) for settings in found.values()):
        raise TypeError
    for settings in found.values():
        if not all(isinstance(value, str) for value in settings.values()):
            raise TypeError
    return Contexts(current=current, settings=found)


@contextmanager
def changed_contexts() -> Iterator[Contexts]:
    """Yields the contexts for changes and saves them, unless the block raises. Raises CommandError."""
    path = contexts_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        contexts = read_contexts()
        yield contexts
        _save(path, contexts)
    finally:
        os.close(lock)


def _save(path: Path, contexts: Contexts) -> None:
    lines = [] if contexts.current is None else [f"current = {_quoted(contexts.current)}", ""]
    for name, settings in sorted(contexts.settings.items()):
        lines += [f"[contexts.{_quoted(name)}]"]
        lines += [f"{_quoted(key)} = {_quoted(value)}" for key, value in sorted(settings.items())]
        lines += [""]
    try:
        replace_private(path.resolve(), "\n".join(lines).encode())
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


def _quoted(text: str) -> str:
    """A string of JSON is one of TOML, apart from DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
