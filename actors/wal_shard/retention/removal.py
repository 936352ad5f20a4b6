"""Removal of records: deletes on request, caps and TTL, from the storage query to the log. Pure.

ringlog/topic/retention.py decides which records are removed, from the state of the topic and from the records
in storage. The core therefore queries storage first (effect QueryStorage, completion StorageQueried) and
stages the removal into the commit batch. The removal is logged before any reader sees its effect (X2).

- An eviction is in the same commit batch as the append that causes it. Evicted records may be staged only.
- A delete removes the records that were written before it (X4). It waits until they are in files.
- Requests that show contents or counts wait until due retention is applied (X6, see retention_schedule.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pyroaring import BitMap64

from ringlog.actors.wal_shard.commit.admission import Admission, FrameIntake
from ringlog.actors.wal_shard.commit.commit_batch import CommitBatch, RoutedPart
from ringlog.actors.wal_shard.commit.control_records import FloorsRaised, RecordsRemoved, frame_of
from ringlog.actors.wal_shard.retention.retention_schedule import RetentionSchedule
from ringlog.actors.wal_shard.retention.storage_query import (
    DeleteSelector,
    RecordLocation,
    RecordQuery,
    RecordQueryResult,
    StorageAnswer,
    StorageQuery,
)
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, Internal, InvalidRequest, StaleEpoch, TopicNotFound
from ringlog.frame.batch import FrameBatch, scan
from ringlog.frame.routed_frame import resolve_copies
from ringlog.observers import Observers
from ringlog.tags import parse_match
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.retention import Removal, apply_removal, retained_from, retention_state
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

_INCARNATION_SHIFT = 32
_FRAME_BYTES = 256
"""Maximum bytes of one of a removal's frames without its bitmap."""
_NUMBERS_MAX = 16_000_000
"""Maximum number of seqs in one delete request."""


