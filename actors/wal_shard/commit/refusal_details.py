"""Details of refusals in settle entries, which only the shard as a whole knows. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlog.actors.wal_shard.commit.admission import FrameIntake
from ringlog.errors import Status
from ringlog.frame import layout
from ringlog.frame.settle_entry import (
    S_COMMIT_TS,
    S_COUNT_STATUS,
    S_FIRST_SEQ,
    S_HEAD_SEQ,
    S_TOPIC,
    STATUS_SHIFT,
)
from ringlog.segment.layout import parse_stem
from ringlog.topic.directory import Halt
from ringlog.topic.state import ShardTopic


def explain_full(intake: FrameIntake, missing_bytes: int) -> None:
    """Fill in the settle entries of frames that were refused because the device is nearly full."""
    entries = intake.entries
    statuses = entries[:, S_COUNT_STATUS] >> np.uint64(STATUS_SHIFT) & np.uint64(0xFFFF)
    for row in np.flatnonzero(statuses == int(Status.INTERNAL)).tolist():
        entries[row][S_FIRST_SEQ] = missing_bytes


def explain_halted(intake: FrameIntake, halted: dict[int, Halt]) -> None:
    """Change the settle entries of frames to halted topics from TOPIC_NOT_FOUND to TOPIC_HALTED."""
    entries = intake.entries
    for row in np.flatnonzero(np.isin(entries[:, S_TOPIC], list(halted))).tolist():
        entry = entries[row]
        status = int(entry[S_COUNT_STATUS]) >> STATUS_SHIFT & 0xFFFF
        halt = halted[int(entry[S_TOPIC])]
        if status != Status.TOPIC_NOT_FOUND:
            continue
        _, first, number = parse_stem(halt.part.partition(".")[0]) or (0, 0, 0)
        entry[S_COUNT_STATUS] = int(Status.TOPIC_HALTED) << STATUS_SHIFT
        entry[S_FIRST_SEQ] = is_in_doubt(halt.topic, intake.batch.words[row])
        entry[S_COMMIT_TS], entry[S_HEAD_SEQ] = number, first


def is_in_doubt(topic: ShardTopic, words: Any) -> bool:
    """Return True if the frame with this (10,) header may have been stored before its topic was halted."""
    producer = topic.producers.get(int(words[layout.W_PRODUCER_ID]))
    return producer is not None and int(words[layout.W_PRODUCER_SEQ]) <= producer.highest
