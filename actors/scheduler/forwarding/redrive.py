"""Redrive: dead letters return to their queue or group, as many at once as a client names.

A dead letter of a queue is copied to the queue. It is deleted only after the copy is durable there (Q9). A
crash in between leaves a dead letter that is already copied. A repeated copy is recognised: each copy is a
frame of its own, whose producer id is derived from the dead letter's topic, epoch and seq. The queue's shard
appends a frame of a known producer and number only once (W4), as long as it remembers the producer.

Records of a group never left their topic, which has other readers. The group delivers them once more. The
same producer id identifies the dead letter there. The group remembers more of these ids than one request
contains, so it recognises a repeat.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from pyroaring import BitMap64

from ringlog import stop_points
from ringlog.actors.scheduler.forwarding.sources import EngineConnection
from ringlog.client.leases.dead_letters import (
    dead_letter_of,
    dead_letter_of_group,
    is_dead_letter_of,
    split_for_move,
    src_seq_of_dead_letter,
)
from ringlog.client.read.local_source import LocalSource
from ringlog.client.read.pages import Cursor, Page, Record
from ringlog.client.read.paging import read_page
from ringlog.clock import Clock
from ringlog.envelope import messages as m
from ringlog.errors import BatchTooLarge, InvalidRequest, NotAQueue, NotReady, Refused, TopicNotFound
from ringlog.frame.codec import frame
from ringlog.frame.columns import encode_records
from ringlog.frame.settle_entry import FLAG_DEDUPED, FLAGS_SHIFT, S_COUNT_STATUS, WORDS, entry_error
from ringlog.leases.spans import spans_of
from ringlog.limits import DEAD_LETTERS_PER_MOVE, DEAD_LETTERS_READ_BYTES, GROUP_DEAD_LETTERS_PER_MOVE
from ringlog.link.futures import Steps
from ringlog.link.local_links import LocalLinks
from ringlog.placement import home_shard
from ringlog.topic.config import QUEUE
from ringlog.types import SESSION_BIT, Durability


class DeadLetterRedriver:
    """Serves the redrive requests, in scheduler 0."""

    def __init__(
        self, links: LocalLinks, connection: EngineConnection, clock: Clock, record_bytes: int
    ) -> None:
        """`record_bytes` is the maximum size of a record that shards accept."""
        self._links, self._connection, self._clock = links, connection, clock
        # Letters can be larger than the present limit of a record.
        self._read_at_once = min(max(DEAD_LETTERS_READ_BYTES // record_bytes, 1), DEAD_LETTERS_PER_MOVE)

    def redrive(self, request: m.RedriveDeadLetters) -> Steps[m.Message]:
        """Redrive the named dead letters, if they exist and are of this queue or this group."""
        seqs = _numbers(request)
        topic = yield from self._topic(request.topic)
        target = yield from self._dead_letter_topic(topic, request.group)
        try:
            dead = yield from self._topic(target)
        except TopicNotFound:
            return m.DeadLettersRedriven(topic.topic, 0, 0)
        sums = np.zeros(3, np.int64)
        for at in range(0, len(seqs), self._read_at_once):
            letters = yield from self._read_letters(
                topic, dead, seqs[at : at + self._read_at_once], request.group
            )
            if request.group:
                sums += yield from self._redeliver(topic, request.group, dead, letters)
                continue
            for part in split_for_move(letters):
                done, again, refused = yield from self._move_to_queue(topic, dead, part)
                sums += done, again, 0
                if refused is None:
                    continue
                if not sums[0]:
                    raise refused
                return m.DeadLettersRedriven(topic.topic, *sums.tolist())
        return m.DeadLettersRedriven(topic.topic, *sums.tolist())

    def _read_letters(
        self, topic: m.TopicInfo, dead: m.TopicInfo, seqs: Any, group: str
    ) -> Steps[list[Record]]:
        """Read the named dead letters that exist and are of this queue or this group."""
        source = LocalSource(self._connection.for_topic(dead.topic_id), dead.topic, clock=self._clock)
        found: list[Record] = []
        try:
            for first, stop in spans_of(seqs):
                yield from _read_range(source, dead, first, stop - 1, found)
        finally:
            source.close()
        return [each for each in found if is_dead_letter_of(topic.topic, each, group)]

    def _dead_letter_topic(self, topic: m.TopicInfo, group: str) -> Steps[str]:
        """Return the name of the dead-letter topic; raise InvalidRequest if none is configured."""
        if not group:
            if topic.config.get("type") != QUEUE:
                raise NotAQueue(
                    "the topic is not a queue: use a queue, or name a consumer group", topic=topic.topic
                )
            return dead_letter_of(topic)
        state: m.LeaseStatsReply = yield from self._connection.ask(
            topic.shard, m.LeaseStats(topic.topic, group=group)
        )
        return dead_letter_of_group(state.info)

    def _redeliver(
        self, topic: m.TopicInfo, group: str, dead: m.TopicInfo, letters: list[Record]
    ) -> Steps[tuple[int, int, int]]:
        """Have a group deliver the records of its dead letters again, and delete these dead letters.

        Returns:
            How many were redriven, how many of them had been redriven before, and how many records no longer
            exist.
        """
        moved = repeated = lost = 0
        for at in range(0, len(letters), GROUP_DEAD_LETTERS_PER_MOVE):
            part = letters[at : at + GROUP_DEAD_LETTERS_PER_MOVE]
            src_seqs = [src_seq_of_dead_letter(letter, topic.topic_id) for letter in part]
            calls = [redrive_producer_id(dead.topic_id, dead.epoch, letter.seq) for letter in part]
            message = m.Redeliver(
                topic.topic, topic.topic_id, group, np.array(src_seqs, dtype="<i8").tobytes(),
                np.array(calls, dtype="<u8").tobytes(),
            )  # fmt: skip
            reply: m.Redelivered = yield from self._connection.ask(topic.shard, message)
            stop_points.hit("redrive_after_append")
            gone = set(np.frombuffer(reply.gone, dtype="<i8").tolist())
            done = [letter.seq for letter, src_seq in zip(part, src_seqs, strict=True) if src_seq not in gone]
            yield from self._delete_redriven(dead, done)
            moved, repeated = moved + len(done), repeated + reply.repeated
            lost += len(part) - len(done)
        return moved, repeated, lost

    def _move_to_queue(
        self, queue: m.TopicInfo, dead: m.TopicInfo, letters: Any
    ) -> Steps[tuple[int, int, Refused | None]]:
        """Copy dead letters to their queue, and delete those that were copied.

        Returns:
            How many were redriven, how many of them had been copied before, and the first refusal, or None.
        """
        # At least as durable as in the dead-letter topic, because it is deleted there.
        durability = Durability.parse(dead.config["durability"])
        sent = bytearray()
        seqs: list[int] = []
        refused: Refused | None = None
        for letter in letters:
            # One by one: a letter that cannot be a job does not hold up the others.
            try:
                sent += frame(
                    record_columns(letter, letter.meta_json or b"", dict(letter.headers)),
                    topic_id=queue.topic_id,
                    epoch=queue.epoch, producer_id=redrive_producer_id(dead.topic_id, dead.epoch, letter.seq),
                    producer_seq=1, durability=durability,
                )  # fmt: skip
                seqs.append(letter.seq)
            except Refused as e:
                refused = refused or e
        if not seqs:
            return 0, 0, refused
        message = m.Append(queue.topic, len(seqs), disable_backpressure=True)
        reply: m.Appended = yield from self._connection.ask(queue.shard, message, sent)
        entries = np.frombuffer(reply.entries, dtype=np.uint64).reshape(-1, WORDS)
        errors = [entry_error(entry, queue.topic) for entry in entries]
        done = [seq for seq, error in zip(seqs, errors, strict=True) if error is None]
        stop_points.hit("redrive_after_append")
        yield from self._delete_redriven(dead, done)
        flags = entries[:, S_COUNT_STATUS] >> np.uint64(FLAGS_SHIFT)
        again = int(((flags & np.uint64(FLAG_DEDUPED)) != 0).sum())
        return len(done), again, refused or next((error for error in errors if error is not None), None)

    def _delete_redriven(self, dead: m.TopicInfo, done: list[int]) -> Steps[None]:
        """Delete dead letters that were redriven."""
        if done:
            message = m.RecordsDelete(dead.topic, 0, None, BitMap64(done).serialize(), dead.epoch)
            yield from self._connection.ask(dead.shard, message)

    def _topic(self, name: str) -> Steps[m.TopicInfo]:
        message = m.TopicResolve(name)
        info: m.TopicInfo = yield from self._connection.ask(home_shard(name, self._links.shards), message)
        if not info.topic_id:
            info = yield from self._connection.ask(info.shard, message)
        if not info.topic_id:
            raise NotReady("the shards do not agree on the owner of this topic: retry later", topic=name)
        return info


def _read_range(
    source: LocalSource, dead: m.TopicInfo, first: int, last: int, found: list[Record]
) -> Steps[None]:
    """Append the records `first` to `last` that still exist to `found`."""
    at = Cursor(dead.epoch, first - 1)
    while at.seq < last:
        page: Page = yield from read_page(source, dead.topic, at, limit=last - at.seq, until=last)
        if page.cursor.epoch != dead.epoch or page.cursor.seq <= at.seq:
            return
        found += page.records
        at = page.cursor


def redrive_producer_id(topic_id: int, epoch: int, seq: int) -> int:
    """Return the producer id of a dead letter's copy, always the same for one dead letter of one epoch."""
    return SESSION_BIT | xxhash.xxh3_64_intdigest(f"redriven {topic_id} {epoch} {seq}".encode())


