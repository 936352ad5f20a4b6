"""The topic table: slots, growth, successors, and readers in other processes."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringlog.board import layout
from ringlog.board.board import BoardError, BoardUnstable
from ringlog.board.topics import TOPIC_EMPTY, TOPIC_LIVE, TopicFacts, TopicTable

FACTS = TopicFacts(9, 2, TOPIC_LIVE, 50, 3, 2, 1, 0, 48, 4_800, 1_700_000_000_000_000, 0b1010)
CHUNK = layout.TOPICS_PER_CHUNK


@pytest.fixture
def table(shm_dir: Path) -> Iterator[TopicTable]:
    table = TopicTable.create(shm_dir, 7)
    yield table
    table.close()


@pytest.fixture
def reader(table: TopicTable, shm_dir: Path) -> Iterator[TopicTable]:
    reader = TopicTable.open(shm_dir, 7)
    yield reader
    reader.close()


def test_a_published_slot_reads_back_whole(table: TopicTable, reader: TopicTable) -> None:
    first, second = table.allocate(), table.allocate()
    table.publish(second, FACTS)
    assert reader.read(second) == FACTS
    assert reader.read(first).state == TOPIC_EMPTY
    big = TopicFacts(*[(1 << 63) - 1] * 2, 1, *[(1 << 63) - 1] * 8, 15)
    table.publish(first, big)
    assert reader.read(first) == big


def test_released_slots_are_empty_and_reused_lowest_first(table: TopicTable, reader: TopicTable) -> None:
    slots = [table.allocate() for _ in range(4)]
    assert slots == [0, 1, 2, 3]
    table.publish(1, FACTS)
    table.publish(2, FACTS)
    table.release(2)
    table.release(1)
    assert reader.read(1) == TopicFacts(*[0] * 16)
    assert [table.allocate() for _ in range(3)] == [1, 2, 4]


def test_the_table_grows_by_chunks_while_readers_use_it(
    table: TopicTable, reader: TopicTable, shm_dir: Path
) -> None:
    slots = [table.allocate() for _ in range(CHUNK + 2)]
    assert slots == list(range(CHUNK + 2))
    table.publish(CHUNK + 1, FACTS)
    assert sorted(os.listdir(shm_dir)) == ["topics-07-00", "topics-07-01"]
    assert reader.capacity == CHUNK
    assert reader.read(CHUNK + 1) == FACTS
    assert reader.capacity == 2 * CHUNK
    for slot in (-1, 2 * CHUNK):
        with pytest.raises(BoardError, match=rf"topic slot must be in 0\.\.{2 * CHUNK - 1}, got {slot}"):
            reader.read(slot)


def test_a_successor_continues_in_the_same_files(
    table: TopicTable, reader: TopicTable, shm_dir: Path
) -> None:
    """Readers that have mapped the table see the successor's facts."""
    for slot in range(3):
        assert table.allocate() == slot
        table.publish(slot, FACTS._replace(topic_id=slot + 1))
    table.close()
    successor = TopicTable.create(shm_dir, 7)
    assert reader.read(1).topic_id == 2, "until it says otherwise the old facts stand"
    assert successor.allocate() == 3
    successor.reset()
    assert [reader.read(slot).state for slot in range(3)] == [TOPIC_EMPTY] * 3
    slot = successor.allocate()
    assert slot == 0
    successor.publish(slot, FACTS._replace(topic_id=44))
    assert reader.read(slot).topic_id == 44
    successor.close()


def test_a_partly_written_slot_blocks_no_reader_and_is_emptied(
    table: TopicTable, reader: TopicTable, shm_dir: Path
) -> None:
    """Reads raise BoardUnstable in bounded time. The successor empties the slot and never guesses its facts
    (RF-27)."""
    slot = table.allocate()
    table.publish(slot, FACTS)
    words, at = table._slot(slot)
    words[at] |= 1
    words[at + 4] = 999
    with pytest.raises(BoardUnstable, match=r"half written.*slot=0.*shard=7"):
        reader.read(slot)
    successor = TopicTable.open(shm_dir, 7, writable=True)
    assert reader.read(slot) == TopicFacts(*[0] * 16)
    assert successor.allocate() == slot
    successor.close()


