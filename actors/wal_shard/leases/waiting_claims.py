"""Claims that wait in a shard for ready jobs, with their deadlines. Pure.

The shard tries to serve a waiting claim when one of these events occurs:

- The queue is woken, because a record was published or a job was returned.
- A lease or a delay ends.
- The wait of the claim ends. It then gets an empty reply.

The last two are times. One deadline of the shard covers all of them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ringlog.contract import ControlReceived, Reply
from ringlog.envelope import messages as m
from ringlog.envelope.refusal import error_reply
from ringlog.errors import Refused, Throttled
from ringlog.limits import PRESSURE_RETRY_MS, WAIT_MS_MAX, WAITING_CLAIMS_MAX

_MS_NS = 1_000_000
_ENDS_OVER_MAX = 1_024
"""The heap of deadlines is swept when its finished entries exceed the waiting claims by this number."""


@dataclass(slots=True)
class WaitingClaim:
    """A waiting claim and the address of its sender."""

    client: bytes
    corr: int
    message: m.Claim
    key: int
    number: int
    is_done: bool = False

    def answer(self, message: m.Message) -> Reply:
        """Return the reply to the sender of the claim."""
        return Reply(self.client, self.corr, message)


class WaitingClaims:
    """The waiting claims of one shard."""

    def __init__(self) -> None:
        self.now_ns = 0
        """Current monotonic time in nanoseconds."""
        self.final_replies: list[Reply] = []
        """Replies to claims that were cancelled or failed; not sent yet."""
        self._of: dict[int, OrderedDict[int, WaitingClaim]] = {}
        """Claims by the key of their group and by their number, oldest first."""
        self._count = self._made = 0
        self._by_call: dict[int, WaitingClaim] = {}
        self._ends: list[tuple[int, int, WaitingClaim]] = []
        """Heap of (deadline in nanoseconds, number, claim).
        Finished claims are removed at the top of the heap, or when they are the majority."""
        self._dues: list[tuple[int, int]] = []
        """Heap of (time in milliseconds, key): when a group with waiting claims has a ready record again."""
        self._due_of: dict[int, int] = {}
        """The earliest time of each key in `_dues`, so that no time is added twice."""
        self._woken: dict[int, None] = {}
        self._windows: dict[int, int] = {}
        """Monotonic time in nanoseconds at which the open window of a key closes."""

    def __bool__(self) -> bool:
        return self._count > 0 or bool(self.final_replies)

    def __len__(self) -> int:
        """Number of waiting claims of all groups."""
        return self._count

    def of(self, key: int) -> int:
        """Return the number of claims that wait for this group."""
        return len(self._of.get(key, ()))

    def reattach_claim(self, event: ControlReceived, call: int) -> bool:
        """If this claim waits already, redirect its reply to the new sender and return True."""
        waiting_claim = self._by_call.get(call)
        if waiting_claim is None:
            return False
        waiting_claim.client, waiting_claim.corr = event.client, event.corr
        return True

    def has(self, call: int) -> bool:
        """Return True if a claim with this call number waits."""
        return call in self._by_call

    def park(
        self, key: int, event: ControlReceived, message: m.Claim, jitter_ms: int = 0
    ) -> None:  # fmt: skip
        """Add a waiting claim. Raise Throttled if too many claims wait.

        With `jitter_ms`, the claim opens a window of this length unless one is open. Until the window closes,
        no waiting claim of this queue gets jobs. The jobs can then be shared equally among the claims.
        """
        if self._count >= WAITING_CLAIMS_MAX:
            raise Throttled(
                "too many waiting claims, retry later", limit="waiting_claims", max=WAITING_CLAIMS_MAX,
                retry_after_ms=PRESSURE_RETRY_MS,
            )  # fmt: skip
        self._made += 1
        waiting_claim = WaitingClaim(event.client, event.corr, message, key, self._made)
        self._of.setdefault(key, OrderedDict())[waiting_claim.number] = waiting_claim
        self._count += 1
        if message.call:
            self._by_call[message.call] = waiting_claim
        end_ns = self.now_ns + min(message.wait_ms, WAIT_MS_MAX) * _MS_NS
        if jitter_ms:
            close_ns = self._windows.setdefault(key, self.now_ns + jitter_ms * _MS_NS)
            end_ns = max(end_ns, close_ns)
        heapq.heappush(self._ends, (end_ns, waiting_claim.number, waiting_claim))
        if len(self._ends) > 2 * self._count + _ENDS_OVER_MAX:
            self._ends = [entry for entry in self._ends if not entry[2].is_done]
            heapq.heapify(self._ends)

    def first(self, key: int) -> WaitingClaim | None:
        """Return the claim that has waited longest for this group, or None."""
        waiting = self._of.get(key)
        return next(iter(waiting.values())) if waiting else None

    def all_of(self, key: int) -> list[WaitingClaim]:
        """Return the claims that wait for this group, oldest first."""
        return list(self._of.get(key, {}).values())

    def remove_claim(self, waiting_claim: WaitingClaim) -> None:
        """Remove a waiting claim without a reply."""
        waiting_claim.is_done = True
        self._count -= 1
        self._by_call.pop(waiting_claim.message.call, None)
        waiting = self._of[waiting_claim.key]
        del waiting[waiting_claim.number]
        if not waiting:
            del self._of[waiting_claim.key]

    def cancel_claim(self, key: int, call: int, answer: m.Message) -> None:
        """If the claim with this call number waits for this group, end its wait with this reply."""
        waiting_claim = self._by_call.get(call)
        if waiting_claim is not None and waiting_claim.key == key:
            self.remove_claim(waiting_claim)
            self.final_replies.append(waiting_claim.answer(answer))

    def fail_claims(self, error: Refused, key: int | None = None) -> None:
        """Fail the claims that wait for this group, or all waiting claims if `key` is None."""
        answer = error_reply(error)
        for each in list(self._of) if key is None else [key]:
            while (waiting_claim := self.first(each)) is not None:
                self.remove_claim(waiting_claim)
                self.final_replies.append(waiting_claim.answer(answer))

    def drop_process(self, process_id: tuple[int, int]) -> None:
        """Remove the waiting claims of a process that died. They get no jobs and no reply."""
        self._drop(lambda claim: (claim.message.pid, claim.message.pid_started) == process_id)

    def drop_connections(self, connections: Collection[bytes]) -> None:
        """Remove the waiting claims of connections that ended, such as those that a gateway forwarded."""
        self._drop(lambda claim: claim.client in connections)

    def _drop(self, is_dropped: Callable[[WaitingClaim], bool]) -> None:
        for key in list(self._of):
            for waiting_claim in self.all_of(key):
                if is_dropped(waiting_claim):
                    self.remove_claim(waiting_claim)

    # -- time -----------------------------------------------------------------------------------------

    def schedule_wakeup(self, key: int, due_ms: int | None) -> None:
        """Wake this group at `due_ms`, when a record is ready again. None schedules nothing."""
        if due_ms is not None and due_ms < self._due_of.get(key, due_ms + 1):
            self._due_of[key] = due_ms
            heapq.heappush(self._dues, (due_ms, key))

    def wake(self, key: int) -> None:
        """Serve the waiting claims of this group again, because a record may have become ready."""
        if key in self._of:
            self._woken[key] = None

    def next_deadline_ns(self, now_us: int) -> int | None:
        """Return the monotonic time of the next event for a waiting claim, or None if there is none.

        Events are the end of a wait, of a lease, of a delay or of a window. `now_us` is the clock of leases.
        """
        while self._ends and self._ends[0][2].is_done:
            heapq.heappop(self._ends)
        times = [self._ends[0][0]] if self._ends else []
        if self._dues and self._count:
            times.append(self.now_ns + max(self._dues[0][0] * 1_000 - now_us, 0) * 1_000)
        times += self._windows.values()
        if self.final_replies or any(key not in self._windows for key in self._woken):
            times.append(self.now_ns)
        return min(times) if times else None

    def take_woken(self, now_us: int) -> list[int]:
        """Return the keys of groups whose claims can be served now, and reset their wake-ups."""
        while self._dues and self._dues[0][0] * 1_000 <= now_us:
            due_ms, key = heapq.heappop(self._dues)
            if self._due_of.get(key) == due_ms:
                del self._due_of[key]
            self.wake(key)
        for key in [each for each, close_ns in self._windows.items() if close_ns <= self.now_ns]:
            del self._windows[key]
            self.wake(key)
        woken, self._woken = self._woken, {}
        return [key for key in woken if key in self._of and key not in self._windows]

    def take_expired(self, held: Collection[int] = ()) -> list[WaitingClaim]:
        """Remove and return the claims whose wait has ended.

        Claims of the groups in `held` stay. They are served as soon as the missing data is available.
        """
        ended, kept = [], []
        while self._ends and (self._ends[0][0] <= self.now_ns or self._ends[0][2].is_done):
            entry = heapq.heappop(self._ends)
            waiting_claim = entry[2]
            if not waiting_claim.is_done and waiting_claim.key in held:
                kept.append(entry)
            elif not waiting_claim.is_done:
                self.remove_claim(waiting_claim)
                ended.append(waiting_claim)
        for entry in kept:
            heapq.heappush(self._ends, entry)
        return ended
