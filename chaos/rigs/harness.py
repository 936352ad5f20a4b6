"""The harness of every class that drives a shard without an engine, with a model of its clients.

The shard is the production core with its log writer and recovery (`shard_world.World`), on any disk. The
background processes work on the same World (storage.py). The model records an ack when its settlement is
performed, and a reply when it is sent. If the process ends before that, no client has received it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pyroaring import BitMap64

from chaos.rigs.model import Model, Removal, SentFrame, TopicChange
from chaos.rigs.storage import COLD
from ringlog.actors.wal_shard import events as ev
from ringlog.contract import Reply
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError, error_from_status
from ringlog.frame import encode_records, frame
from ringlog.frame.settle_entry import S_FIRST_SEQ, S_PRODUCER_SEQ, S_TOPIC, entry_error
from ringlog.limits import KIB
from ringlog.storage.disk import Disk
from ringlog.types import Durability
from tests.support.shard_world import World

FILE_BYTES = 80 * KIB
"""Size of a log file: hardly more than the space that a shard keeps free in one, so that images are small."""
BIG = 39 * KIB
"""Size of a payload that leaves no space for a second one in a file of FILE_BYTES."""
CLASSES = {"f": "fsync", "d": "disk"}
"""Topics that exist from the beginning, with their durability classes."""
PRODUCER = 7
"""Producer id of topic `f`; topic `d` has the next one."""
TAG = "a"
"""Tag of every second record of a frame."""
_OF_RECORDS, _OF_TOPICS = m.RecordsDeleted, m.TopicInfo | m.TopicDeleted
"""Replies that grant a removal, and a change of a topic."""


class Harness:
    """One data directory over all its starts."""

    def __init__(self, disk: Disk, now: Callable[[], int] = lambda: 1, **world: Any) -> None:
        self.model = Model(now)
        given = {"file_bytes": FILE_BYTES, "cold": COLD, "has_cold": True, **world}
        self.world = World(disk, effect_observer=self._watch, **given)
        self._open: Removal | TopicChange | None = None
        self._topics_made = 0

    # -- starts and ends ------------------------------------------------------------------------------

    def start(self, *, is_reboot: bool = False, keeps_board: bool = False) -> None:
        """Start the shard after a reboot, as a successor with the same board, or as a new engine start."""
        if is_reboot:
            self.world.reboot()
        if keeps_board:
            self.world.start_shard(0)
        else:
            self.world.start()

    def end(self) -> None:
        """Kill the process."""
        self.world.kill()

    def stop(self) -> None:
        """Stop in an orderly way."""
        for run in self.world.runs.values():
            run.drain()
        self.end()

    def restart(self) -> None:
        """Stop in an orderly way and start again on the same boot."""
        self.stop()
        self.start()

    def replace(self) -> None:
        """Kill the shard and start a successor with the same board."""
        self.end()
        self.start(keeps_board=True)

    # -- clients --------------------------------------------------------------------------------------

    def payload(self, size: int = 20) -> bytes:
        """Return a new payload, different from all others."""
        return self.model.payload(size)

    def new_topic(self) -> str:
        """Return a name that was not used yet."""
        self._topics_made += 1
        return f"n{self._topics_made}"

    def put(self, topic: str, *, ttl_ms: int = 0, **config: Any) -> None:
        """Create or configure a topic."""
        self._ask(
            self.model.change(topic, exists=True, ttl_ms=ttl_ms),
            m.TopicPut(topic, {"ttl_ms": ttl_ms, **config}),
        )

    def configure(self, topic: str, **config: Any) -> None:
        """Change the configuration of a topic. The TTL identifies it and ends long after the test."""
        ttl_ms = 10**12 + self.world.clock.now_us() % 10**12
        self.put(topic, ttl_ms=ttl_ms, durability=CLASSES[topic], **config)
        self.world.clock.advance(0.001)

    def ensure_topic(self, topic: str) -> None:
        """Create a topic if it does not exist."""
        if self.world.run_of(topic).core.directory.find(topic) is None:
            self.put(topic, durability=CLASSES[topic])

    def drop(self, topic: str) -> None:
        """Delete a topic."""
        self._ask(self.model.change(topic, exists=False), m.TopicDelete(topic))

    def append(self, topic: str, *counts: int, size: int = 0) -> None:
        """Send frames with these numbers of records in one commit batch."""
        sizes = (size,) if size else ()
        self.send(topic, *[[self.payload(*sizes) for _ in range(count)] for count in counts])

    def send(self, topic: str, *batches: list[bytes]) -> None:
        """Send frames in one commit batch. Every second record of a frame has a tag."""
        sent = [self.frame(topic, payloads, n) for n, payloads in enumerate(batches, 1)]
        self.model.send(*sent)
        self._push(topic, sent)

    def send_again(self, topic: str) -> None:
        """Resend the last frame of a topic, whatever its outcome. It must not be appended twice.

        If it was refused, it may be appended now.
        """
        again = [each for each in self.model.frames if each.topic == topic][-1:]
        for each in again:
            each.is_refused = False
        self._push(topic, again)

    def delete(self, topic: str, seqs: Iterable[int], request: m.RecordsDelete | None = None) -> Any:
        """Delete records by seq, or with `request`, which must match exactly these seqs.

        Returns the reply.
        """
        chosen = frozenset(seqs)
        by_number = m.RecordsDelete(topic, 0, None, BitMap64(chosen).serialize())
        return self._ask(self.submit_removal(topic, chosen), request or by_number)

    def submit_removal(self, topic: str, seqs: Iterable[int], *, is_eviction: bool = False) -> Removal:
        """Record in the model that these records are to be removed.

        Evictions are synced in every class (X2).
        """
        live = self.world.topic(topic)
        is_durable = is_eviction or live.config.durability is Durability.FSYNC
        return self.model.remove(live.topic_id, seqs, is_durable=is_durable)

    def grant(self, asked: Removal | TopicChange) -> None:
        """Record that the request was granted. Later ends are judged by it."""
        self.model.grant(asked)

    def visible(self, topic: str) -> list[int]:
        """Return the seqs that a reader sees."""
        self.ensure_topic(topic)
        return [seq for seq, _ in self.world.records(topic)]

    def tagged(self, topic: str) -> set[int]:
        """Return the seqs of all records with the tag in this life of the topic."""
        topic_id = self.world.topic(topic).topic_id
        mine = [sent for sent in self.model.frames if sent.topic_id == topic_id]
        return {seq for sent in mine for seq in sent.seqs[1::2]}

    @property
    def known_segments(self) -> dict[int, m.SegmentRef]:
        """Segments known to the shard, by number."""
        return self.world.runs[0].core.checkpoint.segments.refs

    # -- inside ---------------------------------------------------------------------------------------

    def _ask(self, asked: Removal | TopicChange, request: Any) -> Any:
        """Send a request. The model grants it with its reply. Raises the refusal, if there is one."""
        run = self.world.run_of(request.topic)
        self._open = asked
        try:
            answer = self.world.ask(run, request)
        finally:
            self._open = None
        if isinstance(answer, m.ErrorReply):
            raise error_from_status(answer.status, answer.message, answer.detail)
        return answer

    def frame(self, topic: str, payloads: list[bytes], nth: int = 1) -> SentFrame:
        """Return a new frame; `nth` is its position among the new frames of this call."""
        live, number = self.world.topic(topic), len(self.model.frames) + nth
        tags = [TAG if i % 2 else None for i in range(len(payloads))]
        made = frame(
            encode_records(payloads, tags=tags if len(tags) > 1 else None), topic_id=live.topic_id,
            producer_id=PRODUCER + (topic == "d"), producer_seq=number, durability=Durability.EPHEMERAL,
        )  # fmt: skip
        is_fsync = live.config.durability is Durability.FSYNC
        return SentFrame(topic, tuple(payloads), live.topic_id, number, is_fsync, bytes(made))

    def _push(self, topic: str, sent: list[SentFrame]) -> None:
        for entry in self.world.send(topic, [bytearray(each.frame) for each in sent]):
            error = entry_error(entry, topic)
            if error is not None:
                self.refused(error)

    def refused(self, error: RinglogError) -> None:
        """Handle the refusal of a frame. Subclasses may override it."""
        raise error

    def _watch(self, shard: int, effect: Any) -> None:
        if isinstance(effect, ev.Settle):
            for entry in effect.entries.tolist():
                self._settled(entry)
        elif self._open is not None and isinstance(effect, Reply):
            is_removal = isinstance(self._open, Removal)
            if isinstance(effect.message, _OF_RECORDS if is_removal else _OF_TOPICS):
                self.grant(self._open)

    def _settled(self, entry: list[int]) -> None:
        key = entry[S_TOPIC], entry[S_PRODUCER_SEQ]
        sent = next(each for each in reversed(self.model.frames) if (each.topic_id, each.number) == key)
        error = entry_error(entry, sent.topic)
        if error is None:
            self.model.settle(sent, entry[S_FIRST_SEQ])
        elif not sent.is_owed and error.outcome == "not_applied":
            sent.is_refused = True
