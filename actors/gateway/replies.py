"""Replies to clients: results of reads, and errors without internal details. Pure."""

from __future__ import annotations

import re

from ringlog.actors.gateway import events as ev
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, Refused, RinglogError, Status
from ringlog.topic.tombstone import Floors, ReadPlan, plan_read

_HIDDEN_DETAILS = frozenset({"file", "path", "offset"})
_QUOTED_DETAILS = frozenset({"reason", "error", "cause", "directory"})
"""Facts that quote another error, which may name a file with its directory."""
_DIRECTORIES = re.compile(r"(?<![^\s'\"(=])/(?:[^\s/'\",()]+/)*")
"""The directories of an absolute path, up to the last `/`."""


def error_reply(error: RinglogError) -> m.ErrorReply:
    """Return the error as a client may see it: no directories of the server and no internal details."""
    detail = {name: value for name, value in error.detail.items() if name not in _HIDDEN_DETAILS}
    for name in _QUOTED_DETAILS & detail.keys():
        detail[name] = without_directories(str(detail[name]))
    if isinstance(error, Refused):
        return m.ErrorReply(int(error.status), error.message, detail, error.outcome)
    if isinstance(error, CorruptData):
        detail["reason"] = "corrupt_segment"
        return m.ErrorReply(int(Status.INTERNAL), error.message, detail)
    return m.ErrorReply(
        int(Status.NOT_READY if error.retriable else Status.INTERNAL),
        "the engine is not ready, retry later" if error.retriable else "internal error: see the engine log",
        {"reason": error.code},
        error.outcome,
    )


def without_directories(text: str) -> str:
    """Return the text with absolute paths cut to their last part."""
    return _DIRECTORIES.sub("", text)


def plan_for_read(message: m.Read, located: m.Located) -> ReadPlan:
    """Return the plan of a read: the loss that it reports, its start and its end."""
    floors = Floors(
        located.head_seq, located.earliest_seq, located.cap_floor, located.ttl_floor, located.trim_floor
    )
    return plan_read(
        message.after, floors, located.lost, trimmed=located.trimmed, recreated=located.recreated,
        is_behind=located.is_behind,
    )  # fmt: skip


def is_client_copy_current(message: m.Read, located: m.Located, plan: ReadPlan) -> bool:
    """Return whether the frames that the client has are equal to those that would be read now."""
    is_same = message.epoch == located.epoch and message.version == located.version
    return is_same and plan.gap is None and plan.after < message.held <= plan.stop


def read_reply(located: m.Located, plan: ReadPlan, read: ev.FramesRead) -> m.ReadReply:
    """Build the reply from the shard's reply and the result of the read."""
    reached = max(plan.after, read.examined)
    gap = plan.gap
    return m.ReadReply(
        located.topic, located.topic_id, located.epoch, plan.after, reached, located.head_seq,
        located.earliest_seq, reached >= located.head_seq, read.frames,
        *((gap.gap_from, gap.gap_to, gap.reason) if gap is not None else (0, 0, "")),
        read.hidden, located.version, located.is_fed,
    )  # fmt: skip
