"""Ranges of message fields, each declared once. Decoding refuses values outside.

A field is annotated with one of these types instead of `int` or `str`. Its values then fit their
destinations: words of shared memory, rows of a snapshot, calls of the kernel, and sums of times. MessagePack
has no integer above 2**64 - 1, so `U64` needs no upper bound.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ringlog.limits import (
    MILLIS_MAX,
    NAME_CHARS_MAX,
    PID_MAX,
    SEQ_MAX,
)

U64 = Annotated[int, Meta(ge=0)]
"""An unsigned word: an id, a token, a salt, the number of a call."""
U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""A count, an epoch, or a number that a client assigns."""
Seq = Annotated[int, Meta(ge=0, le=SEQ_MAX)]
"""A position in a topic, a number of bytes, or a time in microseconds: values that are computed as signed
words."""
I64 = Annotated[int, Meta(ge=-SEQ_MAX - 1, le=SEQ_MAX)]
"""A signed word."""
Place = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
"""Index of a shard, a slot, a frame or a class; -1 = none."""
Millis = Annotated[int, Meta(ge=0, le=MILLIS_MAX)]
"""A duration or a time since the epoch, in milliseconds. The same value in nanoseconds fits a signed word."""
MillisOrNone = Annotated[int, Meta(ge=-1, le=MILLIS_MAX)]
"""The same; -1 = not set."""
Pid = Annotated[int, Meta(ge=0, le=PID_MAX)]
"""A process id; 0 = not set."""
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
"""A name of a topic, router, group, node or file. Valid names are shorter; the receiver validates them."""
