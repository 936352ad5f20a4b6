"""A segment returns the records that were written, and its index answers like the records themselves."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from ringlog.segment.index_rebuild import rebuild_index, verify_segment
from ringlog.segment.layout import IDX, TAGS
from ringlog.segment.segment import Segment, check_data, find_segments
from ringlog.storage.real_disk import RealDisk
from ringlog.tags import TagMatch, parse_match
from ringlog.testing.disk import SimulatedDisk
from ringlog.verify import segment_decoder, segment_verifier
from ringlog.verify.frame_decoder import decode_frame
from ringlog.verify.segment_columns import expected_columns, read_columns
from tests.support.segment_samples import (
    NUMBER,
    STAMP,
    SampleTopic,
    read_file,
    records_in,
    sample_topics,
    stored_frames,
    write,
)

pytestmark = pytest.mark.slow

DATA_DIR = "/data"


def accounted(record: dict) -> int:
    return len(record["payload"] or b"") + len(record["metas"] or b"")


def blanked(record: dict) -> dict:
    """Return a dead record that was kept as an empty one."""
    empty = dict.fromkeys(("metas", "event_ts", "expires_at", "not_before"))
    values = {"payload": b"", "keys": b"", "tags": "", "nodes": ""}
    empty |= {name: None if record[name] is None else value for name, value in values.items()}
    return record | empty | {"headers": [], "priorities": 0}


def stored_model(disk, stem: str, topics: list[SampleTopic]) -> dict[int, dict[int, dict]]:
    """Return {topic_id: {seq: record}} of the stored records, and assert that they match the samples."""
    found: dict[int, dict[int, dict]] = {}
    for _, view in stored_frames(disk, DATA_DIR, stem):
        assert (view.producer_id, view.producer_seq) == (0, 0)
        found.setdefault(view.topic_id, {}).update(records_in(view))
    for topic in topics:
        alive = set(topic.alive())
        stored = found.get(topic.topic_id, {})
        assert alive <= set(stored)
        for seq, record in stored.items():
            expected = topic.records[seq] if seq in alive else blanked(topic.records[seq])
            assert record == expected
    return found


@given(sample_topics(), st.sampled_from([1, 3, 1 << 30]), st.sampled_from(["none", "lz4", "zstd"]))
@settings(max_examples=150)
def test_live_records_are_returned_and_the_index_agrees_with_them(topics, at_once, compression) -> None:
    """Positions, sizes, stamps, expiry, tags and deletion marks come from the index alone (S2, S5, S6)."""
    disk = SimulatedDisk(DATA_DIR)
    ref = write(disk, DATA_DIR, topics, at_once, compression=compression, compression_min_bytes=64)
    living = [topic for topic in topics if topic.alive()]
    if not living:
        assert ref is None
        assert find_segments(disk, DATA_DIR) == []
        return
    assert (ref.number, ref.topics) == (NUMBER, len(living))
    assert find_segments(disk, DATA_DIR) == [ref.stem]
    model = stored_model(disk, ref.stem, living)
    segment = Segment.open(disk, DATA_DIR, ref.stem)
    check_data(disk, DATA_DIR, segment)
    assert segment.ref == ref
    assert segment.topics["topic_id"].tolist() == sorted(model)
    for topic in topics:
        check_topic(segment, topic, model.get(topic.topic_id, {}))
    segment.close()
    check_rebuilt(disk, ref.stem)


def check_topic(segment: Segment, topic: SampleTopic, stored: dict[int, dict]) -> None:
    row = segment.row(topic.topic_id)
    if not stored:
        assert row is None
        return
    assert row is not None
    seqs = sorted(stored)
    facts = segment.topics[row]
    assert (facts["first_seq"], facts["last_seq"], facts["records"]) == (seqs[0], seqs[-1], len(seqs))
    assert facts["bytes"] == sum(map(accounted, stored.values()))
    assert facts["epoch"] == topic.epoch
    assert set(segment.deleted(row)) == set(seqs) - set(topic.alive())
    for first, last in ((seqs[0], seqs[-1]), (0, 1 << 50), (seqs[len(seqs) // 2], seqs[-1]), (seqs[0],) * 2):
        within = [seq for seq in seqs if first <= seq <= last]
        found, sizes, stamps = segment.positions(row, first, last)
        assert found.tolist() == within
        assert sizes.tolist() == [accounted(stored[seq]) for seq in within]
        assert stamps.tolist() == [stored[seq]["ts"] for seq in within]
    for ts in {STAMP - 1, stored[seqs[-1]]["ts"], stored[seqs[len(seqs) // 2]]["ts"] + 1}:
        assert segment.seek_time(row, ts) == next((seq for seq in seqs if stored[seq]["ts"] >= ts), None)
    for now in (0, 5, 59, 1 << 62):
        due = [seq for seq in seqs if stored[seq]["expires_at"] and stored[seq]["expires_at"] <= now]
        assert segment.expired(row, now).tolist() == due
    for tag in ("a", "ab", "b", "größe", "", "nope"):
        exact = [seq for seq in seqs if tag and stored[seq]["tags"] == tag]
        assert segment.tagged(topic.topic_id, TagMatch(tag.encode())).tolist() == exact
        begins = [seq for seq in seqs if (stored[seq]["tags"] or "\0").startswith(tag)]
        begins = [seq for seq in begins if stored[seq]["tags"]]
        assert segment.tagged(topic.topic_id, TagMatch(tag.encode(), is_prefix=True)).tolist() == begins
    for pattern in ("#", "+", "a/#", "größe"):
        match = parse_match(["tag", "Levels", pattern])
        chosen = [seq for seq in seqs if match.test((stored[seq]["tags"] or "").encode())]
        assert segment.tagged(topic.topic_id, match).tolist() == chosen
    for seq in (seqs[0] - 1, seqs[-1], seqs[-1] + 1, seqs[len(seqs) // 2]):
        place = segment.frame_at(row, seq)
        holder = next((s for s in seqs if s >= seq), None)
        assert (place is None) == (holder is None)
        if place is not None:
            entry = segment.entries[place[1]]
            assert entry["offset"] == place[0]
            assert entry["base_seq"] <= holder < entry["base_seq"] + entry["count"]


def check_rebuilt(disk: SimulatedDisk, stem: str) -> None:
    """Check that a rebuilt index has the same bytes (S2), and that verification finds nothing."""
    assert verify_segment(disk, DATA_DIR, stem) == []
    parts = {suffix: f"{DATA_DIR}/{stem}{suffix}" for suffix in (IDX, TAGS)}
    before = {suffix: read_file(disk, path) for suffix, path in parts.items() if disk.exists(path)}
    for path in parts.values():
        if disk.exists(path):
            disk.unlink(path)
    rebuild_index(disk, DATA_DIR, stem).close()
    assert {suffix: read_file(disk, path) for suffix, path in parts.items() if disk.exists(path)} == before
    assert verify_segment(disk, DATA_DIR, stem) == []


@given(sample_topics())
@settings(max_examples=40)
def test_the_verifier_reads_every_segment_like_the_engine(topics) -> None:
    """The verifier's decoder is written from the format page. It finds no fault, and the same seqs and
    deletion marks."""
    with tempfile.TemporaryDirectory() as root:
        disk = RealDisk()
        ref = write(disk, root, topics)
        if ref is None:
            return
        report = segment_verifier.verify_segment(root, ref.stem, is_deep=True)
        assert report.findings == []
        segment = Segment.open(disk, root, ref.stem)
        for topic in topics:
            row = segment.row(topic.topic_id)
            if row is None:
                continue
            key = (topic.topic_id, topic.epoch)
            seqs = segment.positions(row, 0, 1 << 62)[0].tolist()
            assert [seq for a, b in report.stored[key] for seq in range(a, b + 1)] == seqs
            marked = [seq for a, b in report.marked.get(key, []) for seq in range(a, b + 1)]
            assert marked == sorted(segment.deleted(row))
        segment.close()
        columns_agree(Path(root), ref.stem)


def columns_agree(root: Path, stem: str) -> None:
    """Check that the verifier's columns of each record equal those of the engine and of the data."""
    disk = RealDisk()
    segment = Segment.open(disk, str(root), stem)
    data = (root / f"{stem}{IDX}").read_bytes()
    frames = (root / f"{stem}.data").read_bytes()
    index = segment_decoder.read_index(data)
    for row, facts in enumerate(index.topics):
        sizes: list[int] = []
        stamps: list[int] = []
        for entry in index.entries[facts.entry_start : facts.entry_stop]:
            columns = read_columns(data, entry)
            assert columns == expected_columns(decode_frame(frames, entry.offset))
            sizes += columns.sizes
            stamps += columns.stamps
        _, found_sizes, found_stamps = segment.positions(row, 0, 1 << 62)
        assert (found_sizes.tolist(), found_stamps.tolist()) == (sizes, stamps)
    segment.close()


