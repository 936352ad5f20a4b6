"""Start state of replay: the snapshots that are relevant to one shard, and the segments on disk.

For each shard under each shard count, only the newest valid snapshot is used. Several of them may contain a
topic. The *governing* snapshot of a topic is the one with the greatest number among those whose shard owned
the topic (C5). Snapshot numbers grow across all shards, so this is the latest one under any shard count.

Log files that the governing snapshot absorbed are not replayed for the topic. A topic that this snapshot knew
and has no row for was deleted.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.actors.wal_shard.recovery.replayed_topics import Orphan
from ringlog.actors.wal_shard.recovery.shard_facts import ShardFacts, decode_facts
from ringlog.envelope.messages import SegmentRef
from ringlog.errors import CorruptData, DiskError
from ringlog.limits import SNAPSHOTS_KEPT
from ringlog.logs import log_event
from ringlog.placement import shard_of, shards_of
from ringlog.segment.index_rebuild import rebuild_index
from ringlog.segment.layout import DATA, IDX, parse_stem
from ringlog.segment.segment import Segment, find_segments, read_data_header
from ringlog.storage.disk import Disk
from ringlog.storage.layout import META_DIR
from ringlog.storage.snapshot import HEADER_BYTES as SNAPSHOT_HEADER_BYTES
from ringlog.storage.snapshot import (
    Snapshot,
    decode_header,
    decode_snapshot,
    load_snapshots,
    snapshot_name,
    snapshot_numbers,
)
from ringlog.topic.row import decode_row
from ringlog.topic.segment_catalog import MissingSegment, SegmentCatalog, owned_by
from ringlog.topic.state import ShardTopic

log: logging.Logger = logging.getLogger("ringlog.shard")

Mask = NDArray[np.bool_]
Owner = tuple[int, int]
"""(shards, shard): a shard under a shard count."""
BOTH, COLD = 1, 2
"""SegmentRef.tier of a segment with its data part in both tiers, or only in the cold tier."""


@dataclass(frozen=True, slots=True)
class SnapshotLayer:
    """One relevant snapshot with its decoded facts."""

    snapshot: Snapshot
    facts: ShardFacts

    @property
    def owner(self) -> Owner:
        """The shard that the snapshot belongs to."""
        return self.snapshot.shards, self.snapshot.shard


@dataclass(slots=True)
class Baseline:
    """The snapshots that are relevant to one shard. `layers` are sorted by number, greatest first."""

    shard: int
    shards: int
    layers: list[SnapshotLayer] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Invalid snapshots, each as "path: reason"."""

    @property
    def own(self) -> SnapshotLayer | None:
        """This shard's own snapshot if it governs all topics of the shard, otherwise None."""
        first = self.layers[0] if self.layers else None
        return first if first is not None and first.owner == (self.shards, self.shard) else None

    def absorbs(self, file_id: int) -> bool:
        """Return True if this shard need not replay anything from the file."""
        return self.own is not None and self.own.facts.absorbs(file_id)

    def covers_missing_file(self, written_by: Owner | None, file_id: int) -> bool:
        """Return True if a snapshot absorbed the file, so that the file may be deleted.

        `written_by` is the (shards, shard) of the next file of its stream, if known.
        """
        return any(
            each.facts.absorbs(file_id) for each in self.layers if is_relevant_to(each.owner, written_by)
        )

    def absorbed(self, file_id: int, topic_ids: NDArray[np.uint64]) -> Mask | None:
        """Return a mask (n,) of frames that the governing snapshots of their topics absorbed.

        Return None if no snapshot absorbed the file.
        """
        is_absorbed_by = [layer.facts.absorbs(file_id) for layer in self.layers]
        if not any(is_absorbed_by):
            return None
        return np.array([*is_absorbed_by, False])[self._governing_layers(topic_ids)]

    def knows_topic(self, topic_id: int) -> bool:
        """Return True if the topic was created before its snapshot. Without a row it was deleted then."""
        for layer in self.layers:
            shards, shard = layer.owner
            if shard_of(topic_id, shards) == shard:
                return topic_id <= layer.facts.last_id
        return False

    def topics(self) -> Iterator[tuple[ShardTopic, bool, int]]:
        """Yield (topic, True if this shard owns it, incarnation of the row) of every governing row.

        Snapshots of another shard count also yield topics of other shards.
        """
        for at, layer in enumerate(self.layers):
            snapshot = layer.snapshot
            governed = self._governing_layers(snapshot.ids) == at
            ours = np.ones(len(governed), dtype=np.bool_)
            if snapshot.shards != self.shards:
                ours = shards_of(snapshot.ids, self.shards) == self.shard
            ids, rows, starts = snapshot.ids.tolist(), memoryview(snapshot.rows), snapshot.starts.tolist()
            for row in np.flatnonzero(governed).tolist():
                topic = decode_row(ids[row], rows[starts[row] : starts[row + 1]])
                yield topic, bool(ours[row]), snapshot.incarnation

    def is_unknown(self, topic_id: int) -> bool:
        """Return True if no snapshot governs this topic."""
        return bool(self._governing_layers(np.array([topic_id], dtype=np.uint64))[0] < 0)

    def listed_segments(self) -> dict[int, SegmentRef]:
        """Return the segments that are listed in snapshots relevant to this shard, by number."""
        layers = self.layers[:1] if self.own is not None else self.layers
        return {ref.number: ref for layer in layers for ref in layer.facts.refs()}

    def _governing_layers(self, topic_ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the index (n,) of each topic's governing layer; -1 if no snapshot governs the topic."""
        if self.own is not None:
            return np.zeros(len(topic_ids), dtype=np.int64)
        found = np.full(len(topic_ids), -1, dtype=np.int64)
        for at, layer in enumerate(self.layers):
            shards, shard = layer.owner
            found[(found < 0) & (shards_of(topic_ids, shards) == shard)] = at
        return found


def load_baseline(disk: Disk, data_dir: str, shard: int, shards: int) -> Baseline:
    """Read the snapshots that are relevant to a shard. Skip and report invalid snapshots."""
    found = Baseline(shard, shards)
    seen: set[Owner] = set()
    for each, number in sorted(snapshot_numbers(disk, data_dir), key=lambda one: -one[1]):
        relative = f"{META_DIR}/{snapshot_name(each, number)}"
        if not disk.exists(f"{data_dir}/{relative}"):
            continue  # a temporary file
        try:
            layer = _load(disk, data_dir, relative, seen, found)
        except DiskError as e:
            if e.errno != errno.ENOENT:
                raise
            continue  # deleted just now, so a newer snapshot exists
        except CorruptData as e:
            found.skipped.append(f"{relative}: {e.message}")
            log_event(log, logging.WARNING, "snapshot skipped", file=relative, reason=e.message)
            continue
        if layer is not None:
            seen.add(layer.owner)
            found.layers.append(layer)
    return found


def _load(disk: Disk, data_dir: str, relative: str, seen: set[Owner], base: Baseline) -> SnapshotLayer | None:
    """Read one snapshot. Return None if it is not relevant."""
    path = f"{data_dir}/{relative}"
    fd = disk.open_read(path)
    try:
        header = decode_header(disk.read_at(fd, SNAPSHOT_HEADER_BYTES, 0), relative)
        if (header.shards, header.shard) in seen:
            return None
        if header.shards == base.shards and header.shard != base.shard:
            return None
        data = disk.read_at(fd, disk.size(fd), 0)
    finally:
        disk.close(fd)
    snapshot = decode_snapshot(data, relative)
    if relative != f"{META_DIR}/{snapshot_name(snapshot.shard, snapshot.number)}":
        raise CorruptData(
            f"snapshot file name does not match shard {snapshot.shard}, number {snapshot.number}",
            file=relative, number=snapshot.number,
        )  # fmt: skip
    return SnapshotLayer(snapshot, decode_facts(snapshot.facts, relative))


def adopt_segments(
    disk: Disk, data_dir: str, base: Baseline, segments: SegmentCatalog, *, has_cold: bool = False,
    beat: Callable[[], None] = lambda: None,
) -> list[MissingSegment]:  # fmt: skip
    """Register every complete segment on disk that contains topics of this shard.

    Return the missing segments: listed segments that do not exist, and segments that cannot be read.

    A segment that no snapshot lists was created later. Either the reclaimer wrote it as a replacement for
    others, which may be deleted by now. Or an unfinished checkpoint wrote it; then the log contains the same
    records.

    The tier of a segment follows from the files. If a listed segment has its index here but not its data
    part, and there is or was a cold tier (`has_cold`), the relocator moved it.
    """
    listed = base.listed_segments()
    found = [stem for stem in find_segments(disk, data_dir) if parse_stem(stem) is not None]
    hot = {stem for stem in found if _may_be_ours(stem, base)}
    cold = _without_data(disk, data_dir, base, segments, hot, has_cold=has_cold)
    missing: list[MissingSegment] = []
    # In order of their numbers in both tiers, because a later segment may overlap an earlier one.
    for stem in sorted((*hot, *cold), key=_number_of):
        beat()
        try:
            _adopt_with_retry(disk, data_dir, stem, base, segments, listed, is_cold=stem in cold)
        except (CorruptData, DiskError) as e:
            if isinstance(e, DiskError) and e.errno == errno.ENOENT and stem not in cold:
                continue  # The reclaimer deleted it. If it did not, the check below reports the segment.
            log_event(log, logging.ERROR, "segment is missing or unreadable", segment=stem, reason=str(e))
            missing.append(_missing(data_dir, stem, e, listed, is_cold=stem in cold))
    known = {each.stem for each in missing} | cold
    for ref in listed.values():
        if ref.number in segments.refs or not _may_be_ours(ref.stem, base) or ref.stem in known:
            continue
        if not disk.exists(f"{data_dir}/{ref.stem}{DATA}"):
            part = ref.stem + (IDX if ref.tier else DATA)
            missing.append(MissingSegment(ref.stem, part, "missing", ref, is_cold=bool(ref.tier)))
    return missing


def _missing(
    data_dir: str, stem: str, error: CorruptData | DiskError, listed: dict[int, SegmentRef], *, is_cold: bool
) -> MissingSegment:
    path = str(error.detail.get("file") or error.detail.get("path") or stem).removeprefix(f"{data_dir}/")
    return MissingSegment(stem, path, error.message, listed.get(_number_of(stem)), is_cold)


def _without_data(
    disk: Disk, data_dir: str, base: Baseline, segments: SegmentCatalog, hot: set[str], *, has_cold: bool
) -> set[str]:
    """Return the stems of listed segments of this shard that have only an index here.

    They are in the cold tier.
    """
    return {
        ref.stem for ref in base.listed_segments().values()
        if ref.stem not in hot and ref.number not in segments.refs and _may_be_ours(ref.stem, base)
        and (ref.tier or has_cold) and disk.exists(f"{data_dir}/{ref.stem}{IDX}")
    }  # fmt: skip


def _number_of(stem: str) -> int:
    parsed = parse_stem(stem)
    return parsed[2] if parsed else 0


def _may_be_ours(stem: str, base: Baseline) -> bool:
    parsed = parse_stem(stem)
    return parsed is None or not parsed[0] or shard_of(parsed[0], base.shards) == base.shard


def _adopt_with_retry(
    disk: Disk, data_dir: str, stem: str, base: Baseline, segments: SegmentCatalog, listed: dict[int,
    SegmentRef], *,
    is_cold: bool,
) -> None:  # fmt: skip
    """Call `_adopt`, and retry a failed read once, because a device error may be transient."""
    try:
        _adopt(disk, data_dir, stem, base, segments, listed, is_cold=is_cold)
    except DiskError as e:
        if e.errno == errno.ENOENT:
            raise
        _adopt(disk, data_dir, stem, base, segments, listed, is_cold=is_cold)


def _adopt(
    disk: Disk, data_dir: str, stem: str, base: Baseline, segments: SegmentCatalog, listed: dict[int,
    SegmentRef], *,
    is_cold: bool,
) -> None:  # fmt: skip
    segment = open_segment(disk, data_dir, stem, base)
    if segment is None:
        return
    try:
        if not is_cold:
            disk.close(disk.open_read(f"{data_dir}/{stem}{DATA}"))
        header = segment.header
        is_others = header.shards == base.shards and header.shard != base.shard
        if is_others and segment.ref.number not in listed:
            return
        topics = segments.split_rows(segment.topics, segment.entries)
        owned = owned_by(topics, base.shard, base.shards)
        if owned is None or owned.any():
            # The snapshot contains the tier. A segment that it does not list is where it was created.
            known = listed.get(segment.ref.number)
            ref = segment.ref
            segments.add(ref, topics, owned)
            if is_cold:
                segments.set_tier(ref.number, COLD)
            elif known is not None and known.tier:
                # A data part on the host is read there, even if the snapshot says that it was moved.
                segments.set_tier(ref.number, BOTH)
    finally:
        segment.close()


def orphans_in(disk: Disk, data_dir: str, base: Baseline, segments: SegmentCatalog) -> dict[int, Orphan]:
    """Return the topics of this shard that have segments but no governing snapshot, by topic id."""
    found: dict[int, Orphan] = {}
    for ref in segments.refs.values():
        ids = [each for each in segments.topics_of(ref.number) if base.is_unknown(each)]
        segment = open_segment(disk, data_dir, ref.stem, base) if ids else None
        if segment is None:
            continue
        try:
            for topic_id in ids:
                row = segment.row(topic_id)
                if row is None:
                    continue
                facts, orphan = segment.topics[row], found.setdefault(topic_id, Orphan())
                orphan.epoch = max(orphan.epoch, int(facts["epoch"]))
                orphan.records += int(facts["records"])
                orphan.bytes += int(facts["bytes"])
                orphan.last_ts = max(orphan.last_ts, int(facts["ts_max"]))
                due = [each for each in (orphan.due_us, int(facts["expires_min"])) if each]
                orphan.due_us = min(due, default=0)
                orphan.dead |= segment.deleted(row)
        finally:
            segment.close()
    return found


def is_relevant_to(owner: Owner, written_by: Owner | None) -> bool:
    """Return True if the snapshot's owner may have absorbed a file that (shards, shard) `written_by` wrote.

    The owner reads files of its own stream and all files written under another shard count.
    """
    return written_by is None or owner[1] == written_by[1] or owner[0] != written_by[0]


def newest_facts(disk: Disk, data_dir: str) -> dict[Owner, ShardFacts]:
    """Return the facts of the newest valid snapshot of every shard under every shard count."""
    found: dict[Owner, ShardFacts] = {}
    for each in load_snapshots(disk, data_dir)[0]:
        found.setdefault((each.shards, each.shard), decode_facts(each.facts, f"shard {each.shard}"))
    return found


def absorbed_everywhere(disk: Disk, data_dir: str, shards: int, file_ids: Iterable[int]) -> set[int]:
    """Return the files of another shard count that both retained snapshots of every shard absorb."""
    left = set(file_ids)
    for shard in range(shards):
        found = [each for each in load_snapshots(disk, data_dir, shard)[0] if each.shards == shards]
        kept = [decode_facts(each.facts, f"shard {shard}") for each in found[:SNAPSHOTS_KEPT]]
        if len(kept) < SNAPSHOTS_KEPT:
            return set()
        left = {each for each in left if all(facts.absorbs(each) for facts in kept)}
    return left


def segment_tables(disk: Disk, data_dir: str, refs: Iterable[SegmentRef]) -> dict[int, Any] | str:
    """Return number -> (topic table, frames) of segments to be registered.

    If one of them cannot be registered, return a str with the reason.
    """
    tables: dict[int, Any] = {}
    for ref in refs:
        if parse_stem(ref.stem) is None:
            return f"{ref.stem[:256]!r}: invalid segment name"
        try:
            segment = Segment.open(disk, data_dir, ref.stem)
        except (CorruptData, DiskError) as e:
            return f"{ref.stem}: {e}"
        segment.close()
        if (segment.ref.number, segment.ref.salt) != (ref.number, ref.salt):
            return f"{ref.stem}: is another segment, {segment.ref.number}"
        tables[ref.number] = segment.topics, segment.entries
    return tables


def open_segment(disk: Disk, data_dir: str, stem: str, base: Baseline) -> Segment | None:
    """Open a segment. If its index or its tags part is missing or damaged, rebuild it from the data (S2).

    A shard does not rebuild segments of another shard of this shard count; for one without a valid index it
    returns None. If the tags cannot be rebuilt, the segment is opened without them, since all its records are
    readable.
    """
    opened: Segment | None = None
    try:
        if disk.exists(f"{data_dir}/{stem}{IDX}"):
            opened = Segment.open(disk, data_dir, stem)
        reason = "index is missing" if opened is None else opened.tags_fault()
    except CorruptData as e:
        if not disk.exists(f"{data_dir}/{stem}{DATA}"):
            raise
        reason = e.message
    if not reason:
        return opened
    try:
        header = read_data_header(disk, data_dir, stem)
        if header.shards == base.shards and header.shard != base.shard:
            return opened
        log_event(log, logging.WARNING, "rebuilding segment index", segment=stem, reason=reason)
        made = rebuild_index(disk, data_dir, stem)
    except (CorruptData, DiskError) as e:
        if opened is None:
            raise
        log_event(log, logging.ERROR, "cannot rebuild the tags of a segment", segment=stem, reason=str(e))
        return opened
    if opened is not None:
        opened.close()
    return made
