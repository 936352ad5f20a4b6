"""Durable: what the log says of a queue whose leases outlive their shard, beside the queue itself. Pure.

The shard does what it is asked to the queue and then has the `change` that says so, to be logged before
anybody is answered. Replay applies the same changes to an empty queue, in the order of their numbers; one
that is applied already is passed over (QL-17). What was never handed out needs no change: no number that the
queue has no run of was ever given to anybody, so the cursor of a replayed queue begins anew and passes over
its runs.

Time only goes on: what had expired by the instant of a change stays so, also when the clock went back
(QL-20).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np
from msgspec import structs
from pyroaring import BitMap64

from ringlog.errors import CorruptData, InvariantViolation
from ringlog.leases.holders import NO_LIFE, Life
from ringlog.leases.live_seqs import Live, next_alive
from ringlog.leases.queue import Queue
from ringlog.leases.queue_change import CLAIM_ROW, SPAN_ROW, U64, JobsChange, JobsOp
from ringlog.leases.queue_snapshot import add_saved, save_runs
from ringlog.leases.runs import LEASED, RETURNED
from ringlog.leases.spans import spans_of
from ringlog.leases.table import EXHAUST
from ringlog.leases.tokens import Tokens
from ringlog.leases.types import I64, Claimed, Matched
from ringlog.limits import (
    DURABLE_CALL_ROWS_KEPT_MAX,
    DURABLE_CALLS_KEPT_MAX,
    DURABLE_HOLDERS_MAX,
    DURABLE_LEASES_MAX,
    JOBS_PER_REQUEST_MAX,
    LINKS_MAX,
)

DAMAGE = (msgspec.MsgspecError, ValueError, IndexError, OverflowError)
"""What decoding of bytes raises that no version wrote."""
_WRITTEN_ROWS = 4_096
"""Runs in one part of what is written when leases become durable."""
_NONE: I64 = np.zeros(0, np.int64)


class Durable:
    """The log's side of one queue."""

    def __init__(self, queue: Queue | None = None) -> None:
        self.queue = queue if queue is not None else Queue(Tokens(0))
        """A replayed one is given its shard's tokens by `recovered`."""
        self.queue.known_max = DURABLE_LEASES_MAX
        self.changes = 0
        """Number of the last change."""
        self.at_ms = 0
        """When that was; never less than of one before."""
        self.calls: OrderedDict[int, JobsChange] = OrderedDict()
        """The latest changes by the number of their call, for who asks again."""
        self._call_rows = 0
        self._lives: dict[int, Life] = {}
        self._links: dict[Life, int] = {}
        """Processes that hold something, perhaps, and the links of their runs; the same the other way."""

    # -- what happened --------------------------------------------------------------------------------

    def claimed(
        self, given: Claimed, node: str, now_ms: int, *, call: int = 0, link: int = 0, life: Life = NO_LIFE
    ) -> JobsChange:
        """A claim was given these. What the queue set `aside` with its last claim is said with the first."""
        aside = [n for a, b in self.queue.aside for n in (a, b - a)] if given.aside else []
        if link:
            self._note_life(link, life)
        rows = [n for a, b, deliveries, token in given.runs for n in (a, b - a, deliveries, token)]
        return self._change(
            JobsOp.CLAIMED, now_ms, node=node, until_ms=given.deadline, rows=rows, call=call,
            life=life if link else NO_LIFE, aside=aside,
        )  # fmt: skip

    def released(
        self, seqs: I64, delay_ms: int, now_ms: int, *, call: int = 0, skipped: Iterable[int] = (),
        reason: str = "",
    ) -> JobsChange:  # fmt: skip
        """These ascending jobs were given back."""
        until_ms = now_ms + delay_ms if delay_ms else 0
        return self._change(
            JobsOp.RELEASED, now_ms, until_ms=until_ms, rows=_flat(seqs), call=call, skipped=list(skipped),
            reason=reason,
        )  # fmt: skip

    def undone(self, seqs: I64, now_ms: int, *, call: int = 0, skipped: Iterable[int] = ()) -> JobsChange:
        """These ascending jobs were given back, and nobody had begun them."""
        return self._change(JobsOp.UNDONE, now_ms, rows=_flat(seqs), call=call, skipped=list(skipped))

    def extended(
        self, seqs: I64, until_ms: int, now_ms: int, *, call: int = 0, skipped: Iterable[int] = ()
    ) -> JobsChange:
        """These ascending jobs are held up to another instant."""
        return self._change(
            JobsOp.EXTENDED, now_ms, until_ms=until_ms, rows=_flat(seqs), call=call, skipped=list(skipped)
        )

    def rejected(
        self, seqs: I64, reason: str, now_ms: int, *, call: int = 0, skipped: Iterable[int] = ()
    ) -> JobsChange:
        """These ascending jobs were set aside."""
        return self._change(
            JobsOp.REJECTED, now_ms, rows=_flat(seqs), reason=reason, call=call, skipped=list(skipped)
        )

    def moved(self, now_ms: int) -> JobsChange:
        """More jobs were moved to the dead letters."""
        return self._change(JobsOp.MOVED, now_ms, rows=[self.queue.dead_lettered])

    def written(self, now_ms: int) -> list[JobsChange]:
        """Everything that is known, when leases become durable (QL-21)."""
        changes = [
            self._change(JobsOp.WRITTEN, now_ms, saved=part)
            for part in save_runs(self.queue, self._lives, _WRITTEN_ROWS)
        ]
        return [*changes, self.moved(now_ms)] if self.queue.dead_lettered else changes

    def _change(
        self, op: JobsOp, now_ms: int, *, node: str = "", until_ms: int = 0, rows: list[int] | None = None,
        call: int = 0, skipped: list[int] | None = None, life: Life = NO_LIFE, reason: str = "",
        aside: list[int] | None = None, saved: bytes | None = None,
    ) -> JobsChange:  # fmt: skip
        change = JobsChange(
            0, self.changes + 1, op, now_ms, 0, node, until_ms, rows or [], call, skipped or [], None, life,
            reason, aside or [], saved,
        )  # fmt: skip
        self._note(change)
        return change

    def _note(self, change: JobsChange) -> None:
        self.changes, self.at_ms = change.number, max(self.at_ms, change.at_ms)
        if change.call:
            self.keep(change)

    def keep(self, change: JobsChange) -> None:
        """Remember a change for who makes its call again."""
        self._forget_call(change.call)
        if change.reason:
            change = structs.replace(change, reason="")
        self.calls[change.call] = change
        self._call_rows += _numbers_in(change)
        while len(self.calls) > DURABLE_CALLS_KEPT_MAX or self._call_rows > DURABLE_CALL_ROWS_KEPT_MAX:
            self._forget_call(next(iter(self.calls)))

    def _forget_call(self, call: int) -> None:
        old = self.calls.pop(call, None)
        if old is not None:
            self._call_rows -= _numbers_in(old)

    # -- who ------------------------------------------------------------------------------------------

    def room_for(self, nodes: Iterable[str]) -> list[bool]:
        """Of each of those who claim together: may it be given something? A snapshot names only so many."""
        holders, new = self.queue.holders, set[str]()
        found = []
        for node in nodes:
            if holders.find(node) < 0 and node not in new:
                if len(holders) + len(new) >= DURABLE_HOLDERS_MAX:
                    found.append(False)
                    continue
                new.add(node)
            found.append(True)
        return found

    def _note_life(self, link: int, life: Life) -> None:
        self._links[life], self._lives[link] = link, life
        if len(self._lives) > 2 * LINKS_MAX:
            runs = self.queue.runs
            held = {runs.link[row] for row in runs.rows() if runs.state[row] == LEASED}
            self._lives = {each: life for each, life in self._lives.items() if each in held}
            self._links = {life: each for each, life in self._lives.items()}

    def learn(self, links: Mapping[Life, int]) -> None:
        """Which processes claimed what is held, when leases become durable."""
        runs = self.queue.runs
        held = {runs.link[row] for row in runs.rows() if runs.state[row] == LEASED}
        for life, link in links.items():
            if link in held:
                self._note_life(link, life)

    def link_of(self, life: Life) -> int:
        """While replaying: the link of what a process claimed."""
        if life == NO_LIFE:
            return 0
        link = self._links.get(life) or len(self._links) + 1
        self._note_life(link, life)
        return link

    @property
    def lives(self) -> dict[int, Life]:
        """Processes by the links of their runs; some hold nothing any more."""
        return self._lives

    # -- replay ---------------------------------------------------------------------------------------

    def apply(self, change: JobsChange) -> None:
        """Put a change from the log into force, unless it is already; raises CorruptData for one that no
        version can have written."""
        if change.number <= self.changes:
            return
        _require_sound(change)
        queue, rows = self.queue, change.rows
        self._note(change)
        queue.settle(self.at_ms)
        if change.op == JobsOp.CLAIMED:
            self._set_aside(change.aside)
            link = self.link_of(change.life)
            for at in range(0, len(rows), CLAIM_ROW):
                first, count, deliveries, token = rows[at : at + CLAIM_ROW]
                queue.put(
                    first, first + count, LEASED, at=change.until_ms, token=token, node=change.node,
                    deliveries=deliveries, link=link,
                )  # fmt: skip
        elif change.op == JobsOp.MOVED:
            queue.dead_lettered = rows[0] if rows else 0
        elif change.op == JobsOp.WRITTEN:
            try:
                add_saved(queue, change.saved or b"", self.link_of)
            except DAMAGE as e:
                raise CorruptData("a part of a queue's leases does not decode", reason=str(e)) from None
        else:
            self._apply_settled(change, self._held(rows))

    def _apply_settled(self, change: JobsChange, seqs: I64) -> None:
        queue, matched = self.queue, Matched(seqs, _NONE, _NONE)
        if change.op == JobsOp.RELEASED:
            if change.reason:
                queue.failed(matched, change.reason, change.at_ms)
            # A delay from 0 on: `until_ms` is an instant.
            queue.nack(matched, change.until_ms, 0)
        elif change.op == JobsOp.UNDONE:
            queue.undo(matched)
        elif change.op == JobsOp.EXTENDED:
            queue.extend(matched, change.until_ms, 0)
        else:
            queue.reject(matched, change.reason, change.at_ms)

    def _set_aside(self, rows: list[int]) -> None:
        queue, runs = self.queue, self.queue.runs
        for first, count in zip(rows[::SPAN_ROW], rows[1::SPAN_ROW], strict=True):
            for row in queue.exactly(first, first + count):
                if runs.state[row] == RETURNED:
                    queue.move(row, EXHAUST)

    def _held(self, rows: list[int]) -> I64:
        """Those of the numbers in these stretches that are leased: of the others the change is stale."""
        runs = self.queue.runs
        parts = [
            np.arange(max(first, runs.first[row]), min(first + count, runs.stop[row]), dtype=np.int64)
            for first, count in zip(rows[::SPAN_ROW], rows[1::SPAN_ROW], strict=True)
            for row in runs.within(first, first + count)
            if runs.state[row] == LEASED
        ]
        return np.concatenate(parts) if parts else _NONE

    def recovered(self, live: Live, tokens: Tokens, link_of: Callable[[Life], int]) -> None:
        """The log is applied: what left the topic meanwhile is no job any more, new leases are named by
        `tokens`, and processes are known by the shard's links from here on."""
        queue, runs = self.queue, self.queue.runs
        queue.take_tokens(tokens)
        self._relink(link_of)
        gone = BitMap64()
        for row in runs.rows():
            at, stop = runs.first[row], runs.stop[row]
            while at < stop:
                low, high = next_alive(live, at)
                low = min(low, stop) if at <= live.head else stop
                gone.add_range(at, low)
                at = max(low, min(high, stop))
        queue.removed(live.front, gone, on_request=False)
        queue.ready_index.passed -= gone
        queue.ready_index.passed.remove_range(0, live.front)

    def _relink(self, link_of: Callable[[Life], int]) -> None:
        runs, lives = self.queue.runs, self._lives
        self._lives, self._links = {}, {}
        new = {0: 0}
        for row in runs.rows():
            link = runs.link[row] if runs.state[row] == LEASED else 0
            if link not in new:
                new[link] = link_of(lives[link])
                self._note_life(new[link], lives[link])
            runs.link[row] = new[link]


