"""Every bound of the system, with its unit, the effect at the bound, and the reason for its value.

The assertions at the end state relations between bounds.
"""

from __future__ import annotations

KIB = 1 << 10
"""Bytes of one kibibyte."""
MIB = 1 << 20
"""Bytes of one mebibyte."""

# -- one write. A larger write is refused before it gets seqs -----------------------------------------
BATCH_RECORDS_MAX = 10_000
"""Most records of one write, and largest value of `limits.max_batch_records`. A larger write fails with
BatchTooLarge. It bounds the work of a shard for one frame."""
RECORD_BYTES_DEFAULT = 1 * MIB
"""Default of `limits.max_record_bytes`: largest payload and metadata of a record in bytes. A larger record
fails with RecordTooLarge."""
RECORD_BYTES_MAX = 64 * MIB
"""Largest value of `limits.max_record_bytes` in bytes. It equals the largest request, so that one record
always fits."""
TAG_BYTES_MAX = 256
"""Largest tag of a record in bytes of UTF-8, and largest pattern of a tag filter. A larger one fails with
InvalidRequest."""
NODE_BYTES_MAX = 128
"""Largest node name in bytes of UTF-8. A larger one fails with InvalidRequest, or with UsageError in the
client. Snapshots store the node of each lease, so the name must be short."""
KEY_BYTES_MAX = 4 * KIB
"""Largest key of a record in bytes. A larger one fails with InvalidRequest."""
META_BYTES_MAX = 16 * KIB
"""Largest metadata of a record in bytes of JSON. Larger metadata fails with InvalidRequest."""
META_KEYS_MAX = 64
"""Most keys in the metadata of a record. More fail with InvalidRequest. Keys that dead letters add do not
count."""
HEADERS_PER_RECORD_MAX = 65_535
"""Most headers of a record. More fail with InvalidRequest."""
HEADER_BYTES_MAX = 65_535
"""Largest name, and largest value, of one header in bytes. A larger one fails with InvalidRequest."""
HEADERS_BYTES_MAX = 1 * MIB
"""Most bytes of all headers of a record, names and values together. More fail with InvalidRequest."""
REQUEST_BYTES_MAX = 64 * MIB
"""Most bytes of record data in one request. A larger request fails with PayloadTooLarge. A process holds
whole requests in memory."""
IDEMPOTENCY_KEY_BYTES_MAX = 256
"""Largest idempotency key in bytes of UTF-8. A larger one fails with InvalidRequest. Shards store digests
only."""
TOPIC_NAME_BYTES_MAX = 255
"""Largest topic name in bytes. A longer one fails with InvalidRequest."""

# -- numbers and names in messages. A value outside is refused when the message is decoded ------------
MILLIS_MAX = 1 << 43
"""Largest time or duration in ms in a message: 278 years, or the year 2248 as a point in time. A larger value
makes the message invalid. In nanoseconds it fits into 63 bits."""
PID_MAX = (1 << 31) - 1
"""Largest process id in a message. A larger value makes the message invalid. System calls raise an error for
a number beyond a signed 32-bit integer."""
NAME_CHARS_MAX = 1_024
"""Most characters of a name in a message. More make the message invalid. It is above every limit on names, so
that a name that is too long reaches the check with the better error text."""

# -- frames -------------------------------------------------------------------------------------------
FRAME_BYTES_MAX = REQUEST_BYTES_MAX + 2 * MIB
"""Largest frame in bytes, header included. A larger one fails with PayloadTooLarge or is invalid. It has room
for the largest request plus the offsets of its columns, or for the largest record plus its key and
headers."""
DECOMPRESS_RATIO_MAX = 1_000
"""Largest ratio of decompressed to compressed bytes of a body. A larger one makes the frame invalid before
memory is allocated. It defends against decompression bombs."""

# -- rings. A full ring blocks its producer; no frame is dropped --------------------------------------
RING_BYTES_DEFAULT = 32 * MIB
"""Default of `run.ring_bytes` in bytes: size up to which a ring grows. A full ring blocks its producer."""
RING_BYTES_MIN = 64 * KIB
"""Smallest ring in bytes. A request for a smaller one fails with InvalidRequest. An ordinary frame must
fit."""
RING_BYTES_MAX = 1 << 30
"""Largest ring in bytes. A request for a larger one fails with InvalidRequest."""
COMPRESS_BYTES_MIN = 1 * KIB
"""Producers compress frames with at least this many bytes of record data, if the topic sets `compression`.
Smaller ones save less than the work costs."""
RING_BYTES_FIRST = 256 * KIB
"""Size of a client's first ring in bytes. It grows with use, up to `run.ring_bytes`. A container has only 64
MiB of /dev/shm by default, so rings must start small."""
RING_GROWTH = 8
"""Factor by which a producer grows a ring that was full: it requests a new ring of this many times the
size."""
RING_ROOM_FRACTION = 4
"""A ring above RING_BYTES_FIRST takes at most 1/4 of the free shared memory, so that other clients still find
space."""
RING_BYTES_PER_SETTLE_ENTRY = 64
"""Bytes of a ring for which it gets one settle entry, up to `run.settle_entries`. A frame takes at least 80
bytes, so a small ring has enough entries."""
RING_FRAME_FRACTION = 4
"""A frame above 1/4 of a ring's size is sent by socket, so that one frame can never block a ring."""
SETTLE_ENTRIES_DEFAULT = 16_384
"""Default and largest value of `run.settle_entries`: frames in flight on one ring. At the bound the producer
blocks."""
SETTLE_ENTRY_BYTES = 64
"""Size of one settle entry in bytes: eight 64-bit words, one cache line."""
RINGS_PER_SHARD_MAX = 1_024
"""Most rings to one shard. A further request fails with Throttled. A shard polls every ring when it drains
them."""

# -- commit batches -----------------------------------------------------------------------------------
COMMIT_BATCH_FRAMES_MAX = 8_192
"""Most frames of one commit batch. Further frames go into the next batch. It bounds the memory and the
latency of a batch."""
COMMIT_BATCH_BYTES_MAX = 8 * MIB
"""Most bytes of one commit batch. Further frames go into the next batch. It bounds the memory and the latency
of a batch."""
DRAIN_BYTES_PER_RING_MAX = 4 * MIB
"""Most bytes that one pass of a shard's loop copies out of one ring, so that a fast producer cannot starve
the others."""
FLUSH_INTERVAL_MS_DEFAULT = 100
"""Default of `wal.flush_interval_ms`: longest time in ms for which records of class `disk` stay unsynced."""
UNSYNCED_BYTES_MAX = 32 * MIB
"""Bytes of log of the classes `disk` and `memory` that may be unsynced. Beyond it the shard syncs, whatever
the time. It bounds the data that a power loss can take."""
INTAKE_REQUESTS_MAX = 4_096
"""Most appends in progress that a gateway holds for one shard, and most waiting requests for routers at a
scheduler. Beyond it requests fail with Throttled; under pressure, appends fail beyond half of it."""
INTAKE_BYTES_MAX = 4 * FRAME_BYTES_MAX
"""Most bytes of appends in progress that a gateway holds for one shard. Beyond it appends fail with
Throttled; under pressure, beyond half of it."""

