"""Columns to frames and back. Pure: no file, no clock, no process.

layout draws a frame; columns and codec make one; view reads one; batch finds, checks and seals many;
measure judges them for the shard; settle is what a shard answers. arrow needs the extra of that name.
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
