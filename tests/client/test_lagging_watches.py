"""Watches of a busy topic: every watch gets its share, and a watch that lags is reported."""

from __future__ import annotations

import threading

import pytest

import ringlog
from ringlog.cli.status import problems
from ringlog.client import LATEST, CaughtUp, Lagged, Page
from ringlog.testing.real_engine import wait_until
from tests.support.client_threads import ClientThread
from tests.support.engines import engine_fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
WAIT_S = 30.0
WATCHERS = 5
BATCH, BATCHES = 500, 200
SHARE = 10
"""The slowest watch must have at least 1/SHARE of the records of the fastest, even on few CPUs."""

running = engine_fixture("module", wal={"shards": 1}, delivery={"schedulers": 1})


class Watcher(ClientThread):
    def __init__(self, url, topic):
        super().__init__(url)
        self._topic, self.count = topic, 0
        self.is_open = threading.Event()

    def work(self, client):
        with client.watch(self._topic, limit=200) as watch:
            watch.open()
            self.is_open.set()
            while not self.is_stopped.is_set():
                event = watch.next(0.1)
                self.count += len(event) if isinstance(event, Page) else 0


def test_watches_of_a_busy_topic_advance_at_similar_rates(running):
    with ringlog.connect(running.url, wait=10) as writer:
        writer.topics.create("busy", durability="disk")
        watchers = [Watcher(running.url, "busy") for _ in range(WATCHERS)]
        for watcher in watchers:
            watcher.start()
            assert watcher.is_open.wait(WAIT_S)
        worst = 1.0
        for batch in range(BATCHES):
            writer.append_many("busy", [b"x" * 100] * BATCH)
            counts = [watcher.count for watcher in watchers]
            if batch > BATCHES // 4:
                worst = min(worst, min(counts) / max(*counts, 1))
        wait_until(
            lambda: all(watcher.count >= BATCH * BATCHES for watcher in watchers),
            WAIT_S,
            "all to have it all",
        )
        for watcher in watchers:
            watcher.stop()
        assert worst >= 1 / SHARE


def test_a_watch_that_stops_reading_is_reported_and_gets_a_lagged_event(running, client):
    client.topics.create("left")
    watch = client.watch("left", start=LATEST, limit=10).open()
    assert isinstance(watch.next(WAIT_S), CaughtUp)
    # The watches of another test may have lagged until now.
    wait_until(lambda: not problems(running.status()), WAIT_S, "no problem")
    for _ in range(30):
        client.append("left", b"x")
    wait_until(lambda: problems(running.status()), WAIT_S, "status to name the problem")
    assert "a consumer lags by" in problems(running.status())[0]
    assert "consumer lags" in running.log_path.read_text()
    event = watch.next(WAIT_S)
    assert isinstance(event, Lagged), event
    count = 0
    while count < 30:
        event = watch.next(WAIT_S)
        count += len(event) if isinstance(event, Page) else 0
    assert isinstance(watch.next(WAIT_S), CaughtUp)
    wait_until(lambda: not problems(running.status()), WAIT_S, "the problem to be over")
    watch.close()


def test_a_watch_that_reads_too_slowly_gets_one_lagged_event(client):
    client.topics.create("slow")
    watch = client.watch("slow", start=LATEST, limit=1).open()
    assert isinstance(watch.next(WAIT_S), CaughtUp)
    events = []
    # The watch reads one record for every 20 that are written. Its oldest unread record grows old,
    # although each grant is recent.
    while not any(isinstance(event, Lagged) for event in events):
        client.append_many("slow", [b"x"] * 20)
        events.append(watch.next(WAIT_S))
    assert all(isinstance(event, Page) for event in events[:-1])
    assert events[-1].behind > len(events)
    for _ in range(50):
        assert isinstance(watch.next(WAIT_S), Page)
    watch.close()
