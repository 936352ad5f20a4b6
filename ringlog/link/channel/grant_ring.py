"""Grants of a scheduler to one client on its host, in shared memory instead of messages.

The scheduler creates a ring of rows (row_ring) for each such client, and a named pipe next to it as a bell. A
row is as in the message Grants. A grant is a hint and a permission, so a reader that was overrun checks all
its feeds itself. With the default credit no reader is overrun.
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
    """Return the prefix of the file names of a scheduler's grant rings."""
    return f"grants-{scheduler:02d}-"


class GrantWriter:
    """The scheduler's end."""

    def __init__(self, dir: str, name: str, scheduler: int) -> None:
        """Create the ring `name` and its bell. Raises BoardError without space, RingError without a bell."""
        self.name = name
        self.path: str = os.path.join(dir, name)
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
        """Write grants, eight words each, and wake the client."""
        self._ring.add_words(rows)
        self._bell.ring()

    def close(self) -> None:
        """Unmap and remove the ring. A reader keeps its own mapping."""
        self._ring.close()
        self._bell.close()
        remove_grant_ring(self.path)


class GrantReader:
    """The client's end."""

    def __init__(self, dir: str, name: str) -> None:
        """Open the ring. Raises BoardError or RingError if it does not exist any more."""
        path = os.path.join(dir, name)
        self._bell = BellListener(path + BELL)
        try:
            self._ring = RowReader(BoardFile(path, layout.GRANTS_MAGIC, writable=False), from_start=True)
        except BoardError:
            self._bell.close()
            raise

    def fileno(self) -> int:
        """Return a descriptor that is readable when grants arrived."""
        return self._bell.fileno()

    @property
    def has_grants(self) -> bool:
        """True if there are grants to read."""
        return self._ring.has_rows

    def drain_bell(self) -> None:
        """Clear the bell; the caller then reads the grants."""
        self._bell.drain()

    def take_grants(self) -> RowsRead:
        """Return the grants since the last call."""
        return self._ring.take_rows()

    def close(self) -> None:
        """Unmap the ring and close the bell. Idempotent."""
        self._ring.close()
        self._bell.close()


def remove_grant_ring(path: str) -> None:
    """Remove a grant ring and its bell, if they exist."""
    shm.remove_file(path)
    shm.remove_file(path + BELL)


def remove_stale_grant_rings(dir: str, scheduler: int) -> None:
    """Remove the rings of an earlier incarnation. Its clients request new ones."""
    for name in os.listdir(dir):
        if name.startswith(grants_prefix(scheduler)):
            shm.remove_file(os.path.join(dir, name))
