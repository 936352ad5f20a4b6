"""Damage larger than a bit: pages, misplaced frames, missing files, and files from another time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from chaos.rot.specimen import Specimen
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.segment.layout import DATA as DATA_SUFFIX
from ringlog.segment.layout import DATA_HEADER_BYTES, DEL, DEL_HEADER_BYTES, IDX, TAGS
from tests.support.shard_world import DATA

PAGE = 4096
SECTOR = 512
KINDS = (".log", DATA_SUFFIX, IDX, TAGS, DEL, "snapshot", "engine", "log-")
VERSIONS = (0, 2, 0xFFFF)
CHECKSUM_AT = {".log": 4088, DATA_SUFFIX: 4088, IDX: 120, TAGS: 80, DEL: 40, "snapshot": 88}
"""Offset of the header's checksum, which covers the bytes before it (docs/reference/format.md)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One damaged directory. `damaged` are the changed paths."""

    row: str
    name: str
    files: dict[str, bytes]
    damaged: frozenset[str]
    is_quiet: bool = False
    """The offline verifier cannot detect the damage: the files are valid, but not the newest versions."""
    is_kept: bool = False
    """An engine must not rewrite the damaged files."""
    is_loss: bool = False
    """Required data is missing. The offline verifier must fail; a remark is not enough."""
    reaches_end: bool = False
    """The damage includes the mark at the end of a stream.

    After a reboot nothing states where the stream ended.
    """


def kind_of(path: str) -> str:
    """Return the kind of a file, one of KINDS."""
    return next(kind for kind in KINDS if path.endswith(kind) or kind in path.rpartition("/")[2])


def all_cases(specimen: Specimen) -> Iterator[Case]:
    """Yield all cases in a fixed order."""
    yield from pages(specimen)
    yield from previous(specimen)
    yield from misplaced(specimen)
    yield from whole_files(specimen)
    yield from snapshots(specimen)
    yield from marks(specimen)
    yield from indexes(specimen)
    yield from versions(specimen)


def _with(specimen: Specimen, path: str, data: bytes) -> dict[str, bytes]:
    return {**specimen.files, path: data}


def _changed(
    specimen: Specimen, row: str, name: str, path: str, data: bytes, *, is_quiet: bool = False,
    is_kept: bool = False,
) -> Iterator[Case]:  # fmt: skip
    """Yield the case, unless the bytes are unchanged."""
    if data != specimen.files[path]:
        files = _with(specimen, path, data)
        is_quiet = is_quiet or _lacks_last_mark(specimen.files[path], path, data)
        yield Case(
            row, f"{name} {path}", files, frozenset([path]), is_quiet=is_quiet, is_kept=is_kept,
            reaches_end=_reaches_end(specimen, path, data),
        )  # fmt: skip


def _lacks_last_mark(sound: bytes, path: str, data: bytes) -> bool:
    """Return whether a log lacks only its last mark. That mark covers no frame, so no data is missing."""
    if not path.endswith(".log") or not sound.strip(b"\0"):
        return False
    batch = frames.scan(sound[: len(sound) & ~7], WAL_HEADER_BYTES)
    at = int(batch.offsets[-1])
    return sound[:at] == data[:at] and int(frames.types_of(batch.words)[-1]) == layout.FrameType.GROUP_MARK


def _reaches_end(specimen: Specimen, path: str, data: bytes) -> bool:
    """Return whether the last mark of a stream's newest file is damaged.

    Nothing else states that the frames before this mark exist.
    """
    if path not in newest_logs(specimen):
        return False
    sound = specimen.files[path]
    batch = frames.scan(sound[: len(sound) & ~7], WAL_HEADER_BYTES)
    is_mark = frames.types_of(batch.words) == layout.FrameType.GROUP_MARK
    at = int(batch.offsets[int(is_mark.nonzero()[0][-2])])  # the last mark with new information
    return sound[at : batch.stop] != data[at : batch.stop]


def _is_read(path: str) -> bool:
    """Return whether the engine reads this file. Of a cold segment it reads only the data part."""
    return path.startswith(DATA + "/") or path.endswith(DATA_SUFFIX)


