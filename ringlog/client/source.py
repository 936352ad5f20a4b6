"""Where pages come from: the engine's files when it runs on this host, else the gateway.

Both answer `fetch` with a Portion: what to announce, frames that hold the records behind it, and how far
that covers the topic. Frames that a page did not use are kept, so that small pages do not read twice.
Every frame was verified by its checksums on this side of the wire, whoever read it (architecture 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ringlog.board.topics import TOPIC_LIVE, TopicFacts
from ringlog.client.connection import Connection
from ringlog.client.pages import Cursor
from ringlog.client.pieces import Piece, pieces_of
from ringlog.clock import Clock, SystemClock
from ringlog.envelope.messages import Located, Read, ReadReply
from ringlog.errors import CorruptData, Internal, NotReady
from ringlog.frame import batch as frames
from ringlog.frame.batch import End
from ringlog.limits import READ_BYTES_MAX, READ_LIMIT_MAX, WAIT_MS_MAX
from ringlog.link.pending import Steps
from ringlog.storage.disk import RealDisk
from ringlog.storage.reader import FIRST_WINDOW_BYTES, FrameRun, Mark, Pause, TopicReader
from ringlog.topic.tombstone import Floors, Gap, ReadPlan, plan_read

_MS = 1_000_000
_TRIES_MAX = 40
"""Looks in a row that find neither records nor the end; then the caller gets what there is."""
_TRIES_PER_LOCATE = 4
_LOOK_AGAIN_S = 0.05
_WAIT_SLICE_S = 5.0
"""Longest single wait for a publication: how soon a restarted engine is noticed without a bell."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Consecutive part of a topic: `gap` first, then the records after `after` that `runs` hold."""

    epoch: int
    head_seq: int
    earliest_seq: int
    gap: Gap | None
    after: int
    runs: Sequence[FrameRun]
    examined: int
    """Position up to which this portion is complete."""

    def pieces(self, topic: str) -> Iterator[Piece]:
        """The records, frame by frame or many frames at once; the first begins right behind `after`."""
        for run in self.runs:
            yield from pieces_of(run, self.after, topic)


class Source(Protocol):
    """Gives the portions of one topic."""

    def fetch(self, cursor: Cursor, *, limit: int, bytes_max: int, wait_s: float) -> Steps[Portion]:
        """Read on from `cursor`: about `limit` records or `bytes_max` bytes, more when frames are large.

        With nothing to tell it waits up to `wait_s`, infinity allowed. Raises TopicNotFound, also when
        the topic is deleted meanwhile, CorruptData for damage, and connection trouble.
        """
        ...

    def close(self) -> None:
        """Let go of files. The source may be used again."""
        ...


def open_source(connection: Connection, topic: str, *, is_mapped: bool = False) -> Source:
    """Choose by transport. `is_mapped`: map files instead of reading them (expendable processes only)."""
    if connection.transport == "ring":
        return LocalSource(connection, topic, is_mapped=is_mapped)
    return RemoteSource(connection, topic)


