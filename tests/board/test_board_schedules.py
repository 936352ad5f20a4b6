"""RF-116, RF-27: no schedule shows a reader a mix, whoever dies between which stores."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.schedules.seqlock import UNSTABLE, SeqlockExplorer, StepWords, Torn
from ringlog.board import layout, seqlock, topics
from ringlog.board.board import ProcessSlot, WatermarkKind
from ringlog.board.topics import TopicFacts, TopicTable

# What the explorer steps through, and the faults it has to find, are put into the classes.
pytestmark = pytest.mark.interpreted

EMPTY = TopicFacts(*[0] * 16)
# Only the first word, one in the middle and the last differ: each word that does multiplies the states,
# and three in a row show every way to mix.
OLD = EMPTY._replace(topic_id=11, head_seq=12, last_write_us=13)
OLD_MOVED = OLD._replace(head_seq=112, last_write_us=113)
NEW = EMPTY._replace(topic_id=1011, head_seq=1012, last_write_us=1013)
SLOT_WORDS = 16


@pytest.fixture(autouse=True)
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries repeat the same steps; one of each kind is enough to see what a try may believe."""
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
    """What TopicTable.reset does to one slot."""
    table = table_over(words)
    if table._is_used(0):
        table._clear(0)


def explore_topics(
    lives: list[list], published: list, kind: type[TopicTable] = TopicTable
) -> SeqlockExplorer:
    return SeqlockExplorer(SLOT_WORDS, lives, published, lambda words: table_over(words, kind).read(0)).run()


def appends(kind: type[TopicTable] = TopicTable) -> SeqlockExplorer:
    """One writer that publishes a topic and appends to it."""
    lives = [[publish(OLD, kind), publish(OLD_MOVED, kind)]]
    return explore_topics(lives, [EMPTY, OLD, OLD_MOVED], kind)


def test_no_schedule_shows_a_mix_of_a_topics_facts() -> None:
    """RF-116: whole facts, never older than what was complete when the reader began, or unstable."""
    explored = appends()
    assert explored.states > 10_000
    assert explored.seen == {EMPTY, OLD, OLD_MOVED, UNSTABLE}


@pytest.mark.slow
@pytest.mark.night
def test_no_schedule_of_a_writers_death_and_its_successor_shows_a_mix() -> None:
    """RF-116, RF-27: the first writer dies between any two stores; the second resets, then publishes."""
    explored = explore_topics([[publish(OLD)], [reset, publish(NEW)]], [EMPTY, OLD, EMPTY, NEW])
    assert explored.states > 100_000
    assert explored.seen == {EMPTY, OLD, NEW, UNSTABLE}


@pytest.mark.night
def test_no_schedule_of_a_death_during_an_append_shows_a_mix() -> None:
    """RF-27: the same when the first writer dies while it moves a head."""
    lives = [[publish(OLD), publish(OLD_MOVED)], [reset]]
    explored = explore_topics(lives, [EMPTY, OLD, OLD_MOVED, EMPTY])
    assert explored.seen == {EMPTY, OLD, OLD_MOVED, UNSTABLE}


def test_no_schedule_shows_a_mix_of_a_mark() -> None:
    """RF-27: a successor's first write repairs what was left half done, without looking."""
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
    """Mutant 22."""

    def read(self, slot):
        words, at = self._slot(slot)
        before, *values = words[at : at + 16].tolist()
        if before & 1:
            raise layout.BoardUnstable("board slot is unstable")
        return topics._facts(values)


class ReadsWithoutFirstCheck(TopicTable):
    """An odd sequence that stays the same is a dead writer, not a stable slot."""

    def read(self, slot):
        words, at = self._slot(slot)
        before, *values = words[at : at + 16].tolist()
        if words[at] != before:
            raise layout.BoardUnstable("board slot is unstable")
        return topics._facts(values)


class WritesWithoutMakingItOdd(TopicTable):
    """The sequence moves on at the end only."""

    def publish(self, slot, facts):
        words, at = self._slot(slot)
        for index, value in ((4, facts.head_seq), (9, facts.count), (10, facts.bytes)):
            words[at + index] = value
        words[at] = (words[at] | 1) + 1


@pytest.mark.parametrize(
    "mutant", [ReadsWithoutSecondCheck, ReadsWithoutFirstCheck, WritesWithoutMakingItOdd]
)
def test_the_explorer_catches(mutant: type[TopicTable]) -> None:
    """Section 7, mutant 22 and its neighbours."""
    with pytest.raises(Torn):
        appends(mutant)