def pages(specimen: Specimen) -> Iterator[Case]:
    """Yield cases with pages and sectors that are zeroed, doubled, or swapped with the next one (RF-73)."""
    for path, data in specimen.files.items():
        size = PAGE if len(data) >= 2 * PAGE else SECTOR
        for at in range(0, len(data), size):
            stop = min(at + size, len(data))
            after = data[stop : stop + size]
            yield from _changed(specimen, "RF-73", f"zeroed {at}", path, _put(data, at, bytes(stop - at)))
            if len(after) == size:
                yield from _changed(specimen, "RF-73", f"doubled {at}", path, _put(data, stop, data[at:stop]))
                swapped = data[:at] + after + data[at:stop] + data[stop + size :]
                yield from _changed(specimen, "RF-73", f"swapped {at}", path, swapped)


def previous(specimen: Specimen) -> Iterator[Case]:
    """Yield cases with pages as they were before the last write (RF-74)."""
    for path, data in specimen.files.items():
        old = specimen.earlier.get(path, b"")
        # Marks have no checksum. Only snapshots state that marks are missing.
        is_quiet = path.endswith(DEL)
        if old and old != data:
            for at in range(0, min(len(old), len(data)), PAGE):
                page = _put(data, at, old[at : at + PAGE][: len(data) - at])
                yield from _changed(specimen, "RF-74", f"old page {at}", path, page, is_quiet=is_quiet)
        if path.endswith(".log"):
            for at in range(WAL_HEADER_BYTES, len(data), SECTOR):
                yield from _changed(
                    specimen,
                    "RF-74",
                    f"unwritten {at}",
                    path,
                    _put(data, at, bytes(min(SECTOR, len(data) - at))),
                )
        if path.endswith(DEL):
            unmarked = data[:DEL_HEADER_BYTES] + bytes(len(data) - DEL_HEADER_BYTES)
            yield from _changed(specimen, "RF-74", "unmarked", path, unmarked, is_quiet=True)


def misplaced(specimen: Specimen) -> Iterator[Case]:
    """Yield cases with frames and pages that are valid but in the wrong place or file (RF-75)."""
    logs = [path for path in specimen.files if path.endswith(".log")]
    data = [path for path in specimen.files if path.endswith(DATA_SUFFIX)]
    for group, start in ((logs, WAL_HEADER_BYTES), (data, DATA_HEADER_BYTES)):
        spans = {path: list(_frames(specimen.files[path], start)) for path in group}
        for path, own in spans.items():
            for (a, a_stop), (b, b_stop) in itertools.permutations(own, 2):
                if a_stop - a == b_stop - b:
                    moved = _put(specimen.files[path], b, specimen.files[path][a:a_stop])
                    # A frame over a mark of the same file is a state that a repair may have left.
                    is_quiet = path.endswith(".log")
                    yield from _changed(
                        specimen, "RF-75", f"frame {a} at {b} of", path, moved, is_quiet=is_quiet
                    )
            for other, theirs in spans.items():
                if other != path:
                    yield from _strangers(specimen, path, own, other, theirs)


def _strangers(
    specimen: Specimen, path: str, own: list[tuple[int, int]], other: str, theirs: list[tuple[int, int]]
) -> Iterator[Case]:
    mine, foreign = specimen.files[path], specimen.files[other]
    for (a, a_stop), (b, b_stop) in itertools.product(theirs, own):
        if a_stop - a == b_stop - b:
            moved = _put(mine, b, foreign[a:a_stop])
            yield from _changed(specimen, "RF-75", f"frame {a} of {other} at {b} of", path, moved)
            break
    for at in range(0, min(len(mine), len(foreign)) - PAGE, 2 * PAGE):
        moved = _put(mine, at, foreign[at : at + PAGE])
        yield from _changed(specimen, "RF-75", f"page {at} of {other} in", path, moved)


def _frames(data: bytes, start: int) -> Iterator[tuple[int, int]]:
    batch = frames.scan(data[: len(data) & ~7], start)
    offsets = [*batch.offsets.tolist(), batch.stop]
    yield from itertools.pairwise(offsets)


