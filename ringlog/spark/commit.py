"""Commits a batch of staged frames: plan, appends, end. Runs only on the driver.

    plan.batch >  batch          nothing to do; the new files are deleted
    plan.batch == batch, done    the same: Spark repeats a batch whose end it did not see
    plan.batch == batch, open    the existing plan is resumed; the new files are deleted
    plan.batch <  batch          (an open plan is finished first) a new plan, then its frames

Frame i of a plan always has the number first + i, so the engine recognises a retry. Numbers are sent in
ascending order. No number is sent that is FRAMES_IN_FLIGHT or more above an unsettled one. So after any
crash, every frame that is at least that far below its topic's highest settled number is settled. All other
frames are sent again; the engine answers a retry as a duplicate. If a frame was refused but later frames were
not, its number can never be appended (the engine replies NotReady). The frame gets a new number, which the
plan stores durably before the frame is sent.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringlog import stop_points
from ringlog.client.client import Client
from ringlog.client.ticket import Ticket
from ringlog.client.write.explicit_sequence_producer import NumberedProducer
from ringlog.client.write.producer_options import named_producer_id
from ringlog.envelope.engine_file import is_restored_log
from ringlog.errors import (
    CorruptData,
    DiskError,
    NotReady,
    RinglogError,
    ShuttingDown,
    Throttled,
    TopicNotFound,
)
from ringlog.limits import DEDUP_FRAMES_PER_PRODUCER
from ringlog.spark.errors import OptionError, StagingLost
from ringlog.spark.staged_frames import StagedFrames, locate_frames
from ringlog.spark.staging import LockedWriter, SinkCommitPlan, StagedFile, Staging, writer_file_id
from ringlog.types import SESSION_BIT, Durability

FRAMES_IN_FLIGHT = 512
"""Maximum distance of the lowest and highest number in flight: a resume repeats at most these."""
BYTES_IN_FLIGHT = 32 << 20
REFUSAL_TIMEOUT_S = 60.0
"""How long temporary refusals are retried while no frame is settled."""
PAUSE_S = 0.05
CLEAN_EVERY = 16
"""A commit removes leftover files when its batch number is a multiple of this."""
_LATER = (Throttled, NotReady, ShuttingDown)
assert FRAMES_IN_FLIGHT * 4 < DEDUP_FRAMES_PER_PRODUCER, "the engine knows every frame that may be sent again"
log: logging.Logger = logging.getLogger("ringlog.spark")


@dataclass(frozen=True, slots=True)
class WriterKey:
    """Identity of a writer: `text` names it permanently.

    A key with `is_one_time` is random, for one write, then discarded.
    """

    text: str
    is_one_time: bool = False
    legacy_text: str = ""
    """Key under which an earlier version knew this writer and others.

    Batches under that key are not repeated.
    """

    @property
    def producer_id(self) -> int:
        """Producer id of the writer's frames. The engine may forget the producer of a one-time key."""
        return producer_of(self.text, self.is_one_time)


def producer_of(key: str, is_one_time: bool) -> int:
    """Return the producer id of a writer's key. One id per query keeps the engine's producer table small."""
    return named_producer_id(f"spark/{key}") | (SESSION_BIT if is_one_time else 0)


@dataclass(frozen=True, slots=True)
class BatchCommitReport:
    """Result of a commit. `outcome` is nothing, written, resumed or repeated."""

    outcome: str
    batch: int
    rows: int = 0
    frames: int = 0
    repeats: int = 0
    """Frames that the engine already had."""
    renumbered: int = 0
    """Frames that received another number."""


@dataclass(frozen=True, slots=True)
class UnfinishedPlan:
    """An open plan that `recover` could not finish."""

    writer_id: str
    """Id of the writer in the names of its files."""
    writer: str | None
    """Key of the writer; None if its plan is damaged."""
    batch: int | None
    error: RinglogError


