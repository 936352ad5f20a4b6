"""The board's files: the drawing, the constants, nothing else knows where anything lies.

The board is facts that one process writes and any process of ours reads without asking: `board` holds a
page for each process, `topics-NN-CC` the topics of shard NN, chunk CC, `news-NN` what shard NN published
lately (board/news.py). All words are 64 bits.

`board`:

byte           part
0              header page, 4096 bytes: identity
4096 * (i+1)   page of process i

`topics-NN-CC`:

byte           part
0              header page, 4096 bytes: identity
4096+128*i     slot of topic 4096 * CC + i of shard NN

The identity, in both:

 0     8     magic             b"RLBOARD\\0" or b"RLTOPIC\\0"
 8     4     version           2
 12    4     shard             topics: NN; board: 0
 16    8     slots             board: processes; topics: 4096
 24    8     chunk             topics: CC; board: 0
 32    8     xxh3              XXH3-64 of bytes 0..31

A process page, in words:

 0..63       numbers by P
 64..87      three marks of 8 words: [sequence, file_id, offset, check, 4 spare]
 88..95      a governor's numbers, by G
 96..479     three histograms of 128 words: [sum, 127 buckets]
 480..511    a scheduler's numbers, by D

A topic slot, in words:

 0  sequence      4  head_seq        8  trim_floor
 1  topic_id      5  earliest_seq    9  count
 2  epoch         6  cap_floor      10  bytes
 3  state         7  ttl_floor      11  last_write_us     12  version
    | durability bits << 32                               13  due_us
                                                          14  ttl_us    15 order

Marks and topic slots are seqlocks: the writer makes the sequence odd, writes, makes it even; a reader
takes the words only when the sequence was even before and is the same afterwards. A writer that died in
between leaves it odd: readers give up after a bounded time, and the next writer's first write repairs it.
A mark carries a check word besides, because a successor's recovery is built on it.

Each word has one writer. Assumed: aligned 8-byte stores are whole and are seen in order (x86-64). They
are made through a view of 64-bit words, never by struct.pack_into, which clears its destination first.

To change a layout: new version number; a board never outlives the engine's start.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import xxhash

from ringlog.errors import RinglogError
from ringlog.limits import BANDS, NEWS_ROWS

VERSION = 2
BOARD_MAGIC = b"RLBOARD\0"
TOPICS_MAGIC = b"RLTOPIC\0"
NEWS_MAGIC = b"RLNEWS\0\0"
GRANTS_MAGIC = b"RLTURNS\0"
CALLS_MAGIC = b"RLCALLS\0"
BOARD_NAME = "board"
PAGE_BYTES = 4096
PAGE_WORDS = PAGE_BYTES // 8

_IDENTITY = struct.Struct("<8sIIQQ")
IDENTITY_BYTES = _IDENTITY.size + 8


class BoardUnstable(RinglogError):
    """A slot's words are being rewritten, or their writer died in between; ask again or do without."""

    code = "not_ready"
    retriable = True


class BoardError(RinglogError):
    """A board file is not what it should be; names what differs."""

    code = "board"


