"""Every bound in the system, with its unit and the reason for its value.

What happens at a bound is said beside it. Relations between bounds are asserted at the end.
"""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20

# -- one write (semantics section 4). Over the limit: refused before a number is assigned ------------
BATCH_RECORDS_MAX = 10_000
RECORD_BYTES_DEFAULT = 1 * MIB
"""Payload and metadata of a record, unless limits.max_record_bytes says otherwise."""
RECORD_BYTES_MAX = 64 * MIB
"""What limits.max_record_bytes may be raised to."""
TAG_BYTES_MAX = 256
NODE_BYTES_MAX = 128
KEY_BYTES_MAX = 4 * KIB
META_BYTES_MAX = 16 * KIB
META_KEYS_MAX = 64
HEADERS_PER_RECORD_MAX = 65_535
HEADER_BYTES_MAX = 65_535
"""One header's name, and its value."""
HEADERS_BYTES_MAX = 1 * MIB
"""All headers of a record, names and values."""
REQUEST_BYTES_MAX = 64 * MIB
IDEMPOTENCY_KEY_BYTES_MAX = 256
TOPIC_NAME_BYTES_MAX = 255

# -- numbers in messages and settings. Beyond: refused where they are decoded ------------------------
MILLIS_MAX = 1 << 43
"""A time: 278 years, or up to the year 2248. Its nanoseconds fit into 63 bits."""
PID_MAX = (1 << 31) - 1
"""What the kernel's calls take; asking about a number beyond it raises."""
NAME_CHARS_MAX = 1_024
"""Of a name in a message: longer than any legal one, so that lookups say what is wrong with those."""

# -- frames -------------------------------------------------------------------------------------------
FRAME_BYTES_MAX = REQUEST_BYTES_MAX + 2 * MIB
"""A whole frame, header included: the largest request plus its columns' offsets, or the largest record with
its key and headers."""
DECOMPRESS_RATIO_MAX = 1_000
"""A body that claims to grow by more than this is refused before it is allocated (SEC-15)."""

# -- rings. A full ring pushes back on its producer; nothing is dropped --------------------------------
RING_BYTES_DEFAULT = 32 * MIB
RING_BYTES_MIN = 64 * KIB
RING_BYTES_MAX = 1 << 30
COMPRESS_BYTES_MIN = 1 * KIB
"""Producers compress larger frames as their topic says; smaller ones gain less than the work costs."""
RING_BYTES_FIRST = 256 * KIB
"""A ring begins so small and grows by use up to run.ring_bytes: a container has 64 MiB of /dev/shm."""
RING_GROWTH = 8
"""A ring that was full is replaced by one of so many times its bytes."""
RING_ROOM_FRACTION = 4
"""A ring that grows takes at most this part of the shared memory that is free, to leave room for others."""
RING_BYTES_PER_SETTLE_ENTRY = 64
"""Room for settlements in a ring: one for so many bytes of it, up to run.settle_entries."""
RING_FRAME_FRACTION = 4
"""A frame larger than capacity / this goes by socket instead, so that no frame can wedge a ring."""
SETTLE_ENTRIES_DEFAULT = 16_384
"""Frames in flight on one ring; the producer waits beyond it."""
SETTLE_ENTRY_BYTES = 64
RINGS_PER_SHARD_MAX = 1_024

# -- group commit --------------------------------------------------------------------------------------
COMMIT_BATCH_FRAMES_MAX = 8_192
COMMIT_BATCH_BYTES_MAX = 8 * MIB
DRAIN_BYTES_PER_RING_MAX = 4 * MIB
"""Bytes one turn copies out of one ring, so that a fast producer cannot starve the others."""
FLUSH_INTERVAL_MS_DEFAULT = 100
UNSYNCED_BYTES_MAX = 32 * MIB
"""Bytes of `disk` and `memory` class that may be unsynced before a sync is forced, whatever the time."""
INTAKE_REQUESTS_MAX = 4_096
INTAKE_BYTES_MAX = 4 * FRAME_BYTES_MAX
"""Appends that a gateway holds for one shard; beyond it the answer is Throttled (BP-3), and under pressure
beyond half of it."""

