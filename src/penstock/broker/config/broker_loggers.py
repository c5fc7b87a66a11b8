"""The node's loggers as BROKER_LOGGER resources, whose levels `kafka-configs` shows and sets.

`root` is the parent of all other loggers of the node. A changed level lasts until the process ends, as in Apache
Kafka.
"""

import logging
from collections.abc import Iterable
from typing import Final

from penstock.cluster.controller.alter_configs import ConfigChange, ConfigOp
from penstock.protocol.errors import ApiError, ErrorCode

_PACKAGE: Final = "penstock"
_ROOT: Final = "root"
#: Kafka's level names. TRACE maps to DEBUG because nothing is logged below DEBUG.
_LEVELS: Final = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
_NAMES: Final = {level: name for name, level in _LEVELS.items() if name != "TRACE"}


def logger_levels() -> dict[str, str]:
    """Return each logger of the node with its effective level, by Kafka's level names."""
    return {name: _level_name(logger) for name, logger in sorted(_loggers().items())}


def alter_loggers(changes: Iterable[ConfigChange], *, validate_only: bool) -> None:
    """Apply all changes, or none of them if one is invalid. Raises ApiError."""
    asked, loggers = tuple(changes), _loggers()
    for change in asked:
        _check_change(change, loggers)
    for change in () if validate_only else asked:
        is_set = change.op == ConfigOp.SET and change.value is not None
        loggers[change.name].setLevel(_LEVELS[str(change.value)] if is_set else logging.NOTSET)


def _check_change(change: ConfigChange, loggers: dict[str, logging.Logger]) -> None:
    if change.op not in (ConfigOp.SET, ConfigOp.DELETE):
        op = ConfigOp(change.op).name if change.op in ConfigOp.__members__.values() else change.op
        message = f"{op} operation is not allowed for the BROKER_LOGGER resource"
        raise ApiError(ErrorCode.invalid_request, message)
    if change.name not in loggers:
        raise ApiError(ErrorCode.invalid_config, f"Logger {change.name} does not exist!")
    if change.op == ConfigOp.DELETE:
        if change.name == _ROOT:
            raise ApiError(
                ErrorCode.invalid_request, "Removing the log level of the root logger is not allowed"
            )
    elif change.value not in _LEVELS:
        raise ApiError(
            ErrorCode.invalid_config,
            f"Cannot set the log level of {change.name} to {change.value} as it is not a supported log level. "
            f"Valid log levels are {', '.join(sorted(_LEVELS))}",
        )


def _loggers() -> dict[str, logging.Logger]:
    ours = {
        name: logger
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and name.startswith(f"{_PACKAGE}.")
    }
    return {_ROOT: logging.getLogger(_PACKAGE), **ours}


def _level_name(logger: logging.Logger) -> str:
    level = logger.getEffectiveLevel()
    return _NAMES.get(level, logging.getLevelName(level))
