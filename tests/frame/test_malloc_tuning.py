"""The allocator keeps freed memory of large frames, after a call that touches no memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from ringlog.frame import raise_malloc_trim_threshold

def faults(call):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(raise_malloc_trim_threshold), *[faults(lambda: bytearray(3 << 20)) for _ in range(3)])
"""
BLOCK_PAGES = (31 << 20) // 4096


@pytest.mark.slow
def test_large_blocks_are_reused_without_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, timeout=50)
    tuning, first, *later = map(int, done.stdout.split())
    assert tuning < BLOCK_PAGES / 10
    assert first > 700, "its pages are new"
    assert max(later) < 10
