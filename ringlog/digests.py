"""SHA-256 digests of dedup ids and idempotency keys. Only digests, all of one size, are sent and stored."""

from __future__ import annotations

from hashlib import sha256

DIGEST_BYTES = 32


def digest_of_id(given: str) -> bytes:
    """Return the digest of a dedup id: its SHA-256."""
    return sha256(given.encode()).digest()


def digest_of_key(given: str) -> bytes:
    """Return the digest of an idempotency key. A prefix makes it differ from that of an equal dedup id."""
    return sha256(b"key\0" + given.encode()).digest()