def test_reset_empties_all_slots_and_repairs_partial_ones(table: TopicTable, reader: TopicTable) -> None:
    for _ in range(5):
        table.publish(table.allocate(), FACTS)
    words, at = table._slot(2)
    words[at] |= 1
    table.reset()
    assert {reader.read(slot) for slot in range(5)} == {TopicFacts(*[0] * 16)}
    assert table.allocate() == 0


def test_a_successor_keeps_topics_in_their_slots(table: TopicTable, shm_dir: Path) -> None:
    """Readers that follow a topic already know its slot."""
    for topic_id in (11, 12, 13):
        table.publish(table.allocate(), FACTS._replace(topic_id=topic_id))
    table.release(0)
    had = table.reset()
    assert had == {12: 1, 13: 2}
    table.reserve_slots([had[13], -1])
    assert [table.allocate() for _ in range(3)] == [0, 1, 3]


def test_another_shards_table_is_refused(table: TopicTable, shm_dir: Path) -> None:
    (shm_dir / "topics-07-00").rename(shm_dir / "topics-08-00")
    with pytest.raises(BoardError, match=r"another shard.*shard=7"):
        TopicTable.open(shm_dir, 8)
    with pytest.raises(BoardError, match="No such file"):
        TopicTable.open(shm_dir, 7)


def test_a_reader_cannot_write(table: TopicTable, reader: TopicTable) -> None:
    """The reader's mapping is read-only."""
    with pytest.raises(TypeError, match="read-only"):
        reader.publish(0, FACTS)


@pytest.mark.slow
def test_a_reader_in_another_process_never_sees_mixed_facts(table: TopicTable, shm_dir: Path) -> None:
    """On real memory, all facts of one slot carry the same number in 200,000 racing reads (RF-116)."""
    slots = [table.allocate() for _ in range(16)]
    for slot in slots:
        table.publish(slot, TopicFacts(*[1] * 16))
    pid = os.fork()
    if pid == 0:
        number = 1
        while True:
            number = number % 250 + 1
            for slot in slots:
                table.publish(slot, TopicFacts(*[number] * 16))
    reader = TopicTable.open(shm_dir, 7)
    pidfd, seen = os.pidfd_open(pid), set()
    try:
        for _ in range(200_000):
            facts = reader.read(slots[5])
            assert len(set(facts)) == 1, facts
            seen.add(facts.topic_id)
        assert not select.select([pidfd], [], [], 0)[0], "the writer lives"
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pidfd)
        reader.close()
    assert len(seen) > 10, "the writer wrote while we read"


def test_peek_detects_changes_of_mapped_slots_only(
    table: TopicTable, reader: TopicTable, shm_dir: Path
) -> None:
    """Any thread may call peek: it maps nothing, and returns -1 for a closed table."""
    slots = [table.allocate() for _ in range(CHUNK + 1)]
    table.publish(slots[0], FACTS)
    before = reader.sequence_or_minus_one(0)
    assert before == reader.sequence(0)
    table.publish(0, FACTS._replace(head_seq=60))
    assert reader.sequence_or_minus_one(0) != before
    assert reader.sequence_or_minus_one(CHUNK) == -1, "a chunk made since is not looked for"
    assert reader.sequence(CHUNK) >= 0
    assert reader.sequence_or_minus_one(CHUNK) == reader.sequence(CHUNK)
    assert reader.sequence_or_minus_one(-1) == -1
    gone = TopicTable.open(shm_dir, 7)
    gone.close()
    assert gone.sequence_or_minus_one(0) == -1
