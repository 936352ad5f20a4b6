"""No schedule shows a reader mixed facts, whichever writer dies between which stores (RF-116, RF-27)."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.schedules.seqlock import UNSTABLE, SeqlockExplorer, StepWords, Torn
from ringlog.board import layout, seqlock, topics
from ringlog.board.board import ProcessSlot, WatermarkKind
from ringlog.board.topics import TopicFacts, TopicTable

# The explorer steps through the Python code of the classes, and the planted bugs are subclasses of them.
pytestmark = pytest.mark.interpreted

EMPTY = TopicFacts(*[0] * 16)
# Only the first word, one in the middle and the last one differ. Each further word multiplies the states, and
# three words already show every possible mix.
OLD = EMPTY._replace(topic_id=11, head_seq=12, last_write_us=13)
OLD_MOVED = OLD._replace(head_seq=112, last_write_us=113)
NEW = EMPTY._replace(topic_id=1011, head_seq=1012, last_write_us=1013)
SLOT_WORDS = 16


@pytest.fixture(autouse=True)
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit each read to one try. Retries only repeat the same steps."""
    monkeypatch.setattr(seqlock, "PLAIN_TRIES", 1)
    monkeypatch.setattr(seqlock, "YIELD_TRIES", 0)
    monkeypatch.setattr(seqlock, "WAIT_TRIES", 0)
    monkeypatch.setattr(topics, "_BASE", 0)


def table_over(words: Any, kind: type[TopicTable] = TopicTable) -> TopicTable:
    table = kind("", 0, writable=True)
    table._chunks, table._words = [object()], [words]
    return table


def publish(facts: TopicFacts, kind: type[TopicTable] = TopicTable):
    return lambda words: table_over(words, kind).publish(0, facts)


def reset(words: StepWords) -> None:
    """Do what TopicTable.reset does to one slot."""
    table = table_over(words)
    if table._is_used(0):
        table._clear(0)


def explore_topics(
    lives: list[list], published: list, kind: type[TopicTable] = TopicTable
) -> SeqlockExplorer:
    return SeqlockExplorer(SLOT_WORDS, lives, published, lambda words: table_over(words, kind).read(0)).run()


def appends(kind: type[TopicTable] = TopicTable) -> SeqlockExplorer:
    """Explore one writer that publishes a topic and appends to it."""
    lives = [[publish(OLD, kind), publish(OLD_MOVED, kind)]]
    return explore_topics(lives, [EMPTY, OLD, OLD_MOVED], kind)


def test_no_schedule_shows_a_mix_of_a_topics_facts() -> None:
    """A reader gets whole facts, not older than the last complete ones when it began, or BoardUnstable
    (RF-116)."""
    explored = appends()
    assert explored.states > 10_000
    assert explored.seen == {EMPTY, OLD, OLD_MOVED, UNSTABLE}


@pytest.mark.slow
@pytest.mark.night
def test_no_schedule_of_a_writers_death_and_its_successor_shows_a_mix() -> None:
    """The first writer dies between any two stores. The second one resets, then publishes (RF-116, RF-27)."""
    explored = explore_topics([[publish(OLD)], [reset, publish(NEW)]], [EMPTY, OLD, EMPTY, NEW])
    assert explored.states > 100_000
    assert explored.seen == {EMPTY, OLD, NEW, UNSTABLE}


@pytest.mark.night
def test_no_schedule_of_a_death_during_an_append_shows_a_mix() -> None:
    """The first writer dies while it moves a head (RF-27)."""
    lives = [[publish(OLD), publish(OLD_MOVED)], [reset]]
    explored = explore_topics(lives, [EMPTY, OLD, OLD_MOVED, EMPTY])
    assert explored.seen == {EMPTY, OLD, OLD_MOVED, UNSTABLE}


def test_no_schedule_shows_a_mixed_watermark() -> None:
    """A successor's first write repairs an incomplete mark without checking it (RF-27)."""
    marks = [(0, 0), (1, 10), (2, 20), (3, 30), (4, 40)]
    write = [
        lambda words, m=mark: ProcessSlot(words, 0).set_watermark(WatermarkKind.DURABLE, *m)
        for mark in marks[1:]
    ]
    explored = SeqlockExplorer(
        layout.WATERMARK_BASE + len(WatermarkKind) * layout.WATERMARK_WORDS,
        [write[:2], write[2:]],
        marks,
        lambda words: ProcessSlot(words, 0).watermark(WatermarkKind.DURABLE),
    ).run()
    assert explored.seen == {*marks, UNSTABLE}


class ReadsWithoutSecondCheck(TopicTable):
    """Does not check the sequence number after the read."""

    def read(self, slot):
        words, at = self._slot(slot)
        before, *values = words[at : at + 16].tolist()
        if before & 1:
            raise layout.BoardUnstable("board slot stays half written")
        return topics._facts(values)


class ReadsWithoutFirstCheck(TopicTable):
    """Accepts an odd sequence number. An odd number that stays the same means a dead writer, not a stable
    slot."""

    def read(self, slot):
        words, at = self._slot(slot)
        before, *values = words[at : at + 16].tolist()
        if words[at] != before:
            raise layout.BoardUnstable("board slot stays half written")
        return topics._facts(values)


class WritesWithoutMakingItOdd(TopicTable):
    """Changes the sequence number only at the end of a write."""

    def publish(self, slot, facts):
        words, at = self._slot(slot)
        for index, value in ((4, facts.head_seq), (9, facts.count), (10, facts.bytes)):
            words[at + index] = value
        words[at] = (words[at] | 1) + 1


@pytest.mark.parametrize(
    "mutant", [ReadsWithoutSecondCheck, ReadsWithoutFirstCheck, WritesWithoutMakingItOdd]
)
def test_the_explorer_detects_each_planted_bug(mutant: type[TopicTable]) -> None:
    """The reader sees mixed facts under each of the planted bugs."""
    with pytest.raises(Torn):
        appends(mutant)
