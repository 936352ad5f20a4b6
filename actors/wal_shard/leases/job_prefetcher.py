"""Reads jobs ahead of claims, so that the reply to a claim can contain the jobs. Part of the shell.

A local worker reads its jobs from the log files. This takes 100 microseconds or more for each claim, however
small the jobs are. Many workers read the same part of the log, each for a few of its jobs. The prefetcher
reads this part once, one window at a time, and cuts it into single jobs.

This pays off if jobs are small, consist of a payload only, are close together in the log, and are claimed in
order of their seqs. Workers read all other jobs themselves, also jobs in segments and unreadable jobs. For
unreadable jobs the worker reports the error.

Prefetched jobs pass the same checksum verification as in any reader. A record never changes while its topic
exists.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from ringlog.actors.wal_shard.commit.hot_tail import (
    STAMP_BYTES,
    Contents,
    HotTail,
    Part,
    PayloadBlock,
    contents_of,
    split_jobs,
)
from ringlog.actors.wal_shard.leases.job_sizes import JobSizes
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, DiskError, FrameInvalid, NotReady
from ringlog.limits import (
    INLINE_AHEAD_MIN,
    INLINE_BLOCK_BYTES_MAX,
    INLINE_BYTES_MAX,
    INLINE_JOB_BYTES_MAX,
    INLINE_PAUSE_CLAIMS,
    INLINE_QUEUES_MAX,
    INLINE_WINDOW_BYTES,
    INLINE_WINDOWS_PER_CLAIM,
)
from ringlog.storage.disk import Disk
from ringlog.storage.extents import LogHighWatermark
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.reader import Pause, TopicReader
from ringlog.topic.config import QUEUE
from ringlog.topic.state import ShardTopic

_BLOCKS_MAX = 2


class _PrefetchState:
    """Prefetched blocks of one queue, and the reader that continues after them."""

    __slots__ = ("blocks", "epoch", "pause", "reader", "served")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.blocks: list[PayloadBlock] = []
        self.reader: TopicReader | None = None
        self.pause = 0
        """Number of further claims for which nothing is prefetched."""
        self.served = 0
        """Number of jobs served since the last block was read."""

    def give_up(self, claims: int = INLINE_PAUSE_CLAIMS) -> None:
        """Stop prefetching for the next `claims` claims."""
        self.pause = claims
        self.blocks = []
        self.reader = None


class JobPrefetcher:
    """Prefetched jobs of one shard's queues."""

    def __init__(
        self, disk: Disk, data_dir: str, shm_dir: str, marks: Callable[[bool], LogHighWatermark],
        locate: Callable[[ShardTopic, int], m.Located], recent_records: HotTail, sizes: JobSizes,
    ) -> None:  # fmt: skip
        self._recent_records, self._sizes = recent_records, sizes
        self._disk = disk
        self._roots = data_dir, shm_dir
        self._marks = marks
        self._locate = locate
        self._of: OrderedDict[int, _PrefetchState] = OrderedDict()

    def forget(self, topic_id: int) -> None:
        """Drop the prefetched jobs of a deleted topic."""
        self._of.pop(topic_id, None)

    def find(self, topic: ShardTopic, runs: Sequence[tuple[int, int, int, int]]) -> Contents | None:
        """Return the contents of the leased runs (see ClaimReply).

        None if the worker has to read the jobs itself.
        """
        state = self._state_of(topic)
        parts: list[Part] = []
        for first, count, _, _ in runs:
            found = self._recent_records.find_parts(topic, first, count)
            if found is None and state is not None:
                found = self._find_run(topic, state, first, count)
            if found is None:
                return None
            parts += found
        return contents_of(parts)

    def _state_of(self, topic: ShardTopic) -> _PrefetchState | None:
        """Return the prefetch state of a queue.

        None for other topics, whose groups read at different positions.
        """
        if topic.config.type != QUEUE:
            return None
        state = self._of.get(topic.topic_id)
        if state is None or state.epoch != topic.epoch:
            return self._begin(topic)
        if len(self._of) > 1:
            self._of.move_to_end(topic.topic_id)
        return state

    def _begin(self, topic: ShardTopic) -> _PrefetchState:
        self._of.pop(topic.topic_id, None)
        state = self._of[topic.topic_id] = _PrefetchState(topic.epoch)
        while len(self._of) > INLINE_QUEUES_MAX:
            self._of.popitem(last=False)
        return state

    def _find_run(
        self, topic: ShardTopic, state: _PrefetchState, first: int, count: int
    ) -> list[Part] | None:
        stop = first + count
        blocks = state.blocks
        for block in blocks:
            if block.first <= first and stop <= block.stop:
                state.served += count
                return [(block, first, stop)]
        if state.pause:
            state.pause -= 1
            return None
        if blocks and blocks[-1].first <= first < blocks[-1].stop:
            # The run continues in the next block.
            split = blocks[-1].stop
            head = self._find_run(topic, state, first, split - first)
            tail = self._find_run(topic, state, split, stop - split) if head is not None else None
            return None if head is None or tail is None else head + tail
        if blocks and first < blocks[-1].stop:
            return None  # The job was returned to the queue and lies before the prefetched blocks.
        if topic.head_seq - first < INLINE_AHEAD_MIN or count > INLINE_BYTES_MAX // STAMP_BYTES:
            return None
        if not self._read_until(topic, state, first):
            return None
        return self._find_run(topic, state, first, count)

    def _read_until(self, topic: ShardTopic, state: _PrefetchState, first: int) -> bool:
        """Read until a block contains this job.

        If that takes too long, pause prefetching and return False.
        """
        is_useful = not state.blocks or state.served >= INLINE_AHEAD_MIN
        state.served = 0
        for _ in range(INLINE_WINDOWS_PER_CLAIM if is_useful else 0):
            try:
                block = self._next_block(topic, state, first)
            except (CorruptData, DiskError, FrameInvalid, NotReady):
                block = None  # The worker that reads the job gets the error.
            if block is None:
                break
            state.blocks = [*state.blocks[1 - _BLOCKS_MAX :], block]
            if block.first <= first < block.stop:
                return True
        state.give_up()
        return False

    def _next_block(self, topic: ShardTopic, state: _PrefetchState, first: int) -> PayloadBlock | None:
        reader = state.reader
        if reader is None:
            reader = state.reader = self._open(topic, first - 1)
        elif reader.cursor < first - 1:
            reader.skip_to(first - 1)
        found = self._read(topic, reader)
        if found is Pause.MOVED or found is Pause.AT_MARK:
            # The log may continue in another file, so query the position once.
            reader.relocate(self._locate(topic, reader.cursor))
            found = self._read(topic, reader)
        block = _cut(found) if isinstance(found, FrameRun) else None
        if block is not None and block.sizes is not None:
            # An ack of these jobs then needs no storage query.
            numbers = np.arange(block.first, block.stop, dtype=np.uint64)
            self._sizes.add_sizes(topic.topic_id, numbers, block.sizes)
        return block

    @staticmethod
    def _read(topic: ShardTopic, reader: TopicReader) -> FrameRun | Pause:
        extents = reader.records.extents
        if extents and extents[0].segment:
            return Pause.UNFINISHED
        try:
            return reader.next_run(topic.head_seq, INLINE_WINDOW_BYTES)
        finally:
            # An open descriptor would keep the disk space of a deleted file allocated.
            reader.close()

    def _open(self, topic: ShardTopic, after: int) -> TopicReader:
        data_dir, shm_dir = self._roots
        return TopicReader(
            self._locate(topic, after), after, data_dir=data_dir, shm_dir=shm_dir, read_watermark=self._marks,
            disk=self._disk, windows_per_call=INLINE_WINDOWS_PER_CLAIM,
        )  # fmt: skip


def _cut(run: FrameRun) -> PayloadBlock | None:
    """Return all records of these frames.

    None if they are large, have more than a payload, or leave a gap.
    """
    if int(run.batch.total_bytes.sum()) > INLINE_BLOCK_BYTES_MAX:
        return None
    block, sizes = split_jobs(run.buffer, run.batch)
    return block if sizes is not None and int(sizes.mean()) <= INLINE_JOB_BYTES_MAX else None
