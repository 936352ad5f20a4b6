"""Views without a JVM: pickled readers on a real engine, and the findings of an audit after damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from pyroaring import BitMap64
from pyspark.sql.types import LongType, StringType, StructField, StructType

import ringlog
from ringlog.envelope.messages import Extent
from ringlog.limits import WAL_HEADER_BYTES
from ringlog.spark import view_rows
from ringlog.spark.clients import client_of
from ringlog.spark.errors import SchemaError
from ringlog.spark.file_locations import (
    Roots,
    TopicLocations,
    _published,
    locate_topic,
    log_of,
    ranges_of,
    segments_of,
)
from ringlog.spark.options import source_options
from ringlog.spark.schema import arrow_schema
from ringlog.spark.views import ViewReader, view_reader, view_schema
from tests.support.checkpoints import checkpoint
from tests.support.spark_records import copied, rows_of, write

pytestmark = pytest.mark.slow
N, TAIL = 6_000, 70


@pytest.fixture(scope="module")
def topics(sealing_engine):
    """Two topics with N records in segments and TAIL in the log."""
    names = ("views.a", "views.b")
    with ringlog.connect(sealing_engine.url, wait=10) as client:
        for name in names:
            write(client, name, 1, N)
        checkpoint(sealing_engine)
        for name in names:
            write(client, name, N + 1, N + TAIL, frame=7)
    return names


@pytest.mark.parametrize("view", ["frames", "audit"])
def test_every_stored_record_is_in_a_frame(sealing_engine, topics, view):
    """There is one row for each frame, in segments and in the log. The seqs have no gap."""
    found = rows_of(sealing_engine, view, topics)
    for topic in topics:
        mine = sorted((row for row in found if row["topic"] == topic), key=lambda row: row["first_seq"])
        assert [row["first_seq"] for row in mine] == [1, *(row["last_seq"] + 1 for row in mine[:-1])]
        assert sum(row["records"] for row in mine) == mine[-1]["last_seq"] == N + TAIL
        assert {row["tier"] for row in mine} == {"hot", "log"}
        assert sum(row["records"] for row in mine if row["tier"] == "log") == TAIL
        assert all(row["bytes"] > 80 and row["epoch"] > 0 for row in mine)
    if view == "audit":
        assert {row["fault"] for row in found} == {None}
        assert {row["kind"] for row in found} == {"append"}
    else:
        assert all(row["ts_min"] <= row["ts_max"] for row in found)


def test_the_views_segments_topics_and_tags_agree_with_the_topics(sealing_engine, sealing_client, topics):
    by_topic = {row["topic"]: row for row in rows_of(sealing_engine, "topics", topics)}
    for topic in topics:
        segments = [row for row in rows_of(sealing_engine, "segments", [topic]) if row["topic"] == topic]
        assert sum(row["records"] for row in segments) == N == by_topic[topic]["sealed_seq"]
        assert max(row["tags"] for row in segments) == 10
        state = sealing_client.topics.state(topic)
        told = by_topic[topic]
        assert (told["head_seq"], told["records"], told["bytes"]) == (
            state.head_seq,
            state.count,
            state.bytes,
        )
        assert '"type":"log"' in told["config"]
    counted = rows_of(sealing_engine, "tags", topics[:1])
    expected = {f"t{k}": sum(1 for n in range(1, N + 1) if n % 7 and n % 10 == k) for k in range(10)}
    sums = dict.fromkeys(expected, 0)
    for row in counted:
        sums[row["tag"]] += row["records"]
    assert sums == expected


def test_a_view_accepts_a_part_of_its_schema_and_refuses_other_columns(sealing_engine, topics):
    """Columns may be in any order."""
    options = source_options(
        {"path": sealing_engine.data_dir, "view": "frames", "subscribe": topics[0]}, streaming=False
    )
    struct = StructType([StructField("records", LongType()), StructField("topic", StringType())])
    reader = ViewReader(options, struct)
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert batches[0].schema.names == ["records", "topic"]
    assert sum(sum(batch.column("records").to_pylist()) for batch in batches) == N + TAIL
    with pytest.raises(SchemaError, match="no such column"):
        ViewReader(options, StructType([StructField("payload", StringType())]))
    with pytest.raises(SchemaError, match="wrong column type"):
        ViewReader(options, StructType([StructField("topic", LongType())]))
    assert list(reader.read(None)) == []


def test_the_gaps_view_lists_records_that_a_cap_evicted(sealing_engine, sealing_client):
    """The gaps are within the requested bounds, and have a reason."""
    topic = "views.capped"
    sealing_client.topics.create(topic, cap_records=10, discard="old")
    write(sealing_client, topic, 1, 50, frame=5)
    earliest = sealing_client.topics.state(topic).earliest_seq
    assert earliest > 1
    found = rows_of(sealing_engine, "gaps", [topic], startingOffsets=f'{{"{topic}": 1}}')
    assert [(row["gap_from"], row["gap_to"], row["reason"]) for row in found] == [(1, earliest - 1, "cap")]
    assert found[0]["missed_estimate"] == earliest - 1
    assert rows_of(sealing_engine, "gaps", [topic]) == [], "earliest is no gap"


def test_files_that_moved_after_planning_are_located_again(sealing_engine, sealing_client):
    """Planned files may be deleted before a task reads them. No record is missing from its rows."""
    topic = "views.moved"
    write(sealing_client, topic, 1, 900)
    reader = view_reader(sealing_engine.data_dir, "audit", [topic])
    parts = copied(reader.partitions())
    assert {place.path for part in parts for place in part.logs}
    checkpoint(sealing_engine)  # the log's records are in a segment now
    write(sealing_client, topic, 901, 1_000)
    checkpoint(sealing_engine)
    left = [Path(sealing_engine.data_dir, place.path) for part in parts for place in part.logs]
    rows = [
        row
        for part in parts
        for batch in reader.read(part)
        for row in pa.Table.from_batches([batch]).to_pylist()
    ]
    mine = {n for row in rows if row["topic"] == topic for n in range(row["first_seq"], row["last_seq"] + 1)}
    assert mine >= set(range(1, 901))
    assert not any(path.exists() for path in left), "the files are gone, or this tests nothing"
    assert {row["fault"] for row in rows} == {None}


# -- damage -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged_place(sealing_engine, topics, tmp_path_factory):
    """A copy of the topics' segment that a test may damage: (roots, place, client, stem)."""
    client = client_of(sealing_engine.data_dir)
    place = segments_of([locate_topic(client, topic) for topic in topics])[0]
    root = tmp_path_factory.mktemp("damage")
    source = Path(sealing_engine.data_dir, place.stem)
    (root / place.stem).parent.mkdir(parents=True)
    for part in source.parent.glob(source.name + ".*"):
        shutil.copy(part, root / (place.stem + part.suffix))
    roots = view_rows_roots(client, str(root))
    return roots, place, client, root / place.stem


