"""What a shard must know of each frame before it admits it: structure, limits, accounted bytes.

The verdict agrees with open_frame's on everything but checksums (batch.py looks at those) and limits:
a frame is `Fault.STRUCTURE` or `Fault.TEXT` exactly when open_frame refuses it. Limits are a matter of
admission, not of format.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringlog.errors import FrameInvalid
from ringlog.frame import layout
from ringlog.frame.batch import FrameBatch
from ringlog.frame.body import NOT_TEXT
from ringlog.frame.header import FrameHeader, unpack_header
from ringlog.frame.kernel import LIMITS, kernel
from ringlog.frame.view import unpacked_body

I64 = NDArray[np.int64]


class FrameFault(IntEnum):
    """Why a frame must not be admitted; the first that applies, in this order."""

    OK = 0
    STRUCTURE = 1
    TEXT = 2
    TAG_TOO_LONG = 3
    NODE_TOO_LONG = 4
    KEY_TOO_LONG = 5
    META_TOO_LONG = 6
    HEADERS_TOO_LARGE = 7
    UNCHECKED = 8
    """Not known yet: the kernel does not look into compressed bodies, nor into those of control frames."""
    CORRUPT = 9
    """Of a frame that a producer sent: its body does not match its checksum."""
    UNSOUND = 10
    """Of a frame that a producer sent: its header is none, or none that a producer may send."""


FORMAT_FAULTS = frozenset({FrameFault.STRUCTURE, FrameFault.TEXT})


@dataclass(slots=True)
class Measures:
    """Row i belongs to frame i of the batch. The numbers are 0 where `bad` is STRUCTURE or TEXT."""

    accounted: I64
    """(n,) accounted bytes (R-10): payloads and metas."""
    largest: I64
    """(n,) accounted bytes of the largest record."""
    faults: I64
    """(n,) Fault."""


def measure(buffer: Any, batch: FrameBatch) -> Measures:
    """Measure each frame of a batch found in `buffer`, whose content must not change meanwhile.

    Total: whatever the bodies hold ends in a row. Control frames have no records and measure 0.
    """
    offsets, words = np.ascontiguousarray(batch.offsets), np.ascontiguousarray(batch.words)
    table = kernel.measure(buffer, offsets, words, LIMITS)
    found = Measures(*np.frombuffer(table, np.int64).reshape(3, len(batch)))
    measure_unchecked(buffer, batch, found.accounted, found.largest, found.faults)
    return found


def measure_unchecked(buffer: Any, batch: FrameBatch, accounted: I64, largest: I64, bad: I64) -> list[int]:
    """Fill in what the kernel left open: control frames and compressed ones; returns their rows."""
    rows: list[int] = np.flatnonzero(bad == FrameFault.UNCHECKED).tolist()
    view = memoryview(buffer).cast("B") if rows else None
    for row in rows:
        assert view is not None
        header = unpack_header(batch.words[row].tobytes(), 0)
        start = int(batch.offsets[row])
        stored = view[start + layout.HEADER_BYTES : start + header.total_bytes]
        accounted[row], largest[row], bad[row] = _measure_one(header, stored)
    return rows


def _measure_one(header: FrameHeader, stored: memoryview) -> tuple[int, int, int]:
    try:
        body = unpacked_body(header, stored)
    except FrameInvalid as e:
        return 0, 0, FrameFault.TEXT if e.reason == NOT_TEXT else FrameFault.STRUCTURE
    return (
        kernel.judge(body, header.columns, header.records, LIMITS)
        if header.records
        else (0, 0, FrameFault.OK)
    )
