"""TopicTail: seqs, sizes, stamps and tags of one topic's records in WAL files.

Every frame is read once. The tail remembers its position in each file, and continues from there only as far
as a query needs. The caller can add records that it already has in memory; the tail then does not read them.
Tags are indexed only after the first query for tags, because most topics never receive one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import CorruptData, FrameInvalid
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import I64, U64, FrameBatch
from ringlog.frame.facts import RecordFacts, record_facts
from ringlog.frame.routed_frame import resolve_copies
from ringlog.limits import FRAME_BYTES_MAX, MIB
from ringlog.storage.disk import Disk
from ringlog.storage.extents import ExtentFacts
from ringlog.tags import TagMatch
from ringlog.types import Durability

WINDOW_BYTES = 1 * MIB
_ROOM_MIN = 1_024
_SPARSE = 4
"""Arrays and tag tables are rebuilt if their size exceeds that of their contents by this factor."""
_TAG_RECORDS = 8
"""A tag takes about 200 bytes in the tables, as much memory as this number of records."""

Scalar = TypeVar("Scalar", bound=np.generic)


class GrowableArray(Generic[Scalar]):
    """An array that grows at its end and shrinks at its front."""

    def __init__(self, dtype: type[Scalar]) -> None:
        self._room: NDArray[Scalar] = np.empty(0, dtype=dtype)
        self._start = self._stop = 0

    @property
    def values(self) -> NDArray[Scalar]:
        """Current contents, as a view that is valid until the next change."""
        return self._room[self._start : self._stop]

    def append(self, values: NDArray[Any]) -> None:
        """Append values at the end."""
        if self._stop + len(values) > len(self._room):
            kept = self.values
            room = np.empty(max(2 * (len(kept) + len(values)), _ROOM_MIN), dtype=self._room.dtype)
            room[: len(kept)] = kept
            self._room, self._start, self._stop = room, 0, len(kept)
        self._room[self._stop : self._stop + len(values)] = values
        self._stop += len(values)

    def drop(self, count: int) -> None:
        """Remove `count` values at the front. Reallocate if most of the room is unused."""
        self._start += count
        if len(self._room) > max(_SPARSE * len(self.values), _ROOM_MIN):
            self._room = self.values.copy()
            self._start, self._stop = 0, len(self._room)


class TailTags:
    """Tag of each record as an integer code. Tags are sorted, so that a prefix is a contiguous range."""

    def __init__(self) -> None:
        self.codes: GrowableArray[np.uint32] = GrowableArray(np.uint32)
        self._code_of: dict[bytes, int] = {b"": 0}
        self._sorted: list[bytes] = []
        self._sorted_codes: list[int] = []

    def append(self, facts: RecordFacts) -> None:
        """Add the tags of more records."""
        if facts.tags is None:
            self.codes.append(np.zeros(len(facts), np.uint32))
            return
        code_of = self._code_of
        for tag in dict.fromkeys(facts.tags):
            code_of.setdefault(tag, len(code_of))
        self.codes.append(np.fromiter(map(code_of.__getitem__, facts.tags), np.uint32, len(facts)))

    def __len__(self) -> int:
        """Number of different known tags."""
        return len(self._code_of) - 1

    def drop(self, count: int) -> None:
        """Remove the first `count` rows. If there are far more tags than rows, drop unused tags."""
        self.codes.drop(count)
        if len(self._code_of) > max(_SPARSE * len(self.codes.values), _ROOM_MIN):
            self._forget_unused()

    def _forget_unused(self) -> None:
        codes = self.codes.values
        # The code of "no tag" stays 0, other codes shift down. Codes follow the order of the dictionary.
        used = np.union1d(codes, np.zeros(1, np.uint32))
        tags = list(self._code_of)
        self._code_of = {tags[code]: i for i, code in enumerate(used.tolist())}
        self._sorted, self._sorted_codes = [], []
        renumbered: GrowableArray[np.uint32] = GrowableArray(np.uint32)
        renumbered.append(np.searchsorted(used, codes).astype(np.uint32))
        self.codes = renumbered

    def rows(self, match: TagMatch) -> I64:
        """Return the ascending rows whose tag matches."""
        codes = self.codes.values
        if not match.is_prefix:
            code = self._code_of.get(match.tag, 0)
            return np.flatnonzero(codes == code) if code else np.zeros(0, np.int64)
        chosen = np.zeros(len(self._code_of), np.bool_)
        chosen[self._codes_of(match)] = True
        return np.flatnonzero(chosen[codes])

    def _codes_of(self, match: TagMatch) -> list[int]:
        prefix = match.tag
        if len(self._sorted) != len(self._code_of) - 1:
            self._sorted = sorted(self._code_of)[1:]  # the first is b""
            self._sorted_codes = [self._code_of[tag] for tag in self._sorted]
        start = bisect_left(self._sorted, prefix)
        stop = start
        for step in (1 << power for power in range(len(self._sorted).bit_length(), -1, -1)):
            if stop + step <= len(self._sorted) and self._sorted[stop + step - 1].startswith(prefix):
                stop += step
        codes = self._sorted_codes[start:stop]
        if not match.levels:
            return codes
        is_wanted = match.test
        return [code for code, tag in zip(codes, self._sorted[start:stop], strict=True) if is_wanted(tag)]


class TopicTail:
    """One topic's records in WAL files that follow the seq `after`."""

    def __init__(self, topic_id: int, epoch: int, after: int, *, with_tags: bool) -> None:
        self._topic_id = topic_id
        self._epoch = epoch
        self.after: int = after
        """Seqs up to this one are skipped: they are in segments, or deleted."""
        self.last_seq: int = after
        """Last seq that was read or added."""
        self._seqs = GrowableArray(np.uint64)
        self._sizes = GrowableArray(np.int64)
        self._stamps = GrowableArray(np.int64)
        self._expires: GrowableArray[np.int64] | None = None
        self._not_before: GrowableArray[np.int64] | None = None
        self._priorities: GrowableArray[np.uint8] | None = None
        self.tags: TailTags | None = TailTags() if with_tags else None
        self._offsets: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._seqs.values)

    @property
    def memory_cost(self) -> int:
        """Memory, in units of one record without a tag."""
        return len(self) + (0 if self.tags is None else _TAG_RECORDS * len(self.tags))

    @property
    def seqs(self) -> U64:
        """(n,) seqs, ascending."""
        return self._seqs.values

    @property
    def sizes(self) -> I64:
        """(n,) accounted bytes."""
        return self._sizes.values

    @property
    def stamps(self) -> I64:
        """(n,) commit stamps in microseconds."""
        return self._stamps.values

    @property
    def expires(self) -> I64 | None:
        """(n,) expiry of each record in microseconds, 0 = none; None if no record has one."""
        return None if self._expires is None else self._expires.values

    @property
    def not_before(self) -> I64 | None:
        """(n,) `not_before` of each record in microseconds, 0 = none; None if no record has one."""
        return None if self._not_before is None else self._not_before.values

    @property
    def priorities(self) -> NDArray[np.uint8] | None:
        """(n,) priority of each record; None if no record has one."""
        return None if self._priorities is None else self._priorities.values

    def append_records(self, facts: RecordFacts) -> None:
        """Add records that follow the last known one. Records that are known already are skipped."""
        fresh = int(np.searchsorted(facts.seqs, self.last_seq, side="right"))
        if fresh == len(facts):
            return
        if self.tags is not None:
            tags = None if facts.tags is None else facts.tags[fresh:]
            self.tags.append(RecordFacts(facts.seqs[fresh:], facts.sizes, facts.stamps, None, tags))
        self._expires = _extended(self._expires, len(self), np.int64, facts, facts.expires, fresh)
        self._not_before = _extended(self._not_before, len(self), np.int64, facts, facts.not_before, fresh)
        self._priorities = _extended(self._priorities, len(self), np.uint8, facts, facts.priorities, fresh)
        self._seqs.append(facts.seqs[fresh:])
        self._sizes.append(facts.sizes[fresh:])
        self._stamps.append(facts.stamps[fresh:])
        self.last_seq = int(facts.seqs[-1])

    def drop_below(self, below: int) -> None:
        """Drop records below this seq. Queries no longer ask for them."""
        count = int(np.searchsorted(self.seqs, below))
        if not count:
            return
        self.after = max(self.after, below - 1)
        own = (self._expires, self._not_before, self._priorities)
        for column in (self._seqs, self._sizes, self._stamps, *own):
            if column is not None:
                column.drop(count)
        if self.tags is not None:
            self.tags.drop(count)

    def read(
        self, files: Disk, path: str, extent: ExtentFacts, stop: int, is_enough: Callable[[], bool]
    ) -> None:
        """Read one file up to `stop`, or until `is_enough`. Raises CorruptData for damage, and DiskError."""
        at = max(self._offsets.get(extent.file_id, 0), extent.start)
        if at >= stop or is_enough():
            return
        fd = files.open_read(path)
        try:
            while at < stop and not is_enough():
                at = self._window(files, fd, extent, at, stop)
                self._offsets[extent.file_id] = at
        finally:
            files.close(fd)

    def retain_files(self, file_ids: set[int]) -> None:
        """Forget the positions in all other files."""
        self._offsets = {file_id: at for file_id, at in self._offsets.items() if file_id in file_ids}

    def _window(self, files: Disk, fd: int, extent: ExtentFacts, at: int, stop: int) -> int:
        wanted = min(stop - at, WINDOW_BYTES)
        buffer = _read(files, fd, at, wanted)
        if len(buffer) >= 8:
            length = int(buffer[:4].view("<u4")[0]) + layout.LEN_FIELD_BYTES
            if wanted < length <= min(FRAME_BYTES_MAX, stop - at):
                buffer = _read(files, fd, at, length)
        found = frames.scan(buffer.view("<u8"))
        if not len(found):
            raise self._damage(extent, at, found.reason or "file ends below the published mark")
        self._append_window(extent, buffer, found, at)
        return at + found.stop

    def _append_window(self, extent: ExtentFacts, buffer: Any, found: FrameBatch, origin: int) -> None:
        try:
            found = resolve_copies(buffer, found, extent.salt, topic_id=self._topic_id)
        except FrameInvalid as e:
            raise self._damage(extent, origin + e.offset, e.reason) from None
        words = found.words
        wanted = (
            (words[:, layout.W_TOPIC] == np.uint64(self._topic_id))
            & frames.is_of_type(words, layout.FrameType.APPEND)
            & (frames.epochs_of(words) == self._epoch)
        )
        wanted &= words[:, layout.W_BASE_SEQ] + frames.counts_of(words) > np.uint64(self.last_seq + 1)
        rows = np.flatnonzero(wanted)
        if not len(rows):
            return
        ours = _without_unverified(buffer, _ascending(found.take(rows)))
        if not len(ours):
            return
        for fault in (frames.first_bad_seal(ours, extent.salt), frames.first_bad_body(buffer, ours)):
            if fault is not None:
                raise self._damage(
                    extent, origin + int(ours.stored_offsets[fault]), "header or body: checksum mismatch"
                )
        try:
            self.append_records(record_facts(buffer, ours, with_tags=self.tags is not None))
        except FrameInvalid as e:
            raise self._damage(extent, origin + int(ours.stored_offsets[0]), e.reason) from None

    def _damage(self, extent: ExtentFacts, offset: int, reason: str) -> CorruptData:
        return CorruptData(
            f"stored frames are damaged: {reason}", topic_id=self._topic_id, seq=self.last_seq + 1,
            file=extent.path, offset=offset,
        )  # fmt: skip


