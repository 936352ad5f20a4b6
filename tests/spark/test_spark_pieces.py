"""Pieces as a Python task describes them: positions in pinned files, and the bytes of records in no file."""

from __future__ import annotations

import os

import numpy as np
import pytest
import xxhash

from ringlog.frame import layout
from ringlog.spark.jvm_frames import PINNED_FILES, SCHEMA, PinnedFiles
from ringlog.spark.schema import arrow_schema
from ringlog.spark.source import PIECES_OF, RinglogDataSource
from ringlog.storage.real_disk import RealDisk
from tests.support.checkpoints import checkpoint
from tests.support.spark_records import copied, write

pytestmark = [pytest.mark.timeout(120)]


def pieces(running, topic, **options):
    """Return the rows of all partitions as dictionaries, and check what Spark checks."""
    given = {"path": running.data_dir, "subscribe": topic, PIECES_OF: "", **options}
    reader = copied(RinglogDataSource(given).reader(SCHEMA))
    batches = [batch for part in reader.partitions() for batch in reader.read(copied(part))]
    assert all(batch.schema.equals(arrow_schema(SCHEMA)) for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


def bodies(row):
    """Yield (header words, body) of each frame of a piece, from the pinned file or from its bytes."""
    frames = np.frombuffer(row["frames"], np.uint64).reshape(-1, 11)
    if row["held"] is None:
        source = row["data"]
    else:
        with open(row["held"], "rb") as file:
            source = file.read()
    for offset, *words in frames.tolist():
        length = (words[layout.W_HEAD] & layout.LEN_MASK) + layout.LEN_FIELD_BYTES
        yield words, source[offset + 80 : offset + length]


@pytest.mark.slow
def test_records_in_segments_are_referenced_and_others_are_sent(sealing_engine, sealing_client, topic):
    """Every frame is at the given position and matches the checksum in its header."""
    write(sealing_client, topic, 1, 3_000)
    checkpoint(sealing_engine)
    write(sealing_client, topic, 3_001, 3_100, frame=30)
    found = pieces(sealing_engine, topic)
    counts = 0
    for row in found:
        is_sealed = row["last_seq"] <= 3_000
        assert (row["file"] is None, row["data"] is None) == (not is_sealed, is_sealed)
        for words, body in bodies(row):
            assert xxhash.xxh3_64_intdigest(body) == words[layout.W_BODY_XXH3]
            counts += words[layout.W_COUNT_EPOCH] & 0xFFFFFFFF
    assert counts == 3_100
    assert (found[0]["first_seq"], found[-1]["last_seq"]) == (1, 3_100)


@pytest.mark.slow
def test_pieces_contain_the_bounds_and_the_hidden_seqs(sealing_engine, sealing_client, topic):
    write(sealing_client, topic, 1, 2_000)
    checkpoint(sealing_engine)
    sealing_client.topics.delete_records(topic, match="t5")
    bounds = {
        "startingOffsets": f'{{"{topic}": 500}}',
        "endingOffsets": f'{{"{topic}": 900}}',
    }
    found = pieces(sealing_engine, topic, **bounds)
    hidden = [n for row in found for n in np.frombuffer(row["hidden"], np.int64).tolist()]
    assert (found[0]["first_seq"], found[-1]["last_seq"]) == (500, 899)
    assert hidden == [n for n in range(500, 900) if n % 10 == 5 and n % 7]


def test_a_pinned_file_is_readable_after_its_removal(tmp_path):
    path = tmp_path / "seg.data"
    path.write_bytes(b"sealed")
    held = PinnedFiles(RealDisk(), most=2)
    try:
        place = held.pin(str(path))
        assert held.pin(str(path)) == place, "one descriptor a file"
        path.unlink()
        with open(place, "rb") as file:
            assert file.read() == b"sealed"
        assert held.pin(str(tmp_path / "other")) is None
    finally:
        held.close()
    assert not os.path.exists(place)


def test_the_number_of_pinned_files_is_bounded(tmp_path):
    held = PinnedFiles(RealDisk(), most=2)
    try:
        places = []
        for name in "abc":
            (tmp_path / name).write_bytes(name.encode())
            places.append(held.pin(str(tmp_path / name)))
        links = {os.path.basename(os.readlink(each)) for each in places if os.path.exists(each)}
        assert links == {"b", "c"}
    finally:
        held.close()


@pytest.mark.slow
def test_the_next_task_releases_the_pinned_files_of_the_last_one(
    sealing_engine, sealing_client, ringlog_topic
):
    topic = ringlog_topic()
    write(sealing_client, topic, 1, 1_000)
    checkpoint(sealing_engine)
    (row,) = pieces(sealing_engine, topic)
    assert row["file"] in PINNED_FILES
    other = ringlog_topic("other")
    write(sealing_client, other, 1, 10)
    pieces(sealing_engine, other)
    assert row["file"] not in PINNED_FILES


@pytest.fixture(autouse=True)
def nothing_stays_open():
    yield
    PINNED_FILES.close()


@pytest.mark.slow
def test_python_verifies_bodies_only_for_quarantine(sealing_engine, sealing_client, topic, monkeypatch):
    """The JVM verifies all bodies, so Python does not. Only onCorrupt=quarantine needs the result in
    Python."""
    looked = []
    monkeypatch.setattr("ringlog.storage.reader.frames.first_bad_body", lambda *_: looked.append(1))
    write(sealing_client, topic, 1, 1_000)
    pieces(sealing_engine, topic)
    assert not looked
    pieces(sealing_engine, topic, onCorrupt="quarantine")
    assert looked
