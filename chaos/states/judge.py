"""Recover an image and compare it with what was submitted and acknowledged up to the cut.

INV-1 acked survives; INV-2 nothing is made up; INV-3 no silent hole; INV-4 numbers are not issued twice;
INV-5 recovering twice changes nothing; INV-15 what is sent again is not appended again; INV-18 a frame
survives whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from chaos.states.images import Image
from chaos.states.workload import History, Sent, Wish
from ringlog.envelope import messages as m
from ringlog.errors import RinglogError
from ringlog.frame.settle import S_FIRST_SEQ, entry_error
from ringlog.testing.disk import Damage
from ringlog.testing.shard_world import Gone, Marks, World
from ringlog.types import Durability


class Broken(AssertionError):
    """An image from which something that was promised does not come back."""


@dataclass(slots=True)
class Facts:
    """What was true at a cut."""

    sent: list[Sent] = field(default_factory=list)
    acked: set[int] = field(default_factory=set)
    """Indexes of `sent`."""
    wishes: list[Wish] = field(default_factory=list)
    granted: set[int] = field(default_factory=set)
    marks: Marks = field(default_factory=Marks)
    is_stopping: bool = False

    def key(self) -> tuple[Any, ...]:
        """Equal when judging the same image under the facts would be the same."""
        return (len(self.sent), frozenset(self.acked), len(self.wishes), frozenset(self.granted))

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
            case "marks":
                self.marks = payload
            case "stopping":
                self.is_stopping = True

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


def judge(image: Image, facts: Facts, how: How, incarnation: int = 1_000) -> None:
    """Recover the image twice and look at everything; raises Broken."""
    world = World(image.mount(), incarnation=incarnation)
    if how.is_power_loss:
        world.reboot()
    try:
        _start(world, facts, how)
        first = dump(world)
        _check_topics(world, facts, how)
        world.kill()
        world.start()
        if dump(world) != first:
            raise Broken(f"recovering twice changes the state: {first} then {dump(world)}")
        _send_again(world, facts)
        third = dump(world)
        world.kill()
        world.start()
        if dump(world) != third:
            raise Broken(f"what was appended after recovery is not there: {third} then {dump(world)}")
    except RinglogError as e:
        raise Broken(f"{type(e).__name__}: {e}") from e


def judge_trap(durable: Image, cached: Image, facts: Facts, incarnation: int = 1_000) -> None:
    """A sync failed, the process was replaced, the successor read the cache; then power is lost (RF-42).

    Nothing that the successor showed of a topic of class `fsync`, or acknowledged, may be gone.
    """
    world = World(durable.mount_below(cached), incarnation=incarnation)
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
        _check_topics(world, facts, POWER_LOSS)
    except (RinglogError, Gone) as e:
        raise Broken(f"{type(e).__name__}: {e}") from e


def _start(world: World, facts: Facts, how: How) -> None:
    if not how.keeps_board:
        world.start()
        return
    world.boot_incarnation = 1
    world.marks = {0: Marks(facts.marks.published, facts.marks.durable)}
    world.start_shard(0)


def dump(world: World) -> dict[str, Any]:
    """Everything that a client can see, by topic."""
    found = {}
    for topic in world.runs[0].core.directory.by_id.values():
        state = world.ask(world.runs[0], m.TopicState(topic.name, touch=False))
        assert isinstance(state, m.TopicStateReply)
        found[topic.name] = (
            state.topic_id, state.epoch, state.head_seq, state.earliest_seq, state.count, state.bytes,
            state.last_write_ts, state.config, list(topic.lost), world.records(topic.name),
        )  # fmt: skip
    return found


def _check_topics(world: World, facts: Facts, how: How) -> None:
    directory = world.runs[0].core.directory
    for name in {wish.topic for wish in facts.wishes}:
        topic = directory.find(name)
        if (topic is not None) not in facts.may_exist(name):
            raise Broken(f"topic {name}: exists is {topic is not None}, may be {facts.may_exist(name)}")
        if topic is None:
            continue
        if topic.config.ttl_ms not in facts.may_have_ttl(name):
            raise Broken(f"topic {name}: ttl_ms {topic.config.ttl_ms} of {facts.may_have_ttl(name)}")
        mine = [(i, sent) for i, sent in enumerate(facts.sent) if sent.topic_id == topic.topic_id]
        _check_records(world, name, mine, facts, how)
    for live in directory.by_id.values():
        if live.name not in {wish.topic for wish in facts.wishes}:
            raise Broken(f"topic {live.name} was never asked for")


def _check_records(world: World, name: str, mine: Iterable[tuple[int, Sent]], facts: Facts, how: How) -> None:
    found = dict(world.records(name))
    lost = world.topic(name).lost
    if not how.is_power_loss and lost:
        raise Broken(f"topic {name}: {lost} announced as lost after a {how.name}")
    for i, sent in mine:
        seqs = range(sent.first_seq, sent.first_seq + len(sent.payloads))
        there = [found.pop(seq, None) for seq in seqs]
        if there == sent.payloads:
            continue
        if any(payload is not None for payload in there):
            raise Broken(f"topic {name}: frame {sent.seq} came back as {there}")
        must_survive = sent.durability is Durability.FSYNC or not how.is_power_loss
        if i in facts.acked and must_survive:
            raise Broken(f"topic {name}: acked frame {sent.seq} (records {seqs}) is gone after a {how.name}")
        if i in facts.acked and not any(a <= seqs[0] and seqs[-1] <= b for a, b in lost):
            raise Broken(f"topic {name}: acked records {seqs} are gone and {lost} is announced")
    if found:
        raise Broken(f"topic {name}: records {sorted(found)} were never sent")


def _send_again(world: World, facts: Facts) -> None:
    """Send everything again, in order, and then something new."""
    before: dict[str, dict[int, bytes]] = {}
    for name in ("f", "d"):
        topic = world.runs[0].core.directory.find(name)
        if topic is None:
            continue
        mine = [(i, s) for i, s in enumerate(facts.sent) if s.topic_id == topic.topic_id]
        before[name] = dict(world.records(name))
        highest = max([s.first_seq + len(s.payloads) - 1 for i, s in mine if i in facts.acked], default=0)
        head = topic.head_seq
        entries = world.send(name, [bytearray(s.frame) for _, s in mine])
        for (_, sent), entry in zip(mine, entries, strict=True):
            _check_entry(name, sent, entry, before[name], head, highest)
        fresh = world.append(name, [b"new"], producer=99, seq=1)
        records = dict(world.records(name))
        if fresh <= highest or records.pop(fresh) != b"new":
            raise Broken(f"topic {name}: a new record got number {fresh}, {highest} was acked")


def _check_entry(
    name: str, sent: Sent, entry: Any, before: dict[int, bytes], head: int, highest: int
) -> None:
    """A frame sent again is a repeat when it survived, is appended when it did not."""
    error = entry_error(entry, name)
    if error is not None:
        raise Broken(f"topic {name}: frame {sent.seq} sent again was refused: {error}")
    first = int(entry[S_FIRST_SEQ])
    is_there = sent.first_seq in before
    if is_there and first != sent.first_seq:
        raise Broken(f"topic {name}: frame {sent.seq} is record {sent.first_seq}, sent again {first}")
    if not is_there and first <= max(head, highest):
        raise Broken(f"topic {name}: frame {sent.seq} sent again got the used number {first}")
