"""Append of one frame under an idempotency key or with dedup ids, by message: a retry is safe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ringlog.client.requests.results import Appended
from ringlog.client.write.stream import RETRY_MS_MAX, Stream, effective_durability
from ringlog.envelope.messages import Append, TopicInfo
from ringlog.envelope.messages import Appended as AppendedMessage
from ringlog.errors import NotReady, ShuttingDown, StaleEpoch, Throttled, TopicNotFound
from ringlog.frame.codec import patch_header
from ringlog.frame.settle_entry import (
    FLAG_DEDUPED,
    FLAGS_SHIFT,
    S_COMMIT_TS,
    S_COUNT_STATUS,
    S_FIRST_SEQ,
    WORDS,
    entry_error,
)  # fmt: skip
from ringlog.link.futures import Steps
from ringlog.link.peer_request import FINAL_REASONS

if TYPE_CHECKING:
    from ringlog.client.connection.session import Session

KEYED_RETRY_S = 0.05


def append_keyed(
    session: Session, stream: Stream, frame: bytearray, key: str, window_ms: int = 0
) -> Steps[Appended]:
    """Append one frame under an idempotency key, by message. The key makes a retry safe."""
    done, _ = yield from append_keyed_frame(session, stream, frame, key=key, window_ms=window_ms)
    return done


def append_keyed_frame(
    session: Session, stream: Stream, frame: bytearray, *, key: str = "", ids: bytes = b"", window_ms: int = 0
) -> Steps[tuple[Appended, bytes]]:
    """Append one frame under a key, or its records under dedup ids.

    Returns the result and, for dedup ids, the known ids in the encoding of the message Appended.
    """
    deadline, number, attempts = session.deadline_ns(), stream.take_seq(), 0
    while True:
        try:
            return (yield from _append_keyed_once(session, stream, frame, number, key, ids, window_ms))
        except (TopicNotFound, StaleEpoch) as e:
            number = number if e.outcome == "unknown" else stream.take_seq()
            session.topics.forget(stream.topic)
            attempts += 1  # Without `create` retry once: it may have been created again.
            if (not stream.create and attempts > 1) or session.clock.monotonic_ns() >= deadline:
                raise
        except (Throttled, NotReady, ShuttingDown) as e:
            if e.detail.get("reason") in FINAL_REASONS or "limit" in e.detail:
                raise
            # A frame with an unknown outcome is resent under its number, to be recognised. A refused
            # number is used up.
            number = number if e.outcome == "unknown" else stream.take_seq()
            asked_s = min(int(e.detail.get("retry_after_ms", 0) or 0), RETRY_MS_MAX) / 1_000
            if session.clock.monotonic_ns() + int(asked_s * 1e9) >= deadline:
                raise
            yield session.pause(max(asked_s, KEYED_RETRY_S))
            continue
        yield session.pause(KEYED_RETRY_S)


def _append_keyed_once(
    session: Session, stream: Stream, frame: bytearray, number: int, key: str, ids: bytes, window_ms: int
) -> Steps[tuple[Appended, bytes]]:
    topic = stream.topic
    info: TopicInfo = yield session.topics.resolve(topic, create=stream.create)
    private = bytearray(frame)
    patch_header(
        private, topic_id=info.topic_id, epoch=info.epoch, producer_id=stream.producer_id,
        producer_seq=number,
    )  # fmt: skip
    message = Append(
        topic, 1, idempotency_key=key, disable_backpressure=stream.disable_backpressure, ids=ids,
        window_ms=window_ms,
    )  # fmt: skip
    reply: AppendedMessage = yield session.topics.ask_topic(info, message, attachment=private)
    entry = np.frombuffer(reply.entries, dtype=np.uint64).reshape(-1, WORDS)[0].tolist()
    error = entry_error(entry, topic)
    if error is not None:
        raise error
    first, count = entry[S_FIRST_SEQ], entry[S_COUNT_STATUS] & 0xFFFFFFFF
    is_deduped = bool(entry[S_COUNT_STATUS] >> FLAGS_SHIFT & FLAG_DEDUPED)
    reached = effective_durability(info, stream.durability)
    done = Appended(
        topic, reply.epoch, first, first + count - 1, count, reached, is_deduped, entry[S_COMMIT_TS]
    )
    return done, reply.known
