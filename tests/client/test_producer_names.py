"""Two producers with one name: the latest one owns it, and every acked record is stored.

The owner of a name is its latest claimant, and no frame under an older claim is acked (W11).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

import ringlog
from ringlog import aio
from ringlog.errors import ProducerFenced, UsageError
from ringlog.frame import encode_records, frame
from ringlog.testing import engine
from ringlog.testing.children import debug_environ
from tests.support.topic_contents import payloads

pytestmark = pytest.mark.timeout(120)
WAIT_S = 30.0
TRANSPORTS = pytest.mark.parametrize("transport", ["ring", "ipc"])


def send_some(producer, name, count):
    """Send records one by one. Return the acked ones."""
    acked = []
    tickets = [(data, producer.send(data)) for data in (b"%s-%d" % (name, n) for n in range(count))]
    producer.flush(WAIT_S)
    for data, ticket in tickets:
        if ticket.error() is None:
            acked.append(data)
    return acked


@TRANSPORTS
def test_the_second_producer_of_a_name_fences_the_first(ringlog_engine, topic, transport):
    """Two web workers use the same name. No acked record may be lost."""
    with (
        ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as one,
        ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as two,
    ):
        one.topics.create(topic, durability="fsync")
        first = one.producer(topic, name="worker", max_frame_records=1)
        second = two.producer(topic, name="worker", max_frame_records=1)
        acked = send_some(first, b"first", 100)
        assert len(acked) == 100
        acked += send_some(second, b"second", 100)
        assert send_some(first, b"late", 100) == []
        with pytest.raises(ProducerFenced, match="was opened later on this topic"):
            first.send_many([b"late"]).result(WAIT_S)
        acked += send_some(second, b"more", 100)
        assert len(acked) == 300
        assert payloads(one, topic) == acked
        # A fenced producer stays fenced. A new producer can claim the name.
        acked += send_some(one.producer(topic, name="worker"), b"third", 10)
        assert payloads(one, topic) == acked


@TRANSPORTS
def test_numbered_producers_with_one_id_are_fenced_like_named_ones(ringlog_engine, topic, transport):
    with (
        ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as one,
        ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as two,
    ):
        one.topics.create(topic, durability="fsync")

        def send(producer, number, data):
            made = frame(encode_records([data]), topic_id=0)
            return producer.send(made, number).result(WAIT_S)

        first = one.numbered_producer(topic, 77)
        assert first.settled().producer_seq == 0
        assert send(first, 1, b"first").first_seq == 1
        second = two.numbered_producer(topic, 77)
        assert second.settled().producer_seq == 1
        assert send(second, 1, b"first").deduped, "who resumes a plan is told what of it is there"
        assert send(second, 2, b"second").first_seq == 2
        for number in (2, 3):
            with pytest.raises(ProducerFenced) as fenced:
                send(first, number, b"late")
            assert fenced.value.outcome == "not_applied"
        with pytest.raises(ProducerFenced):
            first.settled()
        assert send(second, 3, b"third").first_seq == 3
        assert payloads(one, topic) == [b"first", b"second", b"third"]


@TRANSPORTS
def test_the_first_asyncio_producer_of_a_name_is_fenced(ringlog_engine, topic, transport):
    async def main():
        async with (
            aio.connect(ringlog_engine.url, wait=10, transport=transport) as one,
            aio.connect(ringlog_engine.url, wait=10, transport=transport) as two,
        ):
            await one.topics.create(topic, durability="fsync")
            first, second = one.producer(topic, name="worker"), two.producer(topic, name="worker")
            await (await first.send(b"first"))
            await (await second.send(b"second"))
            with pytest.raises(ProducerFenced):
                await (await first.send(b"late"))
            await (await second.send(b"more"))
            assert [each.data for each in (await one.read(topic)).records] == [b"first", b"second", b"more"]

    asyncio.run(main())


def test_the_name_of_a_killed_process_can_be_claimed_at_once(ringlog_engine, topic, client):
    client.topics.create(topic, durability="fsync")
    program = f"""
        import ringlog, sys
        client = ringlog.connect({ringlog_engine.url!r}, wait=10)
        producer = client.producer({topic!r}, name="worker")
        producer.send_many([b"of the dead"]).result(30)
        print("sent", flush=True)
        sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=debug_environ(),
    )
    with child:
        assert child.stdout.readline() == b"sent\n"
        child.send_signal(signal.SIGKILL)
    producer = client.producer(topic, name="worker")
    assert producer.resume().producer_seq == 1
    assert producer.send_many([b"next"]).result(WAIT_S).first_seq == 2


