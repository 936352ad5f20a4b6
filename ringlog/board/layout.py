"""Format of the board's files, and their constants. No other module computes offsets in them.

The board contains numbers that one process writes and other processes of the engine read directly. `board`
has a page for each process. `topics-NN-CC` has the topics of shard NN, chunk CC. `news-NN` has the latest
publications of shard NN (board/news.py). All words have 64 bits.

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

 0..63       ProcessField
 64..87      three marks of 8 words: [sequence, file_id, offset, check, 4 spare]
 88..95      GovernorField
 96..479     three histograms of 128 words: [sum, 127 buckets]
 480..511    a scheduler's SchedulerField; a shard's QueueField and ConsumerGroupField;
             an HTTP gateway's HttpGatewayField

A topic slot, in words:

 0  sequence      4  head_seq        8  trim_floor
 1  topic_id      5  earliest_seq    9  count
 2  epoch         6  cap_floor      10  bytes
 3  state         7  ttl_floor      11  last_write_us     12  version
    | durability bits << 32                               13  due_us
                                                          14  ttl_us    15 order

Marks and topic slots are seqlocks. The writer makes the sequence odd, writes the words, and makes the
sequence even. A reader uses the words only if the sequence was even before and is unchanged afterwards (B1).
A writer that dies in between leaves the sequence odd. Readers then give up after a bounded time, and the
first write of the next writer repairs the slot (B2). A mark also has a check word, because a successor's
recovery depends on it (B3).

Each word has one writer. Assumption: aligned 8-byte stores are atomic and are seen in program order (x86-64).
They are made through a view of 64-bit words. struct.pack_into must not be used, because it clears its
destination first (R1).

To change a layout, add a version number. A board does not survive a restart of the engine.
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
    """The words of a slot are being rewritten, or their writer died meanwhile. Retry, or do without them."""

    code = "not_ready"
    retriable = True


class BoardError(RinglogError):
    """A board file is not valid. The error states the difference."""

    code = "board"


class ProcessField(IntEnum):
    """Words of a process page. Written by the process itself, except where the supervisor is named."""

    STATE = 0
    PID = 1
    INCARNATION = 2
    STARTED_NS = 3
    TURNS = 4
    """Passes of the duty cycle. They show progress, not liveness."""
    HEARTBEAT_NS = 5
    ASLEEP = 6
    """1 while the process sleeps and must be woken up by its bell."""
    BUSY_NS = 7
    PROGRESS = 8
    """Progress of recovery in thousandths."""
    RESTARTS = 9
    """Supervisor: number of starts after the first one."""
    EXIT = 10
    """Supervisor: end of the last incarnation, exit code, or 256 + number of the signal that killed it."""
    EXIT_NS = 11
    """Supervisor: time of that end."""
    SHARD = 12
    """Number of the shard plus 1; 0 = not a shard."""
    KIND = 13
    """Supervisor: index of the kind of actor in processes.KINDS."""
    READ_ONLY = 14
    """1 while a shard only serves reads, because its directory is not writable."""
    TOPICS_CHANGED = 15
    """Grows if topics of the shard are created or deleted. Watches of patterns then list the topics again."""
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
    """Bytes of a torn end that recovery removed."""
    REQUESTS = 31
    TOPICS = 32
    """Topics of the shard, including those that are being created. All shards together have at most
    limits.max_topics."""
    LAST_APPEND_NS = 33
    """Duration of the shard's latest write to its log. Published before the replies of that commit."""
    LAST_SYNC_NS = 34
    """Duration of the shard's latest sync, in the same way."""
    LAST_WAIT_NS = 35
    """Time for which pressure let the frames that the shard took last wait in their rings."""
    LIVE_BYTES = 36
    """Accounted bytes of the live records of the shard, including those of the current commit. All shards
    together have at most limits.max_total_bytes."""
    DISK_LOW = 40
    """Reclaimer: 1 while the data device has less than data.min_free_bytes free. Shards poll this word."""
    DISK_FREE = 41
    SCRUB_BYTES = 42
    """Reclaimer: bytes verified by the scrub so far."""
    SCRUB_LEFT = 43
    """Reclaimer: bytes left in the current pass of the scrub."""
    SCRUB_PASS_S = 44
    """Reclaimer: seconds that a whole pass takes at the configured rate."""
    SCRUB_PASSES = 45
    FINDINGS = 46
    """Damage found at rest. Each finding of the same damage counts."""
    QUARANTINED = 47
    """Segments that are currently skipped, because a part of them is damaged."""
    HEALED = 48
    SEGMENTS_DROPPED = 49
    SEGMENTS_REWRITTEN = 50
    RECLAIMED_BYTES = 51
    MOVED = 52
    """Relocator: segments whose data part was moved to the cold tier."""
    MOVED_BYTES = 53
    MOVES_DUE = 54
    """Relocator: segments that are due to be moved."""
    MOVES_FAILED = 55
    COLD_READS = 56
    COLD_HITS = 57
    """Relocator: cold reads served from memory."""
    COLD_FAILED = 58
    ABSORBED = 59
    """Compactor: bytes of log turned into segments by this incarnation."""
    SEGMENTS = 60
    """Compactor: segments created."""
    CHECKPOINTS = 61
    SNAPSHOT = 62
    """Compactor: number of the last snapshot written."""
    FAILURES = 63
    """Compactor: failed checkpoints. The log has the reason."""


