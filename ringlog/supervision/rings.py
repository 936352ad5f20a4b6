"""Lifecycle of rings: created at a client's request, attached by the shard, removed after the client left.

A ring is OPENING (created; the shard has not attached it yet), LIVE, or LEAVING (the client has left; the
shard settles what the client published). A ring outlives any number of incarnations of its shard. Each new
incarnation attaches all rings, also LEAVING ones. Frames that a client published are therefore settled,
whichever processes die in whichever order (R7).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from ringlog.clock import Clock
from ringlog.config import RunConfig
from ringlog.entropy import random_hex
from ringlog.envelope.messages import (
    ErrorReply,
    Message,
    RingAttach,
    RingAttached,
    RingDetach,
    RingDetached,
    RingOpen,
    RingOpened,
)
from ringlog.envelope.refusal import error_reply
from ringlog.errors import Internal, InvalidRequest, NotReady, RingError, Throttled
from ringlog.limits import (
    RING_BYTES_FIRST,
    RING_BYTES_MAX,
    RING_BYTES_MIN,
    RING_BYTES_PER_SETTLE_ENTRY,
    RING_ROOM_FRACTION,
    RINGS_PER_SHARD_MAX,
    SETTLE_ENTRY_BYTES,
)
from ringlog.logs import log_event
from ringlog.process_id import process_started_ticks
from ringlog.ring.doorbell import BellRinger, make_bell
from ringlog.ring.region import (
    create_ring,
    mark_consumer_closed,
    producer_alive,
    producer_closed,
    remove_ring,
)
from ringlog.supervision.restart import NS_PER_S
from ringlog.supervision.sockets import ShardControlLink

log: logging.Logger = logging.getLogger("ringlog.supervision")

CLIENT_ID_BYTES_MAX = 256
RETRY_AFTER_MS = 1_000
LOCK_POLL_NS = NS_PER_S
ATTACH_GRACE_NS = 30 * NS_PER_S
"""Time (ns) within which a client must attach to its new ring."""

ReplyCallback = Callable[[Message], None]


class RingPhase(Enum):
    """Phase of a ring."""

    OPENING = "opening"
    LIVE = "live"
    LEAVING = "leaving"


@dataclass(slots=True)
class ManagedRing:
    """One ring and its client."""

    name: str
    bell: str
    shard: int
    client: str
    made_ns: int
    pid: int = 0
    """Client process that is watched through a pidfd. 0: only the producer's lock shows that it has left."""
    phase: RingPhase = RingPhase.OPENING
    is_dead: bool = False
    """LEAVING because the client died, not because it closed the ring."""
    on_opened: ReplyCallback | None = None
    """Callback of the client that still waits for RingOpened."""
    was_locked: bool = False
    """The producer's lock was seen locked. Only then an unlocked lock means that the producer left."""