@pytest.mark.parametrize("is_numbered", [False, True])
def test_a_forked_child_cannot_send_under_its_parents_name(ringlog_engine, topic, client, is_numbered):
    client.topics.create(topic, durability="fsync")
    if is_numbered:
        producer = client.numbered_producer(topic, 9)
    else:
        producer = client.producer(topic, name="worker")
        producer.send_many([b"parent"]).result(WAIT_S)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            calls = [producer.settled] if is_numbered else [lambda: producer.send(b"x"), producer.resume]
            refused = 0
            for call in calls:
                try:
                    call()
                except UsageError as e:
                    refused += "child" in str(e)
            producer.close()
            of_its_own = client.producer(topic, name="worker-2")
            of_its_own.send_many([b"child"]).result(WAIT_S)
            status = 0 if refused == len(calls) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    if is_numbered:
        assert producer.settled().producer_seq == 0
    else:
        producer.send_many([b"parent again"]).result(WAIT_S)
        assert payloads(client, topic) == [b"parent", b"child", b"parent again"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_name_ownership_survives_every_restart(transport):
    with (
        engine(wal={"shards": 2}, gateway={"enabled": True}, supervisor={"restart_max": 50}) as running,
        ringlog.connect(running.url, wait=10, transport=transport, timeout_ms=30_000) as one,
        ringlog.connect(running.url, wait=10, transport=transport, timeout_ms=30_000) as two,
    ):
        topics = [f"topic-{n}" for n in range(4)]
        acked = {}
        lost, owners = [], []
        for topic in topics:
            one.topics.create(topic, durability="fsync")
            lost.append(one.producer(topic, name="job", max_frame_records=1))
            owners.append(two.producer(topic, name="job", max_frame_records=1))
            acked[topic] = send_some(lost[-1], b"before", 2) + send_some(owners[-1], b"first", 3)
            assert len(acked[topic]) == 5
        hurts = {
            "shards": lambda: [running.kill("wal_shard", shard=shard) for shard in (0, 1)],
            "gateway": lambda: running.kill("gateway"),
            "engine": running.crash,
            "stop": running.stop,
        }
        for hurt, do in hurts.items():
            do()
            if hurt in {"engine", "stop"}:
                running.start()
            for topic, owner, zombie in zip(topics, owners, lost, strict=True):
                assert send_some(zombie, b"late", 2) == [], hurt
                found = send_some(owner, hurt.encode(), 3)
                assert len(found) == 3, hurt
                acked[topic] += found
        for topic in topics:
            assert payloads(two, topic) == acked[topic]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_processes_that_fence_each_other_lose_and_duplicate_nothing(ringlog_engine, topic, client, transport):
    """Each process claims the name again when it is fenced, like two instances of a flapping deployment."""
    client.topics.create(topic, durability="fsync")
    program = f"""
        import ringlog, sys
        from ringlog.errors import RinglogError
        name = sys.argv[1].encode()
        with ringlog.connect({ringlog_engine.url!r}, wait=10, transport={transport!r}) as client:
            sent = opened = 0
            while sent < 300:
                producer = client.producer({topic!r}, name="worker", max_frame_records=2)
                opened += 1
                while sent < 300:
                    tickets = []
                    for _ in range(10):
                        data = name + b"-%d" % sent
                        tickets.append((data, producer.send(data)))
                        sent += 1
                    producer.flush(30)
                    failed = None
                    for data, ticket in tickets:
                        error = ticket.error()
                        if error is None:
                            print("acked", data.decode())
                        elif error.outcome == "unknown":
                            print("unknown", data.decode())
                        failed = failed or error
                    if failed is not None:
                        break
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    children = [
        subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in ("one", "two")
    ]
    said = [child.communicate(timeout=90)[0].split("\n") for child in children]
    assert [child.returncode for child in children] == [0, 0]
    acked = {line.split()[1].encode() for lines in said for line in lines if line.startswith("acked")}
    unknown = {line.split()[1].encode() for lines in said for line in lines if line.startswith("unknown")}
    found = payloads(client, topic)
    assert len(found) == len(set(found)), "nothing is doubled"
    assert acked <= set(found) <= acked | unknown
    assert acked