class ProcessField(IntEnum):
    """Numbers on a process page. Written by the process itself but where the supervisor is named."""

    STATE = 0
    PID = 1
    INCARNATION = 2
    STARTED_NS = 3
    TURNS = 4
    """Passes of the duty cycle: progress, not liveness (RD-18)."""
    HEARTBEAT_NS = 5
    ASLEEP = 6
    """1 while the process waits and wants its bell rung."""
    BUSY_NS = 7
    PROGRESS = 8
    """Recovery, in thousandths."""
    RESTARTS = 9
    """Supervisor: starts after the first one."""
    EXIT = 10
    """Supervisor: how the last incarnation ended, exit code, or 256 + the signal that killed it."""
    EXIT_NS = 11
    """Supervisor: when."""
    SHARD = 12
    """Number of the shard plus 1; 0 = not a shard."""
    KIND = 13
    """Supervisor: index in its list of kinds of actor."""
    READ_ONLY = 14
    """1 while a shard serves reads alone because its directory takes no writes."""
    TOPICS_CHANGED = 15
    """Grows when topics of the shard were made or removed; who watches names lists them again."""
    FRAMES = 16
    RECORDS = 17
    BYTES = 18
    GROUPS = 19
    SYNCS = 20
    SYNC_NS = 21
    DUPLICATES = 22
    REFUSED = 23
    RINGS = 24
    WAL_FILES = 26
    CORRUPT = 28
    RECOVERY_NS = 29
    TRUNCATED = 30
    """Bytes of a torn tail that recovery dropped."""
    REQUESTS = 31
    TOPICS = 32
    """Topics of the shard, those that it is about to make included; all shards together have at most
    limits.max_topics."""
    DISK_LOW = 40
    """Reclaimer: 1 while the data directory's device has less free than data.min_free_bytes; shards look."""
    DISK_FREE = 41
    SCRUB_BYTES = 42
    """Reclaimer: bytes verified by the scrub so far."""
    SCRUB_LEFT = 43
    """Reclaimer: bytes to go in the present pass of the scrub."""
    SCRUB_PASS_S = 44
    """Reclaimer: seconds a whole pass takes at the configured pace."""
    SCRUB_PASSES = 45
    FINDINGS = 46
    """Damage found at rest, each time it is met."""
    QUARANTINED = 47
    """Segments left alone at present because a part of them is damaged."""
    HEALED = 48
    SEGMENTS_DROPPED = 49
    SEGMENTS_REWRITTEN = 50
    RECLAIMED_BYTES = 51
    MOVED = 52
    """Relocator: segments whose data part went to the cold tier."""
    MOVED_BYTES = 53
    MOVES_DUE = 54
    """Relocator: segments that are to go and have not yet."""
    MOVES_FAILED = 55
    COLD_READS = 56
    COLD_HITS = 57
    """Relocator: cold reads answered from memory."""
    COLD_FAILED = 58
    ABSORBED = 59
    """Compactor: bytes of log turned into segments by this incarnation."""
    SEGMENTS = 60
    """Compactor: segments made."""
    CHECKPOINTS = 61
    SNAPSHOT = 62
    """Compactor: number of the last snapshot written."""
    FAILURES = 63
    """Compactor: checkpoints that failed; the log says why."""


class QueueField(IntEnum):
    """Numbers of a shard's queues, where the page of a scheduler has its own."""

    EXHAUSTED = 480
    """Jobs that had all their deliveries, counted when they are set aside: there is something to be moved."""
    QUEUES = 481
    """Queues that were asked for something in this life of the shard; the next three are theirs."""
    READY = 482
    IN_FLIGHT = 483
    DELAYED = 484
    WAITING = 485
    """Claims that wait for jobs."""
    CLAIMED = 486
    """Jobs handed out; this and the next four are counted since the engine was started."""
    ACKED = 487
    NACKED = 488
    REJECTED = 489
    DEAD_LETTERED = 490
    """Jobs moved to the dead letters."""


class ConsumerGroupField(IntEnum):
    """Numbers of a shard's consumer groups, behind those of its queues."""

    GROUPS = 491
    """The next four are theirs."""
    LAG = 492
    """Records that are not done."""
    PENDING = 493
    """Of them, those that were given out."""
    MEMBERS = 494
    FLOOR_AGE_MS = 495
    """For how long the floor that has stood longest has not moved, of groups that are behind."""


class ProcessState(IntEnum):
    """P.STATE."""

    EMPTY = 0
    STARTING = 1
    RECOVERING = 2
    READY = 3
    DRAINING = 4
    STOPPED = 5
    FAILED = 6
    GIVEN_UP = 7
    """Failed, and no further incarnation comes before the next start of the engine."""


class WatermarkKind(IntEnum):
    """Which mark: (file_id, offset) up to which frames of a shard's files may be read or are durable."""

    PUBLISHED = 0
    DURABLE = 1
    VOLATILE = 2


class HistogramKind(IntEnum):
    """Which histogram. COMMIT and SYNC are nanoseconds, GROUP_FRAMES a count.

    A scheduler's COMMIT: from the turn in which it heard of something to its word to a link (G-2).
    """

    COMMIT = 0
    SYNC = 1
    GROUP_FRAMES = 2


class GovernorField(IntEnum):
    """Numbers of the governor of a shard, on its page, and of the instance, on the first scheduler's. The
    others schedulers' pages have BUSY and SAMPLED_NS. Shares are in millionths."""

    PRESSURE = 88
    STEP = 89
    """governor.Step."""
    BUSY = 90
    """Share of the time in which the process worked, averaged."""
    FILL = 91
    """Of the shard's fullest intake ring; the instance: its pressure without the shards'."""
    DELAY_NS = 92
    """The instance: from news to turn, averaged."""
    THROTTLED = 93
    """Writes refused for pressure."""
    WAITED_NS = 94
    """Time that pressure made groups or wake-ups wait."""
    SAMPLED_NS = 95