def _extended(
    column: GrowableArray[Scalar] | None, known: int, dtype: type[Scalar], facts: RecordFacts,
    values: NDArray[Scalar] | None, fresh: int,
) -> GrowableArray[Scalar] | None:  # fmt: skip
    """Return an optional column, extended by the values of the records from row `fresh` on.

    The column is created when the first record has a value. `known` is the number of earlier records.
    """
    if column is None:
        if values is None:
            return None
        column = GrowableArray(dtype)
        column.append(np.zeros(known, dtype))
    column.append(np.zeros(len(facts) - fresh, dtype) if values is None else values[fresh:])
    return column


def _read(files: Disk, fd: int, at: int, length: int) -> NDArray[np.uint8]:
    buffer = np.empty(length, dtype=np.uint8)
    return buffer[: files.read_into(fd, buffer, at) & ~7]


def _without_unverified(buffer: Any, batch: FrameBatch) -> FrameBatch:
    """Drop frames of class memory whose body does not verify, because recovery skips them as well."""
    kept = batch
    while (bad := frames.first_bad_body(buffer, kept)) is not None:
        flags = int(kept.words[bad, layout.W_TAIL]) >> layout.FLAGS_SHIFT
        if flags & layout.DURABILITY_MASK != Durability.MEMORY:
            break
        kept = kept.take(np.delete(np.arange(len(kept)), bad))
    return kept


def _ascending(batch: FrameBatch) -> FrameBatch:
    """Drop frames that a restart copied and that are already in the batch."""
    last = batch.words[:, layout.W_BASE_SEQ] + frames.counts_of(batch.words)
    seen = np.maximum.accumulate(last)
    fresh = np.ones(len(last), np.bool_)
    fresh[1:] = last[1:] > seen[:-1]
    return batch if fresh.all() else batch.take(np.flatnonzero(fresh))