# -- WAL files ----------------------------------------------------------------------------------------
WAL_HEADER_BYTES = 4_096
"""Size of the header of a WAL file in bytes: one page."""
WAL_FILE_BYTES_DEFAULT = 64 * MIB
"""Default of `wal.file_bytes`: size of a WAL file in bytes. When it is full, the shard starts the next
file."""
WAL_FILE_BYTES_MIN = 1 * MIB
"""Smallest value of `wal.file_bytes` and `wal.volatile_bytes` in bytes."""
CREATE_BYTES_MIN = 88
"""Smallest frame in bytes that creates a topic. Recovery divides lost bytes of log by it, to skip every topic
id that may have been assigned there."""
RECORDS_PER_BYTE_MAX = 250
"""Most records that one byte of log can contain: a record takes at least 4 bytes of a body, which is
compressed at most 1,000 times. Recovery skips this many seqs for each lost byte of log."""
FILL_CHUNK_BYTES = 1 * MIB
"""Step in bytes in which WAL files are allocated and filled with zeros."""
RECOVERY_READ_BYTES = 8 * MIB
"""Bytes that recovery and the compactor read from a log file at a time."""
MARK_CANDIDATES_MAX = 10_000
"""Places in a log file with an invalid header that recovery examines as the start of a chain mark. Payloads
can look like it. A file with more of them is taken to have marks, so it is damaged and not an unused file."""
MARK_SEARCH_BYTES_MAX = 64 * KIB
"""Longest frame that recovery takes for a chain mark in a file with an invalid header. Marks are shorter than
4 KiB but for those that follow a copy of many log files."""

# -- segments -----------------------------------------------------------------------------------------
SEGMENT_RECORDS_DEFAULT = 1_000_000
"""Default of `storage.segment_records`: most records of one segment. Beyond it a further segment is
created."""
SEGMENT_BYTES_DEFAULT = 64 * MIB
"""Default of `storage.segment_bytes`: size of one segment in bytes. Beyond it a further segment is
created."""
SEGMENT_AGE_MS_DEFAULT = 3_600_000
"""Default of `storage.segment_age_ms`: longest time in ms for which records stay in the log, 1 hour."""
OWN_SEGMENT_BYTES_DEFAULT = 1 * MIB
"""Default of `storage.own_segment_bytes`: a topic with fewer bytes in a checkpoint shares a segment. It
avoids one small file for each of many topics."""
SEALED_FRAME_BYTES = 256 * KIB
"""Size in bytes up to which small frames are merged in a segment. It suits sequential reads. Larger frames
would slow down reads of single records, which read and verify a whole frame."""
SEALED_FRAME_RECORDS = 1_024
"""Records up to which small frames are merged in a segment, for the same reason."""
HOT_SEGMENTS_DEFAULT = 4
"""Default of `cold.hot_segments`: newest segments of a topic that stay on the host."""
SNAPSHOTS_KEPT = 2
"""Snapshots of each shard that are kept. Log files are deleted only when all of them cover the files, so that
recovery survives a damaged snapshot."""
BACKUP_HOLD_S = 86_400
"""Longest time in s for which the engine deletes no segment because a backup copies them, 1 day. Then, or if
less than data.min_free_bytes is free, it deletes what it no longer needs: a backup must not fill the disk. It
then begins again with the next set of files, and fails after its last attempt."""
CHECKPOINT_ROWS_PER_REPLY = 512
"""Most topics whose state a shard hands over in one reply. The rest follows in further replies, so that a
checkpoint does not delay commits."""
DELETED_PER_LOCATE_BYTES = 256 * KIB
"""Most bytes of deleted seqs in one reply to a reader. A reader that gets beyond the reported part sends the
request again."""

# -- cold tier. Reads of data on the host never pass here ---------------------------------------------
COLD_RETRIES_MAX = 3
"""Retries of one request to an object store, within its timeout. Then the request fails with
ColdUnavailable."""
COLD_READ_THREADS = 8
"""Concurrent reads of the cold tier. With several threads one slow read does not delay the others."""
COLD_READS_QUEUED_MAX = 256
"""Reads of the cold tier that wait for a thread. A further one fails with Throttled."""
COLD_BLOCK_BYTES = 256 * KIB
"""Unit in bytes of the cache of cold data. A read is extended to whole blocks."""
MOVE_BACKOFF_S_MAX = 300.0
"""Longest backoff in s before a failed relocation is retried."""

# -- reclaimer and scrub ------------------------------------------------------------------------------
SHARED_SEGMENTS_MAX = 8
"""Shared segments of a shard. Beyond it the reclaimer merges the smallest ones, because a read of a small
topic may have to search each of them."""
SMALL_SEGMENTS_MAX = 8
"""Segments of one topic below a quarter of `storage.segment_bytes`. Beyond it the reclaimer merges them."""
SCRUB_EVERY_S = 3_600.0
"""Shortest interval in s between the starts of two passes of the scrub. Otherwise a small data set would be
read all the time."""
SCRUB_FINDINGS_MAX = 1_000
"""Most findings that a report of the scrub lists. Further ones are only counted."""
DISK_POLL_S = 1.0
"""Interval in s at which the reclaimer measures the free disk space, and at which shards read the result."""

# -- topics -------------------------------------------------------------------------------------------
TOPICS_MAX_DEFAULT = 100_000
"""Default of `limits.max_topics`. A further topic fails with Throttled."""
STALE_DUES_MAX = 1_024
"""Times in a shard's schedule of expiry that are in force for no topic. Above this number and one for each
topic, the schedule is built again."""
PRODUCERS_PER_TOPIC_MAX = 65_536
"""Producers that a topic remembers to detect retries. Beyond it the topic forgets the session producer with
the longest silence. Named producers are never forgotten: if the table has only named ones, a new producer is
refused."""
DEDUP_FRAMES_PER_PRODUCER = SETTLE_ENTRIES_DEFAULT
"""Latest frames of one producer whose retries a topic detects exactly. A producer may resend a whole ring, so
this is at least `run.settle_entries`."""
DEDUP_RUNS_PER_TOPIC_MAX = 16 * DEDUP_FRAMES_PER_PRODUCER
"""Entries in the histories of all producers of a topic together. Frames of one producer that follow each
other take one entry; producers that write in turns take one for each frame. Beyond it the topic forgets the
seqs of older frames, those of the producers with the longest silence first. It still recognises their
retries, and answers them without a seq. The latest frame of each producer keeps its seq. 262,144 entries take
30 MB of memory and at most 10 MB in a snapshot."""
DEDUP_RUNS_PER_CHECK = DEDUP_FRAMES_PER_PRODUCER
"""New entries after which a topic counts them. It bounds the work of one count for a write."""
IDEMPOTENCY_KEYS_PER_TOPIC = 65_536
"""Default of the topic setting `idempotency_max`: idempotency keys and dedup ids that a topic remembers.
Beyond it the entries that expire next are forgotten early, and counted."""
IDEMPOTENCY_KEYS_PER_TOPIC_MAX = 262_144
"""Largest value of `idempotency_max`. It costs about 80 MB of memory and 20 MB in a snapshot."""
DEDUP_IDS_PER_WRITE_MAX = 1_000
"""Most records with dedup ids in one write. More are refused. Their digests, 32 KB, are sent with the
frame."""
DEDUP_ID_BYTES_MAX = 4_096
"""Largest dedup id in bytes of UTF-8. A larger one fails with InvalidRequest. Only the digest is sent; the
bound detects payloads that are passed by mistake."""
HEAD_RESERVATION_MIN = 256
"""First step, in seqs, of the durable reservation of a topic's head. After a power loss the head jumps to the
reservation, so a small step skips few seqs."""
HEAD_RESERVATION_MAX = 1 << 24
"""Largest step, in seqs, of the reservation of a topic's head. The step grows fourfold while reservations are
used up within one flush interval, so that a fast topic needs few forced syncs."""
VOLATILE_BYTES_DEFAULT = 64 * MIB
"""Default of `wal.volatile_bytes`: memory in bytes for `ephemeral` records of one shard. Beyond it the oldest
file of them is evicted."""
SEQ_MAX = (1 << 63) - 1
"""Largest seq. A write beyond it is refused. Signed 64-bit integers contain it."""

