"""Runs of frames with any records, as the readers of a log find them. Tests build record batches from
them."""

import numpy as np
from hypothesis import strategies as st

from ringlog.frame import batch as frames
from ringlog.frame.codec import frame, patch_header
from ringlog.frame.columns import encode_records
from ringlog.storage.frame_run import FrameRun
from ringlog.types import Codec

_TEXT = st.text(max_size=6)
RECORD = st.fixed_dictionaries(
    {
        "payload": st.none() | st.binary(max_size=20),
        "key": st.none() | st.binary(max_size=4),
        "tag": st.none() | _TEXT,
        "node": st.none() | _TEXT,
        "headers": st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=5)), max_size=3),
        "meta": st.sampled_from([None, b'{"a":1}', b"{}"]),
        "time": st.one_of(st.none(), st.integers(1, 1 << 50)),
        "priority": st.integers(0, 255),
    }
)
_TIMES = ("event_ts", "expires_at", "not_before")
OPTIONAL = ("keys", "tags", "nodes", "headers", "metas", *_TIMES, "priorities")
CHOICES = st.sampled_from([(), ("keys",), ("tags", "metas"), OPTIONAL])
FULL = {
    "payload": b"abc", "key": b"k", "tag": "t", "node": "n", "headers": [("h", b"v")], "meta": b"{}",
    "time": 5, "priority": 9,
}  # fmt: skip


def run_of(stretches, codec=Codec.NONE, gap=0, stamps=None):
    """Return a run of frames from `stretches` of (records, columns).

    `gap` is the number of bytes of other topics after each frame. `stamps` are the commit times of the
    frames.
    """
    data, base = bytearray(), 1
    offsets = []
    for number, (records, columns) in enumerate(stretches):
        stamp = 1000 + base if stamps is None else stamps[number]
        values = {
            "keys": [r["key"] for r in records],
            "tags": [r["tag"] for r in records],
            "nodes": [r["node"] for r in records],
            "headers": [r["headers"] or None for r in records],
            "metas": [r["meta"] for r in records],
            "event_ts": [r["time"] for r in records],
            "expires_at": [r["time"] for r in records],
            "not_before": [r["time"] for r in records],
            "priorities": [r["priority"] for r in records],
        }
        encoded = encode_records([r["payload"] for r in records], **{name: values[name] for name in columns})
        made = bytearray(frame(encoded, topic_id=5, codec=codec))
        patch_header(made, base_seq=base, commit_ts=stamp, epoch=1)
        offsets.append(len(data))
        data += made + bytes(gap)
        base += len(records)
    words = frames.words_of(data)
    at = np.array(offsets, dtype=np.int64)
    found = frames.FrameBatch(at, frames.headers_at(words, at), len(data), frames.ScanEnd.CLEAN)
    return FrameRun(data, found, 0, "wal", 0)
