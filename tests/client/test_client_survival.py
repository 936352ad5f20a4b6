"""Failures that the client handles without action of its program.

The engine restarts, processes are killed, the client forks, and the number of shards changes.
"""

from __future__ import annotations

import itertools
import os
import resource
import threading
import time
from pathlib import Path

import pytest
import zmq

import ringlog
from ringlog.client import ClientState
from ringlog.errors import NotConnected, NotReady
from ringlog.testing import engine
from ringlog.testing.real_engine import wait_until
from tests.support.engines import engine_fixture
from tests.support.machine import free_port
from tests.support.topic_contents import payloads

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
WAIT_S = 30.0
WAKE_UPS_MAX = 60
"""Limit for one second, over all threads of the test process.

An idle client causes about 12, a sleep of 2 ms in a loop 500.
"""
SPINNING_S = 0.2

running = engine_fixture(wal={"shards": 2}, supervisor={"restart_max": 50}, gateway={"enabled": True})


def on_shard(client, shard):
    """Return a topic name whose home is this shard."""
    return next(name for n in range(1_000) if client.connection and home(name := f"topic-{n}") == shard)


def home(name):
    from ringlog.placement import home_shard

    return home_shard(name, 2)


def is_running(pid):
    """Return True for a live process. A zombie does not count: process 1 may reap an orphan late."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("durability", ["fsync", "disk"])
def test_killing_shards_under_two_producers_loses_and_duplicates_nothing(running, durability):
    """No call fails. Every record arrives once and in order, with `send` and with `send_each`."""
    kills, sent, failures = 4, {}, []
    stop = threading.Event()
    with ringlog.connect(running.url, wait=10, timeout_ms=30_000) as client:
        topics = [on_shard(client, 0), on_shard(client, 1)]
        for topic in topics:
            client.topics.create(topic, durability=durability)

        def work(topic, has_many_frames):
            count = 0
            try:
                with client.producer(topic, max_buffer_bytes=4 << 20) as producer:
                    while not stop.is_set():
                        part = [b"%d" % n for n in range(count, count + 50)]
                        if has_many_frames:
                            producer.send_each(part)
                        else:
                            for data in part:
                                producer.send(data)
                        count += 50
            except Exception as e:  # noqa: BLE001  shown by the assertion below
                failures.append(e)
            sent[topic] = count

        workers = [
            threading.Thread(target=work, args=args) for args in ((topics[0], True), (topics[1], False))
        ]
        for worker in workers:
            worker.start()
        for kill in range(kills):
            topic = topics[kill % 2]
            before = client.topics.state(topic).head_seq
            end = time.monotonic() + WAIT_S
            while client.topics.state(topic).head_seq < before + 100:  # The producer must be active.
                assert time.monotonic() < end, "no progress"
            running.kill("wal_shard", shard=kill % 2)
        running.wait_ready()
        stop.set()
        for worker in workers:
            worker.join(WAIT_S)
        assert failures == []
        for topic in topics:
            assert sent[topic] > 100
            assert payloads(client, topic) == [b"%d" % n for n in range(sent[topic])]


def test_every_handle_works_again_after_an_engine_restart(running):
    """Producers, readers and requests need no code of the program for this."""
    with ringlog.connect(running.url, wait=10, timeout_ms=30_000) as client:
        producer = client.producer("t")
        producer.send(b"before").result(WAIT_S)
        running.restart()
        assert producer.send(b"after").result(WAIT_S).first_seq == 2
        assert client.append("t", b"direct").first_seq == 3
        assert payloads(client, "t") == [b"before", b"after", b"direct"]
        assert client.state is ClientState.READY
        assert [e.kind for e in client.events()].count("engine_restarted") == 1
        assert client.health().engine_starts_seen == 2


def test_records_sent_while_the_engine_is_down_arrive_once(running):
    """This includes records that reached the log before the crash without an ack."""
    with ringlog.connect(running.url, wait=10, timeout_ms=60_000) as client:
        client.topics.create("t", durability="fsync")
        with client.producer("t", linger_ms=0) as producer:
            producer.send(b"0").result(WAIT_S)
            tickets = [producer.send(b"%d" % n) for n in range(1, 200)]
            running.crash()
            tickets += [producer.send(b"%d" % n) for n in range(200, 400)]
            assert not tickets[-1].done()
            running.start()
            assert producer.flush(WAIT_S).unfinished == 0
        assert [t.result().first_seq for t in tickets] == list(range(2, 401))
        assert payloads(client, "t") == [b"%d" % n for n in range(400)]


def test_a_follower_continues_over_an_engine_restart(running):
    """A reader with `follow=True` delivers the records of both runs of the engine in order."""
    with ringlog.connect(running.url, wait=10, timeout_ms=30_000) as client:
        client.append("t", b"0")
        found, enough = [], threading.Event()
        reader = client.reader("t", follow=True)

        def follow():
            for item in reader:
                found.append(item.data)
                if len(found) == 3:
                    enough.set()
                    return

        follower = threading.Thread(target=follow)
        follower.start()
        client.append("t", b"1")
        running.restart()
        client.append("t", b"2")
        assert enough.wait(WAIT_S)
        follower.join(WAIT_S)
        reader.close()
        assert found == [b"0", b"1", b"2"]


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_a_follower_gets_a_tombstone_for_ephemeral_records_lost_with_their_shard(running, transport):
    """The tombstone contains the range of lost seqs. Later records get higher seqs."""
    with ringlog.connect(running.url, wait=WAIT_S, transport=transport, timeout_ms=60_000) as client:
        client.topics.create("e", durability="ephemeral")
        reader = client.reader("e")
        last = client.append("e", b"0").last_seq
        assert [item.data for item in reader] == [b"0"]
        for life in range(1, 4):
            running.kill("wal_shard", shard=home("e"))
            head = client.topics.state("e", touch=False).head_seq
            (tombstone,) = list(reader)
            found = (tombstone.reason, tombstone.gap_from, tombstone.gap_to)
            assert found == ("restart_loss", last + 1, head)
            last = client.append("e", b"%d" % life).last_seq
            (record,) = list(reader)
            assert (record.seq, record.data) == (last, b"%d" % life)
            assert last == head + 1


def test_a_client_without_reconnect_closes_when_its_engine_stops(running):
    client = ringlog.connect(running.url, wait=10, reconnect=False)
    client.append("t", b"x")
    running.stop()
    end = time.monotonic() + WAIT_S
    while client.state is not ClientState.CLOSED:
        assert time.monotonic() < end
    client.close(0)
    running.start()


def test_a_forked_child_has_an_empty_buffer_and_its_own_identity(running):
    """Only the parent sends its unsent records. The handles also work in the child."""
    client = ringlog.connect(running.url, wait=10)
    client.append("t", b"before")
    producer = client.producer("t", linger_ms=60_000)
    ticket = producer.send(b"parent")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert producer.stats().pending_records == 0
            producer.send(b"child")
            assert producer.flush(WAIT_S).acked == 1
            client.append("t", b"child direct")
            status = 0 if client.close(WAIT_S).is_clean else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not ticket.done()
    assert producer.flush(WAIT_S).acked == 1
    assert client.append("t", b"parent direct").first_seq == 5
    assert payloads(client, "t") == [b"before", b"child", b"child direct", b"parent", b"parent direct"]
    assert client.close().is_clean


def test_an_idle_client_uses_no_cpu_time(client):
    """The test counts wake-ups, because one wake-up can cost milliseconds of CPU time on a slow host."""
    client.append("t", b"x")
    client.producer("t").send_many([b"y"]).result(WAIT_S)
    before = resource.getrusage(resource.RUSAGE_SELF)
    assert not threading.Event().wait(1.0)  # The test measures CPU use over real time.
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_nvcsw - before.ru_nvcsw < WAKE_UPS_MAX
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SPINNING_S


def test_killing_the_gateway_under_a_producer_loses_and_duplicates_nothing():
    """The shard recognises retried frames by their producer number."""
    with (
        engine(wal={"shards": 2}, gateway={"enabled": True}, supervisor={"restart_max": 50}) as running,
        ringlog.connect(running.url, wait=10, transport="ipc", timeout_ms=30_000) as client,
    ):
        count = 0
        with client.producer("t", max_buffer_bytes=1 << 20) as producer:
            for _ in range(3):
                for _ in range(40):
                    producer.send_each([b"%d" % n for n in range(count, count + 50)])
                    count += 50
                running.kill("gateway")
            producer.flush(WAIT_S)
        assert client.health().reconnections >= 1
        assert payloads(client, "t") == [b"%d" % n for n in range(count)]


def test_tcp_is_encrypted_and_requires_the_right_server_key(tmp_path):
    """A client with a wrong server key, or without one, cannot connect."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    key_file = tmp_path / "curve.key"
    key_file.write_text(f'public_key = "{public}"\nsecret_key = "{secret}"\n')
    key_file.chmod(0o600)
    port = free_port()
    native = {"endpoint": f"tcp://127.0.0.1:{port}", "curve_key_file": str(key_file)}
    with engine(wal={"shards": 2}, gateway={"enabled": True}, native=native):
        url = f"ringlog://127.0.0.1:{port}"
        with ringlog.connect(f"{url}?server_key={public}", wait=10) as client:
            assert client.transport == "tcp"
            with client.producer("t") as producer:
                producer.send_each([b"%d" % n for n in range(2_000)])
            assert payloads(client, "t") == [b"%d" % n for n in range(2_000)]
        stranger = zmq.curve_keypair()[0].decode()
        with pytest.raises(NotConnected):
            ringlog.connect(f"{url}?server_key={stranger}", wait=1.0)
        with pytest.raises(NotConnected, match="public key"):
            ringlog.connect(url, wait=1.0)


