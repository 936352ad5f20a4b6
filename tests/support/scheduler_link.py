"""Plain sockets to a scheduler of a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

import ringlog
from ringlog.board.processes import scheduler_socket
from ringlog.envelope import messages as m
from ringlog.envelope.wire import decode, encode
from ringlog.link.shard_requests import ShardRequests
from ringlog.testing.real_engine import TestEngine

WAIT_MS = 20_000


class Link:
    """One connection to a scheduler."""

    def __init__(self, running: TestEngine, number: int = 0) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(scheduler_socket(running.info.shm_dir, number))
        self.messages: list[m.Message] = []
        self._corr = 0

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()

    def subscribe(self, *feeds: m.Feed, subscription: int = 1, **more: Any) -> None:
        self.say(m.Subscribe(subscription, list(feeds), more.pop("credit", 8), **more))

    def say(self, message: m.Message, rows: list[tuple[int, ...]] | None = None) -> None:
        self._corr += 1
        parts = [encode(message, self._corr)]
        if rows is not None:
            parts.append(np.array(rows, dtype=np.uint64).tobytes())
        self.socket.send_multipart(parts)

    def take(self, *rows: tuple[int, int, int]) -> None:
        self.say(m.GrantsReturned(len(rows)), [(*row, 1) for row in rows])

    def hear(self, timeout_ms: int = WAIT_MS) -> tuple[m.Message | None, list[list[int]]]:
        if not self.socket.poll(timeout_ms):
            return None, []
        parts = self.socket.recv_multipart()
        words = np.frombuffer(parts[1] if len(parts) > 1 else b"", dtype=np.uint64).reshape(-1, 8)
        return decode(parts[0]).message, words.tolist()

    def turn(self, timeout_ms: int = WAIT_MS) -> list[int]:
        """Return the next grant, or [] at the timeout. Other messages before it are kept in `messages`."""
        while True:
            message, rows = self.hear(timeout_ms)
            if message is None:
                return []
            if rows:
                assert len(rows) == 1
                return rows[0]
            self.messages.append(message)


def feed_of(running: TestEngine, number: int, topic: str, after: int = 0) -> m.Feed:
    """Create a topic with one record and return a feed of it."""
    with ringlog.connect(running.url) as client:
        client.append(topic, b"first")
    shards = ShardRequests(running.info.shm_dir, 1)
    try:
        info = shards.ask(0, m.TopicResolve(topic), m.TopicInfo).message
    finally:
        shards.close()
    return m.Feed(number, topic, info.topic_id, info.shard, info.slot, after)


def link_fixture() -> Any:
    """Make a fixture with a connection to the scheduler of `running`."""

    @pytest.fixture
    def link(running: TestEngine) -> Iterator[Link]:
        made = Link(running)
        yield made
        made.close()

    return link
