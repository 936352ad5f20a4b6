"""Source of a topic through the gateway. The client verifies every frame again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import numpy as np
from pyroaring import BitMap64

from ringlog.client.connection.read_connection import Connection
from ringlog.client.read.fetch_result import CachedFrames, FetchResult, RecordCheck
from ringlog.client.read.pages import Cursor
from ringlog.client.read.read_ahead import RemoteRecordCheck
from ringlog.client.watches.topic_keep_alive import KeepAliveHandle
from ringlog.clock import Clock, SystemClock
from ringlog.envelope.messages import Read, ReadReply, SeekTime
from ringlog.errors import CorruptData, Internal
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import ScanEnd
from ringlog.limits import READ_BYTES_MAX, READ_LIMIT_MAX, READ_SLICE_MS_MAX, WAIT_MS_MAX
from ringlog.link.futures import Steps
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.visibility import I64, NO_SEQS
from ringlog.topic.tombstone import Gap


class RemoteSource:
    """Reads through the gateway. Frames arrive whole, sealed under seed 0, and the client verifies them
    again."""

    def __init__(
        self, connection: Connection, topic: str, *, is_settling: bool = False, is_following: bool = False,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """Create a source. `is_settling`, `is_following`: see open_source."""
        self._clock = clock or SystemClock()
        self._is_following = is_following
        self._keep_alive: KeepAliveHandle | None = None
        self._connection = connection
        self._topic = topic
        self._is_settling = is_settling
        self._cached_frames = CachedFrames()
        self._hidden = NO_SEQS
        self._reply: ReadReply | None = None

    def close(self) -> None:
        """Drop the frames that were read ahead."""
        self._cached_frames.clear()
        if self._keep_alive is not None:
            self._keep_alive.end()
        self._keep_alive = None

    def keep_topic_alive(self, epoch: int = 0) -> None:
        """See Source.keep_topic_alive."""
        handle = self._keep_alive
        if self._is_following and (handle is None or epoch not in {0, handle.epoch}):
            self._keep_alive = self._connection.keep_topic_alive(self._topic, epoch)
            if handle is not None:
                handle.end()

    def fetch(self, cursor: Cursor, *, limit: int, bytes_max: int, wait_s: float) -> Steps[FetchResult]:
        """See Source.fetch."""
        may_settle = self._is_settling and wait_s <= 0
        # A reader that reached the head is most likely still there.
        if may_settle and (ended := _at_fed_head(self._reply)) is not None:
            may_settle = False
            yield self._connection.catch_up(self._topic, ended.topic_id)
        result = yield from self._fetch(cursor, limit, bytes_max, wait_s)
        if may_settle and (ended := _at_fed_head(self._reply)) is not None:
            yield self._connection.catch_up(self._topic, ended.topic_id)
            result = yield from self._fetch(cursor, limit, bytes_max, wait_s)
        return result

    def _fetch(self, cursor: Cursor, limit: int, bytes_max: int, wait_s: float) -> Steps[FetchResult]:
        """Read. While there is nothing to read, wait in slices of READ_SLICE_MS_MAX, WAIT_MS_MAX in total."""
        left_ms = min(wait_s * 1_000, WAIT_MS_MAX)
        end_ms = self._clock.monotonic_ns() / 1e6 + left_ms
        while True:
            wait_ms = min(ceil(left_ms), READ_SLICE_MS_MAX)
            result = yield from self._read(cursor, limit, bytes_max, wait_ms)
            left_ms = end_ms - self._clock.monotonic_ns() / 1e6
            is_news = result.runs or result.gap is not None or result.examined > cursor.seq
            if is_news or left_ms <= 0:
                return result
            cursor = Cursor(result.epoch, cursor.seq)

    def _read(self, cursor: Cursor, limit: int, bytes_max: int, wait_ms: int) -> Steps[FetchResult]:
        self.keep_topic_alive()
        cached, last_reply = self._cached_frames, self._reply
        held = last_reply is not None and cached.covers(cursor.seq, cursor.epoch)
        request = Read(
            self._topic, cursor.seq, cursor.epoch, min(limit, READ_LIMIT_MAX), min(bytes_max, READ_BYTES_MAX),
            wait_ms,
            *((cached.stop, last_reply.version) if held and last_reply else ()),
        )  # fmt: skip
        try:
            reply, buffer = yield self._connection.read_remote(request)
        except Internal as e:
            if e.detail.get("reason") == "corrupt_segment":
                raise CorruptData(e.message, **e.detail) from None
            raise
        self.keep_topic_alive(reply.epoch)
        if last_reply and request.held and _still_holds(request, last_reply, reply):
            # The gateway is queried in any case, since records that were read ahead may have been deleted.
            return self._result(reply, None, cursor.seq, cached.runs_after(cursor.seq))
        runs = decode_received_frames(reply.topic, reply.frames, reply.after, buffer) if reply.frames else []
        cached.store(runs, reply.after, reply.next_after, reply.epoch)
        self._reply = reply
        self._hidden = hidden_numbers(reply)
        gap = Gap(reply.gap_from, reply.gap_to, reply.reason) if reply.reason else None
        return self._result(reply, gap, reply.after, runs)

    def seek_time(self, ts_us: int) -> Steps[Cursor]:
        """See Source.seek_time."""
        reply = yield self._connection.seek_remote(SeekTime(self._topic, ts_us))
        return Cursor(reply.epoch, reply.after)

    def _result(self, reply: ReadReply, gap: Gap | None, after: int, runs: Sequence[FrameRun]) -> FetchResult:
        return FetchResult(
            reply.epoch, reply.head_seq, reply.earliest_seq, gap, after, tuple(runs), reply.next_after,
            self._hidden, reply.version,
        )  # fmt: skip

    def record_check(self, version: int) -> RecordCheck:
        """See Source.record_check."""
        return RemoteRecordCheck(self._clock)


def _at_fed_head(reply: ReadReply | None) -> ReadReply | None:
    """Return the reply if it reached the head of a topic with incoming routers; else None."""
    return reply if reply is not None and reply.is_fed and reply.caught_up else None


def _still_holds(request: Read, known: ReadReply, reply: ReadReply) -> bool:
    """Return True if the gateway confirms that the cached frames are current."""
    is_same = (reply.epoch, reply.version, reply.reason) == (known.epoch, known.version, "")
    return is_same and not reply.frames and reply.next_after == request.held


def hidden_numbers(reply: ReadReply) -> I64:
    """Decode the seqs to omit. Raises CorruptData."""
    if not reply.hidden:
        return NO_SEQS
    try:
        return np.frombuffer(BitMap64.deserialize(reply.hidden).to_array(), dtype=np.int64)
    except ValueError as e:
        raise CorruptData(
            "the set of hidden seqs in a reply is damaged", topic=reply.topic, reason=str(e)
        ) from None


def decode_received_frames(topic: str, count: int, after: int, buffer: memoryview) -> list[FrameRun]:
    """Verify the `count` frames of a gateway's reply, which contain the records after `after`. Raises
    CorruptData.

    Overlapping frames are returned in separate runs.
    """
    if not count and not len(buffer):
        return []
    damage = ""
    found = frames.scan(buffer) if len(buffer) % 8 == 0 else None
    if found is None or found.end is not ScanEnd.CLEAN or len(found) != count:
        damage = "not the frames announced"
    elif (
        frames.first_bad_seal(found, layout.WIRE_SEED) is not None
        or frames.first_true(frames.malformed(found.words)) is not None
    ):
        damage = "header does not match its seal or is malformed"
    elif frames.first_bad_body(buffer, found) is not None:
        damage = "body does not match its checksum"
    if found is None or damage:
        raise CorruptData(f"frames arrived damaged: {damage}", topic=topic, seq=after + 1)
    first = found.words[:, layout.W_BASE_SEQ].astype(np.int64)
    last = first + frames.counts_of(found.words).astype(np.int64) - 1
    cuts = np.flatnonzero(first[1:] <= np.maximum.accumulate(last)[:-1]) + 1
    bounds = [0, *cuts.tolist(), len(found)]
    return [FrameRun(buffer, found.take(slice(a, b)), 0, "", 0) for a, b in pairwise(bounds)]
