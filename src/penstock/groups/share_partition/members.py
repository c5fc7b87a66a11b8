"""Who holds locks, as small numbers that fit into the window's arrays."""

from typing import Final

NOBODY: Final = 0
#: A number takes one byte. One more member waits until another holds nothing.
HOLDERS_MAX: Final = 255


class Members:
    """A member has a number while it holds something."""

    __slots__ = ("_free", "_held", "_names", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = [""]
        self._held: list[int] = [0]
        self._free: list[int] = []

    def number_of(self, member: str) -> int:
        """NOBODY for who holds nothing."""
        return self._numbers.get(member, NOBODY)

    def has_room_for(self, member: str) -> bool:
        return member in self._numbers or len(self._numbers) < HOLDERS_MAX

    def take(self, member: str, count: int) -> int:
        """The member holds so many more; returns its number."""
        number = self._numbers.get(member)
        if number is None:
            number = self._numbers[member] = self._new_number(member)
        self._held[number] += count
        return number

    def give_back(self, number: int, count: int) -> None:
        self._held[number] -= count
        assert self._held[number] >= 0, "more given back than was held"
        if count and self._held[number] == 0:
            del self._numbers[self._names[number]]
            self._free.append(number)

    def _new_number(self, member: str) -> int:
        if self._free:
            number = self._free.pop()
            self._names[number] = member
            return number
        self._names.append(member)
        self._held.append(0)
        assert len(self._names) <= HOLDERS_MAX + 1, "a number takes one byte"
        return len(self._names) - 1