class Removals:
    """Stages the removals that retention and deletes decide, and keeps the delete that is being processed."""

    def __init__(
        self, incarnation: int, directory: TopicDirectory, extents: Callable[[ShardTopic, int],
        list[m.Extent]],
        volatile_files: Callable[[ShardTopic], Sequence[tuple[int, int]]],
    ) -> None:  # fmt: skip
        """Create the removals of one shard incarnation.

        `volatile_files` returns the files of an ephemeral topic in the form of StorageQuery.files.
        """
        self._volatile_files = volatile_files
        self.removed: Observers[(ShardTopic, Removal, bool)] = Observers[ShardTopic, Removal, bool]()
        """Notified of every removal, with True if a client requested it."""
        self.query_results: Observers[(StorageQuery, RecordQueryResult | CorruptData)] = Observers[
            StorageQuery, RecordQueryResult | CorruptData
        ]()
        """Notified of the results of `record_queries`."""
        self._left: dict[int, dict[int, tuple[int, int]]] = {}
        """Volatile file -> topic_id -> (records, bytes) removed by deletes, caps and expiry."""
        self._base = incarnation << _INCARNATION_SHIFT
        self._directory = directory
        self.schedule: RetentionSchedule = RetentionSchedule(directory)
        self._extents = extents
        self._asked: list[StorageQuery] = []
        self._delete: Removal | CorruptData | None = None
        self._delete_of: tuple[ShardTopic, int] | None = None
        """Topic and version for which `_delete` was computed. It is invalid for any other version."""

    # -- storage queries ------------------------------------------------------------------------------

    def questions(self, batch: CommitBatch, admission: Admission, now_us: int) -> list[StorageQuery]:
        """Return the storage queries for requested retention and for topics above their caps."""
        topics = self.schedule.take_requested(admission, now_us)
        self._asked = [self._question(topic, now_us, list(_staged(batch, topic))) for topic in topics]
        return self._asked

    def questions_for_delete(self, message: m.RecordsDelete, now_us: int) -> list[StorageQuery]:
        """Return the storage query for a delete.

        Empty if it is answered already, or if it will be refused.
        """
        try:
            topic, wanted = self._checked(message)
        except (InvalidRequest, StaleEpoch, TopicNotFound):
            return []
        # While the delete waited for log space, retention may have removed some of its records. Query again,
        # so that no record is removed twice.
        of = self._delete_of
        if self._delete is not None and of is not None and of[0] is topic and of[1] == topic.version:
            return []
        self._delete = None
        self._asked = [self._question(topic, now_us, [], wanted)]
        return self._asked

    def question_about(self, topic: ShardTopic, seqs: BitMap64, now_us: int) -> StorageQuery:
        """Return the storage query to delete exactly these published records.

        `take_delete` returns the result.
        """
        self._asked = [self._question(topic, now_us, [], DeleteSelector(0, None, seqs))]
        return self._asked[0]

    def set_delete_result(self, topic: ShardTopic, found: Removal) -> None:
        """Set the result of a delete that needs no storage query. `take_delete` returns it."""
        self._delete, self._delete_of = found, (topic, topic.version)

    def record_queries(
        self, wanted: Sequence[tuple[ShardTopic, RecordQuery]], now_us: int
    ) -> list[StorageQuery]:
        """Return storage queries about published records for queues and groups.

        `query_results` gets the results.
        """
        self._asked = [
            replace(self._question(topic, now_us, []), record_query=query) for topic, query in wanted
        ]
        return self._asked

    def take_delete(self) -> Removal | CorruptData | None:
        """Return the result of the last delete query and reset it. None if there is none."""
        found, self._delete = self._delete, None
        return found

    def _question(
        self,
        topic: ShardTopic,
        now_us: int,
        staged: list[tuple[Any, FrameBatch]],
        wanted: DeleteSelector | None = None,
    ) -> StorageQuery:
        held = retention_state(topic)
        place = RecordLocation(
            topic.name, topic.topic_id, topic.epoch, held.first_seq, self._extents(topic, held.first_seq - 1),
            [n for pair in topic.lost for n in pair],
        )  # fmt: skip
        return StorageQuery(topic, held, place, staged, now_us, wanted, self._volatile_files(topic))

    def take_answers(
        self, answers: Sequence[StorageAnswer], batch: CommitBatch, now_us: int, bytes_max: int
    ) -> None:
        """Process query results: stage retention, and keep a delete's result for its handler.

        Retention that would make the commit batch larger than `bytes_max` is tried again later.
        """
        asked, self._asked = self._asked, []
        for question, found in zip(asked, answers, strict=True):
            if question.record_query is not None:
                assert not isinstance(found, Removal)
                self.query_results.notify(question, found)
            elif isinstance(found, RecordQueryResult):
                raise Internal("internal error: storage result of the wrong type", topic=question.topic.name)
            elif question.delete_selector is not None:
                self._delete, self._delete_of = found, (question.topic, question.topic.version)
            elif isinstance(found, CorruptData):
                self.schedule.retry_later(question.topic, now_us)
            elif not found.is_empty and batch.bytes + _logged_bytes(found) > bytes_max:
                self.schedule.postpone(question.topic, now_us)
            else:
                self.schedule.clear_retry(question.topic)
                self._retain(question.topic, found, batch)

    def _retain(self, topic: ShardTopic, removal: Removal, batch: CommitBatch) -> None:
        topic.own_due_us = removal.own_due_us
        topic.retained_at = retained_from(topic)[0] if removal.is_retained else 0
        if topic.due_us != removal.due_us:
            topic.due_us = removal.due_us
            batch.dirty_topics[topic.topic_id] = topic
            batch.has_removals = True
        self.schedule.add(topic)
        if not removal.is_empty:
            self.stage_removal(topic, removal, batch, sync=True)

    # -- deletes --------------------------------------------------------------------------------------

    @property
    def delete_bytes(self) -> int:
        """Maximum log bytes of the pending delete."""
        found = self._delete
        return _logged_bytes(found) if isinstance(found, Removal) else 0

    def delete(
        self, message: m.RecordsDelete, event: ControlReceived, batch: CommitBatch, now_us: int
    ) -> m.Message:
        """Stage the pending delete, and reply with the number of removed records."""
        found, self._delete = self._delete, None
        topic, _ = self._checked(message)
        if isinstance(found, CorruptData):
            raise Internal("stored records are damaged, so nothing was deleted", reason=str(found))
        if found is None:
            raise Internal("internal error: delete without a storage result")
        if found.records:
            self.stage_removal(
                topic, found, batch, sync=topic.config.durability == Durability.FSYNC, on_request=True
            )
        return m.RecordsDeleted(
            topic.name, found.records, topic.earliest_seq, topic.head_seq, topic.staged_count,
            topic.staged_bytes,
        )  # fmt: skip

    def cancel_delete(self) -> None:
        """Drop the result of a delete that cannot be logged."""
        self._delete = None

    def _checked(self, message: m.RecordsDelete) -> tuple[ShardTopic, DeleteSelector]:
        if not message.before_seq and message.match is None and not message.seqs:
            raise InvalidRequest("a delete needs before_seq, match or seqs", field="before_seq")
        if message.seqs and (message.before_seq or message.match is not None):
            raise InvalidRequest("seqs cannot be combined with before_seq or match", field="seqs")
        match = None if message.match is None else parse_match(message.match)
        topic = self._directory.find(message.topic)
        if topic is None:
            raise TopicNotFound("no such topic", topic=message.topic)
        if message.epoch and message.epoch != topic.epoch:
            raise StaleEpoch(
                "the topic was deleted and created again", topic=topic.name, sent=message.epoch,
                epoch=topic.epoch,
            )  # fmt: skip
        return topic, DeleteSelector(
            message.before_seq, match, _numbers_of(message.seqs) if message.seqs else None
        )

    # -- staging --------------------------------------------------------------------------------------

    def stage_removal(
        self, topic: ShardTopic, removal: Removal, batch: CommitBatch, *, sync: bool,
        on_request: bool = False,
        notify: bool = True,
    ) -> None:  # fmt: skip
        """Apply a removal and stage its log frames. Readers see it when the commit batch is published.

        With `notify` False, observers are not notified, because the topic's queue has removed the jobs
        already.
        """
        is_logged = topic.config.durability != Durability.EPHEMERAL
        self._apply(topic, removal)
        if notify:
            self.removed.notify(topic, removal, on_request)
        for file_id, records, accounted in removal.shares:
            of_file = self._left.setdefault(file_id, {})
            left, remaining_bytes = of_file.get(topic.topic_id, (0, 0))
            of_file[topic.topic_id] = (left + records, remaining_bytes + accounted)
        if removal.cap_floor or removal.ttl_floor:
            self.bump_version(topic)
            if is_logged:
                batch.add_control(floors_frame(topic, removal.floor_records, removal.floor_bytes), topic)
        if removal.delete_floor or removal.seqs:
            self.bump_version(topic)
            if is_logged:
                batch.add_control(removed_frame(topic, removal), topic, sync=sync)
        batch.dirty_topics[topic.topic_id] = topic
        batch.has_removals = True

    def evict_file(self, file_id: int, topic: ShardTopic, floor: int, records: int, accounted: int) -> None:
        """Remove the records of a deleted volatile file from its topic.

        The file contained `records` records with `accounted` bytes of the topic, all below `floor`. Records
        that deletes, caps or expiry removed earlier are not counted again.
        """
        left, remaining_bytes = self._left.get(file_id, {}).get(topic.topic_id, (0, 0))
        if records > left:
            removal = Removal(cap_floor=floor, records=records - left, bytes=accounted - remaining_bytes)
            self._apply(topic, removal)
            self.removed.notify(topic, removal, False)
            self.bump_version(topic)

    def forget_file(self, file_id: int) -> None:
        """Forget what was removed from a volatile file that was deleted."""
        self._left.pop(file_id, None)

    def forget_topic(self, topic: ShardTopic) -> None:
        """Forget what was removed from a topic that was deleted."""
        for of_file in self._left.values():
            of_file.pop(topic.topic_id, None)
        self.schedule.clear_retry(topic)

    def _apply(self, topic: ShardTopic, removal: Removal) -> None:
        apply_removal(topic, removal)
        self._directory.live_bytes -= removal.bytes

    def bump_version(self, topic: ShardTopic) -> None:
        """Increment the topic's version, so that readers query the shard again (X7).

        Versions of a later incarnation are greater than all earlier ones.
        """
        topic.version = max(topic.version + 1, self._base)

    def invalidate_lossy_topics(self) -> None:
        """Increment the version of every topic with lost records, after recovery and before publication.

        Readers that know the topic from the previous incarnation then query it again (X7). This recovery may
        have found more losses than earlier ones.
        """
        for topic in self._directory.by_id.values():
            if topic.lost:
                self.bump_version(topic)


