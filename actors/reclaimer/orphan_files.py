"""Files and directories of topics that no shard knows, and when they may go. Pure.

A stem on disk that no shard has registered is one of these: made by the compactor a moment ago and not told
yet; dropped or replaced, and still named by a snapshot that recovery may start from; or left by a crash.
They look alike, and one rule is right for all: it goes when, seen from when it was first found unknown, every
shard has SNAPSHOTS_KEPT + 1 more snapshots. By then whoever made it has told or is dead, no snapshot that is
kept was captured before, and it is still unknown (RC-4, RC-5; SN-5).

Anything that has no name of ours is never looked at (ST-5).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ringlog.limits import SNAPSHOTS_KEPT
from ringlog.segment.layout import parse_stem, split_part
from ringlog.storage.layout import TMP_SUFFIX

SNAPSHOTS_BEFORE_REMOVAL = SNAPSHOTS_KEPT + 1
_TEMPORARY = re.compile(r"^packs/[0-9a-f]{16}\.(data|idx|tags|del)$")


def group_parts(names: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """(stem -> paths of its parts, temporaries) among paths below the data directory or the cold store."""
    stems: dict[str, list[str]] = {}
    temporaries = []
    for name in names:
        part = split_part(name)
        if part is not None:
            stems.setdefault(part[0], []).append(name)
            continue
        whole = name.removesuffix(TMP_SUFFIX)
        if whole != name and (split_part(whole) is not None or _TEMPORARY.match(whole)):
            temporaries.append(name)
    return stems, temporaries


class OrphanFiles:
    """What is unknown, since which snapshots."""

    def __init__(self) -> None:
        self._since: dict[str, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def add(self, names: Iterable[str], snapshots: Mapping[int, int]) -> None:
        """These stems, temporaries or empty directories are there and no shard knows them."""
        for name in names:
            self._since.setdefault(name, dict(snapshots))

    def discard(self, stems: Collection[str]) -> None:
        """These are registered after all, or gone."""
        for stem in stems:
            self._since.pop(stem, None)

    def removable(self, snapshots: Mapping[int, int]) -> list[str]:
        """What may go now, given each shard's newest snapshot; every shard must be in it."""
        return sorted(
            name
            for name, since in self._since.items()
            if all(
                number >= since.get(shard, number) + SNAPSHOTS_BEFORE_REMOVAL
                for shard, number in snapshots.items()
            )
        )


def segment_number(stem: str) -> int:
    """The segment's number."""
    parsed = parse_stem(stem)
    assert parsed is not None, stem
    return parsed[2]