# -- settings of topics and groups (ringlog/settings.py). A value outside is refused where it enters ---
DURATION_MS_MAX = 36_500 * 86_400_000
"""Largest duration in ms of a setting: 100 years. A larger value is refused. In nanoseconds it fits into 63
bits, and a time plus a duration fits in microseconds."""
COUNT_MAX = SEQ_MAX
"""Largest cap in records or bytes. A larger value is refused."""
DELIVERIES_MAX = 1_000_000
"""Largest `max_deliveries` of a queue or consumer group. A larger value is refused."""
INTERVAL_S_MIN = 0.01
"""Shortest interval or timeout in s of an engine setting. A shorter one is refused: it would keep a CPU
busy."""
PACE_BYTES_MAX = 1 << 40
"""Largest value in bytes per s of a `…_bytes_per_s` setting. A larger value is refused."""
CLAIM_JITTER_MS_MAX = 5_000
"""Largest `claim_jitter_ms` of a queue. A larger value is refused. Every claim may wait this long."""
PRIORITY_LEVELS_MAX = 256
"""Largest `priority_levels`. A larger value is refused: the priority column of a frame has one byte per
record."""
BANDS = 5
"""Priority bands of a scheduler, which serves them in the ratio 8:4:2:1:1."""
TOPIC_PRIORITY_MAX = 1_000
"""Largest absolute value of a topic's `priority`. A value outside is refused."""

# -- reads --------------------------------------------------------------------------------------------
READ_LIMIT_DEFAULT = 256
"""Records of one read if the call names no limit."""
READ_LIMIT_MAX = 1_000
"""Most records of one read. A larger limit is reduced to it."""
READ_AHEAD_RECORDS_MAX = 4_096
"""Most records that an iterator over single records reads ahead."""
READ_AHEAD_RECORDS_MIN = 16
"""Records that an iterator reads ahead after a page went stale before all its records were returned. It
doubles with each page that does not."""
READ_AHEAD_MS = 100
"""Time in ms for which a remote iterator returns records that it has read ahead. Then it checks at the
gateway whether records were deleted."""
READ_BYTES_DEFAULT = 1 * MIB
"""Bytes of one read if the call names no limit. A larger first record is returned anyway."""
READ_BYTES_MAX = 8 * MIB
"""Most bytes of one read. A larger limit is reduced to it. A larger first record is returned anyway."""
WAIT_MS_MAX = 30_000
"""Longest time in ms for which one request for records or jobs waits. The client repeats it for a longer
wait."""
READ_SLICE_MS_MAX = 5_000
"""Longest time in ms for which one Read of a client waits at the gateway, before the client repeats it. After
a restart of the gateway the read waits from the start. Shorter slices keep that short, but each follower of a
quiet topic costs the gateway one read for each slice."""
LIST_PAGE_DEFAULT = 100
"""Entries of one page of a list, for example of topics."""
LIST_PAGE_MAX = 1_000
"""Most entries of one page of a list. The client raises UsageError for a larger page; the engine reduces
it."""
EXTENTS_PER_LOCATE_MAX = 1_024
"""Most file ranges in one reply to a reader. A reader that gets beyond them sends the request again."""

# -- delivery. A slow consumer reads from storage; no record is dropped, and no writer waits ----------
NEWS_ROWS = 1 << 15
"""Latest publications of a shard in its news ring in shared memory. A scheduler that falls further behind
detects the overrun and rescans all topics."""
SCHEDULERS_MAX = 8
"""Largest `delivery.schedulers`. A larger value is refused."""
LINKS_PER_SCHEDULER_MAX = 4_096
"""Most clients that one scheduler serves. A further one fails with Throttled."""
SUBSCRIPTIONS_PER_LINK_MAX = 16_384
"""Most subscriptions of one client at one scheduler. A further one fails with Throttled."""
FEEDS_PER_SUBSCRIPTION_MAX = 100_000
"""Most topics of one subscription. The client raises UsageError beyond it; the scheduler replies
Throttled."""
FEEDS_PER_SCHEDULER_MAX = 1_000_000
"""Most feeds of one scheduler. A further one fails with Throttled. It bounds the memory of a scheduler."""
FEEDS_PER_MESSAGE_MAX = 1_024
"""Most feeds in one message. Clients split a larger subscription into several messages."""
CREDIT_DEFAULT = 32
"""Default credit of a subscription: grants that it may hold at a time."""
CREDIT_MAX = 4_096
"""Largest credit of a subscription. A larger value is refused."""
LINK_SILENCE_MS = 30_000
"""Time in ms without a message after which a scheduler drops a link and its subscriptions. Clients send a
keepalive three times as often."""
WATCH_LIMIT_DEFAULT = 4_096
"""Records of one topic that a watch reads in one grant, if the call names no limit. Then other topics are
served."""
WATCH_LIMIT_MAX = 100_000
"""Most records of one topic that a watch reads in one grant. A larger limit is reduced to it."""
SHARED_FRAMES_BYTES_MAX = 16 * MIB
"""Bytes of log frames that the watches of one client share in a cache. The oldest are evicted first."""
LOG_MAP_BYTES_MAX = 32 * MIB
"""Bytes of the cache in which readers of one process remember the positions of topics in log files. The least
recently used entries are evicted, and found again when needed."""
AGING_TICK_MS = 50
"""Interval in ms at which a scheduler raises waiting feeds to higher bands and retries links that could not
accept messages."""
LAG_CHECKS_MAX = 4_096
"""Subscriptions and feeds that one check for lagging consumers examines. Links that were silent longest are
examined first; the rest is not checked."""
LAG_ANNOUNCED_MS = 5_000
"""Lag in ms from which a consumer is reported: by its watch (Lagged) when it reads, and in any case by a
warning in the log and a problem in `status`."""
LAGS_PER_MESSAGE_MAX = 256
"""Most consumers in one reply about lag. Those with the greatest lag are listed."""
DURABLE_POLL_MS = 20
"""Interval in ms at which a scheduler reads a shard's durable mark while a strong subscription waits for
it."""
GRANTS_PER_MESSAGE_MAX = 4_096
"""Most grants in one message to a link. Further ones follow in the next message. A client that returns more
in one message gets InvalidRequest: each row is work for the scheduler and the gateway."""
GRANT_RINGS_MAX = 64
"""Local clients to which a scheduler sends grants through shared memory. Further clients get messages by
socket."""
GRANT_RING_ROWS = 4_096
"""Grants in such a ring that the client has not read. A client that falls further behind detects the overrun,
and its grants are sent again."""
CALL_RINGS_MAX = 256
"""Local clients whose job requests a shard receives through shared memory. Further clients use sockets."""
CALL_RING_BYTES = 32_768
"""Bytes of unread requests, and of unread replies, in such a ring. A message that does not fit is sent by
socket."""
CALL_BYTES_MAX = 24_576
"""Largest message in such a ring in bytes. It fits a thousand jobs by seq and lease token, with some reserve.
A larger message is sent by socket."""
CALL_RING_OPEN_TIMEOUT_S = 10
"""Time in s after which a shard removes a ring that its client has not opened."""
CALL_RING_POLL_MS = 100
"""Interval in ms at which a shard checks one of these rings, in turn, for a client that has exited."""
HINTS_PER_TOPIC = 4
"""Latest log positions of a topic that a scheduler sends with a grant. A reader that is further behind finds
its position itself."""
SLOTS_PER_SCAN_MAX = 4_096
"""Topic slots that a scheduler reads in one pass of its loop, so that a rescan of all topics does not delay
grants."""
DURABLE_WAITS_MAX = 65_536
"""Publications of a shard that wait for its durable mark. Beyond it the scheduler drops them and rescans the
topics, which yields the same state with one entry for each topic."""
REFRESHES_PER_TICK_MAX = 8_192
"""Waiting feeds whose band is computed again in one tick, after their topic was consumed or configured. The
rest follows in the next ticks."""
WATCHED_SLOTS_MAX = 256 * 4_096
"""Largest number of topic slots of a shard. A subscription with a slot number beyond it is refused."""