class _Kept:
    """Runs that cover the positions `start` + 1 .. `stop` of one life of the topic completely."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.runs: list[FrameRun] = []
        self.start = self.stop = -1
        self.epoch = 0

    def hold(self, runs: list[FrameRun], start: int, stop: int, epoch: int) -> None:
        """Keep these instead of what there was."""
        self.runs, self.start, self.stop, self.epoch = runs, start, stop, epoch

    def covers(self, after: int, epoch: int) -> bool:
        """True when the record behind `after` is in here, if there is one."""
        return self.start <= after < self.stop and epoch == self.epoch

    def runs_after(self, after: int) -> list[FrameRun]:
        """Forget runs that lie wholly before and return the rest."""
        self.runs = [run for run in self.runs if run.last_seq > after]
        self.start = max(self.start, after)
        return self.runs


class LocalSource:
    """Reads the WAL files itself: the shard says where to begin, the board how far."""

    def __init__(
        self, connection: Connection, topic: str, *, is_mapped: bool = False, clock: Clock | None = None
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._is_mapped = is_mapped
        self._clock = clock or SystemClock()
        self._disk = RealDisk()
        self._located: Located | None = None
        self._located_for: Cursor | None = None
        self._generation = -1
        self._reader: TopicReader | None = None
        self._kept = _Kept()

    def close(self) -> None:
        """Let go of files; what comes next is located anew."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._located = self._located_for = None
        self._kept.clear()

    def fetch(self, cursor: Cursor, *, limit: int, bytes_max: int, wait_s: float) -> Steps[Portion]:
        """See Source.fetch."""
        started_ns = self._clock.monotonic_ns()
        tries = 0
        while True:
            if self._generation != self._connection.generation:
                self.close()
            located = yield from self._locate(cursor)
            seen = self._connection.marks(located.shard)
            facts = self._connection.facts(located)
            if facts is None or facts.state != TOPIC_LIVE:
                # Another life, or none: only the shard knows.
                tries = self._count_try(tries)
                self._locate_anew()
                continue
            plan = self._plan(cursor, located, facts)
            pause = self._read(plan, located, limit, bytes_max)
            portion = self._portion(plan, located, facts, pause)
            if portion.runs or plan.gap is not None:
                return portion
            if pause is Pause.MOVED:
                tries = self._count_try(tries)
                self._locate_anew()
                continue
            if pause is Pause.UNFINISHED:
                continue
            left_s = wait_s - (self._clock.monotonic_ns() - started_ns) / 1e9
            if portion.examined < plan.stop:
                # Published a moment ago, or its shard is restarting: the mark is about to move.
                tries += 1
                if tries >= _TRIES_MAX:
                    return portion
                if tries % _TRIES_PER_LOCATE == 0:
                    self._locate_anew()
                left_s = max(left_s, _LOOK_AGAIN_S)
                yield self._connection.published_since(located.shard, seen, min(left_s, _LOOK_AGAIN_S))
                continue
            if left_s <= 0 or plan.stop < facts.head_seq:
                return portion
            tries = 0
            yield self._connection.published_since(located.shard, seen, min(left_s, _WAIT_SLICE_S))

    def _locate_anew(self) -> None:
        # The reader stays: it remembers that it saw a hole, which only a second sight makes damage.
        self._located = self._located_for = None
        self._kept.clear()

    def _count_try(self, tries: int) -> int:
        if tries >= _TRIES_MAX:
            raise NotReady("the topic keeps changing while it is read", topic=self._topic)
        return tries + 1

    def _locate(self, cursor: Cursor) -> Steps[Located]:
        if self._located is None:
            self._generation = self._connection.generation
            self._located = yield self._connection.locate(self._topic, cursor.seq, cursor.epoch)
            self._located_for = cursor
        return self._located

    def _plan(self, cursor: Cursor, located: Located, facts: TopicFacts) -> ReadPlan:
        floors = Floors(
            facts.head_seq, facts.earliest_seq, facts.cap_floor, facts.ttl_floor, facts.trim_floor
        )
        is_recreated = cursor.epoch not in {0, located.epoch} or (
            located.recreated and self._located_for == cursor
        )
        return plan_read(cursor.seq, floors, located.lost, recreated=is_recreated)

    def _read(self, plan: ReadPlan, located: Located, limit: int, bytes_max: int) -> Pause | None:
        """Make `kept` cover what follows `plan.after`; return why it stopped, None for enough."""
        kept = self._kept
        if kept.covers(plan.after, located.epoch):
            kept.runs_after(plan.after)
            return None
        reader = self._reader
        if reader is None:
            reader = self._reader = self._open_reader(located, plan.after)
        elif reader.located is not located:
            reader.relocate(located, plan.after)
        elif plan.after < reader.cursor:
            kept.clear()
            return Pause.MOVED
        reader.cursor = plan.after
        runs, pause = self._collect(reader, plan.stop, limit, bytes_max)
        stop = plan.stop if pause is Pause.BEYOND_HEAD else min(max(plan.after, reader.cursor), plan.stop)
        kept.hold(runs, plan.after, stop, located.epoch)
        return pause

    def _collect(
        self, reader: TopicReader, stop: int, limit: int, bytes_max: int
    ) -> tuple[list[FrameRun], Pause | None]:
        runs: list[FrameRun] = []
        records = size = 0
        window = bytes_max if self._is_mapped else min(bytes_max, FIRST_WINDOW_BYTES)
        while records < limit and size < bytes_max:
            before = reader.cursor
            try:
                run = reader.next_run(stop, window)
            except CorruptData:
                if runs:
                    return runs, None  # What lies before the damage comes first (DR-16).
                raise
            if isinstance(run, Pause):
                return runs, run
            runs.append(run)
            records += reader.cursor - before
            size += int(run.batch.total_bytes.sum())
            window = min(2 * window, max(bytes_max, FIRST_WINDOW_BYTES))
        return runs, None

    def _open_reader(self, located: Located, after: int) -> TopicReader:
        connection = self._connection

        def marks(is_volatile: bool) -> Mark:
            found = connection.marks(located.shard)
            return Mark(*(found.volatile if is_volatile else found.wal))

        return TopicReader(
            located, after, data_dir=connection.data_dir, shm_dir=connection.shm_dir, marks=marks,
            disk=self._disk, is_mapped=self._is_mapped,
        )  # fmt: skip

    def _portion(self, plan: ReadPlan, located: Located, facts: TopicFacts, pause: Pause | None) -> Portion:
        kept = self._kept
        examined = max(plan.after, kept.stop) if pause is not Pause.MOVED else plan.after
        return Portion(
            located.epoch,
            facts.head_seq,
            facts.earliest_seq,
            plan.gap,
            plan.after,
            tuple(kept.runs),
            examined,
        )


