"""Kills of processes while watches read: all published records are delivered once and in order."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import pytest

import ringlog
from ringlog.client.read.pages import Page, Tombstone
from ringlog.testing.children import package_environ
from ringlog.testing.real_engine import TestEngine, engine, wait_until
from tests.support.client_threads import ClientThread
from tests.support.engines import engine_fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TOPICS = [f"t{number}" for number in range(12)]
KILLS = 8
WAIT_S = 30.0
TURN_S = 0.02


class Producing(ClientThread):
    """Sends consecutive numbers to all topics without waiting, and notes which are acknowledged."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.may_send = threading.Event()
        self.may_send.set()
        self.acked = dict.fromkeys(TOPICS, 0)
        self.is_idle = False

    def work(self, client: ringlog.Client) -> None:
        producers = {topic: client.producer(topic, create=False) for topic in TOPICS}
        sent = 0
        while not self.is_stopped.is_set():
            if self.may_send.is_set():
                sent += 1
                for producer in producers.values():
                    producer.send(b"%d" % sent)
            for topic, producer in producers.items():
                producer.flush(60)
                self.acked[topic] = sent
            self.is_idle = not self.may_send.wait(TURN_S)
        for producer in producers.values():
            producer.close(60)


class Watching(ClientThread):
    """Follows some of the topics."""

    def __init__(self, url: str, topics: list[str]) -> None:
        super().__init__(url)
        self.found: dict[str, list[bytes]] = {topic: [] for topic in topics}
        self.tombstones: list[Tombstone] = []

    def work(self, client: ringlog.Client) -> None:
        with client.watch(list(self.found)) as watch:
            while not self.is_stopped.is_set():
                event = watch.next(TURN_S)
                if isinstance(event, Page):
                    self.found[event.topic] += event.bytes()
                elif isinstance(event, Tombstone):
                    self.tombstones.append(event)


running = engine_fixture(wal={"shards": 2}, delivery={"schedulers": 1}, supervisor={"restart_max": 100})


def test_watches_reach_the_head_despite_kills(running: TestEngine) -> None:
    """Shards and the scheduler are killed in random order while many records are in flight."""
    chance = random.Random(1)
    with ringlog.connect(running.url, wait=20) as client:
        for topic in TOPICS:
            client.topics.create(topic, durability="fsync")
    producing = Producing(running.url)
    watchers = [Watching(running.url, TOPICS[0::2]), Watching(running.url, TOPICS[1::2])]
    for thread in (producing, *watchers):
        thread.start()
    for number in range(KILLS):
        enough = min(producing.acked.values()) + 5
        wait_until(lambda least=enough: min(producing.acked.values()) >= least, WAIT_S, "acks")
        for victim in chance.choice(["0", "1", "s", "s0", "s1", "01"]):
            if victim == "s":
                running.kill("scheduler")
            else:
                running.kill("wal_shard", shard=int(victim))
        if number % 2:
            # Further records would wake up forgotten watches, so the producer stops here.
            producing.may_send.clear()
            wait_until(lambda: producing.is_idle or producing.error is not None, WAIT_S, "all acks")
        wanted = dict(producing.acked)

        def has_come(wanted: dict[str, int] = wanted) -> bool:
            return all(len(each.found[topic]) >= wanted[topic] for each in watchers for topic in each.found)

        wait_until(has_come, WAIT_S, "the watchers to be told")
        producing.may_send.set()
    for thread in (producing, *watchers):
        thread.stop()
    for watcher in watchers:
        assert watcher.tombstones == []
        for topic, found in watcher.found.items():
            assert found == [b"%d" % n for n in range(1, len(found) + 1)], topic


WATCHER = """
import sys, ringlog
client = ringlog.connect(sys.argv[1], wait=20, transport="ipc")
watches = [client.watch(f"{letter}.*").open() for letter in "abc"]
print("open", flush=True)
sys.stdin.read()
"""


def test_the_gateway_survives_remote_clients_that_die_with_watches_of_patterns() -> None:
    """The gateway detects such a death when it reports the next new topic to all of its clients."""
    with (
        engine(wal={"shards": 1}, gateway={"enabled": True}, delivery={"schedulers": 1}) as running,
        ringlog.connect(running.url, wait=20, transport="ipc") as client,
        client.watch("n.*").open() as watch,
    ):
        gateway = running.pid_of("gateway")
        for number in range(3):
            doomed = [
                subprocess.Popen(
                    [sys.executable, "-c", WATCHER, running.url], env=package_environ(),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
                for _ in range(2)
            ]  # fmt: skip
            for process in doomed:
                with process:
                    assert process.stdout is not None
                    assert process.stdout.readline() == b"open\n"
                    process.kill()
            client.append(f"n.{number}", b"new")
            while not isinstance(event := watch.next(WAIT_S), Page):
                assert event is not None, "the record was not delivered"
            assert event.topic == f"n.{number}"
        assert running.pid_of("gateway") == gateway