@dataclass(frozen=True, slots=True)
class DiscardedTopic:
    """One topic of a discarded plan. Numbers of rows are None if the staged files cannot be read."""

    topic: str
    rows: int | None
    """Rows that the plan has for the topic."""
    appended_min: int | None
    """Number of these rows that are in the topic for certain."""
    appended_max: int | None
    """Upper bound of that number: frames up to the last appended one, of which the engine may have refused
    some."""


@dataclass(frozen=True, slots=True)
class PlanDiscardReport:
    """Result of a discard. `outcome` is forgotten or given_up, see Committer.discard."""

    writer: str
    """Key of the writer."""
    batch: int
    outcome: str
    rows: int
    frames: int
    topics: tuple[DiscardedTopic, ...]


def abort(staging: Staging, key: WriterKey, files: Sequence[StagedFile]) -> list[str]:
    """Delete the files that no plan names: a commit may have failed after it planned some of them.

    Needs no engine, because the engine may be the reason for the failure. Returns the names of the deleted
    files. Raises NotReady while another process commits for this writer.
    """
    with staging.lock_writer(key.text) as locked:
        plan = locked.plan()
        named = set() if plan is None else {file.name for file in plan.files}
        stop_points.hit("sink_in_abort")
        return locked.delete_files(file.name for file in files if file.name not in named)


