"""The frames that a guest writes. Life and frame number determine them, so guest and host both know them."""

from __future__ import annotations

TOPICS = ("f", "d")
"""Topics of class `fsync` and `disk`."""
PAYLOAD_BYTES = 300
UNHEARD_ACKS_MAX = 4096 // len("@ack f 0 1 1\r\n")
"""Maximum number of acks that are sent but unread when a guest kernel dies.

A guest kernel's console buffers 4,096 bytes. A guest may be this many frames ahead of the last ack that the
host has read.
"""

CHECKPOINT_EVERY = 40
"""Frames between two checkpoints. A checkpoint builds segments, writes snapshots and deletes log files."""


def topic_of(frame: int) -> str:
    """Return the topic of a frame. One frame in three goes to the `disk` topic, the others to `fsync`."""
    return TOPICS[frame % 3 == 0]


def count_of(life: int, frame: int) -> int:
    """Return the number of records in a frame."""
    return 1 + (life * 7 + frame * 3) % 4


def payloads_of(life: int, frame: int) -> list[bytes]:
    """Return the frame's payloads. Each begins with its tag `LIFE.FRAME.INDEX`."""
    return [whole(f"{life}.{frame}.{i}") for i in range(count_of(life, frame))]


def whole(tag: str) -> bytes:
    """Return the payload with this tag, padded to PAYLOAD_BYTES."""
    return (tag + " ").encode().ljust(PAYLOAD_BYTES, b"~")


def tag_of(payload: bytes) -> str:
    """Return the tag of a payload, or an empty string if no guest wrote this payload."""
    tag = payload.partition(b" ")[0].decode(errors="replace")
    return tag if whole(tag) == payload else ""
