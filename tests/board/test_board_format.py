"""docs/format.md and the code say the same about the board."""

from __future__ import annotations

import re
from pathlib import Path

from ringlog.board import histogram, layout
from ringlog.board.layout import P, ProcessState
from ringlog.board.topics import TopicFacts

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
BOARD = PAGE.split("\n## Board\n")[1].split("\n## ")[0]


def test_the_worked_identities_are_what_the_code_writes() -> None:
    block = re.search(r"```board\n(.*?)```", BOARD, re.S)
    assert block
    board, topics = (bytes.fromhex(line) for line in block[1].splitlines())
    assert board == layout.encode_identity(layout.BOARD_MAGIC, 0, 128, 0)
    assert topics == layout.encode_identity(layout.TOPICS_MAGIC, 7, 4096, 1)
    assert layout.decode_identity(topics, layout.TOPICS_MAGIC, "page") == (7, 4096, 1)


def test_the_numbers_of_a_process_are_on_the_page() -> None:
    rows = re.findall(r"\| (\d+) \| ([A-Z_]+)(?= \|)", BOARD)
    assert {name: int(word) for word, name in rows} == {word.name: int(word) for word in P}
    for state in ProcessState:
        assert f"{int(state)} {state.name.lower()}" in BOARD


def test_marks_and_histograms_lie_where_the_page_says() -> None:
    marks, histograms = re.findall(r"^\| (\d+)\.\.(\d+) \| (?:marks|histograms)", BOARD, re.M)
    first, last = map(int, marks)
    assert (first, last) == (
        layout.MARK_BASE, layout.MARK_BASE + len(layout.Mark) * layout.MARK_WORDS - 1,
    )  # fmt: skip
    first, last = map(int, histograms)
    assert (first, last) == (
        layout.HISTOGRAM_BASE, layout.HISTOGRAM_BASE + len(layout.H) * layout.HISTOGRAM_WORDS - 1,
    )  # fmt: skip
    assert f"bucket {histogram.LAST} takes everything" in BOARD


def test_the_facts_of_a_topic_are_on_the_page_in_their_words() -> None:
    section = BOARD.split("### Topic slots")[1]
    names = ("head_seq", "earliest_seq", "cap_floor", "ttl_floor", "trim_floor", "count", "bytes")
    for word, name in enumerate(names, 4):
        assert f"| {word} | {name} " in section
        assert TopicFacts._fields.index(name) == word - 1