# -- WAL files -----------------------------------------------------------------------------------------
WAL_HEADER_BYTES = 4_096
WAL_FILE_BYTES_DEFAULT = 64 * MIB
WAL_FILE_BYTES_MIN = 1 * MIB
CREATE_BYTES_MIN = 88
"""A frame that creates a topic is not smaller: so many ids may have been given out in bytes that are lost."""
RECORDS_PER_BYTE_MAX = 250
"""Records that a byte of log stands for at most: each takes 4 bytes of a body, and that is compressed 1,000
times at most. So many numbers are passed over for a byte of which nobody knows what it was."""
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
SHARED_SEGMENTS_MAX = 8
"""Shared segments of a shard before they are merged: reading a small topic looks into each of them."""
SMALL_SEGMENTS_MAX = 8
"""Segments of one topic below a quarter of segment_bytes before they are merged."""
SCRUB_EVERY_S = 3_600.0
"""A pass of the scrub begins so long after the one before it at the earliest: little data is no reason to
read it all the time."""
SCRUB_FINDINGS_MAX = 1_000
"""Findings one report names; more are counted."""
DISK_POLL_S = 1.0
"""How often the free space of the data directory is looked at, and the word that says so."""

# -- topics --------------------------------------------------------------------------------------------
TOPICS_MAX_DEFAULT = 100_000
PRODUCERS_PER_TOPIC_MAX = 65_536
"""Producers a topic remembers. Beyond it the longest silent session producer is forgotten; named
producers never are, and a new one is refused when only they are left."""
DEDUP_FRAMES_PER_PRODUCER = SETTLE_ENTRIES_DEFAULT
"""Recent frames of one producer whose numbers can be repeated exactly."""
IDEMPOTENCY_KEYS_PER_TOPIC = 65_536
"""Keys and dedup ids remembered inside the window, unless the topic says otherwise; beyond it those that
would expire first are forgotten early and counted."""
IDEMPOTENCY_KEYS_PER_TOPIC_MAX = 262_144
"""What a topic may say: some 80 MB of its shard's memory, 20 MB of a snapshot."""
DEDUP_IDS_PER_WRITE_MAX = 1_000
"""Records with a dedup id in one write: their digests travel beside the frame, in 32 KB."""
DEDUP_ID_BYTES_MAX = 4_096
"""Longest dedup id a program may give. Only its digest leaves the client: this keeps payloads out."""
HEAD_RESERVATION_MIN = 256
HEAD_RESERVATION_MAX = 1 << 24
VOLATILE_BYTES_DEFAULT = 64 * MIB
"""Ephemeral records one shard keeps in memory; beyond it the oldest file of them is evicted."""
SEQ_MAX = (1 << 63) - 1

# -- settings of topics and groups (ringlog/settings.py). A value outside is refused where it enters ---------
DURATION_MS_MAX = 36_500 * 86_400_000
"""Longest duration of a setting, 100 years: in nanoseconds it fits 63 bits, and in microseconds beside a
time."""
COUNT_MAX = SEQ_MAX
"""Largest cap in records or bytes."""
DELIVERIES_MAX = 1_000_000
"""Largest `max_deliveries` of a queue or a group."""
INTERVAL_S_MIN = 0.01
"""Shortest interval or timeout of the engine's settings: a shorter one would keep a processor busy."""
PACE_BYTES_MAX = 1 << 40
"""Largest `…_bytes_per_s`: a budget of a second fits beside all others."""
CLAIM_JITTER_MS_MAX = 5_000
PRIORITY_LEVELS_MAX = 256
"""The priority column of a frame is one byte."""
BANDS = 5
"""Bands of priority that a scheduler serves in turn, the lowest first."""
TOPIC_PRIORITY_MAX = 1_000

