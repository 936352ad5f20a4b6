"""Closing a client also closes its readers: no file of the engine stays open in the process."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest

import ringlog
import ringlog.aio
from ringlog.client.connection.ref_count import RefCounted
from ringlog.errors import RinglogError

WAIT_S = 20.0


def open_files(data_dir: str) -> set[tuple[str, str]]:
    """Return `(descriptor, path)` of the open files of this process below `data_dir`."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
        except OSError:
            continue  # This was the descriptor of the directory listing itself.
    return {(fd, path) for fd, path in found if path.startswith(data_dir)}


@pytest.fixture
def opened(ringlog_engine):
    """Return a function that lists files opened since the fixture started.

    Other tests use the same engine and may have left files to the garbage collector.
    """
    gc.collect()
    before = open_files(ringlog_engine.data_dir)

    def look():
        return open_files(ringlog_engine.data_dir) - before

    return look


def test_closing_the_client_releases_files_of_unclosed_readers(ringlog_engine, topic, opened):
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        client.append_many(topic, [b"a", b"b", b"c"])
        reader, tailer = client.reader(topic, follow=True), client.tailer(topic)
        items = iter(reader)
        assert next(items).data == b"a"
        batch = tailer.next(WAIT_S)
        assert opened(), "nothing was opened, so nothing is shown"
    assert batch.bytes() == [b"a", b"b", b"c"], "what was handed out stays valid"
    del batch, items  # A mapping keeps its file open while an object refers to it.
    assert not opened()
    assert reader.cursor.seq == 1, "the reader itself is still held"
    assert tailer.cursor.seq == 3


def test_a_reader_that_waits_in_another_thread_ends_when_the_client_closes(ringlog_engine, topic, opened):
    client = ringlog.connect(ringlog_engine.url, wait=10)
    client.append(topic, b"a")
    reader, has_one, ends = client.reader(topic, follow=True), threading.Event(), []

    def read() -> None:
        try:
            for _ in reader:
                has_one.set()
        except RinglogError as e:
            ends.append(e)

    thread = threading.Thread(target=read)
    thread.start()
    assert has_one.wait(WAIT_S)
    client.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert not opened()


async def test_closing_the_asyncio_client_releases_files_of_readers(ringlog_engine, topic, opened):
    async with ringlog.aio.connect(ringlog_engine.url, wait=10) as client:
        await client.append_many(topic, [b"a", b"b"])
        reader, tailer = client.reader(topic), client.tailer(topic)
        items, batches = aiter(reader), aiter(tailer)
        assert (await anext(items)).data == b"a"
        assert (await anext(batches)).bytes() == [b"a", b"b"]
        assert opened(), "nothing was opened, so nothing is shown"
        await batches.aclose()  # The iterator refers to the last batch, which is a mapping.
        await asyncio.sleep(0)  # The event loop refers to it until this task yields.
    assert not opened()
    await items.aclose()
    assert (reader.cursor.seq, tailer.cursor.seq) == (1, 2), "both are still held"


@pytest.mark.parametrize("is_read", [False, True])
def test_a_file_is_closed_after_its_last_user_and_its_owner(is_read):
    closed = []

    class Source:
        def close(self) -> None:
            closed.append(True)

    borrowed = RefCounted(Source())
    if is_read:
        with borrowed.use():
            borrowed.close_when_unused()
            assert not closed, "closed under somebody who reads"
    else:
        borrowed.close_when_unused()
    assert closed
