"""Frames: the engine's decoder, the offline decoder and `measure` agree about any bytes.

Each input is decoded unchanged, and again with corrected length and checksum. So mutations also reach the
checks after the checksum. Any result other than a view or FrameInvalid is a finding. Seeds are the golden
frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import xxhash

from ringlog.errors import FrameInvalid
from ringlog.frame import FrameView, measure, open_frame
from ringlog.frame.batch import ScanEnd, scan
from ringlog.frame.layout import VERSION_FIRST, VERSION_SHIFT
from ringlog.frame.measure import FORMAT_FAULTS
from ringlog.verify.frame_decoder import DecodedFrame, VerifyError, decode_frame

MAX_LEN = 2_048
SHARE = 2.0
GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
SIDE_BY_SIDE = 13


def check(data: bytes) -> None:
    """Decode one input with all three. They must accept or refuse it alike."""
    scan(data[: len(data) & ~7])
    decode_both(data)
    if len(data) < 80:
        return
    mended = bytearray(data[: len(data) & ~7])
    mended[0:4] = (len(mended) - 4).to_bytes(4, "little")
    mended[64:72] = xxhash.xxh3_64_intdigest(bytes(mended[80:])).to_bytes(8, "little")
    view = decode_both(bytes(mended))
    for times in (1, SIDE_BY_SIDE):
        whole = bytes(mended) * times
        batch = scan(whole)
        if batch.end is not ScanEnd.CLEAN or len(batch) != times:
            raise AssertionError("scan does not find what was put there")
        bad = set(measure(whole, batch).faults.tolist())
        if len(bad) != 1 or bool(bad & FORMAT_FAULTS) != (view is None):
            raise AssertionError(f"measure says {bad}, open_frame {view!r}")


def decode_both(data: bytes) -> FrameView | None:
    """Decode with the engine and the offline decoder. Raises AssertionError if they differ."""
    view: FrameView | None = None
    found: DecodedFrame | None = None
    try:
        view = open_frame(data, seed=None)
    except FrameInvalid as e:
        view = None if e.reason else view
    try:
        found = decode_frame(data)
    except VerifyError as e:
        found = None if e.message else found
    if (view is None) != (found is None):
        raise AssertionError(f"the engine reads {view!r}, the verifier {found!r}")
    if view is not None and found is not None:
        compare(view, found, data)
    return view


def compare(view: FrameView, found: DecodedFrame, data: bytes) -> None:
    """Raise AssertionError if the two decoded forms of one frame differ."""
    if not view.columns:
        if repr(view.control()) != repr(found.control):
            raise AssertionError("control bodies differ")
        return
    records = view.records()
    if records.payloads != found.columns["payload"]:
        raise AssertionError("payloads differ")
    tags = found.columns.get("tag")
    if tags is not None and data[VERSION_SHIFT // 8] == VERSION_FIRST:
        tags = [tag or None for tag in tags]
    if records.tags != tags:
        raise AssertionError("tags differ")
    if records.headers is not None and records.headers != found.columns["headers"]:
        raise AssertionError("headers differ")


def seeds() -> Iterator[bytes]:
    """Yield the golden frames."""
    for path in sorted(GOLDEN.glob("**/frames/*.hex")):
        yield bytes.fromhex(path.read_text())
