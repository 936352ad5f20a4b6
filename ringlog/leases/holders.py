"""Holders: short numbers for the names of those who hold leases, and of members who asked lately. Pure.

The name of a holder of nothing is forgotten at once, or kept until it was silent for long (`keeps_idle`):
those of a named group are its members. When a member last asked is memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ringlog.errors import Throttled
from ringlog.limits import GROUP_MEMBER_SILENT_MS, GROUP_MEMBERS_MAX

ProcessId = tuple[int, int]
"""(pid, when it began) of a process on the shard's host."""
NO_PROCESS: ProcessId = (0, 0)


@dataclass(slots=True)
class Holder:
    """One of them."""

    name: str
    number: int
    seen_ms: int = 0
    """When it last asked for anything."""
    held: int = 0
    """Numbers leased to it."""
    runs: int = 0
    """In so many runs."""


class Holders:
    """Holders by number. A number is used again once its holder is forgotten."""

    def __init__(self, *, keeps_idle: bool = False) -> None:
        self._keeps_idle = keeps_idle
        self._numbers: dict[str, int] = {}
        self._all: list[Holder] = []
        """By number; those in `_free` stand for nobody."""
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Holder]:
        return iter([self._all[number] for number in self._numbers.values()])

    def find(self, name: str) -> int:
        """Its number; -1 = there is none of this name."""
        return self._numbers.get(name, -1)

    def name_of(self, number: int) -> str:
        """Who has this number."""
        return self._all[number].name

    def held_by(self, name: str) -> int:
        """Numbers leased to it."""
        number = self.find(name)
        return self._all[number].held if number >= 0 else 0

    def get_or_add(self, name: str) -> int:
        """Its number, a new one if it had none. Call `forget_idle` if it is given nothing after all."""
        number = self._numbers.get(name, -1)
        if number < 0:
            if self._free:
                number = self._free.pop()
                holder = self._all[number]
                holder.name, holder.seen_ms = name, 0
            else:
                number = len(self._all)
                self._all.append(Holder(name, number))
            self._numbers[name] = number
        return number

    def add(self, number: int, size: int, runs: int = 1) -> None:
        """It holds one run more, or the same numbers in one run more."""
        holder = self._all[number]
        holder.held += size
        holder.runs += runs

    def drop(self, number: int, size: int) -> None:
        """It holds one run less."""
        holder = self._all[number]
        holder.held -= size
        holder.runs -= 1
        if not holder.runs:
            self.forget_idle(number)

    def forget_idle(self, number: int) -> None:
        """Forget this one if it holds nothing, unless such holders are kept."""
        holder = self._all[number]
        if not self._keeps_idle and not holder.runs:
            del self._numbers[holder.name]
            self._free.append(number)

    # -- members --------------------------------------------------------------------------------------

    def require_room(self, name: str, now_ms: int) -> None:
        """Raise Throttled when it would be one member too many; silent ones make room."""
        if name in self._numbers or len(self) < GROUP_MEMBERS_MAX:
            return
        self.sweep(now_ms)
        if len(self) < GROUP_MEMBERS_MAX:
            return
        idle = [each for each in self if not each.runs]
        if not idle:
            raise Throttled(
                "too many members", limit="group_members", max=GROUP_MEMBERS_MAX, retry_after_ms=1_000
            )
        self.leave(min(idle, key=lambda each: each.seen_ms).name)

    def touch_member(self, name: str, now_ms: int) -> int:
        """It asked for something; returns its number."""
        number = self.get_or_add(name)
        holder = self._all[number]
        holder.seen_ms = max(holder.seen_ms, now_ms)
        return number

    def leave(self, name: str) -> None:
        """It is no member any more; a member that holds something stays one."""
        number = self.find(name)
        if number >= 0 and not self._all[number].runs:
            del self._numbers[name]
            self._free.append(number)

    def sweep(self, now_ms: int) -> None:
        """Forget members that were silent for long and hold nothing."""
        silent = now_ms - GROUP_MEMBER_SILENT_MS
        for member in [each for each in self if each.seen_ms < silent]:
            self.leave(member.name)
