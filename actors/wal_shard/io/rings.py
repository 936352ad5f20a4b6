"""The rings of one shard: attach, drain fairly, settle, let go. Part of the shell: no decision about a frame.

A ring whose words or frames make no sense is closed with a reason and dropped; the others go on
(RF-25, RF-32). What it had published and was sound is settled first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

from actors.wal_shard.events import FramesArrived
from ringlog.errors import RingError
from ringlog.frame.batch import ScanEnd, scan_checked
from ringlog.frame.layout import LEN_FIELD_BYTES
from ringlog.frame.settle_entry import SettleEntries
from ringlog.limits import COMMIT_BATCH_BYTES_MAX, COMMIT_BATCH_FRAMES_MAX, DRAIN_BYTES_PER_RING_MAX
from ringlog.logs import log_event
from ringlog.ring.doorbell import BellRinger
from ringlog.ring.ring import RingConsumer, WakeupFlags

log = logging.getLogger("ringlog.shard")

FULL_SHARE = 15 / 16
"""A ring counts as full from here on: the next frame need not fit, nor the padding before it."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Rings and bells lie in one directory: what is asked for by message must not lead out of it."""


@dataclass(slots=True)
class _ProducerRing:
    name: str
    consumer: RingConsumer
    bell: BellRinger
    detach_requests: list[tuple[bytes, int]]
    is_detaching: bool = False
    is_broken: bool = False
    settled_since: int = 0
    in_flight: int = 0


