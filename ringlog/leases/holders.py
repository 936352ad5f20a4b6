"""Holders: short numbers for the names of those who hold leases, as long as they do. Pure."""

from __future__ import annotations


class Holders:
    """Names by number. A number is used again once nobody holds anything under it."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._names: list[bytes] = []
        self._runs: list[int] = []
        """Of each number, how many runs it holds."""
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, name: bytes) -> int:
        """Its number; -1 = it holds nothing."""
        return self._numbers.get(name, -1)

    def name_of(self, number: int) -> bytes:
        """Who has this number."""
        return self._names[number]

    def take(self, name: bytes) -> int:
        """Its number, a new one if it had none. Say `settle` when what it is given was added."""
        number = self._numbers.get(name)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._names[number] = name
            else:
                number = len(self._names)
                self._names.append(name)
                self._runs.append(0)
            self._numbers[name] = number
        return number

    def settle(self, number: int) -> None:
        """Forget a name that was given nothing after all."""
        if not self._runs[number]:
            self._numbers.pop(self._names[number])
            self._free.append(number)

    def add(self, number: int) -> None:
        """It holds one run more."""
        self._runs[number] += 1

    def drop(self, number: int) -> None:
        """It holds one run less; with the last one its name is forgotten."""
        self._runs[number] -= 1
        self.settle(number)
