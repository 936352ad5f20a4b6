"""Which files of a shard's log can be read, and how far. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LogFileTable:
    """Files of the log, volatile ones too (their paths begin with `@`), by number."""

    paths: dict[int, str] = field(default_factory=dict)
    salts: dict[int, int] = field(default_factory=dict)
    stops: dict[int, int] = field(default_factory=dict)
    """Where a file that nobody writes any more ends; the current ones are absent."""
    starts: dict[int, int] = field(default_factory=dict)
    holes: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Stretches of files, ascending, that hold damaged records which were given up."""
    foreign: set[int] = field(default_factory=set)
    """Files written under another shard count: other shards need them too."""

    def closed_files(self) -> dict[int, int]:
        """File -> where it ends, of every file on disk that nobody writes any more. All of it is durable."""
        return {
            each: stop
            for each, stop in self.stops.items()
            if each in self.paths and not self.paths[each].startswith("@")
        }

    def last_closed(self) -> tuple[int, int]:
        """The last file on disk that nobody writes any more, and where it ends; (0, 0) = there is none."""
        return max(self.closed_files().items(), default=(0, 0))

    def whole(self, file_id: int, start: int, stop: int) -> list[tuple[int, int]]:
        """The stretches of [start, stop) of a file that can be read."""
        stretches = []
        for hole_start, hole_stop in self.holes.get(file_id, ()):
            stretches.append((start, hole_start))
            start = hole_stop
        return [(a, b) for a, b in [*stretches, (start, stop)] if a < b]

    def forget(self, file_id: int) -> None:
        """Nobody is led to this file any more."""
        for table in (self.paths, self.salts, self.stops, self.starts, self.holes):
            table.pop(file_id, None)
        self.foreign.discard(file_id)