# -- governor. Under pressure latency grows, then new work is refused; accepted work is never dropped ---
GOVERNOR_SAMPLE_MS = 100
"""Interval in ms at which a governor measures pressure."""
GOVERNOR_LATENCY_MS = 5
"""Mean time in ms from news to grant that counts as pressure 1."""
GOVERNOR_READY_PER_SCHEDULER = 8
"""Number of topics per scheduler that counts as pressure 1. Counted are topics that wait for a grant although
one could be sent."""
GOVERNOR_STALE_MS = 3_000
"""Age in ms of a process's last heartbeat from which its published pressure counts as 0."""
COALESCE_MS_MAX = 20
"""Longest time in ms for which the wake-ups of one topic are coalesced under pressure."""
BATCH_WINDOW_US_MIN = 500
"""Shortest batch window in µs: time for which a shard under pressure lets frames collect in the rings."""
BATCH_WINDOW_US_MAX = 10_000
"""Longest batch window in µs. It bounds the latency that the governor adds to a write."""
BATCH_WINDOW_RINGS_MIN = 4
"""A shard uses the batch window only if its previous batch came from at least this many rings. With fewer
rings the wait costs more than it saves."""
BATCH_WINDOW_POLL_US = 500
"""Interval in µs at which a shard polls its rings during a batch window."""
EARLY_WAKEUP_BYTES_MAX = 16_384
"""Bytes of frames from one ring up to which sleeping schedulers are woken before the news are written. For
more bytes, or several rings, throughput matters more than latency."""
PRESSURE_RETRY_MS = 1_000
"""`retry_after_ms` of requests that are refused because of pressure or a full intake."""

# -- routers. Forwarding runs after writes and delays none of them ------------------------------------
ROUTERS_MAX_DEFAULT = 10_000
"""Default of `limits.max_routers`. A further router fails with Throttled."""
ROUTER_HOPS_MAX = 8
"""Routers that a record may pass. Then it is not forwarded again, which ends a permitted cycle."""
ROUTER_NAME_BYTES_MAX = 255
"""Largest name of a router in bytes. A longer one fails with InvalidRequest."""
ROUTER_FILTER_BYTES_MAX = 4 * KIB
"""Largest filter of a router in bytes. A larger one fails with InvalidRequest."""
ROUTE_RECORDS_MAX = 1_024
"""Records of a source in one forward request, so that a backlog does not delay other routers."""
ROUTE_BYTES_MAX = 1 * MIB
"""Bytes of payload in one forward request. A larger record is sent alone."""
ROUTE_ROWS_MAX = 1_024
"""Destinations in one forward request to a shard. Further ones go into the next request."""
FORWARD_REQUESTS_MAX = 64
"""Forward requests of a scheduler that are in flight. At the bound no further one begins."""
ROUTE_PAUSE_MS_MIN = 10
"""First backoff in ms of a router whose destination refuses copies."""
ROUTE_PAUSE_MS_MAX = 1_000
"""Longest backoff in ms of such a router. The backoff doubles with each refusal."""
ROUTER_SOURCES_OPEN_MAX = 256
"""Sources whose files a scheduler keeps open. The least recently used one is closed."""
READ_CATCH_UP_MS = 1_000
"""Longest time in ms for which a reader waits for the routers into its topic to catch up. Then it reads the
records that exist."""
ROUTER_SETTLE_MS_MAX = 2_000
"""Longest wait in ms of one request for a router to catch up. It is shorter than the silence after which a
client distrusts a connection. The client repeats the request for a longer wait."""
ROUTERS_POLL_S = 30.0
"""Interval in s at which a scheduler lists all routers again, in case an announcement was lost. At this
interval it also repeats requests to a shard that was given up."""

# -- topics with expire_unused_ms, which are deleted when no client uses them -------------------------
EXPIRE_UNUSED_MS_MIN = 1_000
"""Smallest `expire_unused_ms` in ms. A smaller value is refused. A client renews its use in a third of this
time, also on a busy host."""
TOPIC_KEEPALIVES_PER_PERIOD = 3
"""Renewals that a follower of such a topic sends within `expire_unused_ms`, so that two may be lost."""
IDLE_CHECKS_PER_PERIOD = 4
"""Checks of such a topic within `expire_unused_ms`. A topic may be deleted a quarter of that time late, and
never early."""
IDLE_CHECK_MS_MIN = 250
"""Shortest interval in ms between two checks of one topic."""
IDLE_CHECK_MS_MAX = 60_000
"""Longest interval in ms between two checks of one topic."""
IDLE_CHECK_PAUSE_MS = 100
"""Shortest time in ms between two passes of checks, so that one pass checks many topics together."""
IDLE_CHECKS_MAX = 512
"""Topics in one pass of checks. Their control frames fit into the space that a pass of the loop reserves.
With more topics, all of them are deleted later."""
IDLE_CHECK_LATE_MS = 250
"""A check that is later than this, in ms, was delayed, and renewals may have been delayed as well. The delay
does not count as idle time."""

