"""Turns that a scheduler gives to one client on its host, in shared memory instead of a message.

A ring of rows (row_ring) for each such client, made by the scheduler, and a named pipe beside it as a bell.
Row: as in the message Turns. What is told is a hint and a permission, so a reader that was overrun says
which turns it has and is told the others again; with credit as it is by default nobody is.
"""

from __future__ import annotations

import os
from array import array

from ringlog import shm
from ringlog.board import layout
from ringlog.board.layout import BoardError
from ringlog.board.mapping import BoardFile, make_board_file
from ringlog.board.row_ring import ROW_BYTES, RowReader, RowsRead, RowWriter
from ringlog.errors import RingError
from ringlog.limits import GRANT_RING_ROWS
from ringlog.ring.doorbell import BellListener, BellRinger, make_bell

BELL = ".bell"


def grants_prefix(scheduler: int) -> str:
    """What the names of a scheduler's rings begin with."""
    return f"turns-{scheduler:02d}-"


class GrantWriter:
    """The scheduler's end."""

    def __init__(self, dir: str, name: str, scheduler: int) -> None:
        """Make the ring `name` and its bell; raises BoardError without room, RingError without a bell."""
        self.name = name
        self.path = os.path.join(dir, name)
        identity = layout.encode_identity(layout.GRANTS_MAGIC, scheduler, GRANT_RING_ROWS, 0)
        make_board_file(self.path, layout.PAGE_BYTES + GRANT_RING_ROWS * ROW_BYTES, identity)
        try:
            self._ring = RowWriter(BoardFile(self.path, layout.GRANTS_MAGIC, writable=True))
            make_bell(self.path + BELL)
        except (BoardError, RingError):
            remove_grant_ring(self.path)
            raise
        self._bell = BellRinger(self.path + BELL)

    def write_grants(self, rows: array[int]) -> None:
        """Give turns: eight words each."""
        self._ring.add_words(rows)
        self._bell.ring()

    def close(self) -> None:
        """Unmap and remove; who still reads keeps what it has mapped."""
        self._ring.close()
        self._bell.close()
        remove_grant_ring(self.path)


class GrantReader:
    """The client's end."""

    def __init__(self, dir: str, name: str) -> None:
        """Raises BoardError or RingError when it is not there any more."""
        path = os.path.join(dir, name)
        self._bell = BellListener(path + BELL)
        try:
            self._ring = RowReader(BoardFile(path, layout.GRANTS_MAGIC, writable=False), from_start=True)
        except BoardError:
            self._bell.close()
            raise

    def fileno(self) -> int:
        """Readable when there are turns."""
        return self._bell.fileno()

    @property
    def has_grants(self) -> bool:
        """Is there anything to take?"""
        return self._ring.has_rows

    def drain_bell(self) -> None:
        """Forget that the bell rang; then look."""
        self._bell.drain()

    def take_grants(self) -> RowsRead:
        """The turns since the last time."""
        return self._ring.take_rows()

    def close(self) -> None:
        """Unmap, and let go of the bell. Idempotent."""
        self._ring.close()
        self._bell.close()


def remove_grant_ring(path: str) -> None:
    """Remove a ring of turns and its bell, as far as they are there."""
    shm.remove_file(path)
    shm.remove_file(path + BELL)


def remove_stale_grant_rings(dir: str, scheduler: int) -> None:
    """Remove what an incarnation before left: its clients ask for rings anew."""
    for name in os.listdir(dir):
        if name.startswith(grants_prefix(scheduler)):
            shm.remove_file(os.path.join(dir, name))
