"""How much of each topic one micro-batch may take. Pure.

Both limits are for the batch as a whole. Each topic gets a share in proportion to what waits in it, so that
all of them catch up at the same time. Shares round down, and a topic with little waiting beside one with much
could round down to nothing for ever: so the topics take turns, and whose turn it is gets one position (one
frame) before anything is shared out. A topic with anything waiting is therefore served at least once in as
many batches as there are topics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamAdmissionStep:
    """The least that can be taken: up to position `until`, `bytes` more than the step before."""

    until: int
    bytes: int


def rotate_topics(topics: Sequence[str], turn: int) -> list[str]:
    """The topics, beginning with the one whose turn it is."""
    ordered = sorted(topics)
    start = turn % len(ordered) if ordered else 0
    return ordered[start:] + ordered[:start]


def admit_offsets(waiting: Mapping[str, int], most: int, turn: int) -> dict[str, int]:
    """Split `most` (1 or more) over the topics by what waits in each; topics with nothing are left out.

    The shares add up to `most`, or to all there is if that is less, and none exceeds what waits. Name topics
    that have nothing too: turns go round over all of them.
    """
    lags = {topic: lag for topic, lag in waiting.items() if lag > 0}
    if sum(lags.values()) <= most:
        return lags
    order = [topic for topic in rotate_topics(list(waiting), turn) if topic in lags]
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


def admit_bytes(steps: Mapping[str, Sequence[StreamAdmissionStep]], most: int, turn: int) -> dict[str, int]:
    """Choose whole steps of about `most` bytes in all; return {topic: position to read up to}.

    More than `most` only when the very first step is larger than that: something always goes on. Topics that
    get nothing are left out.
    """
    waiting = {topic: found for topic, found in steps.items() if found}
    if not waiting:
        return {}
    order = [topic for topic in rotate_topics(list(steps), turn) if topic in waiting]
    taken = dict.fromkeys(waiting, 0)
    taken[order[0]] = 1
    left = most - waiting[order[0]][0].bytes
    sizes = {topic: sum(step.bytes for step in found[taken[topic] :]) for topic, found in waiting.items()}
    shares = admit_offsets(sizes, left, turn) if left > 0 else {}
    for topic in order:
        left -= _take(waiting[topic], taken, topic, min(shares.get(topic, 0), left))
    for topic in order:  # What shares were too small for whole steps.
        left -= _take(waiting[topic], taken, topic, left)
    return {topic: waiting[topic][count - 1].until for topic, count in taken.items() if count}


def _take(found: Sequence[StreamAdmissionStep], taken: dict[str, int], topic: str, most: int) -> int:
    """Take further steps while they fit into `most`; return their bytes."""
    used = 0
    while taken[topic] < len(found) and used + found[taken[topic]].bytes <= most:
        used += found[taken[topic]].bytes
        taken[topic] += 1
    return used
