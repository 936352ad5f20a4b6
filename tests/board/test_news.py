"""News: a reader gets the written rows in order, and learns when rows are missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlog.board import layout, news, row_ring
from ringlog.board.layout import SLOT_MASK, VOLATILE_BIT, BoardError
from ringlog.board.mapping import make_board_file
from ringlog.board.news import NewsReader, NewsRow, NewsWriter
from ringlog.board.row_ring import RowsRead

ROWS = 8
U64_MAX = (1 << 64) - 1
WORDS_OF_HEADER = (row_ring._CLAIMED, row_ring._COUNT, row_ring._LIFE)
Row = tuple[int, ...]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "NEWS_ROWS", ROWS)


@pytest.fixture
def writer(shm_dir: Path) -> Iterator[NewsWriter]:
    writer = NewsWriter(shm_dir, 3)
    yield writer
    writer.close()


@pytest.fixture
def reader(writer: NewsWriter, shm_dir: Path) -> Iterator[NewsReader]:
    """A reader that has rescanned everything once."""
    reader = NewsReader(shm_dir, 3)
    reader.take_rows()
    yield reader
    reader.close()


def row(n: int) -> Row:
    return tuple(n * 100 + word for word in range(row_ring.ROW_WORDS))


def rows(start: int, stop: int) -> list[Row]:
    return [row(n) for n in range(start, stop)]


def told(taken: RowsRead) -> list[Row]:
    assert taken.rows.shape == (len(taken.rows), row_ring.ROW_WORDS)
    return [tuple(each) for each in taken.rows.tolist()]


# -- reading rows ---------------------------------------------------------------------------------------


def test_rows_are_read_once_and_in_order(writer: NewsWriter, reader: NewsReader) -> None:
    assert not reader.has_rows
    writer.add(rows(0, 1))
    writer.add(rows(1, 4))
    assert reader.has_rows
    taken = reader.take_rows()
    assert (told(taken), taken.is_complete) == (rows(0, 4), True)
    assert not reader.has_rows
    taken = reader.take_rows()
    assert (told(taken), taken.is_complete) == ([], True)


def test_a_row_reads_back_word_by_word(writer: NewsWriter, reader: NewsReader) -> None:
    given = NewsRow(7 | VOLATILE_BIT, U64_MAX, 1 << 32, 5, 9, 1 << 63, 4096, 8192)
    writer.add([given])
    [found] = reader.take_rows().rows
    assert NewsRow(*found.tolist()) == given
    assert int(found[news.N_SLOT]) & SLOT_MASK == 7


def test_adding_no_rows_publishes_nothing(writer: NewsWriter, reader: NewsReader) -> None:
    writer.add([])
    assert not reader.has_rows


def test_rows_that_were_read_do_not_change_later(writer: NewsWriter, reader: NewsReader) -> None:
    """The next rows use the same places in the ring."""
    writer.add(rows(0, ROWS))
    before = reader.take_rows()
    writer.add(rows(ROWS, 2 * ROWS))
    assert told(before) == rows(0, ROWS)


@pytest.mark.parametrize("step", range(1, ROWS + 1))
def test_rows_wrap_at_the_end_of_the_ring(writer: NewsWriter, reader: NewsReader, step: int) -> None:
    for first in range(0, 5 * ROWS, step):
        writer.add(rows(first, first + step))
        taken = reader.take_rows()
        assert (told(taken), taken.is_complete) == (rows(first, first + step), True)


def test_a_value_beyond_64_bits_is_refused_before_any_row_is_claimed(
    writer: NewsWriter, reader: NewsReader
) -> None:
    for bad in ([(-1, *row(0)[1:])], [row(0), (*row(0)[:-1], 1 << 64)]):
        with pytest.raises(OverflowError):
            writer.add(bad)
    writer.add(rows(0, 1))
    taken = reader.take_rows()
    assert (told(taken), taken.is_complete) == (rows(0, 1), True)


# -- missing rows ---------------------------------------------------------------------------------------


def test_a_new_reader_must_rescan_first(writer: NewsWriter, shm_dir: Path) -> None:
    """It does not know the rows that were written before it attached."""
    writer.add(rows(0, 3))
    reader = NewsReader(shm_dir, 3)
    assert reader.has_rows
    taken = reader.take_rows()
    assert (told(taken), taken.is_complete) == ([], False)
    writer.add(rows(3, 4))
    taken = reader.take_rows()
    assert (told(taken), taken.is_complete) == (rows(3, 4), True)
    reader.close()


def test_a_reader_misses_rows_only_if_more_than_a_full_ring_is_unread(
    writer: NewsWriter, reader: NewsReader
) -> None:
    writer.add(rows(0, 3))
    writer.add(rows(3, ROWS))
    taken = reader.take_rows()
    assert (told(taken), taken.is_complete) == (rows(0, ROWS), True)
    for n in range(ROWS + 1):
        writer.add(rows(n, n + 1))
    assert not reader.take_rows().is_complete
    writer.add(rows(50, 52))
    taken = reader.take_rows()
    assert (told(taken), taken.is_complete) == (rows(50, 52), True), "it goes on where the writer is"


@pytest.mark.parametrize("first", range(ROWS))
def test_the_ring_keeps_the_last_rows_of_a_call_that_overflows_it(
    writer: NewsWriter, reader: NewsReader, first: int
) -> None:
    writer.add(rows(0, first))
    reader.take_rows()
    writer.add(rows(first, first + 3 * ROWS + 1))
    assert not reader.take_rows().is_complete
    table = [tuple(each) for each in reader._table.tolist()]
    assert sorted(table) == rows(first + 2 * ROWS + 1, first + 3 * ROWS + 1)
    writer.add(rows(90, 92))
    taken = reader.take_rows()
    assert (told(taken), taken.is_complete) == (rows(90, 92), True)


# -- incarnations ---------------------------------------------------------------------------------------


def test_a_new_incarnation_continues_in_the_file_and_makes_readers_rescan(
    writer: NewsWriter, reader: NewsReader, shm_dir: Path
) -> None:
    """No row lists the effects of recovery, or publications that the predecessor did not announce."""
    writer.add(rows(0, 2))
    writer.close()
    successor = NewsWriter(shm_dir, 3)
    assert reader.has_rows
    successor.add(rows(2, 4))
    taken = reader.take_rows()
    assert (told(taken), taken.is_complete) == (rows(0, 4), False)
    successor.add(rows(4, 5))
    taken = reader.take_rows()
    assert (told(taken), taken.is_complete) == (rows(4, 5), True)
    successor.close()


def test_rows_that_a_dead_writer_claimed_are_never_read(
    writer: NewsWriter, reader: NewsReader, shm_dir: Path
) -> None:
    """The writer claimed three rows over the oldest rows of a full ring, and stored some of them."""
    writer.add(rows(0, ROWS))
    writer._words[row_ring._CLAIMED] = ROWS + 3
    for place in range(2):
        base = row_ring._BASE + place * row_ring.ROW_WORDS
        writer._words[base] = 666
    writer.close()
    successor = NewsWriter(shm_dir, 3)
    taken = reader.take_rows()
    assert (told(taken), taken.is_complete) == (rows(3, ROWS), False)
    for n in range(20, 20 + 2 * ROWS):
        successor.add(rows(n, n + 1))
        taken = reader.take_rows()
        assert (told(taken), taken.is_complete) == (rows(n, n + 1), True)
    successor.close()


# -- invalid files --------------------------------------------------------------------------------------


def test_a_reader_without_a_file_is_refused(shm_dir: Path) -> None:
    with pytest.raises(BoardError):
        NewsReader(shm_dir, 3)


def test_a_file_of_another_shard_or_kind_or_without_rows_is_refused(
    writer: NewsWriter, shm_dir: Path
) -> None:
    path = shm_dir / layout.news_name(4)
    os.rename(shm_dir / layout.news_name(3), path)
    for open_ in (NewsReader, NewsWriter):
        with pytest.raises(BoardError, match="must belong to shard 4 and have rows, got shard 3"):
            open_(shm_dir, 4)
    path.unlink()
    make_board_file(str(path), layout.PAGE_BYTES, layout.encode_identity(layout.NEWS_MAGIC, 4, 0, 0))
    with pytest.raises(BoardError, match="rows=0"):
        NewsReader(shm_dir, 4)
    path.unlink()
    make_board_file(str(path), layout.CHUNK_BYTES, layout.encode_identity(layout.TOPICS_MAGIC, 4, 4096, 0))
    with pytest.raises(BoardError, match="wrong magic"):
        NewsReader(shm_dir, 4)


def test_a_reader_cannot_write(reader: NewsReader) -> None:
    """The reader's mapping is read-only."""
    with pytest.raises(TypeError, match="read-only"):
        reader._words[row_ring._COUNT] = 1


