"""What a shard is told and what it asks for. Read these two lists and you know what the actor is for.

Those of every group are made by hand: a dataclass makes itself in interpreted code, compiled or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.wal_shard.commit.commit_batch import News
from actors.wal_shard.retention.removal import LedgerAnswer, LedgerQuestion
from ringlog.frame.batch import FrameBatch
from ringlog.frame.settle_entry import SettleEntries
from ringlog.topic.state import ShardTopic

# -- events ---------------------------------------------------------------------------------------------


class FramesArrived:
    """Frames copied out of one ring into a private buffer (RD-13): checked here, written from here."""

    __slots__ = ("batch", "buffer", "end_position", "position", "source")

    def __init__(
        self, source: int, position: int, buffer: bytearray, batch: FrameBatch, end_position: int
    ) -> None:
        """`source`: number of the ring in this incarnation. `position`: in it, of byte 0 of `buffer`.
        `end_position`: where its tail may move once every frame of this event has its fate."""
        self.source, self.position, self.buffer = source, position, buffer
        self.batch, self.end_position = batch, end_position


@dataclass(frozen=True, slots=True)
class FileReady:
    """The next WAL file is made and filled. `capacity` is its size in bytes."""

    capacity: int


@dataclass(frozen=True, slots=True)
class FileFailed:
    """The next WAL file could not be made; it is tried again. `reason` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class FileOpened:
    """The prepared file is the current one: header durable, groups go behind it."""

    file_id: int
    salt: int
    start: int
    capacity: int


@dataclass(slots=True)
class BatchWritten:
    """The write call for the group returned; every byte is with the kernel."""


@dataclass(slots=True)
class Synced:
    """A device sync that covers everything written so far returned."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """A sync in the background returned: the file is durable up to `stop`, where it ended when that began."""

    file_id: int
    stop: int


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A process on this host that claimed jobs is no more."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class LedgerQueried:
    """What was asked is known; one answer a question, in order."""

    answers: list[LedgerAnswer]


@dataclass(frozen=True, slots=True)
class VolatileOpened:
    """A new file of the volatile log is current; `dropped` names those evicted for it."""

    file_id: int
    salt: int
    start: int
    capacity: int
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VolatileFailed:
    """Shared memory has no room for another volatile file; frames of ephemeral topics are refused for now.

    `dropped` names files that were evicted in the attempt.
    """

    reason: str
    dropped: tuple[int, ...] = ()


# -- effects --------------------------------------------------------------------------------------------


class WriteBatch:
    """Write these buffers, in order, at the log's end. Completion: BatchWritten."""

    __slots__ = ("buffers", "is_synced", "length", "offset")

    def __init__(self, buffers: list[Any], offset: int, length: int, is_synced: bool) -> None:
        """`is_synced`: a Sync follows at once: let the device begin."""
        self.buffers, self.offset, self.length, self.is_synced = buffers, offset, length, is_synced


@dataclass(frozen=True, slots=True)
class WriteVolatile:
    """The same for the volatile log; has no completion, since memory does not fail politely."""

    buffers: list[Any]
    offset: int
    length: int


@dataclass(slots=True)
class Sync:
    """Sync the current file. Completion: Synced. A failure ends the incarnation (D-17)."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Sync the current file beside the work, for records nobody waits for. Completion: Flushed."""

    file_id: int
    stop: int


@dataclass(frozen=True, slots=True)
class PrepareFile:
    """Make the next WAL file, at least this large, off the hot path. Completion: FileReady or FileFailed."""

    at_least: int
    fill: bool
    """Touch every block beforehand (later syncs are shorter), or only allocate (made at once)."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """Begin the prepared file: write and sync its header. Completion: FileOpened."""

    prev_file: int
    prev_stop: int
    prev_seal: int
    orderly: bool
    last_identity: tuple[int, int]
    """(topic_id, epoch) given out last: what is made later is made in this file."""


@dataclass(frozen=True, slots=True)
class OpenVolatile:
    """Begin a new volatile file of at least this size, dropping the oldest beyond the budget."""

    at_least: int


@dataclass(frozen=True, slots=True)
class QueryLedger:
    """Ask storage about topics' records (removal.answer). Completion: Consulted, at once."""

    questions: list[LedgerQuestion]


class PublishTopics:
    """Write the topics' facts to the board; their records are readable from now on."""

    __slots__ = ("news", "topics")

    def __init__(self, topics: list[ShardTopic], news: Sequence[News] = ()) -> None:
        """`news`: which records those are, and where they lie; nothing of what recovery found, which all look
        for."""
        self.topics, self.news = topics, news


class PublishMarks:
    """Write the marks: everything below (file, offset) may be read; (file, durable) is synced."""

    __slots__ = ("durable", "file_id", "published", "volatile", "volatile_file")

    def __init__(self, file_id: int, published: int, durable: int, volatile_file: int, volatile: int) -> None:
        self.file_id, self.published, self.durable = file_id, published, durable
        self.volatile_file, self.volatile = volatile_file, volatile


@dataclass(frozen=True, slots=True)
class RetireTopic:
    """The topic is gone; its slot says so."""

    topic: ShardTopic
    unused_ms: int = 0
    """It was removed because nobody used it for so long; 0 = somebody wanted it."""


class Settle:
    """Tell a ring's producer the fate of its frames, then move the tail."""

    __slots__ = ("entries", "new_tail", "source")

    def __init__(self, source: int, entries: SettleEntries, new_tail: int) -> None:
        self.source, self.entries, self.new_tail = source, entries, new_tail


class BatchCommitted:
    """Facts about one group, for counters and histograms."""

    __slots__ = ("bytes", "duplicates", "frames", "records", "refused")

    def __init__(self, frames: int, records: int, bytes: int, refused: int, repeats: int) -> None:
        self.frames, self.records, self.bytes = frames, records, bytes
        self.refused, self.duplicates = refused, repeats
