"""Schedulers of a real engine, used through plain sockets as the client library does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import ringlog
from ringlog.board.board import Board
from ringlog.board.layout import HistogramKind, ProcessField, SchedulerField
from ringlog.board.processes import scheduler_slot, scheduler_socket
from ringlog.envelope import messages as m
from ringlog.envelope.wire import PROTOCOL
from ringlog.link.channel.grant_ring import GrantReader
from ringlog.placement import scheduler_of
from ringlog.testing import engine
from ringlog.testing.real_engine import TestEngine, wait_until
from tests.support.engines import engine_fixture
from tests.support.scheduler_link import Link, feed_of, link_fixture

pytestmark = pytest.mark.slow

QUIET_MS = 300
"""Milliseconds in which a message that must not come would arrive."""
NO_SYNC_MS = 60_000

running = engine_fixture("module", delivery={"schedulers": 1}, wal={"flush_interval_ms": NO_SYNC_MS})
link = link_fixture()


def test_a_subscriber_gets_a_grant_for_each_append(running: TestEngine, link: Link) -> None:
    """Once the reader is up to date, the grant contains the position of the records."""
    link.subscribe(feed_of(running, 7, "told"))
    assert link.turn()[:3] == [1, 7, 1]
    assert isinstance(link.hear()[0], m.Subscribed)
    link.take((1, 7, 1))
    with ringlog.connect(running.url) as client:
        for seq in range(2, 20):
            client.append("told", b"more")
            assert link.turn()[:5] == [1, 7, seq, seq, seq]
            link.take((1, 7, seq))


def test_a_strong_subscription_gets_a_grant_after_a_sync(running: TestEngine, link: Link) -> None:
    """Nothing is synced for a minute, except appends that request it."""
    feed = feed_of(running, 1, "strong")
    with ringlog.connect(running.url) as client:
        client.append("synced", b"x", durability="fsync")
        link.subscribe(feed, strong=True)
        assert link.turn()[:3] == [1, 1, 1]
        link.take((1, 1, 1))
        client.append("strong", b"second")
        assert link.turn(QUIET_MS) == []
        client.append("synced", b"y", durability="fsync")
        assert link.turn()[:5] == [1, 1, 2, 2, 2]


def test_a_subscription_to_names_receives_topic_changes(running: TestEngine, link: Link) -> None:
    link.subscribe(names=True)
    assert isinstance(link.hear()[0], m.Subscribed)
    while link.hear(QUIET_MS)[0] is not None:
        continue
    with ringlog.connect(running.url) as client:
        client.append("a-name-nobody-had", b"x")
        assert link.hear()[0] == m.TopicsChanged()
        client.topics.delete("a-name-nobody-had")
        assert link.hear()[0] == m.TopicsChanged()


def test_the_reader_of_a_deleted_topic_gets_a_recheck(running: TestEngine, link: Link) -> None:
    link.subscribe(feed_of(running, 1, "doomed", after=1))
    assert link.turn(QUIET_MS) == []
    with ringlog.connect(running.url) as client:
        client.topics.delete("doomed")
    assert link.turn()[:3] == [1, 1, (1 << 63) - 1]


def test_a_scheduler_answers_pings_and_refuses_unknown_messages(link: Link) -> None:
    link.say(m.Ping())
    assert isinstance(link.hear()[0], m.Pong)
    link.say(m.Hello(PROTOCOL, "test"))
    assert isinstance(link.hear()[0], m.Welcome)
    link.say(m.EngineStop())
    assert isinstance(link.hear()[0], m.ErrorReply)
    link.take((1, 1, 1))
    assert link.hear()[0] == m.SubscriptionsLost()


_SLEEPER = """
import sys, zmq
from ringlog.envelope.messages import Feed, Subscribe
from ringlog.envelope.wire import decode, encode
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
feed = [int(word) for word in sys.argv[2:]]
for number in range(200):
    socket.send(encode(Subscribe(number, [Feed(1, "t", feed[0], 0, feed[1], 0)], 8), number))
done = 0
while done < 200:
    done += decode(socket.recv_multipart()[0]).kind == "Subscribed"