# -- reads ---------------------------------------------------------------------------------------------
READ_LIMIT_DEFAULT = 256
READ_LIMIT_MAX = 1_000
READ_AHEAD_RECORDS_MAX = 4_096
"""Records that an iterator over single records reads at once."""
READ_AHEAD_RECORDS_MIN = 16
"""And when the last ones went stale before they were handed out; doubled with each page that does not."""
READ_AHEAD_MS = 100
"""How long a remote iterator hands out what it has read before it asks the gateway again."""
READ_BYTES_DEFAULT = 1 * MIB
READ_BYTES_MAX = 8 * MIB
WAIT_MS_MAX = 30_000
LIST_PAGE_DEFAULT = 100
LIST_PAGE_MAX = 1_000
EXTENTS_PER_LOCATE_MAX = 1_024

# -- delivery. Who is too slow reads from storage; nothing is dropped and no writer waits ----------------
NEWS_ROWS = 1 << 15
"""Latest publications of a shard kept in shared memory; a reader further behind looks at every topic."""
SCHEDULERS_MAX = 8
LINKS_PER_SCHEDULER_MAX = 4_096
"""Clients a scheduler tells of news; a further one is answered Throttled."""
SUBSCRIPTIONS_PER_LINK_MAX = 16_384
FEEDS_PER_SUBSCRIPTION_MAX = 100_000
FEEDS_PER_SCHEDULER_MAX = 1_000_000
FEEDS_PER_MESSAGE_MAX = 1_024
CREDIT_DEFAULT = 32
CREDIT_MAX = 4_096
"""Turns of a subscription that may be on their way at the same time."""
LINK_SILENCE_MS = 30_000
"""A link without a word for this long is forgotten; clients say one three times as often."""
WATCH_LIMIT_DEFAULT = 4_096
"""Records of one topic that a watch reads in one turn, before another topic has one."""
WATCH_LIMIT_MAX = 100_000
SHARED_FRAMES_BYTES_MAX = 16 * MIB
"""Frames of the log that the watches of one client have read lately and share; the oldest go first."""
LOG_MAP_BYTES_MAX = 32 * MIB
"""What readers of one process remember of where topics lie in the log. What was used least goes first, and is
looked for again when it is wanted."""
AGING_TICK_MS = 50
"""How often a scheduler looks who has risen, and tries again what could not be told."""
LAG_CHECKS_MAX = 4_096
"""Subscriptions and feeds looked at for how far their readers are behind, those first whose link has been
silent for longest."""
LAG_ANNOUNCED_MS = 5_000
"""A consumer that has lacked something for so long is announced: by its watch (Lagged) when it reads, by a
warning in the log and a problem in `status` also when it does not."""
LAGS_PER_MESSAGE_MAX = 256
"""Consumers told of in one answer, those that are furthest behind."""
DURABLE_POLL_MS = 20
"""How often it looks at a shard's durable mark while a strong subscription waits for it."""
GRANTS_PER_MESSAGE_MAX = 4_096
"""Turns told to a link in one message; more follow in the next."""
GRANT_RINGS_MAX = 64
"""Local clients that a scheduler tells of turns through shared memory; the others get messages."""
GRANT_RING_ROWS = 4_096
"""Turns in such a ring that its client has not looked at; beyond it they are told again."""
CALL_RINGS_MAX = 256
"""Local clients whose requests about jobs a shard takes from shared memory; the others use sockets."""
CALL_RING_BYTES = 32_768
"""Requests, and as much of answers, in such a ring that the other side has not taken; what does not fit goes
by socket."""
CALL_BYTES_MAX = 24_576
"""Longest message in one: a thousand jobs by number and token, and some to spare."""
CALL_RING_GRACE_S = 10
"""How long a shard waits for the client that asked for one to open it."""
CALL_RING_POLL_MS = 100
"""How often it looks at one of them, in turn, whether its client is still there."""
HINTS_PER_TOPIC = 4
"""Latest places of a topic's records that are told with a turn; who is further behind finds them itself."""
SLOTS_PER_SCAN_MAX = 4_096
"""Topic slots read in one turn, so that a scheduler that looks at everything still tells what is new."""
DURABLE_WAITS_MAX = 65_536
"""Publications of a shard that wait for its durable mark; beyond it they are forgotten and the topics looked
at, which says the same of each topic once."""
REFRESHES_PER_TICK_MAX = 8_192
"""Waiting feeds whose band is made anew in one tick because their topic was consumed or configured; the rest
follow in the next ones."""
WATCHED_SLOTS_MAX = 256 * 4_096
"""Slots of a shard's topic table."""