@dataclass(slots=True)
class Committer:
    """Commits and recovers through one client and one staging directory."""

    client: Client
    staging: Staging
    create_topics: bool = False
    durability: Durability | None = None
    log: str = ""
    """Identity of the engine's log; "" if it is not known."""

    def commit(self, key: WriterKey, batch: int, files: Sequence[StagedFile]) -> BatchCommitReport:
        """Append the frames of these files as batch `batch` of this writer. Idempotent.

        Raises TopicNotFound before anything is appended. Raises StagingLost, CorruptData, and errors of the
        engine. After an error of the engine the plan stays open, and the next call resumes it.
        """
        ordered = sorted(
            (file for file in files if file.frames), key=lambda file: (file.partition, file.name)
        )
        if not ordered:
            return BatchCommitReport("nothing", batch)
        names = [file.name for file in ordered]
        with self.staging.lock_writer(key.text) as locked:
            plan = self._plan_of(locked)
            if plan is None and key.legacy_text and self._is_written_before(key.legacy_text, batch, ordered):
                locked.delete_files(names)
                return BatchCommitReport("repeated", batch)
            if plan is not None and plan.batch < batch and not plan.done:
                plan = self._finish(locked, plan).plan
            if plan is not None and plan.batch >= batch:
                return self._resume_batch(locked, plan, batch, ordered)
            self._drop_done(locked, plan)
            tables = self._tables(ordered)  # A plan whose files cannot be read could never be finished.
            stop_points.hit("sink_before_plan")
            plan = self._new_plan(locked, plan, key, batch, tuple(ordered))
            stop_points.hit("sink_after_plan")
            end = self._append(locked, plan, tables, {})
        if batch % CLEAN_EVERY == 0:
            self._clean()
        return BatchCommitReport("written", batch, plan.rows, plan.frames, end.repeats, len(end.plan.moved))

    def _is_written_before(self, legacy_key: str, batch: int, files: Sequence[StagedFile]) -> bool:
        """Return whether an earlier version wrote this batch under the key `legacy_key`, and finish its plan.

        That version kept only the topics of its last batch. For a batch with other topics, assume that it was
        not written.
        """
        with self.staging.lock_writer(legacy_key) as locked:
            plan = self._plan_of(locked)
            topics = {topic for file in files for topic in file.topics}
            if plan is None or plan.batch < batch or not topics & set(plan.topics):
                return False
            if not plan.done:
                self._finish(locked, plan)
            return True

    def _resume_batch(
        self, locked: LockedWriter, plan: SinkCommitPlan, batch: int, files: Sequence[StagedFile]
    ) -> BatchCommitReport:
        """Resume or skip a batch that a plan covers: its newly staged files are a second copy."""
        named = {file.name for file in plan.files}
        topics = {topic for file in files for topic in file.topics}
        locked.delete_files(file.name for file in files if file.name not in named)
        if plan.done or plan.batch > batch:
            self._drop_done(locked, plan)
            if plan.batch == batch and plan.topics and not set(plan.topics) & topics:
                raise OptionError(
                    "this txnVersion was already written to other topics: use a separate txnAppId per output",
                    version=batch, written=list(plan.topics)[:8], now=sorted(topics)[:8],
                )  # fmt: skip
            return BatchCommitReport("repeated", batch)
        end = self._finish(locked, plan)
        return BatchCommitReport("resumed", batch, plan.rows, plan.frames, end.repeats, len(end.plan.moved))

    def recover(self) -> tuple[list[BatchCommitReport], list[UnfinishedPlan]]:
        """Finish every open plan whose writer does not hold its lock. Idempotent.

        Returns the finished plans, and those that cannot be finished now. Raises DiskError if the staging
        directory cannot be listed.
        """
        done: list[BatchCommitReport] = []
        failed: list[UnfinishedPlan] = []
        for writer_id in self.staging.writers():
            plan = None
            try:
                plan = self.staging.plan(writer_id)
                finished = None if plan is None or plan.done else self._recover_writer(writer_id)
            except RinglogError as e:
                key, batch = (None, None) if plan is None else (plan.key, plan.batch)
                failed.append(UnfinishedPlan(writer_id, key, batch, e))
            else:
                done += [] if finished is None else [finished]
        self._clean()
        return done, failed

    def _recover_writer(self, writer_id: str) -> BatchCommitReport | None:
        """Finish the open plan of a writer; return None if its process does that, or has done it."""
        try:
            with self.staging.lock_id(writer_id, wait_s=0) as locked:
                plan = self._plan_of(locked)
                if plan is None or plan.done:
                    return None
                end = self._finish(locked, plan)
        except NotReady as e:
            if "lock" not in e.detail:
                raise
            return None
        return BatchCommitReport(
            "resumed", plan.batch, plan.rows, plan.frames, end.repeats, len(end.plan.moved)
        )

    def discard(self, writer_id: str, batch: int) -> PlanDiscardReport:
        """Give up an open plan that cannot be finished, and delete its files. Only for an operator.

        If no row of it was appended, the plan is forgotten, and the batch can be written again. Otherwise the
        batch counts as written, and rows that were not appended are lost. A plan of a write without
        txnAppId is given up in both cases, because nothing repeats it.

        Raises OptionError if this writer has no open plan of this batch, NotReady while another process
        commits for the writer, StagingLost if the plan is of another log, and CorruptData if it is damaged.
        """
        with self.staging.lock_id(writer_id, wait_s=0) as locked:
            plan = self._plan_of(locked)
            if plan is None or plan.done or plan.batch != batch:
                raise OptionError(
                    "this writer has no open plan of this batch", writer=writer_id, batch=batch,
                    open=None if plan is None or plan.done else plan.batch,
                )  # fmt: skip
            highest = self._last_appended(plan)
            topics = tuple(self._discarded_topics(plan, highest))
            is_untouched = all(number < plan.first for number in highest.values())
            outcome = "forgotten" if is_untouched and not plan.fresh else "given_up"
            after = msgspec.structs.replace(plan, done=True)
            if outcome == "forgotten":
                after = msgspec.structs.replace(after, batch=batch - 1, files=(), moved={})
            locked.save_plan(after)
            locked.delete_files(file.name for file in plan.files)
            if plan.fresh:
                locked.delete_plan()
        return PlanDiscardReport(plan.key, batch, outcome, plan.rows, plan.frames, topics)

    # -- internals ----------------------------------------------------------------------------------

    def _plan_of(self, locked: LockedWriter) -> SinkCommitPlan | None:
        """Return the last plan; raise StagingLost if it was written to another log.

        The batches that it has as done may be missing there, and would be skipped. A plan of an older version
        names no log. If the engine's log was restored, the plan may be from before that.
        """
        plan = locked.plan()
        if plan is None or not self.log:
            return plan
        if plan.log != self.log if plan.log else is_restored_log(self.log):
            raise StagingLost(
                "the staging directory belongs to another data directory, or to this one before it was "
                "restored from a backup: give this one a staging directory of its own, and start the query "
                "with a new checkpoint", plan_log=plan.log, log=self.log, staging=self.staging.directory,
                writer=locked.writer_id,
            )  # fmt: skip
        return plan

    def _new_plan(
        self,
        locked: LockedWriter,
        before: SinkCommitPlan | None,
        key: WriterKey,
        batch: int,
        files: tuple[StagedFile, ...],
    ) -> SinkCommitPlan:
        first = 1 if before is None else before.next
        plan = SinkCommitPlan(
            key.text,
            batch,
            first,
            first + sum(file.frames for file in files),
            files,
            fresh=key.is_one_time,
            log=self.log,
        )
        for topic, settled in self._settled(plan).items():
            if settled >= first:
                raise StagingLost(
                    "the engine has frames of this writer that the staging directory does not know: it was "
                    "lost or replaced, or the engine was restored from a backup. Put it back, or start the "
                    "query with a new checkpoint, or the write with a new txnAppId",
                    topic=topic, settled=settled, first=first, staging=self.staging.directory,
                    writer=writer_file_id(key.text),
                )  # fmt: skip
        locked.sync_names()
        locked.save_plan(plan)
        return plan

    def _finish(self, locked: LockedWriter, plan: SinkCommitPlan) -> _AppendOutcome:
        """Append the frames of an open plan that an earlier process left."""
        with _named(plan):
            tables, highest = self._tables(plan.files), self._settled(plan)
        return self._append(locked, plan, tables, highest)

    def _tables(self, files: Sequence[StagedFile]) -> list[StagedFrames]:
        """Verify each file completely. Raises DiskError and CorruptData."""
        found: list[StagedFrames] = []
        first = 0
        for file in files:
            path = os.path.join(self.staging.directory, file.name)
            found.append(locate_frames(self.staging.disk, path, file, first))
            first += file.frames
        return found

    def _append(
        self,
        locked: LockedWriter,
        plan: SinkCommitPlan,
        tables: Sequence[StagedFrames],
        highest: Mapping[str, int],
    ) -> _AppendOutcome:
        """Append the frames, mark the plan as done, delete its files. `highest`: see Appender.run."""
        with _named(plan):
            end = Appender(self, locked, plan, tables).run(highest)
        stop_points.hit("sink_after_append")
        done = msgspec.structs.replace(end.plan, done=True)
        locked.save_plan(done)
        stop_points.hit("sink_after_done")
        self._drop_done(locked, done)
        if done.fresh:
            locked.delete_plan()
        return _AppendOutcome(done, end.repeats)

    def _drop_done(self, locked: LockedWriter, plan: SinkCommitPlan | None) -> None:
        if plan is not None and plan.done:
            locked.delete_files(file.name for file in plan.files)

    def _settled(self, plan: SinkCommitPlan) -> dict[str, int]:
        """Return the writer's highest settled number by topic. May create missing topics."""
        producer_id = producer_of(plan.key, plan.fresh)
        found: dict[str, int] = {}
        for topic in plan.topics:
            producer = self.client.numbered_producer(topic, producer_id)
            try:
                # The lock of the staging directory excludes other writers; the appender claims the name
                # later.
                found[topic] = producer.settled(claims=False).producer_seq
            except TopicNotFound:
                if not self.create_topics:
                    raise unknown_topic(topic) from None
                self.client.topics.create(topic, exist_ok=True)
                found[topic] = 0
            finally:
                producer.close()
        return found

    def _last_appended(self, plan: SinkCommitPlan) -> dict[str, int]:
        """Return the writer's highest settled number by topic, which no frame in flight can exceed any more.

        Creates no topics: of a deleted topic nothing is left.
        """
        producer_id = producer_of(plan.key, plan.fresh)
        found: dict[str, int] = {}
        for topic in plan.topics:
            producer = self.client.numbered_producer(topic, producer_id)
            try:
                found[topic] = producer.settled().producer_seq
            except TopicNotFound:
                found[topic] = 0
            finally:
                producer.close()
        return found

    def _discarded_topics(self, plan: SinkCommitPlan, highest: Mapping[str, int]) -> Iterator[DiscardedTopic]:
        try:
            tables = self._tables(plan.files)
        except (DiskError, CorruptData):
            for topic in plan.topics:
                appended = 0 if highest[topic] < plan.first else None
                yield DiscardedTopic(topic, None, appended, appended)
            return
        numbers = plan.numbers()
        for topic in plan.topics:
            rows, least, most = 0, 0, 0
            for table in tables:
                if topic in table.file.topics:
                    own = table.topics == table.file.topics.index(topic)
                    records, sent = table.records[own], numbers[table.span][own]
                    rows += int(records.sum())
                    least += int(records[sent <= highest[topic] - FRAMES_IN_FLIGHT].sum())
                    most += int(records[sent <= highest[topic]].sum())
            yield DiscardedTopic(topic, rows, least, most)

    def _clean(self) -> None:
        try:
            gone = self.staging.clean()
        except RinglogError as e:
            # The batch is written. Leftovers only use space, and a later commit removes them.
            log.warning("orphaned staged files could not be deleted: %s", e)
            return
        if gone:
            log.info("deleted %d orphaned staged files", len(gone))


