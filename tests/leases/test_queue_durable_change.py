"""A queue's changes as bytes: what the golden frame says, and what no version can have written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from actors.wal_shard.commit.control_records import decode_body, frame_of
from ringlog import limits
from ringlog.errors import CorruptData
from ringlog.frame import open_frame
from ringlog.frame.layout import FrameType
from ringlog.leases.change import LeaseChange, Op
from ringlog.leases.group import ConsumerGroup
from ringlog.leases.live_seqs import LiveSeqs
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


def test_what_queues_wrote_before_they_had_the_changes_of_groups_is_read() -> None:
    body = bytes.fromhex((GOLDEN / "jobs_claimed.hex").read_text())[80:].rstrip(b"\0")
    assert decode_body(FrameType.LEASE, body) == CLAIMED
    moved = [0, 3, 12, NOW, 0, "", 0, [7], 0, [], None]
    for tail in ([], [[0, 0], "", [], None]):
        found = decode_body(FrameType.LEASE, msgspec.msgpack.encode(moved + tail))
        assert (found.op, found.rows) == (Op.DEAD_LETTERED, [7])


def test_what_a_later_version_appends_is_passed_over() -> None:
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


def test_an_event_of_a_job_that_is_not_leased_is_stale() -> None:
    """QL-17."""
    durable = told()
    counts = durable.counts(20)
    for n, op in enumerate((Op.RELEASED, Op.EXTENDED, Op.REJECTED)):
        durable.replay(LeaseChange(0, 5 + n, op, NOW, until_ms=NOW + 9_000, rows=[9, 3, 40, 2]))
    assert durable.counts(20) == counts
    durable.replay(LeaseChange(0, 7, Op.RELEASED, NOW, rows=[8, 1]))
    assert durable.counts(20) == counts, "its number is not above the last one's"
    durable.check()


def test_answers_that_are_kept_are_bounded() -> None:
    durable = told()
    for n in range(limits.LEASE_CALLS_KEPT_MAX):
        assert durable.recent_calls.find(77)
        durable.extend(held(8), f"w{n}", 9_000, NOW, call=1_000 + n)
    assert not durable.recent_calls.find(77)
    assert len(durable.recent_calls) == limits.LEASE_CALLS_KEPT_MAX
    durable.extend(held(*range(0, 20_000, 2)), "w", 9_000, NOW, call=5)
    assert not durable.recent_calls, "the numbers in them are bounded, too"


def test_the_largest_row_fits_its_bound() -> None:
    """DURABLE_LEASE_BYTES, and what nodes and processes take beside."""
    queue, count = ConsumerGroup(tokens=LeaseTokens(9)), 3_000
    queue.begin_log()
    for n in range(count):
        node = f"{n % 500:0128}"
        queue.claim(LiveSeqs(1, 9_000), node, 1, 60_000, NOW, life=(1 << 32, (1 << 48) + n % 500))
    most = count * limits.DURABLE_LEASE_BYTES + 500 * (limits.NODE_BYTES_MAX + 32)
    assert len(encode_queue_leases(queue)) < most + 200
    assert decode_queue_leases(encode_queue_leases(queue)).leased == count


@pytest.mark.parametrize("at", range(0, 300, 3))
def test_damaged_state_is_found_or_makes_sense(at: int) -> None:
    """SN-10: no exception but CorruptData comes out, whatever the bytes."""
    data = bytearray(encode_queue_leases(told()))
    data[at % len(data)] ^= 0x41
    try:
        decode_queue_leases(bytes(data)).check()
    except CorruptData:
        return


@pytest.mark.parametrize("rows", [[5], [5, 3, 1], [5, 0, 1, 9], [(1 << 64) - 3, 9, 1, 5], [1, 1 << 62, 1, 5]])
def test_rows_that_no_version_wrote_are_damage(rows: list[int]) -> None:
    with pytest.raises(CorruptData):
        new_durable_group().replay(LeaseChange(0, 1, Op.CLAIMED, NOW, node="w", until_ms=NOW, rows=rows))
    for op in (Op.RELEASED, Op.EXTENDED, Op.REJECTED) if len(rows) % 2 else ():
        with pytest.raises(CorruptData):
            told().replay(LeaseChange(0, 9, op, NOW, rows=rows))
    with pytest.raises(CorruptData):
        told().replay(LeaseChange(0, 9, Op.SNAPSHOT, NOW, run_columns=b"\xc0"))