def whole_files(specimen: Specimen) -> Iterator[Case]:
    """Yield cases with files that are missing, renamed, duplicated, swapped, or of an earlier time."""
    newest = newest_logs(specimen)
    for path, data in specimen.files.items():
        if not _is_read(path) or _is_unused(path, data):
            continue
        rest = {each: had for each, had in specimen.files.items() if each != path}
        gone = frozenset([path])
        # Deletion marks are also in the snapshot. A file that the newest snapshot absorbed may be missing.
        is_quiet = path.endswith((DEL, "engine")) or path in specimen.absorbed
        # Index and tags can be rebuilt, and an absorbed log file is not needed.
        is_loss = path.endswith((".log", DATA_SUFFIX)) and not is_quiet
        is_known = is_quiet or "snapshot" in path
        yield Case("RF-76", f"missing {path}", rest, gone, is_quiet=is_known, is_loss=is_loss)
        for how, other in _other_names(path):
            renamed = frozenset([path, other])
            yield Case("RF-76", f"renamed{how} {path}", {**rest, other: data}, renamed, is_loss=is_loss)
            yield Case("RF-76", f"doubled{how} {path}", {**specimen.files, other: data}, renamed)
        old = specimen.earlier.get(path)
        if old is not None and path not in newest:
            yield from _changed(specimen, "RF-76", "of last week", path, old, is_quiet=path.endswith(DEL))
    by_kind: dict[str, list[str]] = {}
    for path in filter(_is_read, specimen.files):
        by_kind.setdefault(kind_of(path), []).append(path)
    for paths in by_kind.values():
        for a, b in itertools.combinations(paths, 2):
            # Two log files that were never used contain no identity, so swapping them changes nothing.
            if _is_unused(a, specimen.files[a]) and _is_unused(b, specimen.files[b]):
                continue
            swapped = {**specimen.files, a: specimen.files[b], b: specimen.files[a]}
            yield Case("RF-76", f"swapped {a} and {b}", swapped, frozenset([a, b]))


def _is_unused(path: str, data: bytes) -> bool:
    """Return whether this is a log file that was allocated in advance and never used."""
    return path.endswith(".log") and not data.strip(b"\0")


def newest_logs(specimen: Specimen) -> set[str]:
    """Return the last used file of each stream. Only the board states how much it contains."""
    used = [path for path, data in specimen.files.items() if path.endswith(".log") and data.strip(b"\0")]
    last: dict[str, str] = {}
    for path in used:
        stream = path.rpartition("/")[0]
        last[stream] = max(last.get(stream, path), path, key=_number)
    return set(last.values())


def _number(path: str) -> tuple[int, int]:
    incarnation, n = path.removesuffix(".log").split("-")[-2:]
    return int(incarnation), int(n)


def _other_names(path: str) -> Iterator[tuple[str, str]]:
    """Yield (description, path) of unused paths that a file of this kind could have.

    They are another number, and the same number in another place.
    """
    if path.endswith(".log"):
        incarnation, n = _number(path)
        yield "", path.replace(f"wal-{incarnation}-{n}.log", f"wal-{incarnation}-{n + 40}.log")
        yield (
            " in another life",
            path.replace(f"wal-{incarnation}-{n}.log", f"wal-{incarnation + 40}-{n}.log"),
        )
        yield " in another stream", _in_stead(path, {"shard-00": "shard-01", "shard-01": "shard-00"})
    elif "snapshot-" in path:
        other = path[:-1] + str((int(path[-1]) + 5) % 10)
        yield "", other
        yield (
            " of another shard",
            _in_stead(other, {"snapshot-00": "snapshot-01", "snapshot-01": "snapshot-00"}),
        )
    elif kind_of(path) == "log-":
        yield " of another shard", path[:-2] + "07"
    elif path.endswith(DATA_SUFFIX):
        yield "", path.removesuffix(DATA_SUFFIX)[:-2] + "7e" + DATA_SUFFIX
        folder, name = path.rpartition("/")[::2]
        if name.startswith("seg-"):
            yield " in another topic", f"{folder[:-2]}7e/{name}"
            yield " from another seq", f"{folder}/seg-{int(name[4:24]) + 1:020}{name[24:]}"
            yield " as a pack", f"{folder.rpartition('/topics/')[0]}/packs/pack-{name[25:]}"


