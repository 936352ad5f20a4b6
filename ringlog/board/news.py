"""News of a shard: what it published lately, and where that lies. One writer, any number of readers.

A ring of rows (row_ring) in `news-NN`. The shard appends and never waits; a reader that is too slow, or that
comes later, is told so (`is_complete`) and looks at the topic table instead, which says everything there is.
So news are a short cut: without them deliveries come later, never wrong.

Row: [slot | volatile << 32, topic_id, epoch, first_seq, last_seq, file_id, offset, stop]

The shard raises `life` when the facts of its incarnation are on the board, so that readers look at them
once; what the dead one published without saying so is among them.
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
    """Frames of one topic that lie one behind the other in one file of the log."""

    slot: int
    topic_id: int
    epoch: int
    first_seq: int
    last_seq: int
    file_id: int
    offset: int
    stop: int


class NewsWriter(RowWriter):
    """The shard's end; takes rows as NewsRow."""

    def __init__(self, dir: str | os.PathLike[str], shard: int) -> None:
        """Make the file, or go on with that of the incarnation before: everything it does not say has to be
        on the board by now. Raises BoardError without room."""
        path = os.path.join(os.fspath(dir), layout.news_name(shard))
        if not os.path.lexists(path):
            identity = layout.encode_identity(layout.NEWS_MAGIC, shard, NEWS_ROWS, 0)
            make_board_file(path, layout.PAGE_BYTES + NEWS_ROWS * ROW_BYTES, identity)
        super().__init__(_open(path, shard, writable=True))


class NewsReader(RowReader):
    """One reader's end; begins with what comes from now on, and says so by an incomplete first `take`."""

    def __init__(self, dir: str | os.PathLike[str], shard: int) -> None:
        """Raises BoardError while the shard has not made the file."""
        path = os.path.join(os.fspath(dir), layout.news_name(shard))
        super().__init__(_open(path, shard, writable=False), from_start=False)


def _open(path: str, shard: int, *, writable: bool) -> BoardFile:
    file = BoardFile(path, layout.NEWS_MAGIC, writable=writable)
    if file.shard != shard or not file.slots:
        found, rows = file.shard, file.slots
        file.close()
        raise BoardError("not the news of this shard", path=path, shard=found, rows=rows)
    return file
