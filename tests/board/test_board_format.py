"""The board in the code matches docs/reference/format.md."""

from __future__ import annotations

import re
from pathlib import Path

from ringlog.board import histogram, layout, news, row_ring
from ringlog.board.layout import GovernorField, ProcessField, ProcessState, SchedulerField
from ringlog.board.news import NewsRow
from ringlog.board.topics import TopicFacts
from ringlog.limits import CALL_BYTES_MAX, CALL_RING_BYTES, GRANT_RING_ROWS, NEWS_ROWS
from ringlog.link.channel import call_ring

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "format.md").read_text()
BOARD = PAGE.split("\n## Board\n")[1].split("\n## ")[0]


def test_the_example_identities_on_the_page_equal_the_encoded_ones() -> None:
    block = re.search(r"```board\n(.*?)```", BOARD, re.S)
    assert block
    board, topics, told, turns, calls = (bytes.fromhex(line) for line in block[1].splitlines())
    assert board == layout.encode_identity(layout.BOARD_MAGIC, 0, 128, 0)
    assert topics == layout.encode_identity(layout.TOPICS_MAGIC, 7, 4096, 1)
    assert told == layout.encode_identity(layout.NEWS_MAGIC, 7, NEWS_ROWS, 0)
    assert turns == layout.encode_identity(layout.GRANTS_MAGIC, 0, GRANT_RING_ROWS, 0)
    assert calls == layout.encode_identity(layout.CALLS_MAGIC, 7, 2 * CALL_RING_BYTES // 64, 0)
    assert layout.decode_identity(topics, layout.TOPICS_MAGIC, "page") == (7, 4096, 1)


def test_the_fields_of_a_process_are_on_the_page() -> None:
    rows = re.findall(r"\| (\d+) \| ([A-Z_]+)(?= \|)", BOARD)
    assert {name: int(word) for word, name in rows} == {
        word.name: int(word) for word in (*ProcessField, *SchedulerField, *GovernorField)
    }
    for state in ProcessState:
        assert f"{int(state)} {state.name.lower()}" in BOARD


def test_watermarks_and_histograms_have_the_offsets_of_the_page() -> None:
    marks, histograms = re.findall(r"^\| (\d+)\.\.(\d+) \| (?:marks|histograms)", BOARD, re.M)
    first, last = map(int, marks)
    assert (first, last) == (
        layout.WATERMARK_BASE, layout.WATERMARK_BASE + len(layout.WatermarkKind) * layout.WATERMARK_WORDS - 1,
    )  # fmt: skip
    first, last = map(int, histograms)
    assert (first, last) == (
        layout.HISTOGRAM_BASE, layout.HISTOGRAM_BASE + len(layout.HistogramKind) * layout.HISTOGRAM_WORDS - 1,
    )  # fmt: skip
    assert f"bucket {histogram.LAST} takes everything" in BOARD


def test_the_facts_of_a_topic_have_the_words_of_the_page() -> None:
    section = BOARD.split("### Topic slots")[1].split("### News")[0]
    names = ("head_seq", "earliest_seq", "cap_floor", "ttl_floor", "trim_floor", "count", "bytes")
    for word, name in enumerate(names, 4):
        assert f"| {word} | {name} " in section
        assert TopicFacts._fields.index(name) == word - 1
    for word, name in enumerate(("version", "due", "ttl", "priority"), 12):
        assert f"| {word} | {name}" in section
        assert TopicFacts._fields[word].startswith(name)


def test_the_words_of_news_are_on_the_page() -> None:
    section = BOARD.split("### News")[1].split("### Grants")[0]
    for word, name in ((row_ring._CLAIMED, "claimed"), (row_ring._COUNT, "count"), (row_ring._LIFE, "life")):
        assert f"| {word} | {name}: " in section
    for word, name in enumerate(NewsRow._fields):
        assert re.search(rf"\| {word} \| [^|]*{name}", section) or name in {"offset", "stop"}, name
    assert f"{news.NEWS_ROWS} rows of {layout.NEWS_ROW_BYTES} bytes" in BOARD


def test_the_words_of_a_call_ring_are_on_the_page() -> None:
    section = BOARD.split("### Calls")[1].split("### Sequences")[0]
    words = [int(word) for word in re.findall(r"^\| (\d+) \|", section, re.M)]
    assert words == [
        call_ring._REQUESTS, call_ring._REQUESTS_TAKEN, call_ring._ANSWERS, call_ring._ANSWERS_TAKEN,
        call_ring._WANTS, call_ring._CLOSED,
    ]  # fmt: skip
    assert f"two rings of {CALL_RING_BYTES} bytes" in section
    assert f"1 to {CALL_BYTES_MAX} bytes" in section
