"""All short histories, all cuts, all images. Each image is judged once, under a name that reproduces it."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from chaos.rigs import storage
from chaos.rigs.judge import KILL, KILL_SHARD, POWER_LOSS, CrashKind
from chaos.states.images import Image, Tree
from chaos.states.judge import LATER_SALTS, Depth, judge, judge_trap, new_world
from chaos.states.offline import Offline
from chaos.states.workload import ALPHABET, DIRECTORIES, Facts, History, Workload
from ringlog.drill.checks import GuaranteeBroken
from ringlog.testing import disk as d
from tests.support.shard_world import SimulatedBoardMarks

JUDGED_PER_COLLECTION = 200
Steps = tuple[str, ...]


@dataclass(slots=True)
class Tally:
    """Counts of the work done, which a plan compares with its minimum counts."""

    histories: int = 0
    cuts: int = 0
    images: int = 0
    judged: int = 0
    """Number of distinct images that were recovered twice."""
    acked: int = 0
    """Sum over judged images of the frames that had to exist."""
    deleted: int = 0
    """Sum over judged images of the removals whose records had to be deleted."""
    recoveries: int = 0
    """Number of judged images after a crash inside a recovery."""
    sent_again: int = 0
    went_on: int = 0
    verified: int = 0
    """Number of judged images that the offline verifier checked."""
    seen: set[int] = field(default_factory=set)
    """Hashes of the judged cases."""

    def is_new(self, image: Image, facts: Facts, how: CrashKind) -> bool:
        """Return whether this case was not judged yet, and remember it."""
        self.images += 1
        key = hash((image.key(), facts.key, how.name, facts.marks.durable if how.keeps_board else 0))
        if key in self.seen:
            return False
        self.seen.add(key)
        return True


@dataclass(frozen=True, slots=True)
class Share:
    """Shares of the judged images that get further checks, in addition to two recoveries."""

    recoveries_every: int = 40
    """One image in this many is also crashed inside its recovery."""
    recovery_cuts: int = 1 << 30
    """Maximum number of calls of such a recovery after which it is cut. The calls are drawn from the seed."""
    sends_again_every: int = 1
    goes_on_every: int = 25
    verified_every: int = 1
    """One image in this many is also compared with the offline verifier, if there is one."""
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """The histories that one of several processes explores, selected by their first two steps.

    An explored prefix is not judged again, so histories with the same first steps belong to one process.
    """

    number: int = 0
    of: int = 1

    def has(self, steps: Steps) -> bool:
        """Return whether this part contains a history."""
        if self.of == 1:
            return True
        at = 0
        for step in steps[:2]:
            at = at * len(ALPHABET) + ALPHABET.index(step)
        return at % self.of == self.number

    @property
    def suffix(self) -> str:
        """Suffix of the names of this part's figures."""
        return f"_{self.number}" if self.number else ""


ALONE = Part()


def histories(longest: int, steps: Iterable[str] = ALPHABET) -> Iterator[Steps]:
    """Yield every sequence of up to `longest` steps, shorter ones first."""
    names = tuple(steps)
    for length in range(1, longest + 1):
        yield from itertools.product(names, repeat=length)


def explore(
    chosen: Iterable[Steps],
    *,
    seconds: float = 1e9,
    share: Share | None = None,
    offline: Offline | None = None,
) -> Tally:
    """Judge every image of every cut of these histories within `seconds`; return the counts.

    Raises GuaranteeBroken, which names the failed case.
    """
    explorer = Explorer(Tally(), share or Share(), offline)
    until = time.monotonic() + seconds
    for steps in itertools.takewhile(lambda _: time.monotonic() < until, chosen):
        explorer.one(steps)
    return explorer.tally


def record(steps: Iterable[str], salts: int = 0) -> tuple[History, Tree]:
    """Run a history; return it with the disk before it. Salts of log files start after `salts`."""
    tree = Tree()
    for path in DIRECTORIES:
        tree.make_durable_dir(path)
    return Workload(salts).run(steps), tree


def cuts_of(history: History, tree: Tree) -> Iterator[tuple[int, Facts]]:
    """Yield (operation number, facts) of each operation after which a crash makes a difference.

    Applies the operations to `tree`.
    """
    marks = SimulatedBoardMarks()
    for number, operation in enumerate(history.operations):
        if isinstance(operation, d.DiskNote):
            marks = operation.payload if operation.tag == "marks" else marks
            if operation.tag not in {"acked", "granted"}:
                continue
        else:
            tree.do(operation)
        yield number, Facts(history, number, marks)


