"""Recover an image and compare it with what was submitted and acknowledged up to the cut.

INV-1 acked survives; INV-2 nothing is made up; INV-3 no silent hole; INV-4 numbers are not issued twice;
INV-5 recovering twice changes nothing; INV-15 what is sent again is not appended again; INV-18 a frame
survives whole or not at all; INV-11 what was deleted does not come back. The offline verifier has to accept
what a recovery leaves and to say the same of it (O3).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from chaos.states import actors
from chaos.states.actors import COLD
from chaos.states.images import Image
from chaos.states.offline import Laid, Offline, Told
from chaos.states.workload import CLASSES, FILE_BYTES, History, Removal, Sent, Wish
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError
from ringlog.frame.settle import S_FIRST_SEQ, entry_error
from ringlog.storage.disk import Disk
from ringlog.testing.disk import Damage
from ringlog.testing.shard_world import Gone, Marks, World
from ringlog.testing.simulated_disk import SimulatedDisk
from ringlog.types import Durability

AGAIN_MAX = 500_000
"""Disks after a first recovery that are remembered."""
LATER_SALTS = 1 << 20
LATER_S = 3_600.0
"""An image is recovered so much later than its history began."""


class Broken(AssertionError):
    """An image from which something that was promised does not come back."""

    case = ""
    """What makes it again, when that is known."""


@dataclass(slots=True)
class Facts:
    """What was true at a cut."""

    sent: list[Sent] = field(default_factory=list)
    acked: set[int] = field(default_factory=set)
    """Indexes of `sent`."""
    wishes: list[Wish] = field(default_factory=list)
    granted: set[int] = field(default_factory=set)
    removals: list[Removal] = field(default_factory=list)
    removed: set[int] = field(default_factory=set)
    """Indexes of `removals` that were acknowledged."""
    marks: Marks = field(default_factory=Marks)
    is_stopping: bool = False

    def key(self) -> Hashable:
        """Equal when judging the same image under the facts would be the same."""
        return (
            tuple((each.topic_id, each.seq, each.first_seq, *each.payloads) for each in self.sent),
            frozenset(self.acked), tuple(self.wishes), frozenset(self.granted), tuple(self.removals),
            frozenset(self.removed),
        )  # fmt: skip

    def take(self, history: History, tag: str, payload: Any) -> None:
        """Take in one note of the record."""
        match tag:
            case "sent":
                self.sent.append(history.sent[payload])
            case "acked":
                self.acked.add(payload)
            case "wish":
                self.wishes.append(history.wishes[payload])
            case "granted":
                self.granted.add(payload)
            case "remove":
                self.removals.append(history.removals[payload])
            case "removed":
                self.removed.add(payload)
            case "marks":
                self.marks = payload
            case "stopping":
                self.is_stopping = True

    def gone(self, topic_id: int, how: How) -> tuple[set[int], set[int]]:
        """Numbers of one life of a topic that must be gone, and those that may be."""
        must: set[int] = set()
        may: set[int] = set()
        for i, each in enumerate(self.removals):
            if each.topic_id == topic_id:
                is_promised = i in self.removed and (each.is_fsync or not how.is_power_loss)
                (must if is_promised else may).update(each.seqs)
        return must, may - must

    def may_exist(self, topic: str) -> set[bool]:
        """Whether the topic may be there: by the last granted wish, or by one submitted after it."""
        last = False
        after: list[bool] = []
        for i, wish in enumerate(self.wishes):
            if wish.topic == topic:
                if i in self.granted:
                    last, after = wish.exists, []
                else:
                    after.append(wish.exists)
        return {last, *after}

    def may_have_ttl(self, topic: str) -> set[int]:
        """The same for its configuration."""
        values: set[int] = set()
        for i, wish in enumerate(self.wishes):
            if wish.topic == topic and wish.exists:
                values = {wish.ttl_ms} if i in self.granted else values | {wish.ttl_ms}
        return values


@dataclass(frozen=True, slots=True)
class How:
    """What kind of crash it was."""

    name: str
    is_power_loss: bool
    keeps_board: bool = False


KILL = How("kill of the engine", is_power_loss=False)
KILL_SHARD = How("kill of the shard", is_power_loss=False, keeps_board=True)
POWER_LOSS = How("power loss", is_power_loss=True)


@dataclass(frozen=True, slots=True)
class Depth:
    """What else is done with an image, beyond recovering it twice."""

    offline: Offline | None = None
    """Who verifies what the recovery leaves."""
    sends_again: bool = True
    """Every producer sends everything once more, and something new."""
    goes_on: bool = False
    """Compactor, relocator and reclaimer have a round each."""
    again: dict[Hashable, bytes] = field(default_factory=dict)
    """Hash of what the second recovery found on disks that a first one left: of two that are equal byte for
    byte one is recovered again."""


def new_world(disk: Disk, incarnation: int) -> World:
    """Where an image is recovered: later than everything that the history knows."""
    world = World(disk, incarnation=incarnation, file_bytes=FILE_BYTES, cold=COLD, has_cold=True)
    world.clock.advance(LATER_S)
    return world


def judge(
    image: Image, facts: Facts, how: How, incarnation: int = 1_000, depth: Depth | None = None
) -> dict[str, Any]:
    """Recover the image twice and look at everything; returns what a client sees. Raises Broken."""
    depth = depth or Depth()
    disk = image.mount()
    world = new_world(disk, incarnation)
    if how.is_power_loss:
        world.reboot()
    try:
        _start(world, facts, how)
        first = dump(world)
        _check_topics(world, first, facts, how)
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
            _restart(world, dump(world), "what was appended after recovery is not there")
        return first
    except (RinglogError, Gone, AssertionError) as e:
        if isinstance(e, Broken):
            raise
        raise Broken(f"{type(e).__name__}: {e} {getattr(e, 'detail', '')}") from e


def _restart(world: World, expected: dict[str, Any], wrong: str) -> None:
    world.kill()
    world.start()
    found = dump(world)
    if found != expected:
        raise Broken(f"{wrong}: {expected} then {found}")


def _go_on(world: World, disk: SimulatedDisk, before: dict[str, Any], depth: Depth) -> None:
    """Finish whatever the crash left of seals, moves and rewrites: nothing that a client sees may change."""
    with actors.counted_salts(LATER_SALTS):
        actors.seal(world)
        moved = actors.relocate(world)
        actors.reclaim(world)
    if moved.failed:
        raise Broken(f"the relocator fails after recovery: {moved}")
    if dump(world) != before:
        raise Broken(f"sealing, moving and reclaiming change the state: {before} then {dump(world)}")
    _restart(world, before, "after sealing, moving and reclaiming another state is recovered")
    if depth.offline is not None:
        depth.offline.check(Laid.on(disk), _told(before))


def _told(topics: dict[str, Any]) -> dict[str, tuple[Told, dict[int, bytes]]]:
    """A dump as the offline verifier would say it."""
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
    """A sync failed, the process was replaced, the successor read the cache; then power is lost (RF-42).

    Nothing that the successor showed of a topic of class `fsync`, or acknowledged, may be gone.
    """
    world = new_world(durable.mount_below(cached), incarnation)
    try:
        world.start()
        shown = {n: dict(world.records(n)) for n in ("f",) if world.runs[0].core.directory.find(n)}
        world.power_loss(0, Damage.LOST)
        world.start()
        for name, records in shown.items():
            found = dict(world.records(name))
            if found != records:
                gone = sorted(set(records) - set(found))
                raise Broken(f"topic {name}: records {gone} were shown after a failed sync and are gone")
        _check_topics(world, dump(world), facts, POWER_LOSS)
    except (RinglogError, Gone) as e:
        raise Broken(f"{type(e).__name__}: {e}") from e


def _start(world: World, facts: Facts, how: How) -> None:
    if not how.keeps_board:
        world.start()
        return
    world.boot_incarnation = 1
    world.marks = {0: Marks(facts.marks.published, facts.marks.durable)}
    world.start_shard(0)


class Seen(NamedTuple):
    """Everything that a client can see of a topic."""

    topic_id: int
    epoch: int
    head: int
    earliest: int
    live: int
    live_bytes: int
    last_write_ts: int | None
    config: Any
    lost: list[tuple[int, int]]
    records: dict[int, bytes]


def dump(world: World) -> dict[str, Any]:
    """What is seen of every topic, by name."""
    found = {}
    for topic in world.runs[0].core.directory.by_id.values():
        state = world.ask(world.runs[0], m.TopicState(topic.name, touch=False))
        assert isinstance(state, m.TopicStateReply)
        found[topic.name] = Seen(
            state.topic_id, state.epoch, state.head_seq, state.earliest_seq, state.count, state.bytes,
            state.last_write_ts, state.config, list(topic.lost), dict(world.records(topic.name)),
        )  # fmt: skip
    return found


def _check_topics(world: World, seen: dict[str, Seen], facts: Facts, how: How) -> None:
    directory = world.runs[0].core.directory
    names = {wish.topic for wish in facts.wishes}
    for name in names:
        topic = directory.find(name)
        if (topic is not None) not in facts.may_exist(name):
            raise Broken(f"topic {name}: exists is {topic is not None}, may be {facts.may_exist(name)}")
        if topic is None:
            continue
        if topic.config.ttl_ms not in facts.may_have_ttl(name):
            raise Broken(f"topic {name}: ttl_ms {topic.config.ttl_ms} of {facts.may_have_ttl(name)}")
        _check_records(name, seen[name], facts, how)
    for live in directory.by_id.values():
        if live.name not in names:
            raise Broken(f"topic {live.name} was never asked for")


def _check_records(name: str, seen: Seen, facts: Facts, how: How) -> None:
    found, lost = dict(seen.records), seen.lost
    must_go, may_go = facts.gone(seen.topic_id, how)
    if not how.is_power_loss and lost:
        raise Broken(f"topic {name}: {lost} announced as lost after a {how.name}")
    back = sorted(must_go.intersection(found))
    if back:
        raise Broken(f"topic {name}: deleted records {back} are there again after a {how.name}")
    for i, sent in enumerate(facts.sent):
        if sent.topic_id != seen.topic_id:
            continue
        there = {seq: found.pop(seq) for seq in sent.seqs if seq in found}
        expected = dict(zip(sent.seqs, sent.payloads, strict=True))
        missing = expected.keys() - there.keys() - must_go - may_go
        if any(expected[seq] != payload for seq, payload in there.items()) or (there and missing):
            raise Broken(f"topic {name}: frame {sent.seq} came back as {there}")
        must_survive = sent.durability is Durability.FSYNC or not how.is_power_loss
        if i not in facts.acked or not missing:
            continue
        if must_survive:
            raise Broken(f"topic {name}: acked records {sorted(missing)} are gone after a {how.name}")
        if not all(any(a <= seq <= b for a, b in lost) for seq in missing):
            raise Broken(f"topic {name}: acked records {sorted(missing)} are gone and {lost} is announced")
    if found:
        raise Broken(f"topic {name}: records {sorted(found)} were never sent")
    _check_removals(name, seen, facts, how)
    if seen.live != len(seen.records):
        raise Broken(f"topic {name}: says it has {seen.live} records, and there are {len(seen.records)}")


def _check_removals(name: str, seen: Seen, facts: Facts, how: How) -> None:
    """A removal takes all of its records or none, as far as they survived."""
    survived = {seq for sent in facts.sent if sent.topic_id == seen.topic_id for seq in sent.seqs}
    for each in facts.removals:
        if each.topic_id != seen.topic_id:
            continue
        others = set().union(
            *(o.seqs for o in facts.removals if o is not each and o.topic_id == each.topic_id)
        )
        mine = {seq for seq in each.seqs & survived - others if seq <= seen.head}
        mine -= {seq for seq in mine if any(a <= seq <= b for a, b in seen.lost)}
        there = mine.intersection(seen.records)
        if there and there != mine:
            raise Broken(
                f"topic {name}: of records {sorted(mine)}, removed at once, {sorted(there)} are there"
            )


def _send_again(world: World, facts: Facts, how: How) -> None:
    """Send everything again, in order, and then something new."""
    for name in CLASSES:
        topic = world.runs[0].core.directory.find(name)
        if topic is None:
            continue
        mine = [(i, s) for i, s in enumerate(facts.sent) if s.topic_id == topic.topic_id]
        before = dict(world.records(name))
        must_go, may_go = facts.gone(topic.topic_id, how)
        highest = max([s.seqs[-1] for i, s in mine if i in facts.acked], default=0)
        head = topic.head_seq
        entries = world.send(name, [bytearray(s.frame) for _, s in mine])
        for (i, sent), entry in zip(mine, entries, strict=True):
            is_promised = sent.durability is Durability.FSYNC or not how.is_power_loss
            is_known = bool(set(sent.seqs).intersection(before)) or (i in facts.acked and is_promised)
            may_be_known = is_known or set(sent.seqs) <= must_go | may_go
            _check_entry(name, sent, entry, is_known, may_be_known, max(head, highest))
        fresh = world.append(name, [b"new"], producer=99, seq=1)
        records = dict(world.records(name))
        if fresh <= highest or records.pop(fresh) != b"new":
            raise Broken(f"topic {name}: a new record got number {fresh}, {highest} was acked")


def _check_entry(
    name: str, sent: Sent, entry: Any, is_known: bool, may_be_known: bool, used: int
) -> None:  # fmt: skip
    """A frame sent again is a repeat when it survived, deleted or not, and is appended when it did not."""
    error = entry_error(entry, name)
    if error is not None:
        raise Broken(f"topic {name}: frame {sent.seq} sent again was refused: {error}")
    first = int(entry[S_FIRST_SEQ])
    if first == sent.first_seq and may_be_known:
        return
    if is_known:
        raise Broken(f"topic {name}: frame {sent.seq} is record {sent.first_seq}, sent again {first}")
    if first <= used:
        raise Broken(f"topic {name}: frame {sent.seq} sent again got the used number {first}")
