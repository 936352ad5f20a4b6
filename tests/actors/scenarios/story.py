"""Random lives of an engine against a model of its guarantees.

A Story sends, resends, creates, deletes and configures through producers that number their frames. It ends
lives in every way: orderly stop, kill, kill at a disk call, failed sync, power loss, other shard count. After
each end it compares the records with those that were submitted and acked.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from ringlog.envelope import messages as m
from ringlog.errors import DiskError, Refused
from ringlog.frame.settle_entry import (
    FLAGS_SHIFT,
    S_COUNT_STATUS,
    S_EPOCH,
    S_FIRST_SEQ,
    S_PRODUCER_SEQ,
    entry_error,
)
from ringlog.placement import home_shard
from ringlog.testing.disk import DiskFault, FaultyDisk, Halted, SimulatedDisk
from ringlog.types import Durability
from tests.support.shard_world import DATA, World

CLASSES = {
    "a": Durability.FSYNC, "b": Durability.DISK, "c": Durability.MEMORY, "e": Durability.EPHEMERAL,
    "f2": Durability.FSYNC, "d2": Durability.DISK,
}  # fmt: skip
PRODUCERS = (1, 2, 1 << 63 | 5)


@dataclass(slots=True)
class Sent:
    """One frame from the view of its producer."""

    producer: int
    number: int
    payloads: list[bytes]
    frame: bytearray
    first_seq: int = 0
    acked: bool = False
    is_exposed: bool = True
    """Acked in this life: a power loss may take a frame of class `disk`. Recovered frames are durable."""


@dataclass(slots=True)
class Instance:
    """One epoch of a topic."""

    name: str
    topic_id: int
    epoch: int
    durability: Durability
    sent: list[Sent] = field(default_factory=list)
    highest: int = 0
    """Highest seq that was acked and must not be assigned again."""


@dataclass
class Story:
    """One random history. `step` performs one action. Checks raise AssertionError with the seed."""

    seed: int
    shards: int = 1
    changes_layout: bool = False
    rng: random.Random = field(init=False)
    disk: FaultyDisk = field(init=False)
    world: World = field(init=False)
    live: dict[str, Instance] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    unsure: dict[str, set[bool]] = field(default_factory=dict)
    """Names with a creation or deletion that was pending when a life ended."""
    ends: int = 0
    made: int = 0
    had_power_loss: bool = False
    restarted: set[int] = field(default_factory=set)
    """Shards that recovered at the last end. Their records are durable."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.disk = FaultyDisk(SimulatedDisk(DATA))
        self.world = World(self.disk, shards=self.shards, file_bytes=160 << 10)
        self.world.start()

    # -- actions --------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Perform this many steps, and one orderly stop at the end."""
        try:
            for _ in range(steps):
                self.step()
            self._end("orderly")
        except BaseException as e:
            e.add_note(f"seed {self.seed}: {' | '.join(self.log[-25:])}")
            raise

    def step(self) -> None:
        what = self.rng.choices(
            [self._send, self._resend, self._make, self._delete, self._configure, self._idle, self._crash,
             self._fail_sync, self._end_somehow],
            [40, 8, 10, 3, 3, 8, 6, 2, 5],
        )[0]  # fmt: skip
        try:
            what()
        except Refused as e:
            raise AssertionError(f"refused: {e}") from e

    def _pick(self) -> Instance | None:
        return self.rng.choice(list(self.live.values())) if self.live else None

    def _send(self) -> None:
        instance = self._pick()
        if instance is None:
            return
        producer = self.rng.choice(PRODUCERS)
        batch = [self._frame(instance, producer) for _ in range(self.rng.choice([1, 1, 2, 5]))]
        self._note(f"send {instance.name} p{producer % 97} {batch[0].number}+{len(batch)}")
        instance.sent += batch
        self._push(instance, batch)

    def _frame(self, instance: Instance, producer: int) -> Sent:
        key = (instance.topic_id, producer)
        number = self.numbers.get(key, 0) + self.rng.choice([1, 1, 1, 4])
        self.numbers[key] = number
        size = self.rng.choice([1, 10, 200, 3_000, 3_000, 20_000])
        payloads = [self._payload(self.rng.randint(1, size)) for _ in range(self.rng.choice([1, 1, 3]))]
        frame = self.world.frame_for(instance.name, payloads, producer=producer, seq=number)
        return Sent(producer, number, payloads, frame)

    def _payload(self, size: int) -> bytes:
        """Return a different payload each time, so that a record identifies its frame."""
        self.made += 1
        return self.made.to_bytes(4, "little") + self.rng.randbytes(size)

    def _push(self, instance: Instance, batch: list[Sent]) -> None:
        entries = self.world.send(instance.name, [bytearray(sent.frame) for sent in batch])
        assert len(entries) == len(batch), "a frame was not settled exactly once"
        for sent, entry in zip(batch, entries, strict=True):
            error = entry_error(entry, instance.name)
            assert error is None, f"{instance.name} {sent.number}: {error}"
            assert int(entry[S_PRODUCER_SEQ]) == sent.number
            assert int(entry[S_EPOCH]) == instance.epoch
            self._acked(
                instance, sent, int(entry[S_FIRST_SEQ]), is_repeat=bool(entry[S_COUNT_STATUS] >> FLAGS_SHIFT)
            )

    def _acked(self, instance: Instance, sent: Sent, first: int, *, is_repeat: bool) -> None:
        if is_repeat:
            assert sent.first_seq in (0, first), (
                f"{instance.name} {sent.number}: {sent.first_seq} and now {first}"
            )
        elif instance.durability >= Durability.DISK:
            assert not (sent.acked and not sent.is_exposed), (
                f"{instance.name} {sent.number} is appended twice"
            )
            assert first > instance.highest, f"{instance.name}: number {first} is issued twice"
        sent.first_seq, sent.acked, sent.is_exposed = first, True, True
        if instance.durability >= Durability.DISK:
            instance.highest = max(instance.highest, first + len(sent.payloads) - 1)

    def _resend(self) -> None:
        """Send the latest acked frames of a producer again, in order, as after lost settlements."""
        instance = self._pick()
        if instance is None or instance.durability < Durability.DISK:
            return
        producer = self.rng.choice(PRODUCERS)
        mine = [sent for sent in instance.sent if sent.producer == producer][-self.rng.randint(1, 6) :]
        mine = [sent for sent in mine if sent.acked and not self._is_gone(instance, sent)]
        if mine:
            self._note(f"resend {instance.name} p{producer % 97} {[sent.number for sent in mine]}")
            self._push(instance, mine)

    def _is_gone(self, instance: Instance, sent: Sent) -> bool:
        return sent.first_seq not in dict(self.world.records(instance.name))

    def _make(self) -> None:
        absent = [name for name in CLASSES if name not in self.live]
        if not absent:
            return
        name = self.rng.choice(absent)
        self._note(f"make {name}")
        self.unsure[name] = {False, True}
        info = self.world.put_topic(name, durability=CLASSES[name].label)
        self.unsure.pop(name)
        self._born(name, info.topic_id, info.epoch)

    def _born(self, name: str, topic_id: int, epoch: int) -> None:
        assert epoch > self.epochs.get(name, 0), f"{name}: epoch {epoch} after {self.epochs.get(name)}"
        self.epochs[name] = epoch
        self.live[name] = Instance(name, topic_id, epoch, CLASSES[name])

    def _delete(self) -> None:
        instance = self._pick()
        if instance is None:
            return
        self._note(f"delete {instance.name}")
        self.unsure[instance.name] = {False, True}
        deleted = self.world.request(m.TopicDelete(instance.name))
        assert deleted.deleted
        self.unsure.pop(instance.name)
        del self.live[instance.name]

    def _configure(self) -> None:
        instance = self._pick()
        if instance is not None:
            self._note(f"configure {instance.name}")
            self.world.put_topic(instance.name, "merge", ttl_ms=self.rng.randint(1, 1 << 40))

    def _idle(self) -> None:
        self._note("idle")
        for _ in range(self.rng.randint(1, 4)):
            self.world.tick(self.rng.choice([0.01, 0.12]))
        for run in self.world.runs.values():
            run.core.check()

    # -- ends of lives --------------------------------------------------------------------------------

    def _crash(self) -> None:
        """Die at one of the next disk calls."""
        at = self.disk.calls["any"] + self.rng.randint(1, 12)
        self.disk.plan = [DiskFault("any", at, "halt")]
        self._note("crash soon")
        try:
            for _ in range(6):
                self.rng.choice([self._send, self._send, self._make, self._delete, self._idle])()
        except Halted:
            self._note("halted")
        self.disk.plan, self.disk.halted = [], False
        self._end(self.rng.choice(["kill", "power"]))

    def _fail_sync(self) -> None:
        """Let a sync fail and the process end. The successor reads the page cache (RF-42)."""
        self.disk.plan = [DiskFault("data_sync", self.disk.calls["data_sync"] + 1, "EIO")]
        self._note("sync fails")
        try:
            for _ in range(4):
                self.rng.choice([self._send, self._send, self._idle])()
        except DiskError:
            self._note("failed")
        self.disk.plan = []
        self._end("kill")
        if self.rng.random() < 0.7:
            self._end("power")

    def _end_somehow(self) -> None:
        self._end(self.rng.choice(["orderly", "kill", "shard", "power", "power"]))

    def _end(self, how: str) -> None:
        self._note(how)
        self.ends += 1
        self.had_power_loss = how == "power"
        if how == "orderly":
            self.world.stop()
        elif how == "kill":
            self.world.kill()
        elif how == "power":
            self.world.power_loss(self.rng.randrange(1 << 30))
        self.restarted = set(range(self.world.shards))
        if how == "shard":
            shard = self.rng.randrange(self.world.shards)
            self.restarted = {shard}
            self.world.kill_shard(shard)
            self.world.start_shard(shard)
        else:
            self._start(how)
            self.restarted = set(self.world.runs)
        self._compare(how)
        if self.rng.random() < 0.3:
            before = self._seen()
            self.world.kill()
            self.world.start()
            assert self._seen() == before, "a second recovery changed the state"

    def _start(self, how: str) -> None:
        """Start, possibly with another shard count, and possibly with crashes in recovery."""
        if self.changes_layout and self.rng.random() < 0.5:
            self.world.shards = self.rng.choice([1, 2, 3, 4])
            self._note(f"{self.world.shards} shards")
        for _ in range(self.rng.choice([0, 0, 0, 1, 3])):
            self.disk.plan = [DiskFault("any", self.disk.calls["any"] + self.rng.randint(1, 25), "halt")]
            try:
                self.world.start()
            except Halted:
                self._note("halted in recovery")
            self.disk.plan, self.disk.halted = [], False
            if self.rng.random() < 0.4:
                self.world.power_loss(self.rng.randrange(1 << 30))
                self._note("power")
                self.had_power_loss = True
            else:
                self.world.kill()
        self.world.start()

    # -- checks ---------------------------------------------------------------------------------------

    def _seen(self) -> dict[str, object]:
        return {
            name: (self.world.records(name), list(self.world.topic(name).lost), self.world.topic(name).epoch)
            for name in self.live
            if instance_class(self, name) is not Durability.EPHEMERAL
        }

    def _compare(self, how: str) -> None:
        self._settle_names()
        for instance in self.live.values():
            topic = self.world.topic(instance.name)
            assert (topic.topic_id, topic.epoch) == (instance.topic_id, instance.epoch), instance.name
            self._compare_records(instance, how)
        owners: dict[str, list[int]] = {}
        for shard, run in self.world.runs.items():
            run.core.check()
            for topic in run.core.directory.by_id.values():
                owners.setdefault(topic.name, []).append(shard)
        assert set(owners) == set(self.live), "the live topics differ from the model"
        assert all(len(shards) == 1 for shards in owners.values()), owners

    def _settle_names(self) -> None:
        """Accept either result of creations and deletions that were pending."""
        for name in list(self.unsure):
            del self.unsure[name]
            run = self.world.run_of(name)
            topic = run.core.directory.find(name)
            if topic is None:
                self.live.pop(name, None)
            elif name not in self.live:
                self._born(name, topic.topic_id, topic.epoch)
            assert home_shard(name, self.world.shards) in self.world.runs

    def _compare_records(self, instance: Instance, how: str) -> None:
        name, durability = instance.name, instance.durability
        found = dict(self.world.records(name))
        lost = self.world.topic(name).lost
        claimed = 0
        has_recovered = self.world.run_of(name).shard in self.restarted
        for sent in instance.sent:
            there = (
                [found.get(sent.first_seq + i) for i in range(len(sent.payloads))] if sent.first_seq else []
            )
            if sent.first_seq and there == sent.payloads:
                claimed += len(there)
                sent.is_exposed &= not has_recovered
                continue
            if not sent.first_seq:
                self._adopt(instance, sent, found)
                sent.is_exposed = not has_recovered
                claimed += len(sent.payloads) if sent.first_seq else 0
                continue
            if durability >= Durability.DISK:
                assert not any(there), f"{name} {sent.number}: torn into {there}"
                self._require_excused(instance, sent, lost, how)
            sent.first_seq, sent.acked = 0, False
        if durability >= Durability.DISK:
            assert claimed == len(found), f"{name}: {len(found)} records, {claimed} were submitted"
        else:
            submitted = {payload for sent in instance.sent for payload in sent.payloads}
            assert set(found.values()) <= submitted, f"{name}: a record was never submitted"
        if durability < Durability.DISK:
            self._forget(instance)

    def _adopt(self, instance: Instance, sent: Sent, found: dict[int, bytes]) -> None:
        """Accept a frame that was never acked if it exists completely and once."""
        places = [seq for seq, payload in found.items() if payload == sent.payloads[0]]
        assert len(places) <= 1, f"{instance.name} {sent.number} exists {len(places)} times"
        for seq in places:
            there = [found.get(seq + i) for i in range(len(sent.payloads))]
            assert there == sent.payloads, f"{instance.name} {sent.number} was recovered in part"
            sent.first_seq = seq

    def _require_excused(self, instance: Instance, sent: Sent, lost: list[tuple[int, int]], how: str) -> None:
        where = f"{instance.name} {sent.number} (record {sent.first_seq}) after {how}"
        if not sent.acked:
            return
        assert instance.durability is not Durability.FSYNC, f"{where}: acked and lost"
        assert sent.is_exposed, f"{where}: lost, although it survived an earlier restart"
        assert self.had_power_loss, f"{where}: acked and lost without a power loss"
        covered = any(a <= sent.first_seq and sent.first_seq + len(sent.payloads) - 1 <= b for a, b in lost)
        assert covered, f"{where}: lost and not reported in {lost}"

    @staticmethod
    def _forget(instance: Instance) -> None:
        """Drop lost frames of the weaker classes, which guarantee nothing across a restart."""
        instance.sent = [sent for sent in instance.sent if sent.first_seq]

    def _note(self, text: str) -> None:
        self.log.append(text)


def instance_class(story: Story, name: str) -> Durability:
    """Return the class of a live topic."""
    return story.live[name].durability