# -- the governor. What is shed is latency, then new work; never what was taken in ------------------------
GOVERNOR_SAMPLE_MS = 100
GOVERNOR_LATENCY_MS = 5
"""Time from news to turn that is full pressure."""
GOVERNOR_READY_PER_SCHEDULER = 8
"""Topics that could be told of and were not, for each scheduler, that are full pressure."""
GOVERNOR_STALE_MS = 3_000
"""A governor whose process shows no heartbeat for so long is taken for one without pressure."""
COALESCE_MS_MAX = 20
"""Longest that a topic's next wake-up is gathered."""
BATCH_WINDOW_US_MIN = 500
BATCH_WINDOW_US_MAX = 10_000
"""Longest that a shard under pressure gathers a group before it takes frames out of rings."""
BATCH_WINDOW_RINGS_MIN = 4
"""A shard's groups out of fewer rings than this are not gathered: it would gain less than it costs them."""
BATCH_WINDOW_POLL_US = 500
"""How often it looks meanwhile whether everybody is there."""
EARLY_WAKEUP_BYTES_MAX = 16_384
"""No scheduler is woken ahead of the news for more than this, nor for frames out of several rings: then
throughput counts."""
PRESSURE_RETRY_MS = 1_000
"""What is refused for pressure, or since an intake is full, is told to come again after this."""

# -- routers. Who forwards runs behind writes and holds up none of them -----------------------------------
ROUTERS_MAX_DEFAULT = 10_000
ROUTER_HOPS_MAX = 8
"""A record that came through so many routers is not forwarded again: what bounds a permitted cycle."""
ROUTER_NAME_BYTES_MAX = 255
ROUTER_FILTER_BYTES_MAX = 4 * KIB
ROUTE_RECORDS_MAX = 1_024
"""Records of a source that one pass looks at, so that no backlog delays other routers."""
ROUTE_BYTES_MAX = 1 * MIB
"""Bytes of payload in one pass; a record that is larger goes alone."""
ROUTE_ROWS_MAX = 1_024
"""Destinations that one message to a shard names."""
ROUTE_PASSES_MAX = 64
"""Messages of a scheduler to shards that are on their way; beyond it no further pass begins."""
ROUTE_PAUSE_MS_MIN = 10
ROUTE_PAUSE_MS_MAX = 1_000
"""A destination that refuses is tried again after this long, each time twice as long."""
ROUTER_SOURCES_OPEN_MAX = 256
"""Sources that a scheduler keeps open files of; the longest unused is let go."""
READ_SETTLE_MS = 1_000
"""Longest that a reader waits for the routers that lead to what it reads; then it reads what there is."""
ROUTER_SETTLE_MS_MAX = 2_000
"""Longest wait of one request for a router to get on: shorter than the silence after which a connection is
not trusted. Who has more patience asks again."""
ROUTERS_POLL_S = 30.0
"""How often a scheduler asks shards which routers there are, though it is told of each."""

