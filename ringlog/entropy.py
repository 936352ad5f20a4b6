"""Random numbers and names from the kernel. The module `secrets` does the same, but loads OpenSSL (3 ms)."""

from __future__ import annotations

import os


def random_u64() -> int:
    """Return a random number of 64 bits."""
    return int.from_bytes(os.urandom(8), "little")


def random_hex(nbytes: int) -> str:
    """Return the hexadecimal text of `nbytes` random bytes."""
    return os.urandom(nbytes).hex()
