"""A topic on real files without an engine: its files, the facts that a shard would publish, and a client.

`LogWorld` is a Connection with the ring transport and can run Steps. So Reader, Tailer and `read` work on it
as on a client. It never waits: `run` fails for Steps that would wait. `begin` returns their Pending, which
`publish` or `time_out` resolves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from pyroaring import BitMap64

from ringlog.board.topics import TOPIC_LIVE, TopicFacts
from ringlog.client.read.pages import Cursor
from ringlog.client.watches.topic_keep_alive import KeepAliveHandle
from ringlog.envelope.messages import (
    ColdRead,
    Extent,
    Located,
    Read,
    ReadReply,
    SeekTime,
    SeekTimeReply,
    TopicInfo,
)
from ringlog.errors import InvariantViolation, NotReady, TopicNotFound, UsageError
from ringlog.frame.layout import Column
from ringlog.link.futures import Pending, Steps, resolved, run_steps
from ringlog.link.protocol import ShardWatermarks
from ringlog.segment.layout import CREATOR_COMPACTOR, DATA
from ringlog.segment.segment import Segment
from ringlog.segment.writer import SegmentWriter
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.log_map import LogMap
from ringlog.storage.reader import TopicReader
from ringlog.storage.real_disk import RealDisk
from ringlog.testing.clock import ManualClock
from tests.support.log_file import TS_US, LogFile


class LogWorld:
    """One topic with id 5 in shard 0. Frames of another topic may lie between its frames."""

    def __init__(self, root: str, topic: str = "t") -> None:
        self.topic = topic
        self.topic_id: int = 5
        self.epoch: int = 1
        self.head_seq: int = 0
        self.earliest_seq: int = 1
        self.cap_floor: int = 1
        self.ttl_floor: int = 1
        self.trim_floor: int = 1
        self.lost: list[int] = []
        self.deleted: BitMap64 = BitMap64()
        self.version: int = 0
        self.due_us = 0
        self.ttl_us = 0
        self.sealed: list[Extent] = []
        """Extents of this topic in segments, in ascending order."""
        self.cold_dir = ""
        self.cold_reads: list[ColdRead] = []
        self.exists: bool = True
        self.config: dict[str, Any] = {}
        self.locates: int = 0
        self.clock: ManualClock = ManualClock()
        self.disk: RealDisk = RealDisk()
        self.log_map: LogMap = LogMap()
        self.transport: Literal["ring", "ipc", "tcp"] = "ring"
        self.is_transport_known = True
        self.data_dir = root
        self.shm_dir: str = root
        self.generation: int = 0
        self._written = self._numbers = self._sealed_to = 0
        self._files: list[LogFile] = []
        self._extents: list[Extent] = []
        self._mark = (0, 0)
        self._waiting: list[Pending[bool]] = []

    # -- the shard ------------------------------------------------------------------------------------

    def roll(self, **facts: Any) -> LogFile:
        """Start a new log file."""
        if self._files:
            self._extents.append(self.file.extent(self.file.stop))
        n = len(self._files)
        self._files.append(LogFile(self.disk, self.data_dir, **({"n": n, "salt": 11 + n} | facts)))
        return self.file

    @property
    def file(self) -> LogFile:
        """The current log file."""
        return self._files[-1]

    def write(
        self, payloads: Sequence[bytes], columns: Mapping[Column, Sequence[Any]] | None = None,
        ts: int = 0,
    ) -> int:  # fmt: skip
        """Write one frame of the topic without publishing it; return its offset."""
        if not self._files:
            self.roll()
        offset = self.file.append(
            self.topic_id, self._written + 1, payloads, epoch=self.epoch, columns=columns,
            commit_ts=ts or TS_US + self._written,
        )  # fmt: skip
        self._written += len(payloads)
        return offset

    def write_other(self, payload: bytes = b"not yours") -> None:
        """Write a frame of another topic."""
        if not self._files:
            self.roll()
        self.file.append(6, 1, [payload])

    def skip_to(self, seq: int) -> None:
        """Set the seq of the next record."""
        self._written = seq - 1

    def publish(self, *, with_head: bool = True) -> None:
        """Publish all written frames; with `with_head`, also the head."""
        if with_head:
            self.head_seq = self._written
        if self._files:
            self._mark = (self.file.file_id, self.file.stop)
        self._wake(is_news=True)

    def append(
        self, payloads: Sequence[bytes], columns: Mapping[Column, Sequence[Any]] | None = None
    ) -> None:
        """Write and publish one frame."""
        self.write(payloads, columns)
        self.publish()

    # -- what happens to records -------------------------------------------------------------------------

    def remove(self, seqs: Iterable[int]) -> None:
        """Delete these records, as a shard does."""
        self.deleted |= BitMap64(seqs)
        while self.earliest_seq <= self.head_seq and self.earliest_seq in self.deleted:
            self.earliest_seq += 1
        self.version += 1

    def seal(self, compression: str = "none", *, trims: bool = True) -> None:
        """Convert the log to a segment; with `trims`, remove the log files from the location of the topic."""
        if not self._files or not self._written:
            return
        self.publish()
        self.roll()
        # The last records of a segment may be deleted ones, which it does not contain.
        after, self._sealed_to = self._sealed_to, self.head_seq
        self._write_segment(self._extents, after, compression)
        if trims:
            self._extents.clear()
        self.publish()

    def rewrite(self, compression: str = "none") -> None:
        """Replace all segments by one; the files of the old segments are deleted."""
        old, self.sealed = self.sealed, []
        if old:
            self._write_segment(old, 0, compression)
            for extent in old:
                self.disk.unlink(f"{self._cold_root if extent.tier == 2 else self.data_dir}/{extent.path}")

    def move_to_cold(self) -> None:
        """Move the data of every segment to the cold tier."""
        cold = self._cold_root
        for extent in self.sealed:
            if extent.tier != 2:
                os.makedirs(os.path.dirname(f"{cold}/{extent.path}"), exist_ok=True)
                os.rename(f"{self.data_dir}/{extent.path}", f"{cold}/{extent.path}")
        self.sealed = [msgspec.structs.replace(extent, tier=2) for extent in self.sealed]
        self.version += 1

    @property
    def _cold_root(self) -> str:
        return self.cold_dir or f"{self.data_dir}/cold"

    def _write_segment(self, extents: Sequence[Extent], after: int, compression: str) -> None:
        self._numbers += 1
        number = CREATOR_COMPACTOR << 48 | self._numbers
        writer = SegmentWriter(
            self.disk, self.data_dir, number=number, salt=1000 + self._numbers, shard=0, shards=1,
            engine_id=b"e" * 16, created_us=TS_US, compression=compression, compression_min_bytes=64,
        )  # fmt: skip
        reader = TopicReader(
            self._located(list(extents)), after, data_dir=self.data_dir, shm_dir=self.shm_dir,
            disk=self.disk, read_watermark=lambda _: LogHighWatermark(*self._mark), cold_dir=self._cold_root,
        )  # fmt: skip
        runs = []
        while isinstance(run := reader.next_run(self.head_seq), FrameRun):
            runs.append((run.buffer, run.batch))
        reader.close()
        if not runs:
            writer.abandon()
            return
        writer.add_topic(
            self.topic_id, self.epoch, runs, earliest_seq=self.earliest_seq, dead=self.deleted or None
        )
        ref = writer.finish()
        if ref is None:
            return
        segment = Segment.open(self.disk, self.data_dir, ref.stem)
        row = segment.topics[0]
        segment.close()
        self.sealed.append(
            Extent(
                ref.stem + DATA, 0, ref.salt, int(row["data_start"]), int(row["data_stop"]), number,
                int(row["first_seq"]), int(row["last_seq"]), int(row["entry_start"]), int(row["entry_stop"]),
            )
        )  # fmt: skip

    def recreate(self) -> None:
        """Delete the topic and create it again."""
        self.topic_id += 10
        self.epoch += 1
        self._written = self.head_seq = 0
        self.earliest_seq = self.cap_floor = self.ttl_floor = self.trim_floor = 1
        self.lost = []
        self._wake(is_news=True)

    def delete(self) -> None:
        """Delete the topic."""
        self.exists = False
        self._wake(is_news=True)

    def restart(self) -> None:
        """Simulate a restart of the engine."""
        self.generation += 1
        self._wake(is_news=True)

    def time_out(self, seconds: float) -> None:
        """Advance the clock; waits for a publication end without one."""
        self.clock.advance(seconds)
        self._wake(is_news=False)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _wake(self, *, is_news: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for pending in waiting:
            pending.resolve(is_news)

    # -- the client -----------------------------------------------------------------------------------

    @property
    def connection(self) -> LogWorld:
        """This object: it has the parts of a client that readers use."""
        return self

    def begin(self, steps: Steps[Any]) -> Pending[Any]:
        """Run steps until they wait; return their Pending."""
        return run_steps(steps)

    def run(self, steps: Steps[Any]) -> Any:
        """Run steps to the end; raise InvariantViolation if they would wait."""
        pending = run_steps(steps)
        if not pending.is_done:
            raise InvariantViolation("this would wait for a publication")
        return pending.result()

    def resolve(self, topic: str) -> Pending[TopicInfo]:
        """Resolve a topic; see Connection."""
        info = TopicInfo(topic, self.topic_id, self.epoch, 0, 0, False, self.config)
        return resolved(info) if self._is_here(topic) else _absent(topic)

    def locate(self, topic: str, after: int, epoch: int = 0) -> Pending[Located]:
        """Locate a topic's records after position `after`; see Connection."""
        self.locates += 1
        if not self._is_here(topic):
            return _absent(topic)
        extents = [extent for extent in self.sealed if extent.last_seq > after]
        extents += [*self._extents, self.file.extent()] if self._files else []
        is_other = epoch not in {0, self.epoch} or after > self.head_seq
        return resolved(self._located(extents, recreated=is_other))

    def _located(self, extents: list[Extent], *, recreated: bool = False) -> Located:
        return Located(
            self.topic, self.topic_id, self.epoch, 0, 0, self.head_seq, self.earliest_seq, self.cap_floor,
            self.ttl_floor, self.trim_floor, recreated, extents, list(self.lost), ttl_us=self.ttl_us,
            deleted=self.deleted.serialize() if self.deleted else b"", version=self.version,
        )  # fmt: skip

    def facts(self, info: TopicInfo | Located) -> TopicFacts | None:
        """Return the current facts of the topic; see Connection."""
        if not self.exists or (info.topic_id, info.epoch) != (self.topic_id, self.epoch):
            return None
        return TopicFacts(
            self.topic_id, self.epoch, TOPIC_LIVE, self.head_seq, self.earliest_seq, self.cap_floor,
            self.ttl_floor, self.trim_floor, self.head_seq + 1 - self.earliest_seq, 0, TS_US, 0,
            self.version, self.due_us, self.ttl_us,
        )  # fmt: skip

    def latest(self, topic: str) -> Pending[Cursor]:
        """Return the cursor of the head; see Connection."""
        return resolved(Cursor(self.epoch, self.head_seq)) if self._is_here(topic) else _absent(topic)

    def keep_topic_alive(self, topic: str, epoch: int = 0) -> KeepAliveHandle:
        """Return a handle; no topic expires here. See Connection."""
        return KeepAliveHandle(epoch)

    def topic_sequence(self, info: TopicInfo | Located) -> int:
        """Return -1: there is no board slot. See Connection."""
        return -1

    def sequence_word(self, info: TopicInfo | Located) -> tuple[memoryview, int] | None:
        """Return None: there is no board slot. See Connection."""
        return None

    def marks(self, shard: int) -> ShardWatermarks:
        """Return the published mark; see Connection."""
        return ShardWatermarks(self._mark, (0, 0))

    def published_since(self, shard: int, seen: ShardWatermarks, timeout_s: float) -> Pending[bool]:
        """Wait for a publication after the mark `seen`; see Connection."""
        if seen != self.marks(shard):
            return resolved(True)
        pending: Pending[bool] = Pending()
        self._waiting.append(pending)
        return pending

    def cold_read(self, request: ColdRead) -> Pending[memoryview]:
        """Read from the directory of cold segments; see Connection."""
        self.cold_reads.append(request)
        try:
            with open(f"{self.data_dir}/cold/{request.path}", "rb") as file:
                file.seek(request.start)
                return resolved(memoryview(file.read(request.stop - request.start)))
        except OSError:
            pending: Pending[memoryview] = Pending()
            pending.fail(NotReady("the cold place is gone", reason="cold_unavailable"))
            return pending

    def seek_remote(self, request: SeekTime) -> Pending[SeekTimeReply]:
        """Raise UsageError; a subclass with a gateway overrides it."""
        raise UsageError("this world has no gateway", topic=request.topic)

    def read_remote(self, request: Read) -> Pending[tuple[ReadReply, memoryview]]:
        """Raise UsageError; a subclass with a gateway overrides it."""
        raise UsageError("this world has no gateway", topic=request.topic)

    def _is_here(self, topic: str) -> bool:
        return self.exists and topic == self.topic


def _absent(topic: str) -> Pending[Any]:
    pending: Pending[Any] = Pending()
    pending.fail(TopicNotFound("no such topic", topic=topic))
    return pending


def log_world_fixture() -> Any:
    """Make a fixture with an empty log."""

    @pytest.fixture
    def world(tmp_path: Path) -> Iterator[LogWorld]:
        made = LogWorld(str(tmp_path))
        yield made
        made.close()

    return world