# -- topics that go when nobody uses them (F39). All in milliseconds but the counts -------------------------
EXPIRE_UNUSED_MS_MIN = 1_000
"""Shortest `expire_unused_ms`: a client renews its use in a third of it, also on a host that is busy."""
TOPIC_KEEPALIVES_PER_PERIOD = 3
"""Words of who follows such a topic in each of its periods: two may be lost."""
IDLE_CHECKS_PER_PERIOD = 4
"""Looks at a topic in each of its periods: one may be removed so much of it late, and never early."""
IDLE_CHECK_MS_MIN = 250
IDLE_CHECK_MS_MAX = 60_000
IDLE_CHECK_PAUSE_MS = 100
"""Least time from one look to the next, so that those of many topics are made together."""
IDLE_CHECKS_MAX = 512
"""Topics in one look: their control frames fit into the room that a turn keeps for such. With more topics
than are looked at in time all of them go later."""
IDLE_CHECK_LATE_MS = 250
"""A look that is later than this was held up, and so were perhaps the words of who uses the topic."""

# -- queues. A worker that asks for more gets so much and asks again ----------------------------------------
CLAIM_JOBS_MAX = 1_000
"""Jobs of one claim; a larger wish is cut to it (N-7)."""
JOBS_PER_REQUEST_MAX = 1_000
"""Jobs that one ack, nack or extend names; more are BatchTooLarge."""
HOT_TAIL_BYTES = 16 << 20
"""What a shard keeps in memory of the newest records of its queues; older ones are read from the log."""
JOB_SIZE_BLOCK = 1_024
"""Jobs whose sizes are asked for together; a power of two."""
JOB_SIZE_BLOCKS_AT_ONCE = 16
"""Blocks that the jobs of one ack may lie in for that; those further apart are asked for by themselves."""
JOB_SIZE_BLOCKS_MAX = 256
"""Blocks whose sizes a shard remembers, 1 MiB; what was not needed for longest is asked for again."""
INLINE_BYTES_MAX = 16_384
"""Payloads of the jobs of one claim that travel with its answer through a call ring; of larger ones its
client reads all from the files."""
INLINE_JOB_BYTES_MAX = 4_096
"""Where jobs are larger than this on average they are not read ahead for that."""
INLINE_AHEAD_MIN = 16
"""Jobs that have to lie ahead of a claim for it: it is the reading of many at once that is cheaper."""
INLINE_WINDOW_BYTES = 65_536
"""Of the log, read at once."""
INLINE_BLOCK_BYTES_MAX = 1_048_576
"""Of frames kept so at once: a window holds one frame at least, and that may be large."""
INLINE_WINDOWS_PER_CLAIM = 2
"""Read for one claim at most; where a queue's jobs lie further apart, its clients look for them."""
INLINE_PAUSE_CLAIMS = 256
"""Claims of a queue for which nothing is read where that was of no use."""
INLINE_QUEUES_MAX = 16
"""Queues for which a shard reads ahead, two such blocks each; the one not needed for longest is forgotten."""
LEASE_MS_MIN = 100
LEASE_MS_MAX = 86_400_000
BACKOFF_MAX_MS_DEFAULT = 60_000
"""Longest that what came back rests by itself, unless the queue or group says otherwise."""
NACK_DELAY_MS_MAX = 86_400_000
WAITING_CLAIMS_MAX = 16_384
"""Claims that wait in one shard; a further one is Throttled."""
REPLY_CACHE_REPLIES_MAX = 4_096
"""Latest answers about jobs that a shard keeps, for who asks again because an answer was lost. Beyond it the
oldest is forgotten, and its repeat is taken for a new request."""
REPLY_CACHE_ROWS_MAX = 65_536
"""Runs and numbers in all of them; the same."""
EXPIRED_CLAIMS_MAX = 16
"""Claims in a row of which every job had expired when it was read; then the caller is given no job."""
CLAIM_SLICE_MS_MAX = 2_000
"""Longest that a client's claim waits in a shard before it asks again: a worker that died meanwhile is given
nothing after that, and it is shorter than the silence after which a connection is not trusted."""
DEAD_LETTERS_PER_CLAIM_MAX = 1_000
"""Spent jobs that one claim sets aside; the next one goes on (QD-10)."""