# -- queues. A worker that wants more jobs sends the request again ------------------------------------
CLAIM_JOBS_MAX = 1_000
"""Most jobs of one claim. The engine reduces a larger number to it; the client raises UsageError."""
JOBS_PER_REQUEST_MAX = 1_000
"""Most jobs of one ack, nack or extension. More fail with BatchTooLarge, or with UsageError in the client."""
HOT_TAIL_BYTES = 16 << 20
"""Memory in bytes for the newest records of a shard's queues and grouped topics. Older records are read from
the log."""
JOB_SIZE_BLOCK = 1_024
"""Jobs whose sizes a shard queries together. A power of two, because seqs are split by shifts."""
JOB_SIZE_BLOCKS_AT_ONCE = 16
"""Blocks that the jobs of one ack may span for such a query. Beyond it the sizes of the single jobs are
queried."""
JOB_SIZE_BLOCKS_MAX = 256
"""Blocks of sizes in a shard's cache, 1 MiB. The least recently used one is evicted."""
INLINE_BYTES_MAX = 16_384
"""Most bytes of payloads in the reply to a claim through a call ring. With larger payloads the client reads
all jobs of the claim from the files."""
INLINE_JOB_BYTES_MAX = 4_096
"""Mean job size in bytes above which a shard does not prefetch jobs."""
INLINE_AHEAD_MIN = 16
"""Jobs that must follow a claim for a prefetch, because only reads of many jobs together are cheaper."""
INLINE_WINDOW_BYTES = 65_536
"""Bytes of log that one prefetch reads."""
INLINE_BLOCK_BYTES_MAX = 1_048_576
"""Most bytes of frames in one prefetched block. A window contains at least one frame, which may be large; a
larger block is not kept."""
INLINE_WINDOWS_PER_CLAIM = 2
"""Windows that a shard reads for one claim. If a queue's jobs are further apart, its clients read them."""
INLINE_PAUSE_CLAIMS = 256
"""Claims of a queue without prefetch after a prefetch was of no use."""
INLINE_QUEUES_MAX = 16
"""Queues for which a shard prefetches jobs, with two blocks each. The least recently used one is dropped."""
LEASE_MS_MIN = 100
"""Shortest lease in ms. A shorter one is refused."""
LEASE_MS_MAX = 86_400_000
"""Longest lease in ms, 1 day. A longer one is refused. A worker that needs more time extends its lease."""
BACKOFF_MAX_MS_DEFAULT = 60_000
"""Default of `backoff_max_ms` of a queue or consumer group: longest backoff in ms of a returned job."""
NACK_DELAY_MS_MAX = 86_400_000
"""Largest delay in ms of a nack, and largest `backoff_ms`: 1 day. A larger value is refused."""
WAITING_CLAIMS_MAX = 16_384
"""Claims that wait in one shard. A further one fails with Throttled."""
REPLY_CACHE_REPLIES_MAX = 4_096
"""Latest replies about jobs that a shard keeps for retries of lost replies. Beyond it the oldest is dropped,
and its retry counts as a new request."""
REPLY_CACHE_ROWS_MAX = 65_536
"""Runs and seqs in all these replies together. Beyond it the oldest reply is dropped."""
CANCELLED_CLAIMS_MAX = 4_096
"""Latest cancelled claims that a shard remembers, in case a claim arrives after its cancellation. Beyond it
the oldest is dropped, and its claim counts as a new one."""
EXPIRED_CLAIMS_MAX = 16
"""Consecutive claims of a client whose jobs had all expired when they were read. Then the call returns no
job."""
CLAIM_SLICE_MS_MAX = 2_000
"""Longest time in ms for which one claim of a client waits in a shard, before the client repeats it. A worker
that died meanwhile gets no job after that. It is shorter than the silence after which a client distrusts a
connection."""
DEAD_LETTERS_PER_CLAIM_MAX = 1_000
"""Jobs beyond `max_deliveries` that one claim marks as exhausted. The next claim continues, so that no claim
takes long."""

QUEUES_SAMPLED_MAX = 1_000
"""Queues that a shard counts for the board in one interval. With more queues the sums on the board are
older."""
GROUPS_SAMPLED_MAX = 256
"""Consumer groups with their members that a shard counts for the board in one interval. With more groups the
sums are older."""
QUEUE_SAMPLE_MS = 1_000
"""Interval in ms of these counts. It is not shorter than the heartbeat, so that it wakes no sleeping
shard."""
DEAD_LETTER_TOPICS_MAX = 64
"""Topics that a client follows from dead-letter topic to dead-letter topic to find a cycle."""
DEAD_LETTER_REASON_BYTES_MAX = 256
"""Bytes of the reason of a rejected job that are kept: its first line, cut to this length."""
WORKERS_WATCHED_MAX = 1_024
"""Processes on the host whose death ends their leases and waiting claims at once. Those of others expire."""
LINKS_MAX = 65_536
"""Processes with claims that a shard can distinguish in one queue or group. Beyond it processes without a
lease are forgotten. If all have leases, those of a further one last until they expire, even if it dies."""
JITTER_CLAIM_JOBS_MAX = 65_536
"""Jobs that are shared among claims which a queue with `claim_jitter_ms` collected. It is enough for one job
for each of WAITING_CLAIMS_MAX. Beyond it shares are smaller, and a claim may get none."""
QUEUE_AGES_MAX = 4_096
"""Enqueue times that a queue remembers to know the age of its jobs. Beyond it their resolution is halved. A
job may then appear older, by less than 1/2,000 of the oldest job's age."""
DURABLE_LEASES_MAX = 80_000
"""Leased, delayed and returned jobs of a queue with durable leases. At the bound no new job is delivered
until some are settled; returned jobs still are. It bounds the leases in a topic's row of a snapshot."""
DURABLE_LEASE_BYTES = 53
"""Most bytes of one run of such jobs in a snapshot."""
DURABLE_HOLDERS_MAX = 4_096
"""Nodes that hold jobs of such a queue at a time. A further node gets no job until another one holds none. A
snapshot stores as many processes."""
DURABLE_REASONS_MAX = 1_024
"""Jobs of such a queue whose failure reason survives a restart of the shard. The reasons of other jobs are
lost."""
RUNS_PER_CHANGE_MAX = 1_000
"""Most runs in one log record for leases of a worker that has exited. Further runs go into further log
records."""
DURABLE_CHANGE_BYTES_MAX = 64 * KIB
"""Most bytes of one log record for such a queue: a thousand runs or jobs, with the skipped ones."""
DURABLE_RETRY_MS = 1_000
"""Interval in ms at which claims that wait for such a queue, or for expired jobs to be removed, are retried
while nothing can be logged."""
QUEUE_READY_INSTANTS_MAX = 1_024
"""Times at which delayed jobs of a queue became ready recently. Beyond it the two oldest are merged, and a
job is promoted slightly later."""
WAIT_WINDOW_MS = 60_000
"""Window in ms of a queue's wait statistics. They cover the current window and the one before."""
DEAD_LETTER_REASONS_MAX = 65_536
"""Jobs of a queue, or records of a group, whose last failure reason is kept. Beyond it the oldest reasons are
dropped."""
GROUP_REASONS_SAVED_MAX = 32
"""Rejected records of a group whose reason is in a snapshot while they are not moved. The log after the
snapshot has the reasons of later ones."""
DEAD_LETTERS_POLL_MS = 1_000
"""Interval in ms at which scheduler 0 checks for exhausted jobs. It is not shorter than the heartbeat, so
that it wakes no sleeping process."""
DEAD_LETTERS_RESCAN_S = 30.0
"""Interval in s at which scheduler 0 queries exhausted jobs without a notice, in case one was lost."""
DEAD_LETTERS_PER_MOVE = 256
"""Dead letters in one message, also bounded by DEAD_LETTERS_BYTES_PER_MOVE. At least one is sent."""
DEAD_LETTERS_BYTES_PER_MOVE = 1 * MIB
"""Bytes of dead letters in one message. A larger dead letter is sent alone."""
DEAD_LETTERS_READ_BYTES = 256 * MIB
"""Memory in bytes for jobs and dead letters that are read to be moved, if each has the largest record
size."""
DEAD_LETTERS_PAUSE_S_MAX = 30.0
"""Longest backoff in s before a dead-letter topic that refuses is tried again. The backoff starts at 0.25 s
and doubles."""

