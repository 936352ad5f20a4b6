"""Seqlock: several words that a reader sees as one consistent state, without a lock (B1).

The writer makes the sequence odd, stores the words, and makes the sequence even. A reader accepts its copy
only if the sequence was even before and is unchanged afterwards. There is one writer at a time. The successor
of a writer that died half-way simply writes: the sequence stays odd until the words are complete (B2).
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
"""A writer that lost the CPU between its stores continues within a few of these waits, unless it died."""

_clock = SystemClock()


class WordView(Protocol):
    """Words of a seqlock: memoryview.cast("Q"), or a test double that records each access."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


def begin_write(words: WordView, at: int) -> int:
    """Make the sequence at `at` odd, so that readers retry. Return the value for end_write."""
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
    """Return the `count` words after the sequence at `at`, or None if a write is in progress."""
    before = words[at]
    if before & 1:
        return None
    values = [words[index] for index in range(at + 1, at + 1 + count)]
    return values if words[at] == before else None


def read(words: WordView, at: int, count: int, what: Callable[[], dict[str, Any]]) -> list[int]:
    """Retry try_read for several milliseconds. Then raise BoardUnstable with the facts of `what`."""
    for attempt in range(PLAIN_TRIES + YIELD_TRIES + WAIT_TRIES):
        values = try_read(words, at, count)
        if values is not None:
            return values
        if attempt >= PLAIN_TRIES + YIELD_TRIES:
            _clock.sleep(WAIT_S)
        elif attempt >= PLAIN_TRIES:
            os.sched_yield()
    raise BoardUnstable(
        "board slot stays half written: its writer is paused or dead", **_facts(what, words[at])
    )


def _facts(what: Callable[[], dict[str, Any]], sequence: int) -> dict[str, Any]:
    return {**what(), "sequence": sequence}
