"""Write a data directory of this revision to an archive, for compatibility tests of later revisions.

    git worktree add build/before REVISION
    cp tools/keep_data_dir.py build/before/tools/   # if it does not exist there yet; build the kernel there
    cd build/before && PYTHONPATH=. python tools/keep_data_dir.py ../../tests/golden/v1/data.tar.xz

It contains log, segments, snapshots, deleted records, a queue with leases in the log, a group, and copies of
a router. tests/actors/test_data_dir_of_before.py checks this content.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import ringlog
from ringlog.client.write.fields import NewRecord, RecordFields
from ringlog.envelope.messages import CheckpointMade, CheckpointNow
from ringlog.errors import NotReady
from ringlog.link.address import read_engine_file
from ringlog.link.shard_requests import Requester
from ringlog.testing.real_engine import TestEngine, engine, wait_until

WAIT_S = 60.0
RECORDS = 40
"""Number of records of the topic in a segment, and of those after them in the log."""
TIME_US = 1_700_000_000_000_000


def main(path: str) -> None:
    """Write the archive to `path`."""
    with tempfile.TemporaryDirectory(prefix="ringlog-kept-") as root:
        settings: dict[str, Any] = {
            "wal.shards": 1,
            "wal.file_bytes": "1MiB",
            "storage.enabled": True,
            "delivery.schedulers": 1,
        }
        with (
            engine(directory=root, **settings) as running,
            ringlog.connect(running.url, wait=WAIT_S) as client,
        ):
            _write(client, 0)
            client.routers.create("copies", "events", "copied")
            _queue(client)
            _checkpoint(running)
            _write(client, RECORDS)
            client.topics.delete_records("events", match="gone")
            client.routers.settle("copies", WAIT_S)
        with tarfile.open(path, "w:xz") as archive:
            for each in ("meta", "wal", "topics", "packs"):
                if (Path(root) / "data" / each).exists():
                    archive.add(Path(root) / "data" / each, each, filter=_anonymous)


def _write(client: ringlog.Client, first: int) -> None:
    """Write records with all, no and empty fields; single and batched; compressed and not."""
    client.topics.create("events", durability="fsync", exist_ok=True)
    client.topics.create("packed", durability="fsync", compression="zstd", exist_ok=True)
    for n in range(first, first + RECORDS):
        client.append("events", b"%d" % n, **_fields(n))
    client.append_many("packed", [NewRecord(data=b"packed %d " % n * 20, tag="t") for n in range(RECORDS)])


def _fields(n: int) -> RecordFields:
    match n % 4:
        case 0:
            return {}
        case 1:
            return {"key": b"", "tag": "", "node": ""}
        case 2:
            return {"key": b"k%d" % n, "tag": "gone" if n % 8 == 2 else "kept", "headers": {"h": b"%d" % n}}
    return {
        "key": b"all", "tag": "größe", "node": "n", "meta": {"n": n}, "headers": {"a": b"", "b": b"2"},
        "event_ts": TIME_US + n, "not_before": TIME_US, "priority": 3,
    }  # fmt: skip


def _queue(client: ringlog.Client) -> None:
    """Write jobs, some of them done and one leased; and a group in the middle of its topic."""
    client.topics.create("jobs", type="queue", leases_durable=True, exist_ok=True)
    queue = client.queue("jobs", node="worker", release_on_exit=False)
    queue.put_many([b"job %d" % n for n in range(10)])
    queue.ack(queue.claim(3))
    queue.claim(1, lease_ms=86_400_000)
    group = client.group("events", "readers")
    group.seek(RECORDS // 2)


def _checkpoint(running: TestEngine) -> None:
    """Turn all records that are written so far into segments."""
    found = read_engine_file(running.run_dir)
    assert found is not None, "the engine runs"
    requester = Requester("compactor", f"ipc://{found.shm_dir}/compactor.sock")

    def is_made() -> bool:
        try:
            requester.ask(CheckpointNow(), CheckpointMade, timeout_s=WAIT_S)
        except NotReady:
            return False
        return True

    try:
        wait_until(is_made, WAIT_S, "the compactor makes a checkpoint")
    finally:
        requester.close()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(sys.argv[1])
