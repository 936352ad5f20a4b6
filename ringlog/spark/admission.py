"""Split the limit of one micro-batch over its topics. Pure.

The limit applies to the whole batch. Each topic gets a share in proportion to its pending records, so that
all topics catch up at the same time. Shares are rounded down, so a topic with few records next to one with
many could starve. Therefore topics rotate: the first topic in the order gets one position (or one frame)
before the rest is split. With n topics, a topic with pending records advances at least once in n batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamAdmissionStep:
    """Smallest unit of admission: positions up to `until`, `bytes` more than the previous step."""

    until: int
    bytes: int


def rotate_topics(topics: Sequence[str], rotation: int) -> list[str]:
    """Return the sorted topics, rotated so that topic number `rotation` modulo their count is first."""
    ordered = sorted(topics)
    start = rotation % len(ordered) if ordered else 0
    return ordered[start:] + ordered[:start]


def admit_offsets(pending: Mapping[str, int], most: int, rotation: int) -> dict[str, int]:
    """Split `most` (1 or more) over the topics in proportion to their pending positions.

    The shares add up to `most`, or to all pending positions if these are fewer. No share exceeds the topic's
    pending positions. Topics without pending positions are omitted from the result; pass them anyway, because
    the rotation covers all topics.
    """
    lags = {topic: lag for topic, lag in pending.items() if lag > 0}
    if sum(lags.values()) <= most:
        return lags
    order = [topic for topic in rotate_topics(list(pending), rotation) if topic in lags]
    shares = dict.fromkeys(lags, 0)
    shares[order[0]] = 1
    total = sum(lags.values()) - 1
    left = most - 1
    for topic in order:
        shares[topic] += left * (lags[topic] - shares[topic]) // total
    rest = most - sum(shares.values())
    for topic in order[1:] + order[:1]:
        if rest and shares[topic] < lags[topic]:
            shares[topic] += 1
            rest -= 1
    return shares


def admit_bytes(
    steps: Mapping[str, Sequence[StreamAdmissionStep]], most: int, rotation: int
) -> dict[str, int]:
    """Choose whole steps of about `most` bytes in total; return {topic: last position to read}.

    The total exceeds `most` only if the first step alone is larger: a batch always makes progress. Topics
    without a step are omitted.
    """
    pending = {topic: found for topic, found in steps.items() if found}
    if not pending:
        return {}
    order = [topic for topic in rotate_topics(list(steps), rotation) if topic in pending]
    taken = dict.fromkeys(pending, 0)
    taken[order[0]] = 1
    left = most - pending[order[0]][0].bytes
    sizes = {topic: sum(step.bytes for step in found[taken[topic] :]) for topic, found in pending.items()}
    shares = admit_offsets(sizes, left, rotation) if left > 0 else {}
    for topic in order:
        left -= _take(pending[topic], taken, topic, min(shares.get(topic, 0), left))
    for topic in order:  # Distribute what remains because shares do not match step sizes.
        left -= _take(pending[topic], taken, topic, left)
    return {topic: pending[topic][count - 1].until for topic, count in taken.items() if count}


def _take(found: Sequence[StreamAdmissionStep], taken: dict[str, int], topic: str, most: int) -> int:
    """Advance the topic by further steps while they fit into `most`; return their bytes."""
    used = 0
    while taken[topic] < len(found) and used + found[taken[topic]].bytes <= most:
        used += found[taken[topic]].bytes
        taken[topic] += 1
    return used
