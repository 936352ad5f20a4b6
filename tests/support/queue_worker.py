"""A worker of the queue `jobs` that tests kill processes around, and what must be true of its work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ringlog.client import Client
from ringlog.client.queue import Queue
from ringlog.leases.tokens import incarnation_of
from tests.support.client_threads import JOBS, JobThread


class QueueWorker(JobThread):
    """It notes each started job and each completed ack, as `(seq, token)`."""

    def __init__(self, url: str, transport: str, most: int) -> None:
        super().__init__(url, transport, most)
        self.begun: list[tuple[int, int]] = []

    def source(self, client: Client) -> Queue:
        return client.queue("jobs")

    def turn(self, source: Queue) -> None:
        jobs = source.claim(self.most, wait_ms=200)
        self.begun += [(job.seq, job.lease.token) for job in jobs]
        assert all(job.data == b"job %d" % job.seq for job in jobs)
        skipped = set(source.ack(jobs).skipped) if jobs else set()
        self.acked += [(job.seq, job.lease.token) for job in jobs if job.seq not in skipped]


def judge(workers: Sequence[QueueWorker]) -> int:
    """Check that every job was acked. Return the number of additional deliveries.

    Within one life of the shard no job may be acked twice.
    """
    acked = [entry for worker in workers for entry in worker.acked]
    begun = {entry for worker in workers for entry in worker.begun}
    assert {seq for seq, _ in acked} == set(range(1, JOBS + 1))
    by_life = Counter((seq, incarnation_of(token)) for seq, token in acked)
    assert max(by_life.values()) == 1, "two acks of one job in one life of its shard"
    return len(begun) - JOBS
