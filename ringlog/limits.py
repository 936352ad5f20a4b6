"""Every bound in the system, with its unit and the reason for its value.

What happens at a bound is said beside it. Relations between bounds are asserted at the end.
"""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20

# -- one write (semantics section 4). Over the limit: refused before a number is assigned ------------
BATCH_RECORDS_MAX = 10_000
RECORD_BYTES_MAX = 1 * MIB
TAG_BYTES_MAX = 256
NODE_BYTES_MAX = 128
KEY_BYTES_MAX = 4 * KIB
META_BYTES_MAX = 16 * KIB
META_KEYS_MAX = 64
HEADERS_PER_RECORD_MAX = 64
HEADER_BYTES_MAX = 16 * KIB
REQUEST_BYTES_MAX = 64 * MIB
IDEMPOTENCY_KEY_BYTES_MAX = 256
TOPIC_NAME_BYTES_MAX = 255
CONFIG_BYTES_MAX = 16 * KIB

# -- frames -------------------------------------------------------------------------------------------
FRAME_BYTES_MAX = REQUEST_BYTES_MAX + 1 * MIB
"""A whole frame, header included: the largest request plus its columns' offsets."""
DECOMPRESS_RATIO_MAX = 1_000
"""A body that claims to grow by more than this is refused before it is allocated (SEC-15)."""

# -- rings. A full ring pushes back on its producer; nothing is dropped --------------------------------
RING_BYTES_DEFAULT = 32 * MIB
RING_BYTES_MIN = 64 * KIB
RING_BYTES_MAX = 1 << 30
RING_FRAME_FRACTION = 4
"""A frame larger than capacity / this goes by socket instead, so that no frame can wedge a ring."""
SETTLE_ENTRIES_DEFAULT = 16_384
"""Frames in flight on one ring; the producer waits beyond it."""
SETTLE_ENTRY_BYTES = 64
RINGS_PER_SHARD_MAX = 1_024
RING_VERIFY_RETRIES = 8
"""Turns a published frame that does not verify is looked at again before its ring is closed (RD-12)."""

# -- group commit --------------------------------------------------------------------------------------
GROUP_FRAMES_MAX = 8_192
GROUP_BYTES_MAX = 8 * MIB
DRAIN_BYTES_PER_RING_MAX = 4 * MIB
"""Bytes one turn copies out of one ring, so that a fast producer cannot starve the others."""
FLUSH_INTERVAL_MS_DEFAULT = 100
UNSYNCED_BYTES_MAX = 32 * MIB
"""Bytes of `disk` and `memory` class that may be unsynced before a sync is forced, whatever the time."""
INTAKE_REQUESTS_MAX = 4_096
"""Socket requests one shard holds; beyond it the answer is Throttled (BP-3)."""

# -- WAL files -----------------------------------------------------------------------------------------
WAL_HEADER_BYTES = 4_096
WAL_FILE_BYTES_DEFAULT = 64 * MIB
WAL_FILE_BYTES_MIN = 1 * MIB
FILL_CHUNK_BYTES = 1 * MIB
RECOVERY_READ_BYTES = 8 * MIB

# -- segments ------------------------------------------------------------------------------------------
SEGMENT_RECORDS_DEFAULT = 1_000_000
SEGMENT_BYTES_DEFAULT = 64 * MIB
SEGMENT_AGE_MS_DEFAULT = 3_600_000
OWN_SEGMENT_BYTES_DEFAULT = 1 * MIB
SEALED_FRAME_BYTES = 256 * KIB
SEALED_FRAME_RECORDS = 1_024
"""Frames of a segment are filled up to about this: large enough for sequential reads, and no larger, because
who wants one record reads and verifies its whole frame."""
HOT_SEGMENTS_DEFAULT = 4
SNAPSHOTS_KEPT = 2
CHECKPOINT_ROWS_PER_REPLY = 512
"""Topics whose state a shard hands over in one turn, so that a checkpoint never holds up commits."""
DELETED_PER_LOCATE_BYTES = 256 * KIB
"""Bitmap of deleted numbers in one answer; a reader beyond it asks again."""

# -- cold tier. A request beyond the queue is answered Throttled; hot reads never pass here ----------------
COLD_RETRIES_MAX = 3
"""Repetitions of one request to an object store, within its timeout."""
COLD_READ_THREADS = 8
"""Fetches at the same time: one that is slow holds up no other as long as not all of them are."""
COLD_READS_QUEUED_MAX = 256
COLD_BLOCK_BYTES = 256 * KIB
"""Unit of the cache of cold bytes; a fetch is widened to whole blocks."""
MOVE_BACKOFF_S_MAX = 300.0
"""Longest pause before a relocation is tried again."""

# -- reclaiming -------------------------------------------------------------------------------------------
PACKS_MAX = 8
"""Shared segments of a shard before they are merged: reading a small topic looks into each of them."""
SMALL_SEGMENTS_MAX = 8
"""Segments of one topic below a quarter of segment_bytes before they are merged."""
SCRUB_EVERY_S = 3_600.0
"""A pass of the scrub begins so long after the one before it at the earliest: little data is no reason to
read it all the time."""
SCRUB_FINDINGS_MAX = 1_000
"""Findings one report names; more are counted."""
DISK_LOOK_S = 1.0
"""How often the free space of the data directory is looked at, and the word that says so."""

