"""A stream's offsets: what Spark writes into the checkpoint and brings back. Pure.

    {"log": "<id of the data directory>", "topics": {"orders": [epoch, seq], …}, "v": 1}
    {"log": "<id of the data directory>", "v": 1}                   before it was decided where to begin

`seq` is the last position dealt with, so an offset is a cursor for each topic. Spark compares offsets as
JSON text: the same places always have to give the same text, hence names in order and nothing else inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringlog.client.read.pages import Cursor
from ringlog.errors import UsageError
from ringlog.limits import SEQ_MAX

VERSION = 1
"""Of the format; a greater one is refused."""

TopicCursors = dict[str, Cursor]
"""Where a stream stands, topic by topic."""
BEGINNING = None
"""Of a query that never ran: where it stands is not decided."""


class CheckpointRefused(UsageError):
    """An offset of another data directory, of a newer ringlog, or none of ours; detail says which."""

    code = "checkpoint"


def encode(log_id: str, places: Mapping[str, Cursor] | None) -> dict[str, Any]:
    """Places, or BEGINNING, as an offset; equal places of one log give equal JSON text."""
    if places is BEGINNING:
        return {"log": log_id, "v": VERSION}
    topics = {topic: [place.epoch, place.seq] for topic, place in sorted(places.items())}
    return {"log": log_id, "topics": topics, "v": VERSION}


def decode(offset: Mapping[str, Any], log_id: str) -> TopicCursors | None:
    """Places of an offset, or BEGINNING.

    Raises CheckpointRefused for another log's, a newer version's, and for what is no offset.
    """
    version = offset.get("v")
    if not isinstance(version, int) or not _is_whole(version) or version < 1:
        raise CheckpointRefused("not an offset of this source", found=str(offset)[:200])
    if version > VERSION:
        raise CheckpointRefused(
            "the checkpoint was written by a newer ringlog; run that one, or start with a new checkpoint",
            version=version, known=VERSION,
        )  # fmt: skip
    if offset.get("log") != log_id:
        raise CheckpointRefused(
            "the checkpoint belongs to another data directory; give this query a checkpoint of its own",
            checkpoint_log=offset.get("log"), log=log_id,
        )  # fmt: skip
    if "topics" not in offset:
        return BEGINNING
    topics = offset["topics"]
    if not isinstance(topics, Mapping):
        raise CheckpointRefused("not an offset of this source", found=str(offset)[:200])
    return {str(topic): _place(topic, found) for topic, found in sorted(topics.items())}


def _place(topic: str, found: Any) -> Cursor:
    if isinstance(found, list | tuple) and len(found) == 2 and all(map(_is_whole, found)):
        epoch, seq = found
        if epoch > 0 and 0 <= seq <= SEQ_MAX:
            return Cursor(epoch, seq)
    raise CheckpointRefused("a topic's offset is [epoch, seq]", topic=topic, found=str(found)[:200])


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
