"""Reads a cold tier without an engine (option `cold`).

The segments, with all their parts, are in a directory or a bucket. Their topics (names, floors, deletions,
losses) are described by the shards' snapshots: files `meta/snapshot-…` next to the segments or in another
directory. Both are read as of the snapshot. A topic ends before its first position that was not relocated to
the cold tier. Records that were deleted after the snapshot are still returned; a newer snapshot hides them.

`ColdClient` implements the part of the client interface that reading uses, so the code above it does not
change.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, cast

import msgspec
from pyroaring import BitMap64

from ringlog.board.topics import TOPIC_LIVE, TopicFacts
from ringlog.config import ColdConfig
from ringlog.envelope.engine_file import log_id_of_engine
from ringlog.envelope.messages import ColdRead, Extent, Located, SegmentRef
from ringlog.errors import ColdUnavailable, CorruptData, DiskError, NotReady, TopicNotFound, UsageError
from ringlog.link.futures import Pending, Steps, resolved
from ringlog.placement import shard_of
from ringlog.segment.layout import DATA
from ringlog.segment.segment import Segment
from ringlog.spark.cold_address import parse_address
from ringlog.spark.errors import OptionError
from ringlog.storage.disk import Disk, disk_error
from ringlog.storage.identity_file import read_restore_id
from ringlog.storage.log_map import LogMap
from ringlog.storage.real_disk import RealDisk
from ringlog.storage.snapshot import Snapshot, load_snapshots, snapshot_numbers
from ringlog.tier.open_store import open_store
from ringlog.tier.ownership import OWNER_OBJECT as OWNER
from ringlog.tier.store import ColdMissing, SegmentStore
from ringlog.topic.row import decode_row
from ringlog.topic.state import ShardTopic

_COLD = 2
_OWNER_BYTES_MAX = 64
_FACTS_LAST_ID, _FACTS_SEGMENTS = 1, 6
"""Indexes of fields in a snapshot's facts; see docs/reference/format.md."""


_clients: dict[str, ColdClient] = {}
_lock = threading.Lock()


def cold_client(path: str) -> ColdClient:
    """Return the client of an address. It is created again when the set of snapshots changes.

    Raises OptionError if there is no cold tier, NotReady if the store does not respond, and CorruptData.
    """
    with _lock:
        held = _clients.get(path)
        try:
            if held is None or not held.is_current():
                held = _clients[path] = ColdClient(*parse_address(path))
        except (ColdUnavailable, DiskError) as e:
            _unavailable(e)
        return held


def _unavailable(error: Exception) -> NoReturn:
    raise NotReady(
        "the cold tier is not available; retry", reason="cold_unavailable", error=str(error)
    ) from None


