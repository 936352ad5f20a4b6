"""Where topics lie on disk: segments, and stretches of the log, as the shards name them.

The views and the jobs that look at files, not at records, plan with this. A file may be merged, moved or
dropped between planning and reading; whoever finds it gone asks again (`TopicLocations` are cheap to get
anew).
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
"""Answers of a shard about one topic, at most: each names up to EXTENTS_PER_LOCATE_MAX files."""
VOLATILE_PREFIX = "@"
TIER_NAMES = ("hot", "both", "cold")
TIER_COLD = 2


@dataclass(frozen=True, slots=True)
class Roots:
    """Directories that paths of extents are relative to, and where the engine is asked."""

    data_dir: str
    shm_dir: str
    cold_dir: str
    url: str

    def file(self, path: str, tier: int = 0) -> str:
        """Path of a file of the log, or of a segment's data part in `tier`."""
        if tier == TIER_COLD:
            return f"{self.cold_dir}/{path}"
        root = self.shm_dir if path.startswith(VOLATILE_PREFIX) else self.data_dir
        return f"{root}/{path.removeprefix(VOLATILE_PREFIX)}"


@dataclass(frozen=True, slots=True)
class TopicLocations:
    """One life of a topic: its bounds, what is accounted for as gone, and the files that hold the rest."""

    topic: str
    topic_id: int
    epoch: int
    earliest_seq: int
    head_seq: int
    lost: tuple[tuple[int, int], ...]
    """Ranges lost in restarts, both ends included."""
    deleted: bytes
    """Numbers deleted one by one: a portable 64-bit roaring bitmap; empty = none."""
    extents: tuple[Extent, ...]
    """Segments first, ascending, then the log; `stop` 0 was replaced by the published mark."""

    def unaccounted_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Positions first..last that nothing accounts for, as ranges: neither floors, deletes nor losses."""
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
    """One segment in force and the subscribed topics in it: id -> (name, epoch)."""

    number: int
    stem: str
    salt: int
    tier: int
    topics: dict[int, tuple[str, int]] = field(default_factory=dict)
    bytes: int = 0
    """Of frames of these topics."""


@dataclass(slots=True)
class LogFileLocation:
    """A published stretch [start, stop) of one file of the log, and the subscribed topics that may lie in
    it.
    """

    path: str
    salt: int
    start: int
    stop: int
    topics: dict[int, tuple[str, int]] = field(default_factory=dict)


def roots_of(client: Client, url: str) -> Roots:
    """Directories of the engine a client has met; raises NotConnected."""
    connection = client.connection
    return Roots(connection.data_dir, connection.shm_dir, connection.cold_dir, url)


def locate_topic(client: Client, topic: str, *, after: int = 0) -> TopicLocations:
    """Ask the topic's shard where everything behind `after` lies; raises TopicNotFound, connection
    trouble.
    """
    return client.run(_locate_all(client, topic, after))


def locate_topics(client: Client, topics: Iterable[str]) -> Iterator[TopicLocations]:
    """Places of these topics; one that was deleted meanwhile is left out."""
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
            raise TopicNotFound("the topic was made anew while it was looked at", topic=topic)
        known = {(each.path, each.start) for each in extents}
        extents += [each for each in located.extents if (each.path, each.start) not in known]
    else:
        raise NotReady("the topic keeps changing while it is looked at", topic=topic)
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
    """The extent as far as it may be read: an open end is cut at the shard's mark; None when nothing is."""
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
    """The segments that hold these topics, ascending by path, so that neighbours of a topic stay together."""
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
    """The stretches of the log that hold these topics, a file once; of ends that differ the farthest."""
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
    """The runs of consecutive numbers, both ends included, ascending."""
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
    """Last number of the run that begins at `first`: by doubling, then by halving, not number by number."""
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