@dataclass(slots=True)
class Explorer:
    """Explores histories one after another."""

    tally: Tally
    share: Share
    offline: Offline | None = None
    part: Part = ALONE
    _again: dict[Hashable, bytes] = field(default_factory=dict)
    _done: dict[Steps, int] = field(default_factory=dict)
    """Number of operations by explored history. Cuts within an explored prefix are not judged again."""

    def one(self, steps: Steps) -> None:
        """Judge every image of one history."""
        history, tree = record(steps)
        known = max((self._known(steps[:length]) for length in range(1, len(steps))), default=0)
        for number, facts in cuts_of(history, tree):
            if number >= known:
                self.tally.cuts += 1
                self._cut(tree, facts, Case(steps, number))
        self._done[steps] = len(history.operations)
        self.tally.histories += 1

    def _known(self, steps: Steps) -> int:
        """Return the number of operations of a prefix if it is explored, else 0.

        A prefix of another process counts as explored, because that process also explores short histories
        first.
        """
        if steps not in self._done and not self.part.has(steps):
            self._done[steps] = len(record(steps)[0].operations)
        return self._done.get(steps, 0)

    def _cut(self, tree: Tree, facts: Facts, case: Case) -> None:
        tally = self.tally
        for image, how in cases(tree, case.cut):
            if not tally.is_new(image, facts, how):
                continue
            with case.named(how.name, image.key()):
                judge(image, facts, how, depth=self._depth())
            self._count(facts)
            if how is not KILL_SHARD and tally.judged % self.share.recoveries_every == 0:
                self._recovery(image, facts, how, case)
        durable, cached = tree.as_synced(), tree.as_killed()
        trap = CrashKind(f"trap {durable.key()!r}", is_power_loss=True)
        if durable.key() != cached.key() and tally.is_new(cached, facts, trap):
            with case.named(TRAP, durable.key()):
                judge_trap(durable, cached, facts)
            self._count(facts)

    def _count(self, facts: Facts) -> None:
        self.tally.judged += 1
        if self.tally.judged % JUDGED_PER_COLLECTION == 0:
            gc.collect()  # each image leaves an engine in reference cycles
        self.tally.acked += facts.model.acked
        self.tally.deleted += facts.model.granted

    def _depth(self) -> Depth:
        tally, share = self.tally, self.share
        sends_again = tally.judged % share.sends_again_every == 0
        goes_on = tally.judged % share.goes_on_every == 0
        tally.sent_again += sends_again
        tally.went_on += goes_on
        offline = self.offline if tally.judged % share.verified_every == 0 else None
        tally.verified += offline is not None
        return Depth(offline, sends_again, goes_on, self._again)

    def _recovery(self, image: Image, facts: Facts, how: CrashKind, case: Case) -> None:
        """Crash inside the recovery of an image or inside the actors' later work, and recover again."""
        tally = self.tally
        operations = recovery_of(image, how)
        rng = random.Random(f"{self.share.seed}/{case.text(how.name, image.key())}")
        count = min(self.share.recovery_cuts, len(operations))
        chosen = set(rng.sample(range(len(operations)), count))
        tree = Tree.of(image)
        for number, operation in enumerate(operations):
            tree.do(operation)
            if number not in chosen:
                continue
            for again in tree.after_power_loss(number):
                if tally.is_new(again, facts, POWER_LOSS):
                    with case.named(how.name, image.key(), number, again.key()):
                        is_verified = tally.recoveries % self.share.verified_every == 0
                        depth = Depth(self.offline if is_verified else None, False, again=self._again)
                        judge(again, facts, POWER_LOSS, incarnation=2_000, depth=depth)
                    tally.judged += 1
                    tally.recoveries += 1


def recovery_of(image: Image, how: CrashKind) -> list[d.Operation]:
    """Return the disk calls of an image's recovery and of a round of compactor, relocator and reclaimer."""
    disk = d.RecordingDisk(image.mount())
    world = new_world(disk, 1_000)
    if how.is_power_loss:
        world.reboot()
    world.start()
    with storage.counted_salts(LATER_SALTS):
        storage.seal(world)
        storage.relocate(world)
        storage.reclaim(world)
    return disk.operations


def cases(tree: Tree, seed: int) -> Iterator[tuple[Image, CrashKind]]:
    """Yield every image of a cut with the kind of crash that leaves it."""
    yield tree.as_killed(), KILL
    yield tree.as_killed(), KILL_SHARD
    for image in tree.after_power_loss(seed):
        yield image, POWER_LOSS


TRAP = "failed sync"
HOWS = {how.name: how for how in (KILL, KILL_SHARD, POWER_LOSS)}


@dataclass(frozen=True, slots=True)
class Case:
    """A cut of a history."""

    steps: tuple[str, ...]
    cut: int
    """Number of the last executed operation. Notes count as operations."""

    def text(self, how: str, key: bytes, *again: object) -> str:
        """Return `STEP+STEP@CUT:KIND:KEY`, with `:CALL:KEY` appended for a crash inside the recovery."""
        more = "".join(f":{each.hex() if isinstance(each, bytes) else each}" for each in again)
        return f"{'+'.join(self.steps)}@{self.cut}:{how}:{key.hex()}{more}"

    @contextmanager
    def named(self, how: str, key: bytes, *again: object) -> Iterator[None]:
        """Add the name of the case to a GuaranteeBroken that is raised in the block."""
        try:
            yield
        except GuaranteeBroken as e:
            case = self.text(how, key, *again)
            raise GuaranteeBroken(f"{case}: {e}", case=case) from e


def parse(text: str) -> tuple[Case, str, bytes, tuple[int, bytes] | None]:
    """Parse a case: return (cut, kind of crash, key, (call of the recovery, key) or None).

    Raises ValueError.
    """
    steps, at, rest = text.partition("@")
    parts = rest.split(":")
    if not at or len(parts) not in (3, 5) or parts[1] not in {*HOWS, TRAP}:
        raise ValueError(f"not a case of this class: {text}")
    again = (int(parts[3]), bytes.fromhex(parts[4])) if len(parts) == 5 else None
    return Case(tuple(steps.split("+")), int(parts[0])), parts[1], bytes.fromhex(parts[2]), again