class RemoteSource:
    """Asks the gateway. Frames come whole, sealed under seed 0, and are verified here once more."""

    def __init__(self, connection: Connection, topic: str) -> None:
        self._connection = connection
        self._topic = topic
        self._kept = _Kept()
        self._reply: ReadReply | None = None

    def close(self) -> None:
        """Forget what was read ahead."""
        self._kept.clear()

    def fetch(self, cursor: Cursor, *, limit: int, bytes_max: int, wait_s: float) -> Steps[Portion]:
        """See Source.fetch."""
        kept = self._kept
        if self._reply is not None and kept.covers(cursor.seq, cursor.epoch):
            runs = kept.runs_after(cursor.seq)
            return _remote_portion(self._reply, None, cursor.seq, runs, kept.stop)
        request = Read(
            self._topic, cursor.seq, cursor.epoch, min(limit, READ_LIMIT_MAX), min(bytes_max, READ_BYTES_MAX),
            int(min(wait_s * 1000, WAIT_MS_MAX)),
        )  # fmt: skip
        try:
            reply, buffer = yield self._connection.read_remote(request)
        except Internal as e:
            if e.detail.get("reason") == "corrupt_segment":
                raise CorruptData(e.message, **e.detail) from None
            raise
        runs = [_received(reply, buffer)] if reply.frames else []
        kept.hold(runs, reply.after, reply.next_after, reply.epoch)
        self._reply = reply
        gap = Gap(reply.gap_from, reply.gap_to, reply.reason) if reply.reason else None
        return _remote_portion(reply, gap, reply.after, runs, reply.next_after)


def _remote_portion(
    reply: ReadReply, gap: Gap | None, after: int, runs: Sequence[FrameRun], examined: int
) -> Portion:
    return Portion(reply.epoch, reply.head_seq, reply.earliest_seq, gap, after, tuple(runs), examined)


def _received(reply: ReadReply, buffer: memoryview) -> FrameRun:
    """Verify what the gateway sent; raises CorruptData."""
    damage = ""
    found = frames.scan(buffer) if len(buffer) % 8 == 0 else None
    if found is None or found.end is not End.CLEAN or len(found) != reply.frames:
        damage = "not the frames announced"
    elif (
        frames.first_bad_seal(found, 0) is not None
        or frames.first_true(frames.malformed(found.words)) is not None
    ):
        damage = "header does not verify"
    elif frames.first_bad_body(buffer, found) is not None:
        damage = "body does not verify"
    if found is None or damage:
        raise CorruptData(f"frames arrived damaged: {damage}", topic=reply.topic, seq=reply.after + 1)
    return FrameRun(buffer, found, 0, "", 0)