def floors_frame(topic: ShardTopic, records: int, accounted: int) -> bytearray:
    """Build the frame with a topic's floors of involuntary loss (caps, TTL and trims)."""
    floors = (topic.cap_floor, topic.ttl_floor, topic.trim_floor)
    return frame_of(FloorsRaised(*floors, records, accounted, topic.version), topic.topic_id, topic.epoch)


def removed_frame(topic: ShardTopic, removal: Removal) -> bytearray:
    """Build the frame with records that were deleted on request or expired one by one."""
    seqs = removal.seqs.serialize() if removal.seqs else b""
    records, accounted = removal.records - removal.floor_records, removal.bytes - removal.floor_bytes
    body = RecordsRemoved(removal.delete_floor, seqs, records, accounted, topic.version)
    return frame_of(body, topic.topic_id, topic.epoch)


def replay_removal(topic: ShardTopic, body: FloorsRaised | RecordsRemoved) -> None:
    """Apply a removal from the log, unless the topic's state includes it already."""
    if body.version <= topic.version:
        return
    topic.version = body.version
    if isinstance(body, FloorsRaised):
        topic.trim_floor = max(topic.trim_floor, body.trim_floor)
        removal = Removal(cap_floor=body.cap_floor, ttl_floor=body.ttl_floor)
    else:
        removal = Removal(delete_floor=body.delete_floor)
        if body.seqs:
            removal.seqs = BitMap64.deserialize(body.seqs)
    # After a loss by damage, the logged counts may exceed the remaining records.
    removal.records = min(body.records, topic.staged_count)
    removal.bytes = min(body.bytes, topic.staged_bytes)
    apply_removal(topic, removal)
    topic.publish()