@given(sample_topics(), st.data())
@settings(max_examples=60)
def test_a_rewritten_segment_has_the_same_live_records(topics, data) -> None:
    """A rewrite keeps the live records, each with its commit stamp (S5)."""
    disk = SimulatedDisk(DATA_DIR)
    ref = write(disk, DATA_DIR, topics)
    if ref is None:
        return
    rewritten = []
    for topic in topics:
        frames = [
            view for _, view in stored_frames(disk, DATA_DIR, ref.stem) if view.topic_id == topic.topic_id
        ]
        whole = read_file(disk, f"{DATA_DIR}/{ref.stem}.data")
        again = SampleTopic(
            topic.topic_id, topic.epoch, records=topic.records, earliest_seq=topic.earliest_seq
        )
        again.frames = [whole[view.offset : view.offset + view.total_bytes] for view in frames]
        more = data.draw(st.sets(st.sampled_from(sorted(topic.records)), max_size=5))
        again.dead = topic.dead | more
        rewritten.append(again)
    second = write(disk, DATA_DIR, [t for t in rewritten if t.frames], number=NUMBER + 1)
    alive = {t.topic_id: set(t.alive()) for t in rewritten}
    if second is None:
        assert not any(alive.values())
        return
    stored_model(disk, second.stem, [t for t in rewritten if alive[t.topic_id]])
    assert verify_segment(disk, DATA_DIR, second.stem) == []


