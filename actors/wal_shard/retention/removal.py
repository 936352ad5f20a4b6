"""Removals: deletes on request, caps and TTL, from the question to the log. Pure.

What leaves a topic is decided by ringlog/topic/retention.py, from what the topic holds and what storage
knows of its records. The core therefore asks first (effect Consult, completion Consulted) and stages the
answer into the group: the frame is logged before any reader can see its effect (X-9, DL-12).

- Eviction belongs to the group of the append that makes it necessary; its records need not be in a file.
- A delete covers what was ordered before it: it waits until that is in files, and is decided then (DL-11).
- What shows contents or counts waits until retention that is due has been applied (X-10).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyroaring import BitMap64

from actors.wal_shard.commit.admission import Admission, FrameIntake
from actors.wal_shard.commit.commit_batch import CommitBatch, RoutedPart
from actors.wal_shard.commit.control_records import FloorsRaised, RecordsRemoved, frame_of
from ringlog.contract import ControlReceived
from ringlog.envelope import messages as m
from ringlog.errors import CorruptData, Internal, InvalidRequest, StaleEpoch, TopicNotFound
from ringlog.frame.batch import FrameBatch, scan
from ringlog.frame.facts import RecordFacts, record_facts
from ringlog.frame.routed_frame import resolve_copies
from ringlog.observers import Observers
from ringlog.tags import TagMatch, parse_match
from ringlog.topic.config import DISCARD_REJECT
from ringlog.topic.directory import TopicDirectory
from ringlog.topic.retention import (
    RecordIndex,
    Removal,
    RetentionState,
    apply_removal,
    attribute_to_files,
    decide_delete,
    exceeds_cap,
    held_from,
    retain,
    retention_state,
)
from ringlog.topic.state import ShardTopic
from ringlog.types import Durability

CONTENT_REQUESTS = (m.TopicState, m.TopicList, m.TopicDelete, m.TopicPut, m.Locate, m.RecordsDelete)
"""Requests that show contents or counts, or depend on them; a longer TTL brings nothing back (C-12)."""
LEASE_REQUESTS = (
    m.Claim, m.Steal, m.Ack, m.AckAndClaim, m.Nack, m.Extend, m.Reject, m.ListPending, m.LeaseStats,
    m.ConfirmDeadLettered, m.GroupOpen, m.GroupSeek,
)  # fmt: skip
"""Requests about jobs and groups: what has expired is none any more (QS-1), also before it is published."""
_INCARNATION_SHIFT = 32
_FRAME_BYTES = 256
"""Most bytes of a removal's frame beside its bitmap."""
_NUMBERS_MAX = 16_000_000
"""Most numbers that one request deletes by name."""
_RETRY_US = 10_000_000
"""Retention that met damage is tried again after this."""


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Where the records of a topic lie that a question is about; reads like a Located."""

    topic: str
    topic_id: int
    epoch: int
    earliest_seq: int
    extents: list[m.Extent]
    lost: list[int]


@dataclass(frozen=True, slots=True)
class DeleteSelector:
    """What a delete asks for."""

    before_seq: int
    match: TagMatch | None
    seqs: BitMap64 | None


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """What has to be known of published records: the marks of first..last, or how large they are; or when
    record `put` was put."""

    first: int
    last: int
    key: int
    """Who has to know: see lease_registry.key_of."""
    put: int = 0
    has_sizes: bool = False
    """Not the marks, but the sizes."""


@dataclass(frozen=True, slots=True)
class RecordQueryResult:
    """The answer."""

    marks: Any = None
    """storage.ledger.Marked."""
    put_us: int = 0
    sizes: Any = None
    """(numbers, bytes) of what is stored."""


@dataclass(frozen=True, slots=True)
class LedgerQuestion:
    """What is to leave this topic? By retention, or by what is wanted."""

    topic: ShardTopic
    retention_state: RetentionState
    place: RecordLocation
    staged: list[tuple[Any, FrameBatch]]
    """Frames of it that are not in a file yet."""
    now_us: int
    delete_selector: DeleteSelector | None = None
    files: Sequence[tuple[int, int]] = ()
    """Of an ephemeral topic: volatile files that hold it, and one past the last number in each."""
    learn: RecordQuery | None = None
    """Nothing is to leave: a queue or group has to know these."""


LedgerAnswer = Removal | RecordQueryResult | CorruptData
LedgerOf = Callable[[Any, Sequence[RecordFacts]], RecordIndex]


def answer_question(question: LedgerQuestion, ledger_of: LedgerOf) -> LedgerAnswer:
    """Decide with what storage knows; damage there is an answer, too."""
    # With tags: the ledger remembers these records, and will not see their frames again.
    staged = [record_facts(buffer, batch, with_tags=True) for buffer, batch in question.staged]
    try:
        stored = ledger_of(question.place, staged)
        if (learn := question.learn) is not None and learn.has_sizes:
            return RecordQueryResult(sizes=stored.positions(learn.first, learn.last)[:2])
        if learn is not None:
            stamps = stored.positions(learn.put, learn.put)[2].tolist() if learn.put else []
            return RecordQueryResult(
                stored.delivery_attributes(learn.first, learn.last), stamps[0] if stamps else 0
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


class Removals:
    """Which topics have retention due, and the delete that is being answered."""

    def __init__(
        self, incarnation: int, directory: TopicDirectory, extents: Callable[[ShardTopic, int],
        list[m.Extent]],
        volatile_files: Callable[[ShardTopic], Sequence[tuple[int, int]]],
    ) -> None:  # fmt: skip
        """`volatile_files` names those that hold an ephemeral topic, as a Question wants it."""
        self._volatile_files = volatile_files
        self.removed = Observers[ShardTopic, Removal, bool]()
        """What left a topic, and whether a client asked for it."""
        self.learned = Observers[LedgerQuestion, RecordQueryResult | CorruptData]()
        """What was found for a question of `questions_for_queries`."""
        self._left: dict[tuple[int, int], tuple[int, int]] = {}
        """(volatile file, topic_id) -> (records, bytes) that left it by deletes, caps and expiry."""
        self._base = incarnation << _INCARNATION_SHIFT
        self._directory = directory
        self._extents = extents
        self._dues: list[tuple[int, int]] = []
        """Heap of (when, topic_id); an entry counts only while the topic says the same."""
        self._strict_dues: list[tuple[int, int]] = []
        """Those of topics that refuse writes when they are full: expired records make room first (W-2)."""
        self._wanted: dict[int, ShardTopic] = {}
        self._not_before: dict[int, int] = {}
        """topic_id -> when the caps of a topic with damaged records are looked at again, microseconds."""
        self._asked: list[LedgerQuestion] = []
        self._delete: Removal | CorruptData | None = None
        self._delete_of: tuple[ShardTopic, int] | None = None
        """Topic and version that it was found for: it holds for no other."""

    # -- what is due ----------------------------------------------------------------------------------

    def invalidate_lossy_topics(self) -> None:
        """The directory is filled, and nothing of it is shown: readers that know a topic from our predecessor
        ask again where restarts lost some of it. We may have found more of that than it knew."""
        for topic in self._directory.by_id.values():
            if topic.lost:
                self.bump_version(topic)

    def finish_recovery(self) -> None:
        """The directory is filled: note what is due, and what a cap in force does not allow."""
        for topic in self._directory.by_id.values():
            # A state from a snapshot knows one time for both kinds of expiry.
            topic.own_due_us = topic.own_due_us or topic.due_us
            self.schedule_expiry(topic)
            if exceeds_cap(topic, topic.config):
                self._wanted[topic.topic_id] = topic

    def schedule_expiry(self, topic: ShardTopic) -> None:
        """Its next record expires at another time than was known."""
        if topic.due_us:
            heapq.heappush(self._dues, (topic.due_us, topic.topic_id))
            if topic.config.discard == DISCARD_REJECT:
                heapq.heappush(self._strict_dues, (topic.due_us, topic.topic_id))

    def request_retention(self, topic: ShardTopic) -> None:
        """Apply this topic's retention with the next group."""
        self._wanted[topic.topic_id] = topic

    @property
    def is_retention_requested(self) -> bool:
        """Is there retention to be applied?"""
        return bool(self._wanted)

    @property
    def next_due_us(self) -> int:
        """When the next record expires; 0 = none will."""
        return self._dues[0][0] if self._dues else 0

    def request_due_retention(self, now_us: int) -> None:
        """Apply the retention of every topic that has some due."""
        self._take_due(self._dues, now_us)

    def must_run_retention_first(self, message: m.Message | None, group: CommitBatch, now_us: int) -> bool:
        """Has retention to be applied before this request, or frames (None), are looked at? (X-10, W-2)"""
        if message is None or isinstance(message, m.Append | m.Route):
            return self._take_due(self._strict_dues, now_us)
        if isinstance(message, LEASE_REQUESTS):
            topic = self._directory.find(message.topic)
            if topic is not None and 0 < topic.due_us <= now_us:
                self._wanted[topic.topic_id] = topic
            return topic is not None and topic.topic_id in self._wanted
        if not isinstance(message, CONTENT_REQUESTS):
            return False
        if isinstance(message, m.TopicList):
            self.request_due_retention(now_us)
        else:
            topic = self._directory.find(message.topic)
            if topic is not None and 0 < topic.due_us <= now_us:
                self._wanted[topic.topic_id] = topic
        return bool(self._wanted) or group.has_removals

    def _take_due(self, dues: list[tuple[int, int]], now_us: int) -> bool:
        found = False
        while dues and dues[0][0] <= now_us:
            due_us, topic_id = heapq.heappop(dues)
            topic = self._directory.by_id.get(topic_id)
            if topic is not None and topic.due_us == due_us:
                self._wanted[topic_id] = topic
                found = True
        return found

    # -- asking ---------------------------------------------------------------------------------------

    def questions(self, group: CommitBatch, admission: Admission, now_us: int) -> list[LedgerQuestion]:
        """What has to be known for the retention that is wanted, and for caps that were exceeded."""
        for topic in admission.newly_due:
            self.schedule_expiry(topic)
        for topic in admission.written.values():
            if exceeds_cap(topic, topic.config) and self._not_before.get(topic.topic_id, 0) <= now_us:
                self._wanted[topic.topic_id] = topic
        admission.newly_due.clear()
        admission.written.clear()
        topics = [t for t in self._wanted.values() if self._directory.by_id.get(t.topic_id) is t]
        self._wanted.clear()
        self._asked = [self._question(topic, now_us, list(_staged(group, topic))) for topic in topics]
        return self._asked

    def questions_for_delete(self, message: m.RecordsDelete, now_us: int) -> list[LedgerQuestion]:
        """What has to be known for a delete; nothing when it is answered already, or will be refused."""
        try:
            topic, wanted = self._checked(message)
        except (InvalidRequest, StaleEpoch, TopicNotFound):
            return []
        # While there was no room for it, retention may have taken some of the same: asked once more, lest
        # that is taken away twice.
        of = self._delete_of
        if self._delete is not None and of is not None and of[0] is topic and of[1] == topic.version:
            return []
        self._delete = None
        self._asked = [self._question(topic, now_us, [], wanted)]
        return self._asked

    def question_about(self, topic: ShardTopic, seqs: BitMap64, now_us: int) -> LedgerQuestion:
        """What has to be known to delete exactly these published records; see `take_delete`."""
        self._asked = [self._question(topic, now_us, [], DeleteSelector(0, None, seqs))]
        return self._asked[0]

    def know_delete(self, topic: ShardTopic, found: Removal) -> None:
        """What storage would say to a question about a delete is known: see `take_delete`."""
        self._delete, self._delete_of = found, (topic, topic.version)

    def questions_for_queries(
        self, wanted: Sequence[tuple[ShardTopic, RecordQuery]], now_us: int
    ) -> list[LedgerQuestion]:
        """What queues and groups have to know of published records; see `learned`."""
        self._asked = [replace(self._question(topic, now_us, []), learn=learn) for topic, learn in wanted]
        return self._asked

    def take_delete(self) -> Removal | CorruptData | None:
        """What storage said to the last question about a delete."""
        found, self._delete = self._delete, None
        return found

    def _question(
        self,
        topic: ShardTopic,
        now_us: int,
        staged: list[tuple[Any, FrameBatch]],
        wanted: DeleteSelector | None = None,
    ) -> LedgerQuestion:
        held = retention_state(topic)
        place = RecordLocation(
            topic.name, topic.topic_id, topic.epoch, held.first_seq, self._extents(topic, held.first_seq - 1),
            [n for pair in topic.lost for n in pair],
        )  # fmt: skip
        return LedgerQuestion(topic, held, place, staged, now_us, wanted, self._volatile_files(topic))

    def take_answers(self, answers: Sequence[LedgerAnswer], group: CommitBatch, now_us: int) -> None:
        """The answers are there: stage what retention takes away, keep a delete's for its handler."""
        asked, self._asked = self._asked, []
        for question, found in zip(asked, answers, strict=True):
            if question.learn is not None:
                assert not isinstance(found, Removal)
                self.learned.notify(question, found)
            elif isinstance(found, RecordQueryResult):
                raise Internal("storage answered another question", topic=question.topic.name)
            elif question.delete_selector is not None:
                self._delete, self._delete_of = found, (question.topic, question.topic.version)
            elif isinstance(found, CorruptData):
                topic = question.topic
                self._not_before[topic.topic_id] = topic.due_us = now_us + _RETRY_US
                self.schedule_expiry(topic)
            else:
                self._not_before.pop(question.topic.topic_id, None)
                self._retain(question.topic, found, group)

    def _retain(self, topic: ShardTopic, removal: Removal, group: CommitBatch) -> None:
        topic.own_due_us = removal.own_due_us
        topic.held_at = held_from(topic)[0] if removal.is_held else 0
        if topic.due_us != removal.due_us:
            topic.due_us = removal.due_us
            group.dirty_topics[topic.topic_id] = topic
            group.has_removals = True
        self.schedule_expiry(topic)
        if not removal.is_empty:
            self.stage_removal(topic, removal, group, sync=True)

    # -- deletes --------------------------------------------------------------------------------------

    @property
    def delete_bytes(self) -> int:
        """Most bytes that the delete in hand adds to the log."""
        found = self._delete
        return _FRAME_BYTES + (_bitmap_bytes(found.seqs) if isinstance(found, Removal) else 0)

    def delete(
        self, message: m.RecordsDelete, event: ControlReceived, group: CommitBatch, now_us: int
    ) -> m.Message:
        """Stage a delete whose answer is there; reply what it took away (DL-7, DL-24)."""
        found, self._delete = self._delete, None
        topic, _ = self._checked(message)
        if isinstance(found, CorruptData):
            raise Internal("stored records are damaged, so nothing was deleted", reason=str(found))
        if found is None:
            raise Internal("a delete was not decided")
        if found.records:
            self.stage_removal(
                topic, found, group, sync=topic.config.durability == Durability.FSYNC, on_request=True
            )
        return m.RecordsDeleted(
            topic.name, found.records, topic.earliest_seq, topic.head_seq, topic.staged_count,
            topic.staged_bytes,
        )  # fmt: skip

    def cancel_delete(self) -> None:
        """The delete in hand cannot be logged: forget its answer."""
        self._delete = None

    def _checked(self, message: m.RecordsDelete) -> tuple[ShardTopic, DeleteSelector]:
        if not message.before_seq and message.match is None and not message.seqs:
            raise InvalidRequest("a delete names before_seq, match or both", field="before_seq")
        if message.seqs and (message.before_seq or message.match is not None):
            raise InvalidRequest("numbers are given alone", field="seqs")
        match = None if message.match is None else parse_match(message.match)
        topic = self._directory.find(message.topic)
        if topic is None:
            raise TopicNotFound("no such topic", topic=message.topic)
        if message.epoch and message.epoch != topic.epoch:
            raise StaleEpoch(
                "the topic began another life", topic=topic.name, sent=message.epoch, epoch=topic.epoch
            )
        return topic, DeleteSelector(
            message.before_seq, match, _numbers_of(message.seqs) if message.seqs else None
        )

    # -- staging --------------------------------------------------------------------------------------

    def stage_removal(
        self, topic: ShardTopic, removal: Removal, group: CommitBatch, *, sync: bool,
        on_request: bool = False,
        is_told: bool = True,
    ) -> None:  # fmt: skip
        """Log a removal with the group and put it into force; readers learn of it with the group. Not
        `is_told`: the topic's queue knows of it."""
        is_logged = topic.config.durability != Durability.EPHEMERAL
        apply_removal(topic, removal)
        if is_told:
            self.removed.notify(topic, removal, on_request)
        for file_id, records, accounted in removal.shares:
            left, remaining_bytes = self._left.get((file_id, topic.topic_id), (0, 0))
            self._left[file_id, topic.topic_id] = (left + records, remaining_bytes + accounted)
        if removal.cap_floor or removal.ttl_floor:
            self.bump_version(topic)
            if is_logged:
                group.add_control(floors_frame(topic, removal.floor_records, removal.floor_bytes), topic)
        if removal.delete_floor or removal.seqs:
            self.bump_version(topic)
            if is_logged:
                group.add_control(removed_frame(topic, removal), topic, sync=sync)
        group.dirty_topics[topic.topic_id] = topic
        group.has_removals = True

    def evict_file(self, file_id: int, topic: ShardTopic, floor: int, records: int, accounted: int) -> None:
        """A volatile file made room; it held these many records and bytes of the topic below `floor`."""
        left, remaining_bytes = self._left.pop((file_id, topic.topic_id), (0, 0))
        if records > left:
            removal = Removal(cap_floor=floor, records=records - left, bytes=accounted - remaining_bytes)
            apply_removal(topic, removal)
            self.removed.notify(topic, removal, False)
            self.bump_version(topic)

    def bump_version(self, topic: ShardTopic) -> None:
        """Readers ask again before they deliver more; versions of a later incarnation are greater."""
        topic.version = max(topic.version + 1, self._base)


