"""The compiled module, where it was built and is wanted: native/kernel.c; RINGLOG_KERNEL=0 leaves it out."""

from __future__ import annotations

from typing import Any

kernel: Any
try:
    import ringlog._kernel as kernel
except ImportError:
    kernel = None
"""The module, or None. What it does with frames, ringlog/frame/kernel.py asks it for."""
