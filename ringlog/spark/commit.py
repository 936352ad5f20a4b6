"""Committing a batch of staged frames: the plan, the appends, the end. Runs on the driver alone.

    plan.batch >  batch          nothing to do, the new files are dropped
    plan.batch == batch, done    the same: Spark repeats what it did not hear the end of
    plan.batch == batch, open    the old plan is resumed, the new files are dropped
    plan.batch <  batch          (an open one is finished first) a new plan, then its frames

Frame i of a plan has the number first + i, for ever, so that the engine recognises it. Numbers are sent in
rising order, and none that is FRAMES_IN_FLIGHT above one whose fate is open. So after any crash every frame
that is as far below its topic's highest settled number is settled, and the others are sent again: a repeat is
answered as one. A frame that was refused while later ones were not can never be appended under
its number (the engine says NotReady); it gets a new one, which the plan holds durably before it is sent.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ringlog import stop_points
from ringlog.client.client import Client
from ringlog.client.ticket import Ticket
from ringlog.client.write.explicit_sequence_producer import NumberedProducer
from ringlog.client.write.producer_options import named_producer_id
from ringlog.errors import CorruptData, NotReady, RinglogError, ShuttingDown, Throttled, TopicNotFound
from ringlog.frame import layout
from ringlog.frame.batch import scan
from ringlog.limits import DEDUP_FRAMES_PER_PRODUCER, FRAME_BYTES_MAX
from ringlog.spark.errors import OptionError, StagingLost
from ringlog.spark.staging import LockedWriter, SinkCommitPlan, StagedFile, Staging, writer_file_id
from ringlog.storage.disk import Disk
from ringlog.types import SESSION_BIT, Durability

FRAMES_IN_FLIGHT = 512
"""Less than this between the lowest number in flight and the highest: what a resume has to send again."""
BYTES_IN_FLIGHT = 32 << 20
READ_BYTES = 8 << 20
REFUSAL_TIMEOUT_S = 60.0
"""How long refusals for the moment are borne with no frame settled between them."""
PAUSE_S = 0.05
CLEAN_EVERY = 16
"""Batches between two looks for leftovers."""
_LATER = (Throttled, NotReady, ShuttingDown)
assert FRAMES_IN_FLIGHT * 4 < DEDUP_FRAMES_PER_PRODUCER, "the engine knows every frame that may be sent again"
log = logging.getLogger("ringlog.spark")


@dataclass(frozen=True, slots=True)
class WriterKey:
    """Who writes: `text` names it for ever; a `fresh` one was drawn for one write and is then forgotten."""

    text: str
    fresh: bool = False
    before: str = ""
    """What an earlier version called it and others: what was written under that is not repeated."""

    @property
    def producer_id(self) -> int:
        """The producer its frames are written under. One of a fresh key may be forgotten by the engine."""
        return producer_of(self.text, self.fresh)


def producer_of(key: str, fresh: bool) -> int:
    """Producer id of a writer's key: one for each query, so that the engine's table stays small (SK-24)."""
    return named_producer_id(f"spark/{key}") | (SESSION_BIT if fresh else 0)


@dataclass(frozen=True, slots=True)
class BatchCommitReport:
    """What a commit did. `outcome`: nothing, written, resumed or repeated."""

    outcome: str
    batch: int
    rows: int = 0
    frames: int = 0
    repeats: int = 0
    """Frames that the engine had already."""
    moved: int = 0
    """Frames that got another number."""


def abort(staging: Staging, key: WriterKey, files: Sequence[StagedFile]) -> list[str]:
    """Delete those of the files that no plan names (SK-22): a commit may have failed after planning them.

    Needs no engine, which may be why the write failed. Returns the names; raises NotReady while another
    process commits for this writer.
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

    def commit(self, key: WriterKey, batch: int, files: Sequence[StagedFile]) -> BatchCommitReport:
        """Append these files' frames as batch `batch` of this writer, once however often it is called.

        Raises TopicNotFound before anything is appended, StagingLost, CorruptData, and what the engine
        refuses or does not answer; then the plan stays open and the next call goes on with it.
        """
        ordered = sorted(
            (file for file in files if file.frames), key=lambda file: (file.partition, file.name)
        )
        if not ordered:
            return BatchCommitReport("nothing", batch)
        names = [file.name for file in ordered]
        with self.staging.lock_writer(key.text) as locked:
            plan = locked.plan()
            if plan is None and key.before and self._is_written_before(key.before, batch, ordered):
                locked.delete_files(names)
                return BatchCommitReport("repeated", batch)
            if plan is not None and plan.batch < batch and not plan.done:
                plan = self._finish(locked, plan).plan
            if plan is not None and plan.batch >= batch:
                return self._resume_batch(locked, plan, batch, ordered)
            self._drop_done(locked, plan)
            stop_points.hit("sink_before_plan")
            plan = self._new_plan(locked, plan, key, batch, tuple(ordered))
            stop_points.hit("sink_after_plan")
            end = self._finish(locked, plan, is_new=True)
        if batch % CLEAN_EVERY == 0:
            self._clean()
        return BatchCommitReport("written", batch, plan.rows, plan.frames, end.repeats, len(end.plan.moved))

    def _is_written_before(self, before: str, batch: int, files: Sequence[StagedFile]) -> bool:
        """Was this batch written by a version that knew the writer as `before`, whatever its topic?

        It kept the topics of the last batch alone: of another topic nothing can be said, and nothing was
        written if one was written before it in the same batch.
        """
        with self.staging.lock_writer(before) as locked:
            plan = locked.plan()
            topics = {topic for file in files for topic in file.topics}
            if plan is None or plan.batch < batch or not topics & set(plan.topics):
                return False
            if not plan.done:
                self._finish(locked, plan)
            return True

    def _resume_batch(
        self, locked: LockedWriter, plan: SinkCommitPlan, batch: int, files: Sequence[StagedFile]
    ) -> BatchCommitReport:
        """The batch has a plan, or is behind it: what was staged now is a second copy."""
        named = {file.name for file in plan.files}
        topics = {topic for file in files for topic in file.topics}
        locked.delete_files(file.name for file in files if file.name not in named)
        if plan.done or plan.batch > batch:
            self._drop_done(locked, plan)
            if plan.batch == batch and plan.topics and not set(plan.topics) & topics:
                raise OptionError(
                    "this txnVersion was written already, to other topics: give each output a txnAppId of "
                    "its own",
                    version=batch, written=list(plan.topics)[:8], now=sorted(topics)[:8],
                )  # fmt: skip
            return BatchCommitReport("repeated", batch)
        end = self._finish(locked, plan)
        return BatchCommitReport("resumed", batch, plan.rows, plan.frames, end.repeats, len(end.plan.moved))

    def recover(self) -> list[BatchCommitReport]:
        """Finish every open plan whose writer is not at it; harmless to repeat (SK-29)."""
        done = []
        for plan in self.staging.open_plans():
            try:
                with self.staging.lock_writer(plan.key, wait_s=0) as locked:
                    now = locked.plan()
                    if now is None or now.done:
                        continue
                    end = self._finish(locked, now)
            except NotReady as e:
                if "lock" not in e.detail:
                    raise
                continue  # Its writer is alive and commits.
            done.append(
                BatchCommitReport(
                    "resumed", now.batch, now.rows, now.frames, end.repeats, len(end.plan.moved)
                )
            )
        self._clean()
        return done

    # -- inside -------------------------------------------------------------------------------------

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
            key.text, batch, first, first + sum(file.frames for file in files), files, fresh=key.fresh
        )
        for topic, settled in self._settled(plan).items():
            if settled >= first:
                raise StagingLost(
                    "the engine has frames of this writer that the staging directory does not know: it was "
                    "lost or replaced. Put it back, or start the query with a new checkpoint",
                    topic=topic, settled=settled, first=first, staging=self.staging.directory,
                    writer=writer_file_id(key.text),
                )  # fmt: skip
        locked.sync_names()
        locked.save_plan(plan)
        return plan

    def _finish(self, locked: LockedWriter, plan: SinkCommitPlan, *, is_new: bool = False) -> _AppendOutcome:
        """Append, mark as done, delete. Of a plan that is new nothing can have been appended."""
        end = Appender(self, locked, plan).run({} if is_new else self._settled(plan))
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
        """The highest number the engine settled of the plan's writer, by topic; may make absent ones."""
        producer_id = producer_of(plan.key, plan.fresh)
        found: dict[str, int] = {}
        for topic in plan.topics:
            producer = self.client.numbered_producer(topic, producer_id)
            try:
                # The staging directory's lock says that nobody else writes; who appends then claims the name.
                found[topic] = producer.settled(claims=False).producer_seq
            except TopicNotFound:
                if not self.create_topics:
                    raise unknown_topic(topic) from None
                self.client.topics.create(topic, exist_ok=True)
                found[topic] = 0
            finally:
                producer.close()
        return found

    def _clean(self) -> None:
        try:
            gone = self.staging.clean()
        except RinglogError as e:
            # The batch is written; leftovers cost space, and the next commit looks for them again.
            log.warning("staged files that nobody needs could not be removed: %s", e)
            return
        if gone:
            log.info("removed %d staged files that no plan names", len(gone))


