"""The successor of a killed engine: no acknowledged record is missing or reported as missing."""

from __future__ import annotations

import os

import pytest

import ringlog
from ringlog.board.board import Board, WatermarkKind
from ringlog.board.processes import shard_slot
from ringlog.supervision.run_dir import read_engine_json
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import engine_fixture

pytestmark = pytest.mark.slow

engine = engine_fixture()


def tear(engine: TestEngine) -> None:
    """Kill every process of the engine during a write, so that the log ends in an incomplete frame."""
    shm_dir = read_engine_json(engine.run_dir).shm_dir
    engine.crash()
    board = Board.open(shm_dir, writable=False)
    try:
        file_id, offset = board.process(shard_slot(0)).watermark(WatermarkKind.PUBLISHED)
    finally:
        board.close()
    incarnation, number = file_id >> 24, file_id & 0xFF_FFFF
    log = f"{engine.data_dir}/wal/shard-00/wal-{incarnation}-{number}.log"
    fd = os.open(log, os.O_RDWR)
    try:
        begin = os.pread(fd, 40, 4096)
        assert any(begin), "a frame begins there"
        # The bytes after it are erased: they may contain a whole frame that was not published yet.
        os.pwrite(fd, begin + bytes(4096), offset)
    finally:
        os.close(fd)


@pytest.mark.parametrize("is_board_kept", [True, False])
def test_a_torn_end_loses_no_acknowledged_record(engine: TestEngine, is_board_kept: bool) -> None:
    """With the board, the new shard knows the published end, and the torn end has no effect.

    Without the board, the seqs that may have been assigned are announced as lost.
    """
    with ringlog.connect(engine.url) as client:
        client.topics.create("t", durability="disk")
        assert client.append_many("t", [b"a", b"b"]).first_seq == 1
    log = engine.log_path.read_text
    tear(engine)
    if not is_board_kept:
        engine.power_off()
    engine.start()
    with ringlog.connect(engine.url) as client:
        assert [record.data for record in client.read("t").records] == [b"a", b"b"]
        seq = client.append("t", b"c").first_seq
        page = client.read("t", after=2)
    # The shard logs through the supervisor, possibly a moment later.
    wait_until(lambda: "torn log tail truncated" in log(), 20, "the torn tail is told of", log)
    if is_board_kept:
        assert seq == 3
        assert page.tombstone is None
    else:
        assert seq > 3
        assert page.tombstone is not None
        assert (page.tombstone.gap_from, page.tombstone.gap_to) == (3, seq - 1)
    assert engine.stop() == 0
