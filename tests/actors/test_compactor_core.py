"""The compactor's decisions: when a shard gets a checkpoint, and which frames go into which segment."""

from __future__ import annotations

import numpy as np
import pytest
from pyroaring import BitMap64

from ringlog.actors.compactor.core import (
    CheckpointFailed,
    CheckpointFinished,
    Compactor,
    FilesListed,
    ListFiles,
    MakeCheckpoint,
    MakeShutdownCheckpoints,
    PollShard,
    ShardPolled,
)
from ringlog.actors.compactor.schedule import (
    BACKOFF_NS_MAX,
    LOG_BYTES,
    NS_PER_MS,
    NS_PER_S,
    POLL_INTERVAL_NS,
    WAIT_NS,
    CheckpointBacklog,
    CheckpointSchedule,
)
from ringlog.actors.compactor.segment_plan import (
    AppendCollector,
    LiveTopics,
    SegmentPlanner,
    SegmentSizeLimits,
    decode_live,
    merge_live_topics,
)
from ringlog.contract import ControlReceived, DrainRequested, Reply, Tick
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, ExitCode, ShuttingDown, Status
from ringlog.frame import batch as frames
from ringlog.frame import encode_records, frame, layout

MIB = 1 << 20
NOTHING = CheckpointBacklog((), 0)


def schedule(shards=1, age_ms=0):
    return CheckpointSchedule(shards, file_bytes=64 * MIB, age_ms=age_ms, now_ns=0)


# -- schedule ---------------------------------------------------------------------------------------------


def test_shards_are_polled_in_order_and_again_after_the_poll_interval():
    plan = schedule(shards=3)
    now = NS_PER_S
    seen = []
    while (shard := plan.next_shard(now)) is not None:
        seen.append(shard)
        assert not plan.is_due(shard, NOTHING, now)
    assert seen == [0, 1, 2]
    assert plan.next_poll_ns() == now + POLL_INTERVAL_NS


@pytest.mark.parametrize(
    ("waiting", "is_due"),
    [
        (NOTHING, False),
        (CheckpointBacklog((), 10 * LOG_BYTES), False),
        (CheckpointBacklog((4 * MIB,), 5 * MIB), False),
        (CheckpointBacklog((63 * MIB,), 63 * MIB), True),
        (CheckpointBacklog((4 * MIB,), LOG_BYTES), True),
    ],
)
def test_a_full_file_or_much_log_makes_a_checkpoint_due(waiting, is_due):
    """A checkpoint is due for a full closed file, or for `LOG_BYTES` of log if any file is closed."""
    assert schedule().is_due(0, waiting, NS_PER_S) is is_due


def test_a_small_closed_file_waits_a_minute_and_no_longer():
    """The time starts when the schedule first sees the file."""
    plan, small = schedule(), CheckpointBacklog((MIB,), 2 * MIB)
    assert not plan.is_due(0, small, NS_PER_S)
    assert not plan.is_due(0, small, WAIT_NS)
    assert plan.is_due(0, small, NS_PER_S + WAIT_NS)


def test_old_records_make_the_shard_close_its_file():
    """The setting `storage.segment_age_ms` is the maximum age of records in the log."""
    plan, held = schedule(age_ms=10_000), CheckpointBacklog((), MIB)
    assert not plan.must_roll(0, 0)
    plan.is_due(0, held, NS_PER_S)
    assert not plan.must_roll(0, NS_PER_S + 9_999 * NS_PER_MS)
    rolled_ns = NS_PER_S + 10_000 * NS_PER_MS
    assert plan.must_roll(0, rolled_ns)
    assert plan.is_due(0, CheckpointBacklog((MIB,), MIB), rolled_ns)
    plan.checkpoint_done(0, rolled_ns)
    assert not plan.must_roll(0, rolled_ns)


def test_age_zero_disables_the_age_trigger():
    plan = schedule()
    plan.is_due(0, CheckpointBacklog((), MIB), NS_PER_S)
    assert not plan.must_roll(0, 1 << 60)


def test_an_operators_request_ends_when_every_shard_is_done():
    """The request is complete only after the last shard's checkpoint."""
    plan = schedule(shards=2)
    plan.request_checkpoints(7, 0)
    assert plan.next_shard(0) == 0
    assert plan.must_roll(0, 0)
    assert plan.is_due(0, NOTHING, 0)
    assert plan.checkpoint_done(0, 1) == []
    assert plan.next_shard(1) == 1
    assert plan.checkpoint_done(1, 2) == [7]
    assert not plan.must_roll(0, 3)


def test_an_operators_request_fails_once_with_the_first_shard_that_fails():
    plan = schedule(shards=2)
    plan.request_checkpoints(7, 0)
    assert plan.checkpoint_failed(1, 0) == [7]
    assert plan.checkpoint_done(0, 1) == []


