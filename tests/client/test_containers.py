"""An engine in a container, and programs outside that share the data volume or /dev/shm with it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringlog
import ringlog.aio
from ringlog.errors import NotConnected

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces"),
]

ENGINE = """
import sys
from ringlog.supervision.serve import *
from supervisor import main
sys.argv = ["supervisor", "--data-dir", sys.argv[1], "--set", "run.allow_root=true", "--set", "wal.shards=2"]
sys.exit(main())
"""


class Container:
    """An engine that is process 1 of a pid namespace, optionally with a private /dev/shm."""

    def __init__(self, data_dir: Path, *, own_shm: bool) -> None:
        self.url = f"ringlog://{data_dir}/run"
        mount = "mount -t tmpfs -o size=64m,mode=1777 container /dev/shm && " if own_shm else ""
        self.process = subprocess.Popen(
            [
                "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc",
                "--kill-child=SIGTERM", "sh", "-c", mount + 'exec "$@"', "sh",
                sys.executable, "-P", "-c", ENGINE, str(data_dir),
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def stop(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            os.kill(int(pid), 15)
        self.process.wait(30)


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ringlog-container-") as path:
        yield Path(path) / "data"


def test_a_program_that_shares_only_the_data_volume_connects_by_socket(data_dir: Path) -> None:
    """This includes a program, and its reader, that started before the engine."""
    early = ringlog.connect(f"ringlog://{data_dir}/run", timeout_ms=30_000)
    reader = early.reader("orders", follow=True)
    found: list[bytes] = []

    def read() -> None:
        for record in reader:
            found.append(record.data)
            if len(found) == 102:
                return

    data_dir.mkdir(mode=0o700)
    container = Container(data_dir, own_shm=True)
    try:
        early.wait_ready(30)
        assert early.transport == "ipc"
        early.topics.create("orders", durability="fsync")
        reading = threading.Thread(target=read)
        reading.start()
        early.append("orders", b"first")
        with ringlog.connect(container.url) as late:
            late.append("orders", b"second")
            assert late.transport == "ipc"
            with late.producer("orders") as producer:
                for n in range(100):
                    producer.send(b"%d" % n)
        reading.join(30)
        assert found == [b"first", b"second", *(b"%d" % n for n in range(100))]
        asyncio.run(_work_with_asyncio(container.url))
        with pytest.raises(NotConnected), ringlog.connect(container.url, transport="ring", wait=0.3):
            pass
        early.close()
    finally:
        container.stop()
    assert not (data_dir / "run" / "gateway.sock").exists()


async def _work_with_asyncio(url: str) -> None:
    async with ringlog.aio.connect(url) as client:
        await client.topics.create("jobs", type="queue")
        queue = client.queue("jobs")
        await queue.put(b"job")
        [job] = await queue.claim(1, wait_ms=5_000)
        assert job.data == b"job"
        await job.ack()
        assert client.transport == "ipc"


def test_a_worker_in_another_pid_namespace_keeps_its_ring_and_its_jobs(data_dir: Path) -> None:
    """The worker shares /dev/shm.

    In the engine's namespace its pid is unused or belongs to another process.
    """
    data_dir.mkdir(mode=0o700)
    container = Container(data_dir, own_shm=False)
    try:
        with ringlog.connect(container.url, timeout_ms=30_000, wait=30) as client:
            assert client.transport == "ring"
            client.topics.create("jobs", type="queue", lease_ms=60_000, leases_durable=True)
            queue = client.queue("jobs", release_on_exit=True)
            queue.put(b"job")
            [job] = queue.claim(1)
            client.append("log", b"x")
            container.stop()
            container = Container(data_dir, own_shm=False)
            client.append("log", b"y")
            assert queue.claim(1, wait_ms=300) == []
            job.ack()
            assert [record.data for record in client.reader("log")] == [b"x", b"y"]
    finally:
        container.stop()
