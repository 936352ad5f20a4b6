"""The archive's files: their state after a run dies at any change of the disk, and their division into
rows."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import numpy as np
import pyarrow.parquet as pq
import pytest

from ringlog.client.read.record_batches import RecordBatch, visible_record_batches
from ringlog.errors import CorruptData, NotReady
from ringlog.spark.errors import OptionError
from ringlog.spark.jobs.archive_files import (
    Archive,
    ArchivedFile,
    ArchivedRange,
    ArchiveManifest,
    archived_positions,
    check_same_log,
    directory_of,
    topic_of,
)
from ringlog.spark.jobs.archive_tasks import Assignment, _ParquetFiles
from ringlog.spark.options import source_options
from ringlog.testing.disk import SimulatedDisk
from ringlog.testing.faulty_disk import DiskFault, FaultyDisk, Halted
from tests.support.piece_samples import FULL, run_of

ROOT = "/arch"
DATA = {"a": b"rows of a" * 50, "b:1": b"rows of b" * 50}
STEPS_MAX = 200


def one_run(disk, number: int) -> ArchiveManifest:
    """Do what the job does: tasks write files, and the driver commits."""
    place = Archive(ROOT, disk).make()
    with place.lock():
        place.recover()
        place.sweep()
        files = []
        for topic, data in DATA.items():
            stream = place.create(topic, "2026-01-31", 1, number, f"run{number}")
            stream.write(data[:100])
            stream.write(memoryview(data)[100:])
            size, digest = stream.finish()
            files.append(
                ArchivedFile(stream.file, topic, 1, "2026-01-31", number, number, 1, size, 0, 0, digest)
            )
        bounds = tuple(ArchivedRange(topic, 1, number - 1, number) for topic in DATA)
        manifest = ArchiveManifest(1, "log", number, 7, bounds, tuple(files))
        place.commit(manifest)
    return manifest


def seen(disk) -> dict[str, bytes]:
    """Return the files that a reader of the directory sees: names without a leading underscore."""
    found = {}
    for topic in [name for name in disk.list_dir(ROOT) if not name.startswith("_")]:
        for day in disk.list_dir(f"{ROOT}/{topic}"):
            for name in disk.list_dir(f"{ROOT}/{topic}/{day}"):
                if not name.startswith("_"):
                    fd = disk.open_read(f"{ROOT}/{topic}/{day}/{name}")
                    found[f"{topic}/{day}/{name}"] = disk.read_at(fd, disk.size(fd), 0)
                    disk.close(fd)
    return found


def hidden_names(disk) -> list[str]:
    return [
        name
        for topic in disk.list_dir(ROOT)
        if topic.startswith("topic=")
        for day in disk.list_dir(f"{ROOT}/{topic}")
        for name in disk.list_dir(f"{ROOT}/{topic}/{day}")
        if name.startswith("_part")
    ]


def check(disk, least: int) -> int:
    """Recover, compare the files with the manifests, and return the number of committed runs."""
    place = Archive(ROOT, disk).make()
    with place.lock():
        place.recover()
        place.sweep()
    manifests = place.manifests()
    files = seen(disk)
    listed = [file for manifest in manifests for file in manifest.files]
    assert sorted(files) == sorted(file.file for file in listed), "what is seen is what is committed"
    assert all(files[file.file] == DATA[file.topic] for file in listed), "and it is whole"
    assert not hidden_names(disk)
    assert len(manifests) >= least
    return len(manifests)


@pytest.mark.parametrize("power", [None, 1, 2, 3])
def test_a_run_that_dies_at_any_disk_change_is_complete_or_absent(power):
    """The process is killed, or the power fails, before each change."""
    outcomes = set()
    for step in range(1, STEPS_MAX):
        inner = SimulatedDisk(ROOT.rpartition("/")[0] or "/")
        one_run(inner, 1)
        disk = FaultyDisk(inner, DiskFault("any", step, "halt"))
        try:
            one_run(disk, 2)
            is_done = True
        except Halted:
            is_done = False
        if power is None:
            inner.process_kill()
        else:
            inner.power_loss(power * 1_000 + step)
        outcomes.add(check(inner, 2 if is_done else 1))
        assert check(inner, 1) == check(inner, 1), "recovering again changes nothing"
        if is_done:
            break
    else:
        pytest.fail("the run never ended")
    assert outcomes == {1, 2}, "both ends were met"


def test_uncommitted_files_are_invisible_and_removed_by_the_next_run():
    disk = SimulatedDisk("/")
    one_run(disk, 1)
    before = seen(disk)
    stream = Archive(ROOT, disk).create("a", "2026-02-01", 1, 9, "dead")
    stream.write(b"never committed")
    stream.finish()
    assert seen(disk) == before
    assert Archive(ROOT, disk).sweep() == 1
    assert not hidden_names(disk)


def test_only_one_run_holds_the_archive_lock():
    disk = SimulatedDisk("/")
    place = Archive(ROOT, disk).make()
    with place.lock(), pytest.raises(NotReady), Archive(ROOT, disk).lock():
        pytest.fail("two runs at once")
    with place.lock():
        assert place.manifests() == []


@pytest.mark.parametrize("name", ["a", "b:7", "x.y-z_1", "ümlaut", "50%", "a=b/c"])
def test_topic_of_returns_the_topic_of_a_directory(name):
    directory = directory_of(name, "2026-01-31")
    assert directory.count("/") == 1
    assert topic_of(directory) == name


def test_an_archive_of_another_log_and_damaged_manifests_are_refused():
    disk = SimulatedDisk("/")
    one_run(disk, 1)
    place = Archive(ROOT, disk)
    with pytest.raises(OptionError, match="another data directory"):
        check_same_log(place.manifests(), "other", ROOT)
    check_same_log(place.manifests(), "log", ROOT)
    fd = disk.create(f"{ROOT}/_ringlog/manifest-000000000002.json")
    disk.write_at(fd, [json.dumps({"v": 1}).encode()], 0)
    disk.close(fd)
    with pytest.raises(CorruptData, match="manifest"):
        place.manifests()


def test_archived_positions_are_those_of_the_latest_epoch():
    """A topic that was created again starts at its first seq."""
    runs = [
        ArchiveManifest(1, "log", 1, 0, (ArchivedRange("t", 1, 0, 10), ArchivedRange("u", 1, 0, 5)), ()),
        ArchiveManifest(1, "log", 2, 0, (ArchivedRange("t", 4, 0, 3),), ()),
    ]
    assert archived_positions(runs) == {"t": (4, 3), "u": (1, 5)}


DAY = 86_400_000_000
NOON = int(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()) * 1_000_000


OPTIONS = source_options({"path": "/x", "subscribePattern": ".*", "includeHeaders": "true"}, streaming=False)


def pieces(first: int, stamps: list[int], visible: list[int] | None = None) -> list[RecordBatch]:
    """Return the records from seq `first` on, one in each frame, without the ones that are not `visible`."""
    run = run_of([([FULL], ())] * (first - 1 + len(stamps)), stamps=[0] * (first - 1) + stamps)
    hidden = [] if visible is None else sorted({*range(first, first + len(stamps))} - {*visible})
    return list(visible_record_batches(run, first - 1, 1 << 40, np.array(hidden, dtype=np.int64), "t"))


def test_a_file_ends_where_topic_epoch_or_day_changes(tmp_path):
    """Each file is readable and in order, and its name describes its contents."""
    place = Archive(str(tmp_path / "arch")).make()
    files = _ParquetFiles(place, Assignment("/x", place.directory, "r1", (), True, 1, 1, "zstd"), OPTIONS)
    given = [
        ("t", 1, pieces(1, [NOON, NOON + 1, NOON + DAY])),
        ("t", 1, []),
        ("t", 1, pieces(4, [NOON + DAY] * 6 + [NOON + 3 * DAY], [4, 10])),
        ("t", 3, pieces(1, [NOON + 3 * DAY])),
        ("t", 3, pieces(2, [NOON + 3 * DAY])),
        ("u", 1, pieces(7, [NOON])),
    ]
    done = [file for each in given for file in files.add(*each)] + files.finish()
    found = [(f.topic, f.epoch, f.dt, f.first_seq, f.last_seq, f.rows) for f in done]
    assert found == [
        ("t", 1, "2026-01-31", 1, 2, 2), ("t", 1, "2026-02-01", 3, 4, 2), ("t", 1, "2026-02-03", 10, 10, 1),
        ("t", 3, "2026-02-03", 1, 2, 2), ("u", 1, "2026-01-31", 7, 7, 1),
    ]  # fmt: skip
    place.commit(ArchiveManifest(1, "log", 1, 0, (), tuple(done)))
    for file in done:
        table = pq.read_table(f"{place.directory}/{file.file}", partitioning=None)
        assert table["seq"].to_pylist() == list(range(file.first_seq, file.last_seq + 1))
        assert "topic" not in table.column_names
        assert pq.read_metadata(f"{place.directory}/{file.file}").row_group(0).column(0).compression == "ZSTD"
