"""Encode columns of records as frames, and decode them. Pure: no file, no clock, no process.

`layout` defines a frame. `columns` and `codec` encode one, `view` decodes one. `batch` scans, verifies and
seals many. `measure` validates them for the shard. `settle_entry` is the shard's result for a frame. `arrow`
needs the extra `arrow`.
"""

from ringlog.frame.arrow import encode_arrow
from ringlog.frame.codec import control_frame, encode_frames, frame, patch_header, seal, total_bytes_at
from ringlog.frame.columns import EncodedRecords, encode_records
from ringlog.frame.layout import Column, FrameType
from ringlog.frame.malloc_tuning import raise_malloc_trim_threshold
from ringlog.frame.measure import FrameFault, Measures, measure
from ringlog.frame.view import BytesColumn, FrameView, HeadersColumn, Records, open_frame

__all__ = [
    "BytesColumn",
    "Column",
    "EncodedRecords",
    "FrameFault",
    "FrameType",
    "FrameView",
    "HeadersColumn",
    "Measures",
    "Records",
    "control_frame",
    "encode_arrow",
    "encode_frames",
    "encode_records",
    "frame",
    "measure",
    "open_frame",
    "patch_header",
    "raise_malloc_trim_threshold",
    "seal",
    "total_bytes_at",
]
