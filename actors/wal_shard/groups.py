"""Consumer groups of one shard's topics: requests about them, and the claims that wait. Pure.

What a group is, is decided in ringlog/leases. Every change is one frame of the log, and answered when that is
as durable as the topic's class asks; so groups and their leases outlive the shard, and an answer that was
lost is given again from what the log says. Groups lie with their topic: in its row of a snapshot, and with
whichever shard looks after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from actors.wal_shard.group import Group
from actors.wal_shard.group_numbers import GroupNumbers
from actors.wal_shard.job_requests import (
    bytes_of,
    claimed_answer,
    entries_in,
    held_still,
    live_of,
    node_of,
    reason_of,
    require_numbers,
    spent_jobs,
)
from actors.wal_shard.records import frame_of
from actors.wal_shard.removal import Removals
from actors.wal_shard.waiting import Waiting
from ringlog.contract import ControlReceived, Reply
from ringlog.envelope import messages as m
from ringlog.errors import (
    BatchTooLarge,
    CorruptData,
    GroupIncompatible,
    GroupNotFound,
    InvalidRequest,
    NotReady,
    ShuttingDown,
    StaleEpoch,
    Throttled,
    TopicNotFound,
)
from ringlog.leases.change import Change, Made, Mode, Op
from ringlog.leases.group import ConsumerGroup, begin, created
from ringlog.leases.holders import Life
from ringlog.leases.live_seqs import is_alive
from ringlog.leases.retry_claim import entries_of
from ringlog.leases.tokens import NUMBER_MAX, Tokens
from ringlog.leases.types import Matched
from ringlog.limits import (
    CLAIM_JOBS_MAX,
    GROUP_BYTES_MAX,
    GROUP_CHANGE_BYTES_MAX,
    GROUP_LETTERS_PER_MOVE,
    GROUP_NAME_BYTES_MAX,
    GROUP_PENDING_PER_TOPIC_MAX,
    GROUPS_PER_TOPIC_MAX,
    PENDING_ROWS_MAX,
    TAG_BYTES_MAX,
)
from ringlog.names import is_topic_name
from ringlog.settings import GROUP_SETTINGS, checked
from ringlog.tags import kept_match
from ringlog.topic.directory import Directory
from ringlog.topic.retention import Removal, held_from
from ringlog.topic.state import Topic
from ringlog.types import Durability

CHANGES = (
    m.GroupOpen, m.Steal, m.GroupLeave, m.GroupSeek, m.GroupTake, m.GroupCommit, m.GroupDelete,
    m.GroupSpentMoved, m.GroupAgain,
)  # fmt: skip
"""Requests that may add to the log."""
_OF_BOTH = (m.Claim, m.Ack, m.AckAndClaim, m.Nack, m.Extend, m.Reject)
"""The same, where they name a group."""

AGAIN_RETRY_MS = 50
"""Who sends letters back waits so long for those that are just being written."""
_SYNCED = frozenset({Op.CREATED, Op.SEEK, Op.TAKEN, Op.REMOVED, Op.AGAIN})


_LEASED = frozenset({Op.CLAIMED, Op.STOLEN})


def change_bytes(message: m.Message) -> int:
    """Most bytes that a request about groups adds to the log."""
    return GROUP_CHANGE_BYTES_MAX if may_change(message) else 0


def may_change(message: m.Message) -> bool:
    """May this request change a group, and so add to the log?"""
    return isinstance(message, CHANGES) or (isinstance(message, _OF_BOTH) and bool(message.group))


class Groups:
    """The groups of one shard; each lies with its topic."""

    def __init__(self, incarnation: int, directory: Directory, removals: Removals) -> None:
        self._directory = directory
        self._removals = removals
        self._tokens = Tokens(incarnation)
        # Queues count from the other end of the same numbers: a lease's name is never given twice.
        self._tokens.take(NUMBER_MAX // 2)
        self._by_number: dict[int, Topic] = {}
        self.numbers = GroupNumbers()
        self.has_mover = False
        """Is there a scheduler, which moves dead letters? Without one nothing is set aside."""
        self._wall_us = self._ahead_ms = 0
        self.waiting = Waiting()
        """Claims that wait, by the number of their group."""
        self._dead: deque[tuple[int, Life]] = deque()
        """(group, process that died and claimed in it); what it holds is to be released."""
        removals.removed.subscribe(self._removed)
        self.handlers: dict[
            type[m.Message], Callable[[Any, ControlReceived, Group, int], m.Message | None]
        ] = {
            m.GroupOpen: self._open,
            m.Claim: self._claim,
            m.Steal: self._steal,
            m.Ack: self._ack,
            m.AckAndClaim: self._ack_and_claim,
            m.Nack: self._nack,
            m.Reject: self._reject,
            m.GroupSpentAsk: self._spent,
            m.GroupSpentMoved: self._spent_moved,
            m.GroupAgain: self._again,
            m.Extend: self._extend,
            m.GroupLeave: self._leave,
            m.GroupPending: self._pending,
            m.GroupState: self._state,
            m.GroupList: self._list,
            m.GroupSeek: self._seek,
            m.GroupTake: self._take,
            m.GroupCommit: self._commit,
            m.GroupDelete: self._delete,
        }

    def ticked(self, now_us: int, wall_us: int, monotonic_ns: int) -> None:
        """Time has come this far; `now_us` is what leases and waits are counted in, as everywhere here."""
        self._wall_us, self._ahead_ms = wall_us, (wall_us - now_us) // 1_000
        self.waiting.now_ns = monotonic_ns

    def recovered(self) -> None:
        """The directory is filled: what left topics while nobody looked is pending no longer."""
        for topic in self._directory.by_id.values():
            for group in topic.groups.values():
                self._by_number[group.number] = topic
                self.numbers.made(topic, group)
                group.recovered(live_of(topic), self._tokens)
                group.use_mover(self.has_mover)

    # -- which group ----------------------------------------------------------------------------------

    def _topic(self, message: Any) -> Topic:
        topic = self._directory.find(message.topic)
        if topic is None:
            raise TopicNotFound("no such topic", topic=message.topic)
        return topic

    def _find(self, message: Any, mode: Mode | None = None) -> tuple[Topic, ConsumerGroup]:
        topic = self._topic(message)
        group = find_group(topic, message.group)
        if group is None:
            raise GroupNotFound("no such group", topic=topic.name, group=message.group)
        if getattr(message, "call", 0) < 0:
            raise InvalidRequest("a number is negative", field="call")
        if mode is not None and group.made.mode != mode:
            raise GroupIncompatible(
                "the group is of the other mode", topic=topic.name, group=message.group,
                mode=group.made.mode.name.lower(),
            )  # fmt: skip
        return topic, group

    def _log(self, topic: Topic, change: Change | None, into: Group) -> None:
        """Log it in the class of the topic; what a group is, and where it was told to be, durably in any
        case, as a topic's creation is; and what comes back from elsewhere, where it is deleted then."""
        if change is not None:
            is_synced = topic.config.durability == Durability.FSYNC or change.op in _SYNCED
            into.add_control(frame_of(change, topic.topic_id, topic.epoch), topic, sync=is_synced)

    def _open(self, message: m.GroupOpen, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic, made, now_ms = self._topic(message), _made(message), now_us // 1_000
        group = find_group(topic, made.key)
        is_new = group is None
        if group is None:
            if not message.make:
                raise GroupNotFound("no such group", topic=topic.name, group=made.key)
            if len(topic.groups) >= GROUPS_PER_TOPIC_MAX:
                raise Throttled(
                    "too many groups", limit="groups", max=GROUPS_PER_TOPIC_MAX, retry_after_ms=1_000
                )
            change = created(self._tokens.take(1), made, _clamped(topic, message.start), now_ms)
            group = begin(change, self._tokens)
            group.use_mover(self.has_mover)
            topic.groups = {**topic.groups, group.number: group}
            self._by_number[group.number] = topic
            self.numbers.made(topic, group)
            self._log(topic, change, into)
        elif group.made.mode != made.mode:
            raise GroupIncompatible(
                "the group is there in another mode", topic=topic.name, group=made.key,
                mode=group.made.mode.name.lower(),
            )  # fmt: skip
        if message.node:
            node_of(message)
            group.holders.require_room(message.node, now_ms)
            group.holders.note(message.node, now_ms)
        return info_of(topic, group, created=is_new)

    # -- leases ---------------------------------------------------------------------------------------

    def _claim(self, message: m.Claim, event: ControlReceived, into: Group, now_us: int) -> m.Message | None:
        topic, group = self._find(message, Mode.QUEUE)
        node_of(message)
        require_numbers(message)
        if min(message.max, message.pid, message.born) < 0:
            raise InvalidRequest("a number is negative", topic=topic.name)
        if self.waiting.sent_again(event, message.call):
            return None
        answer = self._given(topic, group, message, into, now_us)
        if answer is not None or not message.wait_ms:
            return answer or _claimed(topic, group, None)
        self.waiting.park(group.number, event, message)
        self.waiting.note_due(group.number, group.next_due_ms())
        return None

    def _given(
        self, topic: Topic, group: ConsumerGroup, message: m.Claim, into: Group, now_us: int
    ) -> m.ClaimReply | None:
        """What there is for this claim; None when there is nothing, or too much is pending."""
        topic.last_read_us, now_ms = self._wall_us, now_us // 1_000
        again = _claimed_before(topic, group, message, now_ms)
        if again is not None:
            return again
        room = GROUP_PENDING_PER_TOPIC_MAX - sum(each.pending for each in topic.groups.values())
        change = group.claim(
            live_of(topic), message.node, min(max(message.max, 1), CLAIM_JOBS_MAX),
            message.lease_ms or topic.config.lease_ms, now_ms,
            fresh_max=room, min_idle_ms=message.min_idle_ms, call=message.call,
            life=(message.pid, message.born),
        )  # fmt: skip
        self._log(topic, change, into)
        return _claimed(topic, group, change) if change is not None else None

    def _steal(self, message: m.Steal, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic, group = self._find(message, Mode.QUEUE)
        node_of(message)
        seqs, _ = entries_in(message.seqs, b"")
        require_numbers(message)
        if min(message.pid, message.born) < 0:
            raise InvalidRequest("a number is negative", topic=topic.name)
        again = _claimed_before(topic, group, message, now_us // 1_000)
        if again is not None:
            return again
        change = group.steal(
            np.unique(seqs), message.node, message.lease_ms or topic.config.lease_ms,
            now_us // 1_000, min_idle_ms=message.min_idle_ms, call=message.call,
            life=(message.pid, message.born),
        )  # fmt: skip
        self._log(topic, change, into)
        return _claimed(topic, group, change)

    def _matched(
        self, message: m.Ack | m.Nack | m.Extend | m.Reject, now_us: int
    ) -> tuple[Topic, ConsumerGroup, Matched]:
        topic, group = self._find(message, Mode.QUEUE)
        node_of(message)
        seqs, tokens = entries_in(message.seqs, message.tokens)
        return topic, group, group.match(seqs, tokens, message.node, now_us // 1_000)

    def _ack(self, message: m.Ack, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic, group, found = self._matched(message, now_us)
        before = group.calls.find(message.call)
        if before is None:
            # What is not there any more is as good as done (QA-9).
            live = live_of(topic)
            is_left = is_alive(live, found.skipped) | (found.skipped > live.head)
            found = Matched(found.leased, found.gone, found.skipped[is_left])
            self._log(topic, group.ack(found, message.node, now_us // 1_000, call=message.call), into)
            self._freed(topic, group)
        skipped = found.skipped.tolist() if before is None else before.skipped
        acked = len(message.seqs) // 8 - len(skipped)
        return m.AckReply(topic.name, acked, bytes_of(skipped), ready_of(topic, group), group.leased)

    def _ack_and_claim(
        self, message: m.AckAndClaim, event: ControlReceived, into: Group, now_us: int
    ) -> m.Message:
        topic, _ = self._find(message, Mode.QUEUE)
        return m.NotCombinable(topic.name)

    def _undo(self, message: m.Nack, into: Group, now_us: int) -> m.Message:
        """Nobody has begun what this claim was given, or these: it is as if it had never been made."""
        topic, group, found = self._matched(message, now_us)
        before = group.calls.find(message.call)
        if not message.seqs:
            self.waiting.call_off(group.number, message.call, _claimed(topic, group, None))
            if before is not None and before.op in _LEASED:
                given = entries_of(_claimed(topic, group, before).runs)
                found = group.match(*given, message.node, now_us // 1_000)
        elif before is not None and before.op not in _LEASED:
            found = Matched(found.leased[:0], found.gone, np.array(before.skipped, dtype=np.int64))
        self._log(topic, group.undo(found, message.node, now_us // 1_000, call=message.call), into)
        self.waiting.wake(group.number)
        skipped = found.skipped.tolist()
        nacked = max(len(message.seqs) // 8 - len(skipped), len(found.leased))
        return m.NackReply(topic.name, nacked, bytes_of(skipped), ready_of(topic, group), group.leased)

    def _nack(self, message: m.Nack, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        if message.undo:
            return self._undo(message, into, now_us)
        topic, group, found = self._matched(message, now_us)
        require_numbers(message)
        before = group.calls.find(message.call)
        if before is not None and before.op in _LEASED:
            before = None  # The claim is taken back: it is as if it had never been made.
        if before is None:
            reason = reason_of(message.reason) if group.made.dead_letter else ""
            change = group.nack(
                found, message.node, message.delay_ms, now_us // 1_000, call=message.call, reason=reason
            )
            self._log(topic, change, into)
            self.waiting.wake(group.number)
        skipped = found.skipped.tolist() if before is None else before.skipped
        nacked = len(message.seqs) // 8 - len(skipped)
        return m.NackReply(topic.name, nacked, bytes_of(skipped), ready_of(topic, group), group.leased)

    def _reject(self, message: m.Reject, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic, group, found = self._matched(message, now_us)
        if not group.made.dead_letter or not self.has_mover:
            raise InvalidRequest(
                "this group has no dead letters", topic=topic.name, group=message.group, field="dead_letter"
            )
        before = group.calls.find(message.call)
        if before is None:
            reason = reason_of(message.reason)
            change = group.reject(found, message.node, reason, now_us // 1_000, call=message.call)
            self._log(topic, change, into)
            self.numbers.set_aside += len(found.leased)
        skipped = found.skipped.tolist() if before is None else before.skipped
        return m.RejectReply(topic.name, len(message.seqs) // 8 - len(skipped), bytes_of(skipped))

    def _extend(self, message: m.Extend, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic, group, found = self._matched(message, now_us)
        require_numbers(message)
        before, lease_ms = group.calls.find(message.call), message.lease_ms or topic.config.lease_ms
        deadline = now_us // 1_000 + lease_ms if before is None else before.until_ms
        if before is None:
            change = group.extend(found, message.node, lease_ms, now_us // 1_000, call=message.call)
            self._log(topic, change, into)
            self.waiting.wake(group.number)
        skipped = found.skipped.tolist() if before is None else before.skipped
        extended = len(message.seqs) // 8 - len(skipped)
        return m.ExtendReply(topic.name, extended, bytes_of(skipped), deadline)

    def _leave(self, message: m.GroupLeave, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic, group = self._find(message)
        group.settle(now_us // 1_000)
        released = group.holders.held_by(message.node)
        self._log(topic, group.leave(message.node, now_us // 1_000), into)
        self.waiting.wake(group.number)
        return m.GroupLeft(topic.name, released)

    # -- dead letters ---------------------------------------------------------------------------------

    def _spent(self, message: m.GroupSpentAsk, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        """What is to be moved of one group, at most as many records as one request names."""
        for number in self.numbers.with_spent(message.after):
            topic = self._by_number[number]
            group = topic.groups[number]
            group.settle(now_us // 1_000)
            found = spent_jobs(topic, group, group.made.dead_letter)
            if found is not None:
                return found
        return m.SpentJobs()

    def _spent_moved(
        self, message: m.GroupSpentMoved, event: ControlReceived, into: Group, now_us: int
    ) -> m.Message:
        """Their copies are durable: they are done for the group (QD-2)."""
        topic = self._topic(message)
        group = topic.groups.get(message.number)
        if topic.topic_id != message.topic_id or group is None:
            raise GroupNotFound("no such group", topic=topic.name, number=message.number)
        seqs, tokens = entries_in(message.seqs, message.tokens)
        if tokens is None and len(seqs):
            raise InvalidRequest(
                "each position needs the token of its lease", topic=topic.name, seqs=len(seqs)
            )
        before = group.exhausted
        if tokens is not None:
            unique, at = np.unique(seqs, return_index=True)
            self._log(topic, group.moved(unique, tokens[at], now_us // 1_000), into)
        self._freed(topic, group)
        return m.SpentGone(topic.name, before - group.exhausted)

    def _again(self, message: m.GroupAgain, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        """Dead letters come back: their records are given out once more, as far as they are there."""
        topic, group = self._find(message, Mode.QUEUE)
        if topic.topic_id != message.topic_id:
            raise StaleEpoch("the topic was made anew", topic=topic.name)
        seqs, calls = entries_in(message.seqs, message.calls)
        if calls is None or len(calls) > GROUP_LETTERS_PER_MOVE:
            raise BatchTooLarge("too many letters at once", seqs=len(seqs), max=GROUP_LETTERS_PER_MOVE)
        repeated, gone = 0, []
        is_there = is_alive(live_of(topic), seqs)
        rows = list(zip(seqs.tolist(), calls.tolist(), is_there.tolist(), strict=True))
        for seq, call, _ in rows:
            if group.is_exhausted(seq) and group.calls.find(call) is None:
                # Its letter is there, and who wrote it has not said so yet. When he does the record is done
                # for the group: taken for one that will be given out anyway, it would be lost.
                raise NotReady(
                    "a record is just being moved to the dead letters", topic=topic.name, seq=seq,
                    retry_after_ms=AGAIN_RETRY_MS,
                )  # fmt: skip
        for seq, call, is_here in rows:
            if group.calls.find(call) is not None:
                repeated += 1
            elif not is_here:
                gone.append(seq)
            else:
                self._log(topic, group.again(seq, now_us // 1_000, call=call), into)
        self.waiting.wake(group.number)
        return m.GroupReturned(topic.name, repeated, bytes_of(gone))

    # -- looking --------------------------------------------------------------------------------------

    def _pending(
        self, message: m.GroupPending, event: ControlReceived, into: Group, now_us: int
    ) -> m.Message:
        topic, group = self._find(message, Mode.QUEUE)
        if min(message.idle_ms, message.min_deliveries, message.after) < 0:
            raise InvalidRequest("a number is negative", topic=topic.name)
        now_ms, ahead_ms = now_us // 1_000, self._ahead_ms
        entries, more = group.list_pending(
            now_ms, node=message.node, idle_ms=message.idle_ms, min_deliveries=message.min_deliveries,
            after=message.after, limit=min(max(message.limit, 1), PENDING_ROWS_MAX),
        )  # fmt: skip
        nodes = sorted({each.node for each in entries})
        place = {node: at for at, node in enumerate(nodes)}
        rows = [
            (each.first, each.stop - each.first, each.state, each.deliveries, each.begun_ms + ahead_ms,
             each.given_ms + ahead_ms, each.until_ms + ahead_ms if each.until_ms else 0, place[each.node],
             each.token)
            for each in entries
        ]  # fmt: skip
        return m.GroupPendingReply(topic.name, rows, nodes, more, now_ms + ahead_ms)

    def _state(self, message: m.GroupState, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic, group = self._find(message)
        group.settle(now_us // 1_000)
        group.holders.sweep(now_us // 1_000)
        after = group.cursor if group.is_queue else group.committed + 1
        undelivered = topic.live_within(after, topic.head_seq)
        members = [(each.name, each.seen_ms + self._ahead_ms, each.held) for each in group.holders]
        return m.GroupStateReply(
            info_of(topic, group), topic.head_seq, undelivered, group.leased, group.delayed, group.returned,
            self.waiting.of(group.number), sorted(members), group.holder,
            bool(topic.held_at) and held_from(topic)[1] == group.made.key, group.exhausted,
        )  # fmt: skip

    def _list(self, message: m.GroupList, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic = self._topic(message)
        groups = sorted(topic.groups.values(), key=lambda each: each.made.key)
        return m.GroupListReply(topic.name, [info_of(topic, group) for group in groups])

    # -- where it is ----------------------------------------------------------------------------------

    def _seek(self, message: m.GroupSeek, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic, group = self._find(message)
        self._log(topic, group.seek(_clamped(topic, message.cursor), now_us // 1_000), into)
        self._freed(topic, group)
        return info_of(topic, group)

    def _take(self, message: m.GroupTake, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic, group = self._find(message, Mode.STREAM)
        node_of(message)
        change = group.calls.find(message.call)
        if change is None:
            change = group.take(message.node, self._tokens.take(1), now_us // 1_000, call=message.call)
            self._log(topic, change, into)
        return m.GroupTaken(topic.name, change.rows[0], group.committed, topic.epoch)

    def _commit(self, message: m.GroupCommit, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic, group = self._find(message, Mode.STREAM)
        if not -1 < message.committed < message.cursor <= topic.head_seq + 1:
            raise InvalidRequest(
                "a commit is not beyond what was delivered, nor that beyond the head",
                committed=message.committed, cursor=message.cursor, head_seq=topic.head_seq,
            )  # fmt: skip
        is_holder = message.token != 0 and message.token == group.holder_token
        if is_holder:
            group.holders.note(group.holder, now_us // 1_000)
            self._log(topic, group.commit(message.committed, message.cursor, now_us // 1_000), into)
        return m.GroupCommitted(topic.name, group.committed, group.cursor, is_holder)

    def _delete(self, message: m.GroupDelete, event: ControlReceived, into: Group, now_us: int) -> m.Message:
        topic = self._topic(message)
        group = find_group(topic, message.group)
        if group is not None:
            self._log(topic, group.remove(now_us // 1_000), into)
            topic.groups = {number: each for number, each in topic.groups.items() if each is not group}
            self._forget(topic, group)
            self._freed(topic, group)
        return m.GroupDeleted(topic.name, message.group, group is not None)

    # -- claims that wait -----------------------------------------------------------------------------

    def published(self, topic: Topic) -> None:
        """Something of this topic was published."""
        for number in topic.groups:
            self.waiting.wake(number)

    @property
    def has_work(self) -> bool:
        """Is there anything to `serve`?"""
        return bool(self.waiting or self._dead)

    def left(self, life: Life) -> None:
        """This process is no more: its claims are given nothing, and what it holds is ready once that is
        logged; deliveries stay counted (CL-10)."""
        self.waiting.left(life)
        for number, topic in self._by_number.items():
            if life in topic.groups[number].lives.values():
                self._dead.append((number, life))

    def _release(self, into: Group, now_us: int) -> None:
        """What processes held that died is ready."""
        while self._dead and into.bytes < GROUP_BYTES_MAX:
            number, life = self._dead.popleft()
            topic = self._by_number.get(number)
            if topic is not None:
                for change in topic.groups[number].release(life, now_us // 1_000):
                    self._log(topic, change, into)
                self.waiting.wake(number)

    def lives(self) -> Iterator[Life]:
        """The processes that claimed, as far as groups know them."""
        for topic in self._directory.by_id.values():
            for group in topic.groups.values():
                yield from group.lives.values()

    def _freed(self, topic: Topic, group: ConsumerGroup) -> None:
        """More is done than was: a full group gives out again, and what waited for this group may leave."""
        self.waiting.wake(group.number)
        if topic.held_at:
            first, _ = held_from(topic)
            if not first or first > topic.held_at:
                self._removals.want(topic)

    def serve(self, into: Group, now_us: int) -> list[Reply]:
        """Answers to claims that waited; those that are given something are due when `into` is durable."""
        self._release(into, now_us)
        waiting = self.waiting
        if not waiting:
            return []
        replies, waiting.dismissed = waiting.dismissed, []
        for number in waiting.woken(now_us):
            if into.bytes < GROUP_BYTES_MAX:
                replies += self._serve(number, into, now_us)
            else:
                waiting.wake(number)  # With the next group.
        for parked in waiting.ended():
            topic = self._by_number[parked.topic_id]
            replies.append(parked.answer(_claimed(topic, topic.groups[parked.topic_id], None)))
        return replies

    def _serve(self, number: int, into: Group, now_us: int) -> list[Reply]:
        topic = self._by_number[number]
        if 0 < topic.due_us <= self._wall_us:
            # What has expired goes first (QS-1).
            self._removals.want(topic)
            self.waiting.wake(number)
            return []
        group, replies = topic.groups[number], []
        while (parked := self.waiting.first(number)) is not None:
            if into.bytes >= GROUP_BYTES_MAX:
                self.waiting.wake(number)
                break
            answer = self._given(topic, group, parked.message, into, now_us)
            if answer is None:
                self.waiting.note_due(number, group.next_due_ms())
                break
            self.waiting.over(parked)
            replies.append(parked.answer(answer))
        return replies

    def stopping(self) -> None:
        """No claim waits any longer: it is sent again, to whoever comes after us."""
        self.waiting.dismiss(ShuttingDown("the shard is stopping"))

    # -- topics ---------------------------------------------------------------------------------------

    def forget(self, topic: Topic) -> None:
        """The topic is no more, and so are its groups."""
        for group in topic.groups.values():
            self._forget(topic, group)

    def _forget(self, topic: Topic, group: ConsumerGroup) -> None:
        gone = GroupNotFound("no such group", topic=topic.name, group=group.made.key)
        self.waiting.dismiss(gone, group.number)
        self._by_number.pop(group.number, None)
        self.numbers.forget(group.number)

    def _removed(self, topic: Topic, removal: Removal, on_request: bool) -> None:
        floor = max(removal.cap_floor, removal.ttl_floor, removal.delete_floor)
        for group in topic.groups.values():
            group.removed(floor, removal.seqs)

    def check(self) -> None:
        """Assert what must be true of every group."""
        for topic in self._directory.by_id.values():
            for group in topic.groups.values():
                group.check()


def replay_change(topic: Topic, change: Change) -> None:
    """Apply what the log says of a group, unless the topic's state has it already."""
    group = topic.groups.get(change.group)
    if change.op == Op.CREATED:
        if change.made is None:
            raise CorruptData("a group begins without a name", topic=topic.name, group=change.group)
        if group is None:
            topic.groups = {**topic.groups, change.group: begin(change)}
    elif change.op == Op.REMOVED:
        topic.groups = {number: each for number, each in topic.groups.items() if number != change.group}
    elif group is not None:
        group.replay(change)


def find_group(topic: Topic, key: str) -> ConsumerGroup | None:
    """The group of this key."""
    return next((each for each in topic.groups.values() if each.made.key == key), None)


def info_of(topic: Topic, group: ConsumerGroup, *, created: bool = False) -> m.GroupInfo:
    """A group as messages tell it."""
    made = group.made
    return m.GroupInfo(
        topic.name, made.key, made.name, int(made.mode), made.tags, created, group.cursor, group.floor,
        group.pending, made.deliveries_max, made.dead_letter, made.pending_max, made.member_max,
    )  # fmt: skip


def ready_of(topic: Topic, group: ConsumerGroup) -> int:
    """Positions that a claim could be given, as it stood at the last `settle`."""
    return topic.live_within(group.cursor, topic.head_seq) + group.returned


def _made(message: m.GroupOpen) -> Made:
    """What a new group is to be; raises InvalidRequest."""
    if not is_topic_name(message.group):
        raise InvalidRequest(
            "not a legal group name", field="group", found=message.group[:64], max=GROUP_NAME_BYTES_MAX,
            rule="as a topic's name",
        )  # fmt: skip
    if message.mode not in list(Mode):
        raise InvalidRequest("unknown mode", field="mode", found=message.mode)
    if message.tags:
        kept_match(message.tags, "tags")
    if len(message.tags.encode()) > TAG_BYTES_MAX + 1:
        raise InvalidRequest("not a filter of tags", field="tags", found=message.tags[:64])
    checked(
        GROUP_SETTINGS,
        {
            "max_in_flight": message.pending_max, "member_max_in_flight": message.member_max,
            "max_deliveries": message.max_deliveries,
        },
        "group",
    )  # fmt: skip
    limits = (message.pending_max, message.member_max)
    if any(limits) and message.mode != Mode.QUEUE:
        raise InvalidRequest(
            "max_in_flight and member_max_in_flight have no effect on a group in mode stream",
            field="max_in_flight" if limits[0] else "member_max_in_flight",
        )  # fmt: skip
    return Made(message.group, Mode(message.mode), message.tags, *limits, *_dead_letters(message))


def _dead_letters(message: m.GroupOpen) -> tuple[int, str]:
    """How often a record of a new group is given out at most, and where it goes then."""
    most, target = message.max_deliveries, message.dead_letter
    if target and (not is_topic_name(target) or target == message.topic or message.mode != Mode.QUEUE):
        raise InvalidRequest(
            "not a topic for the dead letters of this group", field="dead_letter", found=target[:64],
            rule="a topic's name, not the group's own topic; groups in mode queue alone",
        )  # fmt: skip
    if most and not target:
        raise InvalidRequest("max_deliveries needs a dead_letter", field="dead_letter")
    return most, target


def _clamped(topic: Topic, cursor: int) -> int:
    """A place to go on from, moved to what there is (F42)."""
    return min(max(cursor, topic.earliest_seq), topic.head_seq + 1)


def _claimed_before(
    topic: Topic, group: ConsumerGroup, message: m.Claim | m.Steal, now_ms: int
) -> m.ClaimReply | None:
    """The answer that this call had before, as far as it is true still. None when there is none, or the
    gateway took it back."""
    before = group.calls.find(message.call)
    if before is None or before.op not in _LEASED:
        return None
    return held_still(group, _claimed(topic, group, before), message.node, now_ms)


def _claimed(topic: Topic, group: ConsumerGroup, change: Change | None) -> m.ClaimReply:
    return claimed_answer(topic, change, ready_of(topic, group))
