"""Changes of a queue with durable leases as bytes: the golden frame, and bytes that no version can have
written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from ringlog import limits
from ringlog.actors.wal_shard.commit.control_records import decode_body, frame_of
from ringlog.errors import CorruptData
from ringlog.frame import open_frame
from ringlog.frame.layout import FrameType
from ringlog.leases.change import LeaseChange, Op
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.live_seqs import LiveSeqs
from ringlog.leases.pending_list import list_pending
from ringlog.leases.snapshot import decode_queue_leases, encode_queue_leases, new_durable_group
from ringlog.leases.tokens import LeaseTokens
from ringlog.leases.types import LeaseMatch

GOLDEN = Path(__file__).parents[1] / "golden" / "frames"
SEED = 0x0123456789ABCDEF
NOW = 1_700_000_000_500
CLAIMED = LeaseChange(
    0, 2, Op.CLAIMED, NOW, 0, "ann", NOW + 30_000, [8, 2, 1, 0x30000000006, 11, 1, 3, 0x30000000008], 77,
    process_id=(4_711, 815), exhausted=[5, 2],
)  # fmt: skip


def test_the_engine_writes_and_reads_the_golden_body() -> None:
    golden = bytes.fromhex((GOLDEN / "leases_claimed.hex").read_text())
    assert open_frame(golden, seed=SEED).frame_type == FrameType.LEASE
    body = bytes(frame_of(CLAIMED, 42, 3))[80:]
    assert golden[80:].rstrip(b"\0") == body.rstrip(b"\0")
    assert decode_body(FrameType.LEASE, body[: len(body.rstrip(b"\0"))]) == CLAIMED


def test_changes_in_the_old_format_of_queues_are_read() -> None:
    body = bytes.fromhex((GOLDEN / "jobs_claimed.hex").read_text())[80:].rstrip(b"\0")
    assert decode_body(FrameType.LEASE, body) == CLAIMED
    moved = [0, 3, 12, NOW, 0, "", 0, [7], 0, [], None]
    for tail in ([], [[0, 0], "", [], None]):
        found = decode_body(FrameType.LEASE, msgspec.msgpack.encode(moved + tail))
        assert (found.op, found.rows) == (Op.DEAD_LETTERED, [7])


def test_fields_of_a_later_version_are_ignored() -> None:
    plain = msgspec.to_builtins(CLAIMED)
    assert decode_body(FrameType.LEASE, msgspec.msgpack.encode([*plain, 5, "more"])) == CLAIMED
    with pytest.raises(CorruptData):
        decode_body(FrameType.LEASE, msgspec.msgpack.encode([0, 2, 99, NOW]))


def held(*seqs: int) -> LeaseMatch:
    none = np.zeros(0, np.int64)
    return LeaseMatch(np.array(seqs, np.int64), none, none)


def told() -> ConsumerGroup:
    durable = new_durable_group()
    durable.replay(CLAIMED)
    durable.replay(LeaseChange(0, 3, Op.RELEASED, NOW, until_ms=NOW + 9, rows=[9, 1]))
    durable.replay(LeaseChange(0, 4, Op.REJECTED, NOW, rows=[11, 1], reason="why"))
    return durable


def test_a_change_of_a_job_that_is_not_leased_has_no_effect() -> None:
    """A change whose number is not above the last one has no effect either."""
    durable = told()
    counts = durable.counts(20)
    for n, op in enumerate((Op.RELEASED, Op.EXTENDED, Op.REJECTED)):
        durable.replay(LeaseChange(0, 5 + n, op, NOW, until_ms=NOW + 9_000, rows=[9, 3, 40, 2]))
    assert durable.counts(20) == counts
    durable.replay(LeaseChange(0, 7, Op.RELEASED, NOW, rows=[8, 1]))
    assert durable.counts(20) == counts, "its number is not above the last one's"
    durable.check()


def test_the_replies_kept_are_bounded() -> None:
    durable = told()
    for n in range(limits.LEASE_CALLS_KEPT_MAX):
        assert durable.recent_calls.find(77)
        durable.extend(held(8), f"w{n}", 9_000, NOW, call=1_000 + n)
    assert not durable.recent_calls.find(77)
    assert len(durable.recent_calls) == limits.LEASE_CALLS_KEPT_MAX
    durable.extend(held(*range(0, 20_000, 2)), "w", 9_000, NOW, call=5)
    assert not durable.recent_calls, "the numbers in them are bounded, too"


def test_the_largest_row_fits_its_bound() -> None:
    """The bound is DURABLE_LEASE_BYTES for each lease, plus the names of nodes and the process ids."""
    queue, count = ConsumerGroup(tokens=LeaseTokens(9)), 3_000
    queue.begin_log()
    for n in range(count):
        node = f"{n % 500:0128}"
        queue.claim(LiveSeqs(1, 9_000), node, 1, 60_000, NOW, process_id=(1 << 32, (1 << 48) + n % 500))
    most = count * limits.DURABLE_LEASE_BYTES + 500 * (limits.NODE_BYTES_MAX + 32)
    assert len(encode_queue_leases(queue)) < most + 200
    assert decode_queue_leases(encode_queue_leases(queue)).leased == count


@pytest.mark.parametrize("at", range(0, 300, 3))
def test_damaged_lease_state_is_refused_or_consistent(at: int) -> None:
    """Any bytes give CorruptData and no other exception, or a consistent queue."""
    data = bytearray(encode_queue_leases(told()))
    data[at % len(data)] ^= 0x41
    try:
        decode_queue_leases(bytes(data)).check()
    except CorruptData:
        return


@pytest.mark.parametrize("rows", [[5], [5, 3, 1], [5, 0, 1, 9], [(1 << 64) - 3, 9, 1, 5], [1, 1 << 62, 1, 5]])
def test_rows_that_no_version_wrote_are_refused(rows: list[int]) -> None:
    with pytest.raises(CorruptData):
        new_durable_group().replay(LeaseChange(0, 1, Op.CLAIMED, NOW, node="w", until_ms=NOW, rows=rows))
    for op in (Op.RELEASED, Op.EXTENDED, Op.REJECTED) if len(rows) % 2 else ():
        with pytest.raises(CorruptData):
            told().replay(LeaseChange(0, 9, op, NOW, rows=rows))
    with pytest.raises(CorruptData):
        told().replay(LeaseChange(0, 9, Op.SNAPSHOT, NOW, run_columns=b"\xc0"))


def leased_at(when: int) -> ConsumerGroup:
    queue = ConsumerGroup(tokens=LeaseTokens(9))
    queue.begin_log()
    assert queue.claim(LiveSeqs(1, 9), "ann", 3, 60_000, when)
    return queue


def can_take_over(queue: ConsumerGroup, min_idle_ms: int, now: int) -> bool:
    queue.finish_recovery(LiveSeqs(1, 3), LeaseTokens(10))
    return queue.claim(LiveSeqs(1, 3), "bob", 3, 1_000, now, min_idle_ms=min_idle_ms) is not None


def test_a_snapshot_keeps_when_a_job_was_delivered() -> None:
    """After a restart, a claim with `min_idle_ms` takes over only jobs that were idle that long."""
    data = encode_queue_leases(leased_at(NOW))
    entries = list_pending(decode_queue_leases(data), NOW + 5)[0]
    assert [(entry.begun_ms, entry.given_ms) for entry in entries] == [(NOW, NOW)]
    assert not can_take_over(decode_queue_leases(data), 5_000, NOW + 4_999)
    assert can_take_over(decode_queue_leases(data), 5_000, NOW + 5_000)


def test_the_log_of_leases_that_become_durable_keeps_when_a_job_was_delivered() -> None:
    changes = leased_at(NOW).snapshot_changes(NOW + 4_000)
    for now, is_taken in ((NOW + 4_999, False), (NOW + 5_000, True)):
        queue = new_durable_group()
        for change in changes:
            queue.replay(change)
        assert can_take_over(queue, 5_000, now) is is_taken


def test_a_lease_without_a_time_counts_from_the_last_change() -> None:
    """Older snapshots have no delivery times. Their live leases must not appear idle."""
    golden = bytes.fromhex((GOLDEN.parent / "leases" / "queue_row.hex").read_text())
    assert list_pending(decode_queue_leases(golden), NOW)[0][0].given_ms == NOW


def test_a_worker_that_steals_its_only_leases_keeps_them() -> None:
    """Found by the fuzzer: the worker was forgotten in the middle, and the next one got its number."""
    queue, live = ConsumerGroup(tokens=LeaseTokens(9)), LiveSeqs(1, 4)
    queue.begin_log()
    assert queue.claim(live, "ann", 2, 60_000, NOW)
    stolen = queue.steal(np.array([1, 2]), "ann", 60_000, NOW + 1)
    assert stolen is not None
    queue.check()
    assert queue.claim(live, "bob", 1, 60_000, NOW + 2)
    queue.check()
    seqs, token = np.array([1, 2]), stolen.rows[3]
    assert queue.match(seqs, np.array([token, token + 1], np.uint64), "ann", NOW + 3).leased.tolist() == [
        1,
        2,
    ]
    assert not queue.match(seqs, np.zeros(2, np.uint64), "bob", NOW + 3).leased.tolist()
    again = decode_queue_leases(encode_queue_leases(queue))
    again.check()
    assert [entry.node for entry in list_pending(again, NOW + 4)[0]] == ["ann", "bob"]
