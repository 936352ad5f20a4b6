"""What a guest writes: decided by its life and the frame's number, so that both sides know it."""

from __future__ import annotations

TOPICS = ("f", "d")
"""Of class `fsync` and `disk`."""
PAYLOAD_BYTES = 300
UNHEARD_ACKS_MAX = 4096 // len("@ack f 0 1 1\r\n")
"""Lines that a guest kernel's console may hold when it dies: it buffers 4,096 bytes while the host does not
read. So a guest may be that many frames ahead of the last ack that the host has read."""

CHECKPOINT_EVERY = 40
"""Frames between two checkpoints: log becomes segments, snapshots are written, files go."""


def topic_of(frame: int) -> str:
    """Two of three frames are to be synced before they are acknowledged."""
    return TOPICS[frame % 3 == 0]


def count_of(life: int, frame: int) -> int:
    """Records in a frame."""
    return 1 + (life * 7 + frame * 3) % 4


def payloads_of(life: int, frame: int) -> list[bytes]:
    """The frame's records; each begins with who it is."""
    return [whole(f"{life}.{frame}.{i}") for i in range(count_of(life, frame))]


def whole(tag: str) -> bytes:
    """The record that begins so."""
    return (tag + " ").encode().ljust(PAYLOAD_BYTES, b"~")


def tag_of(payload: bytes) -> str:
    """Who a record is; empty for one that nobody wrote."""
    tag = payload.partition(b" ")[0].decode(errors="replace")
    return tag if whole(tag) == payload else ""
