"""A data directory of an earlier version can be opened, read, written, compacted and verified.

tools/keep_data_dir.py made it with the last revision that wrote frames of version 1.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringlog
from ringlog.client.read.pages import Record
from ringlog.testing.real_engine import TestEngine, engine
from ringlog.verify.directory import verify_directory
from tests.support.checkpoints import checkpoint

KEPT = Path(__file__).parents[1] / "golden" / "v1" / "data.tar.xz"
RECORDS = 80
TIME_US = 1_700_000_000_000_000
SETTLE_S = 30.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return the directory of an engine that contains the archived data."""
    data = tmp_path / "engine" / "data"
    data.mkdir(mode=0o700, parents=True)
    data.parent.chmod(0o700)
    with tarfile.open(KEPT) as archive:
        archive.extractall(data, filter="data")
    for path in data.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return data.parent


@pytest.fixture
def running(kept: Path) -> Iterator[TestEngine]:
    settings: dict[str, Any] = {"wal.file_bytes": "1MiB", "storage.enabled": True, "delivery.schedulers": 1}
    with engine(directory=kept, **settings) as found:
        yield found


def all_of(client: ringlog.Client, topic: str) -> list[Record]:
    items = list(client.reader(topic))
    assert all(isinstance(item, Record) for item in items), "nothing is lost"
    return items  # type: ignore[return-value]


def check_events(records: list[Record]) -> None:
    """Check the records that the script wrote. In version 1 an empty key, tag or node meant None."""
    expected = [n for n in range(RECORDS) if n % 8 != 2]
    assert [(record.seq, record.data) for record in records] == [(n + 1, b"%d" % n) for n in expected]
    for n, record in zip(expected, records, strict=True):
        fields = (record.key, record.tag, record.node, dict(record.headers))
        if n % 4 < 2:
            assert fields == (None, None, None, {})
        elif n % 4 == 2:
            assert fields == (b"k%d" % n, "kept", None, {"h": b"%d" % n})
        else:
            assert fields == (b"all", "größe", "n", {"a": b"", "b": b"2"})
            times = (record.event_ts, record.not_before, record.priority)
            assert (record.meta, *times) == ({"n": n}, TIME_US + n, TIME_US, 3)


def test_archived_data_verifies_without_findings(kept: Path) -> None:
    assert verify_directory(str(kept / "data"), is_deep=True).findings == []


def test_archived_data_is_read_and_new_records_are_appended(
    running: TestEngine, client: ringlog.Client
) -> None:
    check_events(all_of(client, "events"))
    copied = [record for record in all_of(client, "copied") if record.tag != "gone"]
    numbers = [n for n in range(RECORDS // 2, RECORDS) if n % 8 != 2]
    assert [record.data for record in copied] == [b"%d" % n for n in numbers]
    assert len(all_of(client, "packed")) == RECORDS
    jobs = client.queue("jobs", node="other").claim(100)
    # Three are done. The lease of the fourth, for a day at most, has ended since the data was archived.
    assert [job.data for job in jobs] == [b"job %d" % n for n in range(3, 10)]
    assert [job.deliveries for job in jobs] == [2, *[1] * 6]
    assert client.group("events", "readers").stats().floor == RECORDS // 4
    client.append("events", b"", key=b"", tag="", node="")
    client.append("events", None)
    client.routers.settle("copies", SETTLE_S)
    checkpoint(running)
    for topic in ("events", "copied"):
        *old, empty, null = all_of(client, topic)
        assert (empty.data, empty.key, empty.tag, empty.node) == (b"", b"", "", "")
        assert (null.data, null.key, null.tag, null.node) == (None, None, None, None)
        if topic == "events":
            check_events(old)
    client.topics.delete_records("events", match="größe")
    assert {record.tag for record in all_of(client, "events")} == {None, "kept", ""}
    running.stop()
    assert verify_directory(running.data_dir, is_deep=True).findings == []
