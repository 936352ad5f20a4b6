"""The rings of one shard: attach, drain fairly, settle, detach.

Part of the shell; it decides nothing about frames. A ring with a corrupt header or corrupt frames is closed,
with a log message. The other rings are not affected (RF-25, RF-32). Valid frames that the ring had published
before are settled first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ringlog.actors.wal_shard.events import FramesArrived
from ringlog.errors import RingError
from ringlog.frame.batch import ScanEnd, scan_checked
from ringlog.frame.layout import LEN_FIELD_BYTES
from ringlog.frame.settle_entry import SettleEntries
from ringlog.limits import COMMIT_BATCH_BYTES_MAX, COMMIT_BATCH_FRAMES_MAX, DRAIN_BYTES_PER_RING_MAX
from ringlog.logs import log_event
from ringlog.ring.doorbell import BellRinger
from ringlog.ring.ring import RingConsumer, WakeupFlags

log: logging.Logger = logging.getLogger("ringlog.shard")

FULL_SHARE = 15 / 16
"""A ring counts as full from this fill ratio on, because the next frame and its padding may not fit."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Legal names of ring and bell files.
A name in a message must not lead out of the shared-memory directory."""


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
    """All rings that one shard drains, in round-robin order."""

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
        """Start draining a ring. A ring that is attached already stays unchanged.

        Raise RingError if a name is illegal or the ring cannot be attached.
        """
        if name in self._by_name:
            return
        for file in (name, bell):
            if _FILE_NAME.fullmatch(file) is None:
                raise RingError("invalid ring or bell file name", path=file[:128])
        consumer = RingConsumer.attach(
            f"{self._shm_dir}/{name}", shard=self._shard, engine_id=self._engine_id
        )
        ring = _ProducerRing(name, consumer, BellRinger(f"{self._shm_dir}/{bell}"), [])
        self._by_number[self._next_number] = ring
        self._by_name[name] = self._next_number
        self._next_number += 1

    def request_detach(self, name: str, client: bytes, corr: int) -> bool:
        """Request that a ring is detached when it is empty. Return False if it is not attached."""
        number = self._by_name.get(name)
        if number is None:
            return False
        ring = self._by_number[number]
        ring.is_detaching = True
        ring.detach_requests.append((client, corr))
        return True

    def has_pending(self) -> bool:
        """Return True if a ring has frames to drain. Costs a few loads for each ring."""
        for ring in self._by_number.values():  # noqa: SIM110  a generator takes longer than the look
            if not ring.is_broken and self._pending(ring):
                return True
        return False

    def watched(self) -> list[tuple[memoryview, int]]:
        """Return for each ring a shared word, and its value while the ring has nothing to drain."""
        return [ring.consumer.spin_word() for ring in self._by_number.values() if not ring.is_broken]

    def _pending(self, ring: _ProducerRing) -> int:
        try:
            return ring.consumer.pending
        except RingError as e:
            self._break(ring, str(e))
            return 0

    def pending_totals(self) -> tuple[int, int, bool]:
        """Return (rings with frames, bytes of the frames, True if a producer wants no batch window)."""
        rings = nbytes = wants = 0
        for ring in self._by_number.values():
            if not ring.is_broken and (pending := self._pending(ring)):
                rings, nbytes, wants = rings + 1, nbytes + pending, wants | ring.consumer.wakeup_flags
        return rings, nbytes, bool(wants & WakeupFlags.NO_BATCH_WINDOW)

    def fill_ratio(self) -> float:
        """Return the fill ratio of the fullest ring, 0.0 to 1.0.

        Unsettled frames count, as for its producer.
        """
        fullest = 0.0
        for ring in self._by_number.values():
            if not ring.is_broken and (pending := self._pending(ring)):
                consumer = ring.consumer
                taken = pending + consumer.read_position - consumer.tail
                fullest = max(fullest, taken / (consumer.capacity * FULL_SHARE))
        return min(fullest, 1.0)

    def drain(self) -> list[FramesArrived]:
        """Copy frames out of the rings: at most one share for each ring, and one commit batch in total."""
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
                # The producer wrote invalid words into the ring's header, so its ring is closed (RF-25).
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
        # The client of a detaching ring no longer reads settlements, so their free space does not limit the
        # drain.
        free = frames_left if ring.is_detaching else consumer.settle_free - ring.in_flight
        frames_max = min(free, frames_left)
        while frames_max > 0:
            copied = consumer.copy_pending(limit)
            if copied is None:
                return None
            position, buffer = copied
            batch = scan_checked(buffer, position, frames_max=frames_max)
            if batch.end is ScanEnd.PARTIAL and not len(batch):
                # One frame is larger than the ring's share, so it is drained alone.
                total = int.from_bytes(buffer[:4], "little") + LEN_FIELD_BYTES
                if total <= len(buffer) or total > self._pending(ring):
                    self._break(ring, "frame length exceeds the published bytes")
                    return None
                limit = total
                continue
            if batch.end is ScanEnd.INVALID:
                self._break(ring, batch.reason)
            elif batch.end is ScanEnd.CLEAN and batch.stop < len(buffer):
                self._break(ring, "producer published zero bytes instead of a frame")
            consumer.advance(batch.stop)
            if batch.end is ScanEnd.PAD:
                consumer.skip_padding()
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
        """Write the settle entries for the producer, then free the frames' space in the ring."""
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
        # Wake the producer at once, because a single append waits only for this.
        if ring.consumer.wakeup_flags & WakeupFlags.SETTLEMENTS:
            ring.bell.ring()

    def wake_publication_waiters(self) -> None:
        """Wake the clients that sleep until the next publication."""
        for ring in self._by_number.values():
            if ring.consumer.wakeup_flags & WakeupFlags.PUBLICATION:
                ring.bell.ring()

    def detach_empty(self) -> Iterator[tuple[str, int, list[tuple[bytes, int]]]]:
        """Detach the empty rings among those with a detach request.

        Yield (name, frames settled, detach requests). A detach request is (client, correlation id).
        """
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
        """Unmap all rings. The supervisor removes the ring files."""
        for ring in self._by_number.values():
            ring.consumer.detach()
            ring.bell.close()
        self._by_number.clear()
        self._by_name.clear()
