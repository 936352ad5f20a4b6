"""Queries of storage about the records of one topic, and their answers. Pure.

Retention and deletes depend on the records in storage, and so do queues and groups. The core returns a query
as effect QueryStorage and gets the answer as completion StorageQueried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyroaring import BitMap64

from ringlog.envelope import messages as m
from ringlog.errors import CorruptData
from ringlog.frame.batch import FrameBatch
from ringlog.frame.facts import RecordFacts, record_facts
from ringlog.tags import TagMatch
from ringlog.topic.retention import (
    RecordIndex,
    Removal,
    RetentionState,
    attribute_to_files,
    decide_delete,
    retain,
)
from ringlog.topic.state import ShardTopic


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Positions of the records that a storage query needs. Has the same fields as the message Located."""

    topic: str
    topic_id: int
    epoch: int
    earliest_seq: int
    extents: list[m.Extent]
    lost: list[int]


@dataclass(frozen=True, slots=True)
class DeleteSelector:
    """Conditions of a delete request."""

    before_seq: int
    match: TagMatch | None
    seqs: BitMap64 | None


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """Query about published records.

    It requests the delivery attributes of first..last, their sizes, or the append time of record `put`."""

    first: int
    last: int
    key: int
    """Key of the group that needs the result (lease_registry.key_of). For sizes, the topic id."""
    put: int = 0
    has_sizes: bool = False
    """True to request the sizes instead of the delivery attributes."""


@dataclass(frozen=True, slots=True)
class RecordQueryResult:
    """Result of a RecordQuery."""

    attributes: Any = None
    """Delivery attributes of the records, as returned by RecordIndex.delivery_attributes."""
    put_us: int = 0
    sizes: Any = None
    """(seqs, bytes) of the stored records."""


@dataclass(frozen=True, slots=True)
class StorageQuery:
    """Query of storage about one topic: which records retention or a delete removes, or a RecordQuery."""

    topic: ShardTopic
    retention_state: RetentionState
    place: RecordLocation
    staged: list[tuple[Any, FrameBatch]]
    """(buffer, frames) of the topic that are staged and not in a file yet."""
    now_us: int
    delete_selector: DeleteSelector | None = None
    files: Sequence[tuple[int, int]] = ()
    """(volatile file, one past the topic's last seq in it) for an ephemeral topic."""
    record_query: RecordQuery | None = None
    """If given, nothing is removed: a queue or group needs this information."""


StorageAnswer = Removal | RecordQueryResult | CorruptData
RecordIndexOf = Callable[[Any, Sequence[RecordFacts]], RecordIndex]


def answer_question(question: StorageQuery, index_of: RecordIndexOf) -> StorageAnswer:
    """Answer a query from storage. Return CorruptData instead of raising it."""
    # Include tags, because the index keeps these facts and does not read the frames again.
    staged = [record_facts(buffer, batch, with_tags=True) for buffer, batch in question.staged]
    try:
        stored = index_of(question.place, staged)
        if (query := question.record_query) is not None and query.has_sizes:
            return RecordQueryResult(sizes=stored.positions(query.first, query.last)[:2])
        if query is not None:
            stamps = stored.positions(query.put, query.put)[2].tolist() if query.put else []
            return RecordQueryResult(
                stored.delivery_attributes(query.first, query.last), stamps[0] if stamps else 0
            )
        wanted, held = question.delete_selector, question.retention_state
        if wanted is None:
            found = retain(held, stored, question.now_us)
        else:
            found = decide_delete(held, stored, wanted.before_seq, wanted.match, wanted.seqs)
        if question.files and found.records:
            attribute_to_files(held, stored, found, question.files)
        return found
    except CorruptData as e:
        return e
