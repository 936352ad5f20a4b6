"""The resources of a client are released when it is closed or garbage-collected."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading

import pytest

import ringlog
import ringlog.aio
from ringlog.testing.children import debug_environ
from ringlog.testing.pytest_plugin import ringlog_engine, ringlog_topic
from ringlog.testing.real_engine import wait_until

__all__ = ["ringlog_engine", "ringlog_topic"]
pytestmark = pytest.mark.usefixtures("quick_collections")
ROUNDS = 30


def held() -> tuple[int, int]:
    """Return the numbers of descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def until_back_at(before: tuple[int, int], spare: int = 0) -> None:
    def is_back() -> bool:
        gc.collect()
        now = held()
        return now[0] <= before[0] + spare and now[1] <= before[1]

    wait_until(is_back, 20, "descriptors and threads to be given back", lambda: f"{before} {held()}")


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_readers_in_a_loop_leak_no_descriptor(ringlog_engine, topic, transport):
    """`for record in log.reader(topic)` as in the README, and readers that are abandoned midway."""
    with ringlog.connect(ringlog_engine.url, wait=10, transport=transport) as log:
        log.append_many(topic, [b"a", b"b"])
        list(log.reader(topic))
        before = held()
        for _ in range(ROUNDS):
            assert [record.data for record in log.reader(topic)] == [b"a", b"b"]
            assert next(iter(log.reader(topic, follow=True))).data == b"a"
            assert next(log.reader(topic).pages()).records[0].data == b"a"
            if transport == "ring":
                assert log.tailer(topic).next(10).bytes() == [b"a", b"b"]
        until_back_at(before, spare=2)


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_a_dropped_client_releases_its_thread_and_descriptors(ringlog_engine, topic, transport):
    """Its sent records are appended. A producer or reader keeps its client alive."""
    with ringlog.connect(ringlog_engine.url, wait=10) as steady:
        steady.topics.create(topic)
        before = held()
        for n in range(8):
            client = ringlog.connect(ringlog_engine.url, wait=10, transport=transport)
            client.append(topic, b"%d" % n)
            next(client.topics.list(prefix=topic))
            producer = client.producer(topic, linger_ms=10_000)
            del client
            gc.collect()
            producer.send(b"%d by a producer" % n)
            del producer
        until_back_at(before, spare=2)
        found = {record.data for record in steady.reader(topic)}
    assert found == {b"%d%s" % (n, how) for n in range(8) for how in (b"", b" by a producer")}


def test_parts_of_a_dropped_client_keep_working(ringlog_engine, ringlog_topic):
    topic, url = ringlog_topic(), ringlog_engine.url
    topics = ringlog.connect(url, wait=10).topics
    gc.collect()
    topics.create(topic, type="queue")
    queue = ringlog.connect(url, wait=10).queue(topic)
    gc.collect()
    queue.put(b"job")
    (job,) = ringlog.connect(url, wait=10).queue(topic).claim(wait_ms=10_000)
    gc.collect()
    job.ack()
    ticket = ringlog.connect(url, wait=10).producer(topic + "-log").send(b"x")
    assert ticket.result(10).count == 1


@pytest.mark.parametrize("transport", ["ring", "ipc"])
@pytest.mark.parametrize("is_one_loop", [True, False])
def test_dropped_asyncio_clients_release_their_descriptors(
    ringlog_engine, ringlog_topic, transport, is_one_loop
):
    """This also holds if their event loop has ended. The garbage collector never blocks."""
    topic, before = ringlog_topic(), held()

    async def forget() -> None:
        client = ringlog.aio.connect(ringlog_engine.url, transport=transport)
        await client.append(topic, b"x")
        reader = client.reader(topic)
        assert (await anext(aiter(reader))).data == b"x"

    async def forget_often() -> None:
        for _ in range(6):
            await forget()
            gc.collect()

    if is_one_loop:
        asyncio.run(forget_often())
    else:
        for _ in range(6):
            asyncio.run(forget())
            gc.collect()
    until_back_at(before, spare=2)


AT_THE_LIMIT = """
    import os, resource, sys
    import ringlog, ringlog.client.reader, ringlog.client.tailer, ringlog.client.queue
    url, topic, transport = sys.argv[1:]
    client = ringlog.connect(url, wait=10)
    client.append(topic, b"x")
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 40, highest + 40))
    taken = []
    while True:
        try:
            taken.append(os.dup(0))
        except OSError:
            break

    def connected():
        other = ringlog.connect(url, wait=0.5, transport=transport, timeout_ms=1_000)
        try:
            other.append(topic, b"y")
        finally:
            other.close(0)

    calls = [connected, lambda: client.read(topic), lambda: client.tailer(topic).next(5)]
    for spare in range(20):
        for call in calls:
            try:
                call()
            except ringlog.errors.RinglogError as e:
                assert "too many open files" in str(e) and "ulimit -n" in str(e), repr(e)
                print("refused")
        os.close(taken.pop())
    for fd in taken:
        os.close(fd)
    connected()
    assert [record.data for record in client.read(topic).records][:1] == [b"x"]
    client.close()
    print("whole")
"""


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_the_error_at_the_descriptor_limit_names_the_cause_and_a_remedy(
    ringlog_engine, ringlog_topic, transport
):
    """The error comes soon and is not a misleading one such as "keeps changing". No process exits."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AT_THE_LIMIT), ringlog_engine.url,
         ringlog_topic(), transport],
        check=False, capture_output=True, text=True, timeout=100, env=debug_environ(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.split()
    assert said[-1] == "whole"
    assert "refused" in said


OTHER_USER = """
    import os, sys
    import ringlog
    from ringlog.errors import NotConnected
    client = ringlog.connect(sys.argv[1], transport=sys.argv[2])  # That user may be unable to import it.
    os.setgid(65534)
    os.setuid(65534)
    try:
        client.wait_ready(0.5)
    except NotConnected as e:
        print(e.message)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_the_error_for_another_user_names_the_permission_and_a_remedy(ringlog_engine, transport):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OTHER_USER), ringlog_engine.url, transport],
        check=False, capture_output=True, text=True, timeout=60, env=debug_environ(),
    )  # fmt: skip
    assert "user 65534 may not read the run directory" in done.stdout, done.stderr
    assert "run program and engine as the same user, or connect over TCP" in done.stdout
