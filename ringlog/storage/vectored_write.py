"""One complete vectored write: it continues after short counts and retries transient errors.

Separate from the disk module, so that simulated disks with short or refused writes run the same loop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

Buffer = Any
"""bytes, bytearray, memoryview or a contiguous array: any object with the buffer interface."""

TRANSIENT_RETRIES_MAX = 8
"""Consecutive EINTR or EAGAIN results that one write tolerates before it fails."""

IOV_MAX = int(os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16
_TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN})


def write_fully(raw: Callable[[list[Buffer], int], int], buffers: Sequence[Buffer], offset: int) -> int:
    """Call `raw(buffers, offset)` until every byte is written. Return the number of bytes.

    `raw` writes a prefix and returns its length, or raises OSError. After a short count the call continues
    with the rest. EINTR and EAGAIN are retried up to TRANSIENT_RETRIES_MAX times in a row. A count of 0
    raises OSError (EIO).
    """
    pending = list(buffers[:IOV_MAX])
    total = sum([len(b) if type(b) is bytes else memoryview(b).nbytes for b in buffers])
    refusals = done = 0
    while done < total:
        try:
            count = raw(pending, offset + done)
        except OSError as e:
            refusals += 1
            if e.errno not in _TRANSIENT or refusals > TRANSIENT_RETRIES_MAX:
                raise
            continue
        if count <= 0:
            raise OSError(errno.EIO, f"no progress after {done} of {total} bytes")
        refusals = 0
        done += count
        if done < total:
            pending = _from_byte(buffers, done)
    return total


def _from_byte(buffers: Sequence[Buffer], skip: int) -> list[Buffer]:
    """Return at most IOV_MAX buffers that begin `skip` bytes into the concatenation of `buffers`."""
    for index, buffer in enumerate(buffers):
        view = memoryview(buffer)
        if skip < view.nbytes:
            return [view.cast("B")[skip:], *buffers[index + 1 : index + IOV_MAX]]
        skip -= view.nbytes
    return []
