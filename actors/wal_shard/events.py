"""Events and effects of the shard: the input and the output of its core.

The classes that every commit batch uses have a hand-written `__init__`. The generated `__init__` of a
dataclass always runs as interpreted code, even in a compiled module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringlog.actors.wal_shard.commit.commit_batch import News
from ringlog.actors.wal_shard.retention.storage_query import StorageAnswer, StorageQuery
from ringlog.frame.batch import FrameBatch
from ringlog.frame.settle_entry import SettleEntries
from ringlog.topic.state import ShardTopic

# -- events ---------------------------------------------------------------------------------------------


class FramesArrived:
    """Frames copied out of one ring into a private buffer (R3). The shard checks and writes this copy."""

    __slots__ = ("batch", "buffer", "end_position", "position", "source")

    def __init__(
        self, source: int, position: int, buffer: bytearray, batch: FrameBatch, end_position: int
    ) -> None:
        """Create the event.

        Args:
            source: number of the ring in this incarnation.
            position: ring position of byte 0 of `buffer`.
            buffer: the copied bytes.
            batch: the checked frames in `buffer`.
            end_position: position to which the ring's tail may move when all these frames are settled.
        """
        self.source: int = source
        self.position: int = position
        self.buffer: bytearray = buffer
        self.batch: FrameBatch = batch
        self.end_position: int = end_position


@dataclass(frozen=True, slots=True)
class FileReady:
    """The next WAL file was created. `capacity` is its size in bytes."""

    capacity: int


@dataclass(frozen=True, slots=True)
class FileFailed:
    """The next WAL file could not be created. The core retries. `reason` is text for operators."""

    reason: str


@dataclass(frozen=True, slots=True)
class FileOpened:
    """The prepared file is the current one.

    Its header is durable, and commit batches follow from `start` on.
    """

    file_id: int
    salt: int
    start: int
    capacity: int


@dataclass(slots=True)
class BatchWritten:
    """The write call of the commit batch returned. The kernel has every byte."""


@dataclass(slots=True)
class Synced:
    """A device sync returned that covers everything written so far."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """A background sync returned. The file is durable up to `stop`, its end when the sync started."""

    file_id: int
    stop: int


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A process on this host that claimed jobs has died. `started` is its start time in clock ticks."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class ConnectionsEnded:
    """Connections with call rings have ended."""

    connections: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StorageQueried:
    """Results of a QueryStorage: one answer for each question, in order."""

    answers: list[StorageAnswer]


@dataclass(frozen=True, slots=True)
class VolatileOpened:
    """A new file of the volatile log is the current one.

    `dropped` lists the files that were evicted for it.
    """

    file_id: int
    salt: int
    start: int
    capacity: int
    dropped: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VolatileFailed:
    """Shared memory has no room for another volatile file. Frames of ephemeral topics are refused for now.

    `dropped` lists the files that were evicted in the attempt.
    """

    reason: str
    dropped: tuple[int, ...] = ()


# -- effects --------------------------------------------------------------------------------------------


class WriteBatch:
    """Write these buffers in order at the end of the log. Completion: BatchWritten."""

    __slots__ = ("buffers", "is_synced", "length", "offset")

    def __init__(self, buffers: list[Any], offset: int, length: int, is_synced: bool) -> None:
        """Create the effect.

        `is_synced` is True if a Sync follows directly, so that write-back can start early.
        """
        self.buffers: list[Any] = buffers
        self.offset: int = offset
        self.length: int = length
        self.is_synced: bool = is_synced


@dataclass(frozen=True, slots=True)
class WriteVolatile:
    """Write these buffers in order to the volatile log.

    Has no completion, since a failed write ends the process.
    """

    buffers: list[Any]
    offset: int
    length: int


@dataclass(slots=True)
class Sync:
    """Sync the current file. Completion: Synced. A failure ends the incarnation (W7)."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Sync the current file in the background, for records whose acks do not wait for a sync.

    Completion: Flushed.
    """

    file_id: int
    stop: int


@dataclass(frozen=True, slots=True)
class PrepareFile:
    """Create the next WAL file in a thread, with at least `at_least` bytes.

    Completion: FileReady or FileFailed.
    """

    at_least: int
    fill: bool
    """True to write every block in advance, which makes later syncs shorter.
    False to only allocate the file."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """Make the prepared file the current one: write and sync its header. Completion: FileOpened."""

    prev_file: int
    prev_stop: int
    prev_seal: int
    orderly: bool
    last_identity: tuple[int, int]
    """(topic_id, epoch) that were assigned last. All later topics are created in this file or a later one."""


@dataclass(frozen=True, slots=True)
class OpenVolatile:
    """Create a new volatile file of at least `at_least` bytes, and evict the oldest files above the budget.

    Completion: VolatileOpened or VolatileFailed.
    """

    at_least: int


@dataclass(frozen=True, slots=True)
class QueryStorage:
    """Query storage about records (storage_query.answer_question). Completion: StorageQueried, at once."""

    questions: list[StorageQuery]


class PublishTopics:
    """Write the state of topics to the board. Their records are readable from then on."""

    __slots__ = ("news", "topics")

    def __init__(self, topics: list[ShardTopic], news: Sequence[News] = ()) -> None:
        """Create the effect. `news` lists the new records and their positions.

        `news` is empty for recovered records, because schedulers rescan all topics after a recovery.
        """
        self.topics: list[ShardTopic] = topics
        self.news: Sequence[News] = news


class PublishMarks:
    """Write the published mark, the durable mark and the mark of the volatile log to the board."""

    __slots__ = ("durable", "file_id", "published", "volatile", "volatile_file")

    def __init__(self, file_id: int, published: int, durable: int, volatile_file: int, volatile: int) -> None:
        self.file_id: int = file_id
        self.published: int = published
        self.durable: int = durable
        self.volatile_file: int = volatile_file
        self.volatile: int = volatile


@dataclass(frozen=True, slots=True)
class RetireTopic:
    """Mark the board slot of a deleted topic as deleted, and release it."""

    topic: ShardTopic
    unused_ms: int = 0
    """Idle time in milliseconds after which the topic was deleted; 0 if it was deleted on request."""


class Settle:
    """Write the settle entries to a ring's producer, then move the ring's tail."""

    __slots__ = ("entries", "new_tail", "source")

    def __init__(self, source: int, entries: SettleEntries, new_tail: int) -> None:
        self.source: int = source
        self.entries: SettleEntries = entries
        self.new_tail: int = new_tail


class BatchCommitted:
    """Numbers of one commit batch, for counters and histograms."""

    __slots__ = ("bytes", "duplicates", "frames", "records", "refused")

    def __init__(self, frames: int, records: int, bytes: int, refused: int, repeats: int) -> None:
        self.frames: int = frames
        self.records: int = records
        self.bytes: int = bytes
        self.refused: int = refused
        self.duplicates: int = repeats
