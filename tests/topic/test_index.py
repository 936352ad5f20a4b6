"""The sparse index: a reader that starts at its position finds every record above its cursor."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ringlog.topic.index import SPARSE_BYTES, SparseIndex


@pytest.mark.parametrize("seed", range(10))
def test_positions_after_a_cursor_precede_every_later_record(seed):
    rng = random.Random(seed)
    index, frames, seq, file_id, offset = SparseIndex(), [], 1, 1, 4_096
    for _ in range(30):
        seqs, offsets = [], []
        for _ in range(rng.randint(1, 40)):
            count = rng.choice([1, 1, 7])
            seqs.append(seq)
            offsets.append(offset)
            frames.append((seq, seq + count - 1, file_id, offset))
            seq += count
            offset += rng.choice([100, 5_000, 400_000])
        index.add_run(np.array(seqs, dtype=np.uint64), file_id, np.array(offsets, dtype=np.int64))
        if rng.random() < 0.2:
            file_id, offset = file_id + 1, 4_096
    files = list(dict.fromkeys(each[2] for each in frames))
    for after in [0, 1, seq // 2, seq - 2, *rng.sample(range(seq), 20)]:
        places = dict(index.positions_after(after))
        for first, last, in_file, at in frames:
            if last > after:
                assert in_file in places, f"{first}..{last} lies in a file that is not read"
                assert places[in_file] <= at
        assert list(places) == [each for each in files if each in places], "in order"


def test_entries_are_sparse():
    index = SparseIndex()
    offsets = np.arange(4_096, 4_096 + 64 * SPARSE_BYTES, 200, dtype=np.int64)
    index.add_run(np.arange(1, len(offsets) + 1, dtype=np.uint64), 1, offsets)
    assert 60 <= len(index) <= 65


def test_truncate_file_and_drop_file_remove_their_entries():
    index = SparseIndex()
    for i in range(6):
        index.add(i + 1, 1, 4_096 + i * SPARSE_BYTES)
    index.truncate_file(1, 4_096 + 3 * SPARSE_BYTES)
    assert len(index) == 3
    index.truncate_file(2, 0)
    assert len(index) == 3
    index.add(4, 2, 4_096)
    assert index.positions_after(0) == [(1, 4_096), (2, 4_096)]
    index.drop_file(1)
    assert index.positions_after(0) == [(2, 4_096)]
    assert SparseIndex().positions_after(0) == []
