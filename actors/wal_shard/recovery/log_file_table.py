"""Table of the readable files of a shard's log, with their end offsets. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LogFileTable:
    """Readable log files by number. Includes volatile files, whose paths begin with `@`."""

    paths: dict[int, str] = field(default_factory=dict)
    salts: dict[int, int] = field(default_factory=dict)
    stops: dict[int, int] = field(default_factory=dict)
    """End offset of each closed file. The current files have no entry."""
    starts: dict[int, int] = field(default_factory=dict)
    holes: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Byte ranges of files, ascending, with damaged records that were given up."""
    other_layout_files: set[int] = field(default_factory=set)
    """Files written under another shard count. Other shards need them too."""

    def closed_files(self) -> dict[int, int]:
        """Return the end offset of every closed file on disk, by file.

        These files are durable up to there.
        """
        return {
            each: stop
            for each, stop in self.stops.items()
            if each in self.paths and not self.paths[each].startswith("@")
        }

    def last_closed(self) -> tuple[int, int]:
        """Return (file, end offset) of the last closed file on disk, or (0, 0) if there is none."""
        return max(self.closed_files().items(), default=(0, 0))

    def whole(self, file_id: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the readable byte ranges within [start, stop) of a file."""
        ranges = []
        for hole_start, hole_stop in self.holes.get(file_id, ()):
            ranges.append((start, hole_start))
            start = hole_stop
        return [(a, b) for a, b in [*ranges, (start, stop)] if a < b]

    def update(self, found: LogFileTable) -> None:
        """Add the files of another table."""
        self.paths.update(found.paths)
        self.salts.update(found.salts)
        self.stops.update(found.stops)
        self.holes.update(found.holes)
        self.other_layout_files.update(found.other_layout_files)

    def forget(self, file_id: int) -> None:
        """Remove a file from the table. Readers are no longer directed to it."""
        for table in (self.paths, self.salts, self.stops, self.starts, self.holes):
            table.pop(file_id, None)
        self.other_layout_files.discard(file_id)
