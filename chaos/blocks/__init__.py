"""Block-level replay: writes of a real file system, cut at every flush, in part and out of order.

A shard runs on ext4 or XFS over a block store that records every write and flush. Then the device is put into
states that a power cut may leave: everything up to a flush, plus some of the later writes, the last of them
perhaps cut at a sector.

Each state is mounted (its journal is replayed), read, verified, recovered and judged. It must also be a state
that chaos/states allows after the same disk calls. Otherwise the rules of chaos/states are too narrow.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from chaos.blocks.recorded import EMPTY, FOLDER, Recorded, read_image, record
from chaos.doctor import need_root
from chaos.order import Account, CannotRun, Order
from chaos.rigs.blockstore import StoredVolume, stored_volume
from chaos.rigs.judge import POWER_LOSS
from chaos.rigs.model import Model
from chaos.rigs.mount import KINDS, RigError
from chaos.states.images import Image, Tree
from chaos.states.judge import judge
from chaos.states.membership import why_illegal
from ringlog.drill.checks import GuaranteeBroken, verify
from ringlog.testing import disk as d
from tests.support.shard_world import SimulatedBoardMarks

SETTINGS = {"steps": 14, "subsets": 4, "states_per_s": 25, "states_min": 330}
"""`steps`: of one life. `subsets`: states of each epoch besides those at its ends. `states_per_s`: number of
states selected per available second, over the whole life; a faster host runs more lives. `states_min`:
minimum number of states, however slow the host is."""
SECTOR_BYTES = 512
WHOLE_SUBSETS_MAX = 3
"""For epochs with at most this number of writes, every subset is tried."""
LIVES_MAX = 100_000
_TORN_METADATA = frozenset({errno.EBADMSG, errno.EUCLEAN})
"""A block that the file system writes in place (ext4's superblock) was cut, so that its checksum fails. The
file system reports it and needs a repair. No data of ringlog is involved."""


@dataclass(frozen=True, slots=True)
class State:
    """A state of the device: the first `base` entries, plus `extra` ones, the last of them perhaps cut."""

    base: int
    extra: tuple[int, ...]
    last_bytes: int
    cut_ns: int
    """Power fails just before this time (ns). Earlier replies are owed."""


def states(recorded: Recorded, rng: random.Random, subsets: int) -> Iterator[State]:
    """Yield states for every flush: no later write, all writes up to the next flush, and some of them."""
    entries = recorded.entries
    ends = [i for i, entry in enumerate(entries) if not entry.is_write]
    for before, after in zip([-1, *ends], [*ends, len(entries)], strict=True):
        writes = list(range(before + 1, after))
        cut_ns = entries[after].at_ns if after < len(entries) else entries[-1].at_ns + 1
        base = before + 1
        yield State(base, (), 0, cut_ns)
        for extra in _subsets(writes, rng, subsets):
            last_bytes = 0
            length = entries[extra[-1]].length
            if length > SECTOR_BYTES and rng.random() < 0.5:
                last_bytes = rng.randrange(SECTOR_BYTES, length, SECTOR_BYTES)
            yield State(base, extra, last_bytes, cut_ns)


def _subsets(writes: list[int], rng: random.Random, count: int) -> Iterator[tuple[int, ...]]:
    if not writes:
        return
    if len(writes) <= WHOLE_SUBSETS_MAX:
        for bits in range(1, 1 << len(writes)):
            yield tuple(each for i, each in enumerate(writes) if bits >> i & 1)
        return
    yield tuple(writes)
    for _ in range(count):
        match rng.randrange(4):
            case 0:
                chosen = writes[: rng.randint(1, len(writes))]
            case 1:
                chosen = [rng.choice(writes)]
            case 2:
                left_out = rng.choice(writes)
                chosen = [each for each in writes if each != left_out]
            case _:
                chosen = [each for each in writes if rng.random() < 0.5] or writes[:1]
        if rng.random() < 0.3:
            rng.shuffle(chosen)
        yield tuple(chosen)


class _Facts(NamedTuple):
    """Facts for the judge. After a power failure no board is left."""

    model: Model
    marks: SimulatedBoardMarks = SimulatedBoardMarks()


@dataclass(slots=True)
class _Checks:
    """Judges the states of one recorded life. Equal states are judged once."""

    recorded: Recorded
    account: Account
    judged: set[tuple[bytes, int, int]] = field(default_factory=set)
    tree: Tree = field(default_factory=lambda: Tree.of(EMPTY))
    done: int = 0

    def check(self, stored: StoredVolume, state: State) -> None:
        """Mount a state, read it and run all checks. Raises GuaranteeBroken."""
        stored.store.show(state.base, state.extra, state.last_bytes)
        stored.loop.forget()
        stored.volume.up()
        try:
            image = read_image(stored.volume.root)
            model = self.recorded.model.until(state.cut_ns, knows_places=True)
            key = (image.key(), model.owed, len(model.frames))
            is_new = key not in self.judged
            self.judged.add(key)
            if is_new and "/data/wal" in image.directories:
                verify(stored.volume.root / FOLDER)
        finally:
            stored.volume.down()
        rows = ("RF-62",) if state.extra else ("RF-62", "RF-64")
        self.account.count_work("block_states", 1, *rows)
        self._cross_check(image, state.cut_ns)
        if is_new:
            judge(image, _Facts(model), POWER_LOSS, has_cold=False)
            self.account.count_work("different states judged")
            self.account.count_work("acked frames held to", model.owed)

    def _cross_check(self, image: Image, cut_ns: int) -> None:
        done, is_under_way = self.recorded.calls_at(cut_ns)
        operations = self.recorded.operations
        for operation in operations[self.done : done]:
            _apply(self.tree, operation)
        self.done = max(done, self.done)
        why = why_illegal(self.tree, image)
        if why and is_under_way:
            again = Tree.of(EMPTY)
            for operation in operations[: done + 1]:
                _apply(again, operation)
            why = why_illegal(again, image)
        if why:
            last = [str(each)[:90] for each in operations[max(done - 3, 0) : done + 1]]
            raise GuaranteeBroken(f"no rule of chaos/states makes this state: {why}; after {last}")
        self.account.count_work("states cross-checked")


def _apply(tree: Tree, operation: d.Operation) -> None:
    if not isinstance(operation, d.DiskNote):
        tree.do(operation)


def live(
    stored: StoredVolume, kind: str, number: int, order: Order, account: Account, until: float = 1e18
) -> None:
    """Record one life and check its states. Faults become findings."""
    settings = order.choose(SETTINGS)
    rng = order.random(kind, number)
    recorded = record(stored, rng, settings["steps"])
    account.count_work("block writes recorded", sum(entry.is_write for entry in recorded.entries))
    account.count_work(f"lives on {kind}")
    checks = _Checks(recorded, account)
    every = list(enumerate(states(recorded, rng, settings["subsets"])))
    room = max(until - time.monotonic(), 1.0) * settings["states_per_s"]
    if len(every) > room:
        every = sorted(rng.sample(every, int(room)), key=lambda each: each[0])
    for index, state in every:
        if time.monotonic() > until:
            break
        try:
            checks.check(stored, state)
        except GuaranteeBroken as e:
            story = f"{e}\nsteps {recorded.steps}\nstate {state}"
            account.report_finding(
                f"block replay on {kind}: {str(e)[:300]}", f"{kind}/{number}/{index}", story
            )
        except OSError as e:
            if state.last_bytes and e.errno in _TORN_METADATA:
                account.count_work("states with a torn block that the file system itself refuses")
                continue
            # A journal that cannot be replayed is a fault of the file system. It is reported all the same.
            account.report_finding(
                f"{kind} does not mount: {e}", f"{kind}/{number}/{index}", f"state {state}"
            )


def run(order: Order, account: Account) -> None:
    """Run lives on both file systems in turn until the time is over."""
    settings = order.choose(SETTINGS)
    need_root()
    until = time.monotonic() + order.seconds
    share = order.seconds / (2 * len(KINDS))
    for number in range(LIVES_MAX):
        kind = KINDS[number % len(KINDS)]
        try:
            with stored_volume(kind, order.scratch) as stored:
                live(stored, kind, number, order, account, time.monotonic() + share)
        except (RigError, OSError) as e:
            account.skip(f"block replay on {kind}", str(e))
        is_enough = account.counts["block_states"] >= settings["states_min"]
        is_over = time.monotonic() > until or order.is_enough(account.counts)
        if (is_enough and is_over) or len(account.skipped) == len(KINDS):
            break
    if not account.counts["block_states"]:
        raise CannotRun("; ".join(skip.why for skip in account.skipped))


def replay(order: Order, case: str) -> None:
    """Repeat the life of `KIND/NUMBER/STATE`.

    The kernel decides the order of block writes, so all states of the life are judged. Needs a private mount
    namespace.
    """
    kind, number, _ = case.split("/")
    account = Account()
    with stored_volume(kind, order.scratch) as stored:
        live(stored, kind, int(number), order, account)
    account.print_report()