QUEUES_SAMPLED_MAX = 1_000
"""Queues that a shard counts anew for the board each time it looks; with more the sums are so much older."""
GROUPS_SAMPLED_MAX = 256
"""Consumer groups, and their members, that it counts anew then; the same."""
QUEUE_SAMPLE_MS = 1_000
"""How often it looks: no oftener than its heart beats anyway."""
DEAD_LETTER_TOPICS_MAX = 64
"""Topics that dead letters of one may lead to, one behind the other: so many are looked at for a cycle."""
DEAD_LETTER_REASON_BYTES_MAX = 256
"""Of why a job was rejected the first line is kept, up to so many bytes."""
WORKERS_WATCHED_MAX = 1_024
"""Worker processes on the host whose death a shard notices at once; leases of others end by themselves."""
LINKS_MAX = 65_536
"""Processes that claimed jobs and that a shard can tell apart; of the one it forgets first the leases end by
themselves."""
COHORT_JOBS_MAX = 65_536
"""Jobs dealt out in one pass to claims that came in together: enough for one each of WAITING_CLAIMS_MAX.
Beyond it shares are smaller, and who got none is answered so or waits on."""
QUEUE_AGES_MAX = 4_096
"""Instants that a queue remembers to know when its jobs were put; beyond it only those stay that lie twice as
far apart, and a job may look older than it is by as much: by less than a 2,000th of the oldest one's age."""
DURABLE_LEASES_MAX = 80_000
"""Jobs of a queue with durable leases that were handed out and are not done: beyond it none is handed out for
the first time until some are; what comes back still is. So a topic's row of a snapshot fits a message."""
DURABLE_LEASE_BYTES = 41
"""Most bytes that one run of such jobs takes in a snapshot."""
DURABLE_HOLDERS_MAX = 4_096
"""Nodes that hold jobs of such a queue at a time; a further one is given none until another holds none. A
snapshot keeps as many processes that claimed."""
DURABLE_REASONS_MAX = 1_024
"""Jobs of such a queue of which it outlives the shard why they failed last; the others go without."""
RUNS_PER_CHANGE_MAX = 1_000
"""Runs that one change of leases names when a process that held them is gone; the others follow in more."""
DURABLE_CHANGE_BYTES_MAX = 64 * KIB
"""Most bytes of one change of such a queue in the log: a thousand runs, or jobs, with what was skipped."""
DURABLE_RETRY_MS = 1_000
"""A claim that waits for such a queue while nothing can be logged is looked at again so often."""
QUEUE_READY_INSTANTS_MAX = 1_024
"""Instants at which delayed jobs of a queue became ready and did not wait for long yet; beyond it the two
oldest are taken for one, and a job is promoted a little later."""
WAIT_WINDOW_MS = 60_000
"""The waits that a queue's statistics speak of are those of this minute and of the one before it."""
DEAD_LETTER_REASONS_MAX = 65_536
"""Jobs of a queue, or records of a group, of which it is known why they failed last; the longest unchanged go
without."""
GROUP_REASONS_SAVED_MAX = 32
"""Of rejected records of a group that are not moved yet, so many go into a snapshot with their reason; what
lies in the log behind it is read from there."""
DEAD_LETTERS_POLL_MS = 1_000
"""How often scheduler 0 looks whether a shard has set jobs aside: no oftener than its heart beats anyway."""
DEAD_LETTERS_RESCAN_S = 30.0
"""And how often it asks though none said so."""
DEAD_LETTERS_PER_MOVE = 256
"""Dead letters copied in one message, and as many as fit into DEAD_LETTERS_BYTES_PER_MOVE; at least one."""
DEAD_LETTERS_BYTES_PER_MOVE = 1 * MIB
DEAD_LETTERS_READ_BYTES = 256 * MIB
"""Of jobs and letters that are read to be moved so much is in memory at once, if each is as large as it may
be."""
DEAD_LETTERS_PAUSE_S_MAX = 30.0
"""Longest pause before a target that refuses is tried again; from a quarter of a second, twice as long each
time."""

