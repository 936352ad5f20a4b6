"""Sample topics for segments: frames of any shape, and the plain records that a segment must return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from pyroaring import BitMap64

from ringlog.frame import encode_records, frame, open_frame
from ringlog.frame import layout as frame_layout
from ringlog.frame.batch import FrameBatch, scan
from ringlog.segment.layout import CREATOR_COMPACTOR, CREATOR_SHIFT, DATA
from ringlog.segment.segment import read_data_header
from ringlog.segment.writer import SegmentWriter
from ringlog.types import Codec, Durability, PayloadKind

NUMBER = CREATOR_COMPACTOR << CREATOR_SHIFT | 7
SALT = 0x5EED_5EED_5EED_5EED
ENGINE = bytes(range(16))
STAMP = 1_700_000_000_000_000
OPTIONAL = ("keys", "tags", "nodes", "headers", "metas", "event_ts", "expires_at", "not_before", "priorities")
NULLABLE = ("keys", "tags", "nodes")
ABSENT = {"headers": [], "priorities": 0}


@dataclass(slots=True)
class SampleTopic:
    """Frames of one topic as a shard logs them, and the seqs of its dead records."""

    topic_id: int
    epoch: int
    frames: list[bytes] = field(default_factory=list)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Seq to record: every column, `ts` and `flags`."""
    earliest_seq: int = 1
    dead: set[int] = field(default_factory=set)

    def add(
        self, seq: int, ts: int, columns: dict[str, list], *, codec: Codec = Codec.NONE,
        durability: Durability = Durability.DISK, kind: PayloadKind = PayloadKind.BYTES,
        is_first: bool = False,
    ) -> int:  # fmt: skip
        """Add a frame and return the seq after it.

        With `is_first` the frame has format version 1, in which nulls are empty values.
        """
        if is_first:
            empty = {"payloads": b"", "keys": b"", "tags": "", "nodes": ""}
            columns = columns | {
                name: [empty[name] if value is None else value for value in columns[name]]
                for name in columns.keys() & empty.keys()
            }
        given = {name: values for name, values in columns.items() if name != "payloads"}
        whole = frame(
            encode_records(columns["payloads"], **given), topic_id=self.topic_id, epoch=self.epoch,
            producer_id=9, producer_seq=len(self.frames) + 1, durability=durability, payload_kind=kind,
            codec=codec,
        )  # fmt: skip
        words = np.frombuffer(whole, dtype="<u8")
        if is_first:
            whole[frame_layout.VERSION_SHIFT // 8] = frame_layout.VERSION_FIRST
        words[frame_layout.W_BASE_SEQ], words[frame_layout.W_COMMIT_TS] = seq, ts
        self.frames.append(bytes(whole))
        for i, payload in enumerate(columns["payloads"]):
            record = {"payload": payload, "ts": ts, "flags": (durability, kind)}
            for name in OPTIONAL:
                value = given[name][i] if name in given else None
                is_value = bool(value) or (name in NULLABLE and value is not None and not is_first)
                record[name] = value if is_value else ABSENT.get(name)
            if "event_ts" in given:
                record["event_ts"] = given["event_ts"][i]
            self.records[seq + i] = record
        return seq + len(columns["payloads"])

    def runs(self, at_once: int = 1 << 30) -> list[tuple[bytes, FrameBatch]]:
        """Return the frames as a compactor reads them, at most `at_once` frames in a buffer."""
        parts = [self.frames[at : at + at_once] for at in range(0, len(self.frames), at_once)]
        return [(whole, scan(whole)) for whole in map(b"".join, parts)]

    def alive(self) -> list[int]:
        """Return the seqs of live records."""
        return [seq for seq in sorted(self.records) if seq >= self.earliest_seq and seq not in self.dead]


_bytes = st.binary(max_size=20)
_text = st.text(max_size=6)
_tag = st.sampled_from(["", "a", "ab", "abc", "b", "a/b", "b/a/c", "größe", "日本"])
_time = st.integers(0, 1 << 62)
_VALUES = {
    "keys": st.none() | _bytes,
    "tags": st.none() | _tag,
    "nodes": st.none() | _text,
    "headers": st.none() | st.lists(st.tuples(_text, _bytes), max_size=3),
    "metas": st.none() | st.sampled_from([b"{}", b'{"a":"b"}']),
    "event_ts": st.none() | st.integers(-(1 << 62), 1 << 62),
    "expires_at": st.none() | st.integers(1, 60),
    "not_before": st.none() | _time,
    "priorities": st.integers(0, 255),
}


@st.composite
def columns_of(draw: st.DrawFn) -> dict[str, list]:
    """Draw arguments of encode_records for one to five records."""
    count = draw(st.sampled_from([1, 1, 1, 2, 5]))
    names = draw(st.sets(st.sampled_from(OPTIONAL), max_size=4))
    given = {name: draw(st.lists(_VALUES[name], min_size=count, max_size=count)) for name in sorted(names)}
    payload = st.one_of(_bytes, _bytes, st.none())
    return {"payloads": draw(st.lists(payload, min_size=count, max_size=count)), **given}


@st.composite
def sample_topic(draw: st.DrawFn, topic_id: int) -> SampleTopic:
    """Draw a topic of up to 30 frames with gaps, classes, kinds, codecs and dead records."""
    topic = SampleTopic(topic_id, draw(st.integers(1, 5)))
    shapes = draw(st.lists(columns_of(), min_size=1, max_size=4))
    seq, ts = draw(st.integers(1, 1 << 40)), STAMP
    for _ in range(draw(st.integers(1, 30))):
        seq += draw(st.sampled_from([0, 0, 0, 0, 1, 70]))
        ts += draw(st.sampled_from([0, 0, 1, 1_000]))
        seq = topic.add(
            seq, ts, draw(st.sampled_from(shapes)),
            codec=draw(st.sampled_from([Codec.NONE, Codec.NONE, Codec.LZ4, Codec.ZSTD])),
            durability=draw(st.sampled_from([Durability.DISK, Durability.DISK, Durability.FSYNC])),
            kind=draw(st.sampled_from([PayloadKind.BYTES, PayloadKind.BYTES, PayloadKind.JSON])),
            is_first=draw(st.sampled_from([False, False, True])),
        )  # fmt: skip
    seqs = sorted(topic.records)
    topic.earliest_seq = draw(st.sampled_from([1, 1, seqs[0], seqs[len(seqs) // 2]]))
    topic.dead = draw(st.sets(st.sampled_from(seqs), max_size=draw(st.sampled_from([0, 3, len(seqs)]))))
    return topic


@st.composite
def sample_topics(draw: st.DrawFn) -> list[SampleTopic]:
    """Draw topics in ascending order of their ids."""
    ids = draw(st.sets(st.sampled_from([1, 2, 77, (1 << 64) - 1]), min_size=1, max_size=3))
    return [draw(sample_topic(topic_id)) for topic_id in sorted(ids)]


def simple_topic(topic_id: int = 5, records: int = 40, **columns: list) -> SampleTopic:
    """Return a topic of one-record frames: seqs from 1, one commit each, a tag on every third record."""
    topic = SampleTopic(topic_id, 1)
    for i in range(records):
        given = {name: [values[i % len(values)]] for name, values in columns.items()}
        if "tags" not in given and i % 3 == 0:
            given["tags"] = [f"tag{i % 2}"]
        topic.add(i + 1, STAMP + 10 * i, {"payloads": [b"payload %d" % i], **given})
    return topic


def writer(disk: Any, data_dir: str, **options: Any) -> SegmentWriter:
    """Return a SegmentWriter with the samples' number and salt."""
    given = {
        "number": NUMBER,
        "salt": SALT,
        "shard": 0,
        "shards": 2,
        "engine_id": ENGINE,
        "created_us": STAMP,
    }
    return SegmentWriter(disk, data_dir, **(given | options))


def write(disk: Any, data_dir: str, topics: list[SampleTopic], at_once: int = 1 << 30, **options: Any) -> Any:
    """Write topics to one segment. Return its SegmentRef, or None if no record is live."""
    made = writer(disk, data_dir, **options)
    for topic in topics:
        dead = BitMap64(topic.dead)
        made.add_topic(
            topic.topic_id, topic.epoch, topic.runs(at_once), earliest_seq=topic.earliest_seq, dead=dead
        )
    return made.finish()


def read_file(disk: Any, path: str) -> bytes:
    """Return a file's bytes."""
    fd = disk.open_read(path)
    try:
        return disk.read_at(fd, disk.size(fd), 0)
    finally:
        disk.close(fd)


def stored_frames(disk: Any, data_dir: str, stem: str) -> list[tuple[int, Any]]:
    """Return (offset, FrameView) of every frame of a data part, fully verified."""
    header = read_data_header(disk, data_dir, stem)
    data = read_file(disk, f"{data_dir}/{stem}{DATA}")
    found, at = [], 4096
    while at < len(data):
        found.append((at, open_frame(data, at, seed=header.salt)))
        at += found[-1][1].total_bytes
    return found


def records_in(view: Any) -> dict[int, dict[str, Any]]:
    """Return the records of a frame in the form of SampleTopic.records."""
    found, made = view.records(), {}
    columns = {
        "keys": found.keys, "tags": found.tags, "nodes": found.nodes, "headers": found.headers,
        "metas": found.metas, "event_ts": found.event_ts, "expires_at": found.expires_at,
        "not_before": found.not_before, "priorities": found.priorities,
    }  # fmt: skip
    for i, (seq, ts) in enumerate(zip(found.seqs, view.commit_stamps.tolist(), strict=True)):
        flags = (view.durability, view.payload_kind)
        made[seq] = {"payload": found.payloads[i], "ts": ts, "flags": flags} | {
            name: ABSENT.get(name) if values is None else values[i] for name, values in columns.items()
        }
    return made