class _Saved(msgspec.Struct, array_like=True, frozen=True):
    changes: U64
    at_ms: U64
    dead_lettered: U64
    runs: bytes
    """As saved.py encodes them; empty = none."""
    calls: list[JobsChange] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Saved).decode


def save(durable: Durable) -> bytes:
    """Everything that is known, for the row of its topic in a snapshot (QL-22)."""
    runs = b"".join(save_runs(durable.queue, durable.lives, 1 << 62))
    queue, calls = durable.queue, list(durable.calls.values())
    return _encode(_Saved(durable.changes, durable.at_ms, queue.dead_lettered, runs, calls))


def load(data: bytes) -> Durable:
    """What these bytes speak of; raises CorruptData for what no version can have written."""
    durable = Durable()
    try:
        saved = _decode(data)
        durable.changes, durable.at_ms = saved.changes, saved.at_ms
        durable.queue.dead_lettered = saved.dead_lettered
        if saved.runs:
            add_saved(durable.queue, saved.runs, durable.link_of)
        for change in saved.calls:
            durable.keep(change)
        durable.queue.check()
    except (*DAMAGE, InvariantViolation) as e:
        raise CorruptData("a queue's leases do not decode", reason=str(e)) from None
    return durable


def _require_sound(change: JobsChange) -> None:
    width = {JobsOp.CLAIMED: CLAIM_ROW, JobsOp.MOVED: 1, JobsOp.WRITTEN: 1}.get(change.op, SPAN_ROW)
    rows, aside = change.rows, change.aside
    is_sound = not len(rows) % width and not len(aside) % SPAN_ROW and change.until_ms < 1 << 62
    if width > 1:
        spans = [*zip(rows[::width], rows[1::width], strict=False)]
        spans += zip(aside[::SPAN_ROW], aside[1::SPAN_ROW], strict=False)
        is_sound &= all(0 < count <= JOBS_PER_REQUEST_MAX and first < 1 << 62 for first, count in spans)
    if width == CLAIM_ROW:
        is_sound &= all(deliveries < 1 << 32 for deliveries in rows[2::CLAIM_ROW])
        is_sound &= all(token < 1 << 63 for token in rows[3::CLAIM_ROW])
    if not is_sound:
        raise CorruptData("a change of a queue makes no sense", number=change.number, op=int(change.op))


def _numbers_in(change: JobsChange) -> int:
    return len(change.rows) + len(change.skipped) + len(change.aside)


def _flat(seqs: I64) -> list[int]:
    return [number for first, stop in spans_of(seqs) for number in (first, stop - first)]
