"""Changes of a consumer group as bytes: the golden frames, and bytes that no version can have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringlog import limits
from ringlog.actors.wal_shard.commit.control_records import decode_body, frame_of
from ringlog.errors import CorruptData
from ringlog.frame import open_frame
from ringlog.frame.layout import FrameType
from ringlog.leases.change import GroupConfig, LeaseChange, Mode, Op
from ringlog.leases.failures import Failure
from ringlog.leases.group import create_group
from ringlog.leases.pending_list import list_pending
from ringlog.leases.snapshot import decode_group, encode_group

GOLDEN = Path(__file__).parents[1] / "golden" / "frames"
SEED = 0x0123456789ABCDEF
NUMBER = 0x18000000005
CREATED = LeaseChange(
    NUMBER, 1, Op.CREATED, 1_700_000_000_000, 8, config=GroupConfig("billing", Mode.QUEUE, "^eu.", 500, 50)
)
LETTERED = LeaseChange(
    NUMBER,
    1,
    Op.CREATED,
    1_700_000_000_000,
    8,
    config=GroupConfig("billing", Mode.QUEUE, "^eu.", 500, 50, 3, "dead"),
)
CLAIMED = LeaseChange(
    NUMBER, 2, Op.CLAIMED, 1_700_000_000_500, 12, "ann", 1_700_000_030_500,
    [8, 2, 1, 0x18000000006, 11, 1, 3, 0x18000000008], 77,
)  # fmt: skip


REJECTED = LeaseChange(
    NUMBER, 3, Op.REJECTED, 1_700_000_000_900, 12, "ann", 0, [8, 2], 78, reason="no address"
)


def test_the_engine_writes_and_reads_the_golden_body() -> None:
    golden = golden_of("leases_rejected")
    body = bytes(frame_of(REJECTED, 42, 3))[80:]
    assert golden[80:].rstrip(b"\0") == body.rstrip(b"\0")
    assert decode_body(FrameType.LEASE, body.rstrip(b"\0")) == REJECTED


@pytest.mark.parametrize(
    ("name", "change"),
    [("group_with_letters", LETTERED), ("group_claimed", CLAIMED), ("group_rejected", REJECTED)],
)
def test_changes_of_earlier_versions_are_read(name: str, change: LeaseChange) -> None:
    assert decode_body(FrameType.LEASE, golden_of(name)[80:].rstrip(b"\0")) == change


def golden_of(name: str) -> bytes:
    golden = bytes.fromhex((GOLDEN / f"{name}.hex").read_text())
    assert open_frame(golden, seed=SEED).frame_type == FrameType.LEASE
    return golden


def test_a_group_created_before_dead_letters_existed_has_none() -> None:
    golden = bytes.fromhex((GOLDEN / "group_created.hex").read_text())
    assert open_frame(golden, seed=SEED).frame_type == FrameType.LEASE
    found = decode_body(FrameType.LEASE, golden[80:].rstrip(b"\0"))
    assert found == CREATED
    assert (found.config.deliveries_max, found.config.dead_letter) == (0, "")


def test_a_group_saved_and_loaded_is_the_same() -> None:
    group = create_group(CREATED)
    group.replay(CLAIMED)
    group.replay(REJECTED)
    again = decode_group(encode_group(group))
    assert again.config == CREATED.config
    assert dict(again.failures) == dict.fromkeys((8, 9), Failure("no address", REJECTED.at_ms, 0))
    assert list_pending(again, CLAIMED.at_ms) == list_pending(group, CLAIMED.at_ms)
    assert (again.last_change_number, again.cursor, again.pending, again.recent_calls.find(77)) == (
        3,
        12,
        3,
        CLAIMED,
    )


def test_replies_of_one_member_do_not_evict_those_of_another() -> None:
    group = create_group(CREATED)
    group.replay(CLAIMED)
    for n in range(limits.LEASE_CALLS_PER_NODE_MAX + 9):
        group.replay(
            change := LeaseChange(NUMBER, n + 3, Op.EXTENDED, CLAIMED.at_ms, 12, "bob", call=1_000 + n)
        )
        assert group.recent_calls.find(1_000 + n) is change
    assert group.recent_calls.find(77) == CLAIMED
    assert group.recent_calls.find(1_000 + 8) is None
    for n in range(limits.LEASE_CALLS_KEPT_MAX):
        group.replay(
            LeaseChange(NUMBER, group.last_change_number + 1, Op.EXTENDED, 1, 12, f"m{n}", call=9_000 + n)
        )
    assert len(group.recent_calls) == limits.LEASE_CALLS_KEPT_MAX
    assert group.recent_calls.find(77) is None
    wide = LeaseChange(
        NUMBER, group.last_change_number + 1, Op.ACKED, 1, 12, "x", rows=[1, 1] * 10_000, call=5
    )
    group.replay(wide)
    assert group.recent_calls.find(5) is None, "the numbers in answers are bounded, too"
    assert not group.recent_calls


@pytest.mark.parametrize("at", range(0, 200, 3))
def test_damaged_group_state_is_refused_or_consistent(at: int) -> None:
    """Any bytes give CorruptData and no other exception, or a consistent group."""
    group = create_group(CREATED)
    group.replay(CLAIMED)
    data = bytearray(encode_group(group))
    data[at % len(data)] ^= 0x41
    try:
        decode_group(bytes(data)).check()
    except CorruptData:
        return
