"""EngineBoard: what a client reads of its engine in shared memory, the board and the topic tables."""

from __future__ import annotations

import errno
import os

from ringlog.board.board import Board, BoardError, BoardUnstable, ProcessSlot
from ringlog.board.layout import WatermarkKind
from ringlog.board.processes import shard_slot
from ringlog.board.topics import TOPIC_LIVE, TopicFacts, TopicTable
from ringlog.descriptors import descriptor_limit_message
from ringlog.envelope.messages import Located, TopicInfo
from ringlog.errors import NotConnected
from ringlog.link.protocol import ShardWatermarks

_PUBLISHED, _VOLATILE = WatermarkKind.PUBLISHED, WatermarkKind.VOLATILE
"""Without the lookup in the enumeration, because each read needs them."""


class EngineBoard:
    """Board and topic tables of the engine that is in use. A new start of the engine has new ones."""

    def __init__(self) -> None:
        self.shm_dir: str = ""
        """Shared-memory directory of the engine; "" before the first engine was found."""
        self.open_error: str = ""
        """Why the board cannot be opened; "" = it is open, or does not exist yet."""
        self._board: Board | None = None
        self._tables: dict[int, TopicTable] = {}

    @property
    def is_open(self) -> bool:
        """The board is open: the engine works."""
        return self._board is not None

    def switch(self, shm_dir: str) -> Board | None:
        """Open the board of a new start of the engine, if it exists.

        Return the board of the last start, which the caller closes when nothing reads its words any more.
        """
        before, self._board = self._board, None
        tables, self._tables = self._tables, {}
        for table in tables.values():
            table.close()  # Threads that read its words directly detect that they belong to an earlier start.
        self.shm_dir = shm_dir
        try:
            self._board = Board.open(shm_dir, writable=False)
        except BoardError as e:
            self.open_error = _board_error(e)
        else:
            self.open_error = ""
        return before

    def close(self) -> None:
        """Close the board."""
        board, self._board = self._board, None
        if board is not None:
            board.close()

    def process(self, slot: int) -> ProcessSlot:
        """Return the page of one process. Raises NotConnected while the board is not open."""
        if self._board is None:
            raise NotConnected("the engine is not reachable at present: retry later")
        return self._board.process(slot)

    def topic_facts(self, info: TopicInfo | Located) -> TopicFacts | None:
        """Read the topic's slot on the board.

        Return None if it has another topic or epoch, or cannot be read.
        """
        try:
            found = self.topic_table(info.shard).read(info.slot)
        except (BoardUnstable, BoardError, NotConnected):
            return None
        is_it = found.topic_id == info.topic_id and found.epoch == info.epoch and found.state == TOPIC_LIVE
        return found if is_it else None

    def topic_sequence(self, info: TopicInfo | Located) -> int:
        """Return a number that changes with each change of the topic's slot.

        -1 during a change, or if the slot cannot be read.
        """
        try:
            found = self.topic_table(info.shard).sequence(info.slot)
        except (BoardError, NotConnected):
            return -1
        return -1 if found & 1 else found

    def sequence_word(self, info: TopicInfo | Located) -> tuple[memoryview, int] | None:
        """Return the word of topic_sequence (see TopicTable.sequence_word); None if it cannot be read."""
        try:
            return self.topic_table(info.shard).sequence_word(info.slot)
        except (BoardError, NotConnected):
            return None

    def peek_sequence(self, shard: int, slot: int) -> int:
        """As topic_sequence, from any thread. Returns -1 also if the table is not open yet."""
        table = self._tables.get(shard)
        found = -1 if table is None else table.sequence_or_minus_one(slot)
        return -1 if found & 1 else found

    def watermarks(self, shard: int) -> ShardWatermarks:
        """Read the shard's published marks; (0, 0), nothing is published, if they cannot be read."""
        try:
            process = self.process(shard_slot(shard))
            return ShardWatermarks(process.watermark(_PUBLISHED), process.watermark(_VOLATILE))
        except (BoardUnstable, BoardError, NotConnected):
            return ShardWatermarks((0, 0), (0, 0))

    def topic_table(self, shard: int) -> TopicTable:
        """Return the shard's topic table. Raises NotConnected or BoardError if there is none."""
        table = self._tables.get(shard)
        if table is None:
            table = self._tables[shard] = TopicTable.open(self._dir(), shard)
        return table

    def _dir(self) -> str:
        if not self.shm_dir:
            raise no_engine_found_error()
        return self.shm_dir


def no_engine_found_error() -> NotConnected:
    """Return the error of a client that has found no engine."""
    return NotConnected("no engine was found in the run directory yet: start it, or check the url")


def _board_error(error: BoardError) -> str:
    """Return what to do about a board that cannot be opened; "" if it does not exist yet."""
    code = error.detail.get("errno", 0)
    if code in {errno.EMFILE, errno.ENFILE}:
        return descriptor_limit_message()
    if code == errno.ENOENT:
        return ""
    if code in {errno.EACCES, errno.EPERM} or "uid" in error.detail:
        owner = f" belongs to user {error.detail['uid']} and" if "uid" in error.detail else ""
        return (
            f"the engine's shared memory{owner} cannot be used by user {os.geteuid()}: run program and "
            "engine as the same user, or connect over TCP"
        )
    return str(error)
