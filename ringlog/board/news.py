"""News of a shard: its latest publications and their places. One writer, any number of readers.

News are a ring of rows (row_ring) in `news-NN`. The shard appends and never waits. A reader that falls behind
or attaches late detects this (`is_complete` is false) and rescans the topic table, which is always complete.
Without news, deliveries would be later but never wrong.

Row: [slot | volatile << 32, topic_id, epoch, first_seq, last_seq, file_id, offset, stop]

The shard increments `life` when the recovered state of its incarnation is on the board. Readers then rescan
the topic table once (N4). This includes publications that the previous incarnation did not announce.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ringlog.board import layout
from ringlog.board.layout import BoardError
from ringlog.board.mapping import BoardFile, make_board_file
from ringlog.board.row_ring import ROW_BYTES, RowReader, RowWriter
from ringlog.limits import NEWS_ROWS

N_SLOT, N_TOPIC_ID, N_EPOCH, N_FIRST_SEQ, N_LAST_SEQ, N_FILE_ID, N_OFFSET, N_STOP = range(8)


class NewsRow(NamedTuple):
    """Adjacent frames of one topic in one log file."""

    slot: int
    topic_id: int
    epoch: int
    first_seq: int
    last_seq: int
    file_id: int
    offset: int
    stop: int


class NewsWriter(RowWriter):
    """The shard's end. Rows are NewsRow."""

    def __init__(self, dir: str | os.PathLike[str], shard: int) -> None:
        """Create the file, or continue with that of the previous incarnation.

        The recovered state must be on the board before this call. Raises BoardError if there is no space.
        """
        path = os.path.join(os.fspath(dir), layout.news_name(shard))
        if not os.path.lexists(path):
            identity = layout.encode_identity(layout.NEWS_MAGIC, shard, NEWS_ROWS, 0)
            make_board_file(path, layout.PAGE_BYTES + NEWS_ROWS * ROW_BYTES, identity)
        super().__init__(_open(path, shard, writable=True))


class NewsReader(RowReader):
    """A reader's end. It begins with new rows, and its first `take_rows` is incomplete."""

    def __init__(self, dir: str | os.PathLike[str], shard: int) -> None:
        """Raise BoardError while the shard has not created the file."""
        path = os.path.join(os.fspath(dir), layout.news_name(shard))
        super().__init__(_open(path, shard, writable=False), from_start=False)


def _open(path: str, shard: int, *, writable: bool) -> BoardFile:
    file = BoardFile(path, layout.NEWS_MAGIC, writable=writable)
    if file.shard != shard or not file.slots:
        found, rows = file.shard, file.slots
        file.close()
        raise BoardError(
            f"news file must belong to shard {shard} and have rows, got shard {found} and {rows} rows",
            path=path,
            shard=found,
            rows=rows,
        )
    return file
