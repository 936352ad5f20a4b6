"""SHA-256 digests of dedup ids and idempotency keys. Only digests, all of one size, are sent and stored."""

from __future__ import annotations

DIGEST_BYTES = 32


def digest_of_id(given: str) -> bytes:
    """Return the digest of a dedup id: its SHA-256."""
    from hashlib import sha256  # Loads OpenSSL: only for programs that use ids.

    return sha256(given.encode()).digest()


def digest_of_key(given: str) -> bytes:
    """Return the digest of an idempotency key. A prefix makes it differ from that of an equal dedup id."""
    from hashlib import sha256

    return sha256(b"key\0" + given.encode()).digest()
