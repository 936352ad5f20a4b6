"""Admission of frames by a shard: accepted frames, errors of refused frames, and no effect of a refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringlog.actors.wal_shard.commit.admission import AdmissionLimits
from ringlog.actors.wal_shard.core import Settings
from ringlog.envelope import messages as m
from ringlog.errors import Refused, Status, TopicFull
from ringlog.frame import Column, control_frame, encode_records, frame, layout, patch_header
from ringlog.frame.layout import FrameType
from ringlog.frame.settle_entry import (
    DETAILS,
    FLAG_DEDUPED,
    FLAGS_SHIFT,
    S_COMMIT_TS,
    S_COUNT_STATUS,
    S_EPOCH,
    S_FIRST_SEQ,
    S_PRODUCER_SEQ,
    S_TOPIC,
    entry_error,
)
from ringlog.limits import DEDUP_FRAMES_PER_PRODUCER, SEQ_MAX
from ringlog.testing.disk import SimulatedDisk
from ringlog.topic.dedup import ProducerTable
from ringlog.topic.state import ShardTopic
from ringlog.types import SESSION_BIT, PayloadKind
from tests.support.log_file import sealed_frame
from tests.support.shard_world import DATA, World, refusals
from tests.support.shard_worlds import restart, started


@pytest.fixture
def world() -> World:
    """Return a started world with a topic `f` of class `fsync` that contains two records."""
    made = World(
        SimulatedDisk(DATA), settings=Settings(limits=AdmissionLimits(batch_records=5, record_bytes=500))
    )
    made.start()
    made.put_topic("f", durability="fsync")
    made.append("f", [b"first", b"second"])
    return made


def facts(topic: ShardTopic) -> tuple[Any, ...]:
    """Return everything about a topic that a refused frame could change."""
    producers = [(each, past.highest) for each, past in topic.producers.items()]
    return (
        topic.next_seq, topic.head_seq, topic.last_ts, topic.staged_count, topic.staged_bytes, topic.count,
        topic.bytes, producers, len(topic.keys), len(topic.index), topic.reservation.reserved,
    )  # fmt: skip


def made(
    world: World, payloads: list[bytes], *, number: int = 2, producer: int = 1, **options: Any
) -> bytearray:
    topic_id = options.pop("topic_id", world.topic("f").topic_id)
    return frame(
        encode_records(payloads), topic_id=topic_id, producer_id=producer, producer_seq=number, **options
    )


def broken(data: bytearray, word: int, change: int) -> bytearray:
    """Return the frame with bits of one header word flipped."""
    words = np.frombuffer(data, dtype="<u8")
    words[word] ^= np.uint64(change)
    return data


def test_every_refusal_has_its_details_and_changes_nothing(world):
    """Log and topic are the same before and after."""
    tagged = sealed_frame(
        {Column.PAYLOAD: [b"x"], Column.TAG: [b"t" * 300]}, topic_id=world.topic("f").topic_id, base_seq=1
    )
    patch_header(tagged := bytearray(tagged), producer_id=1, producer_seq=2, epoch=0)
    sound = lambda: made(world, [b"x"])  # noqa: E731
    cases: list[tuple[Status, dict[str, int], bytearray]] = [
        (Status.TOPIC_NOT_FOUND, {}, made(world, [b"x"], topic_id=4711)),
        (Status.STALE_EPOCH, {"sent_epoch": 99, "epoch": 1}, made(world, [b"x"], epoch=99)),
        (Status.BATCH_TOO_LARGE, {"records": 6, "max": 5}, made(world, [b"x"] * 6)),
        (Status.RECORD_TOO_LARGE, {"bytes": 501, "max": 500}, made(world, [b"x" * 501])),
        (Status.RECORD_TOO_LARGE, {"bytes": 501, "max": 500}, made(world, [b"a", b"x" * 501])),
        (Status.CORRUPT_FRAME, {}, broken(sound(), layout.W_BODY_XXH3, 1)),
        (Status.CORRUPT_FRAME, {}, made(world, [b"x"])[:-8] + b"\1" * 8),
        (Status.INVALID_REQUEST, {}, made(world, [b"x"], producer=0)),
        (Status.INVALID_REQUEST, {}, made(world, [b"x"], number=0)),
        (Status.INVALID_REQUEST, {}, broken(sound(), layout.W_HEAD, 1 << 40)),
        (Status.INVALID_REQUEST, {}, broken(sound(), layout.W_TAIL, 0x30 << layout.FLAGS_SHIFT)),
        (Status.INVALID_REQUEST, {}, broken(sound(), layout.W_TAIL, 1 << layout.HOPS_SHIFT)),
        (Status.INVALID_REQUEST, {}, control_frame(FrameType.TOPIC_DELETE, 1, b"\x91\1")),
        (Status.INVALID_REQUEST, {"field": Column.TAG, "found": 256}, tagged),
    ]  # fmt: skip
    run, before, offset = world.runs[0], facts(world.topic("f")), world.runs[0].core.log.offset
    for status, details, bad in cases:
        for sent in ([bad], [bad, bad]):
            entries = world.send("f", [bytearray(each) for each in sent])
            assert len(entries) == len(sent)
            for error in refusals(entries, "f"):
                assert error is not None, (status, details, bad[:80])
                assert error.status == status
                assert details.items() <= error.detail.items(), (error, details)
            assert facts(world.topic("f")) == before, status
    assert run.core.log.offset == offset, "nothing was written"
    assert world.append("f", [b"next"]) == 3
    restart(world)
    assert [payload for _, payload in world.records("f")] == [b"first", b"second", b"next"]


def test_valid_frames_between_refused_frames_are_admitted_in_order(world):
    """Each frame is a write of its own."""
    sent = [
        made(world, [b"a"], number=2), made(world, [b"x" * 501], number=3), made(world, [b"b"], number=4),
        made(world, [b"x"], number=5, epoch=9), made(world, [b"c", b"d"], number=6),
    ]  # fmt: skip
    entries = world.send("f", sent)
    assert [error is None for error in refusals(entries)] == [True, False, True, False, True]
    assert [int(e[S_FIRST_SEQ]) for e in entries if entry_error(e, "f") is None] == [3, 4, 5]
    assert [int(e[S_PRODUCER_SEQ]) for e in entries] == [2, 3, 4, 5, 6]
    assert [payload for _, payload in world.records("f", after=2)] == [b"a", b"b", b"c", b"d"]


def test_every_status_of_a_settlement_has_details():
    """The details of a status that `DETAILS` lacks could not be reported."""
    used = {
        Status.TOPIC_NOT_FOUND, Status.STALE_EPOCH, Status.BATCH_TOO_LARGE, Status.RECORD_TOO_LARGE,
        Status.CORRUPT_FRAME, Status.INVALID_REQUEST, Status.TOPIC_FULL, Status.THROTTLED, Status.INTERNAL,
        Status.NOT_READY,
    }  # fmt: skip
    assert used <= set(DETAILS)


@pytest.mark.parametrize("kind", [PayloadKind.BYTES, PayloadKind.JSON, PayloadKind.TEXT])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_every_admitted_frame_recovers(world, kind, count):
    """No path, for one frame or for many, may admit a frame that recovery would call damaged."""
    sent = [made(world, [b"%d" % i], number=2 + i, payload_kind=kind) for i in range(count)]
    assert refusals(world.send("f", sent)) == [None] * count
    world.tick(0.2)
    world.power_loss(1)
    world.start()
    assert len(world.records("f")) == 2 + count


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_frame_of_an_unknown_payload_kind_is_refused_on_every_path(world, count):
    """Recovery would refuse the frame, and the complete log after it."""
    sent = [
        broken(made(world, [b"%d" % i], number=2 + i), layout.W_TAIL, 0x30 << layout.FLAGS_SHIFT)
        for i in range(count)
    ]
    assert {error.status for error in refusals(world.send("f", sent)) if error} == {Status.INVALID_REQUEST}


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_frame_with_commit_times_of_its_producer_is_refused_on_every_path(world, count):
    """Only the shard assigns commit times. Only frames of segments have a column of them."""
    sent = []
    for i in range(count):
        columns = {Column.PAYLOAD: [b"x"], Column.COMMIT_TS: [5]}
        whole = bytearray(sealed_frame(columns, topic_id=world.topic("f").topic_id, base_seq=1))
        patch_header(whole, producer_id=1, producer_seq=2 + i, epoch=0)
        sent.append(whole)
    before = facts(world.topic("f"))
    assert {error.status for error in refusals(world.send("f", sent)) if error} == {Status.INVALID_REQUEST}
    assert facts(world.topic("f")) == before


def test_the_shard_overwrites_seq_and_commit_time_in_the_header_of_a_frame(world):
    """If the producer has no name, its values of `base_seq` and `commit_ts` have no meaning."""
    sent = made(world, [b"x"], producer=SESSION_BIT | 1)
    patch_header(sent, base_seq=4711, commit_ts=SEQ_MAX)
    entry = world.send("f", [sent])[0]
    assert int(entry[S_FIRST_SEQ]) == 3
    assert int(entry[S_COMMIT_TS]) == world.clock.now_us()


def test_commit_times_never_decrease_when_the_clock_steps_back(world):
    """This also holds across a restart."""
    stamps = []
    for step in (0.0, -5.0, 1.0, -100.0, 200.0):
        world.clock.step(step)
        stamps.append(int(world.send("f", [world.frame_for("f", [b"x"])])[0][S_COMMIT_TS]))
    world.kill()
    world.clock.step(-1_000)
    world.start()
    stamps.append(int(world.send("f", [world.frame_for("f", [b"x"])])[0][S_COMMIT_TS]))
    assert stamps == sorted(stamps)
    assert len(set(stamps)) > 1


def test_no_seq_is_assigned_beyond_the_maximum(world):
    """An append beyond it is refused with `INTERNAL`."""
    topic = world.topic("f")
    topic.next_seq, topic.head_seq = SEQ_MAX, SEQ_MAX - 1
    assert world.append("f", [b"last"]) == SEQ_MAX
    for payloads in ([b"x"], [b"x", b"y"]):
        error = refusals(world.send("f", [world.frame_for("f", payloads)]))[0]
        assert error is not None
        assert error.status == Status.INTERNAL
        assert topic.next_seq == SEQ_MAX + 1


# -- producers ---------------------------------------------------------------------------------------------


def entry_of(world: World, number: int, *, payloads: tuple[bytes, ...] = (b"x",), producer: int = 5) -> Any:
    return world.send("f", [made(world, list(payloads), number=number, producer=producer)])[0]


def is_repeat(entry: Any) -> bool:
    return bool(int(entry[S_COUNT_STATUS]) >> FLAGS_SHIFT & FLAG_DEDUPED)


def test_a_repeated_frame_is_settled_with_its_first_seqs_and_appended_once(world):
    """A pair of producer and number is appended at most once (W4). Repeats come in the same commit batch,
    later, with other content, and after a restart."""
    first = made(world, [b"a", b"b"], number=1, producer=5)
    entries = world.send("f", [bytearray(first), bytearray(first), made(world, [b"c"], number=2, producer=5)])
    assert [int(e[S_FIRST_SEQ]) for e in entries] == [3, 3, 5]
    assert [is_repeat(e) for e in entries] == [False, True, False]
    for end in (None, world.kill, world.stop, lambda: world.power_loss(3)):
        if end is not None:
            end()
            world.start()
        for number, payloads, first_seq, count in ((1, (b"other",), 3, 2), (2, (b"c",), 5, 1)):
            entry = entry_of(world, number, payloads=payloads)
            assert is_repeat(entry)
            assert (int(entry[S_FIRST_SEQ]), int(entry[S_COUNT_STATUS]) & 0xFFFFFFFF) == (first_seq, count)
            assert int(entry[S_EPOCH]) == world.topic("f").epoch
            assert int(entry[S_TOPIC]) == world.topic("f").topic_id
    assert len(world.records("f")) == 5


def test_a_gap_in_producer_numbers_is_accepted_and_a_refused_frame_is_never_acked_as_a_repeat(world):
    """A frame that was refused before a crash is sent again, after later frames were accepted.

    To ack it as a repeat would lose it. The shard refuses it as retriable, so that it comes under a new
    number.
    """
    world.put_topic("f", "merge", cap_records=4, discard="reject")
    assert refusals(world.send("f", [made(world, [b"a"], number=1, producer=5)])) == [None]
    too_many = made(world, [b"b"] * 3, number=2, producer=5)
    assert isinstance(refusals(world.send("f", [bytearray(too_many)]))[0], TopicFull)
    assert refusals(world.send("f", [made(world, [b"c"], number=3, producer=5)])) == [None]
    for end in (None, world.kill):
        if end is not None:
            end()
            world.start()
        before = facts(world.topic("f"))
        error = refusals(world.send("f", [bytearray(too_many)]))[0]
        assert error is not None
        assert error.status == Status.NOT_READY
        assert error.retriable
        assert error.outcome == "not_applied"
        assert facts(world.topic("f")) == before


def test_a_repeat_is_recognised_after_its_seqs_were_forgotten_and_an_unused_number_is_not_acked(world):
    """A topic with many producers forgets the seqs of older frames. It knows which numbers were used."""
    for number in (1, 2, 4, 5):
        latest = entry_of(world, number, payloads=(b"x",) * number)
        assert not is_repeat(latest)
        entry_of(world, number, producer=6)
    past = world.topic("f").producers.get(5)
    assert past is not None
    assert past.forget_seqs(1) == 2
    before = len(world.records("f"))
    for number, first_seq in ((1, 0), (2, 0), (4, 0), (5, int(latest[S_FIRST_SEQ]))):
        entry = entry_of(world, number, payloads=(b"x",) * number)
        assert is_repeat(entry)
        assert (int(entry[S_FIRST_SEQ]), int(entry[S_COUNT_STATUS]) & 0xFFFFFFFF) == (first_seq, number)
    error = refusals(world.send("f", [made(world, [b"x"], number=3, producer=5)]))[0]
    assert error is not None
    assert error.status == Status.NOT_READY
    assert len(world.records("f")) == before


def test_a_refused_first_frame_that_is_sent_again_is_not_acked(world):
    """The same holds for the first number of a producer."""
    assert refusals(world.send("f", [made(world, [b"x"] * 6, number=1, producer=5)]))[0] is not None
    assert refusals(world.send("f", [made(world, [b"x"], number=2, producer=5)])) == [None]
    error = refusals(world.send("f", [made(world, [b"x"], number=1, producer=5)]))[0]
    assert error is not None
    assert error.status == Status.NOT_READY


def test_a_full_window_of_frames_is_recognised_with_its_seqs(world):
    """The window has as many frames as can be in flight. Their record counts differ."""
    producers = ProducerTable()
    producers.admit(5)
    count = DEDUP_FRAMES_PER_PRODUCER
    seqs = np.arange(1, count + 1, dtype=np.uint64)
    counts = 1 + seqs % np.uint64(3)
    bases = np.cumsum(counts) - counts + np.uint64(1)
    producers.record(5, seqs, bases, counts)
    past = producers.get(5)
    assert past is not None
    for number in (1, 2, 3, count // 2, count):
        assert past.find(number) == (int(bases[number - 1]), int(counts[number - 1]))


def test_alternating_producers_of_one_topic_keep_their_seqs_after_a_restart(world):
    """Consecutive numbers of one producer are not consecutive seqs of the topic."""
    expected = {}
    for number in range(1, 7):
        for producer in (5, 6):
            expected[producer, number] = int(entry_of(world, number, producer=producer)[S_FIRST_SEQ])
    for end in (world.kill, world.stop):
        end()
        world.start()
        for (producer, number), first_seq in expected.items():
            entry = entry_of(world, number, producer=producer)
            assert is_repeat(entry)
            assert int(entry[S_FIRST_SEQ]) == first_seq


def test_the_producer_table_evicts_silent_sessions_and_throttles_when_only_named_producers_are_left(world):
    """The limit is `PRODUCERS_PER_TOPIC_MAX`. A refused frame never evicts a producer."""
    world.topic("f").producers = ProducerTable(most=3)
    for producer in (SESSION_BIT | 1, 2, SESSION_BIT | 3):
        assert world.append("f", [b"x"], producer=producer)
    refused = made(world, [b"x" * 501], number=1, producer=77)
    assert refusals(world.send("f", [refused]))[0] is not None
    assert world.topic("f").producers.get(SESSION_BIT | 1) is not None
    assert world.append("f", [b"x"], producer=4)
    assert world.topic("f").producers.get(SESSION_BIT | 1) is None, "the longest silent session"
    assert world.append("f", [b"x"], producer=5)
    error = refusals(world.send("f", [made(world, [b"x"], number=1, producer=6)]))[0]
    assert error is not None
    assert error.status == Status.THROTTLED
    assert world.append("f", [b"x"], producer=2), "a known producer must continue"


# -- caps with `discard: reject` ---------------------------------------------------------------------------


def test_reject_caps_are_exact_also_within_one_commit_batch(world):
    """Caps count records and accounted bytes, including staged frames."""
    for cap, value, fits in (("cap_records", 4, [1, 1]), ("cap_bytes", 11 + 4, [2, 2])):
        fresh = started()
        fresh.put_topic("f", durability="fsync", discard="reject", **{cap: value})
        fresh.append("f", [b"first", b"second"])
        sent = [fresh.frame_for("f", [b"x" * n]) for n in [*fits, 1, 3]]
        errors = refusals(fresh.send("f", sent))
        assert [error is None for error in errors] == [True, True, False, False]
        full = errors[2]
        assert isinstance(full, TopicFull)
        assert full.detail["head_seq"] == 4
        assert full.detail["earliest_seq"] == 1
        assert full.detail[cap] == value
        assert fresh.topic("f").head_seq == 4


def test_a_frame_that_can_never_fit_is_refused_permanently(world):
    """The error is `RECORD_TOO_LARGE` with `exceeds_cap`, not `TOPIC_FULL`."""
    world.put_topic("f", "merge", discard="reject", cap_records=4, cap_bytes=100)
    for payloads, unit, size, most in (([b"x"] * 5, "records", 5, 4), ([b"x" * 101], "bytes", 101, 100)):
        error = refusals(world.send("f", [world.frame_for("f", payloads)]))[0]
        assert error is not None
        assert (error.status, error.detail["exceeds_cap"]) == (Status.RECORD_TOO_LARGE, 1)
        assert (error.detail[unit], error.detail["max"]) == (size, most)
        assert not error.retriable


def test_caps_of_a_topic_that_discards_old_records_refuse_nothing(world):
    """Without `discard: reject`, old records are evicted instead."""
    world.put_topic("f", "merge", cap_records=2)
    assert world.append("f", [b"x"] * 3) == 3


# -- epochs ------------------------------------------------------------------------------------------------


def test_frames_of_an_earlier_epoch_are_refused_and_change_nothing(world):
    """A frame for another life of the topic is refused (W5). A recreated topic starts at seq 1."""
    old = world.topic("f")
    stale = made(world, [b"old"], epoch=old.epoch)
    world.request(m.TopicDelete("f"))
    assert refusals(world.send("f", [bytearray(stale)]))[0].status == Status.TOPIC_NOT_FOUND  # type: ignore[union-attr]
    again = world.put_topic("f", durability="fsync")
    assert again.epoch > old.epoch
    assert again.topic_id != old.topic_id
    patch_header(stale, topic_id=again.topic_id)
    error = refusals(world.send("f", [stale]))[0]
    assert isinstance(error, Refused)
    assert (error.status, error.detail["epoch"]) == (Status.STALE_EPOCH, again.epoch)
    assert world.append("f", [b"new"], producer=3) == 1
    world.power_loss(1)
    world.start()
    assert world.records("f") == [(1, b"new")]


@pytest.mark.parametrize("by_socket", [False, True])
def test_a_repeated_frame_is_settled_as_a_repeat_even_if_the_disk_is_full(world, by_socket):
    """A refusal would make the producer send the frame again under a new number (W4)."""
    sent = [world.frame_for("f", [b"once", b"twice"], producer=9, seq=3)]
    first = int(world.send("f", [bytearray(sent[0])])[0][S_FIRST_SEQ])
    restart(world)
    world.run_of("f").core.requests.appends.disk_missing_bytes = 4_096
    fresh = world.frame_for("f", [b"new"], producer=9, seq=4)
    if by_socket:
        message = m.Append("f", 2)
        reply = world.request(message, bytearray(sent[0]) + fresh)
        entries = np.frombuffer(reply.entries, dtype="<u8").reshape(-1, 8)
    else:
        entries = world.send("f", [bytearray(sent[0]), fresh])
    assert int(entries[0][S_FIRST_SEQ]) == first
    assert int(entries[0][S_COUNT_STATUS]) >> FLAGS_SHIFT == FLAG_DEDUPED
    assert [error and error.status for error in refusals(entries)] == [None, Status.INTERNAL]
    refused = refusals(entries)[1]
    assert refused is not None
    assert (refused.detail["reason"], refused.detail["missing_bytes"]) == ("disk_full", 4_096)
    with pytest.raises(Refused, match="disk full: free at least 4096 bytes"):
        world.request(m.Append("f", 1), bytearray(fresh))


def following(world: World, payloads: list[bytes], **options: Any) -> bytearray:
    """Return a frame with the flag that it follows the previous frame of its producer."""
    return broken(made(world, payloads, **options), layout.W_TAIL, layout.FLAG_FOLLOWS << layout.FLAGS_SHIFT)


def statuses(entries: Any) -> list[int]:
    """Return the status of each frame as a number."""
    return [(int(entry[S_COUNT_STATUS]) >> 32) & 0xFFFF for entry in entries]


OK, LATER = int(Status.OK), int(Status.NOT_READY)


@pytest.mark.parametrize("is_together", [True, False])
def test_frames_that_follow_a_missing_frame_are_refused_until_a_frame_without_the_flag(world, is_together):
    """The missing frame was refused temporarily, by any process, and will be sent again (W9)."""
    sent = [
        following(world, [b"a"], number=2), following(world, [b"c"], number=4),
        following(world, [b"d"], number=5), made(world, [b"c"], number=6),
        following(world, [b"d", b"e"], number=7),
    ]  # fmt: skip
    pushed = [sent] if is_together else [[each] for each in sent]
    found = [status for part in pushed for status in statuses(world.send("f", part))]
    assert found == [OK, LATER, LATER, OK, OK]
    restart(world)
    stored = [payload for _, payload in world.records("f", after=2)]
    assert stored == [b"a", b"c", b"d", b"e"], "stored frames must not depend on the way they were sent"
    assert statuses(world.send("f", [following(world, [b"f"], number=9)])) == [LATER]
    assert statuses(world.send("f", [following(world, [b"f"], number=8)])) == [OK]


@pytest.mark.parametrize("is_together", [True, False])
def test_a_following_frame_may_contain_records_that_expire(world, is_together):
    """The expiry columns are read before the frame is sealed. The flag in its header once ended the shard."""
    later = world.clock.now_us() + 3_600_000_000
    sent = [
        frame(
            encode_records([b"a", b"b"], expires_at=[later, None]), topic_id=world.topic("f").topic_id,
            producer_id=1, producer_seq=number,
        )
        for number in (2, 3, 4)
    ]  # fmt: skip
    for each in sent[1:]:
        broken(each, layout.W_TAIL, layout.FLAG_FOLLOWS << layout.FLAGS_SHIFT)
    pushed = [sent] if is_together else [[each] for each in sent]
    assert [status for part in pushed for status in statuses(world.send("f", part))] == [OK] * 3
    assert [payload for _, payload in world.records("f", after=2)] == [b"a", b"b"] * 3


def test_a_frame_that_follows_an_unknown_frame_is_refused(world):
    """The producer's first frame may have been refused, or the producer evicted (W9)."""
    sent = [following(world, [b"%d" % n], number=n, producer=9) for n in (2, 3)]
    assert statuses(world.send("f", sent)) == [LATER] * 2
    assert world.topic("f").producers.get(9) is None
    again = [made(world, [b"1"], number=4, producer=9), following(world, [b"2"], number=5, producer=9)]
    assert statuses(world.send("f", again)) == [OK, OK]


