"""Reads passwords from a file, the environment or the terminal; never from an argument, which `ps` would show.

This module does not load the command-line library, because `penstock serve` uses it.
"""

import os
import sys
from getpass import getpass
from pathlib import Path
from typing import Final

from penstock.cli.errors import EXIT_USAGE, CommandError

PASSWORD_VARIABLE: Final = "PENSTOCK_USER_PASSWORD"


def read_password(
    user: str, file: str | None, variable: str = PASSWORD_VARIABLE, flag: str = "--password-file"
) -> str:
    """Return the password. Raises CommandError if there is none."""
    if file is not None:
        password = _from_file(file)
    elif variable in os.environ:
        password = os.environ[variable]
    elif sys.stdin.isatty():
        password = getpass(f"Password of {user}: ")
        if getpass("Once more: ") != password:
            raise CommandError("the passwords differ")
    else:
        raise CommandError(f"no password for {user}", hint=f"use {flag}, or {variable}", exit_code=EXIT_USAGE)
    if not password:
        raise CommandError("the password is empty", exit_code=EXIT_USAGE)
    return password


def _from_file(file: str) -> str:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read the password from {file}: {error}") from None
    return text.removesuffix("\n").removesuffix("\r")