@given(sample_topics(), st.data())
@settings(max_examples=60)
def test_deletion_marks_read_back_as_written(topics, data) -> None:
    """This handle and the next one read the marks back. A repeated mark counts once."""
    disk = SimulatedDisk(DATA_DIR)
    ref = write(disk, DATA_DIR, topics)
    if ref is None:
        return
    segment = Segment.open(disk, DATA_DIR, ref.stem)
    for topic in topics:
        row = segment.row(topic.topic_id)
        if row is None:
            continue
        stored = set(segment.positions(row, 0, 1 << 62)[0].tolist())
        before = set(segment.deleted(row))
        wanted = data.draw(st.sets(st.sampled_from(sorted(topic.records)))) | {3, 1 << 55}
        assert segment.mark_deleted(row, BitMap64(wanted)) == len((wanted & stored) - before)
        assert segment.mark_deleted(row, BitMap64(wanted)) == 0
        assert set(segment.deleted(row)) == before | (wanted & stored)
    segment.sync_marks()
    segment.close()
    disk.power_loss(1)
    assert verify_segment(disk, DATA_DIR, ref.stem) == []
    again = Segment.open(disk, DATA_DIR, ref.stem)
    assert again.bad_marks == 0
    assert np.array_equal(again.topics, segment.topics)
    again.close()