def floors_frame(topic: ShardTopic, records: int, accounted: int) -> bytearray:
    """The frame that says a topic's floors of involuntary loss."""
    floors = (topic.cap_floor, topic.ttl_floor, topic.trim_floor)
    return frame_of(FloorsRaised(*floors, records, accounted, topic.version), topic.topic_id, topic.epoch)


def removed_frame(topic: ShardTopic, removal: Removal) -> bytearray:
    """The frame that says what was removed silently."""
    seqs = removal.seqs.serialize() if removal.seqs else b""
    records, accounted = removal.records - removal.floor_records, removal.bytes - removal.floor_bytes
    body = RecordsRemoved(removal.delete_floor, seqs, records, accounted, topic.version)
    return frame_of(body, topic.topic_id, topic.epoch)


def replay_removal(topic: ShardTopic, body: FloorsRaised | RecordsRemoved) -> None:
    """Apply a removal from the log, unless the topic's state has it already."""
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
    # Where damage took records away, more may leave than is left.
    removal.records = min(body.records, topic.staged_count)
    removal.bytes = min(body.bytes, topic.staged_bytes)
    apply_removal(topic, removal)
    topic.publish()


def _staged(group: CommitBatch, topic: ShardTopic) -> Iterator[tuple[Any, FrameBatch]]:
    for part in group.parts:
        if isinstance(part, FrameIntake):
            for stretch in part.admitted_ranges:
                if stretch.topic is topic:
                    yield part.buffer, part.batch.take(slice(stretch.start, stretch.stop))
        elif isinstance(part, RoutedPart) and any(copy.topic is topic for copy in part.copies):
            batch = scan(part.frame)
            yield part.frame, resolve_copies(part.frame, batch, 0, topic_id=topic.topic_id, is_verified=True)


def _numbers_of(data: bytes) -> BitMap64:
    """Numbers that a request names; raises InvalidRequest."""
    try:
        found = BitMap64.deserialize(data)
    except (ValueError, IndexError) as e:
        raise InvalidRequest("not a 64-bit roaring bitmap", field="seqs", reason=str(e)) from None
    if len(found) > _NUMBERS_MAX:
        raise InvalidRequest("too many numbers", field="seqs", numbers=len(found), max=_NUMBERS_MAX)
    # Made again: what a stranger serialised need not be in order inside.
    return BitMap64(found.to_array())


def _bitmap_bytes(seqs: BitMap64) -> int:
    return len(seqs.serialize()) if seqs else 0