class SchedulerField(IntEnum):
    """Numbers of a delivery scheduler, behind the histograms of its page. Written by the process itself."""

    GRANTS_SENT = 480
    READY = 481
    """Feeds that wait for credit at present, in all ready sets (G-2)."""
    LINKS = 482
    SUBSCRIPTIONS = 483
    FEEDS = 484
    TOPICS_FOLLOWED = 485
    LATENCY_NS = 486
    """Moving average (0.2) of what H.COMMIT counts (G-2)."""
    NEWS_MISSED = 487
    """Times that news were incomplete, so that topic tables were looked at."""
    UNSENT = 488
    """Messages that a link did not take."""
    BAND_LOWEST = 489
    """Feeds that wait for credit at present, by band, from the lowest: this and the next four words."""
    STANDING = 494
    """Topics that could be told of and were not all the time since the sample before (G-2)."""
    LAG_MS = 495
    """How long the consumer that is furthest behind has had something to take."""
    ROUTERS = 496
    ROUTER_LAG = 497
    """Positions of sources that are not forwarded yet, summed over routers, as far as was told."""
    ROUTER_PASSES = 498


VOLATILE_BIT = 1 << 32
"""In the first word of a row of news: the frames lie in the volatile log. The bits below are the slot."""
SLOT_MASK = VOLATILE_BIT - 1
PROCESS_WORDS = 64
WATERMARK_BASE = 64
WATERMARK_WORDS = 8
HISTOGRAM_BASE = 96
HISTOGRAM_WORDS = 128

TOPIC_SLOT_BYTES = 128
TOPIC_SLOT_WORDS = TOPIC_SLOT_BYTES // 8
TOPICS_PER_CHUNK = 4096
CHUNK_BYTES = PAGE_BYTES + TOPICS_PER_CHUNK * TOPIC_SLOT_BYTES
TOPIC_DURABILITY_SHIFT = 32
NEWS_ROW_BYTES = 64
CALLS_ROW_BYTES = 64
NEWS_BYTES = PAGE_BYTES + NEWS_ROWS * NEWS_ROW_BYTES
SLOT_BYTES = {
    BOARD_MAGIC: PAGE_BYTES, TOPICS_MAGIC: TOPIC_SLOT_BYTES, NEWS_MAGIC: NEWS_ROW_BYTES,
    GRANTS_MAGIC: NEWS_ROW_BYTES, CALLS_MAGIC: CALLS_ROW_BYTES,
}  # fmt: skip
"""Bytes of one of the `slots` that follow the header page, by magic."""


def chunk_name(shard: int, chunk: int) -> str:
    """File name of a chunk of a shard's topic table."""
    return f"topics-{shard:02d}-{chunk:02d}"


def news_name(shard: int) -> str:
    """File name of a shard's news."""
    return f"news-{shard:02d}"


def encode_identity(magic: bytes, shard: int, slots: int, chunk: int) -> bytes:
    """First bytes of a board file."""
    body = _IDENTITY.pack(magic, VERSION, shard, slots, chunk)
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def decode_identity(data: bytes, magic: bytes, path: str) -> tuple[int, int, int]:
    """(shard, slots, chunk); raises BoardError naming what differs."""
    if len(data) < IDENTITY_BYTES:
        raise BoardError("not a board file: too short", path=path, bytes=len(data))
    found, version, shard, slots, chunk = _IDENTITY.unpack_from(data)
    if found != magic:
        raise BoardError("not a board file: magic differs", path=path, found=found, expected=magic)
    if version != VERSION:
        raise BoardError("board file of another version", path=path, found=version, expected=VERSION)
    stored = int.from_bytes(data[_IDENTITY.size : IDENTITY_BYTES], "little")
    if xxhash.xxh3_64_intdigest(data[: _IDENTITY.size]) != stored:
        raise BoardError("board identity does not verify", path=path)
    return shard, slots, chunk


assert max(ProcessField) < PROCESS_WORDS <= WATERMARK_BASE
assert WATERMARK_BASE + len(WatermarkKind) * WATERMARK_WORDS <= min(GovernorField)
assert max(GovernorField) < HISTOGRAM_BASE
assert SchedulerField.BAND_LOWEST + BANDS <= SchedulerField.STANDING
assert HISTOGRAM_BASE + len(HistogramKind) * HISTOGRAM_WORDS <= min(SchedulerField)
assert max(SchedulerField) < PAGE_WORDS
assert max(QueueField) < min(ConsumerGroupField)
assert max(ConsumerGroupField) < PAGE_WORDS