class QueueField(IntEnum):
    """Words of a shard's queues, in the range that a scheduler's page uses for SchedulerField."""

    EXHAUSTED = 480
    """Jobs that became exhausted so far. A change notifies schedulers that there are dead letters to move."""
    QUEUES = 481
    """Queues that received a request in this incarnation. The next three words cover these queues."""
    READY = 482
    IN_FLIGHT = 483
    DELAYED = 484
    WAITING = 485
    """Claims that wait for jobs."""
    CLAIMED = 486
    """Jobs delivered. This word and the next four count since the start of the engine."""
    ACKED = 487
    NACKED = 488
    REJECTED = 489
    DEAD_LETTERED = 490
    """Jobs moved to the dead-letter topic."""


class ConsumerGroupField(IntEnum):
    """Words of a shard's consumer groups, after those of its queues."""

    GROUPS = 491
    """Number of consumer groups. The next four words cover these groups."""
    LAG = 492
    """Records that are not acked."""
    PENDING = 493
    """Records that are delivered and not acked, a part of LAG."""
    MEMBERS = 494
    FLOOR_AGE_MS = 495
    """Milliseconds since the floor last moved: the maximum over all groups with lag."""


class ProcessState(IntEnum):
    """Values of ProcessField.STATE."""

    EMPTY = 0
    STARTING = 1
    RECOVERING = 2
    READY = 3
    DRAINING = 4
    STOPPED = 5
    FAILED = 6
    GIVEN_UP = 7
    """Failed, and the supervisor starts no further incarnation before the next start of the engine."""


class WatermarkKind(IntEnum):
    """Marks: (file_id, offset) up to which frames of a shard's files are readable or durable."""

    PUBLISHED = 0
    DURABLE = 1
    VOLATILE = 2


class HistogramKind(IntEnum):
    """Histograms of a page. COMMIT and SYNC are in nanoseconds, BATCH_FRAMES is a count.

    A scheduler's COMMIT is the time from the pass in which it detected new records to its message on a link.
    """

    COMMIT = 0
    SYNC = 1
    BATCH_FRAMES = 2


class GovernorField(IntEnum):
    """Words of a governor: of a shard on its page, of the engine on the page of the first scheduler.

    The pages of other schedulers have only BUSY and SAMPLED_NS. Shares are in millionths.
    """

    PRESSURE = 88
    STEP = 89
    """governor.PressureStep."""
    BUSY = 90
    """Share of the time in which the process worked, as a moving average."""
    FILL = 91
    """Fill of the shard's fullest ring. On the engine's governor: its pressure without that of the shards."""
    DELAY_NS = 92
    """Engine: time from news to grant in nanoseconds, as a moving average."""
    THROTTLED = 93
    """Writes refused because of pressure."""
    WAITED_NS = 94
    """Time by which pressure delayed commit batches or wake-ups, in nanoseconds."""
    SAMPLED_NS = 95


