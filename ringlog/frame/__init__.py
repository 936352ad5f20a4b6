"""Columns to frames and back. Pure: no file, no clock, no process.

layout draws a frame; columns and codec make one; view reads one; batch finds, checks and seals many;
measure judges them for the shard; settle is what a shard answers. arrow needs the extra of that name.
"""

from ringlog.frame.arrow import encode_arrow
from ringlog.frame.codec import control_frame, frame, frames_of, patch, seal, total_bytes_at
from ringlog.frame.columns import Columns, encode_records
from ringlog.frame.heap import keep_freed_memory
from ringlog.frame.layout import Column, FrameType
from ringlog.frame.measure import Fault, Measures, measure
from ringlog.frame.view import BytesColumn, FrameView, HeadersColumn, Records, open_frame

__all__ = [
    "BytesColumn",
    "Column",
    "Columns",
    "Fault",
    "FrameType",
    "FrameView",
    "HeadersColumn",
    "Measures",
    "Records",
    "control_frame",
    "encode_arrow",
    "encode_records",
    "frame",
    "frames_of",
    "keep_freed_memory",
    "measure",
    "open_frame",
    "patch",
    "seal",
    "total_bytes_at",
]
