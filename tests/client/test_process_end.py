"""Records of a process that exits without closing its clients are stored, however the process started."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from ringlog.testing.children import debug_environ

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
RECORDS = 100
PROGRAM = """
    import asyncio, multiprocessing, sys
    from concurrent.futures import ProcessPoolExecutor
    import ringlog
    from ringlog import aio

    url, topic, how, where = sys.argv[1:5]
    wait = 10 if topic else None
    kept = None

    def work():
        global kept
        client = ringlog.connect(url, wait=wait) if kept is None else kept
        if where == "kept":
            kept = client
        producer = client.producer(topic or "t", linger_ms=60_000)
        for n in range(100):
            producer.send(b"%d" % n)

    async def send():
        client = aio.connect(url, wait=wait)
        producer = client.producer(topic or "t", linger_ms=60_000)
        if wait:
            await client
        for n in range(100):
            await producer.send(b"%d" % n)

    def work_with_asyncio():
        asyncio.run(send())

    if __name__ == "__main__":
        do = work_with_asyncio if where == "asyncio" else work
        if where == "inherited":
            kept = ringlog.connect(url, wait=wait)
            kept.topics.state(topic)
        made_by, _, is_pool = how.partition("-")
        if made_by == "none":
            do()
        elif is_pool:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(made_by)) as pool:
                pool.submit(do).result()
        else:
            child = multiprocessing.get_context(made_by).Process(target=do)
            child.start()
            child.join()
            assert child.exitcode == 0
"""


def run(program, *arguments):
    return subprocess.run(
        [sys.executable, program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=debug_environ(),
    )


@pytest.fixture
def program(tmp_path):
    """The program as a file, because a spawned child must be able to import its function."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


WAYS = [
    *[(how, where) for how in ("none", "fork", "forkserver", "spawn") for where in ("local", "asyncio")],
    ("fork", "kept"), ("fork", "inherited"), ("fork-pool", "kept"), ("forkserver-pool", "local"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "where"), WAYS)
def test_sent_records_are_stored_when_a_process_returns(ringlog_engine, topic, client, program, how, where):
    """The client flushes at the end of every kind of process.

    Children of multiprocessing exit without `atexit` hooks.
    """
    client.topics.create(topic, durability="fsync")
    done = run(program, ringlog_engine.url, topic, how, where)
    assert done.stderr == ""
    assert [int(each.data) for each in client.reader(topic)] == list(range(RECORDS))


@pytest.mark.parametrize(("how", "where"), [("none", "kept"), ("fork", "kept"), ("fork", "asyncio")])
def test_unsettled_records_at_process_exit_are_reported(program, tmp_path, how, where):
    """Without an engine the records are lost.

    The client prints their number and does not change the exit status.
    """
    done = run(program, f"ringlog://{tmp_path}", "", how, where)
    assert "100 unsettled records" in done.stderr


CALLBACKS = """
    import asyncio, sys
    from ringlog import aio

    url, topic, ends = sys.argv[1:4]
    kept = []

    async def wait(ticket):
        await ticket

    async def send():
        for owner in "ab":
            client = aio.connect(url, wait=10)
            await client
            kept.append(client)
            for n in range(2):
                ticket = await client.producer(f"{topic}-{owner}{n}", linger_ms=60_000).send(b"x")
                ticket.on_done(lambda _: print("called after the end of the loop"))
                if ends == "waiting":
                    kept.append(asyncio.ensure_future(wait(ticket)))
        await asyncio.sleep(0)

    if ends == "waiting":
        loop = asyncio.new_event_loop()
        loop.run_until_complete(send())
        loop.close()  # Without cancelling its tasks, which wait for tickets.
        for task in kept:
            if isinstance(task, asyncio.Task):
                task._log_destroy_pending = False
    else:
        asyncio.run(send())
"""


@pytest.mark.parametrize("ends", ["callbacks", "waiting"])
def test_results_for_a_closed_loop_stop_no_other_record(ringlog_engine, topic, client, tmp_path, ends):
    """Callbacks and tasks of the loop cannot run any more when the records are settled."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(CALLBACKS))
    names = [f"{topic}-{owner}{n}" for owner in "ab" for n in range(2)]
    for name in names:
        client.topics.create(name, durability="fsync")
    done = run(path, ringlog_engine.url, topic, ends)
    assert (done.stdout, done.stderr) == ("", "")
    assert [[each.data for each in client.reader(name)] for name in names] == [[b"x"]] * 4
    for name in names:
        client.topics.delete(name)
