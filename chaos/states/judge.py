"""Recovers an image and compares it with the operations that were submitted and acknowledged up to the cut.

This adds to the checks of chaos/rigs/judge.py:

- A second recovery changes nothing.
- A frame that is sent again is not appended again.
- The offline verifier accepts the files after recovery, and its contents equal the engine's.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from chaos.rigs import storage
from chaos.rigs.harness import CLASSES, FILE_BYTES
from chaos.rigs.judge import POWER_LOSS, CrashKind, Seen, check, observe, require_same
from chaos.rigs.model import Model, SentFrame
from chaos.rigs.storage import COLD
from chaos.states.images import Image
from chaos.states.offline import Laid, Offline, Told
from ringlog.drill.checks import GuaranteeBroken
from ringlog.errors import RinglogError
from ringlog.frame.settle_entry import S_FIRST_SEQ, entry_error
from ringlog.storage.disk import Disk
from ringlog.testing.disk import PowerLossDamage
from ringlog.testing.simulated_disk import SimulatedDisk
from tests.support.shard_world import ShardRunEnded, SimulatedBoardMarks, World

AGAIN_MAX = 500_000
"""Maximum number of disks after a first recovery that are remembered."""
LATER_SALTS = 1 << 20
LATER_S = 3_600.0
"""Time (s) between the start of a history and the recovery of its images."""


class Facts(Protocol):
    """The state at the time of the crash."""

    @property
    def model(self) -> Model: ...
    @property
    def marks(self) -> SimulatedBoardMarks: ...


@dataclass(frozen=True, slots=True)
class Depth:
    """Further checks of an image, in addition to two recoveries."""

    offline: Offline | None = None
    """Verifier of the files after recovery; None = not verified."""
    sends_again: bool = True
    """Whether every producer sends all its frames again, and new ones."""
    goes_on: bool = False
    """Whether compactor, relocator and reclaimer run a round each."""
    again: dict[Hashable, bytes] = field(default_factory=dict)
    """Digest of the second recovery's result, by the disk after the first recovery. Equal disks are recovered
    again only once."""


def new_world(disk: Disk, incarnation: int, *, has_cold: bool = True) -> World:
    """Return a world to recover an image in, later than the history."""
    world = World(disk, incarnation=incarnation, file_bytes=FILE_BYTES, cold=COLD, has_cold=has_cold)
    world.clock.advance(LATER_S)
    return world


def judge(
    image: Image, facts: Facts, how: CrashKind, incarnation: int = 1_000, depth: Depth | None = None, *,
    has_cold: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Recover the image twice and run all checks; return the topics as clients see them.

    Raises GuaranteeBroken.
    """
    depth = depth or Depth()
    disk = image.mount()
    world = new_world(disk, incarnation, has_cold=has_cold)
    if how.is_power_loss:
        world.reboot()
    try:
        _start(world, facts, how)
        first = observe(world)
        _check(first, facts, how)
        world.kill()
        laid = Laid.on(disk)
        key = (laid.key, world.boot_id, world.incarnation)
        said = xxhash.xxh3_128_digest(repr(first).encode())
        if depth.again.get(key) != said or depth.goes_on or depth.sends_again:
            _restart(world, first, "recovering twice changes the state")
            if len(depth.again) >= AGAIN_MAX:
                depth.again.clear()
            depth.again[key] = said
        if depth.offline is not None:
            depth.offline.check(laid, _told(first))
        if depth.goes_on:
            _go_on(world, disk, first, depth)
        if depth.sends_again:
            _send_again(world, facts, how)
            _restart(world, observe(world), "what was appended after recovery is not there")
        return first
    except (RinglogError, ShardRunEnded, AssertionError) as e:
        if isinstance(e, GuaranteeBroken):
            raise
        raise GuaranteeBroken(f"{type(e).__name__}: {e} {getattr(e, 'detail', '')}") from e


def _check(seen: dict[str, Seen], facts: Facts, how: CrashKind) -> None:
    check(facts.model, seen, how)
    lost = {name: topic.lost for name, topic in seen.items() if topic.lost}
    if lost and not how.is_power_loss:
        raise GuaranteeBroken(f"{lost} announced as lost after a {how.name}")


def _restart(world: World, expected: dict[str, Seen], wrong: str) -> None:
    world.kill()
    world.start()
    require_same(expected, observe(world), wrong)


