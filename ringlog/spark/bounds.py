"""Bounds of a read: converts options and the current state of topics to positions that stay fixed."""

from __future__ import annotations

import logging

from ringlog.errors import TopicNotFound
from ringlog.spark.catalog import Catalog, GapRow, TopicState
from ringlog.spark.errors import OptionError
from ringlog.spark.options import EARLIEST, LATEST, SourceOptions, bound_of, cursor_of
from ringlog.spark.plan import Bounds
from ringlog.spark.slice_reader import DELETED, data_loss

log: logging.Logger = logging.getLogger("ringlog.spark")


def resolve_bounds(catalog: Catalog, options: SourceOptions) -> list[Bounds]:
    """Return the bounds of a batch read for each topic, in byte order of names; until <= head.

    A topic without records to read has after == until. Raises TopicNotFound and OptionError.
    """
    found = []
    for at in catalog.topics(options):
        after = start_of(catalog, options, at)
        until = max(end_of(catalog, options, at), after)
        found.append(Bounds(at.topic, at.topic_id, at.epoch, after, until))
    return found


def start_of(catalog: Catalog, options: SourceOptions, at: TopicState) -> int:
    """Return the position before the first one to read in a new topic. Times take precedence over offsets."""
    ts_us = options.starting_ts.of(at.topic)
    if ts_us is not None:
        return _start_at_time(catalog, options, at, ts_us)
    offset = options.starting.of(at.topic)
    if offset == EARLIEST:
        return at.earliest - 1
    if offset == LATEST:
        return at.head
    if cursor_of(offset) > at.head:
        raise OptionError(
            "startingOffsets must not exceed the end of the topic",
            topic=at.topic,
            found=offset,
            end=at.head + 1,
        )
    return cursor_of(offset)


def end_of(catalog: Catalog, options: SourceOptions, at: TopicState) -> int:
    """Return the last position to read, at most the published head."""
    ts_us = options.ending_ts.of(at.topic)
    if ts_us is not None:
        position = catalog.position_at(at.topic, ts_us)
        return at.head if position is None else min(position, at.head)
    offset = options.ending.of(at.topic)
    return at.head if offset == LATEST else min(bound_of(offset), at.head)


def check_gaps(catalog: Catalog, bounds: list[Bounds], options: SourceOptions) -> list[GapRow]:
    """Return the losses that already exist within the bounds; raise DataLoss if failOnDataLoss is on."""
    found: list[GapRow] = []
    for each in bounds:
        if each.after < each.until:
            found += gaps_of(catalog, each)
    if found and options.fail_on_data_loss:
        raise data_loss(found[0])
    for gap in found:
        log.warning(
            "lost records %d..%d of topic %s are skipped: %s", gap.gap_from, gap.gap_to, gap.topic, gap.reason
        )
    return found


def gaps_of(catalog: Catalog, bounds: Bounds) -> list[GapRow]:
    """Return the lost ranges within these bounds. If the topic was deleted, that is all of them."""
    try:
        return catalog.gaps(bounds.topic, bounds.epoch, bounds.after, bounds.until)
    except TopicNotFound:
        return [GapRow(bounds.topic, bounds.epoch, bounds.after + 1, bounds.until, DELETED, 0, 0)]


def _start_at_time(catalog: Catalog, options: SourceOptions, at: TopicState, ts_us: int) -> int:
    position = catalog.position_at(at.topic, ts_us)
    if position is not None:
        return min(max(position, at.earliest - 1), at.head)
    if options.latest_if_too_new:
        return at.head
    raise OptionError(
        "no record was committed at or after the starting time; startingOffsetsByTimestampStrategy=latest "
        "starts at the end instead",
        topic=at.topic,
        ts_us=ts_us,
    )
