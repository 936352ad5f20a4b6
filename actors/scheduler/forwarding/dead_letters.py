"""Moves exhausted jobs to their dead-letter topic.

The shard of a queue lists its exhausted jobs. Scheduler 0 copies them, and requests their deletion only after
the copies are durable in the dead-letter topic (Q11). A crash in between loses nothing. After a crash jobs
are copied again, and the target's shard suppresses the duplicates: each copy is a frame of its own. Its
producer id is derived from queue, epoch and seq. The shard appends a frame of a known producer and number
only once (W4), as long as it remembers the producer.

If a target refuses copies, only its own jobs are delayed. They stay exhausted and are retried with backoff.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from ringlog import stop_points
from ringlog.actors.scheduler.forwarding.dead_letter_stamps import dead_letter_columns
from ringlog.actors.scheduler.forwarding.sources import EngineConnection
from ringlog.board.board import BoardError, BoardUnstable
from ringlog.board.layout import QueueField
from ringlog.board.processes import shard_slot
from ringlog.client.leases.dead_letters import (
    dead_letter_targets_of,
    split_for_move,
    walk_dead_letter_targets,
)
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import Record
from ringlog.client.read.record_batches import RecordBatch
from ringlog.clock import Clock
from ringlog.envelope import messages as m
from ringlog.errors import InvalidRequest, NotConnected, NotReady, RinglogError, TopicNotFound
from ringlog.frame.codec import frame
from ringlog.frame.settle_entry import WORDS, entry_error
from ringlog.limits import (
    DEAD_LETTERS_PAUSE_S_MAX,
    DEAD_LETTERS_PER_MOVE,
    DEAD_LETTERS_POLL_MS,
    DEAD_LETTERS_READ_BYTES,
    DEAD_LETTERS_RESCAN_S,
)
from ringlog.link.futures import Steps, run_steps
from ringlog.link.local_links import LocalLinks
from ringlog.logs import log_event
from ringlog.placement import home_shard
from ringlog.types import SESSION_BIT, Durability

log: logging.Logger = logging.getLogger("ringlog.scheduler")

PAUSE_S_MIN = 0.25


class JobLeft(NamedTuple):
    """A job that could not be moved, and why."""

    seq: int
    error: RinglogError


class DeadLetters:
    """The mover of dead letters of all shards, in scheduler 0."""

    def __init__(
        self, links: LocalLinks, connection: EngineConnection, clock: Clock, record_bytes: int
    ) -> None:
        """`record_bytes` is the maximum size of a record that shards accept."""
        self._record_bytes = record_bytes
        self._links, self._connection, self._clock = links, connection, clock
        self._is_closed = False

    def begin(self, shards: int) -> None:
        """Start to watch these shards."""
        for shard in range(shards):
            run_steps(self._watch_shard(shard))

    def close(self) -> None:
        """Start no further passes."""
        self._is_closed = True

    def _watch_shard(self, shard: int) -> Steps[None]:
        """Move the exhausted jobs of a shard until `close`.

        Start a pass when its counter on the board has changed.
        """
        last_counter, scanned_ns, pause_s = -1, 0, PAUSE_S_MIN
        while not self._is_closed:
            counter = self._exhausted_counter(shard)
            now_ns = self._clock.monotonic_ns()
            if counter == last_counter and now_ns - scanned_ns < DEAD_LETTERS_RESCAN_S * 1e9:
                yield self._connection.pause(DEAD_LETTERS_POLL_MS / 1_000)
                continue
            is_done = yield from self._move_all(shard)
            if is_done:
                # Jobs that were exhausted during the pass have changed the counter again.
                last_counter, scanned_ns, pause_s = counter, now_ns, PAUSE_S_MIN
            else:
                yield self._connection.pause(pause_s)
                pause_s = min(2 * pause_s, DEAD_LETTERS_PAUSE_S_MAX)

    def _exhausted_counter(self, shard: int) -> int:
        try:
            return self._links.board.process(shard_slot(shard)).get(QueueField.EXHAUSTED)
        except (BoardError, BoardUnstable, NotConnected):
            return -1

    def _move_all(self, shard: int) -> Steps[bool]:
        """Move the exhausted jobs of all queues and groups of a shard; return False if some are left."""
        after, is_done = 0, True
        while True:
            try:
                exhausted: m.ExhaustedReply = yield from self._connection.ask(shard, m.ListExhausted(after))
            except RinglogError:
                return False
            if not exhausted.topic:
                return is_done
            try:
                moved, left = yield from self._move(shard, exhausted)
            except RinglogError as e:
                # This includes a lost reply. The next pass finds all jobs in their current state.
                moved, left = 0, JobLeft(exhausted.runs[0][0], e)
            if left is not None:
                is_done = False
                log_event(
                    log, logging.WARNING, "dead letters not moved, will retry", topic=exhausted.topic,
                    group=exhausted.group, target=exhausted.dead_letter, seq=left.seq, reason=str(left.error),
                )  # fmt: skip
            if not moved:
                # The same request would list the same jobs. After progress it lists further ones.
                after = exhausted.number or exhausted.topic_id

    def _move(self, shard: int, exhausted: m.ExhaustedReply) -> Steps[tuple[int, JobLeft | None]]:
        """Copy the jobs, and confirm those whose copies are durable.

        The shard then deletes the jobs of a queue. Records of a group stay in their topic and are done for
        the group. Returns the number of moved jobs, and the first job that is left, or None. Raises
        RinglogError if no job can be moved at present.
        """
        moved = 0
        left: JobLeft | None = None
        times = {first + n: often for first, count, often in exhausted.runs for n in range(count)}
        rows = zip(exhausted.runs, exhausted.tokens, strict=True) if exhausted.group else ()
        tokens = {first + n: token + n for (first, count, _), token in rows for n in range(count)}
        target = yield from self._target(exhausted.dead_letter)
        if target.topic_id == exhausted.topic_id:
            raise InvalidRequest(
                "a topic cannot be its own dead-letter topic: set dead_letter to another topic",
                topic=exhausted.topic,
            )  # fmt: skip
        yield from self._require_no_cycle(exhausted.topic, exhausted.dead_letter)
        # Jobs can be larger than the present limit of a record.
        step = min(max(DEAD_LETTERS_READ_BYTES // self._record_bytes, 1), DEAD_LETTERS_PER_MOVE)
        ranges = [
            (at, min(step, first + count - at))
            for first, count, _ in exhausted.runs
            for at in range(first, first + count, step)
        ]
        for first, count in ranges:
            try:
                # Jobs that no longer exist were deleted meanwhile, and their shard has removed them from its
                # list.
                parts = split_for_move((yield from self._read(exhausted, first, count)))
            except RinglogError as e:
                left = left or JobLeft(first, e)
                continue
            for part in parts:
                try:
                    done, refused = yield from self._append(exhausted, target, part, times, tokens)
                    left = left or refused
                    if not done:
                        continue
                    stop_points.hit("dead_letter_after_append")
                    reply: m.ConfirmReply = yield from self._connection.ask(
                        shard, _confirmation(exhausted, done, tokens)
                    )
                    moved += reply.moved
                except RinglogError as e:
                    left = left or JobLeft(part[0].seq, e)
        if left is None and not moved:
            raise NotReady("exhausted jobs cannot be read yet, retry later", topic=exhausted.topic)
        return moved, left

    def _read(self, exhausted: m.ExhaustedReply, first: int, count: int) -> Steps[list[Record]]:
        pieces: list[RecordBatch] = []
        source = LocalSource(
            self._connection.for_topic(exhausted.topic_id), exhausted.topic, clock=self._clock
        )
        try:
            yield from source.read_leased(first, first + count - 1, exhausted.epoch, pieces)
        finally:
            source.close()
        return [record for piece in pieces for record in piece.records()]

    def _target(self, name: str) -> Steps[m.TopicInfo]:
        """Return the dead-letter topic; create it with the default configuration if it does not exist."""
        message: m.Message = m.TopicResolve(name)
        try:
            return (yield from self._ask_home_shard(name, message))
        except TopicNotFound:
            return (yield from self._ask_home_shard(name, m.TopicPut(name, {}, "create")))

    def _require_no_cycle(self, topic: str, target: str) -> Steps[None]:
        """Raise if dead letters of the topic would return to it through other dead-letter topics.

        Each topic is checked when it is created, but two topics can be created at the same time.
        """
        walk = walk_dead_letter_targets(topic, target)
        try:
            name = next(walk)
            while True:
                name = walk.send((yield from self._targets_of(name)))
        except StopIteration:
            return

    def _targets_of(self, name: str) -> Steps[tuple[str, ...]]:
        try:
            info = yield from self._ask_home_shard(name, m.TopicResolve(name))
            listed: m.GroupListReply = yield from self._connection.ask(info.shard, m.GroupList(name))
        except TopicNotFound:
            return ()
        return dead_letter_targets_of(info.config, listed.groups)

    def _ask_home_shard(self, name: str, message: m.Message) -> Steps[m.TopicInfo]:
        info: m.TopicInfo = yield from self._connection.ask(home_shard(name, self._links.shards), message)
        if not info.topic_id:
            info = yield from self._connection.ask(info.shard, message)
        if not info.topic_id:
            raise NotReady("the shards do not agree on the owner of this topic: retry later", topic=name)
        return info

    def _append(
        self, exhausted: m.ExhaustedReply, target: m.TopicInfo, records: Sequence[Record],
        times: dict[int, int], tokens: dict[int, int],
    ) -> Steps[tuple[list[int], JobLeft | None]]:  # fmt: skip
        """Append a copy of each record.

        Returns the seqs whose copies are durable, and the first record that was refused, or None.
        """
        left: list[JobLeft] = []
        seqs: list[int] = []
        sent = bytearray()
        for record in records:
            # One by one: a job that cannot be copied does not hold up the others.
            try:
                sent += frame(
                    dead_letter_columns(record, exhausted, times[record.seq], self._record_bytes),
                    topic_id=target.topic_id,
                    producer_id=copy_producer_id(
                        exhausted.topic_id, exhausted.epoch, record.seq, exhausted.number,
                        tokens.get(record.seq, 0),
                    ),
                    producer_seq=1, durability=Durability.EPHEMERAL,
                )  # fmt: skip
                seqs.append(record.seq)
            except RinglogError as e:
                left.append(JobLeft(record.seq, e))
        done: list[int] = []
        if seqs:
            message = m.Append(target.topic, len(seqs), disable_backpressure=True)
            reply: m.Appended = yield from self._connection.ask(target.shard, message, sent)
            entries = np.frombuffer(reply.entries, dtype=np.uint64).reshape(-1, WORDS)
            errors = [entry_error(entry, target.topic) for entry in entries]
            left += [
                JobLeft(seq, error) for seq, error in zip(seqs, errors, strict=True) if error is not None
            ]
            done = [seq for seq, error in zip(seqs, errors, strict=True) if error is None]
        return done, left[0] if left else None


def copy_producer_id(topic_id: int, epoch: int, seq: int, group: int = 0, token: int = 0) -> int:
    """Return the producer id of a job's copy.

    It is always the same for one job of one epoch of a queue. For a consumer group it is the same for one
    record that was delivered under one lease.
    """
    of_group = f" {group} {token}" if group else ""
    return SESSION_BIT | xxhash.xxh3_64_intdigest(f"dead letter {topic_id} {epoch} {seq}{of_group}".encode())


def _confirmation(exhausted: m.ExhaustedReply, done: Sequence[int], tokens: dict[int, int]) -> m.Message:
    """Return the confirmation that the copies of these jobs are durable."""
    seqs = np.array(done, dtype="<u8").tobytes()
    given = np.array([tokens[seq] for seq in done], dtype="<u8").tobytes() if exhausted.group else b""
    return m.ConfirmDeadLettered(exhausted.topic, exhausted.topic_id, seqs, exhausted.number, given)
