"""Metrics of single topics: positions, sizes, and the jobs of queues.

The shards list their topics in small pages, at most once in HTTP_TOPIC_METRICS_REUSE_MS, however many clients
ask for metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from heapq import nlargest
from typing import NamedTuple

from ringlog.access.keys import Principal
from ringlog.aio import Client
from ringlog.client.connection.session import Session
from ringlog.client.requests.topic_requests import TopicMerge, TopicSummary
from ringlog.clock import Clock
from ringlog.envelope import messages as m
from ringlog.envelope.status_metrics import Family, Rows, gauge
from ringlog.errors import RinglogError
from ringlog.limits import (
    HTTP_QUEUE_METRICS_MAX,
    HTTP_STATUS_MS_MAX,
    HTTP_TOPIC_METRICS_LISTED_MAX,
    HTTP_TOPIC_METRICS_MAX,
    HTTP_TOPIC_METRICS_PAGE,
    HTTP_TOPIC_METRICS_REUSE_MS,
)
from ringlog.link.futures import Steps
from ringlog.settings import QUEUE

_NS_PER_MS = 1_000_000
_LABELS = ("topic",)
_US_PER_S = 1_000_000
OF_TOPICS: tuple[tuple[str, str, Callable[[TopicSummary], float]], ...] = (
    ("topic_head_seq", "Seq of the topic's last record.", lambda each: each.head_seq),
    ("topic_earliest_seq", "Seq of the topic's first record.", lambda each: each.earliest_seq),
    ("topic_records", "Records of the topic.", lambda each: each.count),
    ("topic_bytes", "Bytes of the topic's records.", lambda each: each.bytes),
    (
        "topic_last_write_timestamp_seconds", "Time of the topic's last write; 0: none.",
        lambda each: (each.last_write_ts or 0) / _US_PER_S,
    ),
    (
        "topic_halted", "1: a file of the topic is missing, so it refuses requests.",
        lambda each: bool(each.missing_part),
    ),
)  # fmt: skip
"""Metrics of each topic: (name without prefix, help text, value)."""
OF_QUEUES: tuple[tuple[str, str, Callable[[m.LeaseStatsReply], float]], ...] = (
    ("topic_queue_ready", "Jobs of the queue that are ready.", lambda each: each.ready),
    ("topic_queue_in_flight", "Jobs of the queue that are leased.", lambda each: each.in_flight),
    ("topic_queue_delayed", "Jobs of the queue that wait for their time.", lambda each: each.delayed),
    ("topic_queue_claims_waiting", "Claims that wait for jobs of the queue.", lambda each: each.waiting),
)
"""Metrics of each queue."""
TRUNCATED = ("topic_metrics_truncated", "1: some topics have no metrics of their own, see limits.")


class TopicNumbers(NamedTuple):
    """Topics that were written to last, and the jobs of those that are queues."""

    topics: list[TopicSummary]
    queues: dict[str, m.LeaseStatsReply]
    is_truncated: bool

    def families(self, principal: Principal) -> Iterator[Family]:
        """Yield the metric families, with the topics that the key covers."""
        shown = [each for each in self.topics if principal.covers(each.topic)]
        for name, text, number in OF_TOPICS:
            rows: Rows = [((each.topic,), float(number(each))) for each in shown]
            yield "gauge", name, text, _LABELS, rows
        queues = [each.topic for each in shown if each.topic in self.queues]
        for name, text, count in OF_QUEUES:
            yield (
                "gauge",
                name,
                text,
                _LABELS,
                [((each,), float(count(self.queues[each]))) for each in queues],
            )
        yield gauge(*TRUNCATED, self.is_truncated)


class TopicMetricsReader:
    """Asks the shards for the numbers of topics. Requests that arrive together share one answer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self._found: TopicNumbers | None = None
        self._valid_until_ns = 0

    async def read(self, client: Client) -> TopicNumbers | None:
        """Return the numbers, at most HTTP_TOPIC_METRICS_REUSE_MS old; None if a shard does not answer."""
        async with self._lock:
            if self._clock.monotonic_ns() >= self._valid_until_ns:
                self._found = None
                with suppress(RinglogError, TimeoutError):
                    async with asyncio.timeout(HTTP_STATUS_MS_MAX / 1e3):
                        self._found = await client.run(_numbers(client.connection))
                self._valid_until_ns = self._clock.monotonic_ns() + HTTP_TOPIC_METRICS_REUSE_MS * _NS_PER_MS
            return self._found


def _numbers(session: Session) -> Steps[TopicNumbers]:
    listed: list[TopicSummary] = []
    merge = TopicMerge("", HTTP_TOPIC_METRICS_PAGE)
    while page := (yield from merge.next_page(session)):
        listed += page
        if len(listed) > HTTP_TOPIC_METRICS_LISTED_MAX:
            break
    chosen = select(listed)
    found: dict[str, m.LeaseStatsReply] = {}
    for topic in chosen.queues:
        with suppress(RinglogError):  # It was deleted meanwhile, or is halted.
            found[topic] = (yield session.request_jobs(m.LeaseStats(topic))).message
    return TopicNumbers(chosen.topics, found, chosen.is_truncated)


class Selection(NamedTuple):
    """Topics that have metrics, in the order of their names, and the queues whose jobs are counted."""

    topics: list[TopicSummary]
    queues: list[str]
    is_truncated: bool


def select(
    listed: Sequence[TopicSummary], topics_max: int = HTTP_TOPIC_METRICS_MAX,
    queues_max: int = HTTP_QUEUE_METRICS_MAX,
) -> Selection:  # fmt: skip
    """Choose the topics that were written to last."""
    recent = nlargest(topics_max, listed, key=lambda each: each.last_write_ts or 0)
    queues = [each.topic for each in recent if each.type == QUEUE]
    is_truncated = len(recent) < len(listed) or len(queues) > queues_max
    return Selection(sorted(recent, key=lambda each: each.topic), queues[:queues_max], is_truncated)