def view_rows_roots(client, data_dir):
    return Roots(data_dir, client.connection.shm_dir, "", "")


def faults_of(roots, place, client):
    """Return (fault, file suffix, first_seq) of each finding of an audit."""
    found = []
    for columns in view_rows.audit_segment(roots, place, client):
        batch = view_rows.record_batch(columns, arrow_schema(view_schema("audit")))
        found += [
            (row["fault"], row["file"].rpartition(".")[2], row["first_seq"])
            for row in batch.to_pylist()
            if row["fault"] is not None
        ]
    return found


@pytest.mark.parametrize(
    ("part", "place_in_frame", "expected"),
    [
        ("data", 16, ("header does not match its seal", "data")),  # base_seq
        ("data", 80, ("body does not match its checksum", "data")),
        ("data", 0, ("header does not match its seal", "data")),  # its length
    ],
)
def test_one_damaged_frame_is_reported_and_hides_no_other(damaged_place, part, place_in_frame, expected):
    """Every other frame is still checked, although the length in the damaged frame is not reliable."""
    roots, place, client, stem = damaged_place
    assert faults_of(roots, place, client) == []
    frames = list(view_rows.sealed_frame_rows(roots, place))
    first, offset = int(frames[0]["first_seq"][1]), int(frames[0]["offset"][1])
    path = stem.with_name(stem.name + "." + part)
    whole = path.read_bytes()
    try:
        hurt = bytearray(whole)
        hurt[offset + place_in_frame] ^= 0x10
        path.write_bytes(hurt)
        assert faults_of(roots, place, client) == [(*expected, first)]
        path.write_bytes(whole[: offset + 100])
        short = faults_of(roots, place, client)
        assert {fault for fault, _, _ in short} == {"file ends before the frame does"}
        assert len(short) == sum(len(each["first_seq"]) for each in frames) - 1
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(("suffix", "at"), [("idx", 200), ("tags", 120), ("tags", -3)])
def test_damage_of_index_and_tags_is_reported(damaged_place, suffix, at):
    roots, place, client, stem = damaged_place
    path = stem.with_name(f"{stem.name}.{suffix}")
    whole = path.read_bytes()
    try:
        hurt = bytearray(whole)
        hurt[at] ^= 1
        path.write_bytes(hurt)
        found = faults_of(roots, place, client)
        assert {file for _, file, _ in found} == {suffix}
        assert all("checksum mismatch" in fault or "inconsistent" in fault for fault, _, _ in found)
    finally:
        path.write_bytes(whole)


