"""Ranges of fields of messages, each declared once: decoding refuses what lies outside.

A field is annotated with one of these instead of `int` or `str`. So its numbers fit where they go: into words
of shared memory, rows of a snapshot, calls of the kernel, and sums of times. MessagePack has no integer above
2**64 - 1, so `U64` needs no upper bound.
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
"""An id, a token, a salt, a number of a call: any word."""
U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""A count, an epoch, a number that a client gives to something of its own."""
Seq = Annotated[int, Meta(ge=0, le=SEQ_MAX)]
"""A position in a topic, a number of bytes, a time in microseconds: what is counted with signed words."""
I64 = Annotated[int, Meta(ge=-SEQ_MAX - 1, le=SEQ_MAX)]
"""A signed word."""
Place = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
"""A number of a shard, a slot, a frame, a class; -1 = none."""
Millis = Annotated[int, Meta(ge=0, le=MILLIS_MAX)]
"""A time in milliseconds, or since the epoch. Its nanoseconds fit into a signed word."""
MillisOrNone = Annotated[int, Meta(ge=-1, le=MILLIS_MAX)]
"""The same; -1 = there is none."""
Pid = Annotated[int, Meta(ge=0, le=PID_MAX)]
"""A process; 0 = none is named."""
Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
"""A name of a topic, router, group, node, file; legal ones are shorter, and checked by who looks them up."""
