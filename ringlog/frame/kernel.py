"""The compiled kernel (native/kernel.c), and the limits of ringlog.limits in the form that it takes."""

from __future__ import annotations

import struct

from ringlog.limits import (
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_BYTES_MAX,
    HEADERS_PER_RECORD_MAX,
    KEY_BYTES_MAX,
    META_BYTES_MAX,
    NODE_BYTES_MAX,
    RECORD_BYTES_MAX,
    ROUTER_HOPS_MAX,
    SEQ_MAX,
    TAG_BYTES_MAX,
)
from ringlog.native_kernel import kernel

LIMITS = struct.pack(
    "<11Q", FRAME_BYTES_MAX, SEQ_MAX, RECORD_BYTES_MAX, KEY_BYTES_MAX, TAG_BYTES_MAX, NODE_BYTES_MAX,
    META_BYTES_MAX, HEADERS_PER_RECORD_MAX, HEADER_BYTES_MAX, HEADERS_BYTES_MAX, ROUTER_HOPS_MAX,
)  # fmt: skip
"""In the order of the kernel's enum that begins with L_FRAME."""

__all__ = ["LIMITS", "kernel"]
