"""Orphans: files and directories that no shard has registered, and when they may be deleted. Pure.

A stem on disk that no shard has registered has one of these origins:

- The compactor made it a moment ago and has not registered it yet.
- It was dropped or replaced, and a snapshot that recovery may start from still lists it.
- A crash left it.

These cases cannot be distinguished, and one rule is right for all of them. An orphan is deleted when every
shard has written SNAPSHOTS_KEPT + 1 snapshots since it was first found. By then its maker has registered it
or has exited, and no kept snapshot is from before. Files whose names have no format of the engine are never
touched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ringlog.limits import SNAPSHOTS_KEPT
from ringlog.segment.layout import split_part
from ringlog.storage.layout import TMP_SUFFIX

SNAPSHOTS_BEFORE_REMOVAL = SNAPSHOTS_KEPT + 1
_TEMPORARY = re.compile(r"^packs/[0-9a-f]{16}\.(data|idx|tags|del)$")


def group_parts(names: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Group paths of parts below a data directory or store: (stem -> paths of its parts, temporary files)."""
    stems: dict[str, list[str]] = {}
    temporaries = []
    for name in names:
        part = split_part(name)
        if part is not None:
            stems.setdefault(part[0], []).append(name)
            continue
        final_name = name.removesuffix(TMP_SUFFIX)
        if final_name != name and (split_part(final_name) is not None or _TEMPORARY.match(final_name)):
            temporaries.append(name)
    return stems, temporaries


class OrphanFiles:
    """Names of orphans, with each shard's newest snapshot when it first replied after they were found."""

    def __init__(self) -> None:
        self._since: dict[str, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def add(self, names: Iterable[str], snapshots: Mapping[int, int]) -> None:
        """Add stems, temporary files or empty directories that exist and that no shard has registered."""
        for name in names:
            self._since[name] = {**snapshots, **self._since.get(name, {})}

    def discard(self, stems: Collection[str]) -> None:
        """Remove names that were registered or deleted."""
        for stem in stems:
            self._since.pop(stem, None)

    def removable(self, snapshots: Mapping[int, int]) -> list[str]:
        """Return the names that may be deleted. `snapshots` is the newest snapshot of every shard."""
        return sorted(
            name
            for name, since in self._since.items()
            if all(
                number >= since.get(shard, number) + SNAPSHOTS_BEFORE_REMOVAL
                for shard, number in snapshots.items()
            )
        )
