"""A few words that are read together or not at all, without a lock.

The writer makes the sequence odd, stores the words, makes it even. A reader takes what it copied only when
the sequence was even before and unchanged after. One writer at a time; a successor of a writer that died
in between simply writes: the sequence stays odd until its words are complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ringlog import stop_points
from ringlog.board.layout import BoardUnstable
from ringlog.clock import SystemClock

PLAIN_TRIES = 16
YIELD_TRIES = 64
WAIT_TRIES = 50
WAIT_S = 0.0001
"""A writer that was descheduled between its stores is back within a few of these; a dead one never is."""

_clock = SystemClock()


class WordView(Protocol):
    """What a seqlock lies in: memoryview.cast("Q"), or a test's stand-in that watches each access."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


def begin_write(words: WordView, at: int) -> int:
    """Make the sequence at `at` odd; returns the value for end_write. Readers retry from here on."""
    odd = (words[at] | 1) & 0xFFFFFFFFFFFFFFFF
    words[at] = odd
    return odd


def end_write(words: WordView, at: int, odd: int) -> None:
    """Make the sequence even: the words are complete."""
    words[at] = (odd + 1) & 0xFFFFFFFFFFFFFFFF


def write(words: WordView, at: int, values: Sequence[int]) -> None:
    """Store `values` in the words after the sequence at `at`."""
    odd = begin_write(words, at)
    for index, value in enumerate(values, at + 1):
        words[index] = value
    stop_points.hit("board_mid_slot")
    end_write(words, at, odd)


def try_read(words: WordView, at: int, count: int) -> list[int] | None:
    """The `count` words after the sequence at `at`, or None when they were being written."""
    before = words[at]
    if before & 1:
        return None
    values = [words[index] for index in range(at + 1, at + 1 + count)]
    return values if words[at] == before else None


def read(words: WordView, at: int, count: int, what: Callable[[], dict[str, Any]]) -> list[int]:
    """As try_read, trying for some milliseconds; then raises BoardUnstable with the facts of `what`."""
    for attempt in range(PLAIN_TRIES + YIELD_TRIES + WAIT_TRIES):
        values = try_read(words, at, count)
        if values is not None:
            return values
        if attempt >= PLAIN_TRIES + YIELD_TRIES:
            _clock.sleep(WAIT_S)
        elif attempt >= PLAIN_TRIES:
            os.sched_yield()
    raise BoardUnstable("board slot is unstable", **_facts(what, words[at]))


def _facts(what: Callable[[], dict[str, Any]], sequence: int) -> dict[str, Any]:
    return {**what(), "sequence": sequence}
