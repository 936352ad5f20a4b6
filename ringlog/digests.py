"""Names that programs give to writes and records, as they travel and are kept: all of one size."""

from __future__ import annotations

from hashlib import sha256

DIGEST_BYTES = 32


def digest_of_id(given: str) -> bytes:
    """A dedup id: its SHA-256."""
    return sha256(given.encode()).digest()


def digest_of_key(given: str) -> bytes:
    """An idempotency key: never the digest of an id."""
    return sha256(b"key\0" + given.encode()).digest()
