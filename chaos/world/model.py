"""A model in plain Python of all requests and answers. It checks every answer of the engine.

A frame is `open` until it is settled. After a seq was acknowledged or read, it refers to the same record
forever. Another record at this seq, the same record at another seq, or a missing record is an error. A record
may be missing only for these reasons: a delete or a cap covers it, its age, or, for class `disk`, a power
loss after which it was announced as lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import Outcome
from ringlog.types import Durability

HOLES_MAX = 5_000


@dataclass(eq=False, slots=True)
class Sent:
    """A frame as its producer knows it."""

    life: Life
    producer: int
    number: int
    payloads: list[bytes]
    tag: str
    frame: bytes
    asked_at: int
    first_seq: int = 0
    state: str = "open"
    """open, acked, refused (not appended), or unknown (refused with an unknown outcome, or after it was sent
    more than once)."""
    times: int = 0
    sent_losses: int = 0
    """Number of power losses before it was last sent. Its answer may arrive after a further one."""
    acked_at: int = 0
    seen_at: int = 0
    """Moment when the frame was first known to be appended."""
    oldest_us: int = 0
    """Lowest wall time (us) while it was in flight: a lower bound of its timestamp."""
    power_losses: int = 0
    """Number of power losses before it was last known to be there."""

    def __str__(self) -> str:
        place = f" at {self.first_seq}" if self.first_seq else ""
        return f"frame {self.producer}/{self.number} ({len(self.payloads)} records{place}, {self.state})"


@dataclass(eq=False, slots=True)
class Deletion:
    """A delete request for records of one topic."""

    asked_at: int
    before: int = 0
    tag: str = ""
    seqs: frozenset[int] = frozenset()
    done_at: int = 0
    """Moment of its acknowledgement; 0 = unknown."""
    losses: int = 0
    """Number of power losses before the request. A later one may undo a delete in a topic of class `disk`."""

    def covers(self, seq: int, sent: Sent) -> bool:
        """Return whether the delete covers this record."""
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
    """Seq -> (frame, index of the record in it)."""
    deletions: list[Deletion] = field(default_factory=list)
    holes: dict[int, int] = field(default_factory=dict)
    """Seqs that a read skipped, with the moment at which the read began."""
    sent: list[Sent] = field(default_factory=list)
    earliest: int = 1
    earliest_at: int = 0
    earliest_losses: int = 0
    """Number of power losses before the start of the shard that reported `earliest`."""
    highest_acked: int = 0
    highest_shown: int = 0
    had: set[str] = field(default_factory=set)
    """Operations that this life had. A row of the fault matrix requires a combination of them."""


class Model:
    """All lives of all topics, and the checks of the answers."""

    def __init__(self, wall_us: Callable[[], int]) -> None:
        self._wall_us = wall_us
        self.moment = 0
        self.power_losses = 0
        self.highest_us = wall_us()
        self.lives: dict[tuple[int, int], Life] = {}
        self.epochs: dict[str, int] = {}
        self.gone_at: dict[tuple[int, int], int] = {}
        """Moment of the acknowledged deletion, by life."""
        self.doomed: set[tuple[int, int]] = set()
        """Lives whose deletion was requested."""
        self.by_token: dict[bytes, tuple[Sent, int]] = {}
        self.counts: Counter[str] = Counter()

    def now(self) -> int:
        """Return a new moment, greater than all earlier ones."""
        self.moment += 1
        self.highest_us = max(self.highest_us, self._wall_us())
        return self.moment

    # -- topics ---------------------------------------------------------------------------------------

    def met(
        self, name: str, topic_id: int, epoch: int, durability: Durability, cap: int, ttl_us: int, began: int
    ) -> Life:
        """Record that an answer described this life; return it. Raises GuaranteeBroken."""
        key = topic_id, epoch
        if self.gone_at.get(key, 1 << 62) < began:
            raise GuaranteeBroken(f"{name}, epoch {epoch}, is back after its deletion was acknowledged", name)
        if key not in self.lives:
            last = self.epochs.get(name, 0)
            if epoch < last:
                raise GuaranteeBroken(f"{name} has epoch {epoch} after {last}", name)
            before = self.living(name)
            if before is not None:
                raise GuaranteeBroken(
                    f"{name} has epoch {epoch}, and nobody asked to end epoch {before.epoch}", name
                )
            self.epochs[name] = max(epoch, last)
            self.lives[key] = Life(name, topic_id, epoch, durability, cap, ttl_us)
        return self.lives[key]

    def living(self, name: str) -> Life | None:
        """Return the last life of this name whose deletion was not requested, or None."""
        found = [life for key, life in self.lives.items() if life.name == name and key not in self.doomed]
        return max(found, key=lambda life: life.epoch, default=None)

    def stepped(self) -> None:
        """Record a step of the wall clock. Frames in flight may get a timestamp of the new time."""
        self.now()
        for life in self.lives.values():
            for sent in life.sent:
                if not sent.acked_at:
                    sent.oldest_us = min(sent.oldest_us, self._wall_us())

    # -- appends --------------------------------------------------------------------------------------

    def submit(
        self, life: Life, producer: int, number: int, payloads: list[bytes], tag: str, frame: bytes
    ) -> Sent:
        """Record a new frame before it is sent for the first time."""
        sent = Sent(life, producer, number, payloads, tag, frame, self.now(), oldest_us=self._wall_us())
        life.sent.append(sent)
        for i, payload in enumerate(payloads):
            self.by_token[payload] = (sent, i)
        return sent

    def sending(self, sent: Sent) -> None:
        """Record that a frame is sent, for the first time or again."""
        sent.times += 1
        sent.sent_losses = self.power_losses

    def acked(self, sent: Sent, first_seq: int, *, is_repeat: bool) -> None:
        """Record an acknowledgement with its first seq. Raises GuaranteeBroken."""
        name = sent.life.name
        moment = self.now()
        if sent.state == "refused":
            raise GuaranteeBroken(f"{sent} was refused and is acknowledged now", name)
        self._placed(sent, first_seq, moment, "acked")
        sent.state, sent.acked_at, sent.power_losses = "acked", moment, sent.sent_losses
        last = first_seq + len(sent.payloads) - 1
        sent.life.highest_acked = max(sent.life.highest_acked, last)
        self.counts["appends"] += 1
        self.counts["repeats"] += is_repeat
        for i in range(len(sent.payloads)):
            passed = sent.life.holes.get(first_seq + i)
            if passed is not None and not self._may_be_gone(sent.life, first_seq + i, sent):
                raise GuaranteeBroken(
                    f"{name}: a read skipped record {first_seq + i}, acknowledged as part of {sent}",
                    name,
                )

    def _placed(self, sent: Sent, first_seq: int, moment: int, how: str) -> None:
        """Record that a frame is at these seqs.

        Raises GuaranteeBroken if another frame is there or this one is elsewhere.
        """
        life, name = sent.life, sent.life.name
        if sent.first_seq and sent.first_seq != first_seq and not self._was_lost(sent):
            raise GuaranteeBroken(
                f"{name}: {sent} is {how} at {first_seq}, and was at {sent.first_seq}", name
            )
        for i in range(len(sent.payloads)):
            there = life.at.get(first_seq + i)
            if there is not None and there != (sent, i):
                raise GuaranteeBroken(
                    f"{name}: number {first_seq + i} was {there[0]}, and is {how} as {sent}", name
                )
            life.at[first_seq + i] = sent, i
        sent.first_seq = first_seq
        sent.seen_at = sent.seen_at or moment

    def refused(self, sent: Sent, outcome: Outcome = "not_applied") -> None:
        """Record that the engine refused a frame.

        With the outcome `unknown` it may have been appended: a shard took it from the ring and died.
        """
        self.counts["refusals"] += 1
        if sent.state == "acked":
            return
        sent.state = "refused" if sent.times == 1 and outcome == "not_applied" else "unknown"

    # -- reads ----------------------------------------------------------------------------------------

    def read(
        self, life: Life, began: int, after: int, next_after: int, head: int, earliest: int,
        records: Iterable[tuple[int, bytes]], losses: int,
    ) -> None:  # fmt: skip
        """Check the records of a read that began at `began`.

        It covers the seqs after `after` up to and including `next_after`. `losses` is the number of power
        losses before the start of the shard that answered.
        """
        name = life.name
        self.counts["reads"] += 1
        last, shown = after, set()
        for seq, payload in records:
            if not last < seq <= next_after:
                raise GuaranteeBroken(
                    f"{name}: record {seq} after {last}, in a read of {after}..{next_after}", name
                )
            last = seq
            shown.add(seq)
            self._shown(life, seq, payload, began, losses)
        self.counts["records read"] += len(shown)
        self._look_at_holes(life, began, after, next_after, shown)
        self._facts(life, began, head, earliest, losses)

    def _look_at_holes(self, life: Life, began: int, after: int, next_after: int, shown: set[int]) -> None:
        """Check that each skipped seq has a reason, now or when its record becomes known."""
        is_short = next_after - after <= HOLES_MAX
        passed = range(after + 1, next_after + 1) if is_short else sorted(life.at)
        for seq in passed:
            if seq in shown or not after < seq <= next_after:
                continue
            known = life.at.get(seq)
            if known is None:
                life.holes.setdefault(seq, began)
            elif 0 < known[0].seen_at < began and not self._may_be_gone(life, seq, known[0]):
                raise GuaranteeBroken(
                    f"{life.name}: record {seq}, {known[0]}, is missing in {after}..{next_after}", life.name
                )

    def _shown(self, life: Life, seq: int, payload: bytes, began: int, losses: int) -> None:
        name = life.name
        found = self.by_token.get(payload)
        if found is None:
            raise GuaranteeBroken(f"{name}: record {seq} was never sent: {payload[:20]!r}", name)
        sent, i = found
        if sent.life is not life:
            raise GuaranteeBroken(
                f"{name}: record {seq} belongs to {sent.life.name}, epoch {sent.life.epoch}", name
            )
        if sent.state == "refused":
            raise GuaranteeBroken(f"{name}: record {seq} is of {sent}, which was refused", name)
        for deletion in life.deletions:
            is_kept = life.durability is Durability.FSYNC or losses <= deletion.losses
            is_certain = 0 < deletion.done_at < began and 0 < sent.seen_at < deletion.asked_at
            if is_kept and is_certain and deletion.covers(seq, sent):
                raise GuaranteeBroken(f"{name}: record {seq}, {sent}, is back after it was deleted", name)
        self._placed(sent, seq - i, self.now(), "shown")
        sent.power_losses = max(sent.power_losses, losses)
        life.highest_shown = max(life.highest_shown, seq)

    def _facts(self, life: Life, began: int, head: int, earliest: int, losses: int) -> None:
        name = life.name
        # A delete in a topic of class `disk` may have raised it, and a later power loss undoes that delete.
        is_kept = life.durability is Durability.FSYNC or losses <= life.earliest_losses
        if life.earliest_at < began and earliest < life.earliest and is_kept:
            raise GuaranteeBroken(f"{name}: earliest is {earliest} and was {life.earliest}", name)
        if earliest != life.earliest and (earliest > life.earliest or not is_kept):
            life.earliest, life.earliest_at = earliest, self.now()
            life.earliest_losses = losses
        acked = [sent for sent in life.sent[-20:] if 0 < sent.acked_at < began]
        for sent in acked:
            if head < sent.first_seq + len(sent.payloads) - 1 and sent.first_seq:
                raise GuaranteeBroken(f"{name}: head is {head} and {sent} was acknowledged", name)

    # -- reasons for missing records ------------------------------------------------------------------

    def _was_lost(self, sent: Sent) -> bool:
        """Return whether a power loss may have taken the frame."""
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
        """Return an upper bound of the assigned seqs."""
        open_records = sum(len(sent.payloads) for sent in life.sent if not sent.first_seq)
        return max(life.at, default=0) + open_records + len(life.holes)