@contextmanager
def _named(plan: SinkCommitPlan) -> Iterator[None]:
    """Add writer and batch of the plan, which stays open, to an error."""
    try:
        yield
    except RinglogError as e:
        e.detail.setdefault("writer", writer_file_id(plan.key))
        e.detail.setdefault("batch", plan.batch)
        raise


@dataclass(frozen=True, slots=True)
class _AppendOutcome:
    plan: SinkCommitPlan
    repeats: int


class Appender:
    """Appends the frames of one plan, in any state of progress."""

    def __init__(
        self,
        committer: Committer,
        locked: LockedWriter,
        plan: SinkCommitPlan,
        tables: Sequence[StagedFrames],
    ) -> None:
        """`tables`: the frames of the plan's files, in order."""
        self._committer = committer
        self._locked = locked
        self._plan = plan
        self._tables = tables
        self._producers: dict[str, NumberedProducer] = {}
        self._in_flight: deque[tuple[int, int, Ticket]] = deque()
        self._bytes = 0
        self._repeats = 0
        self._settled: NDArray[np.bool_] = np.zeros(plan.frames, dtype=np.bool_)
        self._refused: list[tuple[int, str]] = []
        self._topic_of: dict[int, str] = {}

    def run(self, highest: Mapping[str, int]) -> _AppendOutcome:
        """Append all frames. `highest`: settled numbers by topic; empty for a plan that was never sent.

        Raises permanent refusals of the engine, temporary refusals that last longer than REFUSAL_TIMEOUT_S,
        and timeouts.
        """
        producer_id = producer_of(self._plan.key, self._plan.fresh)
        try:
            for topic in self._plan.topics:
                self._producers[topic] = self._committer.client.numbered_producer(
                    topic, producer_id, durability=self._committer.durability
                )
            if highest:
                self._skip_settled(highest)
            self._send_rounds()
        finally:
            for producer in self._producers.values():
                producer.close()
        return _AppendOutcome(self._plan, self._repeats)

    def _send_rounds(self) -> None:
        clock = self._committer.staging.clock
        patient_until = clock.monotonic_ns() + int(REFUSAL_TIMEOUT_S * 1e9)
        while True:
            before = int(self._settled.sum())
            reason = self._send_round()
            if reason is None:
                return
            if int(self._settled.sum()) > before:
                patient_until = clock.monotonic_ns() + int(REFUSAL_TIMEOUT_S * 1e9)
            elif clock.monotonic_ns() >= patient_until:
                raise reason
            self._renumber()
            clock.sleep(PAUSE_S)

    def _send_round(self) -> RinglogError | None:
        """Send the unsettled frames in order of numbers; return the refusal that ended the round, or None."""
        self._refused.clear()
        reason: RinglogError | None = None
        try:
            for index, topic, frame in self._unsettled():
                size, number = len(frame), self._number(index)
                while self._must_wait(number, size):
                    reason = self._settle_oldest() or reason
                if reason is not None:
                    break
                ticket = self._producers[topic].send(frame, number)
                self._topic_of[index] = topic
                self._in_flight.append((index, size, ticket))
                self._bytes += size
        finally:
            # In every case, the result of each sent frame must be known before the next step.
            while self._in_flight:
                reason = self._settle_oldest() or reason
        if reason is not None and not isinstance(reason, _LATER):
            raise reason
        return reason

    def _must_wait(self, number: int, size: int) -> bool:
        """Return whether this frame must wait.

        Counts numbers, not frames, because a resume counts numbers.
        """
        if not self._in_flight:
            return False
        lowest = self._number(self._in_flight[0][0])
        return number - lowest >= FRAMES_IN_FLIGHT or self._bytes + size > BYTES_IN_FLIGHT

    def _settle_oldest(self) -> RinglogError | None:
        """Wait for the result of the oldest frame in flight; return its error, or None if it is settled."""
        index, size, ticket = self._in_flight.popleft()
        self._bytes -= size
        topic = self._topic_of.pop(index)
        try:
            appended = ticket.result()
        except RinglogError as e:
            self._refused.append((index, topic))
            return e
        self._settled[index] = True
        self._repeats += appended.deduped
        stop_points.hit("sink_mid_append")
        return None

    def _number(self, index: int) -> int:
        return self._plan.moved.get(index, self._plan.first + index)

    def _renumber(self) -> None:
        """Assign new numbers to refused frames below a settled number: theirs can never be appended."""
        highest = {topic: self._producers[topic].settled().producer_seq for _, topic in self._refused}
        stuck = [index for index, topic in self._refused if self._number(index) < highest[topic]]
        if not stuck:
            return
        plan = self._plan
        moved = {index: plan.next + at for at, index in enumerate(sorted(stuck))}
        stop_points.hit("sink_before_amend")
        plan = msgspec.structs.replace(plan, moved=plan.moved | moved, next=plan.next + len(moved))
        self._locked.save_plan(plan)
        self._plan = plan

    def _skip_settled(self, highest: Mapping[str, int]) -> None:
        """Mark frames as settled that are FRAMES_IN_FLIGHT below the topic's highest settled number."""
        sure = {topic: number - FRAMES_IN_FLIGHT for topic, number in highest.items()}
        numbers = self._plan.numbers()
        for table in self._tables:
            bounds = np.array([sure[topic] for topic in table.file.topics], dtype=np.int64)
            self._settled[table.span] = numbers[table.span] <= bounds[table.topics]

    def _unsettled(self) -> Iterator[tuple[int, str, bytearray]]:
        """Yield (index, topic, private copy) of each unsettled frame, in order of numbers."""
        moved = self._plan.moved
        for table in self._tables:
            rows = np.flatnonzero(~self._settled[table.span])
            if moved:
                rows = rows[~np.isin(rows + table.first, list(moved))]
            yield from table.read(rows)
        for index in sorted(moved, key=moved.__getitem__):
            if not self._settled[index]:
                table = next(each for each in reversed(self._tables) if each.first <= index)
                yield from table.read(np.array([index - table.first]))


def unknown_topic(topic: str) -> TopicNotFound:
    """Return the error for a row whose topic does not exist."""
    return TopicNotFound(
        "no such topic; create it, or set createTopics=true", topic=topic, hint="createTopics"
    )