@dataclass(frozen=True, slots=True)
class _AppendOutcome:
    plan: SinkCommitPlan
    repeats: int


@dataclass(slots=True)
class _Table:
    """Where each frame of one staged file lies: (frames,) offsets and sizes in bytes, topics by index."""

    file: StagedFile
    first: int
    """Index in the plan of the file's first frame."""
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    topics: NDArray[np.int64]


class Appender:
    """Appends the frames of one plan, whatever of them is there already."""

    def __init__(self, committer: Committer, locked: LockedWriter, plan: SinkCommitPlan) -> None:
        self._committer = committer
        self._locked = locked
        self._plan = plan
        self._disk = committer.staging.disk
        self._producers: dict[str, NumberedProducer] = {}
        self._in_flight: deque[tuple[int, int, Ticket]] = deque()
        self._bytes = 0
        self._repeats = 0
        self._settled: NDArray[np.bool_] = np.zeros(plan.frames, dtype=np.bool_)
        self._refused: list[tuple[int, str]] = []
        self._topic_of: dict[int, str] = {}

    def run(self, highest: Mapping[str, int]) -> _AppendOutcome:
        """Append all; `highest` settled numbers by topic, none for a plan of which nothing was sent.

        Raises what the engine refuses for good, what it refuses for too long, and what it does not answer.
        """
        producer_id = producer_of(self._plan.key, self._plan.fresh)
        try:
            tables = self._tables()
            for topic in self._plan.topics:
                self._producers[topic] = self._committer.client.numbered_producer(
                    topic, producer_id, durability=self._committer.durability
                )
            if highest:
                self._skip_settled(tables, highest)
            self._rounds(tables)
        finally:
            for producer in self._producers.values():
                producer.close()
        return _AppendOutcome(self._plan, self._repeats)

    def _rounds(self, tables: Sequence[_Table]) -> None:
        clock = self._committer.staging.clock
        patient_until = clock.monotonic_ns() + int(REFUSAL_TIMEOUT_S * 1e9)
        while True:
            before = int(self._settled.sum())
            reason = self._round(tables)
            if reason is None:
                return
            if int(self._settled.sum()) > before:
                patient_until = clock.monotonic_ns() + int(REFUSAL_TIMEOUT_S * 1e9)
            elif clock.monotonic_ns() >= patient_until:
                raise reason
            self._renumber()
            clock.sleep(PAUSE_S)

    def _round(self, tables: Sequence[_Table]) -> RinglogError | None:
        """Send what is not settled, in the order of numbers; the refusal that ended it, None = all is in."""
        self._refused.clear()
        reason: RinglogError | None = None
        try:
            for index, topic, frame in self._unsettled(tables):
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
            # Whatever happened: the fate of everything that was sent is known before the next step.
            while self._in_flight:
                reason = self._settle_oldest() or reason
        if reason is not None and not isinstance(reason, _LATER):
            raise reason
        return reason

    def _must_wait(self, number: int, size: int) -> bool:
        """May this frame not be sent yet? Numbers, not frames, are what the resume counts by."""
        if not self._in_flight:
            return False
        lowest = self._number(self._in_flight[0][0])
        return number - lowest >= FRAMES_IN_FLIGHT or self._bytes + size > BYTES_IN_FLIGHT

    def _settle_oldest(self) -> RinglogError | None:
        """The fate of the oldest frame in flight: None = settled."""
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
        """Give frames new numbers that can never be appended under theirs: later ones are settled."""
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

    def _skip_settled(self, tables: Sequence[_Table], highest: Mapping[str, int]) -> None:
        """Mark what is far enough below the highest settled number of its topic (see the module's words)."""
        sure = {topic: number - FRAMES_IN_FLIGHT for topic, number in highest.items()}
        numbers = np.arange(self._plan.first, self._plan.first + self._plan.frames)
        for index, number in self._plan.moved.items():
            numbers[index] = number
        for table in tables:
            bounds = np.array([sure[topic] for topic in table.file.topics], dtype=np.int64)
            span = slice(table.first, table.first + table.file.frames)
            self._settled[span] = numbers[span] <= bounds[table.topics]

    # -- reading the files --------------------------------------------------------------------------

    def _tables(self) -> list[_Table]:
        """Verify every file, whole, before the first frame of any is sent."""
        found: list[_Table] = []
        first = 0
        for file in self._plan.files:
            with _opened(self._disk, self._path(file)) as fd:
                found.append(frame_table(self._disk, fd, self._path(file), file, first))
            first += file.frames
        return found

    def _path(self, file: StagedFile) -> str:
        return os.path.join(self._locked.staging.directory, file.name)

    def _unsettled(self, tables: Sequence[_Table]) -> Iterator[tuple[int, str, bytearray]]:
        """(index, topic, private copy) of each frame that is not settled, in the order of numbers."""
        moved = self._plan.moved
        for table in tables:
            span = slice(table.first, table.first + table.file.frames)
            rows = np.flatnonzero(~self._settled[span])
            if moved:
                rows = rows[~np.isin(rows + table.first, list(moved))]
            yield from self._frames(table, rows)
        for index in sorted(moved, key=moved.__getitem__):
            if not self._settled[index]:
                table = next(each for each in reversed(tables) if each.first <= index)
                yield from self._frames(table, np.array([index - table.first]))

    def _frames(self, table: _Table, rows: NDArray[np.int64]) -> Iterator[tuple[int, str, bytearray]]:
        if not len(rows):
            return
        with _opened(self._disk, self._path(table.file)) as fd:
            for row in rows.tolist():
                frame = bytearray(int(table.sizes[row]))
                if self._disk.read_into(fd, frame, int(table.offsets[row])) != len(frame):
                    raise CorruptData("a staged file ends early", file=self._path(table.file))
                yield table.first + row, table.file.topics[int(table.topics[row])], frame