# -- `ringlog worker` ---------------------------------------------------------------------------------
WORKER_PROCESSES_MAX = 1_024
"""Most processes of one worker. A larger `--concurrency` is refused."""
WORKER_REASON_CHARS_MAX = 8_192
"""Characters of a job's failure reason, and of its traceback, that leave the process. The end is kept."""
WORKER_UNSETTLED_MAX = 1_000
"""Jobs of a worker whose outcome the engine has not confirmed. At the bound it claims no more."""
WORKER_CLAIM_MS = 500
"""Longest wait in ms of a worker's claim, and of its loop for a change. Then it looks at its state again."""
WORKER_RESTART_MS_MIN = 100
"""First backoff in ms before a process of a worker that did not start is started again."""
WORKER_RESTART_MS_MAX = 30_000
"""Longest such backoff in ms. It doubles with each failure."""
WORKER_EXIT_S = 5.0
"""Time in s after which a worker kills a process that it asked to end."""
WORKER_SETTLE_S = 10.0
"""Time in s for which a stopping worker waits for the engine to confirm the last outcomes. Then the leases of
these jobs expire."""
WORKER_CLOSE_S = 1.0
"""Time in s for which a stopping worker waits in each of its last steps: after a second signal for the last
outcomes, and after the first one for the undoing of its claim. The engine undoes it in any case when the
process has ended."""

# -- consumer groups ----------------------------------------------------------------------------------
GROUPS_PER_TOPIC_MAX = 64
"""Most consumer groups of a topic. A further one fails with Throttled."""
GROUP_NAME_BYTES_MAX = 255
"""Largest name of a consumer group in bytes. A longer one fails with InvalidRequest."""
GROUP_PENDING_MAX = 100_000
"""Pending records of a group, and largest `max_in_flight`. At the bound no new record is delivered until some
are acked; returned records still are."""
GROUP_PENDING_PER_TOPIC_MAX = 800_000
"""Pending records of all groups of a topic together, with the same effect. It bounds the groups in a topic's
row of a snapshot."""
GROUP_ENTRY_BYTES = 56
"""Most bytes of one run of pending records in a snapshot."""
GROUP_MEMBERS_MAX = 1_024
"""Members of a group. Beyond it the member without leases that was silent longest is removed. If every member
holds leases, a new one fails with Throttled."""
GROUP_MEMBER_SILENT_MS = 120_000
"""Time in ms without a request after which a member without leases is removed."""
LEASE_CALLS_PER_NODE_MAX = 64
"""Latest requests of one node whose result is kept with logged leases, for retries also after a restart of
the shard. Beyond it the node's oldest is dropped, and its retry counts as a new request. The bound is per
node, so that a busy worker does not affect others."""
GROUP_DEAD_LETTERS_PER_MOVE = LEASE_CALLS_PER_NODE_MAX // 2
"""Most dead letters of a group in one redrive request. More fail with BatchTooLarge. Retries of all of them
are detected."""
LEASE_CALLS_KEPT_MAX = 2_048
"""Such results of all nodes together. Beyond it the oldest is dropped."""
LEASE_CALL_BYTES = 64
"""Most bytes of such a result in a snapshot, without its node, and without 9 bytes for each of its
numbers."""
LEASE_CALL_ROWS_KEPT_MAX = 16_384
"""Numbers in all these results together. Beyond it the oldest result is dropped."""
GROUP_CHANGE_BYTES_MAX = 64 * KIB
"""Most bytes of one log record of a group: a thousand runs or single records, with the skipped ones."""
PENDING_ROWS_MAX = 1_000
"""Most entries of a pending list in one reply. Clients request further ones."""
CHECKPOINT_REPLY_BYTES = 1 * MIB
"""Most bytes of topic states in one reply to a checkpoint. The rest follows in the next replies, also the
rest of a single row: the state of one topic may be larger than a message."""
AUTO_COMMIT_MS_DEFAULT = 5_000
"""Interval in ms at which a reader of a stream-mode group commits its position."""

# -- messages -----------------------------------------------------------------------------------------
ENVELOPE_BYTES_MAX = 1 * MIB
"""Largest message in bytes without attached frames. A larger one is refused."""
SOCKET_COPY_BYTES_MAX = 32_768
"""Messages up to this size in bytes are copied into a socket. Larger ones are passed without a copy, which
has a fixed cost."""
ENVELOPE_PARTS_MAX = 8
"""Most parts of a message. More are refused."""
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX + ENVELOPE_BYTES_MAX
"""Largest part of a message in bytes. ZeroMQ closes the connection of a peer that sends a larger one."""
SOCKET_HWM = 4_096
"""High-water mark of sockets in messages, in both directions. At the bound a send fails instead of
blocking."""

# -- gateway ------------------------------------------------------------------------------------------
GATEWAY_REQUESTS_PER_CONNECTION_MAX = 1_024
"""Requests in progress of one connection to a gateway. A further one fails with Throttled."""
GATEWAY_REQUESTS_PER_KEY_MAX = 8_192
"""Requests in progress of all connections with one key. A further one fails with Throttled."""
GATEWAY_BYTES_PER_CONNECTION_MAX = 2 * FRAME_BYTES_MAX
"""Bytes of attached frames of one connection that are not settled. A further frame fails with Throttled."""
GATEWAY_BYTES_MAX = 8 * FRAME_BYTES_MAX
"""Bytes of attached frames of all connections of a gateway that are not settled. A further frame fails with
Throttled."""
GATEWAY_OUTBOX_BYTES_MAX = 32 * MIB
"""Bytes of replies that a gateway keeps for a connection that reads slowly. A large reply beyond it is
replaced by NotReady, after which the client repeats its request; large grants by SubscriptionsLost."""
GATEWAY_OUTBOX_KEPT_BYTES = 4 * KIB
"""Largest reply in bytes that is kept beyond GATEWAY_OUTBOX_BYTES_MAX, such as the ack of an append."""
GATEWAY_OUTBOX_RESERVE_BYTES = GATEWAY_OUTBOX_KEPT_BYTES * GATEWAY_REQUESTS_PER_CONNECTION_MAX
"""Bytes of small replies that are kept beyond GATEWAY_OUTBOX_BYTES_MAX: those to all requests in progress.
Beyond it the client counts as disconnected: its requests in progress get no reply, and its subscriptions
end."""
GATEWAY_SUBSCRIPTIONS_MAX = SUBSCRIPTIONS_PER_LINK_MAX
"""Most subscriptions of all clients of a gateway. A further one fails with Throttled. To a scheduler they are
subscriptions of one client."""
GATEWAY_SUBSCRIPTIONS_PER_CONNECTION_MAX = 1_024
"""Most subscriptions of one connection to a gateway. A further one fails with Throttled."""
GATEWAY_SUBSCRIPTIONS_PER_KEY_MAX = 4_096
"""Most subscriptions of all connections with one key. A further one fails with Throttled. One key must not
take those of the others."""
GATEWAY_FEEDS_PER_KEY_MAX = 200_000
"""Most feeds of all connections with one key. Further ones fail with Throttled. It leaves feeds of each
scheduler to other keys and to local clients."""
GATEWAY_SEND_HWM = 16
"""Replies for one connection that ZeroMQ queues, before further ones wait in the gateway's outbox."""