def test_a_failing_shard_is_retried_with_exponential_backoff_and_delays_no_other_shard():
    plan = schedule(shards=2)
    waits = []
    for _ in range(9):
        plan.checkpoint_failed(0, 0)
        waits.append(plan._shards[0].poll_due_ns)
    assert waits[:3] == [NS_PER_S, 2 * NS_PER_S, 4 * NS_PER_S]
    assert waits[-1] == BACKOFF_NS_MAX
    assert plan.next_shard(NS_PER_S) == 1
    plan.checkpoint_done(0, 0)
    plan.checkpoint_failed(0, 0)
    assert plan._shards[0].poll_due_ns == NS_PER_S


# -- segments ---------------------------------------------------------------------------------------------


def log_of(*rows):
    """Return appends (topic, first seq, records, epoch), each as a frame, in one buffer."""
    buffer = bytearray()
    for topic, _, count, _ in rows:
        buffer += frame(encode_records([b"x" * 40] * count), topic_id=topic, producer_id=1, producer_seq=1)
    batch = frames.scan(buffer)
    for at, (_, base, count, epoch) in enumerate(rows):
        batch.words[at, layout.W_BASE_SEQ] = base
        batch.words[at, layout.W_COUNT_EPOCH] = count | epoch << 32
    appends = AppendCollector()
    appends.add(bytes(buffer), batch)
    return appends


def live_of(**topics):
    """Return live topics from arguments such as `t3=(epoch, earliest)`."""
    ids = sorted(int(name[1:]) for name in topics)
    facts = [topics[f"t{each}"] for each in ids]
    words = [np.array(column, np.uint64) for column in (ids, *zip(*facts, strict=True))]
    return LiveTopics(*words, {}, {})


def kept(ordered, sizes=None):
    """Return [(topic, [first seq of each frame])] of each segment."""
    found = []
    for cuts in ordered.plan_segments(sizes or SegmentSizeLimits(1 << 20, 1 << 30, 1 << 30)):
        segment = []
        for cut, runs in ordered.frame_runs(cuts):
            bases = []
            for buffer, batch in runs:
                again = frames.scan(buffer[int(batch.offsets[0]) : batch.stop])
                assert (again.words[:, layout.W_BODY_XXH3] == batch.words[:, layout.W_BODY_XXH3]).all()
                bases += batch.words[:, layout.W_BASE_SEQ].tolist()
            segment.append((cut.topic_id, bases))
        found.append(segment)
    return found


def test_frames_are_sealed_topic_by_topic_in_seq_order():
    appends = log_of((9, 1, 2, 1), (4, 1, 1, 1), (9, 3, 1, 1), (4, 2, 5, 1))
    ordered = SegmentPlanner(appends.to_table(), live_of(t4=(1, 1), t9=(1, 1)), {})
    assert kept(ordered) == [[(4, [1, 2]), (9, [1, 3])]]


def test_duplicate_frames_are_sealed_once():
    appends = log_of((4, 1, 3, 1), (4, 4, 1, 1), (4, 1, 3, 1), (4, 4, 1, 1), (4, 5, 1, 1))
    assert kept(SegmentPlanner(appends.to_table(), live_of(t4=(1, 1)), {})) == [[(4, [1, 4, 5])]]


def test_frames_of_deleted_topics_of_other_epochs_and_below_a_floor_are_left_out():
    appends = log_of((4, 1, 3, 1), (4, 4, 1, 2), (5, 1, 3, 1), (6, 1, 3, 2), (6, 4, 3, 2), (6, 7, 1, 2))
    live = live_of(t4=(2, 1), t5=(0, 0), t6=(2, 6))
    assert kept(SegmentPlanner(appends.to_table(), live, {})) == [[(4, [4]), (6, [4, 7])]]


def test_a_later_pass_does_not_seal_the_frames_of_an_earlier_one():
    sealed = {}
    first = SegmentPlanner(log_of((4, 1, 3, 1)).to_table(), live_of(t4=(1, 1)), sealed)
    first.record_last_sealed(sealed)
    assert sealed == {(4, 1): 3}
    second = SegmentPlanner(log_of((4, 1, 3, 1), (4, 4, 2, 1)).to_table(), live_of(t4=(1, 1)), sealed)
    assert kept(second) == [[(4, [4])]]


def test_a_large_topic_gets_several_segments_and_small_topics_share_one():
    appends = log_of(*[(4, 1 + 2 * n, 2, 1) for n in range(5)], (7, 1, 1, 1), (8, 1, 1, 1), (9, 1, 1, 1))
    ordered = SegmentPlanner(appends.to_table(), live_of(t4=(1, 1), t7=(1, 1), t8=(1, 1), t9=(1, 1)), {})
    assert kept(ordered, SegmentSizeLimits(4, 1 << 30, 100)) == [
        [(4, [1, 3])], [(4, [5, 7])], [(4, [9])], [(7, [1]), (8, [1]), (9, [1])],
    ]  # fmt: skip
    assert kept(ordered, SegmentSizeLimits(2, 1 << 30, 1 << 20))[1:] == [[(7, [1]), (8, [1])], [(9, [1])]]