def _in_stead(path: str, names: dict[str, str]) -> str:
    return next(path.replace(one, other) for one, other in names.items() if one in path)


def snapshots(specimen: Specimen) -> Iterator[Case]:
    """Yield cases with damaged snapshots: the newest of a shard, all of a shard, and all (RF-77).

    The log that they absorbed is already trimmed.
    """
    by_shard: dict[str, list[str]] = {}
    for path in specimen.files:
        if "snapshot-" in path:
            by_shard.setdefault(path.rpartition(".")[0], []).append(path)
    rotten = {path: _put(data, len(data) // 2, b"\xff" * 8) for path, data in specimen.files.items()}
    groups = [each for found in by_shard.values() for each in ([max(found)], found)]
    for paths in [*groups, [path for found in by_shard.values() for path in found]]:
        damaged = {path: rotten[path] for path in paths}
        name = f"rotten {' '.join(path.rpartition('/')[2] for path in paths)}"
        yield Case("RF-77", name, {**specimen.files, **damaged}, frozenset(paths))


def marks(specimen: Specimen) -> Iterator[Case]:
    """Yield cases with invalid values in each deletion mark (RF-78)."""
    for path, data in specimen.files.items():
        if path.endswith(DEL) and path.startswith(DATA):
            for at in range(DEL_HEADER_BYTES, len(data)):
                for value in (0x01, 0x55, 0xD4, 0xFF):
                    yield from _changed(
                        specimen, "RF-78", f"{value:x} at {at}", path, _put(data, at, bytes([value]))
                    )


def indexes(specimen: Specimen) -> Iterator[Case]:
    """Yield cases with indexes and tags that are missing, cut, random, or of another segment (RF-79).

    In further cases the data part is shorter than its index states.
    """
    rng = random.Random(len(specimen.files))
    parts = [path for path in specimen.files if path.endswith((IDX, TAGS)) and path.startswith(DATA)]
    for path in parts:
        data = specimen.files[path]
        rest = {each: had for each, had in specimen.files.items() if each != path}
        yield Case("RF-79", f"missing {path}", rest, frozenset([path]), is_quiet=True)
        for name, new in (
            ("empty", b""),
            ("cut", data[: len(data) // 2]),
            ("noise", rng.randbytes(len(data))),
        ):
            yield from _changed(specimen, "RF-79", name, path, new)
        for other in parts:
            if other != path and other[-4:] == path[-4:]:
                yield from _changed(specimen, "RF-79", f"that of {other} in", path, specimen.files[other])
    for path, data in specimen.files.items():
        if path.endswith(DATA_SUFFIX):
            for _, stop in list(_frames(data, DATA_HEADER_BYTES))[:-1]:
                yield from _changed(specimen, "RF-79", f"data ends at {stop}", path, data[:stop])


def versions(specimen: Specimen) -> Iterator[Case]:
    """Yield cases with an unknown format version under a valid checksum, in each kind of file (RF-81)."""
    for path, data in specimen.files.items():
        at = CHECKSUM_AT.get(kind_of(path), 0)
        if not at or not _is_read(path) or not data.strip(b"\0"):
            continue
        for version in VERSIONS:
            new = _put(data, 8, version.to_bytes(4, "little"))
            new = _put(new, at, xxhash.xxh3_64_intdigest(new[:at]).to_bytes(8, "little"))
            # Index and tags are rebuilt after any damage.
            is_kept = not path.endswith((IDX, TAGS))
            yield from _changed(specimen, "RF-81", f"version {version}", path, new, is_kept=is_kept)


def _put(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def last_frames(specimen: Specimen) -> dict[str, tuple[int, int]]:
    """Return (start, stop) of the last append in each stream's newest file (RF-72)."""
    found = {}
    for path in newest_logs(specimen):
        data = specimen.files[path]
        batch = frames.scan(data[: len(data) & ~7], WAL_HEADER_BYTES)
        is_append = frames.types_of(batch.words) == layout.FrameType.APPEND
        row = int(is_append.nonzero()[0][-1])
        stops = [*batch.offsets.tolist()[1:], batch.stop]
        found[path] = int(batch.offsets[row]), int(stops[row])
    return found
