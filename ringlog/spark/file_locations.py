"""Files that store topics: segments, and ranges of the log, as the shards report them.

Views and jobs that process files instead of records plan with this module. A file may be merged, moved or
removed between planning and reading. A reader that finds a file missing calls `locate_topic` again, which is
cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pyroaring import BitMap64

from ringlog.client.client import Client
from ringlog.envelope.messages import Extent, Located
from ringlog.errors import NotReady, TopicNotFound
from ringlog.limits import EXTENTS_PER_LOCATE_MAX
from ringlog.link.futures import Steps

PAGES_MAX = 10_000
"""Maximum number of a shard's replies for one topic. Each lists up to EXTENTS_PER_LOCATE_MAX files."""
VOLATILE_PREFIX = "@"
TIER_NAMES = ("hot", "both", "cold")
TIER_COLD = 2


@dataclass(frozen=True, slots=True)
class Roots:
    """Directories that extent paths are relative to, and the address of the engine."""

    data_dir: str
    shm_dir: str
    cold_dir: str
    url: str

    def file(self, path: str, tier: int = 0) -> str:
        """Return the path of a log file, or of the data part of a segment in `tier`."""
        if tier == TIER_COLD:
            return f"{self.cold_dir}/{path}"
        root = self.shm_dir if path.startswith(VOLATILE_PREFIX) else self.data_dir
        return f"{root}/{path.removeprefix(VOLATILE_PREFIX)}"