# -- `ringlog worker` ----------------------------------------------------------------------------------------
WORKER_PROCESSES_MAX = 1_024
"""Processes of one worker; a wish for more is refused."""
WORKER_REASON_CHARS_MAX = 8_192
"""Of why a job failed, and of its trace, the last so many characters leave its process."""
WORKER_UNSETTLED_MAX = 1_000
"""Jobs of a worker whose end the engine has not taken yet; it claims no more until there are fewer."""
WORKER_CLAIM_MS = 500
"""Longest that a worker's claim waits before it looks around: bounds how late it hears that it shall stop."""
WORKER_RESTART_MS_MIN = 100
WORKER_RESTART_MS_MAX = 30_000
"""Pause before a process that did not become ready is tried again, each time twice as long."""
WORKER_EXIT_S = 5.0
"""A process that was told to end and has not ended by then is killed."""
WORKER_SETTLE_S = 10.0
"""A worker that stops waits so long for the engine to hear what became of its last jobs; then their leases
end by themselves."""

# -- consumer groups -------------------------------------------------------------------------------------
GROUPS_PER_TOPIC_MAX = 64
"""A further group of a topic is Throttled."""
GROUP_NAME_BYTES_MAX = 255
GROUP_PENDING_MAX = 100_000
"""Positions of a group that were given out and are not done: beyond it nothing new is given out until some
are; what comes back still is (F47)."""
GROUP_PENDING_PER_TOPIC_MAX = 800_000
"""The same of all groups of a topic together: what a snapshot keeps of a topic fits into a message."""
GROUP_ENTRY_BYTES = 56
"""Most bytes that one run of positions takes in a snapshot."""
GROUP_MEMBERS_MAX = 1_024
"""Members of a group; who was silent longest and holds nothing makes room, else a new one is Throttled."""
GROUP_MEMBER_SILENT_MS = 120_000
"""A member that holds nothing and asked for nothing for so long is one no more (F63)."""
LEASE_CALLS_PER_NODE_MAX = 64
"""Latest requests of a worker or member whose answer is kept with logged leases, for a repeat; the death of a
shard does not end that. Beyond it the worker's oldest is forgotten, and its repeat is a new request.
Each worker has its own, so that one whose gateway died does not suffer from the haste of others."""
GROUP_DEAD_LETTERS_PER_MOVE = LEASE_CALLS_PER_NODE_MAX // 2
"""Dead letters of a group that come back at once: repeats of all of them are recognised."""
LEASE_CALLS_KEPT_MAX = 2_048
"""The same of all workers together: the oldest is forgotten."""
LEASE_CALL_BYTES = 64
"""Most bytes that such an answer takes in a snapshot, beside its node and 9 for each of its numbers."""
LEASE_CALL_ROWS_KEPT_MAX = 16_384
"""Numbers in all of these answers; the same."""
GROUP_CHANGE_BYTES_MAX = 64 * KIB
"""Most bytes of one change in the log: a thousand runs, or positions apart, with what was skipped."""
PENDING_ROWS_MAX = 1_000
"""Entries of a pending list in one answer."""
CHECKPOINT_ROW_BYTES = 1 * MIB
"""Bytes of rows behind which an answer with topics' states is full, so that topics with many groups do not
make it grow without bound."""
AUTO_COMMIT_MS_DEFAULT = 5_000
"""How often a reader of a stream group says how far it is (F41)."""

