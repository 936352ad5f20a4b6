"""Members of a group: who asked lately or holds something, and how much. Pure.

Who holds what is durable, with the leases; who merely asked is memory, and forgotten when silent.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringlog.errors import Throttled
from ringlog.limits import GROUP_MEMBER_SILENT_MS, GROUP_MEMBERS_MAX

Life = tuple[int, int]
"""(pid, when it began) of a process on the shard's host."""
NO_LIFE: Life = (0, 0)


@dataclass(slots=True)
class Member:
    """One of them."""

    name: str
    seen_ms: int
    """When it last asked for anything."""
    held: int = 0
    """Positions leased to it."""
    runs: int = 0
    """In so many runs, each of which has its number."""
    life: Life = NO_LIFE
    """The process that holds all of it, as far as is known; memory, as `seen_ms`."""


class Members:
    """Members by number. A number is used again once its member is forgotten."""

    def __init__(self) -> None:
        self.by_number: dict[int, Member] = {}
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []
        self._made = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, name: str) -> int:
        """Its number; -1 = it is no member."""
        return self._numbers.get(name, -1)

    def held_by(self, name: str) -> int:
        """Positions leased to it."""
        number = self.find(name)
        return self.by_number[number].held if number >= 0 else 0

    def require_room(self, name: str, now_ms: int) -> None:
        """Raise Throttled when it would be one member too many; silent ones make room."""
        if name in self._numbers or len(self) < GROUP_MEMBERS_MAX:
            return
        self.sweep(now_ms)
        if len(self) < GROUP_MEMBERS_MAX:
            return
        idle = [each for each in self.by_number.values() if not each.runs]
        if not idle:
            raise Throttled(
                "too many members", limit="group_members", max=GROUP_MEMBERS_MAX, retry_after_ms=1_000
            )
        self.forget(min(idle, key=lambda each: each.seen_ms).name)

    def note(self, name: str, now_ms: int) -> int:
        """It asked for something; returns its number, a new one if it was no member."""
        number = self._numbers.get(name)
        if number is None:
            if self._free:
                number = self._free.pop()
            else:
                number, self._made = self._made, self._made + 1
            self._numbers[name] = number
            self.by_number[number] = Member(name, now_ms)
        else:
            member = self.by_number[number]
            member.seen_ms = max(member.seen_ms, now_ms)
        return number

    def asked(self, name: str, now_ms: int, life: Life) -> None:
        """This process asks for leases in the member's name. Who shares a name with another one who holds
        something, or does not say who he is, is nobody whose death would end the member's leases."""
        member = self.by_number[self.note(name, now_ms)]
        is_alone = member.life == life or not member.runs
        member.life = life if is_alone else NO_LIFE

    def of_process(self, life: Life) -> list[str]:
        """Members that are this process."""
        return [each.name for each in self.by_number.values() if each.life == life]

    def add(self, number: int, size: int) -> None:
        """It holds one run more."""
        member = self.by_number[number]
        member.held += size
        member.runs += 1

    def drop(self, number: int, size: int) -> None:
        """It holds one run less."""
        member = self.by_number[number]
        member.held -= size
        member.runs -= 1

    def forget(self, name: str) -> None:
        """It is no member any more; who holds something stays one."""
        number = self._numbers.get(name)
        if number is not None and not self.by_number[number].runs:
            del self._numbers[name], self.by_number[number]
            self._free.append(number)

    def sweep(self, now_ms: int) -> None:
        """Forget who was silent for long and holds nothing."""
        silent = now_ms - GROUP_MEMBER_SILENT_MS
        for member in [each for each in self.by_number.values() if each.seen_ms < silent]:
            self.forget(member.name)