def test_a_frame_larger_than_a_segment_gets_a_segment_of_its_own():
    appends = log_of((4, 1, 50, 1), (4, 51, 50, 1))
    ordered = SegmentPlanner(appends.to_table(), live_of(t4=(1, 1)), {})
    assert kept(ordered, SegmentSizeLimits(10, 100, 0)) == [[(4, [1])], [(4, [51])]]


def test_a_pass_without_appends_has_nothing_to_seal():
    ordered = SegmentPlanner(AppendCollector().to_table(), merge_live_topics([]), {})
    assert kept(ordered) == []


def test_a_live_reply_is_decoded_with_its_deleted_seqs():
    numbers = BitMap64([3, 2**40])
    data = numbers.serialize()
    rows = np.array([[4, 1, 1, 0, len(data)], [9, 0, 0, 0, 0]], "<u8").tobytes()
    live = decode_live(rows, data)
    assert live.ids.tolist() == [4, 9]
    assert live.deleted == {4: numbers}


@pytest.mark.parametrize("rows", [[[9, 1, 1, 0, 0], [4, 1, 1, 0, 0]], [[4, 1, 1, 0, 99]], [[4, 1, 1, 2, 1]]])
def test_a_malformed_live_reply_is_refused(rows):
    with pytest.raises(CorruptData):
        decode_live(np.array(rows, "<u8").tobytes(), b"abc")


# -- the core -----------------------------------------------------------------------------------------


def compactor(shards=2):
    return Compactor(shards, file_bytes=64 * MIB, age_ms=0, now_ns=0)


def at(now_ns, *events):
    return [Tick(0, now_ns), *events]


def asked(corr, client=b"op"):
    return ControlReceived(client, corr, m.CheckpointNow())


def test_one_shard_is_polled_at_a_time():
    """A pass polls at most one shard, and no shard while a poll is pending."""
    core = compactor()
    assert core.handle(at(NS_PER_S)) == [PollShard(0, roll=False)]
    assert core.handle(at(NS_PER_S)) == []
    assert core.handle(at(NS_PER_S, ShardPolled(0, NOTHING))) == [], (
        "requests must be handled before the next poll"
    )
    assert core.handle(at(NS_PER_S)) == [PollShard(1, roll=False)]
    core.handle(at(NS_PER_S, ShardPolled(1, NOTHING)))
    assert core.handle(at(NS_PER_S)) == []
    assert core.next_deadline_ns() == NS_PER_S + POLL_INTERVAL_NS


def test_a_request_is_answered_when_each_shard_had_a_checkpoint():
    """The reply lists the checkpoint's files."""
    core = compactor()
    assert core.handle(at(0, asked(7))) == [PollShard(0, roll=True)]
    assert core.handle(at(1, ShardPolled(0, NOTHING))) == [MakeCheckpoint(0, 0, is_requested=True)]
    assert core.handle(at(2, CheckpointFinished(0))) == []
    core.check()
    assert core.handle(at(2)) == [PollShard(1, roll=True)]
    assert core.handle(at(3, ShardPolled(1, NOTHING))) == [MakeCheckpoint(1, 0, is_requested=True)]
    assert core.handle(at(4, CheckpointFinished(1))) == [ListFiles((1,))]
    assert core.handle(at(5, FilesListed((1,), ["meta/engine"]))) == [
        Reply(b"op", 7, m.CheckpointMade(["meta/engine"]))
    ]
    core.check()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CorruptData("bad"), Status.INTERNAL),
        (ShuttingDown("stop requested during a pass"), Status.SHUTTING_DOWN),
    ],
)
def test_a_request_fails_once_with_the_first_shard_that_fails(error, status):
    """This includes a shard that shuts down: no other event would answer the operator."""
    core = compactor()
    core.handle(at(0, asked(7)))
    (reply,) = core.handle(at(1, CheckpointFailed(0, error)))
    assert (reply.client, reply.corr, reply.message.status) == (b"op", 7, status)
    core.check()
    core.handle(at(2, CheckpointFailed(1, error)))
    assert not [each for each in core.handle(at(3)) if isinstance(each, Reply)]


def test_an_error_while_files_are_listed_is_the_reply():
    core = compactor(shards=1)
    core.handle(at(0, asked(7)))
    core.handle(at(1, ShardPolled(0, NOTHING)))
    core.handle(at(2, CheckpointFinished(0)))
    (reply,) = core.handle(at(3, FilesListed((1,), CorruptData("bad"))))
    assert isinstance(reply.message, m.ErrorReply)


def test_a_drain_makes_snapshots_refuses_pending_requests_and_stops():
    core = compactor()
    core.handle(at(0, asked(7)))
    leave, refused, stop = core.handle(at(1, DrainRequested()))
    assert isinstance(leave, MakeShutdownCheckpoints)
    assert (refused.corr, refused.message.status) == (7, Status.SHUTTING_DOWN)
    assert stop.code == ExitCode.OK
