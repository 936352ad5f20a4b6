"""The compiled kernel, native/kernel.c. Without it records can be neither written nor read."""

from __future__ import annotations

from ringlog.errors import KernelMissing

try:
    import ringlog._kernel as kernel
except ImportError as _error:
    raise KernelMissing(
        "ringlog's compiled kernel is missing: reinstall ringlog from a wheel for this platform, "
        "or from source with a C compiler",
        reason=str(_error),
    ) from _error

__all__ = ["kernel"]
