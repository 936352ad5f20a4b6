"""Frames for a ring, and a consumer that reads them as a shard does."""

from __future__ import annotations

import numpy as np
import xxhash

from ringlog.ring.consumer import RingConsumer
from ringlog.ring.layout import PAD_WORD
from ringlog.ring.producer import RingProducer


def frame_of(number: int, length: int = 64) -> bytes:
    """Return a frame of `length` bytes: frame_len, number, fill bytes, checksum."""
    body = (length - 4).to_bytes(8, "little") + number.to_bytes(8, "little")
    body += bytes((number + i) & 0xFF for i in range(length - 24))
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def number_of(frame: bytes | bytearray | memoryview) -> int | None:
    """Return the frame's number, or None if its checksum does not match."""
    if xxhash.xxh3_64_intdigest(bytes(frame[:-8])) != int.from_bytes(frame[-8:], "little"):
        return None
    return int.from_bytes(frame[8:16], "little")


def push_all(producer: RingProducer, frames: list[bytes]) -> list[int]:
    """Push frames of any sizes. Return the positions of the frames that fitted."""
    offsets = np.cumsum([0, *map(len, frames[:-1])])
    return producer.push_buffer(b"".join(frames), offsets)[1].tolist()


def split(position: int, data: bytes | bytearray) -> tuple[list[tuple[int, bytes]], bool]:
    """Split the bytes that copy_pending returned into frames.

    Return ([(position, frame)] of the whole frames, whether padding follows).
    """
    frames, offset = [], 0
    while offset + 8 <= len(data):
        length = int.from_bytes(data[offset : offset + 4], "little")
        if length == PAD_WORD:
            return frames, True
        if offset + length + 4 > len(data):
            break
        frames.append((position + offset, bytes(data[offset : offset + length + 4])))
        offset += length + 4
    return frames, False


def take(consumer: RingConsumer, limit: int = 1 << 20, frames_max: int = 1 << 20) -> list[tuple[int, bytes]]:
    """Copy the published frames up to the end of the lap and advance past them, without settling."""
    got = consumer.copy_pending(limit)
    if got is None:
        return []
    frames, is_padded = split(*got)
    is_padded = is_padded and len(frames) <= frames_max
    frames = frames[:frames_max]
    consumer.advance(sum(len(frame) for _, frame in frames))
    if is_padded:
        consumer.skip_padding()
    return frames


def settle(consumer: RingConsumer, frames: list[tuple[int, bytes]]) -> None:
    """Settle frames that `take` returned."""
    entries = np.zeros((len(frames), 8), dtype=np.uint64)
    entries[:, 0] = [position for position, _ in frames]
    position, last = frames[-1]
    consumer.settle(entries, position + len(last))