class _opened:  # noqa: N801  used as a function
    """An open file of a Disk for the length of a block."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path, self._fd = disk, path, -1

    def __enter__(self) -> int:
        self._fd = self._disk.open_read(self._path)
        return self._fd

    def __exit__(self, *_: object) -> None:
        self._disk.close(self._fd)


def frame_table(disk: Disk, fd: int, path: str, file: StagedFile, first: int) -> _Table:
    """Read a staged file through, compare it with what its task said, find its frames; raises CorruptData."""
    digest = xxhash.xxh3_64()
    offsets: list[NDArray[np.int64]] = []
    sizes: list[NDArray[np.int64]] = []
    topics: list[NDArray[np.int64]] = []
    at, rows, want = 0, 0, READ_BYTES
    buffer = np.empty(0, dtype="<u8")  # One for all that is read: fresh memory costs as much as reading.
    while at < file.size:
        count = min(want, file.size - at) // 8
        if len(buffer) < count:
            buffer = np.empty(count, dtype="<u8")
        words = buffer[:count]
        got = disk.read_into(fd, words, at)
        found = scan(words) if got == 8 * count and got else None
        if found is None or (not len(found) and want >= FRAME_BYTES_MAX):
            raise CorruptData("a staged file does not hold the frames it should", file=path, offset=at)
        if not len(found):
            want = FRAME_BYTES_MAX  # One frame is larger than what was read.
            continue
        digest.update(words[: found.stop // 8].data)
        offsets.append(found.offsets + at)
        sizes.append(found.total_bytes)
        topics.append(found.words[:, layout.W_TOPIC].astype(np.int64))
        rows += int((found.words[:, layout.W_COUNT_EPOCH] & np.uint64(0xFFFFFFFF)).sum())
        at, want = at + found.stop, READ_BYTES
    table = _Table(file, first, *(np.concatenate(each) for each in (offsets, sizes, topics)))
    is_right = digest.intdigest() == file.digest and rows == file.rows and len(table.offsets) == file.frames
    if not is_right or disk.size(fd) != file.size or int(table.topics.max()) >= len(file.topics):
        raise CorruptData("a staged file is not what its task wrote", file=path, bytes=disk.size(fd))
    return table


def unknown_topic(topic: str) -> TopicNotFound:
    """The error of a row whose topic does not exist."""
    return TopicNotFound(
        "no such topic; create it, or set createTopics=true", topic=topic, hint="createTopics"
    )