def test_close_ends_the_daemon_thread_at_once(running):
    """This also holds with unsent frames and a stopped engine."""
    before = threading.active_count()
    client = ringlog.connect(running.url, wait=10, timeout_ms=60_000)
    client.producer("t", linger_ms=1).send(b"x").result(WAIT_S)
    running.stop()
    client.producer("t", linger_ms=1).send(b"y")
    began = time.monotonic()
    client.close(0)
    assert time.monotonic() - began < WAIT_S, "a minute is what its calls may take"
    assert threading.active_count() == before
    running.start()


def test_the_pytest_plugin_does_not_hide_the_engine_function():
    """`ringlog.testing.engine` stays callable after pytest has loaded the plugin."""
    import ringlog.testing.pytest_plugin

    assert callable(ringlog.testing.engine)


def test_the_test_engine_leaves_no_process_and_no_shared_memory(tmp_path):
    with engine(directory=tmp_path) as started:
        shm_dir, pid = started.info.shm_dir, started.pid_of("wal_shard")
        started.kill("supervisor")
    assert not os.path.exists(shm_dir)
    assert not is_running(pid)


def test_topics_stay_usable_after_the_number_of_shards_changed(tmp_path):
    """The home shard of a name may only refer to the shard that owns the topic.

    Clients follow the reference.
    """
    names = [f"moved-{i}" for i in range(8)]
    with engine(directory=tmp_path, wal={"shards": 2}) as before, ringlog.connect(before.url) as client:
        for name in names:
            client.topics.create(name, durability="fsync")
            client.append(name, b"first")
    with engine(directory=tmp_path, wal={"shards": 3}, gateway={"enabled": True}) as after:
        for transport in ("ring", "ipc"):
            with ringlog.connect(after.url, transport=transport) as client:
                for name in names:
                    start = client.topics.state(name).head_seq
                    assert client.append(name, b"one").first_seq == start + 1
                    with client.producer(name) as out:
                        assert out.send(b"two").result(10).first_seq == start + 2
                    assert (
                        client.append_many(name, [b"three"], idempotency_key=transport).first_seq == start + 3
                    )
                    assert not client.topics.create(name, exist_ok=True).created
                    assert client.topics.configure(name, cap_records=100).config["cap_records"] == 100
                    assert client.read(name, limit=1).records[0].data == b"first"
        with ringlog.connect(after.url) as client:
            assert sorted(found.topic for found in client.topics.list()) == names


