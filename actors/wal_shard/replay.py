"""Replay: the log's frames, applied again to the topics' state. Pure.

The same objects as in live traffic take the same facts. A frame that is already applied is passed over
(RE-9); a frame that leaves a gap nobody accounts for is damage. Frames of topics that belong to other
shards under today's shard count are not ours to apply; only their names are noted, because they decide
who looks after a name (topic/directory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.wal_shard.admission import Intake, Stretch
from actors.wal_shard.group import Group
from actors.wal_shard.records import (
    ConfigChanged,
    FloorsRaised,
    HeadReserved,
    KeyUsed,
    RangeLost,
    TopicCreated,
    TopicRemoved,
    decode_body,
    frame_of,
)
from actors.wal_shard.requests import Identity
from ringlog.errors import CorruptData
from ringlog.frame import batch as frames
from ringlog.frame import layout
from ringlog.frame.layout import FrameType
from ringlog.frame.measure import measure
from ringlog.frame.settle import WORDS
from ringlog.storage.recovery import Piece
from ringlog.topic.config import TopicConfig
from ringlog.topic.directory import Directory
from ringlog.topic.idempotency import Remembered
from ringlog.topic.names import home_shard, shard_of, shards_of
from ringlog.topic.state import Topic
from ringlog.types import Durability

_MARKS = (FrameType.GROUP_MARK, FrameType.CHECKPOINT_MARK)


@dataclass(slots=True)
class _PendingKey:
    """A key frame whose append must be the very next frame of its topic."""

    key: str
    entry: Remembered


@dataclass(slots=True)
class Replay:
    """Applies pieces of the log, in the order of their files, to one shard's directory."""

    identity: Identity
    directory: Directory
    is_lenient: bool = False
    """`wal.corruption = truncate`: gaps become announced lost ranges instead of errors."""
    records: int = 0
    gaps: list[tuple[str, int, int]] = field(default_factory=list)
    _gone: set[int] = field(default_factory=set)
    _foreign: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Live names of other layouts -> (topic_id, epoch), whoever owns them."""
    _keys: dict[int, _PendingKey] = field(default_factory=dict)

    def apply(self, piece: Piece, file_id: int, path: str, *, other_layout: bool) -> None:
        """Apply one piece of the file `file_id`; raises CorruptData naming what contradicts what."""
        words = piece.batch.words
        types = frames.types_of(words)
        mine = self._mine(words, other_layout)
        rows = np.flatnonzero(~np.isin(types, _MARKS) & (mine | (other_layout & (types != FrameType.APPEND))))
        appends = types == FrameType.APPEND
        at = 0
        while at < len(rows):
            row = int(rows[at])
            if appends[row]:
                stop = self._stretch_end(words, rows, at, appends)
                self._appends(piece, rows[at:stop], file_id, path)
                at = stop
            else:
                self._control(piece, row, bool(mine[row]), other_layout, path)
                at += 1

    def _mine(self, words: frames.U64, other_layout: bool) -> NDArray[np.bool_]:
        if not other_layout:
            return np.ones(len(words), dtype=np.bool_)
        owners = shards_of(words[:, layout.W_TOPIC], self.identity.shards)
        return np.asarray(owners == self.identity.shard, dtype=np.bool_)

    @staticmethod
    def _stretch_end(words: frames.U64, rows: NDArray[Any], at: int, appends: NDArray[np.bool_]) -> int:
        """End of the run of append rows of one topic and one producer that begins at rows[at]."""
        ahead = rows[at:]
        same = (
            appends[ahead]
            & (words[ahead, layout.W_TOPIC] == words[ahead[0], layout.W_TOPIC])
            & (words[ahead, layout.W_PRODUCER_ID] == words[ahead[0], layout.W_PRODUCER_ID])
        )
        end = frames.first_true(~same)
        return at + (len(ahead) if end is None else end)

    # -- appends --------------------------------------------------------------------------------------

    def _appends(self, piece: Piece, rows: NDArray[Any], file_id: int, path: str) -> None:
        words = piece.batch.words[rows]
        topic = self.directory.by_id.get(int(words[0, layout.W_TOPIC]))
        if topic is None:
            self._ownerless(int(words[0, layout.W_TOPIC]), piece, rows, path)
            return
        counts = frames.counts_of(words)
        stops = words[:, layout.W_BASE_SEQ] + counts
        fresh = (frames.epochs_of(words) == topic.epoch) & (stops > np.uint64(topic.next_seq))
        if not fresh.any():
            return
        chosen = np.flatnonzero(fresh)
        rows, words, counts, stops = rows[chosen], words[chosen], counts[chosen], stops[chosen]
        bases = words[:, layout.W_BASE_SEQ]
        self._close_gap(topic, int(bases[0]), piece, int(rows[0]), path)
        broken = frames.first_true(bases[1:] != stops[:-1])
        if broken is not None:
            self._stage(topic, piece, rows[: broken + 1], file_id)
            self._appends(piece, rows[broken + 1 :], file_id, path)
            return
        self._stage(topic, piece, rows, file_id)

    def _stage(self, topic: Topic, piece: Piece, rows: NDArray[Any], file_id: int) -> None:
        part = piece.batch.take(rows)
        words = part.words
        counts = frames.counts_of(words)
        bases = words[:, layout.W_BASE_SEQ]
        self._confirm_key(topic, int(bases[0]))
        total = int(counts.sum())
        topic.next_seq = int(bases[-1] + counts[-1])
        topic.head_seq = topic.next_seq - 1
        topic.last_ts = max(topic.last_ts, int(words[-1, layout.W_COMMIT_TS]))
        topic.staged_count += total
        topic.staged_bytes += int(measure(piece.buffer, part).accounted.sum())
        producer_id = int(words[0, layout.W_PRODUCER_ID])
        if producer_id and topic.producers.admit(producer_id) is not None:
            self._remember(topic, producer_id, words, bases, counts)
        topic.index.add_run(bases, file_id, part.offsets + piece.file_offset)
        self.records += total

    @staticmethod
    def _remember(topic: Topic, producer_id: int, words: Any, bases: Any, counts: Any) -> None:
        producer = topic.producers.get(producer_id)
        assert producer is not None
        seqs = words[:, layout.W_PRODUCER_SEQ]
        ascending = seqs > np.maximum.accumulate(np.concatenate(([np.uint64(producer.highest)], seqs[:-1])))
        if ascending.all():
            topic.producers.record(producer_id, seqs, bases, counts)

    def _close_gap(self, topic: Topic, base: int, piece: Piece, row: int, path: str) -> None:
        if base <= topic.next_seq:
            if base < topic.next_seq:
                raise self._damage(
                    "a frame begins inside records already there", topic, base, piece, row, path
                )
            return
        if not self.is_lenient:
            raise self._damage("records are missing before a frame", topic, base, piece, row, path)
        self.gaps.append((topic.name, topic.next_seq, base - 1))
        topic.jump(base - 1)

    @staticmethod
    def _damage(text: str, topic: Topic, base: int, piece: Piece, row: int, path: str) -> CorruptData:
        offset = piece.file_offset + int(piece.batch.offsets[row])
        return CorruptData(
            text, topic=topic.name, expected_seq=topic.next_seq, found_seq=base, file=path, offset=offset
        )

    def _ownerless(self, topic_id: int, piece: Piece, rows: NDArray[Any], path: str) -> None:
        """Records of a topic deleted later are passed over; of one never made, they are damage (RE-12)."""
        if topic_id in self._gone:
            return
        offset = piece.file_offset + int(piece.batch.offsets[rows[0]])
        if not self.is_lenient:
            raise CorruptData(
                "records of a topic that was never created", topic_id=topic_id, file=path, offset=offset
            )
        epoch = int(frames.epochs_of(piece.batch.words[rows[:1]])[0])
        self.directory.add(Topic(topic_id, epoch, f"topic-{topic_id}", TopicConfig()))
        self._appends(piece, rows, 0, path)

    def _confirm_key(self, topic: Topic, base: int) -> None:
        pending = self._keys.pop(topic.topic_id, None)
        if pending is not None and pending.entry.first_seq == base:
            topic.keys.remember(pending.key, pending.entry, topic.config.idempotency_window_ms)

    # -- control frames -------------------------------------------------------------------------------

    def _control(self, piece: Piece, row: int, mine: bool, other_layout: bool, path: str) -> None:
        words = piece.batch.words[row]
        frame_type = int(frames.types_of(words.reshape(1, -1))[0])
        topic_id = int(words[layout.W_TOPIC])
        start = int(piece.batch.offsets[row]) + layout.HEADER_BYTES
        raw_len = int(words[layout.W_TAIL] & np.uint64(0xFFFFFFFF))
        try:
            body = decode_body(frame_type, memoryview(piece.buffer)[start : start + raw_len])
        except CorruptData as e:
            e.detail.update(file=path, offset=piece.file_offset + start)
            raise
        if other_layout:
            self._note_name(topic_id, body)
        if mine:
            self._apply_control(topic_id, body)

    def _note_name(self, topic_id: int, body: Any) -> None:
        if isinstance(body, TopicCreated):
            self._foreign[body.name] = (topic_id, body.epoch)
            self.directory.seen(topic_id, body.epoch)
        elif isinstance(body, TopicRemoved):
            self._foreign = {name: life for name, life in self._foreign.items() if life[0] != topic_id}

    def _apply_control(self, topic_id: int, body: Any) -> None:
        if isinstance(body, TopicCreated):
            if topic_id not in self._gone and topic_id not in self.directory.by_id:
                config = TopicConfig.from_bytes(body.config)
                self.directory.add(Topic(topic_id, body.epoch, body.name, config))
            return
        topic = self.directory.by_id.get(topic_id)
        if topic is None:
            return
        if isinstance(body, TopicRemoved):
            self._gone.add(topic_id)
            self.directory.remove(topic)
        elif isinstance(body, ConfigChanged):
            topic.config = TopicConfig.from_bytes(body.config)
            self.directory.note_class(topic)
        elif isinstance(body, HeadReserved):
            if body.settled:
                topic.jump(body.reserved)
                topic.reservation.settle(topic.head_seq)
            else:
                topic.reservation.recovered(body.reserved)
        elif isinstance(body, RangeLost):
            topic.jump(body.last)
        elif isinstance(body, FloorsRaised):
            topic.evict_below(body.cap_floor, 0, 0)
        elif isinstance(body, KeyUsed):
            entry = Remembered(body.first_seq, body.records, body.commit_ts, body.created_us)
            self._keys[topic_id] = _PendingKey(body.key, entry)

    # -- the end of a file, the end of replay ---------------------------------------------------------

    def settle_reservations(self, shard: int, shards: int) -> None:
        """That shard's stream ended in good order here: no number above its heads was acknowledged (D-19)."""
        for topic in self.directory.by_id.values():
            if shard_of(topic.topic_id, shards) == shard:
                topic.reservation.settle(topic.head_seq)

    def settle_names(self) -> None:
        """Decide who looks after names that were made under another shard count."""
        me = self.identity
        for name, (topic_id, _) in self._foreign.items():
            owner, home = shard_of(topic_id, me.shards), home_shard(name, me.shards)
            if owner == me.shard and home != me.shard:
                self.directory.adopted.add(name)
            elif owner != me.shard and home == me.shard:
                self.directory.elsewhere[name] = owner

    def jump_heads(self, group: Group, *, something_lost: bool) -> list[tuple[str, int, int]]:
        """Settle reservations left open by a crash, staging what must be logged about it.

        With `something_lost` numbers above the head may have been acknowledged: they are skipped and
        announced (D-9, D-12). Otherwise the kernel kept everything and the reservation shrinks back.
        """
        announced = []
        for topic in self.directory.by_id.values():
            reserved = topic.reservation.reserved
            if (
                something_lost
                and topic.config.durability == Durability.DISK
                and (lost := topic.jump(reserved))
            ):
                announced.append((topic.name, *lost))
                group.add_control(frame_of(RangeLost(*lost), topic.topic_id, topic.epoch), topic)
            if reserved > topic.head_seq:
                group.add_control(
                    frame_of(HeadReserved(topic.head_seq, True), topic.topic_id, topic.epoch), topic
                )
            if reserved:
                topic.reservation.settle(topic.head_seq)
        return announced

    def copy(self, piece: Piece, group: Group, *, other_layout: bool) -> None:
        """Stage a doubtful piece to be written again (RD-2): the frames that are ours and still matter."""
        words = piece.batch.words
        types = frames.types_of(words)
        mine = self._mine(words, other_layout)
        buffer = bytearray(piece.buffer)
        totals = piece.batch.total_bytes
        rows = np.flatnonzero(mine & ~np.isin(types, _MARKS))
        at = 0
        while at < len(rows):
            row = int(rows[at])
            topic = self.directory.by_id.get(int(words[row, layout.W_TOPIC]))
            if types[row] != FrameType.APPEND:
                start = int(piece.batch.offsets[row])
                if topic is not None or types[row] == FrameType.TOPIC_DELETE:
                    group.add_control(buffer[start : start + int(totals[row])], topic)
                at += 1
                continue
            stop = self._stretch_end(words, rows, at, types == FrameType.APPEND)
            contiguous = frames.first_true(np.diff(rows[at:stop]) != 1)
            stop = stop if contiguous is None else at + contiguous + 1
            if topic is not None:
                group.add_intake(self._copied_intake(buffer, piece, topic, row, int(rows[stop - 1]) + 1))
            at = stop

    @staticmethod
    def _copied_intake(buffer: bytearray, piece: Piece, topic: Topic, start: int, stop: int) -> Intake:
        batch = piece.batch.take(slice(0, len(piece.batch)))
        entries = np.zeros((0, WORDS), dtype=np.uint64)
        is_current = frames.epochs_of(batch.words[start : start + 1])[0] == topic.epoch
        stretches = [Stretch(topic, start, stop, False)] if is_current else []
        return Intake(buffer, batch, entries, stretches)
