"""Files with client settings, in the form of Kafka's `client.properties`.

All of Penstock that connects reads them here: the command line (`--command-config`), and every client that has the
setting `penstock.config.file`. An error names the file and the line, and never shows what stands there, because it may
be a part of a password or of a private key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

from penstock.client.errors import ClientError

#: Names a file with further settings. Those that are given beside it override those in the file.
CONFIG_FILE_SETTING: Final = "penstock.config.file"

#: As all client settings are named. A line of a private key that lost its backslash does not look like this.
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]*(\.[a-z0-9_-]+)*")
_SEPARATOR: Final = re.compile(r"[ \t\f]*[=:][ \t\f]*|[ \t\f]+")
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.|$)", re.DOTALL)
_CONTROL: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ODD_BACKSLASHES: Final = re.compile(r"(?<!\\)(?:\\\\)*\\$")
_BLANK: Final = " \t\f"


def read_properties(path: str | PathLike[str]) -> dict[str, str]:
    """Return the settings of a file. Raises ClientError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ClientError(f"cannot read {path}: {reason}") from None
    return parse_properties(text, str(path))


def parse_properties(text: str, source: str) -> dict[str, str]:
    """Parse `name=value` lines as Java does: comments, continued lines, escapes. Raises ClientError."""
    settings: dict[str, str] = {}
    for number, line in _logical_lines(text):
        name, separator, value = _split(line)
        if not separator or not _NAME.fullmatch(name):
            raise ClientError(
                f"{source}, line {number}: this is not NAME=VALUE; a value of several lines needs a backslash "
                "at the end of each line"
            )
        settings[name] = _ESCAPE.sub(_unescaped, value)
    return settings


def with_config_file(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with those of the file that `penstock.config.file` names. Raises ClientError."""
    rest = {name: value for name, value in settings.items() if name.strip() != CONFIG_FILE_SETTING}
    path = settings.get(CONFIG_FILE_SETTING)
    if not path:
        return rest
    found = read_properties(str(path))
    if CONFIG_FILE_SETTING in found:
        raise ClientError(f"{path}: {CONFIG_FILE_SETTING} cannot be set in such a file")
    return {**found, **rest}


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line that is no comment with its number, joined with the lines that continue it."""
    lines = iter(enumerate(re.split(r"\r\n|\n|\r", text), start=1))
    for number, natural in lines:
        line = natural.lstrip(_BLANK)
        if not line or line[0] in "#!":
            continue
        while _ODD_BACKSLASHES.search(line):
            _, following = next(lines, (0, ""))
            line = line[:-1] + following.lstrip(_BLANK)
        yield number, line


def _split(line: str) -> tuple[str, str, str]:
    """Names of settings contain no escapes, so the first separator ends the name."""
    match = _SEPARATOR.search(line)
    if match is None:
        return line, "", ""
    return line[: match.start()], match[0], line[match.end() :]


def _unescaped(match: re.Match[str]) -> str:
    character = match[1]
    if len(character) > 1:
        return chr(int(character[1:], 16))
    return _CONTROL.get(character, character)