# -- topics --------------------------------------------------------------------------------------------
TOPICS_MAX_DEFAULT = 100_000
PRODUCERS_PER_TOPIC_MAX = 65_536
"""Producers a topic remembers. Beyond it the longest silent session producer is forgotten; named
producers never are, and a new one is refused when only they are left."""
DEDUP_FRAMES_PER_PRODUCER = SETTLE_ENTRIES_DEFAULT
"""Recent frames of one producer whose numbers can be repeated exactly."""
IDEMPOTENCY_KEYS_PER_TOPIC_MAX = 65_536
"""Keys remembered inside the window; beyond it the oldest is forgotten early and counted."""
HEAD_RESERVATION_MIN = 256
HEAD_RESERVATION_MAX = 1 << 24
VOLATILE_BYTES_DEFAULT = 64 * MIB
"""Ephemeral records one shard keeps in memory; beyond it the oldest file of them is evicted."""
SEQ_MAX = (1 << 63) - 1

# -- reads ---------------------------------------------------------------------------------------------
READ_LIMIT_DEFAULT = 256
READ_LIMIT_MAX = 1_000
READ_BYTES_DEFAULT = 1 * MIB
READ_BYTES_MAX = 8 * MIB
WAIT_MS_MAX = 30_000
LIST_PAGE_DEFAULT = 100
LIST_PAGE_MAX = 1_000
EXTENTS_PER_LOCATE_MAX = 1_024

# -- envelopes -----------------------------------------------------------------------------------------
ENVELOPE_BYTES_MAX = 1 * MIB
ENVELOPE_PARTS_MAX = 8
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX + ENVELOPE_BYTES_MAX
SOCKET_HWM = 4_096

# -- gateway. A connection at its bound is answered Throttled; one that does not take its answers is let go
GATEWAY_REQUESTS_PER_CONNECTION_MAX = 1_024
GATEWAY_REQUESTS_PER_KEY_MAX = 8_192
GATEWAY_BYTES_PER_CONNECTION_MAX = 2 * FRAME_BYTES_MAX
GATEWAY_BYTES_MAX = 8 * FRAME_BYTES_MAX
"""Attached frames a gateway holds for all connections together, until they are settled."""
GATEWAY_OUTBOX_BYTES_MAX = 32 * MIB
"""Answers kept for one connection that is slow to take them; beyond it the connection is forgotten."""
GATEWAY_SEND_HWM = 16
"""Answers handed to libzmq for one connection before they wait in its outbox."""

# -- processes -----------------------------------------------------------------------------------------
SHARDS_MAX = 64
PROCESSES_MAX = 128
HEARTBEAT_INTERVAL_MS = 1_000
STUCK_AFTER_S_MIN = 3.0
STUCK_AFTER_S_DEFAULT = 60.0
"""No progress for this long and the process is replaced; longer than the slowest sync we accept."""
DRAIN_S_DEFAULT = 10.0
ORPHAN_DRAIN_S = 3.0
"""A child whose supervisor died drains no longer: nobody is left to end it, and the next engine waits."""
RESTART_MAX_DEFAULT = 5
RESTART_WINDOW_S_DEFAULT = 60.0
RESTART_BACKOFF_MS_MIN = 20
RESTART_BACKOFF_MS_MAX = 5_000
READ_ONLY_LOOK_MS_MIN = 1_000
READ_ONLY_LOOK_MS_MAX = 5_000
"""A shard whose directory takes no writes looks again after this long, each time twice as long: bounds how
often a directory that only seems writable costs its readers a restart."""
DESCRIPTORS_RESERVED = 32
"""A process with fewer free descriptors than this stops listening: what is left is for the files it needs,
and for connections that come before it looks again. It listens anew when there are twice as many."""
DESCRIPTORS_LOOK_MS = 10
HANDSHAKE_MS = 5_000
"""Who connects and has not said what it speaks by then is let go of."""
STORY_EVENTS_MAX = 256

assert RECORD_BYTES_MAX <= REQUEST_BYTES_MAX < FRAME_BYTES_MAX
assert FRAME_BYTES_MAX < 1 << 31, "frame_len and column offsets are 32 bits"
assert RING_BYTES_MIN // RING_FRAME_FRACTION > 4 * KIB, "the smallest ring takes an ordinary frame"
assert DRAIN_BYTES_PER_RING_MAX <= GROUP_BYTES_MAX < WAL_FILE_BYTES_DEFAULT
assert DEDUP_FRAMES_PER_PRODUCER >= SETTLE_ENTRIES_DEFAULT, "a whole ring can be resent and recognised"
assert STUCK_AFTER_S_MIN * 1000 >= 3 * HEARTBEAT_INTERVAL_MS, "nobody is stuck for a late heartbeat"
