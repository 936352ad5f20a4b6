"""Reading the log for remote clients: whole frames, verified, copied out and sealed again under seed 0.

The salts of the files stay here: a client that cannot read them needs no way to make frames that would
verify in them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.gateway.events import FramesRead, ReadFiles
from ringlog.errors import CorruptData, DiskError
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.storage.disk import Disk
from ringlog.storage.reader import (
    FIRST_WINDOW_BYTES,
    WINDOW_BYTES,
    FrameRun,
    Marks,
    Pause,
    TopicReader,
)

WIRE_SEED = 0
_LOOKS_MAX = 8
"""Looks at a mark that has not yet reached the head; the client asks again if that was too few."""


def read_files(wanted: ReadFiles, *, data_dir: str, shm_dir: str, marks: Marks, disk: Disk) -> FramesRead:
    """Perform ReadFiles. Damage and disk trouble come back as `error`, after what lies before it."""
    reader = TopicReader(
        wanted.located, wanted.after, data_dir=data_dir, shm_dir=shm_dir, marks=marks, disk=disk
    )  # fmt: skip
    try:
        return _read(reader, wanted)
    except (CorruptData, DiskError) as e:
        return FramesRead(wanted.ticket, 0, 0, 0, wanted.after, None, e)
    finally:
        reader.close()


def _read(reader: TopicReader, wanted: ReadFiles) -> FramesRead:
    runs: list[FrameRun] = []
    records_left, bytes_left = wanted.limit, wanted.max_bytes
    examined = wanted.after
    looks = 0
    window = FIRST_WINDOW_BYTES
    while records_left > 0 and bytes_left > 0 and examined < wanted.stop:
        try:
            run = reader.next_run(wanted.stop, window)
        except (CorruptData, DiskError):
            if runs:
                break
            raise
        if run is Pause.BEYOND_HEAD:
            examined = wanted.stop
        elif run is Pause.MOVED and looks < _LOOKS_MAX:
            # Located a moment ago: a second look makes the reader sure, and a hole an error.
            reader.relocate(wanted.located)
        elif isinstance(run, FrameRun):
            run = _cut(run, examined, records_left, bytes_left)
            records_left -= run.last_seq - examined
            bytes_left -= int(run.batch.total_bytes.sum())
            examined = run.last_seq
            runs.append(run)
            window = min(2 * window, WINDOW_BYTES)
        elif run is not Pause.UNFINISHED and (runs or looks >= _LOOKS_MAX):
            break
        looks += isinstance(run, Pause)
    return _packed(wanted.ticket, runs, examined)


def _cut(run: FrameRun, after: int, records: int, size: int) -> FrameRun:
    """Keep the first frames that hold `records` records after `after`, or `size` bytes; at least one."""
    counts = np.cumsum(frames.counts_of(run.batch.words).astype(np.int64)) - max(after + 1 - run.first_seq, 0)
    sizes = np.cumsum(run.batch.total_bytes)
    rows = 1 + min(int(np.searchsorted(counts, records)), int(np.searchsorted(sizes, size)))
    if rows >= len(run.batch):
        return run
    return FrameRun(run.buffer, run.batch.take(slice(0, rows)), run.salt, run.path, run.origin)


def _packed(ticket: int, runs: list[FrameRun], examined: int) -> FramesRead:
    """Copy the frames together and seal them for the wire."""
    if not runs:
        return FramesRead(ticket, 0, 0, 0, examined)
    parts: list[Any] = []
    for run in runs:
        view = memoryview(run.buffer)
        stops = run.batch.offsets + run.batch.total_bytes
        parts += [view[a:b] for a, b in zip(run.batch.offsets.tolist(), stops.tolist(), strict=True)]
    data = bytearray().join(parts)
    sizes = np.concatenate([run.batch.total_bytes for run in runs])
    stops = np.cumsum(sizes)
    words = np.concatenate([run.batch.words for run in runs])
    words[:, layout.W_SEAL_XXH3] = frames.seals(words, WIRE_SEED)
    batch = FrameBatch(stops - sizes, words, len(data), frames.End.CLEAN)
    frames.put_headers(frames.words_of(data), batch)
    records = int(frames.counts_of(words).sum())
    return FramesRead(ticket, len(batch), records, runs[-1].last_seq, examined, data)
