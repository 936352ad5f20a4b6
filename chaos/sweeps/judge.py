"""What must be there after a fault: everything acknowledged, nothing made up, nothing half done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import xxhash

from chaos.sweeps.house import Broken, House, Model, Sent
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError
from ringlog.testing.disk import Damage

KILL, POWER_LOSS, POWER_KEPT, CHANCE = (
    "kill",
    "power loss",
    "power loss, all written",
    "power loss, by chance",
)
ENDS = (POWER_LOSS, KILL, CHANCE)
FSYNC_TOPICS = frozenset("fgh")
"""By their first letter; others are of class `disk`."""


ENDS_EACH = len(ENDS)
"""Runs of a line or an allocation: what it left, with each end."""
KNOWN_MAX = 1 << 20
ANYWAY = 16
"""One in so many outcomes that are known to be good is judged all the same."""


@dataclass(slots=True)
class Known:
    """What faults left, and was judged already: what comes of the same again is the same.

    Different errors at one call mostly end alike, and so do exceptions at neighbouring lines.
    """

    good: set[bytes] = field(default_factory=set)
    fresh: list[bytes] = field(default_factory=list)
    """What was remembered last, until somebody takes it (for another process's `good`)."""
    met: int = 0
    judged: int = 0

    def is_known(self, key: bytes) -> bool:
        """Say whether this outcome need not be judged again."""
        self.met += 1
        if key in self.good and self.met % ANYWAY:
            return True
        self.judged += 1
        return False

    def remember(self, *keys: bytes) -> None:
        """These held."""
        self.adopt(*keys)
        self.fresh.extend(keys)

    def adopt(self, *keys: bytes) -> None:
        """These held, as another process says. They are nobody's news: who told them on with his own would be
        told them back, and all of them would be twice as many each time."""
        if len(self.good) >= KNOWN_MAX:
            self.good.clear()
            self.fresh.clear()
        self.good.update(keys)

    def take_fresh(self) -> list[bytes]:
        """What was remembered since the last call."""
        found, self.fresh = self.fresh, []
        return found


def end_and_judge(
    house: House, how: str, seed: int, *, deep: bool = False, known: Known | None = None
) -> None:
    """The fault is over: end the engine, start it, hold it to the model, let it work, and once more.

    `deep` also makes a checkpoint, lets the reclaimer and the relocator work, and recovers once more.
    With `known` an outcome that was judged before is not judged again. Raises Broken.
    """
    try:
        is_up = 0 in house.world.runs and not house.has_rot
        before = dump(house) if how == KILL and is_up else None
        _end(house, how, seed)
        if known is None:
            _judge(house, how, before, deep=deep)
            return
        key = xxhash.xxh3_128_digest(f"{how}/{before!r}".encode() + house.digest())
        if known.is_known(key + bytes([deep])):
            return
        _judge(house, how, before, deep=deep)
        # A deep look has all of the other in it.
        known.remember(key + b"\0", key + bytes([deep]))
    except Broken:
        raise
    except (RinglogError, AssertionError) as e:
        raise Broken(f"after {how}: {type(e).__name__}: {e} {getattr(e, 'detail', '')}") from e


def _judge(house: House, how: str, before: dict[str, Any] | None, *, deep: bool) -> None:
    house.start()
    if house.has_rot and (left := house.scrub()):
        raise Broken(f"not healed although the other tier has a whole copy: {left}")
    found = dump(house)
    check(house, how)
    if before is not None and found != before:
        raise Broken(f"recovery changes what clients saw: {_difference(before, found)}")
    _work(house, how, deep=deep)
    if not deep:
        return
    found = dump(house)
    house.world.kill()
    house.start()
    if dump(house) != found:
        raise Broken(f"recovering again changes the state: {_difference(found, dump(house))}")
    check(house, how)


def end_each(house: House, seed: int, known: Known | None = None) -> None:
    """Judge a house with each end: copies of it, and itself after a kill. Raises Broken."""
    for how in ENDS:
        if how != KILL:
            end_and_judge(house.twin(), how, seed, known=known)
    end_and_judge(house, KILL, seed, known=known)


def _end(house: House, how: str, seed: int) -> None:
    if how == KILL:
        house.world.kill()
    else:
        house.world.power_loss(seed, {POWER_LOSS: Damage.LOST, POWER_KEPT: Damage.KEPT}.get(how))
        house.monitor.power_loss(house.base.exists)
    house.faulty.paths.clear()
    house.world.runs.clear()


def dump(house: House) -> dict[str, Any]:
    """Everything a client can see, by topic."""
    world = house.world
    found = {}
    for topic in world.runs[0].core.directory.by_id.values():
        state = world.ask(world.runs[0], m.TopicState(topic.name, touch=False))
        assert isinstance(state, m.TopicStateReply), state
        found[topic.name] = (
            state.topic_id, state.epoch, state.head_seq, state.earliest_seq, state.count, state.config,
            list(topic.lost), world.records(topic.name),
        )  # fmt: skip
    return found


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            return f"{name}: {str(before.get(name))[:600]} then {str(after.get(name))[:600]}"
    return "nothing"


def check(house: House, how: str) -> None:
    """Hold what is there to what was acknowledged; raises Broken."""
    model, directory = house.model, house.world.runs[0].core.directory
    for name, may in model.topics.items():
        topic = directory.find(name)
        if (topic is not None) not in may:
            raise Broken(f"topic {name} exists: {topic is not None}, may be {may}")
        if topic is not None and name in model.sent:
            found = dict(house.world.records(name))
            lost = list(topic.lost) if name[0] not in FSYNC_TOPICS and how != KILL else []
            _check_records(name, model, found, lost)


def _check_records(name: str, model: Model, found: dict[int, bytes], lost: list[tuple[int, int]]) -> None:
    gone, maybe = model.deleted.get(name, set()), model.maybe_deleted.get(name, set())
    if gone & found.keys():
        raise Broken(f"topic {name}: deleted records are back: {sorted(gone & found.keys())}")
    by_payload = {payload: seq for seq, payload in found.items()}
    if len(by_payload) != len(found):
        raise Broken(f"topic {name}: a record is there twice")
    for sent in model.sent[name]:
        seqs = [by_payload.pop(payload, 0) for payload in sent.payloads]
        if sent.first_seq:
            _check_acked(name, sent, seqs, maybe, lost)
        elif any(seqs):
            if sent.is_refused:
                raise Broken(f"topic {name}: a refused frame is there: {seqs}")
            if not all(seqs) and not maybe:
                raise Broken(f"topic {name}: half a frame is there: {seqs}")
    if by_payload:
        raise Broken(f"topic {name}: records were never sent: {sorted(by_payload.values())[:8]}")


def _check_acked(
    name: str, sent: Sent, seqs: list[int], maybe: set[int], lost: list[tuple[int, int]]
) -> None:
    for seq, number in enumerate(seqs, sent.first_seq):
        if number not in {0, seq}:
            raise Broken(f"topic {name}: record {seq} is now {number}")
        if number == 0 and seq not in maybe and not any(a <= seq <= b for a, b in lost):
            raise Broken(f"topic {name}: acknowledged record {seq} is gone, {lost} is announced")


def _work(house: House, how: str, *, deep: bool) -> None:
    """After the fault everything works: what is sent is acknowledged, at once."""
    failed = house.model.failed
    for name, may in house.model.topics.items():
        if may == {True}:
            house.append(name, 2)
    if deep:
        house.checkpoint_or_fail()
        house.reclaim()
        house.checkpoint_or_fail()  # A segment moves only when a snapshot names it.
        house.relocate()
        check(house, how)
    if house.model.failed != failed:
        raise Broken("an operation fails although the fault is over")
