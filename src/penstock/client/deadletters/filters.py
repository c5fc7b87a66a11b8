"""Which letters are meant: by time, error, key, header, group, handler and place. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from penstock.client.deadletters.letter import Letter


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """All that is given must hold; of several of one kind, but for headers, one is enough."""

    #: since <= timestamp < until
    since_ms: int | None = None
    until_ms: int | None = None
    #: Patterns such as `*Timeout*`, of the class with or without its module.
    errors: tuple[str, ...] = ()
    keys: tuple[bytes, ...] = ()
    headers: tuple[tuple[str, bytes], ...] = ()
    groups: tuple[str, ...] = ()
    handlers: tuple[str, ...] = ()
    partitions: tuple[int, ...] = ()
    #: First and last.
    offsets: tuple[tuple[int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        return self == Filter()

    def matches(self, letter: Letter) -> bool:
        return (
            self._is_there(letter)
            and self._is_then(letter)
            and self._is_of(letter)
            and (not self.errors or any(is_error(each, letter.failure.error_class) for each in self.errors))
        )

    def _is_there(self, letter: Letter) -> bool:
        partition, offset = letter.spot
        return (not self.partitions or partition in self.partitions) and (
            not self.offsets or any(first <= offset <= last for first, last in self.offsets)
        )

    def _is_then(self, letter: Letter) -> bool:
        since_ms = letter.timestamp_ms if self.since_ms is None else self.since_ms
        return since_ms <= letter.timestamp_ms and (
            self.until_ms is None or letter.timestamp_ms < self.until_ms
        )

    def _is_of(self, letter: Letter) -> bool:
        return (
            (not self.keys or letter.record.key in self.keys)
            and all(each in letter.record.headers for each in self.headers)
            and (not self.groups or _is_any(self.groups, letter.group))
            and (not self.handlers or _is_any(self.handlers, letter.handler))
        )


def is_error(pattern: str, error_class: str) -> bool:
    """`ValueError` is meant by its own name, by that with its module, and by patterns of both."""
    return _is_meant(pattern, error_class) or _is_meant(pattern, error_class.rpartition(".")[2])


def _is_any(patterns: tuple[str, ...], name: str | None) -> bool:
    return name is not None and any(_is_meant(each, name) for each in patterns)


def _is_meant(pattern: str, name: str) -> bool:
    """A name with brackets in it is a pattern that it may not fit itself."""
    return name == pattern or fnmatchcase(name, pattern)
