"""SegmentWriter: writes frames of one or more topics as one segment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
from pyroaring import BitMap64

from ringlog.envelope.messages import SegmentRef
from ringlog.errors import DiskError, InvariantViolation
from ringlog.frame.batch import FrameBatch, counts_of
from ringlog.frame.header import unpack_header
from ringlog.frame.layout import HEADER_BYTES, W_BASE_SEQ
from ringlog.frame.view import FrameView, checked_body
from ringlog.limits import KIB, SEALED_FRAME_BYTES, SEALED_FRAME_RECORDS
from ringlog.segment.coalescer import Coalescer
from ringlog.segment.frame_encoder import CompressionPolicy, SealedFrame, reseal_frame, seal_frame
from ringlog.segment.index import IndexBuilder
from ringlog.segment.layout import (
    DATA,
    DATA_HEADER_BYTES,
    DEL,
    DELETED,
    FLAG_TAGS,
    IDX,
    RECORDS_MAX,
    TAGS,
    DeletionMarksHeader,
    SegmentDataHeader,
    pack_stem,
    topic_stem,
)
from ringlog.segment.parts import create_temporary, publish_parts, temporary_path, write_temporary
from ringlog.segment.tags import TagsBuilder
from ringlog.storage.disk import Disk
from ringlog.types import Codec

_WRITE_BYTES = 64 * KIB
"""Frames are written to the disk when this number of bytes is collected."""


class SegmentWriter:
    """Writer of one segment. No part has its final name before finish(). Otherwise call abandon()."""

    def __init__(
        self,
        disk: Disk,
        data_dir: str,
        *,
        number: int,
        salt: int,
        shard: int,
        shards: int,
        engine_id: bytes,
        created_us: int,
        compression: str = "none",
        compression_min_bytes: int = 1_024,
        compression_saving: float = 0.05,
        yield_cpu: Callable[[], None] = lambda: None,
    ) -> None:
        """`compression` is none, lz4 or zstd. `yield_cpu` is called after every write. Raises DiskError."""
        self._yield_cpu = yield_cpu
        self._disk, self._data_dir = disk, data_dir
        self._number, self._salt = number, salt
        self._shard, self._shards, self._engine_id, self._created_us = shard, shards, engine_id, created_us
        self._compression_policy = CompressionPolicy(
            Codec[compression.upper()], compression_min_bytes, compression_saving
        )
        self._index = IndexBuilder()
        self._tags = TagsBuilder()
        self._last_topic = -1
        self._blanks: list[int] = []
        self._waiting: list[Any] = []
        self._waiting_bytes = 0
        self._written = DATA_HEADER_BYTES
        self._fd = create_temporary(disk, data_dir, number, DATA)

    @property
    def records(self) -> int:
        """Number of records so far."""
        return self._index.records

    @property
    def topics(self) -> int:
        """Number of topics with a live record so far."""
        return self._index.topics

    def add_topic(
        self,
        topic_id: int,
        epoch: int,
        runs: Iterable[tuple[Any, FrameBatch]],
        *,
        earliest_seq: int = 1,
        dead: BitMap64 | None = None,
        codec: Codec | None = None,
    ) -> int:
        """Add the live records of one topic. Topics must be added in ascending order.

        Args:
            topic_id: Id of the topic.
            epoch: Epoch of the topic.
            runs: (buffer, batch) pairs of verified append frames of this topic and epoch, ascending and
                without duplicates.
            earliest_seq: Records below this seq are dead.
            dead: Further dead seqs.
            codec: Codec of the topic. None or NONE selects the codec of the segment.

        Returns:
            Bytes of the data part so far.

        Raises:
            DiskError: A write failed.
            FrameInvalid: The structure of a body is invalid.
            InvariantViolation: Topics or records are not in ascending order.
        """
        if topic_id <= self._last_topic:
            raise InvariantViolation(
                f"topic_id must be > {self._last_topic}, got {topic_id}", topic_id=topic_id
            )
        self._last_topic = topic_id
        remaining = iter(runs)
        ahead = list(islice(remaining, 2))
        compression = replace(self._compression_policy, codec=codec) if codec else self._compression_policy
        if len(ahead) == 1 and self._is_kept_unchanged(ahead[0][1], earliest_seq, dead, compression):
            self._add_single_frame(ahead[0][0], ahead[0][1], topic_id, epoch)
            return self._written + self._waiting_bytes
        coalescer = Coalescer(earliest_seq=earliest_seq, dead=dead)
        start = self._index.records
        for slices in coalescer.frames(chain(ahead, remaining)):
            self._add_frame(
                seal_frame(slices, topic_id=topic_id, epoch=epoch, salt=self._salt, compression=compression)
            )
        if self._index.topic_frames:
            self._record_blanks(coalescer, start)
            self._index.end_topic(topic_id, epoch)
            self._tags.end_topic()
        return self._written + self._waiting_bytes

    @staticmethod
    def _is_kept_unchanged(
        batch: FrameBatch, earliest_seq: int, dead: BitMap64 | None, compression: CompressionPolicy
    ) -> bool:
        """Return whether this is a single live frame that coalescing and compression would not change.

        Most topics of a pack have a single frame. This path costs half of the general one.
        """
        if len(batch) != 1 or int(batch.total_bytes[0]) > SEALED_FRAME_BYTES:
            return False
        count, first = int(counts_of(batch.words)[0]), int(batch.words[0, W_BASE_SEQ])
        return (
            count <= SEALED_FRAME_RECORDS
            and first >= earliest_seq
            and not (dead and dead.range_cardinality(first, first + count))
            and (compression.codec == Codec.NONE or int(batch.total_bytes[0]) < compression.min_bytes)
        )

    def _add_single_frame(self, buffer: Any, batch: FrameBatch, topic_id: int, epoch: int) -> None:
        start = int(batch.offsets[0])
        header = unpack_header(batch.words.tobytes(), 0)
        stored = memoryview(buffer).cast("B")[start + HEADER_BYTES : start + header.total_bytes]
        view = FrameView(header, *checked_body(header, stored), start, 0, header.records)
        self._add_frame(reseal_frame(view, stored, epoch=epoch, salt=self._salt))
        self._index.end_topic(topic_id, epoch)
        self._tags.end_topic()

    def _record_blanks(self, coalescer: Coalescer, start: int) -> None:
        """Store the ordinals of records that are placeholders of dead ones."""
        if coalescer.placeholders:
            blanks = np.concatenate(coalescer.placeholders)
            seqs = self._index.open_topic_seqs()
            self._blanks += (start + np.searchsorted(seqs, np.sort(blanks))).tolist()

    def _add_frame(self, frame: SealedFrame) -> None:
        if self._index.records + frame.count > RECORDS_MAX:
            raise InvariantViolation(f"segment must have at most {RECORDS_MAX} records", max=RECORDS_MAX)
        if frame.tags is not None:
            self._tags.add_frame(frame.tags, self._index.records)
        self._index.add_frame(frame, self._written + self._waiting_bytes)
        self._waiting += frame.pieces
        self._waiting_bytes += frame.length
        if self._waiting_bytes >= _WRITE_BYTES:
            self._write_waiting()
            self._yield_cpu()

    def _write_waiting(self) -> None:
        pieces, self._waiting = self._waiting, []
        if pieces:
            self._disk.write_at(self._fd, [b"".join(pieces)], self._written)
            self._disk.write_back(self._fd, self._written, self._waiting_bytes)
            self._written += self._waiting_bytes
            self._waiting_bytes = 0

    def finish(self) -> SegmentRef | None:
        """Make the segment durable and rename it (S1). Return None if no record was alive.

        Raises DiskError. The segment then does not exist, because its data part has no final name.
        """
        if not self._index.records:
            self.abandon()
            return None
        self._write_waiting()
        topic_id, first_seq, last_seq = self._index.sole_topic_range
        is_own = self._index.topics == 1
        stem = topic_stem(topic_id, first_seq, self._number) if is_own else pack_stem(self._number)
        header = SegmentDataHeader(
            topics=self._index.topics, number=self._number, salt=self._salt, records=self._index.records,
            frames=self._index.frames, data_bytes=self._written, topic_id=topic_id, first_seq=first_seq,
            last_seq=last_seq, shard=self._shard, shards=self._shards, engine_id=self._engine_id,
            created_us=self._created_us,
        )  # fmt: skip
        self._disk.write_at(self._fd, [header.encode()], 0)
        self._disk.sync_file(self._fd)
        self._close()
        others = write_index_parts(self._disk, self._data_dir, header, self._index, self._tags)
        if self._blanks:
            marks = bytearray(header.records)
            np.frombuffer(marks, np.uint8)[self._blanks] = DELETED
            head = DeletionMarksHeader(self._number, self._salt, header.records).encode()
            write_temporary(self._disk, self._data_dir, self._number, DEL, [head, marks])
            others.append(DEL)
        publish_parts(self._disk, self._data_dir, stem, others)
        publish_parts(self._disk, self._data_dir, stem, [DATA])
        return SegmentRef(
            number=self._number, stem=stem, salt=self._salt, data_bytes=self._written, records=header.records,
            frames=header.frames, topics=header.topics, created_us=header.created_us,
        )  # fmt: skip

    def abandon(self) -> None:
        """Delete the temporary files. Errors are ignored, because the engine ignores temporary files."""
        self._close()
        for suffix in (DATA, IDX, TAGS, DEL):
            path = temporary_path(self._data_dir, self._number, suffix)
            with contextlib.suppress(DiskError):
                if self._disk.exists(path):
                    self._disk.unlink(path)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._disk.close(fd)


def write_index_parts(
    disk: Disk, data_dir: str, header: SegmentDataHeader, index: IndexBuilder, tags: TagsBuilder
) -> list[str]:
    """Write index and tags under temporary names. Return the suffixes of the parts written."""
    text = tags.encode(number=header.number, salt=header.salt, records=header.records)
    pieces = index.encode(
        number=header.number, salt=header.salt, shard=header.shard, shards=header.shards,
        engine_id=header.engine_id, created_us=header.created_us, data_bytes=header.data_bytes,
        flags=FLAG_TAGS if text else 0,
    )  # fmt: skip
    write_temporary(disk, data_dir, header.number, IDX, pieces)
    if not text:
        return [IDX]
    write_temporary(disk, data_dir, header.number, TAGS, text)
    return [IDX, TAGS]