def test_reader_and_writer_can_be_closed_twice(writer: NewsWriter, reader: NewsReader) -> None:
    for _ in range(2):
        reader.close()
        writer.close()
    with pytest.raises(ValueError, match="released"):
        _ = reader.has_rows


HOSTILE = st.sampled_from([0, 1, ROWS - 1, ROWS, ROWS + 1, 1 << 62, 1 << 63, U64_MAX - ROWS, U64_MAX])


@pytest.mark.interpreted
@given(
    before=st.tuples(*[HOSTILE | st.integers(0, U64_MAX)] * 3),
    turns=st.lists(st.tuples(*[HOSTILE | st.integers(0, U64_MAX)] * 3), max_size=4),
)
def test_no_header_words_make_a_reader_fail_or_read_outside_the_ring(
    before: tuple[int, ...], turns: list[tuple[int, ...]]
) -> None:
    """For any header words the reader returns at most one full ring of rows, and continues."""
    words = memoryview(bytearray(layout.PAGE_BYTES + ROWS * layout.NEWS_ROW_BYTES)).cast("Q")
    reader = reader_over(words, before)
    for turn in turns:
        for word, value in zip(WORDS_OF_HEADER, turn, strict=True):
            words[word] = value
        taken = reader.take_rows()
        assert len(told(taken)) <= ROWS
        assert reader._next == turn[1]
        assert not reader.has_rows