print("told", flush=True)
while True:
    socket.recv_multipart()
"""


def test_a_stopped_client_blocks_no_other_client(running: TestEngine, link: Link) -> None:
    """The stopped client has 200 subscriptions to the same topic."""
    feed = feed_of(running, 1, "beside-a-stopped-one")
    place = scheduler_socket(running.info.shm_dir, 0)
    child = subprocess.Popen(
        [sys.executable, "-c", _SLEEPER, place, str(feed.topic_id), str(feed.slot)], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"told\n"
        os.kill(child.pid, signal.SIGSTOP)
        link.subscribe(feed)
        assert link.turn()[2] == 1
        link.take((1, 1, 1))
        with ringlog.connect(running.url) as client:
            for seq in range(2, 40):
                client.append("beside-a-stopped-one", b"x")
                assert link.turn()[2] == seq
                link.take((1, 1, seq))
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def test_the_board_page_of_a_scheduler_contains_its_metrics() -> None:
    """The governor and operators read these metrics."""
    with engine(delivery={"schedulers": 1}) as running:
        link = Link(running)
        board = Board.open(running.info.shm_dir, writable=False)
        try:
            link.subscribe(feed_of(running, 1, "counted"), feed_of(running, 2, "counted-too"), credit=1)
            assert link.turn()
            page = board.process(scheduler_slot(1, 0))
            wait_until(lambda: page.get(SchedulerField.READY) == 1, 10, "the page to be written")
            assert (
                page.get(SchedulerField.LINKS),
                page.get(SchedulerField.SUBSCRIPTIONS),
                page.get(SchedulerField.FEEDS),
            ) == (1, 1, 2)
            assert (
                page.get(SchedulerField.GRANTS_SENT),
                page.histogram(HistogramKind.COMMIT).snapshot().count,
            ) == (1, 1)
            assert page.get(SchedulerField.LATENCY_NS) > 0
            wait_until(lambda: page.get(ProcessField.BUSY_NS) > 0, 10, "its next sample")
        finally:
            board.close()
            link.close()


def opened_ring(running: TestEngine, link: Link) -> GrantReader:
    link.say(m.OpenGrants())
    answer, _ = link.hear()
    assert isinstance(answer, m.GrantsOpened)
    assert answer.name
    return GrantReader(running.info.shm_dir, answer.name)


def rings_of(running: TestEngine) -> list[str]:
    return sorted(name for name in os.listdir(running.info.shm_dir) if name.startswith("grants-"))


def test_a_client_on_the_host_gets_its_grants_through_shared_memory(running: TestEngine, link: Link) -> None:
    """If the client reports that it cannot use the ring, its grants are sent by message again."""
    feed = feed_of(running, 7, "through-memory")
    others = set(rings_of(running))  # Of closed links; the scheduler removes them later.
    ring = opened_ring(running, link)
    link.subscribe(feed)
    assert isinstance(link.hear()[0], m.Subscribed)
    wait_until(lambda: ring.has_grants, 10, "a grant in the ring")
    taken = ring.take_grants()
    assert (taken.rows[:, :3].tolist(), taken.is_complete) == ([[1, 7, 1]], True)
    ring.close()
    link.say(m.OpenGrants(wanted=False))
    assert link.hear()[0] == m.GrantsOpened("")
    assert set(rings_of(running)) <= others
    link.take((1, 7, 0))
    assert link.turn()[:3] == [1, 7, 1]


def test_a_second_request_for_a_ring_returns_the_same_ring(running: TestEngine, link: Link) -> None:
    """The first reply may arrive too late. Grants must not go into a ring that no client reads."""
    link.say(m.OpenGrants())
    first = link.hear()[0]
    assert isinstance(first, m.GrantsOpened)
    assert first.name
    link.say(m.OpenGrants())
    assert link.hear()[0] == first


def test_a_watch_gets_a_ring_long_after_its_connection_was_made() -> None:
    """A request about routers created a ring with the connection. The scheduler removed it unused."""
    with engine(delivery={"schedulers": 1}) as running, ringlog.connect(running.url, wait=10) as client:
        assert list(client.routers.list()) == []
        wait_until(lambda: not rings_of(running), 20, "the unused ring to be removed")
        client.append("late", b"1")
        with client.watch("late") as watch:
            assert watch.next(10) is not None
            wait_until(lambda: len(rings_of(running)) == 2, 10, "a ring and its bell")


def test_a_ring_of_a_connection_without_subscriptions_is_removed(running: TestEngine, link: Link) -> None:
    feed = feed_of(running, 7, "for-a-while")
    opened_ring(running, link).close()
    link.subscribe(feed)
    assert isinstance(link.hear()[0], m.Subscribed)
    other = Link(running)
    opened_ring(running, other).close()  # This connection never subscribes and sends nothing more.
    other.close()
    wait_until(lambda: len(rings_of(running)) == 2, 10, "the ring without subscriptions to be removed")
    link.say(m.Unsubscribe(1))
    assert isinstance(link.hear()[0], m.Unsubscribed)
    assert rings_of(running), "the connection exists and may subscribe again"


def test_a_restarted_scheduler_removes_old_rings_and_creates_others() -> None:
    """The scheduler is killed while a client uses a ring (RF-7)."""
    with engine(delivery={"schedulers": 1}) as running:
        link = Link(running)
        try:
            ring = opened_ring(running, link)
            before = rings_of(running)
            running.kill("scheduler")
            running.wait_ready("scheduler")
            wait_until(lambda: not rings_of(running), 10, "the rings of the dead scheduler to be removed")
            link.subscribe(feed_of(running, 7, "again"))
            assert link.turn()[:3] == [1, 7, 1]
            assert isinstance(link.hear()[0], m.Subscribed)
            opened_ring(running, link).close()
            assert not set(rings_of(running)) & set(before)
            ring.close()
        finally:
            link.close()


def test_clients_subscribe_again_after_their_scheduler_died() -> None:
    """The new scheduler replies `SubscriptionsLost` and grants from the topic table (RF-7)."""
    with engine(delivery={"schedulers": 1}) as running:
        link = Link(running)
        try:
            feed = feed_of(running, 1, "kept")
            link.subscribe(feed)
            assert link.turn()[2] == 1
            assert isinstance(link.hear()[0], m.Subscribed)
            running.kill("scheduler")
            with ringlog.connect(running.url) as client:
                client.append("kept", b"while it was dead")
            running.wait_ready("scheduler")
            link.take((1, 1, 1))
            assert link.hear()[0] == m.SubscriptionsLost()
            link.subscribe(m.Feed(1, "kept", feed.topic_id, 0, feed.slot, 1))
            assert link.turn()[2] == 2
            assert running.status().state == "ready"
        finally:
            link.close()


def test_a_subscription_continues_after_its_shard_restarted() -> None:
    """After a restart of the shard, the scheduler rescans every topic (N4)."""
    with engine(delivery={"schedulers": 1}) as running:
        link = Link(running)
        try:
            link.subscribe(feed_of(running, 1, "on"))
            assert link.turn()[2] == 1
            link.take((1, 1, 1))
            running.kill("wal_shard")
            running.wait_ready()
            with ringlog.connect(running.url) as client:
                client.append("on", b"x")
            turn = link.turn()
            assert turn[2] == 2
        finally:
            link.close()


def test_several_schedulers_share_the_topics() -> None:
    with engine(delivery={"schedulers": 3}) as running:
        assert running.info.schedulers == 3
        names = [each.name for each in running.status().processes if each.kind == "scheduler"]
        assert names == ["scheduler-00", "scheduler-01", "scheduler-02"]
        feeds = [feed_of(running, n, f"shared-{n}") for n in range(6)]
        for feed in feeds:
            link = Link(running, scheduler_of(feed.topic_id, 3))
            try:
                link.subscribe(feed)
                assert link.turn()[1] == feed.feed
            finally:
                link.close()


def test_an_engine_without_schedulers_serves_appends() -> None:
    with engine() as running, ringlog.connect(running.url) as client:
        assert running.info.schedulers == 0
        assert client.append("plain", b"x").first_seq == 1
