"""`penstock serve`: run a broker until it is told to stop."""

import errno
import os
from collections.abc import Mapping, Sequence

from penstock.broker.settings import InvalidSetting, Settings
from penstock.cli.failure import WRONG_USAGE, Failure, report
from penstock.cli.flags import settings_from


def start(flags: Mapping[str, Sequence[str]]) -> int:
    try:
        settings = settings_from(flags, os.environ)
    except InvalidSetting as error:
        return report(Failure(str(error), exit_code=WRONG_USAGE))
    try:
        return _serve(settings, welcome="--welcome" in flags)
    except OSError as error:
        return report(_why_it_did_not_start(error, settings))


def _serve(settings: Settings, *, welcome: bool) -> int:
    from penstock.broker.node import StartFailed, serve
    from penstock.cli.welcome import announce

    try:
        return serve(settings, lambda node: announce(node, welcome=welcome))
    except StartFailed as error:
        return report(Failure(str(error), hint=error.hint))


def _why_it_did_not_start(error: OSError, settings: Settings) -> Failure:
    addresses = ", ".join(str(listener) for listener in settings.listeners)
    match error.errno:
        case errno.EADDRINUSE:
            return Failure(
                f"{addresses}: the address is in use", hint="stop what runs there, or --listen elsewhere"
            )
        case errno.EADDRNOTAVAIL:
            return Failure(f"{addresses}: this machine has no such address")
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTDIR | errno.EEXIST:
            path = error.filename or settings.data_dir
            return Failure(f"{path}: {os.strerror(error.errno)}", hint="--data-dir names another folder")
        case _:
            return Failure(f"the broker did not start: {error}")