def record_columns(
    record: Record, meta: bytes, headers: dict[str, bytes], *, keeps_expiry: bool = False
) -> Any:
    """Return the columns of a record with new metadata and headers. Keep its own expiry only on request.

    Times before the epoch, which clients of another make can store, have passed and are left out.
    """
    return encode_records(
        [record.data],
        keys=None if record.key is None else [record.key],
        tags=None if record.tag is None else [record.tag],
        nodes=None if record.node is None else [record.node],
        headers=[headers] if headers else None,
        metas=[meta] if meta else None,
        event_ts=None if record.event_ts is None else [record.event_ts],
        expires_at=_time(record.expires_at) if keeps_expiry else None,
        not_before=_time(record.not_before),
        priorities=[record.priority] if record.priority else None,
    )


def _time(time_us: int | None) -> list[int] | None:
    return [time_us] if time_us is not None and time_us > 0 else None


def _numbers(request: m.RedriveDeadLetters) -> Any:
    count, remainder = divmod(len(request.seqs), 8)
    if remainder:
        raise InvalidRequest(
            f"length of seqs must be a multiple of 8 bytes, got {len(request.seqs)}", topic=request.topic
        )
    if count > DEAD_LETTERS_PER_MOVE:
        raise BatchTooLarge(
            f"a redrive request must have at most {DEAD_LETTERS_PER_MOVE} seqs, got {count}", seqs=count,
            max=DEAD_LETTERS_PER_MOVE,
        )  # fmt: skip
    return np.unique(np.frombuffer(request.seqs, dtype="<i8"))
