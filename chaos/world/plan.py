"""The world of a seed: settings, and a list of steps, each with its own random generator.

Leaving out a step does not change the other steps, so a failing case can be made smaller. Parts of the steps
are left out, in ever smaller parts, while the case fails in the same way (Zeller's ddmin). Leaving out a step
also changes the order of the tasks. A smaller case may therefore pass although its steps could cause the
failure, so the result is small but not minimal.

Each seed enables a random subset of the faults with random weights (swarm testing). With all faults in every
seed, failures that need many faults of one kind would stay hidden.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STEPS = 100
GAP_S = 0.145
WORK = {"append": 40, "delete": 7, "put": 4, "drop": 2, "configure": 1, "checkpoint": 8}
FAULTS = {
    "kill": 9, "kill_all": 1, "kill_supervisor": 1, "power": 2, "disk": 12, "slow": 3, "pause": 3,
    "clock": 3, "full": 2, "restart": 1, "client": 3,
}  # fmt: skip
BUSY = {"append": 40, "delete": 16, "put": 3, "drop": 3, "configure": 1, "checkpoint": 30}
"""Weights of the operations in a busy seed."""
BUSY_SHARE = 0.2
"""Share of busy seeds: one topic, small segments, moves to the cold tier, and fewer faults (RF-118)."""
CLASSES = ("fsync", "disk")


@dataclass(frozen=True, slots=True)
class Step:
    """One operation or fault at one time."""

    index: int
    at_s: float
    kind: str
    salt: str

    def random(self) -> random.Random:
        """Return the step's own random generator."""
        return random.Random(self.salt)


def is_busy(seed: int) -> bool:
    """Return whether the seed keeps the storage busy."""
    return random.Random(f"busy {seed}").random() < BUSY_SHARE


def steps_of(seed: int) -> list[Step]:
    """Return all steps of a seed, in order of time."""
    rng = random.Random(f"steps {seed}")
    weights: dict[str, float] = dict(BUSY if is_busy(seed) else WORK)
    for fault, weight in FAULTS.items():
        if rng.random() < 0.6:
            weights[fault] = weight * rng.choice((0.4, 1.0) if is_busy(seed) else (0.4, 1.0, 2.5))
    kinds, numbers = list(weights), list(weights.values())
    found, at_s = [], 0.3
    for index in range(STEPS):
        at_s += rng.expovariate(1 / GAP_S)
        found.append(Step(index, at_s, rng.choices(kinds, numbers)[0], f"step {seed}/{index}"))
    return found


def options_of(seed: int) -> dict[str, Any]:
    """Return the settings of the engine and of its simulated surroundings."""
    rng = random.Random(f"options {seed}")
    busy = {
        "shards": 1, "reshards": False, "file_bytes": 64 << 10, "own_bytes": 0, "age_ms": 200,
        "has_cold": True, "hot": rng.choice((0, 1, 2, 3)), "record_bytes": 300,
        "topics": {"a": {"durability": rng.choice(CLASSES)}},
    }  # fmt: skip
    found = {
        "shards": rng.choice((1, 1, 2, 2, 3)),
        "reshards": rng.random() < 0.5,
        "file_bytes": rng.choice((64, 128, 256)) << 10,
        "flush_ms": rng.choice((5, 50, 100)),
        "segment_bytes": rng.choice((64 << 10, 1 << 20)),
        "own_bytes": rng.choice((0, 4 << 10, 32 << 10)),
        "age_ms": rng.choice((200, 1_000, 3_000)),
        "compression": rng.choice(("none", "none", "lz4", "zstd")),
        "has_cold": rng.random() < 0.7,
        "hot": rng.choice((0, 0, 1, 2)),
        "delay_s": rng.choice((0.0002, 0.001, 0.01)),
        "switching": rng.choice((0.01, 0.05, 0.3)),
        "says_low": rng.random() < 0.5,
        "record_bytes": rng.choice((30, 300, 3_000)),
        "topics": topics_of(rng),
    }
    return found | busy if is_busy(seed) else found


def topics_of(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Return the topics and their configurations, which are the same in each of their lives."""
    found: dict[str, dict[str, Any]] = {}
    for name in "abcde"[: rng.randrange(2, 6)]:
        config: dict[str, Any] = {"durability": rng.choice(CLASSES)}
        if rng.random() < 0.2:
            config["cap_records"] = rng.choice((5, 20, 60))
        if rng.random() < 0.15:
            config["ttl_ms"] = rng.choice((500, 4_000))
        found[name] = config
    return found


_CASE = re.compile(r"^seed=(\d+)(?: steps=(\d+)\.\.(\d+))?(?: without=([\d,]*))?$")


class Failed(AssertionError):
    """A seed in which a guarantee did not hold, with its events."""

    def __init__(self, what: str, story: str) -> None:
        super().__init__(what)
        self.what, self.story = what, story


@dataclass(frozen=True, slots=True)
class Case:
    """A seed, and the steps of it that are executed."""

    seed: int
    first: int = 0
    upto: int = STEPS
    without: frozenset[int] = frozenset()

    def __str__(self) -> str:
        left_out = ",".join(map(str, sorted(self.without)))
        return f"seed={self.seed} steps={self.first}..{self.upto}" + (
            f" without={left_out}" if left_out else ""
        )

    @property
    def kept(self) -> list[int]:
        """Indexes of the executed steps."""
        return [index for index in range(self.first, self.upto) if index not in self.without]

    @classmethod
    def of(cls, seed: int, kept: list[int]) -> Case:
        """Return the case that executes exactly these steps."""
        if not kept:
            return cls(seed, 0, 0)
        first, upto = min(kept), max(kept) + 1
        return cls(seed, first, upto, frozenset(range(first, upto)) - frozenset(kept))


def parse_case(text: str) -> Case:
    """Parse a case. Raises ValueError."""
    found = _CASE.match(text.strip())
    if found is None:
        raise ValueError(f"not a case of this class: {text!r}; like seed=1 steps=0..{STEPS} without=3,17")
    seed, first, upto, without = found.groups()
    left_out = frozenset(int(each) for each in (without or "").split(",") if each)
    return Case(int(seed), int(first or 0), int(upto or STEPS), left_out)


RUNS_MAX = 400
"""Maximum number of cases that `shrink` runs."""
KIND_WORDS = 6


def kind_of(what: str) -> str:
    """Return the kind of a failure: its text without numbers and short words, which differ between runs."""
    words = re.sub(r"[^a-zA-Z ]", " ", what).split()
    return " ".join(word for word in words if len(word) > 2 or word == "is")[: 12 * KIND_WORDS]


def shrink(case: Case, fails: Callable[[Case], str], runs_max: int = RUNS_MAX) -> Case:
    """Return the smallest case found that fails as `case` does.

    `fails` returns the failure of a case, or "". Raises ValueError if `case` does not fail.
    """
    wanted = kind_of(fails(case))
    if not wanted:
        raise ValueError(f"{case} does not fail")
    kept, pieces, runs = case.kept, 2, 1
    while len(kept) > 1 and runs < runs_max:
        size = -(-len(kept) // pieces)
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            runs += 1
            if kind_of(fails(Case.of(case.seed, fewer))) == wanted:
                kept, pieces = fewer, max(pieces - 1, 2)
                break
            if runs >= runs_max:
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(kept))
    return Case.of(case.seed, kept)