@pytest.mark.parametrize("transport", ["auto", "ipc"])
def test_topics_of_a_given_up_shard_fail_at_once_and_the_others_continue(transport):
    """If the supervisor gives up a shard (RF-16), requests fail with `shard_failed` at once.

    They do not run into a timeout.
    """
    with engine(wal={"shards": 2}, gateway={"enabled": True}, supervisor={"restart_max": 0}) as running:
        with ringlog.connect(running.url, wait=10) as client:
            topics = [on_shard(client, 0), on_shard(client, 1)]
            for topic in topics:
                client.append(topic, b"before")
        running.kill("wal_shard", shard=0)
        wait_until(lambda: running.status().processes[0].state == "given_up", WAIT_S, "giving up")
        with ringlog.connect(running.url, wait=10, transport=transport, timeout_ms=60_000) as client:
            for operation in (client.append, lambda topic, _: client.topics.state(topic)):
                with pytest.raises(NotReady) as caught:
                    operation(topics[0], b"x")
                assert caught.value.detail["reason"] == "shard_failed"
            client.append(topics[1], b"after")
            assert payloads(client, topics[1]) == [b"before", b"after"]


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_refused_frames_that_are_sent_again_keep_their_order(running, transport):
    """A frame is appended directly after its predecessor or refused (W9).

    The topic is recreated while a producer has many frames in flight. Its shard and the gateway are killed.
    """
    stop, failures, tickets = threading.Event(), [], []
    topic = on_shard_of("order", 0)
    with ringlog.connect(running.url, wait=10, timeout_ms=60_000, transport=transport) as client:

        def work():
            count = 0
            try:
                with client.producer(topic, max_buffer_bytes=4 << 20) as producer:
                    while not stop.is_set():
                        part = [b"%08d" % n + b"x" * 500 for n in range(count, count + 200)]
                        tickets.append(producer.send_each(part))
                        count += 200
            except Exception as e:  # noqa: BLE001  shown by the assertion below
                failures.append(e)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            with ringlog.connect(running.url, wait=10, timeout_ms=30_000) as other:
                make_trouble(running, other, client, topic, tickets)
        finally:
            stop.set()
            worker.join(2 * WAIT_S)
        assert failures == []
        assert client.health().retries > 0
        found = [int(data[:8]) for data in payloads(client, topic)]
    assert found == list(range(found[0], len(tickets) * 200)), "all of the topic's last life, in order"
    for ticket in tickets:
        assert_ascending(ticket.result(WAIT_S))


def on_shard_of(prefix, shard):
    return next(name for n in range(1_000) if home(name := f"{prefix}-{n}") == shard)


def make_trouble(running, other, client, topic, tickets):
    """Recreate the topic until frames are refused, then kill processes."""

    def more(count):
        wanted = len(tickets) + count
        wait_until(lambda: len(tickets) >= wanted, WAIT_S, "the producer to get on")

    more(5)
    for _ in range(50):
        if client.health().retries:
            break
        other.topics.delete(topic)
        more(3)
    for kind in ("wal_shard", "gateway", "wal_shard"):
        running.kill(kind)
        more(5)
    running.wait_ready()


def assert_ascending(appended):
    """Check that seqs ascend within each life of the topic. A batch may span two lives."""
    drops = sum(after <= before for before, after in itertools.pairwise(appended.seqs.tolist()))
    assert drops <= 1, appended.seqs