def test_a_frame_that_follows_a_permanently_refused_frame_is_admitted(world):
    """The refused frame is never sent again (W9). Otherwise a batch would need one attempt per frame."""
    large = following(world, [b"x" * 501], number=2)
    assert statuses(world.send("f", [large, following(world, [b"a"], number=3)])) == [
        Status.RECORD_TOO_LARGE, OK,
    ]  # fmt: skip
    beyond = [following(world, [b"x" * 501], number=5), following(world, [b"b"], number=6)]
    found = statuses(world.send("f", beyond))
    assert found == [Status.RECORD_TOO_LARGE, LATER], "the missing frame may still arrive"
    world.put_topic("f", durability="fsync", discard="reject", cap_records=4)
    full = [following(world, [b"%d" % n], number=n) for n in range(4, 8)]
    assert statuses(world.send("f", full)) == [OK, *[Status.TOPIC_FULL] * 3]
    world.put_topic("f", durability="fsync", discard="reject", cap_records=9)
    assert statuses(world.send("f", [following(world, [b"a"], number=8)])) == [OK]


def test_a_repeat_of_a_following_frame_gets_its_first_result(world):
    """The check for repeats (W4) precedes the check of the order (W9)."""
    sent = [following(world, [b"%d" % n], number=n) for n in (2, 3)]
    first = world.send("f", [bytearray(each) for each in sent])
    again = world.send("f", sent)
    assert again[:, S_FIRST_SEQ].tolist() == first[:, S_FIRST_SEQ].tolist() == [3, 4]
    assert [int(entry[S_COUNT_STATUS]) >> FLAGS_SHIFT for entry in again] == [FLAG_DEDUPED] * 2


def test_frames_in_messages_follow_the_same_rule_as_frames_in_a_ring(world):
    """This includes a frame that creates its topic (W9)."""
    data = broken(made(world, [b"a"], topic_id=0, number=1), layout.W_TAIL, 0x80 << layout.FLAGS_SHIFT)
    answer = world.request(m.Append("new", 1, create=True), data)
    assert statuses(np.frombuffer(answer.entries, dtype=np.uint64).reshape(-1, 8)) == [LATER]
    data = made(world, [b"a"], topic_id=0, number=2)
    answer = world.request(m.Append("new", 1), data)
    assert statuses(np.frombuffer(answer.entries, dtype=np.uint64).reshape(-1, 8)) == [OK]
