"""Rings start small and grow with use. If shared memory is full, frames go by socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringlog.client import Record
from ringlog.limits import MIB, RING_BYTES_FIRST
from tests.support.engines import engine_fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

running = engine_fixture("module", wal={"shards": 1}, run={"ring_bytes": 4 * MIB})


def ring_bytes(running) -> list[int]:
    """Return the sizes of all rings, except the small ones of waiting readers."""
    sizes = [path.stat().st_size for path in Path(running.info.shm_dir).glob("*.ring")]
    return sorted(size for size in sizes if size > RING_BYTES_FIRST)


def test_a_full_ring_is_replaced_by_a_larger_one_without_reordering(running, client):
    client.append("grows", b"first")
    assert ring_bytes(running)[-1] < 2 * MIB
    with client.producer("grows") as producer:
        for n in range(20_000):
            producer.send(b"%06d" % n + bytes(400))
    assert ring_bytes(running)[-1] > 4 * MIB
    found = [int(item.data[:6]) for item in client.reader("grows", start=2) if isinstance(item, Record)]
    assert found == list(range(20_000))


def test_a_frame_too_large_for_the_first_ring_gets_a_larger_one(client):
    for n in range(3):
        client.append("large", bytes([n]) * 700_000)
    client.append("large", b"x" * (1 << 20))
    assert [len(item.data) for item in client.reader("large")] == [700_000] * 3 + [1 << 20]


PROGRAM = """
import logging, os, sys, ringlog
logging.basicConfig()
from ringlog.testing import engine
with engine(wal={"shards": 8}) as running:
    shm = running.info.shm_dir
    with ringlog.connect(running.url, timeout_ms=20_000) as client:
        client.append("before", b"0")
        facts = os.statvfs(shm)
        room = os.open(shm + "/filler", os.O_CREAT | os.O_WRONLY)
        os.posix_fallocate(room, 0, facts.f_bavail * facts.f_frsize - 4096)
        with ringlog.connect(running.url, timeout_ms=20_000) as other:
            other.topics.create("full", durability="fsync")
            with other.producer("full") as producer:
                tickets = [producer.send(b"%d" % n) for n in range(3_000)]
            assert tickets[-1].result(0).last_seq == 3_000
            os.unlink(shm + "/filler")
            os.close(room)
            with other.producer("full") as producer:
                for n in range(3_000, 6_000):
                    producer.send(b"%d" % n)
            found = [int(item.data) for item in other.reader("full")]
            assert found == list(range(6_000)), len(found)
print("worked")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system of its own")
def test_an_engine_with_eight_shards_works_with_64_mib_of_shared_memory(tmp_path: Path):
    """This is the default of containers.

    While shared memory is full, frames go by socket, and later by ring again.
    """
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    mount = 'mount -t tmpfs -o size=64m,mode=1777 container /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]
    done = subprocess.run(
        [*command, sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "worked\n"
    assert done.stderr.count("frames are sent by socket") == 1
