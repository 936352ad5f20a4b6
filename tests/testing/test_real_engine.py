"""The test engine ends only its own processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ringlog
from ringlog.testing.real_engine import engine, wait_until

pytestmark = pytest.mark.slow

CLIENT = """
import sys, ringlog
with ringlog.connect(sys.argv[1], wait=10, timeout_ms=30_000) as client:
    for line in sys.stdin:
        print(client.append("t", line.encode()).first_seq, flush=True)
"""


def test_a_client_with_the_engine_url_in_its_command_line_survives_a_restart():
    with engine() as host:
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, host.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            for expected in ("1\n", "2\n"):
                client.stdin.write("x\n")
                client.stdin.flush()
                assert client.stdout.readline() == expected, client.poll()
                host.restart()
            client.communicate(timeout=20)
            assert client.returncode == 0
        finally:
            client.kill()
            client.communicate()


def test_processes_left_by_a_killed_supervisor_end_with_the_block():
    with engine() as host:
        with ringlog.connect(host.url, wait=10) as client:
            client.append("t", b"x")
        shard = host.pid_of("wal_shard")
        # A suspended process cannot notice the death of its parent.
        subprocess.run(["kill", "-STOP", str(shard)], check=True)
        host.kill("supervisor")
    wait_until(lambda: not _exists(shard), 10, "the shard to be gone")


def _exists(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False
