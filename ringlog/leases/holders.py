"""Holders: short numbers for the names of nodes that hold leases, and of active members. Pure.

A holder without leases is forgotten at once. With `keeps_idle` it is forgotten after a long silence: the
holders of a named group are its members. The time of a member's last request is not logged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ringlog.errors import Throttled
from ringlog.limits import GROUP_MEMBER_SILENT_MS, GROUP_MEMBERS_MAX

ProcessId = tuple[int, int]
"""(pid, start time in clock ticks) of a process on the shard's host."""
NO_PROCESS: ProcessId = (0, 0)


@dataclass(slots=True)
class Holder:
    """One holder."""

    name: str
    number: int
    seen_ms: int = 0
    """Time of its last request."""
    held: int = 0
    """Number of seqs leased to it."""
    runs: int = 0
    """Number of runs with these seqs."""


class Holders:
    """Holders by number. The number of a forgotten holder is reused."""

    def __init__(self, *, keeps_idle: bool = False) -> None:
        self._keeps_idle = keeps_idle
        self._numbers: dict[str, int] = {}
        self._all: list[Holder] = []
        """By number; the entries in `_free` are not in use."""
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Holder]:
        return iter([self._all[number] for number in self._numbers.values()])

    def find(self, name: str) -> int:
        """Return its number; -1 if there is no holder with this name."""
        return self._numbers.get(name, -1)

    def name_of(self, number: int) -> str:
        """Return the name of this number."""
        return self._all[number].name

    def held_by(self, name: str) -> int:
        """Return the number of seqs leased to it."""
        number = self.find(name)
        return self._all[number].held if number >= 0 else 0

    def get_or_add(self, name: str) -> int:
        """Return its number; add it if it is new. Call `forget_idle` if it gets no lease in the end."""
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
        """Count `size` seqs in `runs` more runs. A split of a run adds no seqs."""
        holder = self._all[number]
        holder.held += size
        holder.runs += runs

    def drop(self, number: int, size: int) -> None:
        """Count one run less."""
        holder = self._all[number]
        holder.held -= size
        holder.runs -= 1
        if not holder.runs:
            self.forget_idle(number)

    def forget_idle(self, number: int) -> None:
        """Forget this holder if it has no lease, unless idle holders are kept."""
        holder = self._all[number]
        if not self._keeps_idle and not holder.runs:
            del self._numbers[holder.name]
            self._free.append(number)

    # -- members --------------------------------------------------------------------------------------

    def require_room(self, name: str, now_ms: int) -> None:
        """Raise Throttled if this would be one member too many. Silent members are removed to make space."""
        if name in self._numbers or len(self) < GROUP_MEMBERS_MAX:
            return
        self.sweep(now_ms)
        if len(self) < GROUP_MEMBERS_MAX:
            return
        idle = [each for each in self if not each.runs]
        if not idle:
            raise Throttled(
                f"the group has the maximum of {GROUP_MEMBERS_MAX} members: remove one, or retry later",
                limit="group_members", max=GROUP_MEMBERS_MAX, retry_after_ms=1_000,
            )  # fmt: skip
        self.leave(min(idle, key=lambda each: each.seen_ms).name)

    def touch_member(self, name: str, now_ms: int) -> int:
        """Record a request of this member and return its number."""
        number = self.get_or_add(name)
        holder = self._all[number]
        holder.seen_ms = max(holder.seen_ms, now_ms)
        return number

    def leave(self, name: str) -> None:
        """Remove a member. A member with leases stays."""
        number = self.find(name)
        if number >= 0 and not self._all[number].runs:
            del self._numbers[name]
            self._free.append(number)

    def sweep(self, now_ms: int) -> None:
        """Remove members without leases that were silent for a long time."""
        silent = now_ms - GROUP_MEMBER_SILENT_MS
        for member in [each for each in self if each.seen_ms < silent]:
            self.leave(member.name)
