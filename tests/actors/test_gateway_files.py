"""The reply that a gateway builds from overlapping frames."""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap64

from ringlog.actors.gateway.events import ReadFiles
from ringlog.actors.gateway.reads.frame_reader import _ReadReplyBuilder
from ringlog.client.read.fetch_result import FetchResult
from ringlog.client.read.remote_source import decode_received_frames
from ringlog.envelope import messages as m
from ringlog.frame import batch as frames
from ringlog.frame import encode_records, frame
from ringlog.frame.codec import patch_header
from ringlog.storage.frame_run import FrameRun
from ringlog.storage.visibility import VisibilityFilter


def run_of(first: int, last: int) -> FrameRun:
    """Return a run with one frame of these records."""
    encoded = encode_records([b"%d" % seq for seq in range(first, last + 1)])
    made = bytearray(frame(encoded, topic_id=5))
    patch_header(made, base_seq=first, commit_ts=1_000 + first, epoch=1)
    words = frames.words_of(made)
    at = np.zeros(1, dtype=np.int64)
    return FrameRun(
        made, frames.FrameBatch(at, frames.headers_at(words, at), len(made), frames.ScanEnd.CLEAN), 0, "", 0
    )


def test_deleted_records_stay_hidden_in_overlapping_frames() -> None:
    """The second frame shows no record and is omitted. The third frame repeats its last records."""
    deleted = BitMap64(range(6, 11))
    located = m.Located("t", 5, 1, 0, 0, 15, 1, 1, 1, 1, False, [])
    tray = _ReadReplyBuilder(ReadFiles(0, located, 0, 15, 100, 1 << 20), VisibilityFilter(deleted))
    for run in (run_of(1, 5), run_of(4, 10), run_of(3, 15)):
        tray.add_run(run)
    packed = tray.build()
    assert packed.frames == 2
    hidden = np.array(BitMap64.deserialize(packed.hidden).to_array(), dtype=np.int64)
    runs = decode_received_frames("t", packed.frames, 0, memoryview(packed.data))
    portion = FetchResult(1, 15, 1, None, 0, runs, packed.examined, hidden)
    shown = [seq for piece in portion.batches("t") for seq in piece.seqs.tolist()]
    assert shown == [1, 2, 3, 4, 5, 11, 12, 13, 14, 15]
