"""Stream offsets: the JSON that Spark stores in the checkpoint of a query. Pure.

    {"log": "<id of the log>", "topics": {"orders": [epoch, seq], …}, "v": 1}
    {"log": "<id of the log>", "v": 1}                   before the start positions are known

`seq` is the last processed position, so an offset contains one cursor per topic. Spark compares offsets as
JSON text. Equal positions must therefore give equal text: topics are sorted, and nothing else is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringlog.client.read.pages import Cursor
from ringlog.errors import UsageError
from ringlog.limits import SEQ_MAX

VERSION = 1
"""Version of the format. A greater version is rejected."""

TopicCursors = dict[str, Cursor]
"""Last processed position of each topic of a stream."""
BEGINNING = None
"""Offset of a query that never ran: its start positions are not known yet."""


class CheckpointRefused(UsageError):
    """The offset is malformed, or belongs to a newer ringlog, another data directory, or one before its
    restore."""

    code = "checkpoint"


def encode(log_id: str, positions: Mapping[str, Cursor] | None) -> dict[str, Any]:
    """Encode positions, or BEGINNING, as an offset. Equal positions of one log give equal JSON text."""
    if positions is BEGINNING:
        return {"log": log_id, "v": VERSION}
    topics = {topic: [cursor.epoch, cursor.seq] for topic, cursor in sorted(positions.items())}
    return {"log": log_id, "topics": topics, "v": VERSION}


def decode(offset: Mapping[str, Any], log_id: str) -> TopicCursors | None:
    """Decode an offset to positions or BEGINNING.

    Raises CheckpointRefused if the offset belongs to another log or a newer version, or is malformed.
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
            "the checkpoint belongs to another data directory, or to this one before it was restored from a "
            "backup; give this query a checkpoint of its own",
            checkpoint_log=offset.get("log"), log=log_id,
        )  # fmt: skip
    if "topics" not in offset:
        return BEGINNING
    topics = offset["topics"]
    if not isinstance(topics, Mapping):
        raise CheckpointRefused("not an offset of this source", found=str(offset)[:200])
    return {str(topic): _cursor(topic, found) for topic, found in sorted(topics.items())}


def _cursor(topic: str, found: Any) -> Cursor:
    if isinstance(found, list | tuple) and len(found) == 2 and all(map(_is_whole, found)):
        epoch, seq = found
        if epoch > 0 and 0 <= seq <= SEQ_MAX:
            return Cursor(epoch, seq)
    raise CheckpointRefused("the offset of a topic must be [epoch, seq]", topic=topic, found=str(found)[:200])


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
