"""`penstock serve`: run a broker, or several under one supervisor, until told to stop."""

import errno
import os
from collections.abc import Mapping, Sequence

from penstock.broker.settings import InvalidSetting, Settings
from penstock.cli import loading
from penstock.cli.failure import WRONG_USAGE, Failure, report
from penstock.cli.flags import LIFELINE, WORKERS, settings_from
from penstock.cli.open_files import raise_limit


def start(flags: Mapping[str, Sequence[str]]) -> int:
    try:
        settings = settings_from(flags, os.environ)
    except InvalidSetting as error:
        return report(Failure(str(error), exit_code=WRONG_USAGE))
    raise_limit()
    if LIFELINE in flags:
        from penstock.cli.lifeline import stop_with_stdin

        stop_with_stdin()
    return _start_workers(flags, settings) if WORKERS in flags else _start_node(flags, settings)


def _start_workers(flags: Mapping[str, Sequence[str]], settings: Settings) -> int:
    from penstock.cli import workers

    try:
        return workers.start(flags, settings)
    except Failure as failure:
        return report(failure)


def _start_node(flags: Mapping[str, Sequence[str]], settings: Settings) -> int:
    with loading():
        from penstock.broker.node import StartFailed, serve
        from penstock.cli.welcome import announce

    try:
        return serve(settings, lambda node: announce(node, welcome="--welcome" in flags))
    except StartFailed as error:
        return report(Failure(str(error), hint=error.hint))
    except OSError as error:
        return report(_data_folder_trouble(error, settings))


def _data_folder_trouble(error: OSError, settings: Settings) -> Failure:
    """Addresses fail with StartFailed; what is left is the folder: not writable, no folder, no space."""
    path = error.filename or settings.data_dir
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return Failure(f"{path} is not a folder", hint="--data-dir names another")
    why = os.strerror(error.errno) if error.errno else str(error)
    return Failure(f"{path}: {why}", hint="--data-dir names another folder")
