"""What was asked of the engine and what it said: plain Python that judges every answer (O1).

A frame is `open` until it is settled. Once a number was acknowledged or shown, it means one record for ever:
another record there, the same record elsewhere, or nothing there without a reason is a broken promise.
Reasons are few: a delete or a cap that covers it, its age, or, for class `disk`, a power loss that announced
it as lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from chaos.order import Broken
from ringlog.types import Durability

HOLES_MAX = 5_000


@dataclass(eq=False, slots=True)
class Sent:
    """One frame as its producer knows it."""

    life: Life
    producer: int
    number: int
    payloads: list[bytes]
    tag: str
    frame: bytes
    asked_at: int
    first_seq: int = 0
    state: str = "open"
    """open, acked, refused (it is not there), unknown (refused when it was sent again)."""
    times: int = 0
    sent_losses: int = 0
    """Power losses there had been when it was last sent: an answer may come when power is lost already."""
    acked_at: int = 0
    seen_at: int = 0
    """When it was first known to be there."""
    oldest_us: int = 0
    """Lowest wall time while it was under way: not before this it was stamped."""
    power_losses: int = 0
    """Power losses there had been when it was last known to be there."""

    def __str__(self) -> str:
        place = f" at {self.first_seq}" if self.first_seq else ""
        return f"frame {self.producer}/{self.number} ({len(self.payloads)} records{place}, {self.state})"


@dataclass(eq=False, slots=True)
class Deletion:
    """Records asked to go."""

    asked_at: int
    before: int = 0
    tag: str = ""
    seqs: frozenset[int] = frozenset()
    done_at: int = 0
    """0: not known to have happened."""
    losses: int = 0
    """Power losses there had been by then. A later one may undo a deletion of class `disk`."""

    def covers(self, seq: int, sent: Sent) -> bool:
        """Is this record among those that were meant?"""
        if self.seqs:
            return seq in self.seqs
        return (not self.before or seq < self.before) and (not self.tag or self.tag == sent.tag)


@dataclass(eq=False, slots=True)
class Life:
    """One life of a topic."""

    name: str
    topic_id: int
    epoch: int
    durability: Durability
    cap: int
    ttl_us: int
    at: dict[int, tuple[Sent, int]] = field(default_factory=dict)
    """What each number is."""
    deletions: list[Deletion] = field(default_factory=list)
    holes: dict[int, int] = field(default_factory=dict)
    """Numbers that a read passed over, and when it had begun."""
    sent: list[Sent] = field(default_factory=list)
    earliest: int = 1
    earliest_at: int = 0
    earliest_losses: int = 0
    """Power losses before the shard that said so was started."""
    highest_acked: int = 0
    highest_shown: int = 0
    had: set[str] = field(default_factory=set)
    """What happened to it: rows of the fault matrix ask for combinations."""


class Model:
    """All lives of all topics. `fail` names the topic whose story matters."""

    def __init__(self, wall_us: Callable[[], int]) -> None:
        self._wall_us = wall_us
        self.moment = 0
        self.power_losses = 0
        self.highest_us = wall_us()
        self.lives: dict[tuple[int, int], Life] = {}
        self.epochs: dict[str, int] = {}
        self.gone_at: dict[tuple[int, int], int] = {}
        """Lives whose deletion was acknowledged, and when."""
        self.doomed: set[tuple[int, int]] = set()
        """Lives whose deletion was asked for."""
        self.by_token: dict[bytes, tuple[Sent, int]] = {}
        self.counts: Counter[str] = Counter()

    def now(self) -> int:
        """A moment of its own, later than all before."""
        self.moment += 1
        self.highest_us = max(self.highest_us, self._wall_us())
        return self.moment

    # -- topics ---------------------------------------------------------------------------------------

    def met(
        self, name: str, topic_id: int, epoch: int, durability: Durability, cap: int, ttl_us: int, began: int
    ) -> Life:
        """Somebody was told of this life."""
        key = topic_id, epoch
        if self.gone_at.get(key, 1 << 62) < began:
            raise Broken(f"{name}, epoch {epoch}, is back after its deletion was acknowledged", name)
        if key not in self.lives:
            last = self.epochs.get(name, 0)
            if epoch < last:
                raise Broken(f"{name} has epoch {epoch} after {last}", name)
            before = self.living(name)
            if before is not None:
                raise Broken(f"{name} has epoch {epoch}, and nobody asked to end epoch {before.epoch}", name)
            self.epochs[name] = max(epoch, last)
            self.lives[key] = Life(name, topic_id, epoch, durability, cap, ttl_us)
        return self.lives[key]

    def living(self, name: str) -> Life | None:
        """The last life of this name that nobody asked to end."""
        found = [life for key, life in self.lives.items() if life.name == name and key not in self.doomed]
        return max(found, key=lambda life: life.epoch, default=None)

    def stepped(self) -> None:
        """The wall clock was set: what is under way may be stamped with the new time."""
        self.now()
        for life in self.lives.values():
            for sent in life.sent:
                if not sent.acked_at:
                    sent.oldest_us = min(sent.oldest_us, self._wall_us())

    # -- appends --------------------------------------------------------------------------------------

    def submit(
        self, life: Life, producer: int, number: int, payloads: list[bytes], tag: str, frame: bytes
    ) -> Sent:
        """A frame is about to be sent for the first time."""
        sent = Sent(life, producer, number, payloads, tag, frame, self.now(), oldest_us=self._wall_us())
        life.sent.append(sent)
        for i, payload in enumerate(payloads):
            self.by_token[payload] = (sent, i)
        return sent

    def sending(self, sent: Sent) -> None:
        """A frame is on its way, perhaps not for the first time."""
        sent.times += 1
        sent.sent_losses = self.power_losses

    def acked(self, sent: Sent, first_seq: int, *, is_repeat: bool) -> None:
        """The engine says where the frame is."""
        name = sent.life.name
        moment = self.now()
        if sent.state == "refused":
            raise Broken(f"{sent} was refused and is acknowledged now", name)
        self._placed(sent, first_seq, moment, "acked")
        sent.state, sent.acked_at, sent.power_losses = "acked", moment, sent.sent_losses
        last = first_seq + len(sent.payloads) - 1
        sent.life.highest_acked = max(sent.life.highest_acked, last)
        self.counts["appends"] += 1
        self.counts["repeats"] += is_repeat
        for i in range(len(sent.payloads)):
            passed = sent.life.holes.get(first_seq + i)
            if passed is not None and not self._may_be_gone(sent.life, first_seq + i, sent):
                raise Broken(
                    f"{name}: a read passed over record {first_seq + i}, which {sent} was acknowledged to be",
                    name,
                )

    def _placed(self, sent: Sent, first_seq: int, moment: int, how: str) -> None:
        """A frame is known to be here: nothing else is, and it is nowhere else."""
        life, name = sent.life, sent.life.name
        if sent.first_seq and sent.first_seq != first_seq and not self._was_lost(sent):
            raise Broken(f"{name}: {sent} is {how} at {first_seq}, and was at {sent.first_seq}", name)
        for i in range(len(sent.payloads)):
            there = life.at.get(first_seq + i)
            if there is not None and there != (sent, i):
                raise Broken(f"{name}: number {first_seq + i} was {there[0]}, and is {how} as {sent}", name)
            life.at[first_seq + i] = sent, i
        sent.first_seq = first_seq
        sent.seen_at = sent.seen_at or moment

    def refused(self, sent: Sent) -> None:
        """The engine says that it did not take the frame."""
        self.counts["refusals"] += 1
        if sent.state == "acked":
            return
        sent.state = "refused" if sent.times == 1 else "unknown"

    # -- reads ----------------------------------------------------------------------------------------

    def read(
        self, life: Life, began: int, after: int, next_after: int, head: int, earliest: int,
        records: Iterable[tuple[int, bytes]], losses: int,
    ) -> None:  # fmt: skip
        """A reader that began at this moment was given these records, behind `after` up to `next_after`.

        `losses`: power losses before the shard that answered was started.
        """
        name = life.name
        self.counts["reads"] += 1
        last, shown = after, set()
        for seq, payload in records:
            if not last < seq <= next_after:
                raise Broken(f"{name}: record {seq} after {last}, in a read of {after}..{next_after}", name)
            last = seq
            shown.add(seq)
            self._shown(life, seq, payload, began, losses)
        self.counts["records read"] += len(shown)
        self._look_at_holes(life, began, after, next_after, shown)
        self._facts(life, began, head, earliest, losses)

    def _look_at_holes(self, life: Life, began: int, after: int, next_after: int, shown: set[int]) -> None:
        """What was passed over must have a reason, now or once it is known what it was."""
        is_short = next_after - after <= HOLES_MAX
        passed = range(after + 1, next_after + 1) if is_short else sorted(life.at)
        for seq in passed:
            if seq in shown or not after < seq <= next_after:
                continue
            known = life.at.get(seq)
            if known is None:
                life.holes.setdefault(seq, began)
            elif 0 < known[0].seen_at < began and not self._may_be_gone(life, seq, known[0]):
                raise Broken(
                    f"{life.name}: record {seq}, {known[0]}, is missing in {after}..{next_after}", life.name
                )

    def _shown(self, life: Life, seq: int, payload: bytes, began: int, losses: int) -> None:
        name = life.name
        found = self.by_token.get(payload)
        if found is None:
            raise Broken(f"{name}: record {seq} was never sent: {payload[:20]!r}", name)
        sent, i = found
        if sent.life is not life:
            raise Broken(f"{name}: record {seq} belongs to {sent.life.name}, epoch {sent.life.epoch}", name)
        if sent.state == "refused":
            raise Broken(f"{name}: record {seq} is of {sent}, which was refused", name)
        for deletion in life.deletions:
            is_kept = life.durability is Durability.FSYNC or losses <= deletion.losses
            is_certain = 0 < deletion.done_at < began and 0 < sent.seen_at < deletion.asked_at
            if is_kept and is_certain and deletion.covers(seq, sent):
                raise Broken(f"{name}: record {seq}, {sent}, is back after it was deleted", name)
        self._placed(sent, seq - i, self.now(), "shown")
        sent.power_losses = max(sent.power_losses, losses)
        life.highest_shown = max(life.highest_shown, seq)

    def _facts(self, life: Life, began: int, head: int, earliest: int, losses: int) -> None:
        name = life.name
        # What raised it may have been a deletion of class `disk`, which a later loss of power undoes.
        is_kept = life.durability is Durability.FSYNC or losses <= life.earliest_losses
        if life.earliest_at < began and earliest < life.earliest and is_kept:
            raise Broken(f"{name}: earliest is {earliest} and was {life.earliest}", name)
        if earliest != life.earliest and (earliest > life.earliest or not is_kept):
            life.earliest, life.earliest_at = earliest, self.now()
            life.earliest_losses = losses
        acked = [sent for sent in life.sent[-20:] if 0 < sent.acked_at < began]
        for sent in acked:
            if head < sent.first_seq + len(sent.payloads) - 1 and sent.first_seq:
                raise Broken(f"{name}: head is {head} and {sent} was acknowledged", name)

    # -- reasons --------------------------------------------------------------------------------------

    def _was_lost(self, sent: Sent) -> bool:
        """May it have gone with the power?"""
        return sent.life.durability is Durability.DISK and self.power_losses > sent.power_losses

    def _may_be_gone(self, life: Life, seq: int, sent: Sent) -> bool:
        if any(deletion.covers(seq, sent) for deletion in life.deletions):
            return True
        if self._was_lost(sent):
            return True
        if life.cap and seq <= self._most(life) - life.cap:
            return True
        return bool(life.ttl_us) and max(self.highest_us, self._wall_us()) >= sent.oldest_us + life.ttl_us

    @staticmethod
    def _most(life: Life) -> int:
        """No number above this can have been given."""
        open_records = sum(len(sent.payloads) for sent in life.sent if not sent.first_seq)
        return max(life.at, default=0) + open_records + len(life.holes)
