"""Checks that a shard makes before it admits a frame: structure, limits, accounted bytes.

The result agrees with open_frame, except for checksums (batch.py verifies them) and limits. A frame is
`FrameFault.STRUCTURE` or `FrameFault.TEXT` exactly if open_frame refuses it. Limits apply to admission and
are no part of the format.
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
    """Reason to refuse a frame. STRUCTURE to HEADERS_TOO_LARGE: the first that applies is reported."""

    OK = 0
    STRUCTURE = 1
    TEXT = 2
    TAG_TOO_LONG = 3
    NODE_TOO_LONG = 4
    KEY_TOO_LONG = 5
    META_TOO_LONG = 6
    HEADERS_TOO_LARGE = 7
    UNCHECKED = 8
    """Not determined yet: the kernel does not check compressed bodies and bodies of control frames."""
    CORRUPT = 9
    """Only for frames from a producer: the body does not match its checksum."""
    UNSOUND = 10
    """Only for frames from a producer: the header is invalid, or one that a producer must not send."""


FORMAT_FAULTS = frozenset({FrameFault.STRUCTURE, FrameFault.TEXT})


@dataclass(slots=True)
class Measures:
    """Row i belongs to frame i of the batch. Numbers are 0 if `faults` is STRUCTURE or TEXT."""

    accounted: I64
    """(n,) accounted bytes: payloads and metas."""
    largest: I64
    """(n,) accounted bytes of the largest record."""
    faults: I64
    """(n,) FrameFault of each frame."""


def measure(buffer: Any, batch: FrameBatch) -> Measures:
    """Measure each frame of a batch found in `buffer`. The buffer must not change during the call.

    Never raises for any content: an invalid body gives a fault. Control frames have no records and measure 0.
    """
    offsets, words = np.ascontiguousarray(batch.offsets), np.ascontiguousarray(batch.words)
    table = kernel.measure(buffer, offsets, words, LIMITS)
    found = Measures(*np.frombuffer(table, np.int64).reshape(3, len(batch)))
    measure_unchecked(buffer, batch, found.accounted, found.largest, found.faults)
    return found


def measure_unchecked(buffer: Any, batch: FrameBatch, accounted: I64, largest: I64, bad: I64) -> list[int]:
    """Measure the rows that the kernel left open: control frames and compressed ones. Return these rows."""
    rows: list[int] = np.flatnonzero(bad == int(FrameFault.UNCHECKED)).tolist()
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
