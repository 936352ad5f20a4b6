"""Jobs read ahead of those who claim them, so that a claim's answer can bring them along. Part of the shell.

A worker on the host reads its jobs from the files, which costs it a hundred microseconds and more for each
claim, however small the job. Many workers read the same stretch of the log, each for a few of its jobs. Here
it is read once, a window at a time, and every job in it is cut out. That pays where jobs are small, lie close
together in the log, are claimed in the order of their numbers, and are payloads alone; everything else is
left to the workers, and so is what cannot be read: they find out why, and say so. So are jobs in segments.

What is handed out was checked like what any reader hands out. It never changes while its topic lives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from actors.wal_shard.commit.hot_tail import (
    STAMP_BYTES,
    Contents,
    HotTail,
    Part,
    PayloadBlock,
    contents_of,
    split_jobs,
)
from actors.wal_shard.leases.job_sizes import JobSizes
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
from ringlog.storage.reader import FrameRun, LogHighWatermark, Pause, TopicReader
from ringlog.topic.config import QUEUE
from ringlog.topic.state import ShardTopic

_BLOCKS_MAX = 2


class _PrefetchState:
    """What is read of one queue, and where that goes on."""

    __slots__ = ("blocks", "epoch", "pause", "reader", "served")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.blocks: list[PayloadBlock] = []
        self.reader: TopicReader | None = None
        self.pause = 0
        """Claims for which nothing is read."""
        self.served = 0
        """Jobs that the last block was of use for."""

    def give_up(self, claims: int = INLINE_PAUSE_CLAIMS) -> None:
        """It is of no use for now."""
        self.pause = claims
        self.blocks = []
        self.reader = None


class JobPrefetcher:
    """What is read ahead of one shard's queues."""

    def __init__(
        self, disk: Disk, data_dir: str, shm_dir: str, marks: Callable[[bool], LogHighWatermark],
        locate: Callable[[ShardTopic, int], m.Located], newest: HotTail, sizes: JobSizes,
    ) -> None:  # fmt: skip
        self._newest, self._sizes = newest, sizes
        self._disk = disk
        self._roots = data_dir, shm_dir
        self._marks = marks
        self._locate = locate
        self._of: OrderedDict[int, _PrefetchState] = OrderedDict()

    def forget(self, topic_id: int) -> None:
        """The topic is no more."""
        self._of.pop(topic_id, None)

    def find(self, topic: ShardTopic, runs: Sequence[tuple[int, int, int, int]]) -> Contents | None:
        """The jobs of a claim, given as in ClaimReply; None when whoever claimed has to read them."""
        ahead = self._ahead_of(topic)
        parts: list[Part] = []
        for first, count, _, _ in runs:
            found = self._newest.find_parts(topic, first, count)
            if found is None and ahead is not None:
                found = self._run(topic, ahead, first, count)
            if found is None:
                return None
            parts += found
        return contents_of(parts)

    def _ahead_of(self, topic: ShardTopic) -> _PrefetchState | None:
        """What is read ahead of a queue; of a log, whose groups are at many places, nothing is."""
        if topic.config.type != QUEUE:
            return None
        ahead = self._of.get(topic.topic_id)
        if ahead is None or ahead.epoch != topic.epoch:
            return self._begin(topic)
        if len(self._of) > 1:
            self._of.move_to_end(topic.topic_id)
        return ahead

    def _begin(self, topic: ShardTopic) -> _PrefetchState:
        self._of.pop(topic.topic_id, None)
        ahead = self._of[topic.topic_id] = _PrefetchState(topic.epoch)
        while len(self._of) > INLINE_QUEUES_MAX:
            self._of.popitem(last=False)
        return ahead

    def _run(self, topic: ShardTopic, ahead: _PrefetchState, first: int, count: int) -> list[Part] | None:
        stop = first + count
        blocks = ahead.blocks
        for block in blocks:
            if block.first <= first and stop <= block.stop:
                ahead.served += count
                return [(block, first, stop)]
        if ahead.pause:
            ahead.pause -= 1
            return None
        if blocks and blocks[-1].first <= first < blocks[-1].stop:
            # It goes on in the next block.
            split = blocks[-1].stop
            head = self._run(topic, ahead, first, split - first)
            rest = self._run(topic, ahead, split, stop - split) if head is not None else None
            return None if head is None or rest is None else head + rest
        if blocks and first < blocks[-1].stop:
            return None  # It came back, and what is read ahead is of no use for it.
        if topic.head_seq - first < INLINE_AHEAD_MIN or count > INLINE_BYTES_MAX // STAMP_BYTES:
            return None
        if not self._read_on(topic, ahead, first):
            return None
        return self._run(topic, ahead, first, count)

    def _read_on(self, topic: ShardTopic, ahead: _PrefetchState, first: int) -> bool:
        """Have a block that holds this job, if that is quickly done; else nothing is read for a while."""
        is_useful = not ahead.blocks or ahead.served >= INLINE_AHEAD_MIN
        ahead.served = 0
        for _ in range(INLINE_WINDOWS_PER_CLAIM if is_useful else 0):
            try:
                block = self._next_block(topic, ahead, first)
            except (CorruptData, DiskError, FrameInvalid, NotReady):
                block = None  # Who reads the job finds out what it is, and is told.
            if block is None:
                break
            ahead.blocks = [*ahead.blocks[1 - _BLOCKS_MAX :], block]
            if block.first <= first < block.stop:
                return True
        ahead.give_up()
        return False

    def _next_block(self, topic: ShardTopic, ahead: _PrefetchState, first: int) -> PayloadBlock | None:
        reader = ahead.reader
        if reader is None:
            reader = ahead.reader = self._open(topic, first - 1)
        elif reader.cursor < first - 1:
            reader.skip_to(first - 1)
        found = self._read(topic, reader)
        if found is Pause.MOVED or found is Pause.AT_MARK:
            # The log goes on in another file, perhaps: it is asked once.
            reader.relocate(self._locate(topic, reader.cursor))
            found = self._read(topic, reader)
        block = _cut(found) if isinstance(found, FrameRun) else None
        if block is not None and block.sizes is not None:
            # So that an ack of them asks storage for nothing.
            numbers = np.arange(block.first, block.stop, dtype=np.uint64)
            self._sizes.add_sizes(topic.topic_id, numbers, block.sizes)
        return block

    @staticmethod
    def _read(topic: ShardTopic, reader: TopicReader) -> FrameRun | Pause:
        extents = reader.located.extents
        if extents and extents[0].segment:
            return Pause.UNFINISHED
        try:
            return reader.next_run(topic.head_seq, INLINE_WINDOW_BYTES)
        finally:
            # A file that is deleted meanwhile would take its room as long as it is open here.
            reader.close()

    def _open(self, topic: ShardTopic, after: int) -> TopicReader:
        data_dir, shm_dir = self._roots
        return TopicReader(
            self._locate(topic, after), after, data_dir=data_dir, shm_dir=shm_dir, marks=self._marks,
            disk=self._disk, windows_per_call=INLINE_WINDOWS_PER_CLAIM,
        )  # fmt: skip


def _cut(run: FrameRun) -> PayloadBlock | None:
    """All records of these frames, if they are small, payloads alone, and none is missing between them."""
    if int(run.batch.total_bytes.sum()) > INLINE_BLOCK_BYTES_MAX:
        return None
    block, sizes = split_jobs(run.buffer, run.batch)
    return block if sizes is not None and int(sizes.mean()) <= INLINE_JOB_BYTES_MAX else None