@dataclass(frozen=True, slots=True)
class TopicLocations:
    """One life of a topic: its bounds, its known losses and deletions, and the files that store the rest."""

    topic: str
    topic_id: int
    epoch: int
    earliest_seq: int
    head_seq: int
    lost: tuple[tuple[int, int], ...]
    """Inclusive seq ranges that were lost in restarts."""
    deleted: bytes
    """Individually deleted seqs: a portable 64-bit roaring bitmap; empty bytes if there are none."""
    extents: tuple[Extent, ...]
    """Segments in ascending order, then log files. An open end is replaced by the published mark."""

    def unaccounted_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the inclusive ranges within first..last that no floor, deletion or loss explains."""
        low = max(first, self.earliest_seq)
        high = min(last, self.head_seq)
        if low > high:
            return []
        missing = BitMap64()
        missing.add_range(low, high + 1)
        if self.deleted:
            missing -= BitMap64.deserialize(self.deleted)
        for lost_first, lost_last in self.lost:
            missing.remove_range(lost_first, lost_last + 1)
        return ranges_of(missing)


@dataclass(slots=True)
class SegmentLocation:
    """One current segment and the subscribed topics in it: topic id -> (name, epoch)."""

    number: int
    stem: str
    salt: int
    tier: int
    topics: dict[int, tuple[str, int]] = field(default_factory=dict)
    bytes: int = 0
    """Size of the frames of these topics."""


@dataclass(slots=True)
class LogFileLocation:
    """A published byte range [start, stop) of one log file, and the subscribed topics that may be in it."""

    path: str
    salt: int
    start: int
    stop: int
    topics: dict[int, tuple[str, int]] = field(default_factory=dict)


def roots_of(client: Client, url: str) -> Roots:
    """Return the directories of the engine that the client is connected to; raise NotConnected."""
    connection = client.connection
    return Roots(connection.data_dir, connection.shm_dir, connection.cold_dir, url)


def locate_topic(client: Client, topic: str, *, after: int = 0) -> TopicLocations:
    """Query the topic's shard for the files that store its records after position `after`.

    Raises TopicNotFound, and errors of the connection.
    """
    return client.run(_locate_all(client, topic, after))


def locate_topics(client: Client, topics: Iterable[str]) -> Iterator[TopicLocations]:
    """Yield the locations of these topics. A topic that is deleted meanwhile is omitted."""
    for topic in topics:
        try:
            yield locate_topic(client, topic)
        except TopicNotFound:
            continue


def _locate_all(client: Client, topic: str, after: int) -> Steps[TopicLocations]:
    connection = client.connection
    located: Located = yield connection.locate(topic, after)
    first, extents, deleted = located, list(located.extents), BitMap64()
    for _ in range(PAGES_MAX):
        if located.deleted:
            deleted |= BitMap64.deserialize(located.deleted)
        behind = located.deleted_to
        if not behind and len(located.extents) >= EXTENTS_PER_LOCATE_MAX:
            behind = max(each.last_seq for each in located.extents)
        if not behind:
            break
        located = yield connection.locate(topic, behind, first.epoch)
        if located.epoch != first.epoch:
            raise TopicNotFound("the topic was recreated during the request; retry", topic=topic)
        known = {(each.path, each.start) for each in extents}
        extents += [each for each in located.extents if (each.path, each.start) not in known]
    else:
        raise NotReady("the topic changed too often during the request; retry", topic=topic)
    marks = connection.marks(located.shard)
    published = [
        shown for each in extents if (shown := _published(each, marks.wal, marks.volatile)) is not None
    ]
    facts = connection.facts(located)
    return TopicLocations(
        topic, located.topic_id, located.epoch, located.earliest_seq,
        located.head_seq if facts is None else min(facts.head_seq, located.head_seq),
        tuple(zip(located.lost[::2], located.lost[1::2], strict=True)),
        deleted.serialize() if deleted else b"", tuple(published),
    )  # fmt: skip


def _published(extent: Extent, wal: tuple[int, int], volatile: tuple[int, int]) -> Extent | None:
    """Return the readable part of an extent: a range of the log ends at the published mark.

    None if it is empty.
    """
    if extent.segment:
        return extent
    file_id, offset = volatile if extent.path.startswith(VOLATILE_PREFIX) else wal
    stop = extent.stop
    if extent.file_id == file_id:
        stop = min(stop, offset) if stop else offset
    elif extent.file_id > file_id:
        return None
    if stop <= extent.start:
        return None
    return Extent(extent.path, extent.file_id, extent.salt, extent.start, stop)


def segments_of(places: Iterable[TopicLocations]) -> list[SegmentLocation]:
    """Return the segments with these topics, sorted by path: segments of one topic stay adjacent."""
    found: dict[int, SegmentLocation] = {}
    for place in places:
        for each in place.extents:
            if each.segment:
                stem = each.path.removesuffix(".data")
                made = SegmentLocation(each.segment, stem, each.salt, each.tier)
                segment = found.setdefault(each.segment, made)
                segment.topics[place.topic_id] = (place.topic, place.epoch)
                segment.bytes += each.stop - each.start
    return sorted(found.values(), key=lambda segment: segment.stem)


def log_of(places: Iterable[TopicLocations]) -> list[LogFileLocation]:
    """Return the log ranges with these topics, one for each file. It covers the ranges of all topics."""
    found: dict[str, LogFileLocation] = {}
    for place in places:
        for each in place.extents:
            if not each.segment:
                made = LogFileLocation(each.path, each.salt, each.start, each.stop)
                file = found.setdefault(each.path, made)
                file.start, file.stop = min(file.start, each.start), max(file.stop, each.stop)
                file.topics[place.topic_id] = (place.topic, place.epoch)
    return sorted(found.values(), key=lambda file: file.path)


def ranges_of(positions: BitMap64) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers as inclusive ranges, ascending."""
    found: list[tuple[int, int]] = []
    last = positions.max() if positions else -1
    at = positions.min() if positions else 0
    while at <= last:
        end = _end_of_run(positions, at)
        found.append((at, end))
        if end >= last:
            break
        at = positions.next_set_bit(end + 1)
    return found


def _end_of_run(positions: BitMap64, first: int) -> int:
    """Return the last number of the run that starts at `first`, by exponential and then binary search."""
    length = 1
    while positions.range_cardinality(first, first + 2 * length) == 2 * length:
        length *= 2
    low, high = length, 2 * length
    while high - low > 1:
        middle = (low + high) // 2
        if positions.range_cardinality(first, first + middle) == middle:
            low = middle
        else:
            high = middle
    return first + low - 1
