"""A shard whose restart budget is used up: clients are told at once, and go on once the engine is back."""

from __future__ import annotations

import threading
import time

import pytest

import ringlog
from ringlog.errors import NotReady
from ringlog.testing.real_engine import engine, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
WAIT_S = 20.0
TIMEOUT_MS = 60_000
"""Of requests: far longer than the test lets anything wait."""


def fail_shard(running, shard):
    """Kill it until it is given up."""

    def is_given_up():
        for process in running.status().processes:
            if process.kind == "wal_shard" and process.name.endswith(f"{shard:02}"):
                return process.state == "given_up"
        return False

    running.kill("wal_shard", shard=shard)
    wait_until(is_given_up, WAIT_S, "the shard to be given up")


@pytest.mark.parametrize("transport", ["ring", "ipc"])
def test_everything_that_needs_a_failed_shard_is_refused_at_once(transport):
    with engine(
        wal={"shards": 1}, gateway={"enabled": True}, supervisor={"restart_max": 0},
    ) as running, ringlog.connect(
        running.url, wait=10, transport=transport, timeout_ms=TIMEOUT_MS
    ) as client:  # fmt: skip
        client.append("t", b"0")
        client.topics.create("q", type="queue")
        queue, producer = client.queue("q"), client.producer("t", linger_ms=0)
        queue.put(b"job")
        producer.send(b"1").result(WAIT_S)
        follower = iter(client.reader("t", follow=True))
        assert [next(follower).data for _ in range(2)] == [b"0", b"1"]
        ended = []

        def follow():
            try:
                next(follower)
            except NotReady as e:
                ended.append(e)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        fail_shard(running, 0)
        for refused in (
            lambda: client.append("t", b"x"),
            lambda: client.append("t", b"x"),
            lambda: client.append("t", b"x", dedup_id="k"),
            lambda: producer.send(b"x").result(WAIT_S),
            lambda: queue.put(b"x"),
            lambda: queue.claim(wait_ms=10_000),
            lambda: list(client.reader("t")),
            lambda: client.topics.state("t"),
        ):
            begun = time.monotonic()
            with pytest.raises(NotReady) as caught:
                refused()
            assert caught.value.detail["reason"] == "shard_failed"
            assert time.monotonic() - begun < TIMEOUT_MS / 2_000
        if transport == "ring":
            thread.join(WAIT_S)
            assert [error.detail["reason"] for error in ended] == ["shard_failed"]
        running.restart()
        client.append("t", b"after")
        assert producer.send(b"later").result(WAIT_S)
        assert {record.data for record in client.reader("t")} >= {b"0", b"1", b"after", b"later"}
        assert [job.data for job in queue.claim(10)][:1] == [b"job"]
