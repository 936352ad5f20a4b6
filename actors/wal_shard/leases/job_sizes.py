"""Cache of the sizes of jobs, so that an ack needs no query of storage. Pure.

The accounted size of a record never changes while its topic exists. One query therefore fetches a block of
sizes that serves every later ack in the block. Acks of consecutive jobs share one query. Only published
records have a known size; sizes of records that were published after the query are queried later.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from ringlog.limits import JOB_SIZE_BLOCK, JOB_SIZE_BLOCKS_AT_ONCE, JOB_SIZE_BLOCKS_MAX

I64 = NDArray[np.int64]
_UNKNOWN = -1
_SHIFT = JOB_SIZE_BLOCK.bit_length() - 1
_MASK = JOB_SIZE_BLOCK - 1


class JobSizes:
    """Job sizes of all queues of one shard, as an LRU cache of blocks."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[int, int], NDArray[np.int32]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def total(self, topic_id: int, seqs: I64) -> int | None:
        """Return the total bytes of these jobs; None if a size is unknown or the jobs span too many blocks.

        `seqs` must be ascending and not empty.
        """
        at, last = int(seqs[0]) >> _SHIFT, int(seqs[-1]) >> _SHIFT
        if at == last:
            return self._within(topic_id, at, seqs)
        if last - at >= JOB_SIZE_BLOCKS_AT_ONCE:
            return None
        total, low = 0, 0
        while low < len(seqs):
            at = int(seqs[low]) >> _SHIFT
            high = int(np.searchsorted(seqs, (at + 1) << _SHIFT))
            found = self._within(topic_id, at, seqs[low:high])
            if found is None:
                return None
            total, low = total + found, high
        return total

    def total_of(self, topic_id: int, first: int, count: int) -> int | None:
        """Return the total bytes of `count` consecutive jobs in one block; None if unknown."""
        block = self._blocks.get((topic_id, first >> _SHIFT))
        low = first & _MASK
        if block is None or low + count > JOB_SIZE_BLOCK:
            return None
        if count == 1:
            size = int(block[low])
            return None if size < 0 else size
        sizes = block[low : low + count]
        return None if sizes.min() < 0 else int(sizes.sum(dtype=np.int64))

    def _within(self, topic_id: int, at: int, seqs: I64) -> int | None:
        block = self._blocks.get((topic_id, at))
        if block is None:
            return None
        self._blocks.move_to_end((topic_id, at))
        if len(seqs) == 1:
            size = int(block[int(seqs[0]) & _MASK])
            return None if size < 0 else size
        sizes = block[seqs & _MASK]
        return None if sizes.min() < 0 else int(sizes.sum(dtype=np.int64))

    @staticmethod
    def block_range(seqs: I64, head_seq: int) -> tuple[int, int] | None:
        """Return the first and the last published seq of the blocks that contain these jobs.

        Return None if the jobs span too many blocks. A query of the single jobs is then cheaper.
        """
        first, last = int(seqs[0]) & ~_MASK, int(seqs[-1]) | _MASK
        if last - first >= JOB_SIZE_BLOCKS_AT_ONCE << _SHIFT:
            return None
        return max(first, 1), min(last, head_seq)

    def add_sizes(self, topic_id: int, seqs: NDArray[np.uint64], sizes: I64) -> None:
        """Store the accounted sizes of records of a topic. `seqs` must be ascending."""
        numbers = seqs.astype(np.int64)
        low = 0
        while low < len(numbers):
            at = int(numbers[low]) >> _SHIFT
            high = int(np.searchsorted(numbers, (at + 1) << _SHIFT))
            block = self._blocks.get((topic_id, at))
            if block is None:
                block = self._blocks[topic_id, at] = np.full(JOB_SIZE_BLOCK, _UNKNOWN, np.int32)
            block[numbers[low:high] & _MASK] = sizes[low:high]
            self._blocks.move_to_end((topic_id, at))
            low = high
        while len(self._blocks) > JOB_SIZE_BLOCKS_MAX:
            self._blocks.popitem(last=False)

    def forget(self, topic_id: int) -> None:
        """Drop the sizes of a deleted topic."""
        for key in [key for key in self._blocks if key[0] == topic_id]:
            del self._blocks[key]