# -- the HTTP gateway ---------------------------------------------------------------------------------
HTTP_PROCESSES_MAX = 16
"""Largest `http.processes`. A larger value is refused."""
HTTP_COUNTS_MAX = 1_024
"""Most pairs of a route and a status whose requests an HTTP gateway counts. Requests of further pairs are not
counted."""
HTTP_SIBLING_MS_MAX = 2_000
"""Longest time in ms for which a request waits for other HTTP gateways of its engine. A gateway that is being
restarted is usually back before that. Then the request is answered with 503."""
HTTP_SIBLING_REQUESTS_MAX = 1_024
"""Requests in progress from one HTTP gateway to another, and those that a gateway answers. A further one is
answered with 503."""
HTTP_SETTLED_SEQS_MAX = 65_536
"""Settled jobs that one notice to another HTTP gateway names. Work streams there learn of further ones after
WORK_STREAM_CHECK_MS."""
HTTP_SETTLED_ROWS_MAX = 1_024
"""Nodes and queues that such a notice names. The same holds for further ones."""
HTTP_SESSION_GIVEN_MS = 60_000
"""Longest time in ms for which an HTTP gateway keeps a watch session that it has given to another one without
being told that it arrived. Then a session that has not arrived is lost."""
HTTP_SESSIONS_GIVEN_MAX = 1_000
"""Most such sessions. Beyond it the oldest is dropped."""
HTTP_SESSION_HOPS_MAX = 2 * HTTP_PROCESSES_MAX
"""HTTP gateways that are asked in turn for a watch session that moves meanwhile. Then the request is answered
with 503."""
HTTP_SESSIONS_MOVED_MAX = 100_000
"""Watch sessions of which an HTTP gateway remembers to which other one they have moved. Beyond it the oldest
is forgotten."""
HTTP_SESSIONS_RENEWED_MS = 60_000
"""Interval in ms at which an HTTP gateway tells the makers of its watch sessions that it has them. The makers
remember it for WATCH_SESSION_TTL_MS."""
HTTP_SESSIONS_PER_NOTICE_MAX = 1_000
"""Watch sessions in one such notice. Further ones follow in the next notice."""
HTTP_CONNECTIONS_DEFAULT = 20_000
"""Default of `http.max_connections`. Further connections wait in the queue of the listening socket."""
HTTP_BACKLOG = 1_024
"""Connections that the kernel queues for the HTTP gateway. Further ones are refused by the kernel."""
HTTP_HEADER_BYTES_MAX = 65_536
"""Largest head of a request in bytes. A larger one is answered with 431."""
HTTP_HEADER_MS_MAX = 10_000
"""Longest time in ms in which the head of a request must arrive. Then the connection is closed."""
HTTP_BODY_S_MAX = 30.0
"""Longest time in s in which the body of a request must arrive. Then it is answered with 408."""
HTTP_DISCARD_S_MAX = 5.0
"""Longest time in s for which the rest of a body without a reader is awaited after the answer. Then the
connection is closed."""
HTTP_DISCARD_BYTES_MAX = 64 << 20
"""Most bytes of such a body that are taken off the connection. Then it is closed."""
HTTP_GZIP_BYTES_MIN = 1_024
"""Smallest reply in bytes that is compressed for clients that accept gzip."""
HTTP_GZIP_INLINE_BYTES_MAX = 65_536
"""Largest reply in bytes that is compressed in the event loop. A larger one is compressed in a thread."""
HTTP_REQUEST_MS_MAX = 30_000
"""Longest time in ms that a request waits for the engine, without its own `wait_ms`."""
HTTP_WAIT_MS_MAX = 30_000
"""Largest `wait_ms` of a request; larger values are reduced."""
HTTP_NESTING_MAX = 128
"""Deepest nesting of a JSON body. A deeper one is refused."""
HTTP_PATH_CHARS_KEPT = 512
"""Longest path whose route the HTTP gateway remembers."""
HTTP_PATHS_MAX = 1_024
"""Most paths whose routes the HTTP gateway remembers. Then it forgets them all."""
HTTP_META_KEYS_MAX = 64
"""Most keys of the meta of a record that is written over HTTP."""
HTTP_STATUS_MS_MAX = 2_000
"""Longest time in ms for which metrics wait for the supervisor. Then they only have shared memory."""
HTTP_STATUS_REUSE_MS = 500
"""Time in ms for which the HTTP gateway reuses a status of the engine for metrics."""
HTTP_TOPIC_METRICS_REUSE_MS = 5_000
"""Time in ms for which the HTTP gateway reuses the numbers of single topics for metrics."""
HTTP_TOPIC_METRICS_MAX = 1_000
"""Most topics with metrics of their own: those that were written to last."""
HTTP_TOPIC_METRICS_LISTED_MAX = 10_000
"""Most topics that are listed to find those. The first ones in the order of their names."""
HTTP_TOPIC_METRICS_PAGE = 100
"""Topics that a shard lists at once for metrics: it serves other requests in between."""
HTTP_QUEUE_METRICS_MAX = 200
"""Most queues whose jobs are counted for metrics: those that were written to last."""
HTTP_LANES_MAX = 8_192
"""Most topics for which the HTTP gateway keeps a lane of writes. Idle ones are forgotten first."""
HTTP_LANE_PUSHES_MAX = 2
"""Most pushes of one lane in flight. Writes that arrive meanwhile travel together with the next push."""
HTTP_WRITE_BYTES_MAX = 8 * FRAME_BYTES_MAX
"""Most bytes of writes of all lanes that are not settled. Further writes are refused with Throttled."""
HTTP_WORKERS_MAX = 1_024
"""Most pairs of a topic and a node whose open files and settings the HTTP gateway keeps between claims. The
least recently used pair is dropped, and opened again by its next claim."""
HTTP_REDRIVE_MAX = 10_000
"""Most dead letters that one redrive over HTTP moves. The client sends the request again for more."""
FEED_IDLE_MS = 1_000
"""Time in ms after which a feed without subscribers that keep up closes its files."""
WORK_STREAM_HEARTBEAT_MS = 15_000
"""Longest silence in ms of a work stream. Then it sends a comment."""
WORK_STREAM_CHECK_MS = 1_000
"""Interval in ms at which a work stream asks the engine which of its jobs are still leased. Settlements over
HTTP are known at once."""
WATCH_SESSIONS_DEFAULT = 10_000
"""Default of `http.max_watch_sessions`."""
WATCH_SESSION_TTL_MS = 300_000
"""Time in ms after which a watch session without a stream is forgotten."""
WATCH_TOPICS_MAX = 256
"""Most topics of one watch session. More are refused."""
SSE_CONNECTIONS_DEFAULT = 10_000
"""Default of `http.max_sse_connections`."""
SSE_CONNECTIONS_PER_KEY_DEFAULT = 1_000
"""Default of `http.max_sse_connections_per_key`."""
INFLIGHT_PER_KEY_DEFAULT = 1_000
"""Default of `http.max_inflight_per_key`."""
STREAM_STALL_S_MAX = 30.0
"""Longest time in s in which a stream accepts no byte. Then its connection is ended."""
WEB_SOCKET_QUEUE_MAX = 4
"""Messages that wait for the socket of one WebSocket. Beyond it the connection gets no further frame and its
commands wait. Records are read again from storage when there is room."""
STREAM_BUFFER_BYTES_MAX = 512 * KIB
"""Bytes of the event streams of one connection that its client has not acknowledged. Beyond it the gateway
sends them no further frame. It reads the next one from storage when the client has caught up. Streams of
other connections do not wait. Over HTTP/2 those of the same one do."""
STREAM_FORGIVEN_BYTES_MAX = 16 * MIB
"""Bytes of one connection that may be unread and not counted, since its client has reset streams or responses
and nothing tells how much of them it had read. Beyond it they count, and the connection ends if it stalls."""

