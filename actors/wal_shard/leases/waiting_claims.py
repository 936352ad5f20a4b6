"""Claims that wait in a shard: who waits for which queue, until when, and when to look again. Pure.

A claim waits for one of these: its queue was woken (something was published, or came back), a lease or a
delay ended, its own time is over. The last two are times; one deadline of the shard covers them all.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from ringlog.contract import ControlReceived, Reply
from ringlog.envelope import messages as m
from ringlog.envelope.refusal import error_reply
from ringlog.errors import Refused, Throttled
from ringlog.limits import PRESSURE_RETRY_MS, WAIT_MS_MAX, WAITING_CLAIMS_MAX

_MS_NS = 1_000_000
_ENDS_OVER_MAX = 1_024
"""Ends of waits that are over, beside as many as are not; beyond it they are swept."""


@dataclass(slots=True)
class WaitingClaim:
    """A claim that waits."""

    client: bytes
    corr: int
    message: m.Claim
    key: int
    number: int
    is_done: bool = False

    def answer(self, message: m.Message) -> Reply:
        """What its sender is told."""
        return Reply(self.client, self.corr, message)


class WaitingClaims:
    """The waiting claims of one shard."""

    def __init__(self) -> None:
        self.now_ns = 0
        """Monotonic."""
        self.final_replies: list[Reply] = []
        """Answers to claims that wait in vain."""
        self._of: dict[int, OrderedDict[int, WaitingClaim]] = {}
        """By topic and by number; who came first is first."""
        self._count = self._made = 0
        self._by_call: dict[int, WaitingClaim] = {}
        self._ends: list[tuple[int, int, WaitingClaim]] = []
        """Heap of waits by their end; those over before leave when they come to its top, or are the most."""
        self._dues: list[tuple[int, int]] = []
        """Heap of (when something is ready again, topic) of queues where claims wait; milliseconds."""
        self._due_of: dict[int, int] = {}
        """The earliest of a topic in it, so that nothing is noted twice."""
        self._woken: dict[int, None] = {}
        self._windows: dict[int, int] = {}
        """When each open window closes."""

    def __bool__(self) -> bool:
        return self._count > 0 or bool(self.final_replies)

    def __len__(self) -> int:
        """Claims that wait, of all queues."""
        return self._count

    def of(self, key: int) -> int:
        """How many wait for this queue."""
        return len(self._of.get(key, ()))

    def reattach_claim(self, event: ControlReceived, call: int) -> bool:
        """Does this claim wait already? Then it is answered where it came from last."""
        parked = self._by_call.get(call)
        if parked is None:
            return False
        parked.client, parked.corr = event.client, event.corr
        return True

    def has(self, call: int) -> bool:
        """Does a claim under this number wait?"""
        return call in self._by_call

    def park(
        self, key: int, event: ControlReceived, message: m.Claim, jitter_ms: int = 0
    ) -> None:  # fmt: skip
        """Have a claim wait; raises Throttled when too many do.

        With `jitter_ms` it opens a window of this length, unless one is open: until that closes nobody is
        answered who waits for this queue (QC-11).
        """
        if self._count >= WAITING_CLAIMS_MAX:
            raise Throttled(
                "too many claims wait", limit="waiting_claims", max=WAITING_CLAIMS_MAX,
                retry_after_ms=PRESSURE_RETRY_MS,
            )  # fmt: skip
        self._made += 1
        parked = WaitingClaim(event.client, event.corr, message, key, self._made)
        self._of.setdefault(key, OrderedDict())[parked.number] = parked
        self._count += 1
        if message.call:
            self._by_call[message.call] = parked
        end_ns = self.now_ns + min(message.wait_ms, WAIT_MS_MAX) * _MS_NS
        if jitter_ms:
            close_ns = self._windows.setdefault(key, self.now_ns + jitter_ms * _MS_NS)
            end_ns = max(end_ns, close_ns)
        heapq.heappush(self._ends, (end_ns, parked.number, parked))
        if len(self._ends) > 2 * self._count + _ENDS_OVER_MAX:
            self._ends = [entry for entry in self._ends if not entry[2].is_done]
            heapq.heapify(self._ends)

    def first(self, key: int) -> WaitingClaim | None:
        """Who has waited longest for this queue."""
        waiting = self._of.get(key)
        return next(iter(waiting.values())) if waiting else None

    def all_of(self, key: int) -> list[WaitingClaim]:
        """Who waits for this queue, who came first is first."""
        return list(self._of.get(key, {}).values())

    def remove_claim(self, parked: WaitingClaim) -> None:
        """It waits no longer."""
        parked.is_done = True
        self._count -= 1
        self._by_call.pop(parked.message.call, None)
        waiting = self._of[parked.key]
        del waiting[parked.number]
        if not waiting:
            del self._of[parked.key]

    def cancel_claim(self, key: int, call: int, answer: m.Message) -> None:
        """If the claim under this number waits for this queue, it ends with this answer."""
        parked = self._by_call.get(call)
        if parked is not None and parked.key == key:
            self.remove_claim(parked)
            self.final_replies.append(parked.answer(answer))

    def fail_claims(self, error: Refused, key: int | None = None) -> None:
        """Who waits, for this queue or for any, is told that it is in vain."""
        answer = error_reply(error)
        for each in list(self._of) if key is None else [key]:
            while (parked := self.first(each)) is not None:
                self.remove_claim(parked)
                self.final_replies.append(parked.answer(answer))

    def drop_process(self, life: tuple[int, int]) -> None:
        """This process is no more: its claims are given nothing, and nobody is answered (QC-16)."""
        for key in list(self._of):
            for parked in self.all_of(key):
                if (parked.message.pid, parked.message.born) == life:
                    self.remove_claim(parked)

    # -- time -----------------------------------------------------------------------------------------

    def schedule_wakeup(self, key: int, due_ms: int | None) -> None:
        """Something of this queue is ready again then."""
        if due_ms is not None and due_ms < self._due_of.get(key, due_ms + 1):
            self._due_of[key] = due_ms
            heapq.heappush(self._dues, (due_ms, key))

    def wake(self, key: int) -> None:
        """Something may be ready in this queue that was not."""
        if key in self._of:
            self._woken[key] = None

    def next_deadline_ns(self, now_us: int) -> int | None:
        """When a wait ends, or a lease or delay does that somebody waits for; None = nobody waits."""
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
        """Topics to be looked at: what was said of them is forgotten with it."""
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
        """Claims whose time is over; they wait no longer. Not those for the topics `held`: these are looked
        at as soon as what they need is known."""
        ended, kept = [], []
        while self._ends and (self._ends[0][0] <= self.now_ns or self._ends[0][2].is_done):
            entry = heapq.heappop(self._ends)
            parked = entry[2]
            if not parked.is_done and parked.key in held:
                kept.append(entry)
            elif not parked.is_done:
                self.remove_claim(parked)
                ended.append(parked)
        for entry in kept:
            heapq.heappush(self._ends, entry)
        return ended