def _staged(batch: CommitBatch, topic: ShardTopic) -> Iterator[tuple[Any, FrameBatch]]:
    for part in batch.parts:
        if isinstance(part, FrameIntake):
            for admitted_range in part.admitted_ranges:
                if admitted_range.topic is topic:
                    yield part.buffer, part.batch.take(slice(admitted_range.start, admitted_range.stop))
        elif isinstance(part, RoutedPart) and any(copy.topic is topic for copy in part.copies):
            routed_frames = scan(part.frame)
            yield (
                part.frame,
                resolve_copies(part.frame, routed_frames, 0, topic_id=topic.topic_id, is_verified=True),
            )


def _numbers_of(data: bytes) -> BitMap64:
    """Decode the seqs of a request. Raise InvalidRequest."""
    try:
        found = BitMap64.deserialize(data)
    except (ValueError, IndexError) as e:
        raise InvalidRequest(
            "seqs must be a serialized 64-bit roaring bitmap", field="seqs", reason=str(e)
        ) from None
    if len(found) > _NUMBERS_MAX:
        raise InvalidRequest(
            f"a delete must have at most {_NUMBERS_MAX} seqs, got {len(found)}", field="seqs",
            numbers=len(found), max=_NUMBERS_MAX,
        )  # fmt: skip
    # Rebuild the bitmap, because a bitmap serialized by a client may be internally inconsistent.
    return BitMap64(found.to_array())


def _logged_bytes(removal: Removal) -> int:
    """Return the maximum log bytes of a removal: its floors, and what was removed one by one."""
    return 0 if removal.is_empty else 2 * _FRAME_BYTES + _bitmap_bytes(removal.seqs)


def _bitmap_bytes(seqs: BitMap64) -> int:
    return len(seqs.serialize()) if seqs else 0