class SchedulerField(IntEnum):
    """Words of a delivery scheduler, after the histograms of its page. Written by the process itself."""

    GRANTS_SENT = 480
    READY = 481
    """Feeds that currently wait for credit, in all ready sets."""
    LINKS = 482
    SUBSCRIPTIONS = 483
    FEEDS = 484
    TOPICS_FOLLOWED = 485
    LATENCY_NS = 486
    """Moving average (weight 0.2) of the values in HistogramKind.COMMIT, in nanoseconds."""
    NEWS_MISSED = 487
    """How often news were incomplete, so that the scheduler rescanned the topic tables."""
    UNSENT = 488
    """Messages that a link did not accept."""
    BAND_LOWEST = 489
    """Feeds that currently wait for credit, by band: this word for the lowest band and the next four."""
    STANDING = 494
    """Topics that could have been granted, and were not, for the whole time since the previous sample."""
    LAG_MS = 495
    """Milliseconds for which records have been available to the consumer with the greatest lag."""
    ROUTERS = 496
    ROUTER_LAG = 497
    """Records of sources that are not forwarded yet, summed over routers, as known to the scheduler."""
    ROUTER_PASSES = 498


class HttpGatewayField(IntEnum):
    """Words of an HTTP gateway, in the same range. Each incarnation starts with zeros."""

    IN_FLIGHT = 480
    """Requests without a reply, streams not counted."""
    STREAMS = 481
    """Open event streams, work streams and WebSockets."""
    SESSIONS = 482
    """Watch sessions."""
    WORK_STREAMS = 483
    """Work streams that wait for settlements. Without any, other gateways do not report theirs."""


VOLATILE_BIT = 1 << 32
"""In the first word of a row of news: the frames are in the volatile log. The bits below it are the slot."""
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
"""Bytes of each of the `slots` after the header page, by magic."""


def chunk_name(shard: int, chunk: int) -> str:
    """Return the file name of a chunk of a shard's topic table."""
    return f"topics-{shard:02d}-{chunk:02d}"


def news_name(shard: int) -> str:
    """Return the file name of a shard's news."""
    return f"news-{shard:02d}"


def encode_identity(magic: bytes, shard: int, slots: int, chunk: int) -> bytes:
    """Return the first bytes of a board file."""
    body = _IDENTITY.pack(magic, VERSION, shard, slots, chunk)
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def decode_identity(data: bytes, magic: bytes, path: str) -> tuple[int, int, int]:
    """Return (shard, slots, chunk). Raise BoardError with the difference."""
    if len(data) < IDENTITY_BYTES:
        raise BoardError(
            f"board file must have at least {IDENTITY_BYTES} bytes, got {len(data)}",
            path=path,
            bytes=len(data),
        )
    found, version, shard, slots, chunk = _IDENTITY.unpack_from(data)
    if found != magic:
        raise BoardError("not a board file: wrong magic", path=path, found=found, expected=magic)
    if version != VERSION:
        raise BoardError(
            f"board file version must be {VERSION}, got {version}; use one version of ringlog on this host",
            path=path,
            found=version,
            expected=VERSION,
        )
    stored = int.from_bytes(data[_IDENTITY.size : IDENTITY_BYTES], "little")
    if xxhash.xxh3_64_intdigest(data[: _IDENTITY.size]) != stored:
        raise BoardError("board identity: checksum mismatch", path=path)
    return shard, slots, chunk


assert max(ProcessField) < PROCESS_WORDS <= WATERMARK_BASE
assert WATERMARK_BASE + len(WatermarkKind) * WATERMARK_WORDS <= min(GovernorField)
assert max(GovernorField) < HISTOGRAM_BASE
assert SchedulerField.BAND_LOWEST + BANDS <= SchedulerField.STANDING
assert HISTOGRAM_BASE + len(HistogramKind) * HISTOGRAM_WORDS <= min(SchedulerField)
assert max(SchedulerField) < PAGE_WORDS
assert max(QueueField) < min(ConsumerGroupField)
assert max(ConsumerGroupField) < PAGE_WORDS
