"""Data directories that a real engine left, with a crash in their history. Tests damage copies of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ringlog
from ringlog.testing.real_engine import engine
from tests.support.checkpoints import checkpoint
from tests.support.sealed_topics import SEALED, SEALED_RECORDS, fill

RECORDS = 3_000


@pytest.fixture(scope="session")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a` has 3,001 records in many frames, `b` was deleted, `c` is empty; two shards."""
    kept = tmp_path_factory.mktemp("left") / "data"
    with engine(wal={"shards": 2}, storage={"enabled": False}) as running:
        with ringlog.connect(running.url, wait=10) as client:
            client.topics.create("a", durability="fsync")
            client.topics.create("b")
            with client.producer("a", linger_ms=0) as out:
                for start in range(0, RECORDS, 10):
                    payloads = [b"record %d" % i for i in range(start, start + 10)]
                    out.send_many(payloads).result(10)
            client.append("b", b"one")
        running.crash()
        running.start()
        with ringlog.connect(running.url, wait=10) as client:
            client.append("a", b"after the crash")
            client.topics.create("c")
            client.topics.delete("b")
        running.stop()
        shutil.copytree(running.data_dir, kept)
    return kept


@pytest.fixture
def copy(left_behind: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    target = tmp_path / "copy"
    shutil.copytree(left_behind, target)
    return target


@pytest.fixture(scope="session")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a` has its own segment, `b` and `c` share one. Records of `a` with one tag are deleted, and some log
    is left."""
    kept = tmp_path_factory.mktemp("sealed") / "data"
    with engine(wal={"shards": 1}, storage=SEALED) as running:
        with ringlog.connect(running.url, wait=10) as client:
            fill(client, "a", SEALED_RECORDS)
            fill(client, "b", 100)
            fill(client, "c", 100)
            checkpoint(running)
            client.topics.delete_records("a", match="t3")
            fill(client, "c", 50)
            checkpoint(running)
            fill(client, "a", 10)
        running.stop()
        shutil.copytree(running.data_dir, kept)
    return kept