def _go_on(world: World, disk: SimulatedDisk, before: dict[str, Any], depth: Depth) -> None:
    """Run compactor, relocator and reclaimer after the crash. Nothing that a client sees may change."""
    with storage.counted_salts(LATER_SALTS):
        storage.seal(world)
        moved = storage.relocate(world)
        storage.reclaim(world)
    if moved.failed:
        raise GuaranteeBroken(f"the relocator fails after recovery: {moved}")
    require_same(before, observe(world), "sealing, moving and reclaiming change the state")
    _restart(world, before, "after sealing, moving and reclaiming another state is recovered")
    if depth.offline is not None:
        depth.offline.check(Laid.on(disk), _told(before))


def _told(topics: dict[str, Seen]) -> dict[str, tuple[Told, dict[int, bytes]]]:
    """Return the observed topics in the form of the offline verifier."""
    return {
        name: (
            Told(
                seen.topic_id, seen.epoch, seen.head, seen.earliest, seen.live,
                tuple(span for span in seen.lost), tuple(seen.records),
            ),
            seen.records,
        )
        for name, seen in topics.items()
    }  # fmt: skip


def judge_trap(durable: Image, cached: Image, facts: Facts, incarnation: int = 1_000) -> None:
    """Judge a power loss after a failed sync, when the successor had read the page cache (RF-42).

    No record of class `fsync` that the successor served or acknowledged may be lost.
    """
    world = new_world(durable.mount_below(cached), incarnation)
    try:
        world.start()
        shown = {n: dict(world.records(n)) for n in ("f",) if world.runs[0].core.directory.find(n)}
        world.power_loss(0, PowerLossDamage.LOST)
        world.start()
        for name, records in shown.items():
            found = dict(world.records(name))
            if found != records:
                gone = sorted(set(records) - set(found))
                raise GuaranteeBroken(
                    f"topic {name}: records {gone} were shown after a failed sync and are gone"
                )
        _check(observe(world), facts, POWER_LOSS)
    except (RinglogError, ShardRunEnded) as e:
        raise GuaranteeBroken(f"{type(e).__name__}: {e}") from e


def _start(world: World, facts: Facts, how: CrashKind) -> None:
    if not how.keeps_board:
        world.start()
        return
    world.boot_incarnation = 1
    world.marks = {0: SimulatedBoardMarks(facts.marks.published, facts.marks.durable)}
    world.start_shard(0)


def _send_again(world: World, facts: Facts, how: CrashKind) -> None:
    """Send all frames again in order, then a new one."""
    for name in CLASSES:
        topic = world.runs[0].core.directory.find(name)
        if topic is None:
            continue
        mine = [sent for sent in facts.model.frames if sent.topic_id == topic.topic_id]
        before = dict(world.records(name))
        must_go, may_go = facts.model.gone(topic.topic_id, is_power_loss=how.is_power_loss)
        highest = facts.model.highest.get((name, topic.topic_id), 0)
        head = topic.head_seq
        entries = world.send(name, [bytearray(sent.frame) for sent in mine])
        for sent, entry in zip(mine, entries, strict=True):
            is_promised = sent.is_fsync or not how.is_power_loss
            is_known = bool(set(sent.seqs).intersection(before)) or (sent.is_owed and is_promised)
            may_be_known = is_known or set(sent.seqs) <= must_go | may_go
            _check_entry(name, sent, entry, is_known, may_be_known, max(head, highest))
        fresh = world.append(name, [b"new"], producer=99, seq=1)
        records = dict(world.records(name))
        if fresh <= highest or records.pop(fresh) != b"new":
            raise GuaranteeBroken(f"topic {name}: a new record got number {fresh}, {highest} was acked")


def _check_entry(
    name: str, sent: SentFrame, entry: Any, is_known: bool, may_be_known: bool, used: int
) -> None:  # fmt: skip
    """Check the result of a frame that was sent again.

    If it survived (deleted or not), it must be a repeat. If it did not, it must be appended under a new
    number.
    """
    error = entry_error(entry, name)
    if error is not None:
        raise GuaranteeBroken(f"topic {name}: frame {sent.number} sent again was refused: {error}")
    first = int(entry[S_FIRST_SEQ])
    if first == sent.first_seq and may_be_known:
        return
    if is_known:
        raise GuaranteeBroken(
            f"topic {name}: frame {sent.number} is record {sent.first_seq}, sent again {first}"
        )
    if first <= used:
        raise GuaranteeBroken(f"topic {name}: frame {sent.number} sent again got the used number {first}")