# -- envelopes -----------------------------------------------------------------------------------------
ENVELOPE_BYTES_MAX = 1 * MIB
SOCKET_COPY_BYTES_MAX = 32_768
"""Messages up to this size are copied into a socket; larger ones are lent, which costs a fixed sum."""
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
STOP_CHECKPOINT_SHARE = 0.5
"""Of the drain limit: so long an orderly stop may make checkpoints, before it ends without."""
STOP_CHECKPOINT_BYTES_MIN = 1 * MIB
"""Less log of a shard is replayed in a few milliseconds, and a stop does not wait for its checkpoint."""
PASS_END_S = 1.0
"""So long a compactor that stops waits for the next step of a pass, which ends it; then it goes without."""
INTAKE_END_S = 2.0
"""So long a shard that stops takes what producers go on writing; they send the rest to the next engine."""
GATEWAY_DRAIN_SHARE = 0.5
"""Of the drain limit: so long a gateway that stops waits for answers of shards."""
SECOND_SIGNAL_S = 1.0
"""A signal to stop that follows another one sooner is the same request: launchers signal a process and then
its group, or pass on what a terminal has sent to both."""
BACKGROUND_DRAIN_S = 3.0
"""A process that gives way to everybody may never come to its end; then it is killed, which loses nothing."""
ORPHAN_DRAIN_S = 3.0
"""A child whose supervisor died drains no longer: nobody is left to end it, and the next engine waits."""
RESTART_MAX_DEFAULT = 5
RESTART_WINDOW_S_DEFAULT = 60.0
RESTART_BACKOFF_MS_MIN = 20
RESTART_BACKOFF_MS_MAX = 5_000
POISON_CRASHES = 2
"""So often a request is in hand when its shard breaks; the next incarnation refuses it. More restarts than
that are granted, or the shard would be given up first."""
POISON_CRASHES_REMEMBERED_MAX = 64
"""Of so many deaths it is known what was in hand, the latest."""
READ_ONLY_PROBE_MS_MIN = 1_000
READ_ONLY_PROBE_MS_MAX = 5_000
"""A shard whose directory takes no writes looks again after this long, each time twice as long: bounds how
often a directory that only seems writable costs its readers a restart."""
DESCRIPTORS_MIN = 64
"""Open files that an engine's processes must be allowed: with fewer a shard cannot open its files."""
DESCRIPTORS_RESERVED = 32
"""A process with fewer free descriptors than this stops listening: what is left is for the files it needs,
and for connections that come before it looks again. It listens anew when there are twice as many."""
DESCRIPTORS_CHECK_MS = 10
HANDSHAKE_MS = 5_000
"""Who connects and has not said what it speaks by then is let go of."""
EVENT_TRACE_MAX = 256

assert RECORD_BYTES_DEFAULT <= RECORD_BYTES_MAX <= REQUEST_BYTES_MAX
assert RECORD_BYTES_MAX + HEADERS_BYTES_MAX + 8 * HEADERS_PER_RECORD_MAX + 16 * KIB <= FRAME_BYTES_MAX
assert DURATION_MS_MAX * 1_000_000 < SEQ_MAX // 2, "a duration in nanoseconds fits beside a time"
assert FEEDS_PER_SUBSCRIPTION_MAX <= FEEDS_PER_SCHEDULER_MAX
assert FRAME_BYTES_MAX < 1 << 31, "frame_len and column offsets are 32 bits"
assert RING_BYTES_MIN // RING_FRAME_FRACTION > 4 * KIB, "the smallest ring takes an ordinary frame"
assert DRAIN_BYTES_PER_RING_MAX <= COMMIT_BATCH_BYTES_MAX < WAL_FILE_BYTES_DEFAULT
assert DEDUP_FRAMES_PER_PRODUCER >= SETTLE_ENTRIES_DEFAULT, "a whole ring can be resent and recognised"
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
), "a topic's row fits a message"
assert DEAD_LETTERS_POLL_MS >= HEARTBEAT_INTERVAL_MS, "looking wakes nobody who would sleep"
assert STUCK_AFTER_S_MIN * 1000 >= 3 * HEARTBEAT_INTERVAL_MS, "nobody is stuck for a late heartbeat"