def test_a_damaged_log_is_reported_from_the_damage_on(sealing_engine, sealing_client, tmp_path):
    """Bytes after a frame of invalid length cannot be read, so one fault covers the rest."""
    client = client_of(sealing_engine.data_dir)
    write(sealing_client, "views.log", 1, 60, frame=10)
    place = log_of([locate_topic(client, "views.log")])[-1]
    path = tmp_path / place.path
    path.parent.mkdir(parents=True)
    whole = Path(sealing_engine.data_dir, place.path).read_bytes()
    path.write_bytes(whole)
    roots = view_rows_roots(client, str(tmp_path))

    def audited():
        schema = arrow_schema(view_schema("audit"))
        return [
            row
            for columns in view_rows.audit_log(roots, place)
            for row in view_rows.record_batch(columns, schema).to_pylist()
        ]

    sound = audited()
    assert place.start >= WAL_HEADER_BYTES
    assert {row["fault"] for row in sound} == {None}
    second = sound[1]["offset"]
    hurt = bytearray(whole)
    hurt[second + 100] ^= 1
    path.write_bytes(hurt)
    assert [(row["fault"], row["offset"]) for row in audited() if row["fault"]] == [
        ("body does not match its checksum", second)
    ]
    hurt[second : second + 4] = b"\x05\0\0\0"
    path.write_bytes(hurt)
    found = audited()
    assert [row["fault"] is None for row in found] == [True, False]
    assert (found[1]["offset"], found[1]["offset"] + found[1]["bytes"]) == (second, place.stop)


# -- accounting of gaps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], []),
        ([5], [(5, 5)]),
        ([1, 2, 3, 7, 9, 10], [(1, 3), (7, 7), (9, 10)]),
        (range(100, 5_000), [(100, 4_999)]),
        ([(1 << 62) - 1, 1 << 62], [((1 << 62) - 1, 1 << 62)]),
    ],
)
def test_ranges_of_returns_the_runs_of_a_bitmap(numbers, expected):
    assert ranges_of(BitMap64(numbers)) == expected


def test_a_gap_is_explained_only_by_floors_deletes_and_losses():
    deleted = BitMap64([30, 31, 32, 40]).serialize()
    places = TopicLocations("t", 1, 1, 10, 60, ((50, 52),), deleted, ())
    assert places.unaccounted_ranges(1, 9) == []
    assert places.unaccounted_ranges(1, 12) == [(10, 12)]
    assert places.unaccounted_ranges(29, 41) == [(29, 29), (33, 39), (41, 41)]
    assert places.unaccounted_ranges(49, 53) == [(49, 49), (53, 53)]
    assert places.unaccounted_ranges(60, 70) == [(60, 60)], "beyond the head there is nothing yet"


def test_an_open_extent_ends_at_the_published_mark():
    extent = Extent("wal/x", 7, 1, 100, 0)
    assert _published(extent, (7, 500), (0, 0)).stop == 500
    assert _published(extent, (7, 100), (0, 0)) is None
    assert _published(extent, (6, 500), (0, 0)) is None, "not begun yet, as far as readers may know"
    assert _published(Extent("wal/x", 7, 1, 100, 300), (8, 20), (0, 0)).stop == 300
    assert _published(Extent("@v", 7, 1, 100, 0), (7, 500), (7, 200)).stop == 200