def reader_over(words: memoryview, header: tuple[int, ...]) -> NewsReader:
    for word, value in zip(WORDS_OF_HEADER, header, strict=True):
        words[word] = value
    reader = NewsReader.__new__(NewsReader)
    reader._words, reader._rows = words, ROWS
    reader._table = np.frombuffer(words, dtype=np.uint64)[row_ring._BASE :].reshape(-1, row_ring.ROW_WORDS)
    reader._next, reader._life = words[row_ring._COUNT], -1
    return reader


# -- on real memory -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_reader_in_another_process_reads_exactly_the_written_rows(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer wraps around a small ring as fast as it can until the reader has 100,000 rows."""
    monkeypatch.setattr(news, "NEWS_ROWS", 4096)
    writer = NewsWriter(shm_dir, 3)
    reader = NewsReader(shm_dir, 3)
    pid = os.fork()
    if pid == 0:
        count = 0
        while True:
            many = count % 7 + 1
            writer.add([(count + n,) * row_ring.ROW_WORDS for n in range(many)])
            count += many
    pidfd, whole = os.pidfd_open(pid), 0
    try:
        for _ in range(10_000_000):
            taken = reader.take_rows()
            found = taken.rows
            assert (found == found[:, :1]).all(), "a row is of one piece"
            numbers = found[:, 0].tolist()
            assert numbers == list(range(reader._next - len(numbers), reader._next))
            whole += len(numbers) if taken.is_complete else 0
            if whole > 100_000:
                break
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(pidfd)
        reader.close()
        writer.close()
    assert whole > 100_000