class StoreDisk:
    """Read-only Disk over a bucket: files are objects, and paths are object names."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._open: dict[int, tuple[str, int]] = {}
        self._next = 0

    def open_read(self, path: str) -> int:
        """Open an object for reading; see Disk."""
        name = path.lstrip("/")
        try:
            size = self._store.size(name)
        except ColdMissing:
            raise disk_error("open", path, errno.ENOENT) from None
        self._next += 1
        self._open[self._next] = name, size
        return self._next

    def close(self, fd: int) -> None:
        """Close a handle; see Disk."""
        del self._open[fd]

    def size(self, fd: int) -> int:
        """Return the size of an open object in bytes; see Disk."""
        return self._open[fd][1]

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        """Read up to `length` bytes at `offset`; see Disk."""
        name, size = self._open[fd]
        stop = min(offset + length, size)
        return self._store.get_range(name, offset, stop) if offset < stop else b""

    def exists(self, path: str) -> bool:
        """Return whether an object has this name, or whether it is a folder that contains one."""
        name = path.lstrip("/")
        return self._store.exists(name) or next(self._store.list(name), None) is not None

    def list_dir(self, path: str) -> list[str]:
        """Return the names of the objects below a folder. Folders are not listed."""
        folder = path.lstrip("/") + "/"
        return [name.removeprefix(folder) for name in self._store.list(folder.rstrip("/"))]


class _EmptyMarks(NamedTuple):
    """Log marks of a cold tier: it has no log."""

    wal: tuple[int, int] = (0, 0)
    volatile: tuple[int, int] = (0, 0)


class _TopicName(NamedTuple):
    topic: str


class _Topics(NamedTuple):
    """Names of all topics, with the interface of `Client.topics`."""

    named: list[_TopicName]

    def list(self) -> Iterator[_TopicName]:
        """Iterate over the topics; see `Client.topics`."""
        return iter(self.named)


@dataclass(frozen=True, slots=True)
class _ColdTopic:
    """One topic as of its snapshot, and its extents in ascending order."""

    state: ShardTopic
    shard: int
    extents: tuple[Extent, ...]

    @property
    def head(self) -> int:
        """Last position that can be read."""
        return self.extents[-1].last_seq if self.extents else self.state.earliest_seq - 1

    @property
    def earliest(self) -> int:
        return min(self.state.earliest_seq, self.head + 1)


class ColdConnection:
    """The part of `client.connection.Connection` that reading uses.

    A cold tier never changes, so no call waits.
    """

    transport = "ring"
    is_transport_known = True
    generation = 1
    shm_dir = ""

    def __init__(self, topics: dict[str, _ColdTopic], store: SegmentStore, directory: str) -> None:
        self._topics = topics
        self._store = store
        self.data_dir = directory
        """Root of the segment indexes; empty for a bucket."""
        self.cold_dir = directory
        """Empty for a bucket: its bytes are read with `cold_read`."""
        self.log_map: LogMap = LogMap()
        """Always empty: there is no log."""

    def resolve(self, topic: str) -> Pending[Located]:
        """Resolve a topic; see Connection."""
        return self.locate(topic, 0)

    def locate(self, topic: str, after: int, epoch: int = 0) -> Pending[Located]:
        """Return the location of a topic's records after position `after`; see Connection.

        Fails with TopicNotFound.
        """
        found = self._topics.get(topic)
        if found is None:
            failure: Pending[Located] = Pending()
            failure.fail(TopicNotFound("no such topic in the snapshots of the cold tier", topic=topic))
            return failure
        state, config = found.state, found.state.config
        extents = [each for each in found.extents if each.last_seq > after]
        return resolved(
            Located(
                topic, state.topic_id, state.epoch, found.shard, 0, found.head, found.earliest,
                state.cap_floor, state.ttl_floor, state.trim_floor,
                epoch not in {0, state.epoch} or after > found.head, extents,
                [number for pair in state.lost for number in pair], state.delete_floor,
                config.hidden_after_us, state.dead.serialize() if state.dead else b"", 0, state.version,
            )
        )  # fmt: skip

    def facts(self, info: Located) -> TopicFacts:
        """Return the current facts of a topic; see Connection."""
        found = self._topics[info.topic]
        state = found.state
        return TopicFacts(
            state.topic_id, state.epoch, TOPIC_LIVE, found.head, found.earliest, state.cap_floor,
            state.ttl_floor, state.trim_floor, state.count, state.bytes, state.last_ts, 0, state.version,
        )  # fmt: skip

    def catch_up(self, topic: str, topic_id: int) -> Pending[None]:
        """Do nothing: a cold tier has no routers that forward records."""
        return resolved(None)

    def latest(self, topic: str) -> Any:
        """Raise UsageError: a cold tier cannot be followed."""
        raise UsageError("a cold tier without an engine cannot be followed from its end", topic=topic)

    def keep_topic_alive(self, topic: str, epoch: int = 0) -> Any:
        """Return None: no process deletes topics here."""
        return None

    def topic_sequence(self, info: Any) -> int:
        """Return -1: a cold tier has no board with topic slots."""
        return -1

    def sequence_word(self, info: Any) -> None:
        """Return None: a cold tier has no board with topic slots."""

    def marks(self, shard: int) -> _EmptyMarks:
        """Return empty log marks."""
        return _EmptyMarks()

    def published_since(self, shard: int, seen: Any, timeout_s: float) -> Pending[bool]:
        """Return a resolved False: nothing is published here."""
        return resolved(False)

    def cold_read(self, request: ColdRead) -> Pending[memoryview]:
        """Read bytes of an object; see Connection. Raises NotReady if the store does not respond."""
        try:
            return resolved(memoryview(self._store.get_range(request.path, request.start, request.stop)))
        except ColdUnavailable as e:
            _unavailable(e)


class ColdClient:
    """The part of the Client interface that reading uses."""

    def __init__(self, cold: str, snapshots: str) -> None:
        """Open a cold tier.

        `cold` is a directory or a bucket URL. `snapshots` is the directory whose `meta` contains the
        snapshots; if it is empty, `cold` contains them.
        """
        is_bucket = "://" in cold
        disk = RealDisk()
        store = open_store(ColdConfig(url=cold) if is_bucket else ColdConfig(dir=cold), disk)
        assert store is not None, "one of both was given"
        self.disk: Disk | RealDisk = cast("Disk", StoreDisk(store)) if is_bucket else disk
        root = "" if is_bucket else cold
        self._meta: tuple[Disk, str] = (disk, snapshots) if snapshots else (self.disk, root)
        self._seen = self._names()
        self.log_id: str = log_id_of_engine(_owner(store, cold), _restore_id(*self._meta))
        self._topics = _topics_of(_layers(*self._meta, cold), store, self.disk, root)
        self.connection: ColdConnection = ColdConnection(self._topics, store, root)
        self.topics: _Topics = _Topics([_TopicName(name) for name in self._topics])

    def is_current(self) -> bool:
        """Return whether the snapshots on the store are still the ones that were read."""
        return self._names() == self._seen

    def run(self, steps: Steps[Any]) -> Any:
        """Run steps to their end; see Client. Every pending result is available at once."""
        try:
            pending = next(steps)
            while True:
                pending = steps.throw(pending.error) if pending.error else steps.send(pending.result())
        except StopIteration as e:
            return e.value

    def _names(self) -> list[tuple[int, int]]:
        return snapshot_numbers(*self._meta)


def _owner(store: SegmentStore, cold: str) -> str:
    """Return the id of the engine (that is, of its data directory) that owns this cold tier."""
    try:
        return store.get_range(OWNER, 0, _OWNER_BYTES_MAX).decode("ascii", "replace")
    except ColdMissing:
        raise OptionError("cold: this location is not the cold tier of an engine", cold=cold) from None


def _restore_id(disk: Disk, directory: str) -> str:
    try:
        return read_restore_id(disk, directory)
    except ValueError as e:
        raise CorruptData(
            "meta/restored is damaged", file=f"{directory}/meta/restored", reason=str(e)
        ) from None


class _Layer(NamedTuple):
    snapshot: Snapshot
    last_id: int
    refs: list[SegmentRef]


def _layers(disk: Disk, directory: str, cold: str) -> list[_Layer]:
    """Return the newest snapshot of each (shard count, shard), in descending order of snapshot numbers."""
    found: dict[tuple[int, int], _Layer] = {}
    for each in load_snapshots(disk, directory)[0]:
        if (each.shards, each.shard) not in found:
            try:
                facts = msgspec.msgpack.decode(each.facts)
            except msgspec.MsgspecError as e:
                raise CorruptData("cannot decode the shard state of a snapshot", reason=str(e)) from None
            refs = [SegmentRef(*fields) for fields in facts[_FACTS_SEGMENTS]]
            found[each.shards, each.shard] = _Layer(each, int(facts[_FACTS_LAST_ID]), refs)
    if not found:
        raise OptionError(
            "cold: no snapshot found. Copy the data directory's `meta` into the cold "
            "location, or set path to a directory that contains it",
            cold=cold, looked_in=os.path.join(directory, "meta"),
        )  # fmt: skip
    return sorted(found.values(), key=lambda layer: -layer.snapshot.number)


def _topics_of(layers: list[_Layer], store: SegmentStore, disk: Disk, root: str) -> dict[str, _ColdTopic]:
    """Return all topics by name. Each topic comes from the newest snapshot that is authoritative for it."""
    places = _extents_of(layers, store, disk, root)
    found: dict[str, _ColdTopic] = {}
    for at, layer in enumerate(layers):
        snapshot = layer.snapshot
        for row, topic_id in enumerate(snapshot.ids.tolist()):
            if any(_governs(newer, topic_id) for newer in layers[:at]):
                continue
            state = decode_row(topic_id, snapshot.row(row))
            extents = [each for epoch, each in places.get(topic_id, ()) if epoch == state.epoch]
            found[state.name] = _ColdTopic(state, snapshot.shard, tuple(_readable(state, extents)))
    return found


def _governs(layer: _Layer, topic_id: int) -> bool:
    shards, shard = layer.snapshot.shards, layer.snapshot.shard
    return shard_of(topic_id, shards) == shard and topic_id <= layer.last_id


def _extents_of(
    layers: list[_Layer], store: SegmentStore, disk: Disk, root: str
) -> dict[int, list[tuple[int, Extent]]]:
    """Return topic_id -> (epoch, extent) of each current segment on this store, in ascending order."""
    refs = {ref.number: ref for layer in layers for ref in layer.refs}
    found: dict[int, list[tuple[int, Extent]]] = {}
    for ref in refs.values():
        if not store.exists(ref.stem + DATA):
            if ref.tier == _COLD:
                raise OptionError(
                    "cold: a segment of the snapshot is missing; use a newer snapshot",
                    file=ref.stem + DATA,
                )
            continue
        segment = Segment.open(disk, root, ref.stem)
        try:
            for row in segment.topics:
                extent = Extent(
                    ref.stem + DATA, 0, ref.salt, int(row["data_start"]), int(row["data_stop"]), ref.number,
                    int(row["first_seq"]), int(row["last_seq"]), int(row["entry_start"]),
                    int(row["entry_stop"]), _COLD,
                )  # fmt: skip
                found.setdefault(int(row["topic_id"]), []).append((int(row["epoch"]), extent))
        finally:
            segment.close()
    for extents in found.values():
        extents.sort(key=lambda each: (each[1].first_seq, each[1].segment))
    return found


def _readable(state: ShardTopic, extents: list[Extent]) -> Iterator[Extent]:
    """Yield the extents up to the first position that is not on this store.

    The end is not reported as a gap.
    """
    reached = state.earliest_seq - 1
    for each in extents:
        if each.last_seq <= reached:
            continue
        if not _is_gone(state, reached + 1, each.first_seq):
            return
        yield each
        reached = each.last_seq


def _is_gone(state: ShardTopic, first: int, stop: int) -> bool:
    """Return whether all positions in [first, stop) are deleted or lost."""
    if first >= stop:
        return True
    missing = BitMap64()
    missing.add_range(first, stop)
    if state.dead is not None:
        missing -= state.dead
    for low, high in state.lost:
        missing.remove_range(low, high + 1)
    return not missing