class Rings:
    """All rings one shard drains, in a fair order."""

    def __init__(self, shm_dir: str, shard: int, engine_id: str) -> None:
        self._shm_dir = shm_dir
        self._shard = shard
        self._engine_id = engine_id
        self._by_number: dict[int, _ProducerRing] = {}
        self._by_name: dict[str, int] = {}
        self._next_number = 1
        self._first = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def attach(self, name: str, bell: str) -> None:
        """Begin to drain a ring; a ring that is attached already stays as it is. Raises RingError."""
        if name in self._by_name:
            return
        for file in (name, bell):
            if _FILE_NAME.fullmatch(file) is None:
                raise RingError("not the name of a file", path=file[:128])
        consumer = RingConsumer.attach(
            f"{self._shm_dir}/{name}", shard=self._shard, engine_id=self._engine_id
        )
        ring = _ProducerRing(name, consumer, BellRinger(f"{self._shm_dir}/{bell}"), [])
        self._by_number[self._next_number] = ring
        self._by_name[name] = self._next_number
        self._next_number += 1

    def request_detach(self, name: str, client: bytes, corr: int) -> bool:
        """Let a ring go when it is empty; False when it is not attached."""
        number = self._by_name.get(name)
        if number is None:
            return False
        ring = self._by_number[number]
        ring.is_detaching = True
        ring.detach_requests.append((client, corr))
        return True

    def has_pending(self) -> bool:
        """Is there anything to drain? Cheap: a few loads a ring."""
        for ring in self._by_number.values():  # noqa: SIM110  a generator takes longer than the look
            if not ring.is_broken and self._pending(ring):
                return True
        return False

    def watched(self) -> list[tuple[memoryview, int]]:
        """Of each ring, a word and its value as long as there is nothing to drain."""
        return [ring.consumer.spin_word() for ring in self._by_number.values() if not ring.is_broken]

    def _pending(self, ring: _ProducerRing) -> int:
        try:
            return ring.consumer.pending
        except RingError as e:
            self._break(ring, str(e))
            return 0

    def pending_totals(self) -> tuple[int, int, bool]:
        """(rings with something to drain, bytes in all, does one of them ask not to be gathered)."""
        rings = nbytes = wants = 0
        for ring in self._by_number.values():
            if not ring.is_broken and (pending := self._pending(ring)):
                rings, nbytes, wants = rings + 1, nbytes + pending, wants | ring.consumer.wakeup_flags
        return rings, nbytes, bool(wants & WakeupFlags.NO_BATCH_WINDOW)

    def fill_ratio(self) -> float:
        """How full the fullest ring is, 0.0 to 1.0, for its producer: what is not settled takes room."""
        fullest = 0.0
        for ring in self._by_number.values():
            if not ring.is_broken and (pending := self._pending(ring)):
                consumer = ring.consumer
                taken = pending + consumer.read_position - consumer.tail
                fullest = max(fullest, taken / (consumer.capacity * FULL_SHARE))
        return min(fullest, 1.0)

    def drain(self) -> list[FramesArrived]:
        """Copy out what is there, one share a ring, at most one group's worth in all."""
        events: list[FramesArrived] = []
        room, frames_left = COMMIT_BATCH_BYTES_MAX, COMMIT_BATCH_FRAMES_MAX
        numbers = list(self._by_number)
        for i in range(len(numbers)):
            number = numbers[(self._first + i) % len(numbers)]
            ring = self._by_number[number]
            if ring.is_broken:
                continue
            try:
                event = self._drain_one(number, ring, min(room, DRAIN_BYTES_PER_RING_MAX), frames_left)
            except RingError as e:
                # The producer's words are not to be trusted: what it wrote there costs it its ring (RF-25).
                self._break(ring, str(e))
                continue
            if event is not None:
                events.append(event)
                room -= len(event.buffer)
                frames_left -= len(event.batch)
            if room <= 0 or frames_left <= 0:
                break
        self._first += 1
        return events

    def _drain_one(
        self, number: int, ring: _ProducerRing, limit: int, frames_left: int
    ) -> FramesArrived | None:
        consumer = ring.consumer
        # Nobody takes the settlements of a ring that is being let go: its frames get their fate without.
        free = frames_left if ring.is_detaching else consumer.settle_free - ring.in_flight
        frames_max = min(free, frames_left)
        while frames_max > 0:
            copied = consumer.copy_pending(limit)
            if copied is None:
                return None
            position, buffer = copied
            batch = scan_checked(buffer, position, frames_max=frames_max)
            if batch.end is ScanEnd.PARTIAL and not len(batch):
                # One frame larger than the share: it is taken alone.
                total = int.from_bytes(buffer[:4], "little") + LEN_FIELD_BYTES
                if total <= len(buffer) or total > self._pending(ring):
                    self._break(ring, "a published frame is longer than what was published")
                    return None
                limit = total
                continue
            if batch.end is ScanEnd.INVALID:
                self._break(ring, batch.reason)
            elif batch.end is ScanEnd.CLEAN and batch.stop < len(buffer):
                self._break(ring, "zeros were published")
            consumer.advance(batch.stop)
            if batch.end is ScanEnd.PAD:
                consumer.skip_lap()
            if len(batch):
                ring.in_flight += len(batch)
                return FramesArrived(number, position, buffer, batch, consumer.read_position)
            if batch.end is not ScanEnd.PAD:
                return None
        return None

    def _break(self, ring: _ProducerRing, reason: str) -> None:
        if not ring.is_broken:
            ring.is_broken = True
            log_event(log, logging.WARNING, "ring closed", ring=ring.name, reason=reason)
            ring.consumer.close()
            ring.bell.ring()

    def settle(self, source: int, entries: SettleEntries, new_tail: int) -> None:
        """Hand the fates to the producer, then free the space."""
        ring = self._by_number.get(source)
        if ring is None:
            return
        ring.in_flight -= len(entries)
        ring.settled_since += len(entries)
        try:
            ring.consumer.settle(entries[:0] if ring.is_detaching else entries, new_tail)
        except RingError as e:
            self._break(ring, str(e))
            return
        # At once: a lone append waits for nothing else.
        if ring.consumer.wakeup_flags & WakeupFlags.SETTLEMENTS:
            ring.bell.ring()

    def wake_publication_waiters(self) -> None:
        """Wake the clients that sleep until something is published."""
        for ring in self._by_number.values():
            if ring.consumer.wakeup_flags & WakeupFlags.PUBLICATION:
                ring.bell.ring()

    def detach_empty(self) -> Iterator[tuple[str, int, list[tuple[bytes, int]]]]:
        """Detach rings that were asked to go and are empty; yields (name, frames settled, who asked)."""
        for number, ring in list(self._by_number.items()):
            if not ring.is_detaching or ring.in_flight:
                continue
            if not ring.is_broken and self._pending(ring):
                continue
            del self._by_number[number], self._by_name[ring.name]
            ring.consumer.detach()
            ring.bell.close()
            yield ring.name, ring.settled_since, ring.detach_requests

    def close(self) -> None:
        """Unmap everything; the rings themselves belong to the supervisor."""
        for ring in self._by_number.values():
            ring.consumer.detach()
            ring.bell.close()
        self._by_number.clear()
        self._by_name.clear()
