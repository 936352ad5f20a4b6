"""A scheduler that was woken ahead looks for what it was woken for. Part of the shell.

A shard rings for news, or for frames that it has just taken: news of those come within the time that waking
us took, or a little later (actors/wal_shard/announcer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringlog.board.news import NewsReader
from ringlog.clock import Clock
from ringlog.limits import ROUSED_LOOK_US

_LOOK_NS = ROUSED_LOOK_US * 1_000


def await_news(readers: Sequence[NewsReader], has_message: Callable[[], bool], clock: Clock) -> bool:
    """Look until a reader has news, a message is there, or the time is up; True when there are news.

    The processor is offered to others all the while: the shard may be among them.
    """
    until_ns = clock.monotonic_ns() + _LOOK_NS
    while not any(reader.has_news for reader in readers):
        if clock.monotonic_ns() >= until_ns or has_message():
            return False
        clock.give_way()
    return True