# -- processes ----------------------------------------------------------------------------------------
SHARDS_MAX = 64
"""Largest `wal.shards`. A larger value is refused."""
PROCESSES_MAX = 128
"""Most processes of an engine, and process slots on the board."""
HEARTBEAT_INTERVAL_MS = 1_000
"""Longest interval in ms between two heartbeats of a process."""
STUCK_AFTER_S_MIN = 3.0
"""Smallest `supervisor.stuck_after_s` in s. A smaller value is refused. Three heartbeats may be late."""
STUCK_AFTER_S_DEFAULT = 60.0
"""Default of `supervisor.stuck_after_s`: time in s without progress after which a process is replaced. It is
longer than the slowest acceptable sync."""
DRAIN_S_DEFAULT = 10.0
"""Default of `supervisor.drain_s`: time in s for each stage of an orderly stop, after which its processes are
killed."""
STOP_CHECKPOINT_SHARE = 0.5
"""Fraction of `supervisor.drain_s` in which a stop may still make checkpoints. Then it ends without."""
STOP_CHECKPOINT_BYTES_MIN = 1 * MIB
"""Bytes of a shard's log below which a stop makes no checkpoint. Recovery replays them in a few
milliseconds."""
PASS_END_S = 1.0
"""Time in s for which a stopping compactor waits for the current step of its pass. Then it exits without."""
INTAKE_END_S = 2.0
"""Time in s for which a stopping shard accepts frames from rings that do not get empty. Producers send the
rest to the next engine."""
GATEWAY_DRAIN_SHARE = 0.5
"""Fraction of `supervisor.drain_s` for which a stopping gateway waits for replies of shards."""
SECOND_SIGNAL_S = 1.0
"""Time in s within which a second signal to stop counts as the same request. Launchers often signal a process
and its group, or pass on a signal that a terminal sent to both."""
BACKGROUND_DRAIN_S = 3.0
"""Time in s after which a stop kills reclaimer and relocator. At the lowest priority they may never get a CPU
to end by themselves. No data is lost."""
ORPHAN_DRAIN_S = 3.0
"""Time in s after which a draining process exits if its supervisor is dead. No other process would end it,
and the next engine waits for it."""
RESTART_MAX_DEFAULT = 5
"""Default of `supervisor.restart_max`: a process with more deaths in the window is given up."""
RESTART_WINDOW_S_DEFAULT = 60.0
"""Default of `supervisor.restart_window_s`: length of that window in s."""
RESTART_BACKOFF_MS_MIN = 20
"""First backoff in ms of a process that dies twice within 5 s."""
RESTART_BACKOFF_MS_MAX = 5_000
"""Longest backoff in ms of such a process. It doubles with each death."""
POISON_CRASHES = 2
"""Crashes of a shard during one request, after which its next incarnation refuses that request with Internal.
The supervisor allows more restarts than that, so the shard is not given up first."""
POISON_CRASHES_REMEMBERED_MAX = 64
"""Latest crashes of a shard whose request is remembered."""
READ_ONLY_PROBE_MS_MIN = 1_000
"""First interval in ms at which a read-only shard checks whether its directory is writable again."""
READ_ONLY_PROBE_MS_MAX = 5_000
"""Longest such interval in ms. It doubles with each check. A directory that only seems writable costs the
readers a restart each time, so checks must be rare."""
DESCRIPTORS_MIN = 64
"""Open files that the engine's processes must be allowed. With a lower limit the start is refused, because a
shard could not open its files."""
DESCRIPTORS_RESERVED = 32
"""Free file descriptors below which a process stops accepting connections, until twice as many are free. The
rest is for its files, and for connections that arrive between two checks."""
DESCRIPTORS_CHECK_MS = 3
"""Interval in ms at which a process with few free descriptors counts them."""
HANDSHAKE_MS = 5_000
"""Time in ms after which a connection without a completed handshake is closed."""
EVENT_TRACE_MAX = 256
"""Latest events that a shard remembers. It logs them if it finds an invariant violated."""

assert RECORD_BYTES_DEFAULT <= RECORD_BYTES_MAX <= REQUEST_BYTES_MAX
assert RECORD_BYTES_MAX + HEADERS_BYTES_MAX + 8 * HEADERS_PER_RECORD_MAX + 16 * KIB <= FRAME_BYTES_MAX
assert DURATION_MS_MAX * 1_000_000 < SEQ_MAX // 2, "a duration in nanoseconds fits beside a time"
assert FEEDS_PER_SUBSCRIPTION_MAX <= GATEWAY_FEEDS_PER_KEY_MAX < FEEDS_PER_SCHEDULER_MAX
assert GATEWAY_SUBSCRIPTIONS_PER_CONNECTION_MAX <= GATEWAY_SUBSCRIPTIONS_PER_KEY_MAX
assert GATEWAY_SUBSCRIPTIONS_PER_KEY_MAX < GATEWAY_SUBSCRIPTIONS_MAX
assert FRAME_BYTES_MAX < 1 << 31, "frame_len and column offsets are 32 bits"
assert RING_BYTES_MIN // RING_FRAME_FRACTION > 4 * KIB, "the smallest ring takes an ordinary frame"
assert DRAIN_BYTES_PER_RING_MAX <= COMMIT_BATCH_BYTES_MAX < WAL_FILE_BYTES_DEFAULT
assert DEDUP_FRAMES_PER_PRODUCER >= SETTLE_ENTRIES_DEFAULT, "a whole ring can be resent and recognised"
assert PRODUCERS_PER_TOPIC_MAX + DEDUP_RUNS_PER_CHECK < DEDUP_RUNS_PER_TOPIC_MAX, (
    "every producer has an entry"
)
assert BATCH_WINDOW_US_MIN <= BATCH_WINDOW_US_MAX <= FLUSH_INTERVAL_MS_DEFAULT * 1000
assert COALESCE_MS_MAX < GOVERNOR_SAMPLE_MS < HEARTBEAT_INTERVAL_MS < GOVERNOR_STALE_MS
assert (
    GROUP_PENDING_PER_TOPIC_MAX * GROUP_ENTRY_BYTES
    + GROUPS_PER_TOPIC_MAX * (LEASE_CALLS_KEPT_MAX * LEASE_CALL_BYTES + LEASE_CALL_ROWS_KEPT_MAX * 9)
    + GROUPS_PER_TOPIC_MAX * GROUP_REASONS_SAVED_MAX * (DEAD_LETTER_REASON_BYTES_MAX + 16)
    + DURABLE_LEASES_MAX * DURABLE_LEASE_BYTES
    + DURABLE_HOLDERS_MAX * (NODE_BYTES_MAX + 32)
    + DURABLE_REASONS_MAX * (DEAD_LETTER_REASON_BYTES_MAX + 16)
    + LEASE_CALLS_KEPT_MAX * (NODE_BYTES_MAX + 96)
    + LEASE_CALL_ROWS_KEPT_MAX * 9
    <= FRAME_BYTES_MAX
), "groups and leases of a topic's row take no more than a large frame"
assert (
    HTTP_SETTLED_ROWS_MAX * (TOPIC_NAME_BYTES_MAX + NODE_BYTES_MAX + 16) + 9 * HTTP_SETTLED_SEQS_MAX
    <= ENVELOPE_BYTES_MAX
), "settled jobs fit a message"
assert HTTP_PROCESSES_MAX == 16, "the names of watch sessions have 4 bits for the process"
assert 3 * HTTP_SESSIONS_RENEWED_MS <= WATCH_SESSION_TTL_MS, "two lost notices do no harm"
assert SHARDS_MAX + SCHEDULERS_MAX + HTTP_PROCESSES_MAX + 8 <= PROCESSES_MAX, "every process has a slot"
assert DEAD_LETTERS_POLL_MS >= HEARTBEAT_INTERVAL_MS, "looking wakes nobody who would sleep"
assert STUCK_AFTER_S_MIN * 1000 >= 3 * HEARTBEAT_INTERVAL_MS, "nobody is stuck for a late heartbeat"