class RingManager:
    """All rings of this start of the engine."""

    def __init__(
        self, shm_dir: str, *, engine_id: str, shards: int, settings: RunConfig, clock: Clock
    ) -> None:
        self._shm_dir = shm_dir
        self._engine_id = engine_id
        self._settings = settings
        self._clock = clock
        self._rings: list[dict[str, ManagedRing]] = [{} for _ in range(shards)]
        self._links: list[ShardControlLink | None] = [None] * shards
        self._failed: list[str] = [""] * shards
        self._requests: list[dict[int, str]] = [{} for _ in range(shards)]
        self._pidfds: dict[int, int] = {}  # pid -> pidfd of clients that are watched for their death
        self._made = 0
        self._next_poll_ns = 0

    def __len__(self) -> int:
        return sum(map(len, self._rings))

    def __iter__(self) -> Iterator[ManagedRing]:
        return (ring for rings in self._rings for ring in tuple(rings.values()))

    def pidfds(self) -> dict[int, int]:
        """Return pidfd -> pid of the clients. A pidfd becomes readable when its client dies."""
        return {fd: pid for pid, fd in self._pidfds.items()}

    # -- clients --------------------------------------------------------------------------------------

    def open(self, request: RingOpen, answer: ReplyCallback) -> None:
        """Create a ring. `answer` gets RingOpened after the shard has attached the ring, or an ErrorReply.

        Raises Refused: InvalidRequest, Throttled, NotReady.
        """
        self._check(request)
        ring = self._make(request)
        ring.on_opened = answer
        self._rings[ring.shard][ring.name] = ring
        ring.pid = self._watch(request.pid, request.pid_started)
        self._attach(ring)

    def close(self, name: str) -> None:
        """Start the removal of a ring at its client's request. A ring that does not exist is closed."""
        ring = self._find(name)
        if ring is not None and ring.phase != RingPhase.LEAVING:
            self._begin_leaving(ring, is_dead=False)

    def client_died(self, pid: int) -> None:
        """Start the removal of all rings of a client whose pidfd became readable."""
        fd = self._pidfds.pop(pid, None)
        if fd is not None:
            os.close(fd)
        for ring in self:
            if ring.pid == pid and ring.phase != RingPhase.LEAVING:
                self._begin_leaving(ring, is_dead=True)

    def poll_producer_locks(self) -> None:
        """Once a second, find the rings whose producer released its lock, and start their removal.

        A closed client sends no message, and its process may live for years. A pidfd covers only the process,
        and possibly the wrong one: the pid may have been reused before the supervisor opened it.
        """
        now = self._clock.monotonic_ns()
        if now < self._next_poll_ns:
            return
        self._next_poll_ns = now + LOCK_POLL_NS
        for ring in self:
            if ring.phase != RingPhase.LEAVING:
                self._check_producer_lock(ring, now)

    def _check(self, request: RingOpen) -> None:
        if not 0 <= request.shard < len(self._rings):
            raise InvalidRequest(
                "shard must be >= 0 and below the number of shards",
                shard=request.shard,
                shards=len(self._rings),
            )
        if len(request.client.encode("utf-8", "surrogatepass")) > CLIENT_ID_BYTES_MAX:
            raise InvalidRequest(
                f"client id must have at most {CLIENT_ID_BYTES_MAX} bytes", max_bytes=CLIENT_ID_BYTES_MAX
            )
        if request.ring_bytes and not RING_BYTES_MIN <= request.ring_bytes <= RING_BYTES_MAX:
            raise InvalidRequest(
                f"ring_bytes must be 0 or from {RING_BYTES_MIN} to {RING_BYTES_MAX}",
                bytes=request.ring_bytes,
                min=RING_BYTES_MIN,
                max=RING_BYTES_MAX,
            )
        if self._failed[request.shard]:
            raise NotReady("the shard failed", reason="shard_failed", shard=request.shard)
        if len(self._rings[request.shard]) >= RINGS_PER_SHARD_MAX:
            raise Throttled(
                "the shard has its maximum number of rings; close clients that are not used",
                shard=request.shard,
                max=RINGS_PER_SHARD_MAX,
                retry_after_ms=RETRY_AFTER_MS,
            )

    def _make(self, request: RingOpen) -> ManagedRing:
        self._made += 1
        # A client's string must never become part of a path.
        stem = f"ring-{request.shard:02d}-{self._made:06d}-{random_hex(4)}"
        ring = ManagedRing(
            name=f"{stem}.ring",
            bell=f"{stem}.bell",
            shard=request.shard,
            client=request.client,
            made_ns=self._clock.monotonic_ns(),
        )
        ring_bytes = self._size_for(request.ring_bytes)
        try:
            create_ring(
                self._path(ring.name),
                ring_bytes=ring_bytes,
                settle_entries=settle_entries_for(ring_bytes, self._settings),
                shard=ring.shard,
                engine_id=self._engine_id,
                client=ring.client,
                clock=self._clock,
            )
            make_bell(self._path(ring.bell))
        except RingError as e:
            self._unlink(ring)
            raise Throttled(
                "no room for a ring in shared memory: lower run.ring_bytes or enlarge /dev/shm",
                reason=e.message, bytes=ring_bytes, retry_after_ms=RETRY_AFTER_MS,
            ) from None  # fmt: skip
        return ring

    def _size_for(self, requested: int) -> int:
        """Return the size in bytes of a ring for a client that requested this size; 0 = a first ring."""
        wanted = min(requested or RING_BYTES_FIRST, max(self._settings.ring_bytes, RING_BYTES_MIN))
        if wanted <= RING_BYTES_FIRST:
            return wanted
        facts = os.statvfs(self._shm_dir)
        room = facts.f_bavail * facts.f_frsize // RING_ROOM_FRACTION
        return max(RING_BYTES_FIRST, min(wanted, room))

    def _watch(self, pid: int, started: int) -> int:
        """Watch a client process for its death.

        Returns its pid, or 0 if only the producer's lock can show that the client has left. A client in
        another pid namespace has other pids. The same number may be another process here, whose death must
        not remove the client's rings.
        """
        if pid <= 0 or started <= 0:
            return 0
        if pid not in self._pidfds:
            try:
                self._pidfds[pid] = os.pidfd_open(pid)
            except OSError:
                return 0
        if process_started_ticks(pid) == started:
            return pid
        if not any(ring.pid == pid for ring in self):
            os.close(self._pidfds.pop(pid))
        return 0

    def _check_producer_lock(self, ring: ManagedRing, now: int) -> None:
        try:
            is_held = producer_alive(self._path(ring.name))
            is_closed = not is_held and producer_closed(self._path(ring.name))
        except RingError as e:
            if ring.pid in self._pidfds:
                # No free descriptors, or another process removed the name. Both ends may still be at work,
                # and the pidfd shows when this client dies.
                return
            log_event(log, logging.ERROR, "ring file was replaced or removed", ring=ring.name, reason=str(e))
            is_held, is_closed = False, True
        if is_held:
            ring.was_locked = True
        elif ring.was_locked or is_closed or now - ring.made_ns > ATTACH_GRACE_NS:
            self._begin_leaving(ring, is_dead=True)

    # -- shards ---------------------------------------------------------------------------------------

    def shard_ready(self, shard: int, link: ShardControlLink) -> None:
        """Let a new incarnation attach all rings of its shard."""
        self._links[shard] = link
        for ring in tuple(self._rings[shard].values()):
            self._attach(ring)

    def shard_down(self, shard: int) -> None:
        """Close the link to a dead incarnation. Its rings wait for the successor."""
        link, self._links[shard] = self._links[shard], None
        self._requests[shard].clear()
        if link is not None:
            link.close()

    def shard_failed(self, shard: int, reason: str) -> None:
        """Remove the rings of a shard that was given up: no process will drain them.

        The clients detect the removal. A request for a new ring fails with NotReady `shard_failed`.
        """
        self._failed[shard] = reason
        for ring in tuple(self._rings[shard].values()):
            self._answer(ring, error_reply(NotReady("the shard failed", reason="shard_failed", shard=shard)))
            self._remove(ring)

    def links(self) -> dict[int, ShardControlLink]:
        """Return shard -> link, for the shards that serve."""
        return {shard: link for shard, link in enumerate(self._links) if link is not None}

    def handle_reply(self, shard: int, corr: int, message: Message) -> None:
        """Handle a shard's reply about a ring."""
        name = self._requests[shard].pop(corr, "")
        if isinstance(message, RingAttached):
            self._attached(shard, message.ring)
        elif isinstance(message, RingDetached):
            ring = self._rings[shard].get(message.ring)
            if ring is not None and ring.phase == RingPhase.LEAVING:
                self._remove(ring)
        elif isinstance(message, ErrorReply) and name:
            self._refused(shard, name, message)

    def _attached(self, shard: int, name: str) -> None:
        ring = self._rings[shard].get(name)
        if ring is None or ring.phase != RingPhase.OPENING:
            return
        ring.phase = RingPhase.LIVE
        self._answer(ring, RingOpened(ring.name, ring.bell))

    def _refused(self, shard: int, name: str, error: ErrorReply) -> None:
        """Remove a ring that the shard refused: the client cannot use it either."""
        log_event(log, logging.ERROR, "shard refused a ring", shard=shard, ring=name, reason=error.message)
        ring = self._rings[shard].get(name)
        if ring is not None:
            self._answer(ring, error)
            self._notify_producer(ring)
            self._remove(ring)

    def _notify_producer(self, ring: ManagedRing) -> None:
        """Mark the ring closed. A producer that attached already would otherwise push forever, unread."""
        mark_consumer_closed(self._path(ring.name))
        bell = BellRinger(self._path(ring.bell))
        # If the bell no longer exists, the client detects the mark when one of its requests ends.
        with contextlib.suppress(RingError):
            bell.ring()
        bell.close()

    def _attach(self, ring: ManagedRing) -> None:
        link = self._links[ring.shard]
        if link is None:
            return
        self._ask(ring, link, RingAttach(ring.name, ring.bell, ring.client))
        if ring.phase == RingPhase.LEAVING:
            self._ask(ring, link, RingDetach(ring.name, ring.is_dead))

    def _begin_leaving(self, ring: ManagedRing, *, is_dead: bool) -> None:
        log_event(log, logging.DEBUG, "ring is being removed", ring=ring.name, dead=is_dead)
        ring.phase, ring.is_dead = RingPhase.LEAVING, is_dead
        self._answer(ring, error_reply(Internal("the ring was closed before the shard attached it")))
        if self._failed[ring.shard]:
            self._remove(ring)
            return
        link = self._links[ring.shard]
        if link is not None:
            self._ask(ring, link, RingDetach(ring.name, is_dead))

    def _ask(self, ring: ManagedRing, link: ShardControlLink, message: Message) -> None:
        corr = link.send(message)
        if corr:
            self._requests[ring.shard][corr] = ring.name
        else:
            # The high-water mark exceeds two messages for each of the most rings. This shard has therefore
            # not read for long. The supervisor will detect that it is stuck and restart it, and its successor
            # attaches all rings again.
            log_event(
                log, logging.ERROR, "shard does not read its messages", shard=ring.shard, ring=ring.name
            )

    # -- replies and removal --------------------------------------------------------------------------

    def _answer(self, ring: ManagedRing, message: Message) -> None:
        opener, ring.on_opened = ring.on_opened, None
        if opener is not None:
            opener(message)

    def _remove(self, ring: ManagedRing) -> None:
        del self._rings[ring.shard][ring.name]
        self._unlink(ring)
        if ring.pid in self._pidfds and not any(other.pid == ring.pid for other in self):
            os.close(self._pidfds.pop(ring.pid))

    def _unlink(self, ring: ManagedRing) -> None:
        remove_ring(self._path(ring.name))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(ring.bell))

    def _find(self, name: str) -> ManagedRing | None:
        return next((rings[name] for rings in self._rings if name in rings), None)

    def _path(self, name: str) -> str:
        return os.path.join(self._shm_dir, name)

    def close_all(self) -> None:
        """Close all descriptors. The ring files are removed with the shared-memory directory."""
        for shard in range(len(self._links)):
            self.shard_down(shard)
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()


def settle_entries_for(ring_bytes: int, settings: RunConfig) -> int:
    """Return the number of settlements for which a ring of this size has room."""
    return min(settings.settle_entries, ring_bytes // RING_BYTES_PER_SETTLE_ENTRY)


def first_ring_file_bytes(settings: RunConfig) -> int:
    """Return approximately how many bytes of shared memory a client's first ring takes."""
    ring_bytes = min(settings.ring_bytes, RING_BYTES_FIRST)
    return ring_bytes + settle_entries_for(ring_bytes, settings) * SETTLE_ENTRY_BYTES + 8_192
