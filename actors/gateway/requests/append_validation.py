"""Validates the attachment of a remote client's Append. Pure.

The shard checks checksums, limits and epochs of every frame. The gateway checks what the shard cannot know:

- The attachment contains exactly the announced number of frames.
- All frames are appends. Other frame types exist, for example the deletion of a topic.
- All frames name one topic. The caller compares it with the topic of the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringlog.envelope.messages import Append
from ringlog.errors import CorruptFrame, InvalidRequest, PayloadTooLarge, Status
from ringlog.frame import batch, layout
from ringlog.frame.batch import I64, ScanEnd
from ringlog.frame.settle_entry import S_COUNT_STATUS, STATUS_SHIFT, WORDS
from ringlog.limits import COMMIT_BATCH_FRAMES_MAX

_STALE_STATUSES = (Status.STALE_EPOCH, Status.TOPIC_NOT_FOUND)


@dataclass(frozen=True, slots=True)
class SentFrames:
    """Facts about the frames of one Append."""

    topic_id: int
    """Topic id in all frames; 0 = the topic that the message names."""
    largest_bytes: int
    offsets: I64
    """(n + 1,) int64: start of each frame, and end of the last one."""

    @staticmethod
    def has_stale_topic(entries: bytes) -> bool:
        """Return whether a frame was refused because the topic was deleted or has another epoch."""
        words = np.frombuffer(entries, dtype="<u8").reshape(-1, WORDS)
        statuses = (words[:, S_COUNT_STATUS] >> np.uint64(STATUS_SHIFT)) & np.uint64(0xFFFF)
        return bool(np.isin(statuses, _STALE_STATUSES).any())


def check_frames(message: Append, data: Any, bytes_max: int) -> SentFrames:
    """Check the attachment of an Append.

    Raises:
        InvalidRequest: number, type or topic of the frames is wrong.
        CorruptFrame: the attachment does not consist of well-formed frames.
        PayloadTooLarge: the attachment is larger than `bytes_max`.
    """
    if data is None or not message.frames:
        raise InvalidRequest("an append must contain at least one frame", topic=message.topic)
    if (message.idempotency_key or message.ids) and message.frames != 1:
        raise InvalidRequest(
            f"an append with an idempotency key or dedup ids must have 1 frame, got {message.frames}",
            topic=message.topic, frames=message.frames,
        )  # fmt: skip
    if len(data) > bytes_max:
        raise PayloadTooLarge(
            f"attachment must be at most {bytes_max} bytes, got {len(data)}: send fewer frames",
            bytes=len(data), max=bytes_max,
        )  # fmt: skip
    if not 0 < message.frames <= COMMIT_BATCH_FRAMES_MAX:
        raise InvalidRequest(
            f"frames must be 1 to {COMMIT_BATCH_FRAMES_MAX} in one message, got {message.frames}",
            frames=message.frames, max=COMMIT_BATCH_FRAMES_MAX,
        )  # fmt: skip
    if len(data) % 8:
        raise CorruptFrame("the frames' length is not a multiple of 8", bytes=len(data))
    found = batch.scan(data)
    if found.end is not ScanEnd.CLEAN or found.stop != len(data):
        raise CorruptFrame(
            "attachment is not a sequence of complete frames", offset=found.stop,
            reason=found.reason or found.end.value,
        )  # fmt: skip
    if len(found) != message.frames:
        raise InvalidRequest(
            "number of frames differs from the announced number", announced=message.frames, sent=len(found)
        )
    bad = batch.first_true(batch.malformed(batch.as_stored(found.words)))
    if bad is not None:
        raise CorruptFrame("header is malformed", offset=int(found.offsets[bad]))
    if not batch.is_of_type(found.words, layout.FrameType.APPEND).all():
        raise InvalidRequest("all frames must be appends", topic=message.topic)
    topics = found.words[:, layout.W_TOPIC]
    if (topics != topics[0]).any():
        raise InvalidRequest("all frames must have the same topic id", topic=message.topic)
    offsets = np.append(found.offsets, found.stop)
    return SentFrames(int(topics[0]), int(found.total_bytes.max()), offsets)
